"""A round without a server: nodes train, exchange what they have with their neighbours, and mix it.

A node needs one value from each neighbour, and nothing else of the network: a ``Message``, which could as well have
come over a wire. ``hear`` makes of the messages of a gossip step what the algorithm's ``update`` is given::

    node i   upload, mine = finish(...)                    after local training from send(node)
             for each gossip step:
                 send Message(round, step, i, upload, statistics, mass) to the neighbours
                 inbox, statistics = hear({l: w_il}, {l: message of l}, ...)        its own message among them
                 upload = spread(inbox, upload)            what it sends in the next step of the same round
             node = update(node, inbox)                    of the last step

The simulator does the same for all nodes at once, with the same sums in the same order, so that a node which is driven
by messages comes out the same, bit for bit. Sums are made in float64, neighbour after neighbour in order of their
numbers; only where the graph is dense, or on a GPU, is it one product of matrices, which agrees up to rounding.

With push-sum, what a node sends is its model times its mass w, plus its move in this round: x = w u + (z - u) =
z + (w - 1) u, where u is the model from which it trained and z the one to which it came. Mass and x are mixed alike,
and ``inbox.mean`` = sum / mass is the model again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from scipy.sparse import csr_array
from torch import Tensor

from fedloom import tree
from fedloom.algorithm import Inbox
from fedloom.engine.evaluate import Judged, nodes_scored, over_nodes
from fedloom.engine.local import Outcome, mapped, train
from fedloom.engine.run import Did, Experiment, Fits, Nodes, Round, RunState, groups_of, keep, names_of, rate
from fedloom.engine.store import ClientStore
from fedloom.engine.topology import Mask, Moment, Topology, Weights, norm, psi, surviving
from fedloom.errors import DivergedError

T = TypeVar("T")

_SMALL = 32  # nodes up to which a sum is always made neighbour by neighbour
_FULL = 0.25  # share of entries that are not zero from which on a matrix is dense
_BLOCK = 1 << 18  # numbers in float64 of one block of columns: they should stay in the processor's cache
_LIGHT = 1e-6  # a mass with which nothing can be divided any more


class Message(NamedTuple):
    """What a node sends to a neighbour in a gossip step: all that travels."""

    round: int
    step: int
    sender: int
    upload: Any
    buffers: Tensor  # [Q] running statistics of its net
    mass: float = 1.0  # of push-sum; 1 where it is not used


def hear(
    weights: Mapping[int, float], messages: Mapping[int, Message], *, nodes: int, examples: int, push_sum: bool = False
) -> tuple[Inbox[Any], Tensor]:
    """What one node reads of the messages it has, its own among them, and the statistics that it mixes.

    ``weights`` say what it makes of each sender; ``nodes`` and ``examples`` are those of the whole network.
    """
    senders = sorted(weights)
    value = np.array([weights[sender] for sender in senders])
    row = Weights(len(senders), np.zeros(len(senders), dtype=np.int64), np.arange(len(senders)), value)
    heard = [messages[sender] for sender in senders]
    bodies = tree.stack([(message.upload, message.buffers) for message in heard])
    mass = np.array([message.mass for message in heard])
    total, buffers = tree.take(mix(row, bodies, slice(0, 1)), 0)
    weight = (row._replace(value=value * mass) if push_sum else row).rows()[0]
    if push_sum:
        buffers = buffers / row.rows()[0]
    numbers = [weight, float((value > 0).sum()), nodes, examples]
    return Inbox(total, *torch.tensor(numbers, dtype=torch.float64, device=buffers.device)), buffers


def spread(inbox: Inbox[Any], upload: T) -> T:
    """What a node sends in the next gossip step of the same round, instead of ``upload``."""
    return tree.tmap(lambda x, total: total.to(x.dtype), upload, inbox.total)


# -- the sum ---------------------------------------------------------------------------------------
def mix(weights: Weights, values: T, rows: slice | None = None) -> T:
    """These ``rows`` (all, if none are named) of the matrix times stacked ``values`` [N, ...], in float64.

    On a processor only entries that are not zero cost anything. The columns of the product are made block by block, so
    that beside it nothing large is ever held, and no number of it depends on how it was divided.
    """
    rows = rows or slice(0, weights.nodes)
    device = _device(values)
    if device.type != "cpu" or is_dense(weights):
        return tree.mix(torch.from_numpy(weights.dense()[rows]).to(device), values)
    start = np.searchsorted(weights.to, np.arange(rows.start, rows.stop + 1))
    entries = slice(start[0], start[-1])
    shape = (rows.stop - rows.start, weights.nodes)
    matrix = csr_array((weights.value[entries], weights.by[entries], start - start[0]), shape=shape)

    def one(x: Tensor) -> Tensor:
        flat = x.detach().reshape(len(x), math.prod(x.shape[1:])).numpy()
        out = np.empty((shape[0], flat.shape[1]))
        wide = max(64, _BLOCK // max(len(flat), 1))

        def block(low: int) -> None:
            out[:, low : low + wide] = matrix @ flat[:, low : low + wide].astype(np.float64)

        # A thread for each block: threads that share every small step would mostly wait for each other.
        starts = range(0, flat.shape[1], wide)
        if len(starts) > 1:
            with ThreadPoolExecutor(torch.get_num_threads()) as pool:
                list(pool.map(block, starts))
        else:
            list(map(block, starts))
        return torch.from_numpy(out).view(shape[0], *x.shape[1:])

    return tree.tmap(one, values)


def is_dense(weights: Weights) -> bool:
    """Whether so many are heard that one product of matrices is faster; fixed by the graph, never by a timing."""
    return weights.nodes > _SMALL and len(weights.to) >= _FULL * weights.nodes**2


def _device(values: Any) -> torch.device:
    return tree.leaves(values)[0].device


# -- a round ---------------------------------------------------------------------------------------
class Trained(NamedTuple):
    """What the nodes did before they exchange, with a row for every node."""

    outcome: Outcome  # [N, ...]; rows of nodes that did not train are zero
    ok: Mask  # [N] who trained, and came to finite numbers
    excluded: tuple[int, ...]  # who trained, and did not
    fits: Fits
    scored: tuple[Tensor, Tensor]  # accuracy and loss [J] of the nodes that are judged, before they mix


def gossip_round(exp: Experiment, state: RunState, store: ClientStore) -> Round:
    """One round of a network: everybody who is online trains, exchanges and mixes."""
    topology, alg = _topology(exp), exp.algorithm
    at, count = Moment(exp.seed, state.round), exp.federation.clients
    offline = topology.offline(count, at)
    state = _rejoined(exp, state, offline)
    present = exp.present(state.round)
    away = torch.where(torch.from_numpy(offline), state.nodes.away + 1, 0)
    if not len(present.drawn.ids):
        nodes = state.nodes._replace(away=away)
        return Round(state._replace(round=state.round + 1, nodes=nodes), (), {}, ())
    done = _trained(exp, state, store)
    if not done.ok.any():
        everyone = names_of(present.drawn.ids.tolist())
        raise DivergedError(
            f"round {state.round + 1}: no node has finite numbers ({everyone}); {rate(exp, state.round)}"
        )
    well = torch.from_numpy(np.flatnonzero(done.ok))
    keep(exp, store, well, tree.take(done.outcome, well.to(exp.device)))
    mixed = _exchanged(exp, state, done)
    payload = (
        alg.upload_bytes(tree.take(done.outcome.uploads, slice(0, 1)))
        + tree.nbytes(exp.travelling(done.outcome.buffers[:1]))
        + (8 if topology.mixing == "push_sum" else 0)
    )
    sent, traffic = payload * int(mixed.messages.sum() // 2), payload * mixed.messages
    steps = done.outcome.steps.long().tolist()
    after = RunState(
        round=state.round + 1,
        server=mixed.server,
        buffers=mixed.buffers,
        up=state.up + sent,
        down=state.down + sent,
        seconds=state.seconds + exp.timetable(state.round, present, sent // count, sent // count).next_,
        gradients=state.gradients + float(done.outcome.gradients.sum()),
        nodes=Nodes(state.nodes.traffic + torch.from_numpy(traffic), away, mixed.mass),
    )
    did = tuple(Did(i, steps[i], 0, late=False) for i in present.drawn.ids.tolist())
    found = done.fits.named() | _judged(done) | mixed.found
    if topology.node_loss and exp.evaluate.due(after.round, exp.rounds):
        found |= {"network/offline": float(offline.sum()), "network/away": float(away.max())}
    return Round(after, done.excluded, found, did)


def _topology(exp: Experiment) -> Topology:
    assert exp.topology is not None
    return exp.topology


def _rejoined(exp: Experiment, state: RunState, offline: Mask) -> RunState:
    """Nodes that come back after too long an absence start from the plain mean of their neighbours' models."""
    topology = _topology(exp)
    back = ~offline & (state.nodes.away.numpy() > topology.stale_after)
    if topology.rejoin == "stale" or not back.any():
        return state
    at = Moment(exp.seed, state.round)
    weights = surviving(topology, topology.weigh(len(offline), at, _sizes(exp)), at, ~offline)
    asked = weights.is_link & back[weights.to] & ~back[weights.by]
    heard = np.bincount(weights.to[asked], minlength=len(offline))
    to, by = weights.to[asked], weights.by[asked]
    rows = np.flatnonzero(heard)
    if not len(rows):
        return state
    plain = Weights(len(offline), to, by, 1.0 / heard[to])
    taken = tree.take(mix(plain, (state.server, state.buffers)), torch.from_numpy(rows).to(exp.device))
    where = torch.from_numpy(rows).to(exp.device)
    server, buffers = tree.tmap(
        lambda old, new: old.index_copy(0, where, new.to(old.dtype)), (state.server, state.buffers), taken
    )
    return state._replace(server=server, buffers=buffers)


