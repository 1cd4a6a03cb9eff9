"""The plan of the house: which group may import which, what is done in one place only, and how long a function gets."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1] / "src" / "fedloom"
FILES = sorted(ROOT.rglob("*.py"))
ENTRIES = 13  # at the top, beside __init__, __main__ and py.typed

# A group may import its own modules and those of the groups below it, which come first here.
GROUPS: tuple[tuple[str, ...], ...] = (
    ("core",),
    ("maths",),
    ("algorithm",),
    ("models", "data"),
    ("algorithms",),
    ("trust",),
    ("engine",),
    ("report",),
    ("runs",),
    ("deploy",),
    ("compare",),
    ("cli",),
    ("__main__", "__init__"),
)
# What a group may not import although it lies below.
APART = {
    "algorithms": {"models", "data"},  # a method sees a task and batches
}
EXCEPT = {("engine.laws", "algorithms.fedavg"), ("engine.laws", "models.net")}  # laws compare methods with FedAvg


def name_of(path: Path) -> str:
    """``engine.local``; a package is named for itself."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


SOURCES = {name_of(path): path for path in FILES}


@cache
def parsed(module: str) -> ast.Module:
    return ast.parse(SOURCES[module].read_text(encoding="utf-8"))


def top(module: str) -> str:
    return module.split(".", maxsplit=1)[0]


class Import(NamedTuple):
    module: str  # fedloom's own without ``fedloom.``
    own: bool
    at_load: bool  # and not inside a function


@cache
def imported(tree: ast.Module) -> tuple[Import, ...]:
    """What a module imports, also inside functions."""
    return tuple(_imports(tree))


def statements(node: ast.AST, *, late: bool = False) -> Iterator[tuple[ast.stmt, bool]]:
    """All statements inside, also of functions and classes, and whether each runs after the module was loaded."""
    for kid in ast.iter_child_nodes(node):
        if not isinstance(kid, ast.expr):  # in which there is no statement
            after = late or _is_late(kid)
            if isinstance(kid, ast.stmt):
                yield kid, after
            yield from statements(kid, late=after)


def _imports(tree: ast.Module) -> Iterator[Import]:
    for node, late in statements(tree):
        at_load = not late
        if isinstance(node, ast.Import):
            for alias in node.names:
                own = top(alias.name) == "fedloom"
                yield Import(alias.name.removeprefix("fedloom.") if own else alias.name, own, at_load)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            place = node.module or ""
            if top(place) != "fedloom":
                yield Import(place, False, at_load)
                continue
            outer = place.removeprefix("fedloom").removeprefix(".")
            for alias in node.names:
                inner = f"{outer}.{alias.name}".removeprefix(".")
                yield Import(inner if inner in SOURCES or not outer else outer, True, at_load)


def _is_late(node: ast.AST) -> bool:
    checking = isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    return checking or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)


def level(module: str) -> int:
    for number, names in enumerate(GROUPS):
        if top(module) in names:
            return number
    raise AssertionError(f"{module} belongs to no group: put it into one, or give it a place in tests/test_house.py")


def upward(module: str, tree: ast.Module) -> list[str]:
    """The imports of a module that do not point downwards."""
    mine, found = top(module), []
    for other in imported(tree):
        its = top(other.module)
        if not other.own or its == mine or (module, other.module) in EXCEPT:
            continue
        if other.module in SOURCES and (level(its) >= level(mine) or its in APART.get(mine, ())):
            found.append(other.module)
    return found


@pytest.mark.slow
def test_imports_point_downwards() -> None:
    assert {name: found for name in SOURCES if (found := upward(name, parsed(name)))} == {}


def test_the_check_itself_can_fail() -> None:
    def found(module: str, source: str) -> list[str]:
        return upward(module, ast.parse(source))

    assert found("engine.local", "from fedloom.runs.settings import parse") == ["runs.settings"]
    assert found("engine.local", "def f():\n    from fedloom.cli import main") == ["cli.main"]
    assert found("models.net", "import fedloom.data.arrays") == ["data.arrays"]
    assert found("algorithms.fedavg", "from fedloom.engine import plan") == ["engine.plan"]
    assert found("report.curves", "from fedloom.runs import folder") == ["runs.folder"]
    assert found("engine.local", "from fedloom.engine.plan import Group\nfrom fedloom.core import tree") == []
    with pytest.raises(AssertionError, match="belongs to no group"):
        level("utils")


