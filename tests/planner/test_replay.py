"""The replay against seconds counted by hand, on schedules written by hand."""

import dataclasses
import json

import pytest
from programs import build

from zerojax.hlo.program import read_program
from zerojax.planner.gpus import load_target
from zerojax.planner.replay import replay, replay_text
from zerojax.planner.time import Links
from zerojax.planner.trace import layer_windows, write_trace

MESH = {"node": 2, "local": 2}
# A product of (1000, 1000) float32 matrices is 2e9 FLOP, at half the rate of bfloat16: 2 s. Its 12 MB and other
# kernels' bytes take 1 s for 6 MB.
LINKS = Links(
    node_bandwidth=1e6, link_bandwidth=1e6, memory_bandwidth=6e6, flops=2e9, node_latency=0.5, link_latency=0.25
)
DOT = "dot({a}, {b}), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}"
NODE, LOCAL, ALL = "{{0,2},{1,3}}", "{{0,1},{2,3}}", "{{0,1,2,3}}"


def program(*body, extra=""):
    """A program of parameters %x: f32[1000,1000] and %s: f32[250000] (1 MB) with these lines."""
    lines = "\n".join(f"  {line}" for line in body)
    return read_program(
        f"HloModule hand, is_scheduled=true, num_partitions=4\n\n{extra}\n"
        "ENTRY %main (x: f32[1000,1000], s: f32[250000]) -> f32[1000,1000] {\n"
        "  %x = f32[1000,1000]{1,0} parameter(0)\n  %s = f32[250000]{0} parameter(1)\n" + lines + "\n}\n",
        MESH,
    )


def gather(name, groups, start=True):
    """An all-gather of %s: 1 MB (0.5 MB x 2) per device over one axis, 2 MB into a node over "node"."""
    opcode = "all-gather-start" if start else "all-gather"
    shape = "(f32[250000]{0}, f32[500000]{0})" if start else "f32[500000]{0}"
    return f"%{name} = {shape} {opcode}(%s), channel_id=1, replica_groups={groups}, dimensions={{0}}"


def done(name, start):
    return f"%{name} = f32[500000]{{0}} all-gather-done(%{start})"


def dot(name, left="%x"):
    return f"%{name} = f32[1000,1000]{{1,0}} " + DOT.format(a=left, b="%x")


def test_kernels_take_the_larger_of_flop_and_bytes():
    found = replay(program(dot("y"), "ROOT %z = f32[1000,1000]{1,0} copy(%y)"), LINKS)
    assert found.seconds == pytest.approx(2 + 8 / 6)
    assert found.busy["compute"] == found.seconds


@pytest.mark.parametrize(
    ("groups", "seconds", "lanes"),
    [
        (NODE, 0.5 + 2, {"between": 2.5, "inside": 0}),  # 2 devices of a node receive 1 MB each
        (LOCAL, 0.25 + 1, {"between": 0, "inside": 1.25}),
    ],
)
def test_a_blocking_collective_stops_compute_for_its_bytes_and_latency(groups, seconds, lanes):
    found = replay(program(gather("g", groups, start=False), dot("y")), LINKS)
    assert found.seconds == pytest.approx(2 + seconds)
    assert found.exposed == pytest.approx(seconds)
    assert found.hidden_share == pytest.approx(0)
    assert {lane: found.busy[lane] for lane in lanes} == pytest.approx(lanes)


def test_an_asynchronous_collective_is_exposed_by_what_compute_does_not_cover():
    found = replay(program(gather("g", NODE), dot("y"), done("d", "g")), LINKS)
    assert found.seconds == pytest.approx(2.5)
    assert found.exposed == pytest.approx(0.5)
    assert found.collectives[0].exposed == pytest.approx(0.5)
    assert found.ideal == pytest.approx(2.5)


@pytest.mark.parametrize(("limit", "seconds"), [(1, 2.5 + 1.25), (2, 2.5)])
def test_collectives_of_both_networks_run_side_by_side_only_where_the_limit_lets_them(limit, seconds):
    body = (gather("g", NODE), gather("h", LOCAL), dot("y"), done("d", "g"), done("e", "h"))
    assert replay(program(*body), LINKS, overlap_limit=limit).seconds == pytest.approx(seconds)


