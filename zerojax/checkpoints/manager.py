"""`CheckpointManager`: the checkpoints of a run, written while training goes on.

A folder of steps, each one what `zerojax.save(folder, ..., step=)` writes, and read by `zerojax.restore` as well.
Saving copies the state to the host and returns; Orbax writes in the background, and what went wrong is raised by the
next call. The manager keeps the latest steps and the best, remembers the position of the data beside the state, takes
the step before when the latest is damaged, and saves when the job is told to stop.
"""

from __future__ import annotations

import json
import os
import warnings
from typing import Any, NamedTuple

import jax
import optax

from zerojax.checkpoints import paths
from zerojax.checkpoints.beside import from_json, to_json
from zerojax.checkpoints.saving import begin_saving, read
from zerojax.checkpoints.step_folder import StepFolder
from zerojax.checkpoints.writing import make_handler, orbax, snapshot
from zerojax.hosts.agreement import agree, exchange
from zerojax.hosts.preemption import REQUEUE_STATUS, StopPoint
from zerojax.layout.facts import layout_facts
from zerojax.layout.layout import Layout
from zerojax.layout.notices import ZeroNotice

Tree = Any
# Characters of what all processes keep beside a step: each of them reads it all when it restores.
_LARGEST_DATA = 64 << 20
# Orbax gives each process 20 minutes to write; the others wait a little longer.
_WRITING_SECONDS = 1260


class Restored(NamedTuple):
    """One step of a run.

    Attributes:
        step: its number.
        state: the tree in stored form.
        data: what this process had given to `save(data=)`.
        metrics: what was given to `save(metrics=)`.
        run: what was given to the manager as `run=`.
    """

    step: int
    state: Tree
    data: Any
    metrics: dict[str, float]
    run: dict[str, Any]


