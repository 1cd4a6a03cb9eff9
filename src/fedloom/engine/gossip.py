"""A round without a server: nodes train, exchange what they have with their neighbours, and mix it.

A node needs one value from each neighbour, and nothing else from the network: a ``Message``, which could also be sent
over a wire. ``inbox_of`` turns the messages of a gossip step into the input of the algorithm's ``update``::

    node i   upload, mine = finish(...)                    after local training from send(node)
             for each gossip step:
                 send Message(round, step, i, upload, statistics, mass) to the neighbours
                 inbox, statistics = inbox_of(i, {l: w_il}, {l: message of l}, ...)     including its own message
                 upload = spread(inbox, upload)            what it sends in the next step of the same round
             node = update(node, inbox)                    of the last step

The simulator does the same for all nodes at once, with the same sums in the same order, so that a node driven by
messages has the same result, bit for bit. Sums are computed in float64, neighbour by neighbour in order of their
numbers; only if the graph is dense, or on a GPU, is it one matrix product, which agrees up to rounding.

With push-sum, a node sends its model times its mass w, plus its update in this round: x = w u + (z - u) =
z + (w - 1) u, where u is the model before training and z the one after it. Mass and x are mixed in the same way,
and ``inbox.mean`` = sum / mass is the model again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from fedloom.algorithm import Inbox
from fedloom.algorithm.capabilities import gossip_facts, upload_bytes
from fedloom.core import tree
from fedloom.core.errors import DivergedError
from fedloom.data.arrays import Ints
from fedloom.engine.divergence import names_of, rate
from fedloom.engine.evaluate import ClientModels, ParticipantScores, everyones_models, nodes_scored, over_nodes
from fedloom.engine.local import Outcome, mapped
from fedloom.engine.mixing import (
    WIDE,
    Consensus,
    columns_of,
    device_of,
    in_turn,
    is_dense,
    mixed_rows,
    product,
    sparse_rows,
)
from fedloom.engine.state import ClientWork, Experiment, Nodes, Past, Round, RunState
from fedloom.engine.store import ClientStore
from fedloom.engine.topology.network import Moment, Topology, refuse_no_nodes, surviving, usable
from fedloom.engine.topology.weights import Mask, Weights, cut, norm, psi
from fedloom.engine.training import groups_of, keep, marked, train_all

T = TypeVar("T")

_LIGHT = 1e-6  # a mass that is too small to divide by


# -- a round ---------------------------------------------------------------------------------------
class Trained(NamedTuple):
    """What the nodes did before they exchange, with a row for every node."""

    outcome: Outcome  # [N, ...]; rows of nodes that did not train are zero
    ok: Mask  # [N] nodes that trained and are finite
    excluded: tuple[int, ...]  # nodes that trained and are not finite
    scores: ParticipantScores
    scored: tuple[Tensor, Tensor]  # accuracy and loss [J] of the nodes that are evaluated, before they mix


def gossip_round(exp: Experiment, state: RunState, store: ClientStore) -> Round:
    """One round of a network: every node that is online trains, exchanges and mixes."""
    topology, alg = _topology(exp), exp.algorithm
    at, count = Moment(exp.seed, state.round), exp.federation.clients
    offline, dead = topology.offline(count, at), topology.dead(count, at)
    refuse_no_nodes(dead, at)
    state = _rejoined(exp, state, store, offline)
    present = exp.present(state.round)
    away = torch.where(torch.from_numpy(offline), state.nodes.away + 1, 0)
    if not len(present.drawn.ids):
        nodes = state.nodes._replace(away=away, past=_older(state.nodes.past))
        found = _absent(exp, state.round + 1, offline, dead, away)
        return Round(state._replace(round=state.round + 1, nodes=nodes), (), found, ())
    done = _trained(exp, state, store)
    if not done.ok.any():
        everyone = names_of(present.drawn.ids.tolist())
        raise DivergedError(
            f"round {state.round + 1}: no node has finite numbers ({everyone}); {rate(exp, state.round)}"
        )
    mixed = _exchanged(exp, state, store, done)
    payload = node_payload(
        exp, upload_bytes(alg, tree.take(done.outcome.uploads, slice(0, 1))), done.outcome.buffers[:1]
    )
    sent, traffic = payload * int(mixed.messages.sum() // 2), payload * mixed.messages
    steps = done.outcome.steps.long().tolist()
    after = RunState(
        round=state.round + 1,
        server=mixed.server,
        buffers=mixed.buffers,
        up=state.up + sent,  # each message once: sent by one node, received by another
        down=state.down,
        seconds=state.seconds + exp.timetable(state.round, present, sent // count, sent // count).next_,
        gradients=state.gradients + float(done.outcome.gradients.sum()),
        nodes=Nodes(state.nodes.traffic + torch.from_numpy(traffic), away, mixed.mass, mixed.past),
    )
    did = tuple(ClientWork(i, steps[i], 0, late=False) for i in present.drawn.ids.tolist())
    found = done.scores.named(exp) | _pre_mix(exp, done) | mixed.found | _absent(exp, after.round, offline, dead, away)
    return Round(after, done.excluded, found, did)


def _absent(exp: Experiment, round_: int, offline: Mask, dead: Mask, away: Tensor) -> dict[str, float]:
    """How many nodes were absent, in rounds that are evaluated."""
    topology = _topology(exp)
    found: dict[str, float] = {}
    if exp.evaluate.due(round_, exp.rounds):
        if topology.node_loss:
            found |= {"network/offline": float(offline.sum()), "network/away": float(away.max())}
        if topology.dies:
            found |= {"network/dead": float(dead.sum())}
    return found


def _topology(exp: Experiment) -> Topology:
    assert exp.topology is not None
    return exp.topology


def _rejoined(exp: Experiment, state: RunState, store: ClientStore, offline: Mask) -> RunState:
    """Nodes that come back after too long an absence restart from the plain mean of their neighbours' models.

    A model is the one that its node predicts with, not only the mixed part; the returning node also discards its other
    state.
    """
    to, by = pulled(exp, state.round, offline, state.nodes.away.numpy())
    if not len(to):
        return state
    received = np.bincount(to, minlength=len(offline))
    rows = np.flatnonzero(received)
    asked = np.unique(by)
    whose, where = torch.from_numpy(asked), torch.from_numpy(rows).to(exp.device)
    models = torch.cat([part.w for part in everyones_models(exp, state, store, whose)])
    plain = Weights(len(offline), to, np.searchsorted(asked, by), 1.0 / received[to])
    taken = tree.take(mixed_rows(plain, (models, state.buffers[whose.to(exp.device)])), where)
    w, buffers = tree.tmap(
        lambda old, new: old.index_copy(0, where, new.to(old.dtype)), (state.server.w, state.buffers), taken
    )
    # A model was sent over each of these links.
    size = pulled_bytes(exp, w[0], buffers[0])
    ends = np.bincount(np.concatenate([to, by]), minlength=len(offline))
    nodes = state.nodes._replace(traffic=state.nodes.traffic + torch.from_numpy(size * ends))
    state = state._replace(
        server=state.server._replace(w=w), buffers=buffers, nodes=nodes, up=state.up + size * len(to)
    )
    _joined_anew(exp, state, store, exp.ranks.own(torch.from_numpy(rows)))
    return state


def _joined_anew(exp: Experiment, state: RunState, store: ClientStore, ids: Tensor) -> None:
    """Reset the stored state of these nodes to that of a node that joins with its current model.

    Running statistics that stay with the nodes are of their own data, and are kept.
    """
    if not len(ids):
        return
    given = exp.given(state, store, ids)
    blank = tree.stack([exp.blank(tree.take(given.down, k)) for k in range(len(ids))])
    store.scatter(ids, blank._replace(buffers=given.buffers) if exp.keeps_buffers else blank)


def pulled(exp: Experiment, round_: int, offline: Mask, away: Ints) -> tuple[Ints, Ints]:
    """Which node reads the model of which: for those that come back after too long an absence (``away``, in rounds)."""
    topology, none = _topology(exp), np.zeros(0, dtype=np.int64)
    back = ~offline & (away > topology.stale_after)
    if topology.rejoin == "stale" or not back.any():
        return none, none
    at = Moment(exp.seed, round_)
    weights = surviving(topology, topology.weigh(len(offline), at, _sizes(exp)), at, ~offline)
    asked = weights.is_link & back[weights.to] & ~back[weights.by]
    return weights.to[asked], weights.by[asked]


def pulled_bytes(exp: Experiment, w: Tensor, buffers: Tensor) -> int:
    """The bytes of a node's model."""
    return tree.nbytes(w) + tree.nbytes(exp.travelling(buffers))