def _trained(exp: Experiment, state: RunState, store: ClientStore) -> Trained:
    count, present = exp.federation.clients, exp.present(state.round)
    due = exp.evaluate.due(state.round + 1, exp.rounds)
    watched = due and (exp.evaluate.pre_mix or exp.evaluate.participants)
    ids, parts, fits = [], [], Fits()
    scored: list[tuple[Tensor, Tensor]] = []
    for group in groups_of(exp, state.round, present):
        given = exp.given(state, store, group.ids)
        outcome = train(exp.algorithm, exp.federation, group, given, watched=watched)
        fits = fits.seen(exp, group.ids, given.buffers, outcome) if due and exp.evaluate.participants else fits
        if due and exp.evaluate.pre_mix:
            scored.append(nodes_scored(exp, Judged(group.ids, outcome.models, outcome.buffers)))
        parts.append(outcome._replace(begun=(), models=()))
        ids.append(group.ids)
    there = torch.cat(ids)
    order = there.argsort().to(exp.device)
    outcome = tree.take(tree.cat(parts), order) if len(parts) > 1 or not _in_order(there) else parts[0]
    rows = there.sort().values
    fine = tree.finite_rows(outcome, len(rows)).cpu()
    excluded = tuple(rows[~fine].tolist())
    if excluded:  # a weight of zero does not silence what is not finite
        outcome = tree.where(fine.to(exp.device), outcome, tree.tmap(torch.zeros_like, outcome))
    if len(rows) < count:
        at = rows.to(exp.device)
        outcome = tree.tmap(lambda x: torch.zeros(count, *x.shape[1:], dtype=x.dtype, device=x.device)
                            .index_copy(0, at, x), outcome)  # fmt: skip
    ok = np.zeros(count, dtype=bool)
    ok[rows[fine].numpy()] = True
    return Trained(outcome, ok, excluded, fits, tree.cat(scored) if scored else (torch.zeros(0), torch.zeros(0)))


