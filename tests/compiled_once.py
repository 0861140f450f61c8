"""Programs compiled ahead of time, kept between test files, workers and tiers under a hash of all they are made from.

The hash is over the whole lowered module with the name stack of every operation (not its place in a file), the target's
facts, the order of the devices, the options of the compile, JAX's configuration, the flags of XLA and the versions of
JAX and of the plugin: a text cannot be older than its source. Texts lie in the system's folder for temporary files, are
written at once or not at all, and go when nothing has asked for them for two days.
"""

import contextlib
import gzip
import hashlib
import importlib.metadata
import json
import os
import re
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax

from zerojax.planner.gpus import load_target

FOLDER = Path(tempfile.gettempdir()) / f"zerojax-compiled-texts-{os.getuid()}"
KEPT_SECONDS = 2 * 24 * 3600


class Program(NamedTuple):
    """What `read_program` asks of a compiled program."""

    text: str
    figures: dict[str, int] | None

    def as_text(self) -> str:
        return self.text

    def memory_analysis(self) -> Any:
        return None if self.figures is None else SimpleNamespace(**self.figures)


def compile_once(lowered: Any, mesh: jax.sharding.Mesh, target: str, options: dict[str, Any] | None = None) -> Any:
    """`lowered.compile(options)` as a `Program`, compiled here or read.

    Args:
        lowered: `jax.jit(f).lower(*args)`.
        mesh: the mesh of its shardings, of `target_mesh(target, ..)`.
        target: the GPU's name.
        options: of the compile.
    """
    file = FOLDER / f"{key_of(lowered, mesh, target, options)}.json.gz"
    with contextlib.suppress(OSError, EOFError, ValueError, TypeError):  # absent, or cut by a full disk
        found = Program(**json.loads(gzip.decompress(file.read_bytes())))
        os.utime(file)
        return found
    compiled = lowered.compile(options)
    stats = compiled.memory_analysis()
    names = [] if stats is None else [name for name in dir(stats) if name.endswith("_in_bytes")]
    made = Program(compiled.as_text(), None if stats is None else {name: int(getattr(stats, name)) for name in names})
    with contextlib.suppress(OSError):
        keep(file, made)
    return made


def key_of(lowered: Any, mesh: jax.sharding.Mesh, target: str, options: dict[str, Any] | None) -> str:
    """A hash of everything that the compiler is given."""
    distributions = sorted(
        (each.metadata["Name"] or "", each.version)
        for each in importlib.metadata.distributions()
        if (each.metadata["Name"] or "").startswith(("jax", "nvidia"))
    )
    parts = (
        with_names(lowered.as_text(debug_info=True)), load_target(target), [device.id for device in mesh.devices.flat],
        dict(mesh.shape), lowered._lowering._compiler_options_kvs, sorted((options or {}).items()),
        sorted(jax.config.values.items()), os.environ.get("XLA_FLAGS"), distributions,
    )  # fmt: skip
    return hashlib.sha256("\0".join(map(repr, parts)).encode()).hexdigest()


def with_names(text: str) -> str:
    """A module printed with its locations, with their names alone: `#loc7 = loc("jit(f)/sin"(#loc5))`."""
    named = re.findall(r'^(#loc\d*) = loc\(("[^"]*"\(.*)$', text, re.MULTILINE)
    names = {number: re.sub(r"#loc\d*", "", rest) for number, rest in named}
    body = re.sub(r"^#loc\d* = .*\n?", "", text, flags=re.MULTILINE)
    return re.sub(r"#loc\d*", lambda found: names.get(found[0], ""), body)


def keep(file: Path, program: Program) -> None:
    """Writes a program beside its place and renames it; removes what has not been read for long."""
    FOLDER.mkdir(mode=0o700, exist_ok=True)
    if FOLDER.stat().st_uid != os.getuid():
        return
    part = file.with_suffix(f".{os.getpid()}")
    part.write_bytes(gzip.compress(json.dumps(program._asdict()).encode(), 3))
    part.replace(file)
    for other in FOLDER.iterdir():
        if time.time() - other.stat().st_mtime > KEPT_SECONDS:
            other.unlink(missing_ok=True)
