"""Imports of earlier versions in code of the user's own: where fedloom has each name now."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import traceback
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parents[1]
# What has another name now, and would be looked for in vain, or found with another meaning.
RENAMED = {
    ("fedloom.algorithm", "Averaging"): "Algorithm",
    ("fedloom.models.net", "Model"): "NetSpec",
    ("fedloom.models.net", "NormedModel"): "NormedSpec",
}


def advice(error: ImportError) -> str:
    """How the file whose import failed has to import fedloom's names instead; empty where these are not the reason."""
    frames = [frame.filename for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).is_file()]
    if not frames or Path(frames[-1]).is_relative_to(ROOT):
        return ""
    return "; ".join(_stale(Path(frames[-1]).read_text(encoding="utf-8")))


def _stale(source: str) -> Iterator[str]:
    """What is wrong with each import of fedloom in the source that fails, and what to write."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("fedloom.") and not _is_module(alias.name):
                    yield f"there is no module {alias.name}{_instead(alias.name.rpartition('.')[2])}"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "fedloom":
            for alias in node.names:
                if alias.name != "*" and not _has(node.module or "", alias.name):
                    yield f"{node.module} has no {alias.name}{_instead(alias.name, node.module or '')}"


def _instead(name: str, module: str = "") -> str:
    if (module, name) in RENAMED:
        return f", write: from {module} import {RENAMED[module, name]}"
    homes = _homes(name)
    return f", write: {' or '.join(f'from {home} import {name}' for home in homes)}" if homes else " any more"


def _is_module(name: str) -> bool:
    with suppress(ModuleNotFoundError):  # of the package around it
        return importlib.util.find_spec(name) is not None
    return False


def _has(module: str, name: str) -> bool:
    if not _is_module(module):
        return False
    return hasattr(importlib.import_module(module), name) or _is_module(f"{module}.{name}")


def _homes(name: str) -> list[str]:
    """The modules of fedloom that define this name, or the packages that have a module of it."""
    found = []
    for path in sorted(ROOT.rglob("*.py")):
        parts = ["fedloom", *path.relative_to(ROOT).with_suffix("").parts]
        if parts[-1] == name:
            found.append(".".join(parts[:-1]))
        elif name in _defined(path.read_text(encoding="utf-8")):
            found.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return found


def _defined(source: str) -> Iterator[str]:
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
