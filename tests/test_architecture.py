"""The shape of the code: imports point one way, files stay small, public names are documented by running examples."""

import ast
import doctest
import graphlib
import inspect
from pathlib import Path

import pytest

import zerojax

ROOT = Path(__file__).parents[1]
MOST_LINES = 400

# One row a folder, in the order in which values flow: what it is for, and the folders that it may import. "" is the
# root: the configuration and what differs between JAX versions.
FOLDERS: dict[str, tuple[str, set[str]]] = {
    "": ("configuration, JAX versions", set()),
    "hosts": ("processes agree", {""}),
    "layout": ("where leaves live", {"", "hosts"}),
    "collectives": ("how leaves move", {"", "layout"}),
    "gather": ("gather on use", {"", "layout", "collectives"}),
    "gradients": ("loss to gradients", {"", "hosts", "layout", "collectives", "gather"}),
    "optimizer": ("optax on shards", {"", "hosts", "layout", "collectives"}),
    "training": ("step and state", {"", "hosts", "layout", "gradients", "optimizer"}),
    "checkpoints": ("state on disk", {"", "hosts", "layout", "gradients", "optimizer", "training"}),
    "hlo": ("reads compiled programs", set()),
}
FOLDERS["planner"] = ("predicts a step", FOLDERS.keys() - {"checkpoints"})
FOLDERS["tuning"] = ("measures a step", FOLDERS.keys() - {"checkpoints"})
# The faces: they hand on names of the folders.
FACES = ("zerojax/__init__.py", "zerojax/__main__.py")


def sources(*packages: str) -> list[Path]:
    return sorted(path for package in packages for path in (ROOT / package).rglob("*.py"))


def imported_modules(path: Path) -> set[str]:
    """Dotted names of all that a file imports, wherever the import stands: `a.b` for `from a import b`."""
    package = ".".join(path.relative_to(ROOT).with_suffix("").parts[:-1])
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, *([base] if base else [])])
            found |= {f"{base}.{alias.name}" for alias in node.names}
    return found


