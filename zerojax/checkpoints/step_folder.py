"""The folder of a run's steps: which are complete, which are kept, and who else writes there.

A step that is there is only ever deleted because of its age, by the job that started last. Everything here is done by
process 0, in between the writing, and waits for no other.
"""

from __future__ import annotations

import warnings
from typing import Any

from zerojax.checkpoints import folders, paths
from zerojax.checkpoints.writing import JOB
from zerojax.layout.notices import ZeroNotice


class StepFolder:
    """The steps of one run, as process 0 sees them.

    Args:
        directory: the folder; need not be there yet.
        keep: as for `CheckpointManager`.
        best: as for `CheckpointManager`.

    Attributes:
        damaged: steps that were found damaged.
        restored: the step from which this run went on.

    >>> import tempfile
    >>> StepFolder(paths.checkpoint_path(tempfile.mkdtemp()), keep=2, best=None).complete()
    []
    """

    def __init__(self, directory: Any, keep: int | None, best: str | None) -> None:
        self._directory, self._keep, self._best = directory, keep, best
        self.damaged: set[int] = set()
        self.restored: int | None = None
        self._known: set[int] | None = None  # what was there at the last save

    def complete(self) -> list[int]:
        """The steps that are there and not known to be damaged."""
        found = paths.steps_in(self._directory)
        there = [s for s in found if paths.is_checkpoint(paths.actual(self._directory / str(s)))]
        return [s for s in there if s not in self.damaged]

    def make_room(self, number: int) -> None:
        """Before a step is written: removes what killed saves left, and looks for other writers.

        Raises:
            ValueError: another job, started later, saves here too.
        """
        there = set(paths.steps_in(self._directory))
        if number in self.damaged & there:
            folders.remove(aside := self._directory / f"{number}.damaged")
            folders.move(paths.actual(self._directory / str(number)), aside)
            there.discard(number)
        self.damaged.discard(number)
        if self._known is None:
            paths.remove_unfinished(self._directory)
            later = {s for s in there - self.damaged if s >= number and s != self.restored}
            for step in sorted(later):
                paths.move_aside(self._directory / str(step))
            if later:
                warnings.warn(
                    f"{self._directory} has steps {sorted(later)[-6:]}, and this run, which did not go on from them, "
                    f"saves step {number}: they are kept under the names N.aside",
                    ZeroNotice,
                    stacklevel=2,
                )
            there -= later
        else:
            for step in sorted(there - self._known):
                self._check_writer(step)
        self._known = there | {number}

    def _check_writer(self, step: int) -> None:
        """Of two jobs that save into one folder the one that started first ends."""
        target = paths.actual(self._directory / str(step))
        try:
            job = paths.read_about(target).get("job", JOB)
        except ValueError:
            return
        if job > JOB:
            raise ValueError(
                f"{target} was written by another job, which started after this one: two that save into one folder "
                "delete and replace each other's steps, so this one ends. Give each its own folder"
            )
        if job != JOB:
            warnings.warn(
                f"{target} was written by another job, which started before this one and still saves into this folder",
                ZeroNotice,
                stacklevel=2,
            )

    def delete_old(self) -> None:
        """Deletes the steps that are not to be kept."""
        if self._keep is None:
            return
        steps = self.complete()
        kept = set(steps[-self._keep :])
        if self._best is not None:
            name, sign = self._best.removeprefix("-"), -1 if self._best.startswith("-") else 1
            measured = {s: self._metric(s, name) for s in steps}
            scored = {s: sign * value for s, value in measured.items() if value is not None and value == value}
            kept |= {min(scored, key=lambda s: (scored[s], s))} if scored else set()
        for step in steps:
            if step not in kept:
                folders.discard(self._directory / str(step))

    def _metric(self, step: int, name: str) -> float | None:
        try:
            return paths.read_about(paths.actual(self._directory / str(step))).get("metrics", {}).get(name)
        except ValueError:
            return None
