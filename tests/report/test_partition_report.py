"""The picture and the numbers of a partition."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedloom.core.errors import ConfigError, StorageError
from fedloom.core.rng import stream
from fedloom.data.arrays import Ints
from fedloom.data.partition import Dirichlet, Iid, summary
from fedloom.report.partition import draw, table


def dealt(clients: int, classes: int, rows: int = 4000) -> tuple[Ints, Ints, tuple[str, ...]]:
    y = np.tile(np.arange(classes), -(-rows // classes))[:rows]
    owner = Dirichlet(clients=clients, alpha=0.3).assign(y, classes, stream(0, "partition"), None).owner
    return y, owner, tuple(f"class {k}" for k in range(classes))


@pytest.mark.slow
@pytest.mark.parametrize(("clients", "classes"), [(1, 1), (1, 10), (20, 10), (60, 17), (100, 100), (250, 10)])
@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_pictures_are_written_and_repeat_byte_for_byte(tmp_path: Path, clients: int, classes: int, suffix: str) -> None:
    y, owner, labels = dealt(clients, classes)
    first, second = tmp_path / f"a.{suffix}", tmp_path / "folder" / f"b.{suffix}"
    draw(y, owner, clients, labels, first, "a title")
    draw(y, owner, clients, labels, second, "a title")
    assert first.read_bytes() == second.read_bytes()
    assert 4_000 < first.stat().st_size < 2_000_000


@pytest.mark.slow
def test_a_png_is_a_picture_of_a_readable_size_with_every_colour(tmp_path: Path) -> None:
    y, owner, labels = dealt(20, 10)
    draw(y, owner, 20, labels, tmp_path / "a.png")
    with Image.open(tmp_path / "a.png") as image:
        assert image.format == "PNG"
        assert image.width >= 900
        colours = sorted(image.convert("RGB").getcolors(1 << 24) or [], reverse=True)
    assert len([count for count, _ in colours if count > 500]) >= 11


def test_an_svg_carries_no_date(tmp_path: Path) -> None:
    y, owner, labels = dealt(5, 3)
    draw(y, owner, 5, labels, tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text()
    assert text.lstrip().startswith("<?xml")
    assert "dc:date" not in text


def test_a_title_and_labels_are_taken_literally(tmp_path: Path) -> None:
    y, owner, _ = dealt(5, 2)
    draw(y, owner, 5, ("$", "a_$b^"), tmp_path / "a.png", "costs $5 or $6_")
    assert (tmp_path / "a.png").exists()


@pytest.mark.slow
def test_a_million_clients_are_drawn_as_a_hundred(tmp_path: Path) -> None:
    y = np.arange(1_000_000) % 10
    draw(y, np.arange(1_000_000), 1_000_000, tuple("abcdefghij"), tmp_path / "a.svg", "million")
    assert (tmp_path / "a.svg").stat().st_size < 200_000


def test_another_suffix_is_refused(tmp_path: Path) -> None:
    y, owner, labels = dealt(5, 2)
    with pytest.raises(ConfigError, match=r"ends in \.png, \.svg or \.pdf"):
        draw(y, owner, 5, labels, tmp_path / "a.bmp")


def test_a_place_that_cannot_be_written_is_a_storage_error(tmp_path: Path) -> None:
    y, owner, labels = dealt(5, 2)
    (tmp_path / "a.png").mkdir()
    with pytest.raises(StorageError, match="cannot write"):
        draw(y, owner, 5, labels, tmp_path / "a.png")


def test_the_table_names_every_number() -> None:
    y = np.tile(np.arange(10), 200)
    owner = Iid().assign(y, 10, stream(0, "partition"), None).owner
    facts = summary(y, owner, 20, 10)
    pairs = dict(table(facts))
    assert pairs["clients"] == "20"
    assert pairs["rows"] == "2,000"
    assert pairs["rows per client"] == "100 to 100 (median 100, mean 100.0)"
    assert pairs["classes per client"] == "10 to 10 of 10 (mean 10.0)"
