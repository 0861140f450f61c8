"""`zerojax doctor`: what the machines at hand are, what they move, and which stage and techniques pay on them.

Run it on one node, or under the job's launcher on all of them; the first process speaks. It says by name what it cannot
know: simulated devices have no network, and a CPU no kernels to check.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import platform
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import pallas_kernels
from pallas_kernels import selfcheck
from pallas_kernels.variants import Variant
from zerojax.config import GRADIENT_FORMATS, WEIGHT_FORMATS, ZeroConfig
from zerojax.hosts.start import add_job_arguments, distributed
from zerojax.layout.mesh import make_mesh
from zerojax.planner.advice import comparison_configs
from zerojax.planner.bandwidths import Rate, best_rate, measure_host, measure_mesh
from zerojax.planner.gpus import TARGETS, GpuTarget, PluginMissing, check_plugin, choose_platform, load_target
from zerojax.planner.plan import plan_workload
from zerojax.planner.workload import Workload

_SAVED = "(the file of --save-target)"
_LEAST_DRIVER = {"13": 580, "12": 525}
_DRIVER = Path("/proc/driver/nvidia/version")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    add = parser.add_argument
    add("model", nargs="?", default="gpt:18b", help="what to plan with the measured bandwidths, as for zerojax plan")
    add("--target", help=f"the GPU to plan for, where it is not at hand: {', '.join(TARGETS)} or a .toml file")
    add("--sizes", help="bytes of the arrays that are moved, as 1048576,16777216")
    add("--save-target", metavar="FILE.toml", help="write the GPU's facts with what was measured, for zerojax plan")
    add("--json", action="store_true", help="the whole record as JSON on the standard output")
    add_job_arguments(parser)


def run(options: argparse.Namespace, make: Callable[..., Workload]) -> int:
    """Examines and prints; 0 if all is well, 1 if versions do not fit or a collective gave wrong values."""
    choose_platform()
    distributed(options.coordinator, options.num_processes, options.process_id)
    sizes = [int(part) for part in options.sizes.split(",")] if options.sizes else None
    workload = make()
    if options.save_target and not Path(options.save_target).resolve().parent.is_dir():
        raise ValueError(f"--save-target {options.save_target}: the folder does not exist")
    found = examine(workload, options.examples_per_device, target=options.target, sizes=sizes)
    if jax.process_index() == 0:
        if options.save_target and found["plan"]:
            Path(options.save_target).write_text(_as_toml(found["plan"]["measured"]))
            found["plan"]["command"] = found["plan"]["command"].replace(_SAVED, options.save_target)
        print(json.dumps(found, indent=2, allow_nan=False) if options.json else in_words(found))
    return 1 if found["problems"] else 0


def examine(
    workload: Workload, examples: int | None = None, *, target: str | None = None, sizes: list[int] | None = None
) -> dict[str, Any]:
    """Everything as one record of plain values; all processes of a job call it together.

    Args:
        workload: what is planned.
        examples: in a device's microbatch; None: the workload's batch.
        target: the GPU to plan for; None: the one at hand.
        sizes: bytes of the arrays that are moved.

    Returns:
        "software", "devices", "mesh", "memory", "collectives", "copy", "host", "kernels", "plan", then "problems" (what
        does not fit, or is wrong) and "unknown" (what could not be found out here, and how to).
    """
    unknown: list[str] = []
    mesh = make_mesh()
    on_gpu = mesh.devices.flat[0].platform == "gpu"
    software, problems = _software(on_gpu)
    rates = measure_mesh(mesh, sizes)
    if on_gpu and not any(name.startswith("nvidia-nccl") for name in software):
        unknown.append("NCCL's version, and whether it fits: it is no package of this Python environment")
    problems += [
        f"{rate.kind} over {rate.axis!r} of {rate.size} bytes gave wrong values: do not train on these machines"
        for rate in rates if not rate.is_right
    ]  # fmt: skip
    if not on_gpu:
        what = "simulated devices of one process" if jax.process_count() == 1 else "processes on CPUs"
        unknown.append(f"bandwidths of GPUs: those below are of {what}; run it where the GPUs are")
    for axis in mesh.axis_names:
        if mesh.shape[axis] == 1:
            unknown.append(f"bandwidth over {axis!r}: there is one device along it; run it on all nodes of the job")
    size = (256 << 20) if on_gpu else (4 << 20)
    copy, host = _copy_rate(size), measure_host(size)
    if host is None:
        unknown.append("bandwidth to pinned host memory: this backend has none")
    kernels = _kernels(copy, unknown)
    problems += [f"kernel {name}: {one['reason']}" for name, one in kernels.items() if one["faulty"]]
    return {
        "software": software,
        "devices": _devices(),
        "mesh": {"axes": dict(mesh.shape), "why": _why(mesh)},
        "memory": _memory(unknown),
        "collectives": [dataclasses.asdict(rate) for rate in rates],
        "copy": copy,
        "host": host,
        "kernels": kernels,
        "plan": _plan(
            workload, examples, target, mesh, rates, copy if on_gpu else None, host if on_gpu else None, unknown
        ),
        "problems": problems,
        "unknown": unknown,
    }


def _copy_rate(size: int) -> float:
    """Bytes per second that a device reads and writes together in a copy, by the clock that times the kernels."""
    x = jax.device_put(jnp.zeros(max(1, size // 4), jnp.float32), jax.local_devices()[0])
    return 2 * x.nbytes / selfcheck.seconds(jax.jit(lambda x: x + 1), (x,))


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _software(on_gpu: bool) -> tuple[dict[str, str | None], list[str]]:
    """Versions, and which of them do not fit together."""
    names = ("zerojax", "jax", "jaxlib", "optax", "flax")
    found = {"python": platform.python_version(), **{name: _version(name) for name in names}}
    problems = []
    if found["jax"] != found["jaxlib"]:
        problems.append(f"jax {found['jax']} and jaxlib {found['jaxlib']} are of different versions")
    for cuda in ("13", "12"):
        for name in (f"jax-cuda{cuda}-plugin", f"jax-cuda{cuda}-pjrt", f"nvidia-nccl-cu{cuda}"):
            if (version := _version(name)) is not None:
                found[name] = version
    driver = re.search(r"Kernel Module\D*([\d.]+)", _DRIVER.read_text()) if _DRIVER.is_file() else None
    found["driver"] = driver[1] if driver else None
    try:
        check_plugin()
    except PluginMissing as error:
        if on_gpu or driver:
            problems.append(str(error))
    for cuda, least in _LEAST_DRIVER.items():
        if driver and found.get(f"jax-cuda{cuda}-plugin") and int(driver[1].split(".")[0]) < least:
            problems.append(f"driver {driver[1]} is too old for CUDA {cuda}, which needs {least} or later")
    if driver and not on_gpu:
        problems.append("there is an NVIDIA driver, but JAX runs on the CPU: pip install 'jax[cuda13]'")
    return found, problems


def _devices() -> dict[str, Any]:
    kinds = Counter(f"{device.platform}: {device.device_kind}" for device in jax.devices())
    return {"kinds": dict(kinds), "processes": jax.process_count(), "in_each_process": len(jax.local_devices())}


def _why(mesh: jax.sharding.Mesh) -> str:
    nodes, local = mesh.shape["node"], mesh.shape["local"]
    processes = jax.process_count()
    if processes == 1:
        return f"one process with {local} devices is one node; make_mesh(num_nodes=...) divides it to try things out"
    slices = len({getattr(device, "slice_index", None) for device in jax.devices()})
    source = f"{slices} slices" if slices == nodes and slices > 1 else f"{processes} processes"
    return f"{source} with {local} devices each that share a fast network are {nodes} nodes"


def _memory(unknown: list[str]) -> dict[str, Any]:
    try:
        free = re.search(r"MemAvailable:\s*(\d+) kB", Path("/proc/meminfo").read_text())
    except OSError:
        free = None
    if free is None:
        unknown.append("free host memory: this system has no /proc/meminfo")
    device = jax.local_devices()[0]
    kinds = sorted(memory.kind for memory in device.addressable_memories())
    limit = (device.memory_stats() or {}).get("bytes_limit")
    if limit is None:
        unknown.append("memory of a device: its backend does not say")
    return {"host_free": int(free[1]) * 1024 if free else None, "pinned": "pinned_host" in kinds, "device": limit}


def _kernels(copy: float, unknown: list[str]) -> dict[str, dict[str, Any]]:
    """The decisions on the variants that the default formats use, with their share of a device copy's bandwidth."""
    weights, inside, between = WEIGHT_FORMATS["int8"], GRADIENT_FORMATS["int8"], GRADIENT_FORMATS["int4"]
    wanted = (
        Variant("quantize", weights, "bfloat16", slices=True),
        Variant("quantize", inside, "bfloat16", slices=True),
        Variant("sum_quantize", between, "float32", source=inside, count=8),
        Variant("sum", between, "float32", source=between, count=2),
    )
    found = {str(variant): dataclasses.asdict(pallas_kernels.decision(variant)) for variant in wanted}
    for one in found.values():
        rate = one["bytes_per_second"]
        one["of_a_copy"] = None if rate is None else rate / copy
    if not any(one["ratio"] or one["faulty"] for one in found.values()):
        unknown.append("whether the Pallas kernels are equal and faster: there is no GPU here to check them on")
    return found


