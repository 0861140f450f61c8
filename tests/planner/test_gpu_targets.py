"""GPU targets and their meshes."""

import dataclasses
import importlib.metadata
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax.planner import gpus as gpu_targets
from zerojax.planner.gpus import TARGETS, GpuTarget, PluginMissing, check_plugin, load_target, target_mesh


@pytest.mark.parametrize(
    ("name", "memory_gb", "bandwidth_tb", "tflops", "link_gb", "capability"),
    [
        # Datasheets: marketed capacity, HBM bandwidth, dense bfloat16 rate, NVLink per direction.
        ("a100", 80, 2.04, 312, 300, 8),
        ("h100", 80, 3.35, 989, 450, 9),
        ("h200", 141, 4.8, 989, 450, 9),
        ("b200", 180, 7.7, 2250, 900, 10),
    ],
)
def test_targets_hold_the_datasheets_facts(name, memory_gb, bandwidth_tb, tflops, link_gb, capability):
    target = load_target(name.upper())
    assert target is TARGETS[name]
    # The driver reports up to 8 % more than the marketed decimal gigabytes, and never less.
    assert memory_gb * 1e9 <= target.memory_bytes <= 1.08 * memory_gb * 1e9
    assert target.memory_bandwidth == pytest.approx(bandwidth_tb * 1e12, rel=0.01)  # marketed to two or three digits
    assert target.peak_bf16_flops == tflops * 1e12
    assert target.link_bandwidth == link_gb * 1e9
    assert target.compute_capability == capability
    assert f"device_memory_size: {target.memory_bytes}" in target.target_config
    assert f"cuda_compute_capability {{ major: {capability} }}" in target.target_config
    assert target.name in target.target_config


