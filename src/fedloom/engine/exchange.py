"""The exchange: who hears whom, and the one sum through which they do.

A server is a mixing matrix with one row; a network without a server has a row for each node.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import networkx as nx
import numpy as np
import torch
from torch import Tensor

from fedloom import tree
from fedloom.algorithm import Inbox
from fedloom.engine.local import Outcome
from fedloom.schema import Kind


class Topology(Kind):
    """A network of nodes: who are neighbours."""

    def graph(self, nodes: int) -> nx.Graph:
        raise NotImplementedError

    def matrix(self, nodes: int) -> Tensor:
        """Metropolis weights: w_ij = 1 / (1 + max(deg i, deg j)) on edges, the rest on the diagonal.  ``[N, N]``"""
        graph = self.graph(nodes)
        rows = np.zeros((nodes, nodes))
        for i, j in graph.edges:
            if i != j:
                rows[i, j] = rows[j, i] = 1.0 / (1 + max(graph.degree[i], graph.degree[j]))
        np.fill_diagonal(rows, 1.0 - rows.sum(1))
        return torch.from_numpy(rows)


class Ring(Topology):
    """Each node has two neighbours."""

    kind: ClassVar[str] = "ring"

    def graph(self, nodes: int) -> nx.Graph:
        return nx.cycle_graph(nodes) if nodes > 2 else nx.path_graph(nodes)


class Full(Topology):
    """Everybody hears everybody."""

    kind: ClassVar[str] = "full"

    def graph(self, nodes: int) -> nx.Graph:
        return nx.complete_graph(nodes)


class Tally(NamedTuple):
    """A server's sums so far."""

    total: Any = None  # float64
    buffers: Any = None
    weight: float = 0.0
    senders: float = 0.0
    kept: tuple[Any, ...] = ()  # (ids, uploads, weights) of each group, for algorithms that need every upload
    excluded: tuple[int, ...] = ()  # clients whose work was not finite

    def ids(self) -> Tensor:
        """The clients whose uploads were kept, as they came."""
        return torch.cat([ids for ids, _, _ in self.kept])


class Sound(NamedTuple):
    """The clients of a group whose every number is finite, and the others."""

    ids: Tensor  # [K]
    outcome: Outcome
    times: Tensor  # [K]
    excluded: tuple[int, ...]


def sound(ids: Tensor, outcome: Outcome, times: Tensor) -> Sound:
    """Leave out clients whose upload, state, weight or statistics are not finite."""
    ok = tree.finite_rows(outcome, len(ids)).cpu()
    if bool(ok.all()):
        return Sound(ids, outcome, times, ())
    keep = ok.nonzero().squeeze(1)
    kept = tree.take(outcome, keep.to(outcome.weights.device))
    return Sound(ids[keep], kept, times[keep], tuple(ids[~ok].tolist()))


def add(tally: Tally, part: Sound, *, keep: bool = False) -> Tally:
    """The sums with one more group of clients in them; ``keep`` every upload for who needs them one by one."""
    if not len(part.ids):
        return tally._replace(excluded=tally.excluded + part.excluded)
    weights = part.outcome.weights.double() * part.times.to(part.outcome.weights.device)
    sums = tree.mix(weights[None], (part.outcome.uploads, part.outcome.buffers))
    total, buffers = tree.take(sums, 0)
    if tally.total is not None:
        total, buffers = tree.tmap(torch.add, tally.total, total), tally.buffers + buffers
    kept = () if not keep else ((part.ids, part.outcome.uploads, weights),)
    return Tally(
        total=total,
        buffers=buffers,
        weight=tally.weight + float(weights.sum()),
        senders=tally.senders + float(part.times.sum()),
        kept=tally.kept + kept,
        excluded=tally.excluded + part.excluded,
    )


def inbox(tally: Tally, sizes: Tensor) -> Inbox[Any]:
    """What the server reads at the end of the round; every upload in client order, where it asked for them.

    ``sizes`` [N] are the training examples of every client there is.
    """
    uploads: Any = ()
    weights: Any = ()
    if tally.kept:
        order = tally.ids().argsort().to(tally.buffers.device)
        uploads = tree.take(tree.cat([u for _, u, _ in tally.kept]), order)
        weights = torch.cat([w for _, _, w in tally.kept])[order]
    device = tally.buffers.device
    weight, senders, population, examples = torch.tensor(
        [tally.weight, tally.senders, len(sizes), int(sizes.sum())], dtype=torch.float64, device=device
    )
    return Inbox(tally.total, weight, senders, population, examples, uploads, weights)


def gossip(rows: Tensor, outcome: Outcome, sizes: Tensor) -> tuple[Inbox[Any], Tensor, Tensor]:
    """What each node hears, the statistics it mixes, and which nodes were sound.

    A node whose work is not finite is treated as absent: each link to it is cut and its weight goes
    back to the node at the other end, so that the mean of the others is preserved.
    """
    nodes, examples = len(sizes), float(sizes.sum())
    ok = tree.finite_rows(outcome, nodes)
    up = torch.outer(ok, ok) | torch.eye(nodes, dtype=torch.bool, device=ok.device)
    live = torch.where(up, rows.to(ok.device), 0.0)
    live = live + torch.diag(1.0 - live.sum(1))
    silent = tree.where(ok, outcome, tree.tmap(torch.zeros_like, outcome))
    total, buffers = tree.mix(live, (silent.uploads, silent.buffers))
    heard = (live > 0).sum(1).double()
    return (
        Inbox(total, live.sum(1), heard, torch.full_like(heard, nodes), torch.full_like(heard, examples)),
        buffers,
        ok,
    )