def _in_order(ids: Tensor) -> bool:
    return bool((ids[1:] > ids[:-1]).all())


def _judged(done: Trained) -> dict[str, float]:
    """How the nodes do before they mix."""
    accuracy, loss = done.scored
    if not len(accuracy):
        return {}
    return over_nodes("nodes/pre_mix/test", accuracy, loss)


# -- the exchange ----------------------------------------------------------------------------------
class Mixed(NamedTuple):
    """The network after the exchange of a round."""

    server: Any  # [N, ...]
    buffers: Tensor  # [N, Q]
    mass: Tensor  # [N]
    messages: Any  # [N] sent and received by each node
    found: dict[str, float]


def _exchanged(exp: Experiment, state: RunState, done: Trained) -> Mixed:
    topology, count = _topology(exp), exp.federation.clients
    push = topology.mixing == "push_sum"
    mass = state.nodes.mass.numpy()
    uploads, buffers = done.outcome.uploads, done.outcome.buffers
    if push:
        uploads = _massive(exp, state, uploads, mass, done.ok)
    due = exp.evaluate.due(state.round + 1, exp.rounds)
    apart = Apart.of(uploads, mass, done.ok) if due else None
    messages = np.zeros(count, dtype=np.int64)
    used: list[Weights] = []
    for step in range(topology.gossip_steps):
        at = Moment(exp.seed, state.round, step)
        whole = topology.weigh(count, at, _sizes(exp))
        weights = surviving(topology, whole, at, done.ok)
        messages += _messages(surviving(topology, whole, at, _reached(done)) if done.excluded else weights)
        used.append(weights)
        if step < topology.gossip_steps - 1:
            uploads, buffers, mass = _halfway(exp, weights, uploads, buffers, mass, push=push)
    after = weights._replace(value=weights.value * mass[weights.by]).rows() if push else mass
    if push and after.min() < _LIGHT:
        raise DivergedError(
            f"round {state.round + 1}: node {int(after.argmin())} is left with a mass of {after.min():.2g}, too little "
            "to divide by (try a lower topology.link_loss)"
        )
    server, mixed = [], []
    for part in _parts(count, exp.lanes):
        heard, statistics = _heard(exp, weights, uploads, buffers, part, after if push else None)
        if apart is not None:
            apart = apart.seen(mapped(lambda inbox: inbox.mean, (0,))(heard), done.ok[part])
        old = tree.take(state.server, part)
        keep_new = torch.from_numpy(done.ok[part]).to(exp.device)
        server.append(tree.where(keep_new, mapped(exp.algorithm.update, (0, 0))(old, heard), old))
        mixed.append(torch.where(keep_new[:, None], statistics.to(state.buffers.dtype), state.buffers[part]))
    found = apart.named(done.ok) if apart is not None else {}
    if apart is not None and not push:
        found["consensus/psi"] = _bound(used, done.ok)
    return Mixed(tree.cat(server), torch.cat(mixed), torch.from_numpy(after), messages, found)