def _plan(
    workload: Workload, examples: int | None, target: str | None, mesh: jax.sharding.Mesh, rates: list[Rate],
    copy: float | None, host: Mapping[str, float] | None, unknown: list[str],
) -> dict[str, Any] | None:  # fmt: skip
    """What `zerojax plan` says with the measured bandwidths in place of the datasheet's.

    A copy's and the host's are those of the GPU to plan for only where it is at hand: None elsewhere.
    """
    kind = mesh.devices.flat[0].device_kind
    known: dict[str, GpuTarget] = {one.name: one for one in TARGETS.values()}
    gpu = load_target(target) if target else known.get(kind)
    if gpu is None:
        unknown.append(f"which stage and techniques pay: {kind!r} is no GPU that zerojax knows; give --target")
        return None
    nodes, local = mesh.shape["node"], mesh.shape["local"]
    link, network = best_rate(rates, "local"), best_rate(rates, "node")
    measured: dict[str, float] = {} if link is None else {"link_bandwidth": link}
    if copy is not None:
        measured["memory_efficiency"] = min(1.0, copy / gpu.memory_bandwidth)
    if host is not None:
        measured["host_bandwidth"] = min(host.values())
    base = target if target else next(name for name, one in TARGETS.items() if one.name == gpu.name)
    gpu = dataclasses.replace(gpu, **measured)
    into_node = None if network is None else network * local
    plan = plan_workload(
        workload, target=gpu, num_nodes=nodes, devices_per_node=local, bandwidth=into_node,
        examples_per_device=examples, configs=comparison_configs(ZeroConfig()), compiles=False,
    )  # fmt: skip
    return {
        "model": plan.model, "target": gpu.name, "link_bandwidth": link, "node_bandwidth": into_node,
        "recommendation": plan.recommendation, "techniques": {t.name: t.advice for t in plan.techniques},
        "measured": {"extends": base, **measured},
        "command": " ".join([
            f"zerojax plan {plan.model} --nodes {nodes} --gpus-per-node {local} --recommend --target",
            _SAVED if measured else base, *([f"--bandwidth {into_node / 1e9:.4g}GB/s"] if into_node else []),
        ]),
    }  # fmt: skip


