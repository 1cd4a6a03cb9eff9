"""Evaluation: the server's model, each client's own model, or the consensus of a network, always on test rows.

What a number is called says what was measured: ``global/test/accuracy`` (the server's model on the
common test set), ``personal/post_fit/test/accuracy`` (each client's own model, after local training, on
its own held-out rows; ``_mean``, ``_std`` and ``_worst10`` beside the mean weighted by examples),
``consensus/test/accuracy`` (the average model of a network) and ``nodes/test/accuracy`` (its nodes').
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import torch
from pydantic import Field, PositiveInt
from torch import Tensor

from fedloom import rng, tree
from fedloom.engine.local import Given, mapped, tune
from fedloom.engine.plan import Address, plans
from fedloom.metrics import Scores, count_equal, score, spread
from fedloom.schema import Spec

if TYPE_CHECKING:
    from fedloom.engine.run import Experiment, RunState
    from fedloom.engine.store import ClientStore


class Evaluate(Spec):
    """When and on whom a run is judged."""

    every: PositiveInt = Field(1, description="rounds between evaluations; the last round is always evaluated")
    personal: bool = Field(True, description="judge each client's model on its own held-out rows, where it has any")
    clients: PositiveInt | None = Field(None, description="judge at most so many clients, the same in every round")
    diagnostics: tuple[Literal["updates", "gamma", "dissimilarity", "rho"], ...] = Field(
        (), description="what else to measure of a round: see docs/diagnostics.md"
    )
    train: bool = Field(False, description="also measure the server's model on all training rows")

    def due(self, round_: int, rounds: int) -> bool:
        """Whether the run is judged after so many rounds."""
        return round_ % self.every == 0 or round_ == rounds


class Judged(NamedTuple):
    """Some clients' own models, stacked."""

    ids: Tensor  # [K]
    w: Tensor  # [K, P]
    buffers: Tensor  # [K, Q]


def evaluate(exp: Experiment, state: RunState, store: ClientStore) -> dict[str, float]:
    """Every metric of this moment, in a fixed order."""
    with torch.no_grad():
        found: dict[str, float] = {}
        if exp.algorithm.family == "gossip":
            found |= _network(exp, state, store)
        elif exp.algorithm.communicates:
            model = exp.algorithm.send(state.server).w
            found |= _means("global/test", rows_scored(exp, model, state.buffers, exp.federation.common))
            if exp.evaluate.train:
                rows = exp.federation.train.rows.to(exp.device)
                found |= _means("global/train", rows_scored(exp, model, state.buffers, rows))
        if exp.evaluate.personal and len(exp.federation.test.rows):
            found |= _personal(exp, state, store)
        return found


def rows_scored(exp: Experiment, w: Tensor, buffers: Tensor, rows: Tensor) -> Scores:
    """One model on these rows of the data, chunk by chunk."""
    parts = []
    for chunk in torch.split(rows, _chunk(exp)):
        x, y = exp.federation.examples(chunk)
        if x.dim() == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        parts.append(score(exp.task.apply(w, x, buffers), y))
    return tree.cat(parts)


def _chunk(exp: Experiment) -> int:
    """Rows of one forward pass: enough to be fast, few enough for their activations to stay near."""
    if not exp.task.has_convolutions:
        return 8192
    return 256 if exp.device.type == "cpu" else 4096


def _means(name: str, scores: Scores) -> dict[str, float]:
    if not len(scores.loss):
        return {}
    return {f"{name}/accuracy": float(scores.correct.mean()), f"{name}/loss": float(scores.loss.mean())}


def _personal(exp: Experiment, state: RunState, store: ClientStore) -> dict[str, float]:
    fed, alg = exp.federation, exp.algorithm
    sizes = fed.test.sizes
    judged = _sample(exp, (sizes > 0) & (fed.train.sizes > 0))
    correct, loss = np.zeros(fed.clients), np.zeros(fed.clients)
    if alg.family in ("server", "closed_form") and not alg.tune_epochs and exp.buffers == "average":
        owner = fed.test.owners()
        chosen = torch.isin(owner, judged)
        scores = rows_scored(exp, alg.send(state.server).w, state.buffers, fed.test.rows[chosen].to(exp.device))
        at = owner[chosen].to(exp.device)
        correct, loss = (count_equal(at, column, fed.clients) for column in scores)
    else:
        for part in models_of(exp, state, store, judged):
            for k, scores in enumerate(_own_scores(exp, part)):
                client = int(part.ids[k])
                correct[client], loss[client] = float(scores.correct.sum()), float(scores.loss.sum())
    count = sizes[judged].double().numpy()
    found: dict[str, float] = {}
    for name, sums in (("accuracy", correct), ("loss", loss)):
        whole = spread(sums[judged.numpy()] / count, count, low_is_bad=name == "accuracy")
        at_name = f"personal/{alg.served}/test/{name}"
        found |= {at_name: whole.weighted, f"{at_name}_mean": whole.mean, f"{at_name}_std": whole.std}
        found |= {f"{at_name}_worst10": whole.worst}
    return found