def test_collectives_of_one_network_wait_for_each_other_whatever_the_limit():
    body = (gather("g", LOCAL), gather("h", LOCAL), done("d", "g"), done("e", "h"))
    assert replay(program(*body), LINKS, overlap_limit=4).seconds == pytest.approx(2.5)


LOOP = """%body (p: (s32[], f32[1000,1000], f32[250000])) -> (s32[], f32[1000,1000], f32[250000]) {{
  %p = (s32[], f32[1000,1000]{{1,0}}, f32[250000]{{0}}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[1000,1000]{{1,0}} get-tuple-element(%p), index=1
  %s = f32[250000]{{0}} get-tuple-element(%p), index=2
  {first}
  {second}
  {third}
  ROOT %t = (s32[], f32[1000,1000]{{1,0}}, f32[250000]{{0}}) tuple(%i, %y, %s)
}}

%condition (p: (s32[], f32[1000,1000], f32[250000])) -> pred[] {{
  %p = (s32[], f32[1000,1000]{{1,0}}, f32[250000]{{0}}) parameter(0)
  ROOT %more = pred[] constant(true)
}}
"""


@pytest.mark.parametrize("trips", [1, 2, 3, 1000])
def test_a_loop_takes_its_trips_and_each_collective_is_counted_in_all_of_them(trips):
    body = LOOP.format(first=gather("g", NODE), second=dot("y"), third=done("d", "g"))
    state = "(s32[], f32[1000,1000]{1,0}, f32[250000]{0})"
    found = replay(
        program(
            "%zero = s32[] constant(0)",
            f"%t = {state} tuple(%zero, %x, %s)",
            f"ROOT %w = {state} while(%t), condition=%condition, body=%body, "
            f'backend_config={{"known_trip_count":{{"n":"{trips}"}}}}',
            extra=body,
        ),
        LINKS,
    )
    assert found.seconds == pytest.approx(2.5 * trips)
    (one,) = found.collectives
    assert one.executions == trips
    assert one.exposed == pytest.approx(0.5 * trips)
    assert found.busy["compute"] == pytest.approx(2 * trips)


FUSED = """%fused (p: f32[40,250000], i: s32[]) -> f32[1,250000] {
  %p = f32[40,250000]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %cut = f32[1,250000]{1,0} dynamic-slice(%p, %i, %zero), dynamic_slice_sizes={1,250000}
}

%updating (p: f32[40,250000], u: f32[1,250000], i: s32[]) -> f32[40,250000] {
  %p = f32[40,250000]{1,0} parameter(0)
  %u = f32[1,250000]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %zero = s32[] constant(0)
  ROOT %put = f32[40,250000]{1,0} dynamic-update-slice(%p, %u, %i, %zero)
}
"""


def test_a_fusion_touches_the_slice_it_reads_and_the_update_it_writes():
    found = replay(
        program(
            "%stack = f32[40,250000]{1,0} constant({...})",
            "%i = s32[] constant(0)",
            "%cut = f32[1,250000]{1,0} fusion(%stack, %i), kind=kLoop, calls=%fused",
            "ROOT %put = f32[40,250000]{1,0} fusion(%stack, %cut, %i), kind=kLoop, calls=%updating",
            extra=FUSED,
        ),
        LINKS,
    )
    assert found.seconds == pytest.approx((2 + 2) / 6, rel=1e-4)  # 1 MB in and out, twice, and an index


def looped(trips):
    """A gather between nodes of which the product of each iteration hides 2 of 2.5 seconds."""
    state = "(s32[], f32[1000,1000]{1,0}, f32[250000]{0})"
    return program(
        "%zero = s32[] constant(0)",
        f"%t = {state} tuple(%zero, %x, %s)",
        f"ROOT %w = {state} while(%t), condition=%condition, body=%body, "
        f'backend_config={{"known_trip_count":{{"n":"{trips}"}}}}',
        extra=LOOP.format(first=gather("g", NODE), second=dot("y"), third=done("d", "g")),
    )


