"""Folders that are there complete or not at all: moved and deleted on file systems and on object stores.

A file system renames a folder at once, so a folder under its own name is complete. An object store ("gs://") knows only
objects: Orbax writes a checkpoint in its place there, and the file commit_success.txt, written last, completes it. So
it is deleted first and copied last here. ("s3://" is written under another name and copied, as Orbax does it.)
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

COMMIT = "commit_success.txt"


def is_complete(folder: Any) -> bool:
    """Whether a checkpoint's folder, if it is one, was written to its end.

    >>> from etils import epath
    >>> is_complete(epath.Path("/run/7"))
    True
    """
    return not is_of_objects(folder) or (folder / COMMIT).exists()


def move(source: Any, target: Any) -> None:
    """Gives a folder another name; killed in between, at least one of the two is complete (one process)."""
    if not is_of_objects(source):
        source.rename(target)
        return
    remove(target)
    for file in sorted(_files(source), key=lambda file: file.name == COMMIT):
        file.copy(target / str(file)[len(str(source)) :].lstrip("/"))
    remove(source)


def remove(folder: Any) -> None:
    """Deletes a folder if it is there, though threads of a save that failed may still write into it."""
    for attempt in range(5):
        try:
            if os.path.islink(folder):
                os.unlink(folder)
            elif folder.exists():
                if is_of_objects(folder):
                    (folder / COMMIT).unlink(missing_ok=True)
                folder.rmtree(missing_ok=True)
            return
        except OSError:
            if attempt == 4:
                raise
            time.sleep(0.1)


def discard(folder: Any) -> None:
    """Deletes a step; killed in between, no half of it is left that looks like a step."""
    if "://" not in str(folder):
        remove(aside := folder.parent / f"{folder.name}.orbax-checkpoint-tmp.deleted")
        folder = folder.rename(aside)
    remove(folder)


def is_of_objects(folder: Any) -> bool:
    """Whether a folder is on an object store where checkpoints are written in their place."""
    return str(folder).startswith("gs://")


def _files(folder: Any) -> Iterator[Any]:
    for child in folder.iterdir():
        if child.is_dir():
            yield from _files(child)
        else:
            yield child
