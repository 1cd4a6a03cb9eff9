"""The pages of all settings: how their types are put into words."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from fedloom.core.fields import kind_words
from fedloom.engine.topology.kinds import Custom
from fedloom.runs.find import find_algorithm

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
    assert kind_words(kind) == words


def test_links_of_a_network_are_pairs() -> None:
    row = PAGE["_row"]("topology", "links", Custom.model_fields["links"], "custom")
    assert row.startswith("| `links` | list of lists of whole numbers | `[]` | pairs of nodes")


@pytest.mark.parametrize(
    ("name", "evaluated"),
    [
        ("fedavg", "the server's model, and the same on each client's data"),
        ("fedavg_ft", "the server's model, and a fine-tuned copy on each client's data"),
        ("ditto", "the server's model, and each client's own model, after its local training"),
        ("apple", "each client's own model, before its local training"),
        ("local_only", "each client's own model, after its local training"),
        ("dpsgd", "the average model, every node, and each node's model on its own data"),
    ],
)
def test_what_is_evaluated_follows_from_the_algorithm(name: str, evaluated: str) -> None:
    assert PAGE["_evaluated"](find_algorithm(name, "")) == evaluated


def test_no_page_has_doubled_backticks() -> None:
    for name in PAGE["PAGES"]:  # as they lie in docs/, which tests/test_readme.py holds up to date
        page = (Path(__file__).parents[2] / "docs" / name).read_text(encoding="utf-8")
        assert not re.search(r"(?<!`)``(?!`)", page)