def folder_of(name: str) -> str:
    """The folder of zerojax that holds a module, by its dotted name: "" for the root."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 and (ROOT / "zerojax" / parts[1]).is_dir() else ""


def zerojax_imports(path: Path) -> set[str]:
    """Dotted names that a file of zerojax takes from the package."""
    return {name for name in imported_modules(path) if name.split(".")[0] == "zerojax"}


def module_of(name: str) -> Path | None:
    """The file behind the dotted name of a module, or of something in it."""
    parts = name.split(".")
    for length in (len(parts), len(parts) - 1):
        path = ROOT.joinpath(*parts[:length]).with_suffix(".py")
        if path.is_file():
            return path
    return None


def names_used(path: Path) -> set[str]:
    """Dotted names that a file reads, as `jax.__version__`, except where an f-string only prints them."""
    tree = ast.parse(path.read_text())
    printed = {id(part) for text in ast.walk(tree) if isinstance(text, ast.JoinedStr) for part in ast.walk(text)}
    attributes = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and id(node) not in printed)
    return {ast.unparse(node) for node in attributes}


RUNTIME = [path for path in sources("zerojax") if str(path.relative_to(ROOT)) not in FACES]


def test_every_folder_has_a_row_and_says_what_it_is_for():
    found = {path.name for path in (ROOT / "zerojax").iterdir() if path.is_dir() and any(path.glob("*.py"))}
    assert found == FOLDERS.keys() - {""}
    for folder in found:
        assert ast.get_docstring(ast.parse((ROOT / "zerojax" / folder / "__init__.py").read_text()))


@pytest.mark.parametrize("path", RUNTIME, ids=lambda path: str(path.relative_to(ROOT / "zerojax")))
def test_a_folder_imports_only_from_those_of_its_row(path):
    folder = folder_of(".".join(path.relative_to(ROOT).with_suffix("").parts))
    _, allowed = FOLDERS[folder]
    for name in zerojax_imports(path):
        assert module_of(name) not in (None, ROOT / "zerojax/__init__.py"), f"{path} imports {name}: name its module"
        assert folder_of(name) in allowed | {folder}, f"{folder}/{path.name} imports {name}, which is not in its row"


def test_no_imports_go_round_in_a_circle():
    imports = {path: {module_of(name) for name in zerojax_imports(path)} & set(RUNTIME) for path in RUNTIME}
    assert tuple(graphlib.TopologicalSorter(imports).static_order())  # raises CycleError


@pytest.mark.parametrize("path", sources("zerojax", "pallas_kernels", "examples", "tests"), ids=lambda p: p.stem)
def test_files_stay_small_and_are_named_after_what_they_hold(path):
    lines = len(path.read_text().splitlines())
    assert lines <= MOST_LINES, f"{path.name} has {lines} lines"
    assert path.stem not in ("utils", "util", "helpers", "common", "misc")


def test_kernels_know_nothing_of_zerojax():
    files = sources("pallas_kernels")
    assert files
    for path in files:
        assert not {name for name in imported_modules(path) if name.split(".")[0] == "zerojax"}, path


def test_only_what_sends_or_stores_blocks_imports_the_kernels():
    # Blocks are sent by the collectives and stored by the moments, and a configuration names their formats; the planner
    # reads the kernels' table of GPUs and, on a GPU, what was found of them; no other module knows that they exist.
    def uses(path: Path) -> bool:
        return any("pallas" in name for name in imported_modules(path))

    users = {str(path.relative_to(ROOT / "zerojax")) for path in sources("zerojax") if uses(path)}
    planner = {"planner/gpus.py", "planner/doctor.py"}
    assert users == {"config.py", "collectives/quantized.py", "optimizer/moments.py"} | planner


def test_only_compat_decides_by_the_version_of_jax():
    def asks(path: Path) -> bool:
        used = names_used(path) | imported_modules(path)
        return any(
            name.startswith(("jax.__version", "jaxlib.__version", "jax.version", "jaxlib.version")) for name in used
        )

    assert {path.stem for path in sources("zerojax", "pallas_kernels") if asks(path)} <= {"_compat"}


def public_functions() -> list[tuple[str, object]]:
    return [(name, getattr(zerojax, name)) for name in zerojax.__all__]


def test_what_is_public_is_what_all_names():
    modules = {path.stem for path in RUNTIME} | FOLDERS.keys()
    visible = {name for name in vars(zerojax) if not name.startswith("_") and name not in modules}
    assert visible <= set(zerojax.__all__)


@pytest.mark.parametrize(("name", "value"), public_functions())
def test_public_names_are_documented_by_an_example(name, value):
    # The examples run as doctests of the modules that hold them (pytest --doctest-modules, in pyproject.toml).
    assert inspect.getdoc(value), f"zerojax.{name} has no docstring"
    methods = vars(value).items() if inspect.isclass(value) else ()
    documented = [value, *(method for method_name, method in methods if not method_name.startswith("_"))]
    texts = [inspect.getdoc(each) or "" for each in documented]
    assert any(map(doctest.DocTestParser().get_examples, texts)), f"zerojax.{name} has no >>> example"


def test_doctests_of_the_package_are_part_of_the_suite(request):
    assert request.config.getoption("doctestmodules")
    assert {"zerojax", "pallas_kernels"} <= set(request.config.getini("testpaths"))


@pytest.mark.parametrize("path", sources("zerojax", "pallas_kernels", "examples"), ids=lambda p: p.stem)
def test_every_signature_is_annotated(path):
    missing = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            spec = node.args
            arguments = [*spec.posonlyargs, *spec.args, *spec.kwonlyargs, *filter(None, (spec.vararg, spec.kwarg))]
            bare = [a.arg for a in arguments if a.annotation is None and a.arg not in ("self", "cls")]
            if bare or node.returns is None:
                missing.append(f"{path.name}:{node.lineno} {node.name}({', '.join(bare)})")
    assert not missing


@pytest.mark.parametrize("path", sources("zerojax", "pallas_kernels", "examples"), ids=lambda p: p.stem)
def test_sections_of_docstrings_are_indented_by_four(path):
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (ast.get_docstring(node) or "").splitlines()
            heads = [i for i, line in enumerate(lines) if line in ("Args:", "Attributes:", "Returns:", "Raises:")]
            found += [lines[i + 1] for i in heads if not lines[i + 1].startswith("    ") or lines[i + 1][4] == " "]
    assert not found