class CheckpointManager:
    """Saves and restores the steps of a run; all processes of a job make the same calls.

    Args:
        directory: folder of the steps; see `zerojax.save`. Made when the first step is saved.
        layout: the layout of the state.
        tx: the optimizer made by `zerojax.zero`, if the state holds its state.
        keep: how many of the latest steps to keep; None keeps all.
        every: which steps `save` writes: the multiples of it, and the last one when the job is told to stop.
        best: name of a metric given to `save(metrics=)`: the step where it is least is kept too; "-accuracy" keeps the
            step where it is greatest.
        run: a small record of the run, written beside every step.
        checksums: as for `zerojax.save`.

    Attributes:
        stopping: the job was told to stop (SIGTERM), and the step just given to `save` is written.

    The loop of a run that may be stopped and started again:

    >>> import jax.numpy as jnp, numpy as np, tempfile, zerojax
    >>> mesh, params = zerojax.make_mesh(num_nodes=2, devices_per_node=4), {"w": jnp.ones((16, 4))}
    >>> layout = zerojax.partition(params, mesh, zerojax.ZeroConfig(min_shard_size=0))
    >>> tx = zerojax.zero(optax.sgd(0.1), layout)
    >>> step_fn = zerojax.make_train_step(lambda p, x: jnp.mean(x @ p["w"]), tx, layout)
    >>> state, data = zerojax.TrainState.create(layout.shard(params), tx), np.random.default_rng(0)
    >>> directory = tempfile.mkdtemp()
    >>> with zerojax.CheckpointManager(directory, layout, tx, keep=2, every=2) as manager:
    ...     if (found := manager.restore()) is not None:
    ...         state, data = found.state, found.data
    ...     for step in range(int(state.step) + 1, 6):
    ...         state, metrics = step_fn(state, data.normal(size=(8, 16)))
    ...         saved = manager.save(step, state, data=data)
    ...         if manager.stopping:
    ...             raise SystemExit(manager.exit_status)  # tells the scheduler to start the job again
    >>> zerojax.CheckpointManager(directory, layout, tx).all_steps()
    [2, 4]
    """

    #: The status to end with when `stopping`: 75, "try again later".
    exit_status = REQUEUE_STATUS

    def __init__(
        self,
        directory: str | os.PathLike[str],
        layout: Layout,
        tx: optax.GradientTransformation | None = None,
        *,
        keep: int | None = None,
        every: int = 1,
        best: str | None = None,
        run: dict[str, Any] | None = None,
        checksums: bool = True,
    ) -> None:
        for name, value in (("keep", keep), ("every", every)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"CheckpointManager({name}={value!r}): a positive integer is required")
        self.directory = paths.checkpoint_path(directory)
        self.stopping = False
        self._layout, self._tx, self._run = layout, tx, to_json(run or {}, "run")
        self._every, self._best, self._checksums = every, best, checksums
        self._stop = StopPoint()
        self._ocp, tensorstore = orbax()
        self._padded: dict[str, tuple[int, ...]] = {}
        self._checkpointer = self._ocp.AsyncCheckpointer(make_handler(self._ocp, tensorstore, self._padded))
        self._pending: tuple[Any, str] | None = None  # what is being written, and whether it replaces something
        self._steps = StepFolder(self.directory, keep, best)
        self._saved: set[int] = set()

    def save(
        self,
        step: int,
        state: Tree,
        *,
        data: Any = None,
        metrics: dict[str, Any] | None = None,
        force: bool = False,
    ) -> bool:
        """Saves a step if it is to be saved; returns when the state may be overwritten, not when it is written.

        Args:
            step: its number, larger from call to call.
            state: as for `zerojax.save`.
            data: what is to be remembered beside it, of each process its own: the position of a data iterator (or the
                iterator, if it has `get_state()`), generators, PRNG keys; see `zerojax.checkpoints.beside`.
            metrics: numbers by name.
            force: save whatever `every` says.

        Returns:
            Whether the step was saved.

        Raises:
            ValueError: as `zerojax.save`; `data` cannot be kept; the metric of `best` is not given.
            Exception: of the save before this one, if it failed; nothing of it is left.
        """
        number = paths.check_step(step)
        self.stopping = self._stop.reached(number)
        if number in self._saved or not (force or self.stopping or number % self._every == 0):
            if self.stopping:
                self.wait()
            return False
        name = (self._best or "").removeprefix("-")
        if name and name not in (metrics or {}):
            raise ValueError(f"CheckpointManager(best={self._best!r}): save(metrics=) lacks it at step {number}")
        self.wait()
        taken = snapshot(state, self._layout, self._tx, with_checksums=self._checksums)
        said: list[str] = []  # on process 0, which alone writes it

        def keep(texts: list[str]) -> str:
            said.extend(texts if len(set(texts)) > 1 else texts[:1])
            if (size := sum(map(len, said))) > _LARGEST_DATA:
                raise ValueError(f"save(data=) of all processes together is {size} characters long: keep small records")
            return ""

        exchange("save: data", json.dumps(to_json(data)), keep)
        more = {
            "data": [json.loads(text) for text in said],
            "metrics": {key: float(value) for key, value in (metrics or {}).items()},
            "run": self._run,
        }
        target = self.directory / str(number)
        situation = begin_saving(
            target, taken.about, self._layout, overwrite=True, prepare=lambda: self._steps.make_room(number)
        )
        self._padded.clear()
        self._padded.update(taken.padded)
        self._pending = (target, situation)
        self._checkpointer.save(
            paths.place_for(target, situation), self._ocp.args.PyTreeSave(taken.tree),
            custom_metadata={"zerojax": taken.about | more},
        )  # fmt: skip
        self._saved.add(number)
        if self.stopping or situation == "ours":
            self.wait()
        return True

    def wait(self) -> None:
        """Waits until what is being written is there, and deletes the steps that are not to be kept.

        Raises:
            Exception: it could not be written; nothing of it is left.
        """
        if self._pending is None:
            return
        (target, situation), self._pending = self._pending, None
        problem: Exception | None = None
        try:
            self._checkpointer.wait_until_finished()
        except Exception as error:
            problem = error
        mine = f"process {jax.process_index()}: {type(problem).__name__}: {str(problem)[:500]}" if problem else ""
        # One process that cannot write is a failure of all: they go on together or not at all.
        if said := exchange("save: what was written", mine, lambda x: next(filter(None, x), ""), _WRITING_SECONDS):
            self._saved.discard(int(target.name))
            if jax.process_index() == 0:
                paths.remove_unfinished(target.parent, target.name)
            raise problem or OSError(f"save: {target} was not written by {said}")
        if situation == "ours":
            agree("save: replacing the old checkpoint", {}, lambda: paths.take_place(target) or "")
        if jax.process_index() == 0:
            try:
                self._steps.delete_old()
            except OSError as error:
                warnings.warn(f"an old step was not deleted: {error}", ZeroNotice, stacklevel=2)

    def restore(self, step: int | None = None, *, like: Tree | None = None) -> Restored | None:
        """The latest step that is complete, or None if there is none: the run starts from its beginning.

        Args:
            step: this step instead.
            like: as for `zerojax.restore`; needed without `tx` for what is neither parameters nor a `TrainState`.

        Raises:
            ValueError: as `zerojax.restore`; of a damaged latest step only a `ZeroNotice` is given, and the one before
                is taken; if there are steps but none is complete, the error of the last one tried.
        """
        self.wait()
        asked = None if step is None else paths.check_step(step)
        facts = {"directory": self.directory, "step": asked, **layout_facts(self._layout)}
        steps = json.loads(agree("restore", facts, lambda: json.dumps(paths.steps_in(self.directory))))
        if asked is not None:
            return self._read(asked, like)
        problem: ValueError | None = None
        for number in reversed(steps):
            try:
                return self._read(number, like)
            except paths.DamagedCheckpoint as error:
                problem = error
                self._steps.damaged.add(number)
                warnings.warn(f"{error}. Trying the step before", ZeroNotice, stacklevel=2)
        if problem is not None:
            raise problem
        return None

    def latest_step(self) -> int | None:
        """The latest step that is there and not known to be damaged, as process 0 sees it; None if there is none."""
        steps = self.all_steps()
        return steps[-1] if steps else None

    def all_steps(self) -> list[int]:
        """The steps that are there and not known to be damaged, as process 0 sees them; waits for what is written."""
        self.wait()
        facts = {"directory": self.directory}
        return json.loads(agree("list the steps", facts, lambda: json.dumps(self._steps.complete())))

    def close(self) -> None:
        """Waits for what is being written, and ends the threads that write."""
        try:
            self.wait()
        finally:
            self._checkpointer.close()

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None or jax.process_count() == 1:
            self.close()
        else:  # perhaps this process alone fails: what is being written ends, but the others are not waited for
            self._pending = None
            self._checkpointer.close()

    def _read(self, number: int, like: Tree | None) -> Restored:
        target = paths.actual(self.directory / str(number))
        if not target.exists():
            raise FileNotFoundError(f"restore: no checkpoint at {target}")
        state = read(target, self._layout, self._tx, like)
        self._steps.restored = number
        about = paths.read_about(target)
        kept = about.get("data", [None])
        if len(kept) not in (1, jax.process_count()):
            warnings.warn(
                f"{target} has the data positions of {len(kept)} processes, and there are {jax.process_count()}: "
                "Restored.data is the list of all of them",
                ZeroNotice,
                stacklevel=3,
            )
            mine = kept
        else:
            mine = kept[0] if len(kept) == 1 else kept[jax.process_index()]
        return Restored(number, state, from_json(mine), about.get("metrics", {}), from_json(about.get("run", {})))