def test_a_trace_holds_each_slice_on_its_track_with_bytes_and_flop(tmp_path):
    found = replay(looped(3), LINKS, record=True)
    write_trace(found, tmp_path / "step.json", names={"g": "['w']"}, title="a model")
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    tracks = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    slices = [e for e in events if e["ph"] == "X"]
    by_track = {}
    for e in slices:
        by_track.setdefault(tracks[e["tid"]], []).append(e)
    products, travels = by_track["compute"], by_track["between nodes"]
    assert [e["dur"] for e in products] == pytest.approx([2e6] * 3)
    assert {e["args"]["FLOP"] for e in products} == {2 * 1000**3}
    assert [e["ts"] for e in travels] == pytest.approx([0, 2.5e6, 5e6])
    assert {(e["name"], e["args"]["bytes"]) for e in travels} == {("g ['w']", 2_000_000)}
    assert [e["dur"] for e in by_track["compute waits for"]] == pytest.approx([0.5e6] * 3)
    assert [e["name"] for e in by_track["loops"]] == ["w 1/3", "w 2/3", "w 3/3"]


def test_the_window_of_a_layer_is_an_iteration_from_the_middle():
    (window,) = layer_windows(replay(looped(5), LINKS, record=True))
    assert (window.begin, window.end) == pytest.approx((5.0, 7.5))
    assert "iteration 3 of 5" in window.title
    (whole,) = layer_windows(replay(program(dot("y")), LINKS, record=True))
    assert (whole.begin, whole.end) == pytest.approx((0.0, 2.0))


def test_kernels_in_a_fused_scope_take_their_share_of_the_flop_and_no_bytes():
    def named(line, scope):
        return f'{line}, metadata={{op_name="jit(f)/{scope}/dot_general"}}'

    body = named(dot("y"), "flash_attention"), named("ROOT %z = f32[1000,1000]{1,0} copy(%y)", "flash_attention")
    assert replay(program(*body), LINKS).seconds == pytest.approx(1)  # half of its two seconds
    assert replay(program(*body), LINKS, fused={"flash_attention": 0.25}).seconds == pytest.approx(0.5)
    assert replay(program(*body), LINKS, fused={}).seconds == pytest.approx(2 + 8 / 6)


def test_small_products_are_slower_and_every_kernel_takes_its_launch():
    links = dataclasses.replace(LINKS, memory_bandwidth=1e12, core_count=100)
    # 8 x 4 tiles of (128, 256): of 100 multiprocessors 68 are idle, and the last tiles are not full.
    seconds = replay(program(dot("y")), links).seconds
    assert seconds == pytest.approx(2 * 100 / (1000 * 1000 / (128 * 256)))
    launched = dataclasses.replace(links, launch_seconds=7.0)
    assert replay(program(dot("y")), launched).seconds == pytest.approx(7)


BRANCHES = """%slow (p: f32[1000,1000]) -> f32[1000,1000] {
  %x = f32[1000,1000]{1,0} parameter(0)
  ROOT %y = f32[1000,1000]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%quick (p: f32[1000,1000]) -> f32[1000,1000] {
  ROOT %x = f32[1000,1000]{1,0} parameter(0)
}
"""


def test_of_branches_the_slowest_counts():
    line = "ROOT %c = f32[1000,1000]{1,0} conditional(%n, %x, %x), branch_computations={%quick, %slow}"
    assert replay(program("%n = s32[] constant(0)", line, extra=BRANCHES), LINKS).seconds == pytest.approx(2)


