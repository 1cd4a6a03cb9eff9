"""What a run will spend, round by round, without training anything.

The clients of a round, their steps and the links of a network follow from the settings and the seed, so that gradients
and bytes can be counted beforehand. What only training decides is counted at its upper bound for local steps that may
end early and for messages that are truncated (FedKD), and as one pass for phases that each client repeats until it
stops.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedloom.algorithm.capabilities import (
    ForeseesUploads,
    phases_of,
    sent_bytes,
    survey_gradients,
    trains_in,
    upload_bytes,
)
from fedloom.core import tree
from fedloom.engine.arrivals import moved_on, traffic_of
from fedloom.engine.gossip import exchanges, node_payload, pulled, pulled_bytes
from fedloom.engine.lateness import Lateness, foresee_lateness
from fedloom.engine.plan import amounts, extent
from fedloom.engine.rounds import begin
from fedloom.engine.state import Experiment, RunState
from fedloom.engine.topology.network import Moment
from fedloom.engine.uploads import example_upload


class Spent(NamedTuple):
    """What a run has spent after its first ``rounds``."""

    rounds: int = 0
    gradients: float = 0.0
    bytes: int = 0  # of all messages, each counted once
    busiest: int = 0  # through the busiest endpoint: a node of a network, or the server


def forecast(exp: Experiment) -> Iterator[Spent]:
    """What is spent after the first round, after the second, and so on; endless."""
    if exp.is_asynchronous:
        return _arrivals(exp)
    return _network(exp) if exp.is_network else _star(exp)


def _star(exp: Experiment) -> Iterator[Spent]:
    alg, start = exp.algorithm, _start(exp)
    beside = tree.nbytes(exp.travelling(start.buffers))
    down, up = sent_bytes(alg, alg.send(start.server)) + beside, _upload(exp, start)
    spent, server = Spent(), start.server
    while True:
        state = start._replace(round=spent.rounds)
        present = exp.present(state.round)
        ids = present.drawn.ids
        moved = 0
        ahead = foresee_lateness(exp, state, present, down) if len(ids) else Lateness(ids)
        if alg.traits.communicates:
            senders = ahead.on_time(ids)
            uploads = up * len(senders)
            if isinstance(alg, ForeseesUploads):
                uploads, server = alg.foresee_uploads(server, senders)
            called = exp.federation.clients if alg.traits.sends_to_all else present.called
            moved = down * called + uploads + beside * len(senders)
        gradients = spent.gradients + _gradients(exp, spent.rounds, ids, present.steps, ahead.extra)
        spent = Spent(spent.rounds + 1, gradients, spent.bytes + moved, spent.busiest + moved)
        yield spent


def _arrivals(exp: Experiment) -> Iterator[Spent]:
    """For an asynchronous server: arrivals do not depend on what clients have learned."""
    state, spent = begin(exp), Spent()
    traffic, sizes = traffic_of(exp, state), exp.federation.train.sizes
    while True:
        came, gradients = 0, spent.gradients
        while came < len(state.under_way.ids):
            places = state.under_way.due()
            ids = state.under_way.ids[places]
            gradients += _gradients(exp, spent.rounds, ids, amounts(exp.local, sizes[ids]).steps)
            state, came = moved_on(exp, state, places, traffic), came + len(places)
        moved = spent.bytes + came * (traffic.down + traffic.up)
        spent = Spent(spent.rounds + 1, gradients, moved, moved)
        yield spent


def _network(exp: Experiment) -> Iterator[Spent]:
    start, count = _start(exp), exp.federation.clients
    payload = node_payload(exp, _upload(exp, start), start.buffers)
    traffic, away, spent = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64), Spent()
    assert exp.topology is not None
    while True:
        present = exp.present(spent.rounds)
        offline = exp.topology.offline(count, Moment(exp.seed, spent.rounds))
        ends = np.concatenate(pulled(exp, spent.rounds, offline, away))
        traffic += pulled_bytes(exp, start.server.w, start.buffers) * np.bincount(ends, minlength=count)
        away = np.where(offline, away + 1, 0)
        ok = np.zeros(count, dtype=bool)
        ok[present.drawn.ids.numpy()] = True
        traffic += payload * exchanges(exp, spent.rounds, ok)
        gradients = spent.gradients + _gradients(exp, spent.rounds, present.drawn.ids, present.steps)
        moved = int(traffic.sum()) // 2  # a message has two endpoints
        spent = Spent(spent.rounds + 1, gradients, moved, int(traffic.max()))
        yield spent


def _start(exp: Experiment) -> RunState:
    """A server, or one node, before the first round."""
    return RunState(0, exp.algorithm.init(exp.task.w0), exp.task.buffers0, 0, 0)


def _upload(exp: Experiment, start: RunState) -> int:
    return upload_bytes(exp.algorithm, tree.tmap(lambda x: x[None], example_upload(exp, start)))


def _gradients(
    exp: Experiment, round_: int, ids: Tensor, steps: Tensor, extra: Mapping[int, int] | None = None
) -> float:
    """The gradients that these clients take in a round of ``steps`` [K]; ``extra``: epochs while they wait."""
    alg, sizes = exp.algorithm, exp.federation.train.sizes[ids]
    per_epoch, trains = amounts(exp.local, sizes).per_epoch, trains_in(alg, round_)
    total = float(per_epoch.sum()) * survey_gradients(alg) if trains else 0.0
    for phase in phases_of(alg):
        if phase.is_main:
            whole = torch.ceil(steps / per_epoch.clamp(min=1)) * per_epoch
            each = alg.traits.gradients_per_step
            total += float((each * steps + phase.look_gradients * whole).sum()) if trains else 0.0
        elif phase.waiting:
            epochs = torch.tensor([(extra or {}).get(i, 0) for i in ids.tolist()], dtype=torch.int64)
            total += float((epochs * extent(exp.local, sizes, phase, 1).steps).sum())
        elif phase.cost > 0 and not phase.rare:
            total += float(torch.sum(extent(exp.local, sizes, phase).steps))
    return total