def test_a_file_that_extends_a_target_changes_only_what_it_names(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text('extends = "h100"\nname = "half an H100"\nmemory_bytes = 40_000_000_000\nlink_bandwidth = 25e9\n')
    expected = dataclasses.replace(
        TARGETS["h100"], name="half an H100", memory_bytes=40_000_000_000, link_bandwidth=25e9
    )
    assert load_target(path) == load_target(str(path)) == expected


def test_a_file_with_all_facts_needs_no_base(tmp_path):
    facts = dataclasses.asdict(TARGETS["a100"])
    path = tmp_path / "own.toml"
    path.write_text(
        "\n".join(f'{key} = "{value}"' if key == "name" else f"{key} = {value}" for key, value in facts.items())
    )
    assert load_target(path) == TARGETS["a100"]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("name = ", "cannot be read"),
        ('name = "x"', "lacks .*memory_bytes"),
        ('extends = "v100"', "extends 'v100'"),
        ('extends = "h100"\nmemory = 1', "unknown fields .'memory'."),
        ('extends = "h100"\nmemory_bytes = "80GB"', "memory_bytes = '80GB' must be a positive int"),
        ('extends = "h100"\nmemory_bytes = -1', "memory_bytes = -1 must be a positive int"),
        ('extends = "h100"\nmemory_bytes = 0.5', "memory_bytes = 0.5 must be a positive int"),
        ('extends = "h100"\nlink_bandwidth = true', "link_bandwidth = True must be a positive float"),
        ('extends = "h100"\nname = 3', "name = 3 must be"),
    ],
)
def test_a_bad_file_is_refused_in_one_line_that_names_it(tmp_path, text, complaint):
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=complaint) as caught:
        load_target(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unknown_names_and_missing_files_are_refused(tmp_path):
    with pytest.raises(ValueError, match="unknown GPU 'v100': give one of a100, h100, h200, b200"):
        load_target("v100")
    with pytest.raises(ValueError, match="cannot be read"):
        load_target(tmp_path / "absent.toml")


def installed(monkeypatch, versions: dict[str, str]) -> None:
    def version(name: str) -> str:
        if name in versions:
            return versions[name]
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(gpu_targets.importlib.metadata, "version", version)


def test_without_the_plugin_the_error_is_the_command_that_adds_it(monkeypatch):
    installed(monkeypatch, {"jaxlib": "0.12.0.1"})
    with pytest.raises(PluginMissing) as caught:
        target_mesh("h100", 2, 8)
    command = "pip install --no-deps jax-cuda13-plugin==0.12.0.1 jax-cuda13-pjrt==0.12.0.1"
    assert str(caught.value).endswith(command)
    assert "\n" not in str(caught.value)


def test_a_plugin_of_another_version_or_half_a_plugin_is_refused(monkeypatch):
    installed(monkeypatch, {"jaxlib": "0.12.0.1", "jax-cuda13-plugin": "0.11.2", "jax-cuda13-pjrt": "0.11.2"})
    with pytest.raises(PluginMissing, match=r"jaxlib's version 0\.12\.0\.1, found jax-cuda13-plugin 0\.11\.2"):
        check_plugin()
    installed(monkeypatch, {"jaxlib": "0.12.0.1", "jax-cuda13-plugin": "0.12.0.1"})
    with pytest.raises(PluginMissing, match=r"jax-cuda13-pjrt==0\.12\.0\.1"):
        check_plugin()


def test_the_plugin_for_cuda_12_will_do(monkeypatch):
    installed(monkeypatch, {"jaxlib": "0.11.2", "jax-cuda12-plugin": "0.11.2", "jax-cuda12-pjrt": "0.11.2"})
    check_plugin()


@pytest.mark.parametrize(
    ("axis_names", "shape", "complaint"),
    [
        (("node", "local"), (2, 7), "must number the 2 x 8 = 16 devices"),
        (("node",), (2, 8), "one size per axis"),
        (("local", "node"), (8, 2), "must number the 2 nodes, got 16"),
        (("node", "local", "model"), (2, 0, 4), "at least 1"),
    ],
)
def test_a_mesh_that_does_not_fit_the_machines_is_refused(axis_names, shape, complaint):
    with pytest.raises(ValueError, match=complaint):
        target_mesh("h100", 2, 8, axis_names, shape=shape)


@pytest.mark.needs_cuda_plugin
@pytest.mark.parametrize(("num_nodes", "devices_per_node"), [(1, 1), (1, 8), (2, 8), (7, 8), (48, 8), (3, 1)])
def test_devices_of_a_node_are_neighbours(num_nodes, devices_per_node):
    mesh = target_mesh("h100", num_nodes, devices_per_node)
    assert dict(mesh.shape) == {"node": num_nodes, "local": devices_per_node}
    assert [[device.process_index for device in row] for row in mesh.devices] == [
        [node] * devices_per_node for node in range(num_nodes)
    ]
    assert len({device.id for device in mesh.devices.flat}) == num_nodes * devices_per_node


@pytest.mark.needs_cuda_plugin
def test_further_axes_split_the_node_or_group_nodes():
    mesh = target_mesh("h100", 6, 8, ("pipe", "node", "local", "model"), shape=(2, 3, 2, 4))
    assert dict(mesh.shape) == {"pipe": 2, "node": 3, "local": 2, "model": 4}
    assert [mesh.devices[pipe, node, 1, 3].process_index for pipe in range(2) for node in range(3)] == list(range(6))


@pytest.mark.needs_cuda_plugin
@pytest.mark.parametrize(
    "name", [name if name == "h100" else pytest.param(name, marks=pytest.mark.aot) for name in TARGETS]
)
def test_every_target_compiles_with_its_own_memory_figures(name):
    mesh = target_mesh(name, 2, 4)
    x = jax.ShapeDtypeStruct((1024, 256), "bfloat16", sharding=NamedSharding(mesh, P(("node", "local"))))
    compiled = jax.jit(lambda x: jnp.sum(x.astype(jnp.float32) ** 2)).lower(x).compile()
    stats = compiled.memory_analysis()
    assert stats is not None
    assert stats.argument_size_in_bytes == 1024 * 256 * 2 // 8
    assert "all-reduce" in (compiled.as_text() or "")


@pytest.mark.needs_cuda_plugin
def test_a_target_of_ones_own_compiles():
    own = dataclasses.replace(TARGETS["h100"], name="own", core_count=66)
    assert isinstance(own, GpuTarget)
    mesh = target_mesh(own, 3, 2)
    assert mesh.devices.flat[0].device_kind == "own"


@pytest.mark.needs_cuda_plugin
def test_the_environment_need_not_name_the_cpu_and_the_backends_stay_what_they_were():
    program = """
import jax, os
before = jax.devices()
from zerojax.planner.gpus import target_mesh
mesh = target_mesh("h100", 2, 8)
assert jax.devices() == before and mesh.size == 16
assert not os.environ.get("JAX_SKIP_CUDA_CONSTRAINTS_CHECK")
x = jax.ShapeDtypeStruct((16,), "float32", sharding=jax.NamedSharding(mesh, jax.P("node")))
print(jax.jit(jax.numpy.cumsum).lower(x).compile().memory_analysis().argument_size_in_bytes)
"""
    environment = {key: value for key, value in os.environ.items() if key not in ("JAX_PLATFORMS", "XLA_FLAGS")}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "32", done.stderr
