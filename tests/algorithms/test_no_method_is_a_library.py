"""A file of an algorithm imports from another one only the class that it extends, and that class's own state."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import fedloom.algorithms
from fedloom.algorithm import Algorithm
from fedloom.runs.find import algorithms

FILES = sorted(Path(fedloom.algorithms.__file__).parent.glob("**/*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_only_base_classes_are_imported(path: Path) -> None:
    tree = ast.parse(path.read_text())
    bases = {
        base.id
        for cls in tree.body
        if isinstance(cls, ast.ClassDef)
        for base in cls.bases
        if isinstance(base, ast.Name)
    }
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fedloom.algorithms."):
            here = f"fedloom.algorithms.{path.parent.name}"
            names = {alias.name for alias in node.names}
            assert node.module.startswith(here) or names & bases, f"{path.name} uses {names} of {node.module}"
            assert all(name[0].isupper() or node.module.startswith(here) for name in names), names


DEEP = {"relaxation": ["FedProx", "FedAvg"]}  # docs/adr/0020 says why


@pytest.mark.parametrize("name", sorted(algorithms(own=False)))
def test_a_method_extends_at_most_one_other(name: str) -> None:
    found = [c.__name__ for c in algorithms(own=False)[name].__mro__[1:] if issubclass(c, Algorithm)]
    others = [each for each in found if "[" not in each and each != "Algorithm"]
    assert len(others) <= 1 or others == DEEP[name]
