"""Do the tests see? Mutants of a folder's code, each run against the folder's tests; a developer's command, not a test.

    python tests/mutate.py collectives --count 10 --seed 1
    python tests/mutate.py kernels --tests tests/kernels/test_kernels_sums.py

A mutant changes one operator, comparison, constant or call in a copy of the tree. It is killed when a test fails or
takes too long. One that survives is printed with its line: either the line changes no promise, or a test is missing.

The pass of 2026-12-01, seed 3, killed of tried: kernels 7 of 10, collectives 4 of 7, gather 3 of 8 by four of its
files (one more by the layered programs), optimizer 2 of 6. Survivors that changed a promise have tests now: the
smallest scale of tiles, replicas in int8 inside a node, packs on two devices and the size of a pack. The others change
none: a wider margin below 1 / reach, branches that agree at their boundary, `strict` of lists of one length, which
products an update leaves to the compiler, two ways to take a lookup at stored places, whether an operation on frozen
and trained weights is a point of the order.
"""

import argparse
import ast
import copy
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
# What is mutated, and the tests that must see it.
FOLDERS = {
    "gather": (["zerojax/gather"], ["tests/gather"]),
    "collectives": (["zerojax/collectives"], ["tests/collectives", "tests/gradients/test_zero_plus_plus.py"]),
    "gradients": (["zerojax/gradients"], ["tests/gradients", "tests/training/test_oracle.py"]),
    "optimizer": (["zerojax/optimizer"], ["tests/optimizer"]),
    "checkpoints": (["zerojax/checkpoints"], ["tests/checkpoints"]),
    "kernels": (
        ["pallas_kernels/reference.py", "pallas_kernels/scale_rounding.py", "pallas_kernels/slices.py"],
        ["tests/kernels/test_kernels_meaning.py", "tests/kernels/test_kernels_sums.py"],
    ),
}
SWAPPED = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult, ast.Mod: ast.Mult,
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip
CALLS = {"min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum", "any": "all", "all": "any",
         "psum": "pmax", "pmean": "psum", "zeros": "ones", "zeros_like": "ones_like"}  # fmt: skip


def changes(node: ast.AST) -> Iterator[tuple[str, object]]:
    """Fields of a node with another value for each."""
    if isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in SWAPPED:
        yield "op", SWAPPED[type(node.op)]()
    elif isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPPED:
        yield "ops", [SWAPPED[type(node.ops[0])](), *node.ops[1:]]
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield "value", not node.value
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield "value", node.value + 1
    elif isinstance(node, ast.Call):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)
        if name in CALLS:
            func = copy.deepcopy(node.func)
            setattr(func, "attr" if isinstance(func, ast.Attribute) else "id", CALLS[name])
            yield "func", func


def code_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those of annotations and of messages."""
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns") or isinstance(tree, ast.Raise | ast.Assert | ast.JoinedStr):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield child
                yield from code_nodes(child)


def mutants(path: Path) -> Iterator[tuple[int, str, str]]:
    """(line, what it says now, source of the file with it) for every change of a file."""
    source = path.read_text()
    tree = ast.parse(source)
    for node in code_nodes(tree):
        for field, value in changes(node):
            lines = source.splitlines(keepends=True)
            first, last = node.lineno - 1, node.end_lineno - 1  # type: ignore[attr-defined]
            before = getattr(node, field)
            setattr(node, field, value)
            text = ast.unparse(node)
            setattr(node, field, before)
            head = lines[first].encode()[: node.col_offset].decode()  # type: ignore[attr-defined]
            tail = lines[last].encode()[node.end_col_offset :].decode()  # type: ignore[attr-defined]
            new = f"{head}({text}){tail}"
            yield first + 1, new.strip(), "".join([*lines[:first], new, *lines[last + 1 :]])


def is_seen(tests: list[str], tree: Path, seconds: float) -> bool:
    """Whether a test fails on the tree."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not aot", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONPATH": str(tree), "JAX_PLATFORMS": "cpu"}
    try:
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return True
    return done.returncode != 0


def main() -> int:
    """Runs the command line; returns the number of survivors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", choices=FOLDERS)
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tests", nargs="+", help="instead of the folder's")
    parser.add_argument("--files", nargs="+", help="instead of the folder's")
    parser.add_argument("--seconds", type=float, default=900, help="after which a mutant is taken to hang")
    options = parser.parse_args()
    places, tests = FOLDERS[options.folder]
    found = (ROOT / place for place in options.files or places)
    files = [file for place in found for file in (sorted(place.rglob("*.py")) if place.is_dir() else [place])]
    every = [(file, *mutant) for file in files for mutant in mutants(file)]
    chosen = random.Random(options.seed).sample(every, min(options.count, len(every)))
    survivors = 0
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        names = ("zerojax", "pallas_kernels", "tests", "examples", "pyproject.toml", "README.md")
        for name in names:
            source = ROOT / name
            (shutil.copytree if source.is_dir() else shutil.copy)(source, (tree.mkdir(exist_ok=True), tree / name)[1])
        for file, line, text, source in chosen:
            copied = tree / file.relative_to(ROOT)
            original = copied.read_text()
            copied.write_text(source)
            seen = is_seen(options.tests or tests, tree, options.seconds)
            copied.write_text(original)
            survivors += not seen
            print(f"{'killed  ' if seen else 'SURVIVED'} {file.relative_to(ROOT)}:{line}: {text}", flush=True)
    print(f"{survivors} of {len(chosen)} survived, of {len(every)} mutants")
    return survivors


if __name__ == "__main__":
    sys.exit(min(main(), 1))