def _massive(exp: Experiment, state: RunState, uploads: Any, mass: Any, ok: Mask) -> Any:
    """What nodes have under push-sum: their model times their mass, and their move; who did not train has none."""
    down = mapped(exp.algorithm.send, (0,))(state.server)
    scale = torch.from_numpy(mass).to(exp.device)
    moved = torch.from_numpy(ok).to(exp.device)

    def one(z: Tensor, u: Tensor) -> Tensor:
        column = (-1, *[1] * (z.dim() - 1))
        there = torch.where(moved.view(column), z, u).double()
        return (there + (scale.view(column) - 1) * u.double()).to(z.dtype)

    return tree.tmap(one, uploads, down)


def _reached(done: Trained) -> Mask:
    """Who sends something, if only numbers that are not finite."""
    reached = done.ok.copy()
    reached[list(done.excluded)] = True
    return reached


def _messages(weights: Weights) -> Any:
    """How many messages each node sends and receives.  ``[N]``"""
    link = weights.is_link
    return np.bincount(weights.to[link], minlength=weights.nodes) + np.bincount(
        weights.by[link], minlength=weights.nodes
    )


def _halfway(
    exp: Experiment, weights: Weights, uploads: Any, buffers: Tensor, mass: Any, *, push: bool
) -> tuple[Any, Tensor, Any]:
    """What nodes hold between two gossip steps."""
    done = []
    for part in _parts(weights.nodes, exp.lanes):
        total, statistics = mix(weights, (uploads, buffers), part)
        if push:
            statistics = statistics / torch.from_numpy(weights.rows()[part]).to(exp.device)[:, None]
        done.append(tree.tmap(lambda t, x: t.to(x.dtype), (total, statistics), (uploads, buffers)))
    after = weights._replace(value=weights.value * mass[weights.by]).rows() if push else mass
    sent, statistics = tree.cat(done)
    return sent, statistics, after