def _trained(exp: Experiment, state: RunState, store: ClientStore) -> Trained:
    count, present = exp.federation.clients, exp.present(state.round)
    due = exp.evaluate.due(state.round + 1, exp.rounds)
    watched = due and (exp.evaluate.pre_mix or exp.evaluate.participants)
    scores, ok, excluded = ParticipantScores(), np.zeros(count, dtype=bool), []
    scored: list[tuple[Tensor, Tensor]] = []
    groups, pre_mix = groups_of(exp, state.round, present), due and exp.evaluate.pre_mix
    rows = NodeRows(store, count)
    for part in train_all(exp, state, store, groups, watched=watched, models=pre_mix):
        ids = part.group.ids
        scores = scores.with_group(exp, part) if due and exp.evaluate.participants else scores
        if pre_mix:
            scored.append(nodes_scored(exp, ClientModels(ids, part.outcome.models, part.outcome.buffers)))
        outcome = marked(part.outcome)._replace(begun=(), models=())
        fine = tree.finite_rows(outcome, len(ids)).cpu()
        if not fine.all():  # a weight of zero does not cancel a number that is not finite
            outcome = tree.where(fine.to(exp.device), outcome, tree.tmap(torch.zeros_like, outcome))
        keep(exp, store, part, ids[fine])
        rows.write(ids, outcome)
        ok[ids[fine].numpy()] = True
        excluded += ids[~fine].tolist()
    before = tree.cat(scored) if scored else (torch.zeros(0), torch.zeros(0))
    return Trained(rows.whole(), ok, tuple(sorted(excluded)), scores, before)