def _sample(exp: Experiment, able: Tensor) -> Tensor:
    """The clients that are judged: all that can be, or the same sample of them in every round."""
    ids = able.nonzero().squeeze(1)
    limit = exp.evaluate.clients
    if limit is None or limit >= len(ids):
        return ids
    chosen = rng.stream(exp.seed, "evaluate").choice(len(ids), limit, replace=False)
    return ids[torch.from_numpy(np.sort(chosen))]


def models_of(exp: Experiment, state: RunState, store: ClientStore, ids: Tensor) -> Iterator[Judged]:
    """The clients' own models, as many at a time as may be stacked."""
    for part in torch.split(ids, exp.lanes):
        given = exp.given(state, store, part)
        serve = mapped(lambda down, mine, _: exp.algorithm.serve(down, mine), (given.down_dim, 0, 0))
        # The zeros only give vmap something to map where clients share one model and keep no state.
        w = serve(given.down, given.mine, torch.zeros(len(part), device=exp.device))
        judged = Judged(part, w, given.buffers)
        if exp.algorithm.tune_epochs:
            yield from _tuned(exp, state, judged, given)
        else:
            yield judged


def _tuned(exp: Experiment, state: RunState, judged: Judged, given: Given) -> Iterator[Judged]:
    place = {client: k for k, client in enumerate(judged.ids.tolist())}
    for group in plans(
        exp.local,
        exp.federation.train,
        judged.ids,
        Address(exp.seed, state.round, "tune"),
        lr=exp.local.lr_at(state.round, exp.rounds),
        lanes=exp.lanes,
        epochs=exp.algorithm.tune_epochs,
    ):
        at = torch.tensor([place[client] for client in group.ids.tolist()], device=exp.device)
        mine = Given(given.down, tree.take(given.mine, at), given.buffers[at])
        yield Judged(group.ids, *tune(exp.algorithm, exp.federation, group, judged.w[at], mine))


def _own_scores(exp: Experiment, part: Judged) -> Iterator[Scores]:
    """Each client's model on the client's own held-out rows."""
    start, rows = exp.federation.test.start, exp.federation.test.rows
    own = [rows[start[i] : start[i + 1]].to(exp.device) for i in part.ids.tolist()]
    if not exp.task.lanes:
        for k, mine in enumerate(own):
            yield rows_scored(exp, part.w[k], part.buffers[k], mine)
        return
    padded = torch.nn.utils.rnn.pad_sequence(own, batch_first=True)
    pieces = []
    room = max(1, _chunk(exp) // len(own))
    for chunk in torch.split(padded, room, dim=1):
        x, y = exp.federation.examples(chunk)
        logits = mapped(exp.task.apply, (0, 0, 0))(part.w, x, part.buffers)
        pieces.append(tree.tmap(lambda s, like=y: s.view(like.shape), score(logits.flatten(0, 1), y.flatten())))
    scores = tree.tmap(lambda *parts: torch.cat(parts, 1), *pieces)
    for k, mine in enumerate(own):
        yield Scores(*(column[k, : len(mine)] for column in scores))


def _network(exp: Experiment, state: RunState, store: ClientStore) -> dict[str, float]:
    """The average model of a network, its nodes one by one, and how far they are apart."""
    fed = exp.federation
    total = torch.zeros(exp.task.size, dtype=torch.float64, device=exp.device)
    everyone = torch.arange(fed.clients)
    for part in models_of(exp, state, store, everyone):
        total += part.w.double().sum(0)
    mean = total / fed.clients
    apart, correct, loss, seen = 0.0, 0.0, 0.0, 0
    judged = set(_sample(exp, fed.train.sizes >= 0).tolist())
    for part in models_of(exp, state, store, everyone):
        apart += float((part.w.double() - mean).square().sum())
        for k, node in enumerate(part.ids.tolist()):
            if node in judged:
                scores = rows_scored(exp, part.w[k], part.buffers[k], fed.common)
                correct, loss = correct + float(scores.correct.mean()), loss + float(scores.loss.mean())
                seen += 1
    found = _means("consensus/test", rows_scored(exp, mean.float(), state.buffers.mean(0), fed.common))
    found |= {"nodes/test/accuracy": correct / seen, "nodes/test/loss": loss / seen}
    return found | {"consensus/distance": (apart / fed.clients) ** 0.5}
