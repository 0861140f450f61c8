"""A Layout: the placements of a parameter tree on a mesh, and the stored form they define.

The *stored form* of a parameter tree is what lives between steps: full leaves below stage 3, 1/N of every large leaf
at stage 3 (padded with zeros where no dim divides). A Layout moves trees into and out of it, creates them in it, checks
them against it and describes it.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zerojax import _compat
from zerojax.config import ZeroConfig
from zerojax.layout.description import describe, first_line, html_table
from zerojax.layout.host_arrays import check_same_values, place_in_full, place_slices, spread_batch
from zerojax.layout.mesh import data_size, with_auto_axes, with_auto_mesh
from zerojax.layout.placement import Placement, is_two_bits, pad, unpad, zero_padded
from zerojax.layout.safetensors import select_tensors

Tree = Any


@functools.partial(jax.tree_util.register_dataclass, data_fields=["tree"], meta_fields=["layout"])
@dataclasses.dataclass(frozen=True)
class StoredParams:
    """Parameters that say under which layout they are stored; made by `Layout.stored`. A pytree of their arrays.

    Attributes:
        tree: parameters in stored form, in any dtype.
        layout: their layout.
    """

    tree: Tree
    layout: Layout


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """A mesh, a configuration and one Placement per parameter leaf.

    Attributes:
        mesh: the device mesh.
        config: the configuration.
        placements: pytree of `Placement`, of the structure of the parameters.
    """

    mesh: Mesh
    config: ZeroConfig
    placements: Tree

    @property
    def stage(self) -> int:
        """The ZeRO stage."""
        return self.config.stage

    @property
    def num_shards(self) -> int:
        """Number of replicas of the data-parallel job, into which a sharded leaf is split."""
        return data_size(self.mesh, self.config.axes)

    @functools.cached_property
    def treedef(self) -> Any:
        """Structure of the parameter tree."""
        return jax.tree.structure(self.placements)

    @functools.cached_property
    def leaves(self) -> list[Placement]:
        """The placements in tree order. Made once: what reads one for each leaf must not take the square of it."""
        return jax.tree.leaves(self.placements)

    def shard_sharding(self, placement: Placement) -> NamedSharding:
        """Sharding of a leaf that is split over the data axes (gradients, optimizer state, stage-3 parameters)."""
        return self._named(placement.full_spec, placement)

    def full_sharding(self, placement: Placement) -> NamedSharding:
        """Sharding of a leaf that is replicated over the data axes (parameters below stage 3)."""
        return self._named(placement.model_spec, placement)

    def param_sharding(self, placement: Placement) -> NamedSharding:
        """Sharding of a parameter in stored form."""
        return self.shard_sharding(placement) if self.stage >= 3 else self.full_sharding(placement)

    def param_shape(self, placement: Placement) -> tuple[int, ...]:
        """Global shape of a parameter in stored form."""
        return placement.padded_shape if self.stage >= 3 else placement.shape

    def param_shardings(self) -> Tree:
        """Shardings of the parameters in stored form, as a pytree."""
        return jax.tree.map(self.param_sharding, self.placements)

    def param_shapes(self) -> Tree:
        """The parameters in stored form as `jax.ShapeDtypeStruct`s with their shardings (for ahead-of-time use)."""
        return jax.tree.map(
            lambda p: jax.ShapeDtypeStruct(self.param_shape(p), p.dtype, sharding=self.param_sharding(p)),
            self.placements,
        )

    def logical_shapes(self) -> Tree:
        """The parameters as the model sees them, as `jax.ShapeDtypeStruct`s without padding or sharding."""
        return jax.tree.map(_logical, self.placements)

    def shard(self, params: Tree) -> Tree:
        """Places full parameters (host or device arrays) in stored form; the input stays valid.

        Args:
            params: pytree of global logical arrays, of the structure and shapes given to `partition`; in a job of
                several processes the same in each, of which every device takes its part: nothing is sent.

        Raises:
            ValueError: a leaf's shape or dtype does not match the layout (with its key path), or its values differ
                between processes.

        >>> import zerojax
        >>> mesh = zerojax.make_mesh(num_nodes=2, devices_per_node=4)
        >>> layout = zerojax.partition({"w": jnp.ones((16, 6))}, mesh, ZeroConfig(min_shard_size=0))
        >>> layout.shard({"w": jnp.ones((16, 6))})["w"].addressable_shards[0].data.shape
        (2, 6)
        """
        self.check(params, stored=False)
        check_same_values("layout.shard", params)

        def put(x: Any, placement: Placement) -> jax.Array:
            x, sharding = drop_weak_type(x), self.param_sharding(placement)
            if self.stage >= 3 and placement.padding:
                widths = [(0, n - m) for n, m in zip(placement.padded_shape, placement.shape, strict=True)]
                x = pad(x, placement) if isinstance(x, jax.Array) else zero_padded(x, widths)
            elif isinstance(x, jax.Array) and _may_share(x, sharding):
                # It would share its buffer with the caller's array: donating one deletes the other.
                x = x.copy()
            return place_in_full(x, sharding)

        return self._map(put, params)

    def batch(self, local: Tree) -> Tree:
        """The batch of the whole job from the rows that each process has read; with one process, its placement.

        Args:
            local: any pytree of NumPy or JAX arrays with this process's own rows on their leading dim, the same number
                in every process; 0-d leaves are the same everywhere.

        Returns:
            Global arrays, sharded on their leading dim over the data axes: the rows of a process stay on its devices,
            and nothing is sent. For the step's `batch`.

        Raises:
            ValueError: the rows do not divide over the devices, or processes have different shapes (compared once for
                each shape).

        >>> import zerojax
        >>> mesh = zerojax.make_mesh(num_nodes=2, devices_per_node=4)
        >>> layout = zerojax.partition({"w": jnp.ones((16, 6))}, mesh)
        >>> batch = layout.batch({"x": np.ones((16, 3)), "temperature": 0.5})
        >>> batch["x"].shape, batch["x"].addressable_shards[0].data.shape
        ((16, 3), (2, 3))
        """
        return spread_batch(local, self.mesh, self.config.axes)

    def stored(self, tree: Tree) -> StoredParams:
        """Marks parameters in stored form as such, for arguments after the batch: teachers, target networks, GANs.

        `value_and_grad`, `apply` and the step of `make_train_step` gather them where the loss uses them, in logical
        shape and without a gradient; the loss sees the plain tree. The layout may be another one on the same mesh.

        Args:
            tree: in stored form, of any dtypes: an average of `TrainState.params`, say.

        Raises:
            ValueError: the tree is not in this layout's stored form.

        >>> import zerojax
        >>> mesh = zerojax.make_mesh(num_nodes=2, devices_per_node=4)
        >>> layout = zerojax.partition({"w": jnp.ones((7,))}, mesh, ZeroConfig(min_shard_size=0))
        >>> params = layout.shard({"w": jnp.ones((7,))})
        >>> average = jax.tree.map(lambda old, new: 0.5 * old + 0.5 * new, params, params)
        >>> loss = lambda params, batch, teacher: jnp.mean((batch @ params["w"] - batch @ teacher["w"]) ** 2)
        >>> float(zerojax.value_and_grad(loss, layout)(params, jnp.ones((8, 7)), layout.stored(average))[0])
        0.0
        """
        self.check(tree, stored=True if self.stage >= 3 else None, what="stored params")
        return StoredParams(tree, self)

    def load(self, path: str | os.PathLike[str], *, names: dict[str, str] | None = None, cast: bool = False) -> Tree:
        """Parameters in stored form from safetensors: each device reads its own slices, no host the full model.

        Args:
            path: a file, or the index of several (`*.safetensors.index.json`).
            names: what the file calls a leaf, for leaves whose keys joined with "." are not their names there.
            cast: take another dtype than the layout's, converted.

        Raises:
            FileNotFoundError: the file is not there.
            ValueError: a leaf is missing or has another shape or dtype (with its key path); the file is cut.
        """
        keys = [keys for keys, _ in jax.tree_util.tree_flatten_with_path(self.placements)[0]]
        tensors = select_tensors(path, list(zip(keys, self.leaves, strict=True)), names or {}, cast)
        pairs = zip(tensors, self.leaves, strict=True)
        return self._unflatten([
            place_slices(x, self.param_shape(p), p.dtype, self.param_sharding(p)) for x, p in pairs
        ])  # fmt: skip

    def unshard(self, tree: Tree) -> Tree:
        """The full logical arrays of a parameter-like tree in stored form, replicated on every device.

        Parameters, gradients, moments and master copies alike: their dtypes may differ from those of the parameters,
        and where a leaf has none (`None`, `optax.MaskedNode`), there is none in the result.

        For looking at, comparing and exporting: it needs room for the full tree on each device.
        """
        try:
            found = self.leaves_of(tree)
        except ValueError:
            self.check(tree, stored=None)  # names the difference
            raise
        has = [bool(jax.tree.leaves(x)) for x in found]
        shown = [x if some else p for x, p, some in zip(found, map(_logical, self.leaves), has, strict=True)]
        self.check(self._unflatten(shown), stored=None)
        full = iter(self._gather([x if some else None for x, some in zip(found, has, strict=True)]))
        return self._unflatten([next(full) if some else x for x, some in zip(found, has, strict=True)])

    @functools.cached_property
    def _gather(self) -> Callable[[list[Any]], list[jax.Array]]:
        """`unshard` of the leaves; compiled once for the dtypes of a tree."""

        everywhere = NamedSharding(self.mesh, PartitionSpec())

        def full(x: jax.Array, p: Placement) -> jax.Array:
            if is_two_bits(x.dtype):  # barriers: the compiler would move the casts beyond the gather
                for sharding in (self.shard_sharding(p), everywhere):
                    held = jax.lax.with_sharding_constraint(x.astype(jnp.int8), with_auto_mesh(sharding))
                    x = jax.lax.optimization_barrier(held)
            return unpad(x, p)

        def gather(leaves: list[Any]) -> list[jax.Array]:
            pairs = zip(leaves, self.leaves, strict=True)
            return [full(x, p).astype(x.dtype) for x, p in pairs if x is not None]

        return jax.jit(with_auto_axes(gather, self.mesh, everywhere), out_shardings=everywhere)

    def init(self, init_fn: Callable[..., Tree], *args: Any) -> Tree:
        """Runs an initialiser with its outputs in stored form; no device ever holds a full copy.

        Args:
            init_fn: the initialiser; returns a pytree of the structure and shapes given to `partition`.
            *args: its arguments, a PRNG key first of all.

        Returns:
            The parameters in stored form, equal in value to `layout.shard(init_fn(*args))`.

        Raises:
            ValueError: a leaf's shape or dtype does not match the layout (with its key path), or an argument differs
                between processes.

        >>> import zerojax
        >>> init = lambda key: {"w": jax.random.normal(key, (7, 5))}
        >>> mesh = zerojax.make_mesh(num_nodes=2, devices_per_node=4)
        >>> layout = zerojax.partition(jax.eval_shape(init, jax.random.key(0)), mesh, ZeroConfig(min_shard_size=0))
        >>> layout.init(init, jax.random.key(0))["w"].shape  # stored form: 7 rows padded to 8
        (8, 5)
        """
        self.check(jax.eval_shape(init_fn, *args), stored=False)
        check_same_values("layout.init", args)

        def build(*args: Any) -> list[jax.Array]:
            leaves = [drop_weak_type(x) for x in self._flatten(init_fn(*args))]
            return [pad(x, p) if self.stage >= 3 else x for x, p in zip(leaves, self.leaves, strict=True)]

        shardings = [self.param_sharding(p) for p in self.leaves]
        return self._unflatten(jax.jit(build, out_shardings=shardings)(*args))

    def check(self, tree: Tree, *, stored: bool | None, what: str = "params") -> None:
        """Refuses a tree that is not of this layout: structure, shape, dtype (`what` names it in the message).

        Args:
            tree: arrays or shapes.
            stored: True requires stored form, False the logical shapes; None takes logical or padded leaves.
            what: how the message calls the tree.
        """
        found = jax.tree.structure(tree)
        if found != self.treedef:
            raise ValueError(
                f"{what} do not have the structure given to partition: {_first_difference(tree, self.placements)}; "
                "call partition again when the model changes"
            )
        for x, p in zip(self._flatten(tree), self.leaves, strict=True):
            allowed = {p.shape, p.padded_shape} if stored is None else {self.param_shape(p) if stored else p.shape}
            if jnp.shape(x) not in allowed:
                form = "the stored form (layout.shard or layout.init gives it)" if stored else "the layout"
                raise ValueError(
                    f"{what}{p.path} has shape {jnp.shape(x)}, but {form} has {' or '.join(map(str, sorted(allowed)))}"
                    f" on mesh {dict(self.mesh.shape)}"
                )
            if what == "params" and stored is not None and jnp.result_type(x) != p.dtype:
                raise ValueError(f"{what}{p.path} has dtype {jnp.result_type(x)}, but the layout has {p.dtype}")
            self._check_mesh(x, f"{what}{p.path}")

    def describe(self, *, every_leaf: bool = False) -> str:
        """What is sharded, what stayed replicated and why, in bytes; one line per leaf that is not evenly sharded.

        Args:
            every_leaf: a line for the others too. In a notebook, a layout shows itself as a table of all leaves.

        >>> import zerojax
        >>> mesh = zerojax.make_mesh(num_nodes=2, devices_per_node=4)
        >>> shapes = jax.eval_shape(lambda: {"w": jnp.zeros((512, 512)), "b": jnp.zeros(512)})
        >>> layout = zerojax.partition(shapes, mesh, ZeroConfig())
        >>> layout
        stage 3 on mesh node=2 x local=4: 8 shards over ('node', 'local')
        >>> print(layout.describe(every_leaf=True))
        stage 3 on mesh node=2 x local=4: 8 shards over ('node', 'local')
        sharded     1 leaves      1,048,576 bytes,        131,072 on each device
        replicated  1 leaves          2,048 bytes,          2,048 on each device
          ['b'] (512,) float32: replicated, 2,048 bytes: 512 elements, fewer than min_shard_size 16384
          ['w'] (512, 512) float32: 131,072 bytes on each device: dim 0 of 512 divides by 8
        weights are gathered over node, then local; gradients are reduced over local, then node
        """
        return describe(self.mesh, self.config, self.leaves, self.num_shards, every_leaf=every_leaf)

    def __repr__(self) -> str:
        return first_line(self.mesh, self.config, self.num_shards)

    def _repr_html_(self) -> str:
        return html_table(self.mesh, self.config, self.leaves, self.num_shards)

    def _check_mesh(self, x: Any, name: str) -> None:
        sharding = getattr(x, "sharding", None) if not _compat.is_traced(x) else None
        if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
            return
        other, mine = sharding.mesh, self.mesh
        if other.axis_names != mine.axis_names or not np.array_equal(other.devices, mine.devices):
            raise ValueError(
                f"{name} lives on mesh {dict(other.shape)} of {other.size} devices, but the layout is for mesh "
                f"{dict(mine.shape)} of {mine.size}; unshard with the old layout and shard with the new one"
            )

    def leaves_of(self, tree: Tree) -> list[Any]:
        """One entry of a parameter-like tree for each leaf of the layout, None where the tree has none.

        A tree that holds None at a leaf (no gradient) and one that holds None as an empty node (as Equinox's modules
        do) look alike to `jax.tree`.

        Raises:
            ValueError: the tree is not of the layout's structure.

        >>> import zerojax
        >>> mesh = zerojax.make_mesh(num_nodes=2, devices_per_node=4)
        >>> layout = zerojax.partition({"a": None, "w": jnp.ones((8,)), "z": jnp.ones((8,))}, mesh)
        >>> layout.leaves_of({"a": None, "w": None, "z": 1})
        [None, 1]
        """
        return self.treedef.flatten_up_to(tree)

    def _named(self, spec: PartitionSpec, placement: Placement) -> NamedSharding:
        """In the form in which jit returns it: one entry for every dim on a mesh with explicit axes, else trimmed."""
        if _compat.has_explicit_axes(self.mesh):
            spec = PartitionSpec(*spec, *(None,) * (len(placement.shape) - len(spec)))
        return NamedSharding(self.mesh, spec)

    def _flatten(self, tree: Tree) -> list[Any]:
        return jax.tree.leaves(tree)

    def _unflatten(self, leaves: list[Any]) -> Tree:
        return jax.tree.unflatten(self.treedef, leaves)

    def _map(self, fn: Callable[[Any, Placement], Any], tree: Tree) -> Tree:
        return self._unflatten([fn(x, p) for x, p in zip(self._flatten(tree), self.leaves, strict=True)])


def drop_weak_type(x: Any) -> Any:
    """A weakly typed array (`jnp.full(shape, 0.1)`) as one with a dtype: the step would else be compiled twice."""
    return jax.lax.convert_element_type(x, x.dtype) if getattr(x, "weak_type", False) else x


def _logical(p: Placement) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(p.shape, p.dtype)


def _may_share(x: jax.Array, sharding: NamedSharding) -> bool:
    """Whether the array placed so could be, on some device, the same buffer."""
    replicated = sharding.is_fully_replicated
    return replicated or (not _compat.is_traced(x) and x.sharding.is_equivalent_to(sharding, x.ndim))


def _first_difference(tree: Tree, placements: Tree) -> str:
    have = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
    want = [p.path for p in jax.tree.leaves(placements)]
    missing, extra = [w for w in want if w not in have], [h for h in have if h not in want]
    if missing or extra:
        return f"missing {missing[:3]}, unexpected {extra[:3]}"
    return "same key paths in other containers"