class NodeRows:
    """Rows of all nodes that are computed some at a time, in the store's place for large tensors."""

    def __init__(self, store: ClientStore, count: int) -> None:
        self._store, self._count = store, count
        self._written = torch.zeros(count, dtype=torch.bool)
        self._all: Any = None

    def write(self, ids: Tensor, rows: Any) -> None:
        """Rows ``ids`` [K] of each leaf."""
        everyone = torch.arange(self._count)
        if self._all is None and torch.equal(ids, everyone):
            self._all, self._written = rows, ~self._written
            return
        if self._all is None:
            self._all = tree.tmap(lambda x: self._store.room((self._count, *x.shape[1:]), x.dtype, x.device), rows)
        tree.tmap(lambda whole, x: whole.index_copy_(0, ids.to(whole.device), x), self._all, rows)
        self._written[ids] = True

    def whole(self) -> Any:
        """All of them; zeros where nothing was written."""
        if not self._written.all():
            at = (~self._written).nonzero().squeeze(1)
            tree.tmap(lambda x: x.index_fill_(0, at.to(x.device), 0), self._all)
        return self._all


def _pre_mix(exp: Experiment, done: Trained) -> dict[str, float]:
    """The nodes before they mix."""
    accuracy, loss = done.scored
    if not len(accuracy):
        return {}
    return over_nodes("nodes/pre_mix/test", exp.task.criterion, accuracy, loss)


# -- the exchange ----------------------------------------------------------------------------------
class Mixed(NamedTuple):
    """The network after the exchange of a round."""

    server: Any  # [N, ...]
    buffers: Tensor  # [N, Q]
    mass: Tensor  # [N]
    messages: Any  # [N] sent and received by each node
    found: dict[str, float]
    past: Any = ()  # messages that may be reused: Past


