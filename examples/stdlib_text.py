"""Text that every machine has: the source files of the Python standard library in use, as bytes.

Files, not positions, are split into train and validation, so that the validation loss never sees a training file.
"""

import hashlib
import sysconfig
from pathlib import Path
from typing import NamedTuple

import numpy as np

VOCABULARY = 256  # bytes
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "encodings"}


class Text(NamedTuple):
    """Two uint8 arrays of one dimension: the files of each split, end to end."""

    train: np.ndarray
    validation: np.ndarray


def read_stdlib(folder: Path | None = None, validation_percent: int = 10) -> Text:
    """Read every ``.py`` file below the standard library; a file's own path decides its split."""
    root = folder or Path(sysconfig.get_path("stdlib"))
    train, validation = [], []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if _SKIPPED_FOLDERS.isdisjoint(relative.parts):
            draw = int.from_bytes(hashlib.sha256(relative.as_posix().encode()).digest()[:4], "big") % 100
            (validation if draw < validation_percent else train).append(np.frombuffer(path.read_bytes(), np.uint8))
    if not train or not validation:
        raise FileNotFoundError(
            f"{root} holds {len(train)} train and {len(validation)} validation .py files; need both"
        )
    return Text(np.concatenate(train), np.concatenate(validation))


def sample_batch(text: np.ndarray, rng: np.random.Generator, batch: int, length: int) -> np.ndarray:
    """Draw ``batch`` random windows; uint8 of shape (batch, length + 1): inputs and, one byte on, the targets."""
    starts = rng.integers(0, len(text) - length, size=batch)
    return text[starts[:, None] + np.arange(length + 1)]
