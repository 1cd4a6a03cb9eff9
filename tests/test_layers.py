"""Layers: a module imports what lies below it, and some things are done in one place only.

tree rng noise errors · schema disk lanes · usercode variation  <-  task optim metrics analytic
  <-  algorithm law distill sharpness  <-  algorithms  models  data  <-  engine  <-  record config waiting launch
  <-  experiment history  <-  api budget  <-  compare laws report  <-  cli
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "src" / "fedloom"

# Modules of one line may import each other only where they are a package; a folder stands for all in it.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("tree", "rng", "noise", "errors"),
    ("schema", "disk", "lanes"),
    ("usercode", "variation"),
    ("task", "optim", "metrics", "analytic"),
    ("algorithm", "law", "distill", "sharpness"),
    ("algorithms", "models", "data", "privacy", "corruption", "robust"),
    ("report.curves", "report.partition", "report.compare", "report.topology"),  # drawings of what they are handed
    ("report.grid",),
    ("engine",),
    ("record", "config", "waiting", "launch"),
    ("experiment", "history"),
    ("api", "budget"),
    ("deploy", "compare", "laws", "report.catalogue", "report.health", "report"),
    ("cli",),
    ("__main__", "__init__"),
)
FILES = sorted(ROOT.rglob("*.py"))
PURE = (
    "tree",
    "rng",
    "task",
    "optim",
    "metrics",
    "analytic",
    "law",
    "distill",
    "sharpness",
    "algorithm",
    "algorithms",
    "models",
)
PURE_ENGINE = (
    "plan",
    "arrivals",
    "local",
    "exchange",
    "topology",
    "gossip",
    "evaluate",
    "run",
    "clock",
    "diagnose",
    "forecast",
)
OUTSIDE = {"os", "sys", "io", "pathlib", "shutil", "tempfile", "json", "logging", "subprocess", "time", "random"}


def name_of(path: Path) -> str:
    """``engine.local``; a package is named for itself."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


MODULES = {name_of(path) for path in FILES}


def imported(source: str) -> Iterator[tuple[str, bool]]:
    """What a module imports, fedloom's own without ``fedloom.``, and whether that happens when it is loaded."""
    whole = ast.parse(source)
    late = {id(kid) for node in ast.walk(whole) if _is_late(node) for kid in ast.walk(node)}
    for node in ast.walk(whole):
        now = id(node) not in late
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name.removeprefix("fedloom."), now
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            place = node.module or ""
            if place != "fedloom" and not place.startswith("fedloom."):
                yield place, now
                continue
            for alias in node.names:
                inner = f"{place}.{alias.name}".removeprefix("fedloom.")
                outer = place.removeprefix("fedloom").removeprefix(".")
                yield (inner if inner in MODULES or not outer else outer), now


def _is_late(node: ast.AST) -> bool:
    checking = isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    return checking or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)


def layer(module: str) -> tuple[int, str]:
    """The number of a module's layer, and the entry by which it belongs there."""
    for number, entries in enumerate(LAYERS):
        if module in entries:
            return number, module
    for number, entries in enumerate(LAYERS):
        for entry in entries:
            if module.startswith(f"{entry}."):
                return number, entry
    raise AssertionError(f"{module} has no layer: give it one in tests/test_layers.py")


def upward(module: str, source: str) -> list[str]:
    """The imports of a module that do not lie below it."""
    mine, group = layer(module)
    found = []
    for other, _ in imported(source):
        if other in MODULES:
            number, its = layer(other)
            if number > mine or (number == mine and its != group):
                found.append(other)
    return found


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_point_downwards(path: Path) -> None:
    assert upward(name_of(path), path.read_text()) == []


def test_the_check_itself_can_fail() -> None:
    assert upward("engine.local", "from fedloom.runs.settings import parse") == ["runs.settings"]
    assert upward("engine.local", "def f():\n    from fedloom import api, tree") == ["api"]
    assert upward("models.net", "import fedloom.data.arrays") == ["data.arrays"]
    assert upward("algorithms.fedavg", "from fedloom.engine import plan") == ["engine.plan"]
    assert upward("engine.local", "from fedloom.engine.plan import Group\nfrom fedloom import tree") == []
    with pytest.raises(AssertionError, match="has no layer"):
        layer("utils")


def test_modules_load_without_going_in_circles() -> None:
    graph = {name_of(p): {m for m, now in imported(p.read_text()) if now and m in MODULES} for p in FILES}
    TopologicalSorter({name: needs - {name} for name, needs in graph.items()}).prepare()


# -- who may do what -------------------------------------------------------------------------------
def sources(*folders: str) -> list[Path]:
    return [p for p in FILES if name_of(p).split(".")[0] in folders]


def top(module: str) -> str:
    return module.split(".", maxsplit=1)[0]