def _exchanged(exp: Experiment, state: RunState, store: ClientStore, done: Trained) -> Mixed:
    topology, count = _topology(exp), exp.federation.clients
    push = topology.mixing == "push_sum"
    mass = state.nodes.mass.numpy()
    uploads, buffers = done.outcome.uploads, done.outcome.buffers
    if push:
        uploads = _massive(exp, state, store, uploads, mass, done.ok)
    due = exp.evaluate.due(state.round + 1, exp.rounds)
    apart = Consensus.of(uploads, mass, done.ok) if due else None
    messages = np.zeros(count, dtype=np.int64)
    used: list[Weights] = []
    for step in range(topology.gossip_steps):
        at = Moment(exp.seed, state.round, step)
        whole = topology.weigh(count, at, _sizes(exp))
        weights = surviving(topology, whole, at, done.ok)
        messages += _messages(surviving(topology, whole, at, _reached(done)) if done.excluded else weights)
        used.append(weights)
        past = state.nodes.past
        if past:
            weights, (uploads, buffers), past = _recalled(topology, whole, at, done.ok, (uploads, buffers), past)
        if step < topology.gossip_steps - 1:
            uploads, buffers, mass = _halfway(exp, store, weights, uploads, buffers, mass, push=push)
    after = weights._replace(value=weights.value * mass[weights.by]).rows() if push else mass
    if push and after.min() < _LIGHT:
        raise DivergedError(
            f"round {state.round + 1}: node {int(after.argmin())} is left with a mass of {after.min():.2g}, too little "
            "to divide by (try a lower topology.link_loss)"
        )
    received = _statistics(exp, weights, buffers, push=push)
    mixed = tree.where(torch.from_numpy(done.ok).to(exp.device), received.to(state.buffers.dtype), state.buffers)
    mail = Mail(weights, uploads, envelopes(exp, weights, after if push else None, state.round), done.ok)
    server, apart = delivered(exp, state, store, mail, apart)
    found = apart.named(done.ok) if apart is not None else {}
    if apart is not None and not push and not past:
        found["consensus/psi"] = _bound(used, done.ok)
    return Mixed(server, mixed, torch.from_numpy(after), messages, found, past)


def _recalled(topology: Topology, whole: Weights, at: Moment, ok: Mask, sent: T, past: Past) -> tuple[Weights, T, Past]:
    """Replace a lost message by the last one of the same sender, unless that is too old.

    Old messages are additional rows [N + E, ...] below those of this round, with additional columns of the matrix.
    """
    last, up, link = past.last.numpy(), usable(topology, whole, at, ok), whole.is_link
    hears = ok & ~topology.offline(whole.nodes, at)
    then = last[whole.to, whole.by]
    age = at.round - then
    again = ~up & link & hears[whole.to] & (then >= 0) & (age <= topology.stale_after)
    old, place = np.unique(np.stack([age[again], whole.by[again]], axis=1), axis=0, return_inverse=True)
    by = whole.by.copy()
    by[again] = whole.nodes + place.ravel()
    device = device_of(sent)
    extra = [
        tree.take(past.sent[a - 1], torch.from_numpy(old[old[:, 0] == a, 1]).to(device)) for a in np.unique(old[:, 0])
    ]
    received = last.copy()
    received[whole.to[up & link], whole.by[up & link]] = at.round
    weights = cut(whole._replace(by=by), up | again, "self")
    return weights, tree.cat([sent, *extra]), Past(torch.from_numpy(received), (sent, *past.sent)[: len(past.sent)])


def _older(past: Any) -> Any:
    """The kept messages after a round without any."""
    return past._replace(sent=(past.sent[0], *past.sent[:-1])) if past and past.sent else past


class Mail(NamedTuple):
    """What is exchanged in the last gossip step."""

    weights: Weights
    uploads: Any  # [N, ...]
    read: Inbox[Any]  # [N] what each node reads in addition to the sum
    ok: Mask  # [N] nodes that take part


