"""What is known about a network before training: whether it can be used, and how fast it reaches consensus."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from fedloom.core.errors import ConfigError, Fault, outside
from fedloom.data.arrays import Ints
from fedloom.engine.topology.graphs import components, no_edges, ordered, shape_of
from fedloom.engine.topology.kinds import Custom, Grid, Torus
from fedloom.engine.topology.network import LONGEST, LOOKED, Moment, Topology, moments
from fedloom.engine.topology.weights import DENSE, TOLERANCE, Floats, Weights, arcs_of, norm, psi


def flaws(weights: Weights, edges: Ints | None = None, *, directed: bool = False) -> list[str]:
    """What is wrong with a mixing matrix, in words; ``edges``: those that it may use."""
    found = []
    if not np.isfinite(weights.value).all():
        return ["has weights that are not finite"]
    if weights.value.min() < -TOLERANCE:
        found.append(f"has negative weights (the lowest is {weights.value.min():.4g})")
    for name, sums in (("rows", weights.rows()), ("columns", weights.columns())):
        if np.abs(sums - 1).max() > TOLERANCE:
            found.append(f"has {name} that sum to {sums.min():.4g} ... {sums.max():.4g} instead of 1")
    if edges is not None:
        arcs = arcs_of(edges, directed=directed)
        allowed = set(map(tuple, arcs.tolist()))
        used = weights.is_link & (weights.value != 0)
        strange = set(zip(weights.to[used].tolist(), weights.by[used].tolist(), strict=True)) - allowed
        if strange:
            i, j = min(strange)
            found.append(f"has a weight from {j} to {i}, which are not neighbours")
    return found


def window(topology: Topology, nodes: int, seed: int) -> tuple[int, list[list[int]]]:
    """After how many gossip steps the union of all graphs is connected, and its components then."""
    union, parts = no_edges(), [[k] for k in range(nodes)]
    for count, at in enumerate(moments(topology, seed), 1):
        union = ordered(np.concatenate([union, topology.planned(nodes, at)]))
        parts = components(nodes, union, directed=topology.directed)
        if len(parts) == 1 or not topology.redrawn:
            return count, parts
    return LOOKED, parts


def faults(topology: Topology, nodes: int, seed: int, sizes: Ints | None = None) -> list[Fault]:
    """Why this network cannot be used."""
    if found := outside("topology.deaths", "node", [node for node, _ in topology.deaths], nodes):
        return found
    try:
        edges, weights = topology.edges(nodes, Moment(seed)), topology.weigh(nodes, Moment(seed), sizes)
    except ConfigError as error:
        return error.faults
    of_matrix = (_matrix_fault(topology, flaw) for flaw in flaws(weights, edges, directed=topology.directed))
    return [fault for fault in (*of_matrix, _disconnected(topology, nodes, seed)) if fault is not None]


def _matrix_fault(topology: Topology, flaw: str) -> Fault | None:
    """A flaw of the mixing matrix as a fault of the settings, unless they allow it."""
    if "rows that" in flaw and topology.mixing == "push_sum":
        return None
    if "columns that" not in flaw:
        return Fault("topology", f"the matrix {flaw}")
    if topology.allow_row_stochastic:
        return None
    fix = "use topology.weights=metropolis" if not topology.directed else "use topology.mixing=push_sum"
    what = f"'{topology.weights}' on this graph does not preserve the mean: the matrix {flaw}"
    if isinstance(topology, Custom) and topology.link_weights:
        what = f"the weights of the links do not preserve the mean: the matrix {flaw}"
        fix = "give each link in both directions, with the same weight"
    return Fault("topology.weights", what, f"{fix}, or set topology.allow_row_stochastic=true")


def _disconnected(topology: Topology, nodes: int, seed: int) -> Fault | None:
    steps, parts = window(topology, nodes, seed)
    if len(parts) == 1 or topology.allow_disconnected:
        return None
    when = f"is disconnected for {steps} gossip steps" if topology.redrawn else "is not connected"
    listed = " | ".join(", ".join(map(str, part[:6])) + (" ..." if len(part) > 6 else "") for part in parts[:4])
    what = f"the network {when}: {len(parts)} parts, {listed}{' | ...' if len(parts) > 4 else ''}"
    return Fault("topology", what, "add edges, or set topology.allow_disconnected=true")


class Facts(NamedTuple):
    """What is known about a network before training and failures."""

    kind: str
    nodes: int
    edges: int  # of the first round
    directed: bool
    degree_min: int  # in-degrees of the first round
    degree_mean: float
    degree_max: int
    symmetric: bool
    preserves_mean: bool
    connected: bool
    window: int  # gossip steps after which the union of all graphs is connected
    psi: float  # of the first gossip step
    gap: float  # 1 - psi
    steps: int  # gossip steps over which the contraction was measured
    psi_steps: float  # ||product of their matrices - J||_2
    psi_rate: float  # the same for one step: its root
    notes: tuple[str, ...]


@lru_cache(maxsize=4)
def facts(topology: Topology, nodes: int, seed: int = 0, sizes: tuple[int, ...] | None = None) -> Facts:
    """The numbers that describe a network."""
    first, rows = Moment(seed), None if sizes is None else np.array(sizes)
    edges, weights = topology.edges(nodes, first), topology.weigh(nodes, first, rows)
    degree = weights.senders() - 1
    until, parts = window(topology, nodes, seed)
    own, count = psi(weights), 1
    push = topology.mixing == "push_sum"
    if push and nodes <= DENSE:
        own = norm(_divided(weights.dense()))
    together = own
    if topology.redrawn and nodes <= DENSE:
        count = max(topology.period(nodes), min(until, LONGEST))
        product = np.eye(nodes)
        for at, _ in zip(moments(topology, seed), range(count), strict=False):
            product = topology.weigh(nodes, at, rows).dense() @ product
        together = norm(_divided(product) if push else product)
    preserves = bool(np.abs(weights.columns() - 1).max() <= TOLERANCE)
    return Facts(
        kind=topology.kind,
        nodes=nodes,
        edges=len(edges),
        directed=topology.directed,
        degree_min=int(degree.min()),
        degree_mean=float(degree.mean()),
        degree_max=int(degree.max()),
        symmetric=weights.is_symmetric(),
        preserves_mean=preserves,
        connected=len(parts) == 1,
        window=until,
        psi=own,
        gap=max(0.0, 1 - own),
        steps=count,
        psi_steps=together,
        psi_rate=together ** (1 / count),
        notes=tuple(_notes(topology, nodes, parts, preserves=preserves, contraction=together)),
    )


def _divided(matrix: Floats) -> Floats:
    """The effective mixing matrix under push-sum: each node divides by the mass that it received."""
    divided: Floats = matrix / matrix.sum(1, keepdims=True)
    return divided


def _notes(
    topology: Topology, nodes: int, parts: list[list[int]], *, preserves: bool, contraction: float
) -> Iterator[str]:
    """What is allowed but deserves a note."""
    if isinstance(topology, Grid) and topology.rows is None and nodes > 3 and shape_of(nodes, None)[0] == 1:
        yield f"{nodes} nodes form only one row: this is a {'ring' if isinstance(topology, Torus) else 'path'}"
    if len(parts) > 1:
        yield f"the network splits into {len(parts)} parts, which never exchange anything"
    if not preserves:
        yield "the weights do not preserve the mean of the models"
    if len(parts) == 1 and preserves and topology.mixing == "average" and contraction > 1 - 1e-9:
        yield "mixing does not bring the nodes closer to each other (psi is 1): try topology.lazy=true"
    if topology.dies:
        yield "nodes die: psi is that of the first round; means are over the surviving nodes"
    if topology.fails and topology.link_policy != "self":
        yield f"with link_policy = '{topology.link_policy}' every link that fails shifts the mean"
