"""Imports of earlier versions in the user's code: where fedloom has each name now."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import traceback
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Names that have changed and would not be found, or found with another meaning.
RENAMED = {
    ("fedloom.algorithm", "Averaging"): "Algorithm",
    ("fedloom.models.net", "Model"): "NetSpec",
    ("fedloom.models.net", "NormedModel"): "NormedSpec",
}

# Modules that had another name; modules that only moved are found by name.
MODULES = {
    "api": "runs.start",
    "budget": "compare.equal_terms",
    "config": "runs.settings",
    "experiment": "runs.prepare",
    "history": "runs.result",
    "law": "maths.learned_weights",
    "record": "runs.folder",
    "engine.captured": "engine.cuda_graphs",
    "engine.graphs": "engine.cuda_graphs",
    "engine.run": "engine.rounds",
    "maths.analytic": "maths.ridge",
    "maths.law": "maths.learned_weights",
    "report.compare": "report.comparison",
    "runs.api": "runs.start",
    "runs.config": "runs.settings",
    "runs.experiment": "runs.prepare",
    "runs.history": "runs.result",
    "runs.record": "runs.folder",
}


def advice(error: ImportError) -> str:
    """How the file whose import failed must import fedloom's names; empty if these are not the reason."""
    frames = [frame.filename for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).is_file()]
    if not frames or Path(frames[-1]).is_relative_to(ROOT):
        return ""
    return "; ".join(_stale(Path(frames[-1]).read_text(encoding="utf-8")))


def _stale(source: str) -> Iterator[str]:
    """What is wrong with each failing import of fedloom in the source, and what to write instead."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("fedloom.") and not _is_module(alias.name):
                    yield f"there is no module {alias.name}{_module_instead(alias.name)}"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "fedloom":
            for alias in node.names:
                if alias.name != "*" and not _has(node.module or "", alias.name):
                    yield f"{node.module} has no {alias.name}{_instead(alias.name, node.module or '')}"


def _instead(name: str, module: str) -> str:
    """What to write to have this name, which was in this module."""
    if (module, name) in RENAMED:
        return f", write: from {module} import {RENAMED[module, name]}"
    if f"{module}.{name}".removeprefix("fedloom.") in MODULES:  # it was a module itself
        return _module_instead(f"{module}.{name}")
    now = f"fedloom.{MODULES.get(module.removeprefix('fedloom.'), '')}"
    homes = [now] if not now.endswith(".") and _has(now, name) else _defining(name) or _packages(name)
    return _written([f"from {home} import {name}" for home in homes])


def _module_instead(module: str) -> str:
    """What to write to have this module, which is elsewhere now."""
    short = module.removeprefix("fedloom.")
    found = [f"fedloom.{MODULES[short]}"] if short in MODULES else []
    name = module.rpartition(".")[2]
    found = found or [f"{home}.{name}" for home in _packages(name)]
    return _written([f"from {each.rpartition('.')[0]} import {each.rpartition('.')[2]}" for each in found])


def _written(lines: list[str]) -> str:
    return f", write: {' or '.join(lines)}" if lines else " any more"


def _is_module(name: str) -> bool:
    with suppress(ModuleNotFoundError):  # of the package around it
        return importlib.util.find_spec(name) is not None
    return False


def _has(module: str, name: str) -> bool:
    if not _is_module(module):
        return False
    return hasattr(importlib.import_module(module), name) or _is_module(f"{module}.{name}")


def _defining(name: str) -> list[str]:
    """The modules of fedloom that define this name, except those of the command line."""
    sources = {
        path: path.read_text(encoding="utf-8") for path in sorted(ROOT.rglob("*.py")) if path.parent.name != "cli"
    }
    # To parse a source takes long; only one that has the name somewhere can define it.
    return [_named(path) for path, source in sources.items() if name in source and name in _defined(source)]


def _packages(name: str) -> list[str]:
    """The packages of fedloom that have a module, or a package, of this name."""
    homes = [_named(path) for path in sorted(ROOT.rglob("*.py"))]
    return [home.rpartition(".")[0] for home in homes if home.rpartition(".")[2] == name]


def _named(path: Path) -> str:
    """The name of the module in this file."""
    parts = ["fedloom", *path.relative_to(ROOT).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _defined(source: str) -> Iterator[str]:
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