def delivered(
    exp: Experiment, state: RunState, store: ClientStore, mail: Mail, apart: Consensus | None = None
) -> tuple[Any, Consensus | None]:
    """The nodes [N, ...] after the last gossip step, and their distances, if requested."""
    return (_by_columns if _has_columns(exp, state, mail) else _by_rows)(exp, state, store, mail, apart)


def _has_columns(exp: Experiment, state: RunState, mail: Mail) -> bool:
    """Whether nodes can process what they receive some columns at a time."""
    if not gossip_facts(exp.algorithm).columnwise or exp.device.type != "cpu" or is_dense(mail.weights):
        return False
    whole = all(leaf.dim() == 2 for leaf in tree.leaves(mail.uploads))
    return whole and columns_of((mail.uploads, state.server)) is not None


def _by_rows(
    exp: Experiment, state: RunState, store: ClientStore, mail: Mail, apart: Consensus | None
) -> tuple[Any, Consensus | None]:
    """Some nodes at a time."""
    weights, uploads, read, ok = mail
    rows = NodeRows(store, weights.nodes)
    for part in _parts(weights.nodes, exp.lanes):
        received = tree.take(read._replace(total=()), part)._replace(total=mixed_rows(weights, uploads, part))
        if apart is not None:
            apart = apart.seen(_means(received), ok[part])
        old, keep_new = tree.take(state.server, part), torch.from_numpy(ok[part]).to(exp.device)
        new = tree.where(keep_new, mapped(exp.algorithm.update, (0, 0))(old, received), old)
        rows.write(torch.arange(part.start, part.stop), new)
    return rows.whole(), apart


def _by_columns(
    exp: Experiment, state: RunState, store: ClientStore, mail: Mail, apart: Consensus | None
) -> tuple[Any, Consensus | None]:
    """Some columns at a time: each model is read once and written once, and sums never leave the cache."""
    weights, uploads, read, ok = mail
    count, size = weights.nodes, columns_of(uploads) or 0
    matrix, keep_new = sparse_rows(weights, slice(0, count), len(tree.leaves(uploads)[0])), torch.from_numpy(ok)
    update, server = mapped(exp.algorithm.update, (0, 0)), state.server
    after = tree.tmap(lambda x: store.room(tuple(x.shape), x.dtype, x.device), server)

    def block(low: int) -> Consensus | None:
        part = slice(low, min(low + WIDE, size))
        received = read._replace(total=tree.tmap(lambda x: product(matrix, x), _columns(uploads, part)))
        old = _columns(server, part)
        new = update(old, received)
        tree.tmap(Tensor.copy_, _columns(after, part), new if ok.all() else tree.where(keep_new, new, old))
        return None if apart is None else apart.across(_means(received), part, ok)

    seen = in_turn(block, range(0, size, WIDE))
    if apart is not None:
        more = [one for one in seen if one is not None]
        apart = apart._replace(after=sum(one.after for one in more), moved=sum(one.moved for one in more))
    return after, apart


def _columns(whole: T, part: slice) -> T:
    """These columns of each matrix; leaves with one number per row are unchanged."""
    return tree.tmap(lambda x: x[:, part] if x.dim() > 1 else x, whole)


def _means(received: Inbox[Any]) -> Any:
    return mapped(lambda inbox: inbox.mean, (0,))(received)


def _massive(exp: Experiment, state: RunState, store: ClientStore, uploads: Any, mass: Any, ok: Mask) -> Any:
    """Under push-sum: models times mass, and updates; nodes that did not train have no update."""
    scale, moved = torch.from_numpy(mass).to(exp.device), torch.from_numpy(ok).to(exp.device)
    rows = NodeRows(store, len(ok))
    for part in _parts(len(ok), exp.lanes):
        down = mapped(exp.algorithm.send, (0,))(tree.take(state.server, part))
        sent = tree.take(uploads, part)
        mixed = type(sent)(*(getattr(down, name) for name in sent._fields))

        def one(z: Tensor, u: Tensor, part: slice = part) -> Tensor:
            column = (-1, *[1] * (z.dim() - 1))
            there = torch.where(moved[part].view(column), z, u).double()
            return (there + (scale[part].view(column) - 1) * u.double()).to(z.dtype)

        rows.write(torch.arange(part.start, part.stop), tree.tmap(one, sent, mixed))
    return rows.whole()


