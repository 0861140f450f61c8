"""Where a checkpoint is: paths, steps, what a folder holds, and how one checkpoint takes the place of another.

A checkpoint is there complete or not at all. It is written beside its place and renamed at the end; one that replaces
another is written completely under a name of its own first, so that at any moment at least one can be read: a process
killed between the two renamings leaves the new one under that name, where `find` takes it.
"""

from __future__ import annotations

import functools
import itertools
import json
import operator
import os
import re
import secrets
import time
from typing import Any

import jax

from zerojax.checkpoints.folders import COMMIT, is_complete, is_of_objects, move, remove
from zerojax.hosts.agreement import agree

_METADATA = "_CHECKPOINT_METADATA"
_NEW, _OLD = ".zerojax-new", ".zerojax-old"
# What Orbax writes into the folder of a checkpoint.
_OWN = re.compile(r"_\w+|commit_success\.txt|manifest\.ocdbt|ocdbt\.process_.*|d|array_metadatas|\..*")
FORMAT = 1
# How long a file that one process made may take to be seen by the others: the caches of a network file system.
_SEEN_SECONDS = 30


class DamagedCheckpoint(ValueError):
    """A checkpoint that is there but cannot be read completely."""


def checkpoint_path(path: str | os.PathLike[str], step: Any = None) -> Any:
    """The folder of a checkpoint, as an absolute path.

    Args:
        path: local path (`~` is the home folder, a link is followed), "file://..." or the address of an object store
            ("gs://...").
        step: an integer from 0, of Python, NumPy or JAX, or None.

    Raises:
        ValueError: another kind of address, or a step that is no such integer.
    """
    from etils import epath

    text = os.fspath(path)
    scheme, found, rest = text.partition("://")
    if found and scheme == "file":
        host, slash, rest = rest.partition("/")
        if host not in ("", "localhost") or not slash:
            raise ValueError(f"{text}: write file:///absolute/path")
        text, found = f"/{rest}", ""
    if found and scheme not in ("gs", "s3"):
        raise ValueError(f"{text}: checkpoints go to a local path, file://, gs:// or s3://")
    if not found:
        text = os.path.abspath(os.path.expanduser(text))
        for _ in range(40):  # through a link, not in its place
            if not os.path.islink(text):
                break
            text = os.path.normpath(os.path.join(os.path.dirname(text), os.readlink(text)))
    folder = epath.Path(text)
    return folder if step is None else folder / str(check_step(step))


def check_step(step: Any) -> int:
    """The step as an int.

    >>> check_step(7)
    7
    """
    try:
        number = -1 if isinstance(step, bool) else operator.index(step)
    except TypeError:
        number = -1
    if number < 0:
        raise ValueError(f"step={step!r}: an integer from 0 is required (state.step will do)")
    return number


def steps_in(folder: Any) -> list[int]:
    """The steps whose folders are there, complete or damaged, in order."""
    if not folder.is_dir():
        return []
    names = {re.sub(f"{re.escape(_NEW)}$", "", child.name) for child in folder.iterdir()}
    return sorted(int(name) for name in names if name.isdigit() and str(int(name)) == name)


def actual(target: Any) -> Any:
    """The folder itself, or where it lies while it takes the place of an older one."""
    if not target.exists() or not is_complete(target):
        for suffix in (_NEW, _OLD):
            if (other := target.parent / (target.name + suffix)).exists() and is_complete(other):
                return other
    return target


def is_checkpoint(folder: Any) -> bool:
    """Whether the folder is one checkpoint, of whatever writer."""
    return (folder / _METADATA).exists() and is_complete(folder)


def find(path: Any, step: int | None) -> Any:
    """The folder of the checkpoint at a path, or of the latest step in it.

    Raises:
        FileNotFoundError: there is none.
    """
    target = actual(path if step is None else path / str(step))
    steps = steps_in(path)
    if step is None and steps and not is_checkpoint(target):
        target = actual(path / str(steps[-1]))
    if not target.exists() or (step is None and not steps and not is_checkpoint(target) and not _is_ours(target)):
        there = f"; steps there: {_listed(steps)}" if steps and step is not None else ""
        raise FileNotFoundError(f"restore: no checkpoint at {target}{there}")
    return target


def read_about(target: Any) -> dict[str, Any]:
    """What `save` wrote of a checkpoint beside its arrays.

    Raises:
        DamagedCheckpoint: the file is missing or cannot be read.
        ValueError: it was written by something else, or by a newer zerojax.
    """
    file = target / _METADATA
    if not file.exists():
        raise DamagedCheckpoint(f"{target} is damaged: it lacks {_METADATA}. {remedy(target)}")
    if not is_complete(target):
        raise DamagedCheckpoint(f"{target} was not written to its end: it lacks {COMMIT}. {remedy(target)}")
    try:
        text = file.read_text()
        about = (json.loads(text).get("custom_metadata") or {}).get("zerojax")
    except (ValueError, AttributeError, OSError) as error:
        raise DamagedCheckpoint(f"{file} is damaged ({type(error).__name__}: {error}). {remedy(target)}") from None
    if not isinstance(about, dict) or not isinstance(about.get("format"), int):
        raise ValueError(f"{target} is an Orbax checkpoint that zerojax.save (format {FORMAT}) did not write")
    if about["format"] > FORMAT:
        raise ValueError(
            f"{target} was written by a newer zerojax (format {about['format']}; this one reads {FORMAT}): update it"
        )
    return about