def test_modules_load_without_going_in_circles() -> None:
    graph = {
        name: {found.module for found in imported(parsed(name)) if found.own and found.at_load} - {name}
        for name in SOURCES
    }
    TopologicalSorter(graph).prepare()


def test_few_entries_at_the_top() -> None:
    found = {path.name for path in ROOT.iterdir() if path.suffix != ".pyc" and path.name != "__pycache__"}
    beside = {"__init__.py", "__main__.py", "py.typed"}
    assert beside <= found
    assert len(found - beside) <= ENTRIES, sorted(found - beside)


# -- functions and names ---------------------------------------------------------------------------
MOST_BRANCHES, MOST_LINES = 15, 60


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node, _ in statements(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def branches(function: ast.AST) -> int:
    """The places at which a function may go one way or the other; those of functions inside it are theirs."""
    found, todo = 0, list(ast.iter_child_nodes(function))
    while todo:
        node = todo.pop()
        if isinstance(node, ast.If | ast.IfExp | ast.For | ast.While | ast.ExceptHandler | ast.match_case):
            found += 1
        elif isinstance(node, ast.comprehension):
            found += len(node.ifs)
        elif isinstance(node, ast.BoolOp):
            found += len(node.values) - 1
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            todo.extend(ast.iter_child_nodes(node))
    return found


def too_long(module: str, text: str, tree: ast.Module) -> Iterator[str]:
    """Functions above the limits that do not say why in a comment ``# long: ...``."""
    lines = text.splitlines()
    for node in functions(tree):
        size, ways = (node.end_lineno or node.lineno) - node.lineno + 1, branches(node)
        excused = any(re.search(r"# long: \w", line) for line in lines[node.lineno - 1 : node.end_lineno])
        if (size > MOST_LINES or ways > MOST_BRANCHES) and not excused:
            yield f"{module}.{node.name}: {size} lines, {ways} branches"


@pytest.mark.slow
def test_no_function_is_long_without_a_reason() -> None:
    found = [found for name, path in SOURCES.items() for found in too_long(name, path.read_text("utf-8"), parsed(name))]
    assert found == []


def test_long_functions_are_found() -> None:
    long = "def f(x):\n" + "    x += 1\n" * MOST_LINES
    branched = "def g(x):\n" + "    if x and x:\n        x = 1\n" * 8
    excused = long.replace("x += 1\n", "x += 1  # long: a table\n", 1)
    assert len(list(too_long("m", long + branched, ast.parse(long + branched)))) == 2
    assert not list(too_long("m", excused, ast.parse(excused)))


# Functions of the report that do the same to different things; they are called by their module's name.
RENDERERS = {"as_dicts", "draw", "latex", "markdown", "table", "table_csv"}
ENTRANCES = {"run"}  # fedloom.run and fedloom.compare.run, as users write them


def public(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            yield node.name


def test_a_public_name_is_defined_in_one_module() -> None:
    """A method names its own states (Mine, Server, Sent), and a command is named after what it calls."""
    homes: dict[str, list[str]] = defaultdict(list)
    for module in SOURCES:
        if top(module) not in ("algorithms", "cli"):
            for name in public(parsed(module)):
                homes[name].append(module)
    twice = {name: where for name, where in homes.items() if len(where) > 1}
    assert {name: where for name, where in twice.items() if name not in RENDERERS | ENTRANCES} == {}


def test_renderers_are_called_by_the_name_of_their_module() -> None:
    for module in SOURCES:
        for node, _ in statements(parsed(module)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fedloom.report"):
                bare = {alias.name for alias in node.names if f"{node.module}.{alias.name}"[8:] not in SOURCES}
                assert bare & RENDERERS == set(), module


def test_the_page_on_the_architecture_names_what_there_is() -> None:
    """Every file, and every function or class in a file, that docs/architecture.md names."""
    root = ROOT.parents[1]
    page = (root / "docs" / "architecture.md").read_text(encoding="utf-8")
    paths = set(re.findall(r"`([a-z_]+/[\w/]*(?:\.py|\.html)?)`", page))
    assert len(paths) > 60
    assert [path for path in sorted(paths) if not (ROOT / path).exists() and not (root / path).exists()] == []
    named = re.findall(r"`(?:\w+\.)?(\w+)` in `([a-z_]+/[\w/]+\.py)`", page)
    assert len(named) > 8
    for name, path in named:
        assert re.search(rf"(def |class |^ *){name}\b", (ROOT / path).read_text("utf-8"), re.MULTILINE), (name, path)


def test_decision_records_name_files_that_exist() -> None:
    root = ROOT.parents[1]
    named = [
        (page.name, path)
        for page in sorted((root / "docs" / "adr").glob("*.md"))
        for path in re.findall(r"`([a-z_]+/[\w/]*\.py)`", page.read_text(encoding="utf-8"))
    ]
    assert len(named) > 20
    assert [(page, path) for page, path in named if not (ROOT / path).exists() and not (root / path).exists()] == []


def test_banned_names_are_not_used() -> None:
    banned = {"utils", "util", "helper", "helpers", "manager", "common", "misc"}
    assert {name.split(".")[-1] for name in SOURCES} & banned == set()
    for module in SOURCES:
        for node in functions(parsed(module)):
            assert not node.name.startswith(("get_", "set_")), f"{module}.{node.name}"


# -- state outside of values -----------------------------------------------------------------------
CONTAINERS = {"dict", "list", "set", "defaultdict", "deque", "Counter", "OrderedDict", "WeakKeyDictionary"}


def filled_later(tree: ast.Module) -> Iterator[str]:
    """Names of a module that begin as an empty container, or that a function rebinds."""
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None and _is_empty(node.value):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (ast.unparse(target) for target in targets if ast.unparse(target) != "__all__")
    yield from (name for node, _ in statements(tree) if isinstance(node, ast.Global) for name in node.names)


def _is_empty(value: ast.expr) -> bool:
    if isinstance(value, ast.Call):
        return ast.unparse(value.func).rpartition(".")[2] in CONTAINERS and not value.args
    return (isinstance(value, ast.Dict) and not value.keys) or (isinstance(value, ast.List) and not value.elts)


def test_module_state_has_its_reason_in_a_decision_record() -> None:
    page = (ROOT.parents[1] / "docs" / "adr" / "0019-the-plan-of-the-modules.md").read_text(encoding="utf-8")
    state = " ".join(page.partition("**Module state.**")[2].split())
    found = {(name, SOURCES[m].relative_to(ROOT).as_posix()) for m in SOURCES for name in filled_later(parsed(m))}
    homes = re.findall(r"((?:`_\w+`[^`]*)+)`(\w+/[\w/]+\.py)`", state)
    assert found == {(name, home) for names, home in homes for name in re.findall(r"`(_\w+)`", names)}


def test_module_state_is_found() -> None:
    source = "a: dict[str, int] = {}\nb = WeakKeyDictionary()\nc = {1: 2}\ndef f():\n    global d\n    e = {}"
    assert list(filled_later(ast.parse(source))) == ["a", "b", "d"]


# -- who may do what -------------------------------------------------------------------------------
OUTSIDE = {"os", "sys", "io", "pathlib", "shutil", "tempfile", "json", "logging", "subprocess", "time", "random"}
PURE = (
    "core.tree",
    "core.rng",
    "core.task",
    "core.optim",
    "core.metrics",
    "maths",
    "algorithm",
    "algorithms",
    "models",
)
# of the engine, what talks to files, other processes or the platform
IMPURE_ENGINE = ("store", "checkpoint", "ranks", "laws", "local", "cuda_graphs", "compiling")


def below(*places: str) -> list[str]:
    return [name for name in SOURCES if any(name == place or name.startswith(f"{place}.") for place in places)]


@cache
def modules(name: str) -> set[str]:
    """The packages from outside that a module imports."""
    return {top(found.module) for found in imported(parsed(name)) if not found.own}


@cache
def calls(module: str) -> set[str]:
    """The functions that a module calls, as they are written."""
    return {ast.unparse(node.func) for node in ast.walk(parsed(module)) if isinstance(node, ast.Call)}


def test_an_algorithm_is_mathematics() -> None:
    """It sees neither the engine nor data, config or logging, and draws nothing by itself."""
    allowed = {"__future__", "collections", "functools", "itertools", "math", "typing", "dataclasses"}
    for name in below("algorithms"):
        assert modules(name) <= allowed | {"numpy", "torch", "pydantic"}, name


def test_the_engine_knows_no_concrete_algorithm_model_or_source() -> None:
    concrete = ("algorithms", "models", "data.sources", "data.files", "data.download")
    for name in below("engine"):
        found = {i.module for i in imported(parsed(name)) if i.own and (name, i.module) not in EXCEPT}
        assert not [module for module in found if module.startswith(concrete) and module != "models.net"], name


def test_what_computes_does_nothing_else() -> None:
    """No files, clocks, processes or hidden randomness where numbers are made."""
    pure = set(below(*PURE)) | {n for n in below("engine") if n.split(".")[-1] not in IMPURE_ENGINE}
    assert {name: found for name in pure if (found := OUTSIDE & modules(name))} == {}


def test_only_the_command_line_prints() -> None:
    said = {"print", "sys.stdout.write", "sys.stderr.write", "warnings.warn"}
    for name in set(SOURCES) - set(below("cli")):
        assert said & calls(name) == set(), name
        assert {"rich", "typer", "click", "logging"} & modules(name) == set(), name


def test_nothing_is_pickled() -> None:
    """Who reads a pickle runs what it says; torch's collectives of objects are pickles, too."""
    objects = ("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list")
    for name in SOURCES:
        assert {"pickle", "shelve", "marshal", "dill", "cloudpickle"} & modules(name) == set(), name
        assert not [call for call in calls(name) if call.endswith((*objects, "_object", "torch.load"))], name


def test_frameworks_live_at_the_edge() -> None:
    for name in SOURCES:
        assert modules(name) & {"ray", "hydra", "torchvision"} == set(), name
        if top(name) == "deploy":  # which talks to other machines
            continue
        assert "flwr" not in modules(name), name
        if name != "data.download":
            assert modules(name) & {"urllib", "http", "socket", "requests", "ssl"} == set(), name  # to fetch data alone
        if top(name) != "report":
            assert "matplotlib" not in modules(name), name


def test_randomness_has_an_address() -> None:
    """No generator that advances unseen: what is random goes through ``rng``, or through the seed of a net."""
    made = {"np.random.default_rng", "np.random.seed", "torch.Generator", "torch.rand", "torch.randn", "torch.randperm"}
    made |= {"torch.randint", "random.random", "torch.bernoulli"}
    fixed = {"engine.curvature", "core.channels_last", "core.batch_effects"}  # these always start from the same numbers
    for name in set(SOURCES) - {"core.rng", "core.hidden_random", "engine.laws", *fixed}:
        assert made & calls(name) == set(), name
        if "torch.manual_seed" in calls(name):
            assert "fork_rng" in SOURCES[name].read_text(), name  # and the caller's random state is left as it was


def test_drawings_read_only_what_they_are_handed() -> None:
    for name in below("report"):
        assert not any(call.endswith((".read_text", ".read_bytes", ".load", "json.loads")) for call in calls(name)), (
            name
        )


def test_what_a_setting_names_is_imported_in_one_place_only() -> None:
    """``usercode`` asks for consent first; the others import modules of fedloom by their names."""
    imports = {"import_module", "exec_module", "run_path", "run_module"}
    for name in set(SOURCES) - {"core.usercode", "core.schema", "runs.find", "__init__"}:
        assert {"exec", "eval", "compile", "__import__"} & calls(name) == set(), name
        assert imports & {call.rpartition(".")[2] for call in calls(name)} == set(), name