def node_payload(exp: Experiment, upload: int, buffers: Tensor) -> int:
    """Bytes of a message: of an upload, and of what is sent with it."""
    mass = 8 if _topology(exp).mixing == "push_sum" else 0
    return upload + tree.nbytes(exp.travelling(buffers)) + mass


def exchanges(exp: Experiment, round_: int, ok: Mask) -> Ints:
    """How many messages each node sends and receives in a round in which these are ``ok`` [N].  ``[N]``"""
    topology, count = _topology(exp), len(ok)
    total = np.zeros(count, dtype=np.int64)
    for step in range(topology.gossip_steps):
        at = Moment(exp.seed, round_, step)
        total += _messages(surviving(topology, topology.weigh(count, at, _sizes(exp)), at, ok))
    return total


def _reached(done: Trained) -> Mask:
    """The nodes that send something, finite or not."""
    reached = done.ok.copy()
    reached[list(done.excluded)] = True
    return reached


def _messages(weights: Weights) -> Ints:
    """How many messages each node sends and receives.  ``[N]``"""
    link = weights.is_link
    return np.bincount(weights.to[link], minlength=weights.nodes) + np.bincount(
        weights.by[link], minlength=weights.nodes
    )


def _halfway(
    exp: Experiment, store: ClientStore, weights: Weights, uploads: Any, buffers: Tensor, mass: Any, *, push: bool
) -> tuple[Any, Tensor, Any]:
    """The state of nodes between two gossip steps."""
    rows = NodeRows(store, weights.nodes)
    for part in _parts(weights.nodes, exp.lanes):
        total = mixed_rows(weights, uploads, part)
        rows.write(torch.arange(part.start, part.stop), tree.tmap(lambda t, x: t.to(x.dtype), total, uploads))
    after = weights._replace(value=weights.value * mass[weights.by]).rows() if push else mass
    return rows.whole(), _statistics(exp, weights, buffers, push=push).to(buffers.dtype), after


def _statistics(exp: Experiment, weights: Weights, buffers: Tensor, *, push: bool) -> Tensor:
    """Running statistics after mixing: a mean even if models are not.  ``[N, Q]``"""
    mixed = mixed_rows(weights, buffers)
    return mixed / torch.from_numpy(weights.rows()).to(exp.device)[:, None] if push else mixed


def envelopes(exp: Experiment, weights: Weights, mass: Any | None, round_: int) -> Inbox[Any]:
    """What every node reads in the last gossip step in addition to the sum; ``mass``: of push-sum."""
    sizes = exp.federation.train.sizes
    weight, senders, own = (
        torch.from_numpy(np.ascontiguousarray(x)).double().to(exp.device)
        for x in (weights.rows() if mass is None else mass, weights.senders(), weights.value[~weights.is_link])
    )
    same = (len(sizes), int(sizes.sum()), round_)
    population, examples, now = (torch.full_like(senders, float(x)) for x in same)
    return Inbox((), weight, senders, population, examples, own=own, round=now)


def _parts(count: int, lanes: int) -> Iterator[slice]:
    """Nodes that are processed together: sums are in float64, and not all are in memory at once."""
    for low in range(0, count, lanes):
        yield slice(low, min(low + lanes, count))


def _sizes(exp: Experiment) -> Any:
    return exp.federation.train.sizes.numpy()


def _bound(used: list[Weights], ok: Mask) -> float:
    """The contraction of these successive mixings in the worst case, among the nodes that are ok."""
    if len(used) == 1 and ok.all():
        return psi(used[0])
    product = used[0].dense()
    for weights in used[1:]:
        product = weights.dense() @ product
    return norm(product[np.ix_(ok, ok)])
