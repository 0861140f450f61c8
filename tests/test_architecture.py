"""The shape of the code: imports point one way, files stay small, public names are documented by running examples."""

import ast
import doctest
import inspect
from pathlib import Path

import pytest

import zerojax

ROOT = Path(__file__).parents[1]
MOST_LINES = 400

# Values flow downwards in this list: a module imports only from the lines above its own.
LAYERS: list[tuple[str, ...]] = [
    ("_compat", "config", "mesh", "placement", "low_precision_moments", "simulated"),
    ("notices",),
    ("layout",),
    ("partition", "state_sharding", "batches", "feedback", "accumulation", "losses", "model_state"),
    ("loss_scaling", "nonfinite"),
    ("collectives",),
    ("quantized_collectives",),
    ("stored",),
    ("secondaries",),
    ("gather_on_use",),
    ("backward",),
    ("local_gradients",),
    ("gradients",),
    ("master_weights", "update_checks"),
    ("whole_matrices",),
    ("optimizer",),
    ("train_state",),
    ("train_step",),
    ("remat", "saved_leaves"),
    ("saving",),
    # Readers of compiled programs and of the layout: nothing above imports them.
    ("hlo_text", "device_groups", "gpu_facts", "leaf_uses"),
    ("loop_trips", "gpu_targets"),
    ("hlo_schedule",),
    ("compiled_collective", "matmul_flops"),
    ("compiled_program", "node_share"),
    ("memory", "comms"),
    ("plan_time", "plan_models"),
    ("plan_records", "plan_inputs"),
    ("plan_compile", "plan_largest", "plan_memory", "plan_traffic", "plan_advice"),
    ("plan_configs", "plan_report", "plan_picture"),
    ("planner",),
    ("cli",),
]
LEVEL = {module: level for level, modules in enumerate(LAYERS) for module in modules}


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


def siblings(path: Path) -> set[str]:
    """The modules of zerojax that a module of zerojax imports, and whatever else it takes from the package."""
    return {f"{name}.".split(".")[1] for name in imported_modules(path) if name.split(".")[0] == "zerojax"}


def names_used(path: Path) -> set[str]:
    """Dotted names that a file reads, as `jax.__version__`, except where an f-string only prints them."""
    tree = ast.parse(path.read_text())
    printed = {id(part) for text in ast.walk(tree) if isinstance(text, ast.JoinedStr) for part in ast.walk(text)}
    attributes = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and id(node) not in printed)
    return {ast.unparse(node) for node in attributes}


RUNTIME = [path for path in sources("zerojax") if path.stem not in ("__init__", "__main__")]


@pytest.mark.parametrize("path", RUNTIME, ids=lambda path: path.stem)
def test_a_module_imports_only_from_the_layers_before_it(path):
    assert path.stem in LEVEL, f"{path.stem} has no place yet: give it one in LAYERS"
    unplaced = siblings(path) - LEVEL.keys()
    assert not unplaced, f"{path.stem} imports {sorted(unplaced)} from the package itself: import from the module"
    back = [name for name in siblings(path) if LEVEL[name] >= LEVEL[path.stem]]
    assert not back, f"{path.stem} imports from its own layer or a later one: {sorted(back)}"


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
    # Blocks are sent by the collectives and stored by the moments; no other module knows that they exist.
    users = {path.stem for path in sources("zerojax") if any("pallas" in name for name in imported_modules(path))}
    assert users == {"quantized_collectives", "low_precision_moments"}


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
    modules = {path.stem for path in RUNTIME}
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
