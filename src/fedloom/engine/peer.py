"""One node's part of a network without a server: train, mix what arrived, evaluate.

The experiment is that of the whole network, except for its data: it has only the rows of this node. A ``RunState`` here
is that of one node, without the simulator's first axis. ``tests/deploy/test_peers.py`` checks that both agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedloom.core import tree
from fedloom.core.metrics import Verdicts
from fedloom.engine.clock import Present
from fedloom.engine.evaluate import ClientModels, evaluate_models, models_of
from fedloom.engine.messages import Message, inbox_of, next_upload
from fedloom.engine.plan import Drawn, amounts
from fedloom.engine.state import Experiment, RunState
from fedloom.engine.store import ClientStore
from fedloom.engine.topology.network import Moment
from fedloom.engine.topology.weights import cut
from fedloom.engine.training import groups_of, keep, marked, train_all
from fedloom.engine.uploads import example_upload


class Sent(NamedTuple):
    """What is sent over a link in a gossip step."""

    upload: Any
    buffers: Any  # [Q] running statistics; () if they stay with the nodes


class OwnWork(NamedTuple):
    """What a node did in a round before it exchanges."""

    sent: Sent | None  # None: its numbers are not finite, and it skips this round
    gradients: float = 0.0


def begin_node(exp: Experiment, node: int) -> RunState:
    """The state of one node before the first round."""
    w = exp.task.w0 if exp.starts is None else exp.starts[node]
    return RunState(0, exp.algorithm.init(w), exp.task.buffers0, 0, 0)


def sent_form(exp: Experiment, node: int) -> Sent:
    """What a neighbour might send, for its structure."""
    state = begin_node(exp, node)
    return Sent(example_upload(exp, state), exp.travelling(state.buffers))


def train_node(exp: Experiment, state: RunState, node: int, store: ClientStore) -> OwnWork:
    """Train this node's round; the store keeps the node's own state."""
    with torch.no_grad():
        ids = torch.tensor([node])
        steps = amounts(exp.local, exp.federation.train.sizes[ids]).steps
        groups = groups_of(exp, state.round, Present(Drawn(ids, torch.ones(1)), steps, 1))
        (part,) = train_all(exp, _everywhere(exp, state), store, groups)
        outcome = marked(part.outcome)._replace(begun=(), models=())
        gradients = float(outcome.gradients.sum())
        if not bool(tree.finite_rows(outcome, 1)):
            return OwnWork(None, gradients)
        keep(exp, store, part, ids)
        row = tree.take(outcome, 0)
        return OwnWork(Sent(row.uploads, exp.travelling(row.buffers)), gradients)


def links_of(exp: Experiment, node: int, round_: int, step: int) -> dict[int, float]:
    """The neighbours of a node in a gossip step, and the weight of each."""
    return {by: value for by, value in _row(exp, node, round_, step, None).items() if by != node}


def mix_node(
    exp: Experiment, state: RunState, node: int, own: Sent, received: Mapping[int, Sent], step: int
) -> tuple[RunState, Sent]:
    """The state after a gossip step that received only from these neighbours, and what the node sends in the next one.

    The weight of a link that is down goes back to both of its ends, as with ``link_policy = "self"``.
    """
    with torch.no_grad():
        weights = _row(exp, node, state.round, step, received)
        everyone = {node: own, **received}
        mine = own.buffers if isinstance(own.buffers, Tensor) else state.buffers
        messages = {
            k: Message(state.round, step, k, x.upload, x.buffers if isinstance(x.buffers, Tensor) else mine)
            for k, x in everyone.items()
        }
        sizes = exp.federation.train.sizes
        inbox, mixed = inbox_of(node, weights, messages, nodes=len(sizes), examples=int(sizes.sum()))
        buffers = mixed.to(state.buffers.dtype)
        assert exp.topology is not None
        if step < exp.topology.gossip_steps - 1:
            return state, Sent(next_upload(inbox, own.upload), exp.travelling(buffers))
        return state._replace(server=exp.algorithm.update(state.server, inbox), buffers=buffers), own


def correction(exp: Experiment, state: RunState, node: int, own: Sent, theirs: tuple[int, Sent], step: int) -> Sent:
    """What an undecided link adds to a node if it turns out to have been up: its weight times the difference."""
    by, received = theirs
    weight = links_of(exp, node, state.round, step)[by]
    return tree.tmap(lambda a, b: (weight * (b.double() - a.double())).to(a.dtype), own, received)


def corrected(state: RunState, by: Sent) -> RunState:
    """The state with a late correction; mixing is linear, so the mean of all nodes is right again."""
    shared = [name for name in by.upload._fields if name in state.server._fields]
    server = state.server._replace(**{name: getattr(state.server, name) + getattr(by.upload, name) for name in shared})
    return state._replace(server=server, buffers=state.buffers + by.buffers if len(by.buffers) else state.buffers)


def model_of_node(exp: Experiment, state: RunState, node: int, store: ClientStore) -> ClientModels:
    """The model with which a node predicts."""
    with torch.no_grad():
        (found,) = models_of(exp, _everywhere(exp, state), store, torch.tensor([node]))
        return found


def evaluate_node(exp: Experiment, state: RunState, node: int, store: ClientStore) -> Verdicts:
    """The scores of that model on the node's own held-out rows."""
    with torch.no_grad():
        return evaluate_models(exp, model_of_node(exp, state, node, store))


def _row(exp: Experiment, node: int, round_: int, step: int, up: Mapping[int, Any] | None) -> dict[int, float]:
    """The node's row of the mixing matrix, without the links that are not ``up``."""
    assert exp.topology is not None
    sizes = exp.federation.train.sizes.numpy()
    weights = exp.topology.weigh(len(sizes), Moment(exp.seed, round_, step), sizes)
    if up is not None:
        mine = np.isin(weights.by, [node, *up]) | (weights.to != node)
        weights = cut(weights, mine, "self")
    at = weights.to == node
    return {int(by): float(value) for by, value in zip(weights.by[at], weights.value[at], strict=True)}


def _everywhere(exp: Experiment, state: RunState) -> RunState:
    """The state in the simulator's form, with this node's row for every node; nothing is copied."""
    count = exp.federation.clients
    server, buffers = tree.tmap(lambda x: x.expand(count, *x.shape), (state.server, state.buffers))
    return state._replace(server=server, buffers=buffers)