def _heard(
    exp: Experiment, weights: Weights, uploads: Any, buffers: Tensor, part: slice, mass: Any | None
) -> tuple[Inbox[Any], Tensor]:
    """What these nodes read in the last gossip step; ``mass``: of push-sum."""
    total, statistics = mix(weights, (uploads, buffers), part)
    sizes = exp.federation.train.sizes
    rows = weights.rows()[part]
    weight, senders = (
        torch.from_numpy(np.ascontiguousarray(x)).double().to(exp.device)
        for x in (rows if mass is None else mass[part], weights.senders()[part])
    )
    if mass is not None:
        statistics = statistics / torch.from_numpy(rows).to(exp.device)[:, None]
    population, examples = (torch.full_like(senders, float(x)) for x in (len(sizes), int(sizes.sum())))
    return Inbox(total, weight, senders, population, examples), statistics


def _parts(count: int, lanes: int) -> Iterator[slice]:
    """Nodes that hear side by side: sums are in float64, and should not all be held at once."""
    for low in range(0, count, lanes):
        yield slice(low, min(low + lanes, count))


def _sizes(exp: Experiment) -> Any:
    return exp.federation.train.sizes.numpy()


def _bound(used: list[Weights], ok: Mask) -> float:
    """The largest share of their distance that these mixings, one after another, can leave of the nodes that are ok."""
    if len(used) == 1 and ok.all():
        return psi(used[0])
    product = used[0].dense()
    for weights in used[1:]:
        product = weights.dense() @ product
    return norm(product[np.ix_(ok, ok)])


class Apart(NamedTuple):
    """How far nodes are from their mean, before and after they mix."""

    mean: Any  # of all that was sent, in float64
    before: float  # sum of squared distances from it
    after: float = 0.0
    shift: Any = None  # sum of what came out, less the mean

    @staticmethod
    def of(sent: Any, mass: Any, ok: Mask) -> Apart:
        """What nodes sent, each divided by its mass; node by node, so that float64 is never held of all."""
        rows, shares = np.flatnonzero(ok), (1.0 / mass[ok]).tolist()
        plain = torch.from_numpy(np.where(ok, 1.0 / mass, 0.0) / len(rows)).to(_device(sent))
        mean = tree.take(tree.mix(plain[None], sent), 0)
        before = 0.0
        for x, m in zip(tree.leaves(sent), tree.leaves(mean), strict=True):
            before += sum(float((x[r].double() * s - m).square().sum()) for r, s in zip(rows, shares, strict=True))
        return Apart(mean, before)

    def seen(self, mixed: Any, ok: Mask) -> Apart:
        """With some more nodes, after they mixed."""
        rows = torch.from_numpy(np.flatnonzero(ok))
        off = tree.tmap(lambda x, m: x[rows.to(x.device)] - m, mixed, self.mean)
        shift = tree.tmap(lambda x: x.sum(0), off)
        if self.shift is not None:
            shift = tree.tmap(torch.add, self.shift, shift)
        more = sum(float(x.square().sum()) for x in tree.leaves(off))
        return self._replace(after=self.after + more, shift=shift)

    def named(self, ok: Mask) -> dict[str, float]:
        """The distances before and after, and how much of it is left."""
        count = int(ok.sum())
        moved = sum(float(x.square().sum()) for x in tree.leaves(self.shift)) / count
        before, after = math.sqrt(self.before / count), math.sqrt(max(0.0, self.after - moved) / count)
        found = {"consensus/pre_mix/distance": before, "consensus/post_mix/distance": after}
        if before > 0:
            found["consensus/contraction"] = after / before
        return found