def test_a_text_is_replayed_with_the_adapters_of_the_gpus_of_a_node():
    text, target = build.text_of("layers.jax-0.12.0.1"), load_target("h100")
    seconds = {
        bandwidth: replay_text(text, {"node": 2, "local": 8}, target, bandwidth=bandwidth).seconds
        for bandwidth in (None, "400GB/s", "200GB/s")
    }
    assert seconds[None] == seconds["400GB/s"] < seconds["200GB/s"]  # eight adapters of 400 Gbit/s
    one_node = replay_text(text, {"node": 2, "local": 8}, target, node_axes=())
    assert one_node.busy["between"] == 0 < one_node.busy["inside"]
    # Half the peak takes twice as long for the products, and no less for anything else.
    faster = replay_text(text, {"node": 2, "local": 8}, target, efficiency=1.0)
    slower = replay_text(text, {"node": 2, "local": 8}, target, efficiency=0.5)
    assert faster.busy["compute"] < slower.busy["compute"] <= 2 * faster.busy["compute"]


def test_copies_to_and_from_the_host_take_its_link_one_after_the_other_beside_compute():
    # 1 MB out and 1 MB in over 0.25 MB/s: 4 s each, and of the second what 2 s of a product do not hide.
    slow = dataclasses.replace(LINKS, host_bandwidth=0.25e6)
    found = replay(
        program(
            "%out = (f32[250000]{0:S(5)}, f32[250000]{0}, u32[]) copy-start(%s)",
            dot("y"),
            "%kept = f32[250000]{0:S(5)} copy-done(%out)",
            "%in = (f32[250000]{0}, f32[250000]{0:S(5)}, u32[]) copy-start(%kept)",
            dot("z", "%y"),
            "%back = f32[250000]{0} copy-done(%in)",
            "ROOT %r = f32[1000,1000]{1,0} add(%z, %z)",
        ),
        slow,
        record=True,
    )
    assert found.busy["host"] == pytest.approx(8)
    assert found.seconds == pytest.approx(4 + 4 + 12 / 6)
    assert found.exposed == pytest.approx(2 + 2)
    assert found.hidden_share == 1  # there is no collective
    waits = [(event.name, event.end - event.begin) for event in found.events if event.lane == "waits"]
    assert waits == [("out", pytest.approx(2)), ("in", pytest.approx(2))]
    copies = [(event.begin, event.end, event.num_bytes) for event in found.events if event.lane == "host"]
    assert copies == [(0, pytest.approx(4), 10**6), (pytest.approx(4), pytest.approx(8), 10**6)]


def test_a_loop_that_offloads_copies_slices_and_not_the_whole_stack():
    stack, part = "f32[100,10000]{1,0:S(5)}", "f32[1,10000]{1,0}"
    update = (
        f"%put (a: f32[100,10000], b: f32[1,10000], c: s32[]) -> f32[100,10000] {{\n"
        f"  %a = {stack} parameter(0)\n  %b = {part} parameter(1)\n  %c = s32[] parameter(2)\n"
        f"  ROOT %u = {stack} dynamic-update-slice(%a, %b, %c, %c)\n}}\n"
    )
    found = replay(
        program(
            f'%h = {stack} custom-call(), custom_call_target="AllocateBuffer"',
            f"%p = {part} slice(%s), slice={{[0:10000]}}",
            "%i = s32[] constant(3)",
            f"%w = {stack} fusion(%h, %p, %i), kind=kLoop, calls=%put",
            "ROOT %r = f32[1000,1000]{1,0} copy(%x)",
            extra=update,
        ),
        dataclasses.replace(LINKS, host_bandwidth=1e4),
    )
    assert found.busy["host"] == pytest.approx(4)  # 40 kB


def test_products_beside_a_collective_lose_the_multiprocessors_that_it_takes():
    lines = (gather("g", LOCAL), dot("y"), done("d", "g"), dot("z", "%y"), "ROOT %r = f32[1000,1000]{1,0} copy(%z)")
    whole = dataclasses.replace(LINKS, core_count=0)
    plain = replay(program(*lines), whole)
    # The gather takes 1.25 s, in which products run at three quarters: the first takes 1.25 + (2 - 0.9375) s.
    found = replay(program(*lines), dataclasses.replace(whole, core_count=4, collective_cores=1, flops=2e9))
    alone = replay(program(*lines), dataclasses.replace(whole, core_count=4))
    assert found.seconds - alone.seconds == pytest.approx(1.25 - 0.75 * 1.25)
    assert plain.seconds > 4