@pytest.mark.parametrize("path", sources("algorithms"), ids=name_of)
def test_an_algorithm_is_mathematics(path: Path) -> None:
    """It sees neither the engine nor data, config or logging, and draws nothing by itself."""
    allowed = {"__future__", "collections", "collections.abc", "functools", "itertools", "math", "typing"}
    allowed |= {
        "numpy",
        "numpy.typing",
        "torch",
        "torch.func",
        "torch.nn",
        "torch.nn.functional",
        "pydantic",
        "tree",
        "rng",
        "errors",
        "task",
        "optim",
        "analytic",
        "law",
        "distill",
        "sharpness",
        "algorithm",
        "schema",  # when a setting has an effect
    }
    for module, _ in imported(path.read_text()):
        assert module in allowed or module.startswith("algorithms"), module


@pytest.mark.parametrize("path", sources("engine"), ids=name_of)
def test_the_engine_knows_no_concrete_algorithm_model_or_source(path: Path) -> None:
    for module, _ in imported(path.read_text()):
        assert not module.startswith(("algorithms", "models", "data.sources", "data.files", "data.download")), module


@pytest.mark.parametrize(
    "path",
    [p for p in FILES if top(name_of(p)) in PURE or name_of(p) in {f"engine.{m}" for m in PURE_ENGINE}],
    ids=name_of,
)
def test_what_computes_does_nothing_else(path: Path) -> None:
    """No files, clocks, processes or hidden randomness where numbers are made."""
    if name_of(path) == "engine.local":  # it tells the allocator of the platform to keep its memory
        return
    assert OUTSIDE & {top(module) for module, _ in imported(path.read_text())} == set()


def calls(path: Path) -> Iterator[str]:
    """The functions that a file calls, as they are written."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func)


@pytest.mark.parametrize("path", [p for p in FILES if p.name != "cli.py"], ids=name_of)
def test_only_the_command_line_prints(path: Path) -> None:
    assert {"print", "sys.stdout.write", "sys.stderr.write", "warnings.warn"} & set(calls(path)) == set()
    assert {"rich", "typer", "click", "logging"} & {top(module) for module, _ in imported(path.read_text())} == set()


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_nothing_is_pickled(path: Path) -> None:
    """Who reads a pickle runs what it says; torch's collectives of objects are pickles, too."""
    assert {"pickle", "shelve", "marshal", "dill", "cloudpickle"} & {
        top(m) for m, _ in imported(path.read_text())
    } == set()
    objects = ("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list")
    assert not [name for name in calls(path) if name.endswith((*objects, "_object", "torch.load"))]


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_frameworks_live_at_the_edge(path: Path) -> None:
    name, modules = name_of(path), {top(module) for module, _ in imported(path.read_text())}
    if not name.startswith("deploy"):
        assert modules & {"flwr", "ray", "hydra", "torchvision", "pickle"} == set()
    if name not in ("data.download",) and not name.startswith("deploy"):
        assert modules & {"urllib", "http", "socket", "requests", "ssl"} == set()  # no network but to fetch data
    if not name.startswith("report"):
        assert "matplotlib" not in modules


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_randomness_has_an_address(path: Path) -> None:
    """No generator that advances unseen: what is random goes through ``rng``, or through the seed of a net."""
    if name_of(path) in ("rng", "laws", "engine.curvature"):  # the last starts an iteration from one fixed vector
        return
    made = {"np.random.default_rng", "np.random.seed", "torch.Generator", "torch.rand", "torch.randn", "torch.randperm"}
    assert (made | {"torch.randint", "random.random", "torch.bernoulli"}) & set(calls(path)) == set()
    if "torch.manual_seed" in calls(path):
        assert "fork_rng" in path.read_text()  # and the caller's random state is left as it was


@pytest.mark.parametrize("name", ["curves", "partition", "compare", "grid", "topology"])
def test_drawings_read_only_what_they_are_handed(name: str) -> None:
    path = ROOT / "report" / f"{name}.py"
    own = {module for module, _ in imported(path.read_text()) if module in MODULES}
    assert own <= {"disk", "errors", "schema", "metrics", "data.arrays", "data.partition", "report.compare"}
    assert not any(call.endswith((".read_text", ".read_bytes", ".load", "json.loads")) for call in calls(path))


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_what_a_setting_names_is_imported_in_one_place_only(path: Path) -> None:
    """``usercode`` asks for consent first; ``schema`` and ``__init__`` import modules of fedloom by their names."""
    if name_of(path) in ("usercode", "schema", "__init__"):
        return
    imports = {"import_module", "exec_module", "run_path", "run_module"}
    assert {"exec", "eval", "compile", "__import__"} & set(calls(path)) == set()
    assert imports & {call.rpartition(".")[2] for call in calls(path)} == set()


def test_banned_names_are_not_used() -> None:
    banned = {"utils", "util", "helper", "helpers", "manager", "common", "misc"}
    assert {name.split(".")[-1] for name in MODULES} & banned == set()
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                assert not node.name.startswith(("get_", "set_")), f"{name_of(path)}.{node.name}"
