"""The numbers and the picture of a network, for run folders and ``fedloom describe topology``."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fedloom.engine.topology.facts import facts
from fedloom.engine.topology.graphs import shape_of
from fedloom.engine.topology.kinds import Grid
from fedloom.engine.topology.network import Moment, Topology


def described(topology: Topology, nodes: int, seed: int, sizes: Iterable[int] | None = None) -> dict[str, Any]:
    """What a run folder records of its network: the numbers, and the graph of the first round."""
    found = facts(topology, nodes, seed, None if sizes is None else tuple(sizes))
    return found._asdict() | {"first_round": topology.edges(nodes, Moment(seed)).tolist()}


def draw_topology(topology: Topology, nodes: int, seed: int, path: Path) -> None:
    """The graph of the first round as a picture."""
    from fedloom.report import topology as pictures

    pictures.draw(topology.edges(nodes, Moment(seed)), nodes, path, **_shown(topology, nodes))


def picture(topology: Topology, nodes: int, seed: int) -> bytes:
    """The same as a PNG file."""
    from fedloom.report import topology as pictures

    return pictures.as_picture(topology.edges(nodes, Moment(seed)), nodes, **_shown(topology, nodes))


def _shown(topology: Topology, nodes: int) -> dict[str, Any]:
    """How a graph is drawn."""
    rows = shape_of(nodes, topology.rows)[0] if isinstance(topology, Grid) else 0
    when = ", first round" if topology.redrawn else ""
    return {"title": f"{topology.kind}, {nodes} nodes{when}", "directed": topology.directed, "rows": rows}
