"""The picture of a network, and what is printed of it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from fedloom.cli.main import app
from fedloom.core.errors import ConfigError
from fedloom.engine.topology.facts import facts
from fedloom.engine.topology.kinds import Exponential, Full, Matching, Random, Ring, Torus
from fedloom.engine.topology.network import Topology
from fedloom.report.topology import draw, places, table

KINDS: list[tuple[Topology, int, int]] = [
    (Ring(), 2, 0),
    (Ring(), 16, 0),
    (Torus(), 12, 3),
    (Exponential(), 12, 0),
    (Full(), 40, 0),
    (Random(), 200, 0),
]


@pytest.mark.slow
@pytest.mark.parametrize(("topology", "nodes", "rows"), KINDS, ids=lambda v: getattr(v, "kind", v))
@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_pictures_repeat_byte_for_byte(tmp_path: Path, topology: Topology, nodes: int, rows: int, suffix: str) -> None:
    paths = tmp_path / f"a.{suffix}", tmp_path / "folder" / f"b.{suffix}"
    for path in paths:
        draw(topology.edges(nodes), nodes, path, title="of $5", directed=topology.directed, rows=rows)
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert 2_000 < paths[0].stat().st_size < 2_000_000


@pytest.mark.slow
def test_a_png_is_a_picture_with_nodes_and_links(tmp_path: Path) -> None:
    draw(Ring().edges(8), 8, tmp_path / "a.png")
    with Image.open(tmp_path / "a.png") as image:
        colours = {c: n for n, c in image.convert("RGB").getcolors(1 << 24) or []}
    assert image.width >= 800
    assert colours.get((0x3B, 0x6F, 0xB6), 0) > 1000


def test_a_network_without_links_is_drawn(tmp_path: Path) -> None:
    draw(np.zeros((0, 2), dtype=np.int64), 3, tmp_path / "a.png", directed=True)
    assert (tmp_path / "a.png").exists()


def test_what_cannot_be_drawn_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\.png, \.svg or \.pdf"):
        draw(Ring().edges(3), 3, tmp_path / "a.jpg")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file is a file, not a folder"):
        draw(Ring().edges(3), 3, tmp_path / "file" / "a.png")


def test_nodes_of_a_grid_stand_in_rows_and_others_on_a_circle() -> None:
    assert places(6, 2).tolist() == [[0, 0], [1, 0], [2, 0], [0, -1], [1, -1], [2, -1]]
    assert np.allclose(np.linalg.norm(places(7), axis=1), 1)
    assert len({tuple(p) for p in places(7).round(6).tolist()}) == 7


def test_the_table_says_what_matters() -> None:
    ring = dict(table(facts(Ring(), 16)._asdict()))
    assert ring["neighbours"] == "2"
    assert ring["psi"] == "0.949253"
    assert ring["connected"] == "yes"
    pairs = dict(table(facts(Matching(pairs=2), 9)._asdict()))
    assert pairs["neighbours"].startswith("0 to 1")
    assert "gossip steps" in pairs["connected"]
    assert any(name.startswith("psi over") for name in pairs)


def run(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["describe", "topology", *words])
    return result.exit_code, result.output + (str(result.exception) if result.exception else "")


def test_the_command_prints_and_draws(tmp_path: Path) -> None:
    code, said = run("ring", "nodes=16", "--out", str(tmp_path / "ring.svg"))
    assert code == 0
    assert "0.949253" in said
    assert (tmp_path / "ring.svg").exists()
    code, said = run("random", "nodes=30", "topology.max_degree=4", "seed=2", "--json")
    found = json.loads(said)
    assert (code, found["nodes"], found["degree_max"], found["connected"]) == (0, 30, 4, True)
    assert len(found["first_round"]) == found["edges"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("rign",), "did you mean 'ring'"),
        (("ring", "nodes=1"), "nodes=2 or more"),
        (("ring", "star"), "a second kind"),
        (("ring", "depth=2"), "unknown key"),
        (("star", "weights=uniform"), "does not preserve the mean"),
        (("hypercube", "nodes=12"), "2, 4, 8"),
    ],
)
def test_the_command_refuses_what_is_wrong(words: tuple[str, ...], message: str) -> None:
    code, said = run(*words)
    assert code != 0
    assert message in said


def test_only_networks_have_settings_to_describe() -> None:
    result = CliRunner().invoke(app, ["describe", "ring", "nodes=16"])
    assert "fedloom describe topology ring nodes=16" in str(result.exception)
    assert CliRunner().invoke(app, ["describe", "ring"]).exit_code == 0