def remedy(target: Any) -> str:
    """What to do about a damaged checkpoint: the complete steps beside it."""
    beside = [s for s in steps_in(target.parent) if str(s) != target.name] if target.name.isdigit() else []
    complete = [s for s in beside if is_checkpoint(actual(target.parent / str(s)))]
    if not complete:
        return "Restore another checkpoint"
    return f"Restore step={max(complete)} instead; steps that have their metadata: {_listed(complete)}"


def check_place(target: Any, overwrite: bool) -> str:
    """What is at the place of a new checkpoint: "free" or "ours" (to be replaced). An empty folder is removed.

    Raises:
        ValueError: something is there that must not be replaced.
    """
    if target.parent.exists() and is_checkpoint(target.parent):
        raise ValueError(f"save: {target.parent} is itself a checkpoint; save beside it, not into it")
    there = actual(target)
    if not there.exists():
        return "free"
    if not there.is_dir():
        raise ValueError(f"save: {there} is a file; choose a folder")
    names = [child.name for child in there.iterdir()]
    if not names:
        there.rmdir()
        return "free"
    if not _is_ours(there):
        steps = steps_in(there)
        what = f"holds steps {_listed(steps)}; pass step=" if steps else "is not a checkpoint; choose another folder"
        raise ValueError(f"save: {there} {what}. overwrite=True replaces a checkpoint and nothing else: {names[0]}")
    if not is_complete(there):  # what a killed save left
        remove(there)
        return "free"
    if not overwrite:
        raise ValueError(f"save: {there} exists; pass overwrite=True to replace it, or another step")
    return "ours"


def _is_ours(folder: Any) -> bool:
    """Whether a folder is a checkpoint of `save`, perhaps damaged: nothing else is in it."""
    names = [child.name for child in folder.iterdir()]
    if not names or not all(_OWN.fullmatch(name) for name in names):
        return False
    if not is_complete(folder):
        return _METADATA in names
    try:
        read_about(folder)
    except DamagedCheckpoint:
        return bool({"manifest.ocdbt", "_METADATA", "array_metadatas"} & set(names))
    except ValueError as error:
        return "newer" in str(error)
    return True


def place_for(target: Any, situation: str) -> Any:
    """Where to write: at the target, or beside the one that is to be replaced."""
    return target if situation == "free" else target.parent / (target.name + _NEW)


def prepare_place(target: Any, situation: str) -> None:
    """Removes what an earlier attempt to replace the target left (one process)."""
    if situation != "ours":
        return
    if (there := actual(target)) != target:  # of an interrupted replacement: give it its name
        move(there, target)
    for suffix in (_NEW, _OLD):
        remove(target.parent / (target.name + suffix))


def take_place(target: Any) -> None:
    """Renames the written checkpoint over the old one, then deletes the old one (one process)."""
    new, old = (target.parent / (target.name + suffix) for suffix in (_NEW, _OLD))
    if not is_of_objects(target):
        target.rename(old)
    move(new, target)
    remove(old)


def remove_unfinished(folder: Any, name: str | None = None) -> list[str]:
    """Removes what saves that failed or were killed left in a folder; returns the names (one process).

    Args:
        folder: the folder of the checkpoint, or of steps.
        name: only what belongs to this checkpoint.
    """
    removed = []
    for child in folder.iterdir() if folder.is_dir() else ():
        own, found, _ = child.name.partition(".orbax-checkpoint-tmp")
        base = re.sub(f"({re.escape(_NEW)}|{re.escape(_OLD)})$", "", own)
        named = folder / base
        superseded = child.name.endswith((_NEW, _OLD)) and named.exists() and is_complete(named)
        unfinished = not found and child.is_dir() and not is_complete(child) and _is_ours(child)
        if (found or superseded or unfinished) and (base == name if name is not None else base.isdigit()):
            remove(child)
            removed.append(child.name)
    return removed


def move_aside(folder: Any) -> None:
    """Gives a step a name under which nothing takes it for one."""
    names = (f"{folder.name}.aside{number or ''}" for number in itertools.count())
    move(actual(folder), next(aside for name in names if not (aside := folder.parent / name).exists()))


def _listed(steps: list[int]) -> str:
    return ", ".join(map(str, steps[-6:])) + (f" and {len(steps) - 6} before" if len(steps) > 6 else "")


@functools.cache
def check_shared(folder: Any) -> None:
    """Refuses a folder that the processes do not share: each would write its part where no other finds it.

    A file that process 0 makes must be seen by all; asked once for each folder.

    Raises:
        ValueError: a process does not see it; named.
    """
    if jax.process_count() == 1 or "://" in str(folder):
        return

    def make() -> str:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".zerojax-shared-{secrets.token_hex(8)}"
        probe.touch()
        return probe.name

    probe = folder / agree("save: a folder that all processes share", {"folder": folder}, make)
    end = time.monotonic() + _SEEN_SECONDS
    while not (seen := probe.exists()) and time.monotonic() < end:
        time.sleep(0.05)
    found = "the file that process 0 made" if seen else "an unshared folder: use one that all processes see"
    try:
        agree("save", {f"what they see in {folder}": found})
    finally:
        if jax.process_index() == 0:
            probe.unlink(missing_ok=True)