def _as_toml(facts: Mapping[str, Any]) -> str:
    return "".join(f"{name} = {json.dumps(value)}\n" for name, value in facts.items())


def in_words(found: Mapping[str, Any]) -> str:
    """The record as text for people."""
    software = ", ".join(f"{name} {version}" for name, version in found["software"].items() if version)
    devices, memory = found["devices"], found["memory"]
    kinds = ", ".join(f"{count} x {kind}" for kind, count in devices["kinds"].items())
    axes = " x ".join(f"{name} {size}" for name, size in found["mesh"]["axes"].items())
    lines = [
        f"Software   {software}",
        f"Devices    {kinds}; {devices['processes']} processes with {devices['in_each_process']} each",
        f"Mesh       {axes}: {found['mesh']['why']}",
        f"Memory     host {_gb(memory['host_free'])} free, pinned {'yes' if memory['pinned'] else 'no'}; "
        f"device {_gb(memory['device'])}",
        f"Copy       {found['copy'] / 1e9:.1f} GB/s read and written on one device",
    ]
    if host := found["host"]:
        there, back = (host[way] / 1e9 for way in ("to_host", "to_device"))
        lines.append(f"Host       {there:.1f} GB/s to pinned memory, {back:.1f} GB/s back, one device alone")
    for rate in found["collectives"]:
        speed = f"{rate['bytes_per_second'] / 1e9:10.3f} GB/s into each device, {rate['seconds'] * 1e6:9.0f} us"
        right = "values right" if rate["is_right"] else "VALUES WRONG"
        lines.append(f"{rate['axis']:10} {rate['kind']:15}{rate['size'] / 1e6:10.3f} MB {speed}, {right}")
    for name, one in found["kernels"].items():
        rate = one["bytes_per_second"]
        moved = "" if rate is None else f", {rate / 1e9:.0f} GB/s, {one['of_a_copy']:.0%} of a copy"
        lines.append(f"Kernel     {name}: {one['reason']}{moved}")
    if plan := found["plan"]:
        lines.append(f"Plan       {plan['model']} on {plan['target']} with these bandwidths: {plan['recommendation']}")
        lines += [f"           {advice}" for advice in plan["techniques"].values()]
        lines.append(f"           as compiled and replayed, with a trace: {plan['command']} --trace step.json")
    lines += [f"Problem    {text}" for text in found["problems"]]
    lines += [f"Not known  {text}" for text in found["unknown"]]
    return "\n".join(lines)


def _gb(size: int | None) -> str:
    return "unknown" if size is None else f"{size / 1e9:.1f} GB"


def report(error: Exception) -> int:
    """One line on the standard error, and the exit status of a wrong call."""
    print(f"zerojax doctor: {str(error).strip().splitlines()[0]}", file=sys.stderr)
    return 2
