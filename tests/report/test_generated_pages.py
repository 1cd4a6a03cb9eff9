"""The pages of all settings: how their types are put into words."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from fedloom.engine.topology.kinds import Custom

PAGE = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "generate.py"))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (tuple[int, ...], "list of whole numbers"),
        (tuple[tuple[int, int], ...], "list of lists of whole numbers"),
        (tuple[tuple[float, ...], ...], "list of lists of numbers"),
    ],
)
def test_lists_and_lists_of_lists(kind: Any, words: str) -> None:
    assert PAGE["_word"](kind) == words


def test_links_of_a_network_are_pairs() -> None:
    row = PAGE["_row"]("topology", "links", Custom.model_fields["links"], "custom")
    assert row.startswith("| `links` | list of lists of whole numbers | `[]` | pairs of nodes")
