"""The peak of a scheduled program against bytes counted by hand, and against the compiler's own figure."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from zerojax.hlo.liveness import memory_within, temporary_peak
from zerojax.hlo.program import read_program
from zerojax.hlo.text import parse_module


def module(*lines, extra=""):
    """A program of %x: f32[100], 400 bytes, with these lines."""
    body = "\n".join(f"  {line}" for line in ("%x = f32[100]{0} parameter(0)", *lines))
    return parse_module(
        f"HloModule hand, is_scheduled=true\n\n{extra}\nENTRY %main (x: f32[100]) -> f32[] {{\n{body}\n}}\n"
    )


LOOP = """%body (s: (s32[], f32[100])) -> (s32[], f32[100]) {
  %s = (s32[], f32[100]{0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %v = f32[100]{0} get-tuple-element(%s), index=1
  %wide = f32[1000]{0} broadcast(%v)
  %next = f32[100]{0} slice(%wide)
  ROOT %t = (s32[], f32[100]{0}) tuple(%i, %next)
}

%done (c: (s32[], f32[100])) -> pred[] {
  %c = (s32[], f32[100]{0}) parameter(0)
  ROOT %no = pred[] constant(false)
}
"""


@pytest.mark.parametrize(
    ("lines", "peak"),
    [
        # Nothing lives but the argument and the result.
        (["ROOT %r = f32[] reduce(%x)"], 0),
        # a is read once more after b and c: three at once.
        (
            ["%a = f32[100]{0} negate(%x)", "%b = f32[50]{0} slice(%a)", "%c = f32[25]{0} slice(%b)",
             "ROOT %r = f32[] reduce(%a, %c)"],
            400 + 200 + 100,
        ),
        # A view is no buffer, a tuple's other part is free when it is last read.
        (
            ["%a = f32[100]{0} negate(%x)", "%v = f32[10,10]{1,0} bitcast(%a)",
             "%p = (f32[100]{0}, f32[10,10]{1,0}) tuple(%x, %v)", "%g = f32[100]{0} get-tuple-element(%p), index=0",
             "%b = f32[300]{0} broadcast(%g)", "ROOT %r = f32[] reduce(%b)"],
            1200,
        ),
        # A started copy's source stays until it is done; what lies on the host is not the device's.
        (
            ["%a = f32[100]{0} negate(%x)", "%s = (f32[100]{0:S(5)}, f32[100]{0}, u32[]) copy-start(%a)",
             "%b = f32[50]{0} slice(%x)", "%d = f32[100]{0:S(5)} copy-done(%s)", "ROOT %r = f32[] reduce(%b)"],
            600,
        ),
        # An update in place is no second buffer.
        (
            ["%a = f32[100]{0} negate(%x)", "%b = f32[1]{0} slice(%x)", "%i = s32[] constant(0)",
             "%u = f32[100]{0} dynamic-update-slice(%a, %b, %i)", "ROOT %r = f32[] reduce(%u)"],
            404,
        ),
        # An elementwise fusion writes over what dies in it.
        (
            ["%a = f32[100]{0} negate(%x)", "%b = f32[100]{0} fusion(%a), kind=kLoop, calls=%none",
             "ROOT %r = f32[] reduce(%b)"],
            400,
        ),
    ],
)  # fmt: skip
def test_what_lives_at_once_is_counted_once(lines, peak):
    assert temporary_peak(module(*lines)) == peak


def test_a_loop_holds_its_state_once_and_its_body_at_its_fullest():
    lines = (
        "%a = f32[100]{0} negate(%x)", "%i = s32[] constant(0)", "%t = (s32[], f32[100]{0}) tuple(%i, %a)",
        "%w = (s32[], f32[100]{0}) while(%t), condition=%done, body=%body",
        "%g = f32[100]{0} get-tuple-element(%w), index=1", "ROOT %r = f32[] reduce(%g)",
    )  # fmt: skip
    assert temporary_peak(module(*lines, extra=LOOP)) == 400 + 4000


def test_only_what_stays_within_a_scope_is_free():
    inner, outer = 'metadata={op_name="jit(f)/jvp(flash_attention)/dot"}', 'metadata={op_name="jit(f)/mlp/dot"}'
    lines = [
        f"%scores = f32[1000]{{0}} broadcast(%x), {inner}", f"%shifted = f32[1000]{{0}} negate(%scores), {inner}",
        f"%out = f32[100]{{0}} slice(%shifted), {inner}", f"%up = f32[500]{{0}} broadcast(%out), {outer}",
        "ROOT %r = f32[] reduce(%up)",
    ]  # fmt: skip
    found = module(*lines)
    assert temporary_peak(found) == 8000
    assert temporary_peak(found, ["flash_attention"]) == 400 + 2000  # what the next layer reads is there
    assert memory_within(found, ["flash_attention"]) == 5600
    assert memory_within(found, ["another"]) == 0
    read_outside = module(*lines[:3], f"%up = f32[500]{{0}} slice(%shifted), {outer}", *lines[4:])
    assert temporary_peak(read_outside, ["flash_attention"]) == 4000 + 2000


def attention_loss(weights, h):
    """Layers of attention alone, its scores much larger than its input."""

    @jax.checkpoint
    def attend(h):
        with jax.named_scope("flash_attention"):
            return jax.nn.dot_product_attention(h, h, h, is_causal=True)

    def layer(h, w):
        return h + attend(jnp.tanh(h @ w)), None

    h, _ = jax.lax.scan(layer, h, weights)
    return jnp.mean(h.astype(jnp.float32) ** 2)


@pytest.mark.aot
@pytest.mark.needs_cuda_plugin
def test_the_peak_is_the_compilers_within_a_tenth_and_the_scores_are_found():
    from zerojax.planner.gpus import load_target, target_mesh

    mesh = target_mesh(load_target("h100"), 1, 2, ("node", "local"))
    on = lambda dims, spec: jax.ShapeDtypeStruct(dims, jnp.bfloat16, sharding=NamedSharding(mesh, spec))  # noqa: E731
    length, heads, batch = 1024, 4, 4
    shapes = on((3, 128, 128), PartitionSpec()), on((2 * batch, length, heads, 128), PartitionSpec(("node", "local")))
    # As the planner does: products that carry JAX's names on 0.10 too.
    options: dict[str, str | bool] = {"xla_gpu_autotune_level": "0", "xla_gpu_enable_triton_gemm": True}
    compiled = jax.jit(jax.grad(attention_loss)).lower(*shapes).compile(compiler_options=options)
    found = read_program(compiled, mesh)
    peak = temporary_peak(found.module)
    # Gaps between the compiler's buffers, and elementwise kernels that it lets write over an operand.
    assert peak == pytest.approx(found.memory.temp, rel=0.1)
    # Between the products of one layer's backward pass lie scores and probabilities, in four bytes or two.
    scores = batch * heads * length * length
    assert 4 * scores <= memory_within(found.module, ["flash_attention"]) <= 24 * scores
