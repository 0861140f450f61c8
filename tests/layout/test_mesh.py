"""Meshes from the process topology, and what is refused."""

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

import zerojax
from zerojax.layout.mesh import check_data_axes, data_size, nontrivial_axes, other_axes


@dataclasses.dataclass(frozen=True)
class Device:
    """What `make_mesh` reads of a device, for clusters that are not here."""

    id: int
    process_index: int
    platform: str = "gpu"
    slice_index: int | None = None


def cluster(processes: int, per_process: int, per_node: int | None = None) -> list[Device]:
    return [
        Device(p * per_process + d, p, slice_index=None if per_node is None else (p * per_process + d) // per_node)
        for d in range(per_process)
        for p in range(processes)
    ]  # interleaved: the order in which devices are given must not matter


def test_one_process_is_one_node():
    assert dict(zerojax.make_mesh().shape) == {"node": 1, "local": 8}


@pytest.mark.parametrize(("nodes", "local"), [(1, 8), (2, 4), (4, 2), (8, 1)])
def test_simulated_nodes_keep_neighbours_together(nodes, local):
    mesh = zerojax.make_mesh(nodes, local)
    assert dict(mesh.shape) == {"node": nodes, "local": local}
    ids = [[d.id for d in node] for node in mesh.devices]
    assert ids == np.arange(8).reshape(nodes, local).tolist()


@pytest.mark.parametrize("nodes", [1, 3, 6, 7])
def test_any_number_of_devices(nodes):
    mesh = zerojax.make_mesh(num_nodes=nodes, devices=jax.devices()[:nodes])
    assert dict(mesh.shape) == {"node": nodes, "local": 1}


def test_nodes_come_from_the_processes():
    mesh = zerojax.make_mesh(devices=cluster(3, 4))
    assert dict(mesh.shape) == {"node": 3, "local": 4}
    for node in mesh.devices:
        assert len({d.process_index for d in node}) == 1


def test_one_process_per_gpu_is_joined_by_its_machine():
    mesh = zerojax.make_mesh(devices=cluster(8, 1, per_node=4))
    assert dict(mesh.shape) == {"node": 2, "local": 4}
    for node in mesh.devices:
        assert len({d.slice_index for d in node}) == 1


def test_nodes_smaller_than_a_process():
    assert dict(zerojax.make_mesh(devices_per_node=4).shape) == {"node": 2, "local": 4}


def test_extra_axes_are_inside_a_node():
    mesh = zerojax.make_mesh(2, 4, model=2)
    assert dict(mesh.shape) == {"node": 2, "local": 2, "model": 2}
    assert [d.id for d in mesh.devices[0].flat] == [0, 1, 2, 3]
    axes = ("node", "local")
    assert (data_size(mesh, axes), other_axes(mesh, axes), nontrivial_axes(mesh, axes)) == (4, ("model",), axes)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_axis_types(kind):
    assert set(zerojax.make_mesh(2, 4, axis_types=kind).axis_types) == {kind}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_nodes": 3}, r"3 nodes x 2 devices need 6 devices, but there are 8 \(1 host of 8\)"),
        ({"num_nodes": 2, "devices_per_node": 8}, "need 16 devices, but there are 8"),
        ({"num_nodes": 0}, r"make_mesh\(num_nodes=0\): a positive integer"),
        ({"num_nodes": 2, "model": 3}, "need a multiple of 3 devices in each node, but a node has 4"),
        ({"devices": []}, "no devices"),
    ],
)
def test_what_does_not_fit_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        zerojax.make_mesh(**arguments)


def test_a_device_given_twice_is_refused():
    with pytest.raises(ValueError, match="not all different"):
        zerojax.make_mesh(devices=[*jax.devices()[:2], jax.devices()[0]])


def test_nodes_that_cut_across_machines_are_refused():
    with pytest.raises(ValueError, match="cut across hosts of 4 devices; use devices_per_node=4"):
        zerojax.make_mesh(num_nodes=4, devices_per_node=3, devices=cluster(3, 4))


def test_unequal_machines_are_refused():
    uneven = [*cluster(1, 4), Device(9, 1), Device(10, 1)]
    with pytest.raises(ValueError, match="unequal numbers of devices"):
        zerojax.make_mesh(num_nodes=2, devices_per_node=3, devices=uneven)


def test_a_mesh_without_the_configured_axes_is_refused():
    mesh = jax.make_mesh((8,), ("data",))
    with pytest.raises(ValueError, match=r"\['node', 'local'\] are required .* {'data': 8}.*ZeroConfig\(axes="):
        check_data_axes(mesh, ("node", "local"))
