"""Evaluation: the server's model, each client's own model, or the consensus of a network, always on test rows.

The name of a metric says which models were evaluated, and on which rows::

    global/test/...                 the server's model on the common test set
    personal/pre_fit/test/...       each client's own model on its own held-out rows, before local training
    personal/post_fit/test/...      the same for methods that evaluate it after local training
    participants/pre_fit/test/...   only the clients of a round, just before they train, each on its own rows
    participants/post_fit/test/...  the same clients just after
    .../validation/...              the same models on the rows that evaluate.validation reserves: the common model on
                                    those of all clients together, a client's own model on its own
    consensus/test/...              the average model of a network on the common test set
    nodes/test/...                  its nodes, each on the common test set; nodes/pre_mix/test: before they mixed

and which quantity: ``accuracy``, ``loss``, and on request ``auc_micro_logits``, ``auc_micro_softmax`` and
``auc_macro_present``. For ``personal`` and ``participants`` each is the mean weighted by rows, accompanied by
``_mean``, ``_std`` and ``_worst10`` over clients; ``diverged`` counts the clients whose loss is not finite.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.func import grad_and_value

from fedloom.algorithm.capabilities import adaptation_of
from fedloom.core import rng, tree
from fedloom.core.metrics import Scores, Verdicts, auc, client_metrics, measure_name, score, sum_by
from fedloom.core.objective import Criterion
from fedloom.core.quality import confusion, measured_by_owner
from fedloom.core.vocabulary import as_validation, first_measure, is_test
from fedloom.engine.curvature import hessian_product, training_chunks
from fedloom.engine.fleet import Inquiry
from fedloom.engine.local import fit, mapped
from fedloom.engine.plan import Address, plans
from fedloom.engine.state import Experiment, RunState
from fedloom.engine.store import ClientStore
from fedloom.engine.topology.network import Moment, refuse_no_nodes
from fedloom.engine.training import TrainedGroup
from fedloom.maths.sharpness import Landscape, flatness

# Scores, rows times classes, in memory for one batch of clients. One client is never divided, nor is the
# common test set: an ROC curve compares each score with each.
_HELD = 1 << 22


class ClientModels(NamedTuple):
    """Some clients' own models, stacked."""

    ids: Tensor  # [K]
    w: Tensor  # [K, P]
    buffers: Tensor  # [K, Q]


class ParticipantScores(NamedTuple):
    """The scores of the clients of a round on their own rows, just before and just after their training."""

    ids: tuple[Tensor, ...] = ()
    before: tuple[Verdicts, ...] = ()
    after: tuple[Verdicts, ...] = ()

    def with_group(self, exp: Experiment, group: TrainedGroup) -> ParticipantScores:
        before = evaluate_models(exp, ClientModels(group.ids, group.own.begun, group.buffers))
        after = evaluate_models(exp, ClientModels(group.ids, group.own.models, group.own.buffers))
        return ParticipantScores((*self.ids, group.group.ids), (*self.before, before), (*self.after, after))

    def named(self, exp: Experiment) -> dict[str, float]:
        if not self.ids:
            return {}
        before, after = (across_ranks(exp, torch.cat(self.ids), Verdicts.cat(x)) for x in (self.before, self.after))
        return client_metrics("participants/pre_fit/test", before) | client_metrics("participants/post_fit/test", after)


class Answers(NamedTuple):
    """The outputs of models for some rows."""

    owner: Tensor  # [B] the client of each row, by index among the evaluated clients
    logits: Tensor  # [B, C]
    y: Tensor  # [B] the true classes


def evaluate(exp: Experiment, state: RunState, store: ClientStore) -> dict[str, float]:
    """All metrics of this state, in a fixed order."""
    with torch.no_grad():
        found = _all_models(exp, state, store)
        if not len(exp.federation.validation.rows):
            return found
        again = _all_models(_validating(exp), state, store)
        return found | {as_validation(name): value for name, value in again.items() if is_test(name)}


def _all_models(exp: Experiment, state: RunState, store: ClientStore) -> dict[str, float]:
    """The metrics of the common model and of the clients' own."""
    own = _personal(exp, state, store)
    shared = _shared(exp, state, store)
    # The first metric represents the run.
    return own | shared if exp.algorithm.family == "personal" else shared | own


def _validating(exp: Experiment) -> Experiment:
    """The experiment with the validation rows instead of the test rows."""
    fed = exp.federation
    rows = fed.validation.rows.sort().values.to(exp.device)
    asked = exp.evaluate.model_copy(update={"train": False, "flatness": None})
    return replace(exp, federation=fed._replace(test=fed.validation, common=rows), evaluate=asked)


def _shared(exp: Experiment, state: RunState, store: ClientStore) -> dict[str, float]:
    """The common model, if there is one, on the common rows."""
    if exp.algorithm.family == "gossip":
        return _network(exp, state, store)
    if not exp.algorithm.traits.common_model:
        return {}
    if exp.fleet is not None and exp.keeps_buffers:  # the statistics that the model needs are with the nodes
        return {}
    model = exp.algorithm.global_model(state.server)
    found = _common("global/test", exp, model, state.buffers)
    if exp.evaluate.train:
        rows = exp.federation.train.rows.to(exp.device)
        found |= _means(exp, "global/train", rows_scored(exp, model, state.buffers, rows, together=True))
    return found | _flatness("global", exp, model, state.buffers)


def _flatness(name: str, exp: Experiment, w: Tensor, buffers: Tensor) -> dict[str, float]:
    """R0 and R1 of the loss on all training rows at ``w``, if requested; in evaluation mode."""
    if exp.evaluate.flatness is None:
        return {}
    chunks = list(training_chunks(exp, buffers))

    def value_and_gradient(at: Tensor) -> tuple[Tensor, Tensor]:
        value, g = torch.zeros((), dtype=torch.float64, device=at.device), torch.zeros_like(at)
        for batch, share in chunks:
            more, there = grad_and_value(partial(exp.task.loss, batch=batch, training=False))(at)
            value, g = value + share * there.double(), g + share * more
        return value, g

    landscape = Landscape(value_and_gradient, partial(hessian_product, exp.task, chunks))
    found = flatness(landscape, w, exp.evaluate.flatness)
    return {f"{name}/flatness/R0": found.r0, f"{name}/flatness/R1": found.r1}


def rows_scored(exp: Experiment, w: Tensor, buffers: Tensor, rows: Tensor, *, together: bool = False) -> Scores:
    """One model on these rows of the data, chunk by chunk; ``together``: each rank computes a part."""
    return tree.cat([score(*said, exp.task.criterion) for said in _answers(exp, w, buffers, rows, together=together)])


def _answers(
    exp: Experiment, w: Tensor, buffers: Tensor, rows: Tensor, *, together: bool
) -> Iterator[tuple[Tensor, Tensor]]:
    """The logits of one model for these rows, chunk by chunk, and the true classes."""
    chunks = torch.split(rows, _chunk(exp))
    if not together or exp.ranks.size == 1:
        yield from (_logits_of(exp, w, buffers, chunk) for chunk in chunks)
        return
    rank, size = exp.ranks
    for first in range(0, len(chunks), size):
        turn = chunks[first : first + size]  # a chunk for each rank
        logits = [torch.zeros(len(chunk), exp.federation.classes, device=exp.device) for chunk in turn]
        if rank < len(turn):
            logits[rank] = _logits_of(exp, w, buffers, turn[rank])[0].float()
        merged = exp.ranks.merged(torch.cat(logits))
        for said, chunk in zip(torch.split(merged, [len(chunk) for chunk in turn]), turn, strict=True):
            yield said, exp.federation.y[chunk]


def _logits_of(exp: Experiment, w: Tensor, buffers: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The logits of one model for these rows, in one forward pass, and the true classes."""
    x, y = exp.federation.examples(rows)
    if x.dim() == 4 and exp.task.channels_last:  # also of lanes, of which this is not one
        x = x.contiguous(memory_format=torch.channels_last)
    return exp.task.apply(w, x, buffers), y


def _chunk(exp: Experiment) -> int:
    """Rows of one forward pass: enough to be fast, few enough for their activations to stay in the cache."""
    if not exp.task.has_convolutions:
        return 8192
    return 256 if exp.device.type == "cpu" else 4096


def _means(exp: Experiment, name: str, scores: Scores) -> dict[str, float]:
    if not len(scores.loss):
        return {}
    return {
        f"{name}/{first_measure(exp.task.criterion.regression)}": float(scores.correct.mean()),
        f"{name}/loss": float(scores.loss.mean()),
    }


def _common(name: str, exp: Experiment, w: Tensor, buffers: Tensor) -> dict[str, float]:
    """One model on the common test set; empty if the server has none."""
    if not len(exp.federation.common):
        return {}
    answers = _answers(exp, w, buffers, exp.federation.common, together=True)
    owner, scores, said = _scored(
        exp, (Answers(torch.zeros_like(y, dtype=torch.int64), logits, y) for logits, y in answers)
    )
    more = {measure_name(each): float(_measured(exp, each, said, owner, 1)) for each in exp.measures}
    found = _means(exp, name, scores)
    return found | {f"{name}/{each}": value for each, value in more.items() if not math.isnan(value)}


def class_table(exp: Experiment, w: Tensor, buffers: Tensor) -> Tensor | None:
    """The confusion matrix of a model on the common test set: true class by predicted class.  ``[C, C]``

    None in regression, or without a common test set.
    """
    if not len(exp.federation.common) or first_measure(exp.task.criterion.regression) != "accuracy":
        return None
    classes = exp.federation.classes
    with torch.no_grad():
        answers = _answers(exp, w, buffers, exp.federation.common, together=False)
        return torch.stack([confusion(y, logits.argmax(-1), classes) for logits, y in answers]).sum(0)


def _personal(exp: Experiment, state: RunState, store: ClientStore) -> dict[str, float]:
    found = each_client(exp, state, store)
    return client_metrics(f"personal/{exp.algorithm.traits.served}/test", found, shared=_is_shared(exp))


def _is_shared(exp: Experiment) -> bool:
    """Whether all clients are served the same model."""
    alg = exp.algorithm
    return alg.family in ("server", "closed_form") and not adaptation_of(alg) and exp.buffers == "average"


def each_client(exp: Experiment, state: RunState, store: ClientStore) -> Verdicts:
    """The clients that are evaluated, each by its own model on its own held-out rows; the same on every rank."""
    fed, alg = exp.federation, exp.algorithm
    chosen = _sample(exp, (fed.test.sizes > 0) & (fed.train.sizes > 0) & living(exp, state), exp.evaluate.clients)
    if not (exp.evaluate.personal and len(chosen)):
        return Verdicts.cat([])
    with torch.no_grad():
        if exp.fleet is not None:
            model = alg.global_model(state.server) if _is_shared(exp) else ()
            inquiry = Inquiry(state.round, exp.sent(state.server), state.buffers, model)
            return exp.fleet.evaluate(exp, inquiry, chosen.tolist())
        if _is_shared(exp):
            return evaluate_shared(exp, chosen, alg.global_model(state.server), state.buffers)
        mine = models_of(exp, state, store, exp.ranks.own(chosen))
        return across_ranks(exp, chosen, Verdicts.cat([evaluate_models(exp, part) for part in mine]))


def evaluate_models(exp: Experiment, part: ClientModels) -> Verdicts:
    """Each client's model on the client's own held-out rows; clients without such rows are skipped.

    Nothing is read back from the device, so that groups can be evaluated one after another, joined by
    ``Verdicts.cat`` and named by ``metrics.client_metrics``.
    """
    answers = _side_by_side if exp.task.lanes else _one_by_one
    found = []
    for at in _batches(exp.federation.test.sizes[part.ids], exp.federation.classes):
        some = part if len(at) == len(part.ids) else tree.take(part, at)
        found.append(_verdicts(exp, some.ids, answers(exp, some)))
    return Verdicts.cat(found)


def across_ranks(exp: Experiment, ids: Tensor, found: Verdicts) -> Verdicts:
    """The verdicts of all ranks on the clients ``ids``; each client was evaluated on one rank."""
    if exp.ranks.size == 1:
        return found
    ids = ids.sort().values
    place, names = torch.searchsorted(ids, found.ids), exp.measures
    table = torch.zeros(3 + len(names), len(ids), dtype=torch.float64)
    if len(found.ids):
        columns = [torch.ones(len(found.ids)), found.correct, found.loss, *(found.auc[name] for name in names)]
        table[:, place] = torch.stack([column.double().cpu() for column in columns])
    table = exp.ranks.merged(table)
    there = table[0] > 0
    _, correct, loss, *areas = table[:, there]
    ids = ids[there]
    return Verdicts(
        ids,
        exp.federation.test.sizes[ids],
        correct,
        loss,
        dict(zip(names, areas, strict=True)),
        first_measure(exp.task.criterion.regression),
    )


def evaluate_shared(exp: Experiment, ids: Tensor, w: Tensor, buffers: Tensor) -> Verdicts:
    """One model on the held-out rows of each client, in one pass over these rows."""
    batches = [ids[at] for at in _batches(exp.federation.test.sizes[ids], exp.federation.classes)]
    return Verdicts.cat([_verdicts(exp, some, _in_a_row(exp, some, w, buffers, together=True)) for some in batches])


def _batches(sizes: Tensor, classes: int) -> list[Tensor]:
    """Which clients are scored together: those with rows, of similar size, so that little is padding."""
    order = sizes.argsort(descending=True, stable=True)[: int((sizes > 0).sum())]
    found, at = [], 0
    while at < len(order):
        room = max(1, _HELD // (int(sizes[order[at]]) * classes))
        found.append(order[at : at + room].sort().values)
        at += room
    return found


def _verdicts(exp: Experiment, ids: Tensor, answers: Iterable[Answers]) -> Verdicts:
    """The sums of each client, and its areas under the ROC curve if requested."""
    owner, scores, said = _scored(exp, answers)
    correct, loss = (sum_by(owner, column, len(ids)) for column in scores)
    areas = {name: _measured(exp, name, said, owner, len(ids)) for name in exp.measures}
    return Verdicts(
        ids, exp.federation.test.sizes[ids], correct, loss, areas, first_measure(exp.task.criterion.regression)
    )


def _measured(exp: Experiment, name: str, said: tuple[Tensor, Tensor], owner: Tensor, clients: int) -> Tensor:
    """A measure of each client from the outputs for its rows.  ``[clients]``"""
    if name in exp.evaluate.auc:
        return auc(name, *said, owner=owner, clients=clients)
    return measured_by_owner(name, *said, owner=owner, clients=clients, unit=exp.task.criterion.unit)


def _scored(exp: Experiment, answers: Iterable[Answers]) -> tuple[Tensor, Scores, Any]:
    """The owners of rows and their scores; logits and true classes only if an AUC needs them."""
    held, loss = bool(exp.measures), exp.task.criterion
    return tree.cat([(a.owner, score(a.logits, a.y, loss), (a.logits, a.y) if held else ()) for a in answers])


def _in_a_row(exp: Experiment, ids: Tensor, w: Tensor, buffers: Tensor, *, together: bool = False) -> Iterator[Answers]:
    """One model's outputs for the clients' rows, client by client."""
    test = exp.federation.test
    sizes = test.sizes[ids]
    owner = torch.repeat_interleave(torch.arange(len(ids)), sizes)
    place = torch.arange(len(owner)) - (sizes.cumsum(0) - sizes)[owner]
    rows = test.rows[test.start[ids][owner] + place].to(exp.device)
    answers = _answers(exp, w, buffers, rows, together=together)
    for whose, (logits, y) in zip(torch.split(owner.to(exp.device), _chunk(exp)), answers, strict=True):
        yield Answers(whose, logits, y)


def _one_by_one(exp: Experiment, part: ClientModels) -> Iterator[Answers]:
    """Each client's model on its own rows, one client after another."""
    for k in range(len(part.ids)):
        # A copy has torch's own alignment: the alignment of a row of a matrix changes the last bits of a product, and
        # would make a client's numbers depend on which clients are evaluated with it.
        for said in _in_a_row(exp, part.ids[k : k + 1], part.w[k].clone(), part.buffers[k]):
            yield said._replace(owner=said.owner + k)


def _side_by_side(exp: Experiment, part: ClientModels) -> Iterator[Answers]:
    """Each client's model on its own rows, all clients at once; padding is left out."""
    test = exp.federation.test
    sizes, start = test.sizes[part.ids, None], test.start[part.ids, None]
    place = torch.arange(int(sizes.max()))
    real = place < sizes  # [K, n]
    rows = test.rows[(start + place).where(real, 0)]
    room = max(1, _chunk(exp) // len(sizes))
    for chunk, mask in zip(torch.split(rows, room, 1), torch.split(real, room, 1), strict=True):
        x, y = exp.federation.examples(chunk.to(exp.device))
        logits = mapped(exp.task.apply, (0, 0, 0))(part.w, x, part.buffers)
        owner, at = mask.nonzero()[:, 0].to(exp.device), mask.flatten().nonzero().squeeze(1).to(exp.device)
        yield Answers(owner, logits.flatten(0, 1)[at], y.flatten()[at])


def _sample(exp: Experiment, able: Tensor, limit: int | None) -> Tensor:
    """The clients that are evaluated: all possible ones, or the same sample of them in every round."""
    ids = able.nonzero().squeeze(1)
    if limit is None or limit >= len(ids):
        return ids
    chosen = rng.stream(exp.seed, "evaluate").choice(len(ids), limit, replace=False)
    return ids[torch.from_numpy(np.sort(chosen))]


def models_of(exp: Experiment, state: RunState, store: ClientStore, ids: Tensor) -> Iterator[ClientModels]:
    """The clients' own models, stacked, some at a time."""
    if adaptation_of(exp.algorithm):
        yield from _fitted(exp, state, store, ids)
        return
    for part in torch.split(ids, exp.lanes):
        given = exp.given(state, store, part)
        if not exp.task.lanes and not exp.is_network and tree.leaves(given.mine):
            # One by one, as in training: a served model must not depend on other clients.
            each = [given.rows(k) for k in range(len(part))]
            yield ClientModels(
                part, torch.stack([exp.algorithm.serve(one.down, one.mine) for one in each]), given.buffers
            )
            continue
        serve = mapped(lambda down, mine, _: exp.algorithm.serve(down, mine), (given.down_dim, 0, 0))
        # The zeros only give vmap something to map over if clients share one model and keep no state.
        yield ClientModels(
            part, serve(given.down, given.mine, torch.zeros(len(part), device=exp.device)), given.buffers
        )


def everyones_models(exp: Experiment, state: RunState, store: ClientStore, ids: Tensor) -> Iterator[ClientModels]:
    """The same on every rank, whichever rank keeps the clients' states; ``ids`` in order."""
    if exp.ranks.size == 1 or not (exp.keeps_state(state) or adaptation_of(exp.algorithm)):
        yield from models_of(exp, state, store, ids)
        return
    form = ClientModels(ids[:0], exp.task.w0.expand(0, -1), exp.task.buffers0.expand(0, -1))
    for part in torch.split(ids, exp.lanes):
        mine = tree.cat([form, *models_of(exp, state, store, exp.ranks.own(part))])
        rows = tree.take(mine[1:], mine.ids.argsort().to(exp.device))
        yield ClientModels(part, *exp.ranks.gathered(rows, exp.ranks.owner(part).tolist()))


def _fitted(exp: Experiment, state: RunState, store: ClientStore, ids: Tensor) -> Iterator[ClientModels]:
    """The models that clients adapt from what they are sent, on the batches of the next round."""
    address, lr = Address(exp.seed, state.round), exp.local.lr_at(state.round, exp.rounds)
    # In the loop separately, so that a client's numbers do not depend on others in the last bit.
    lanes = exp.lanes if exp.task.lanes else 1
    for group in plans(exp.local, exp.federation.train, ids, address, lr=lr, lanes=lanes, epochs=1):
        given = exp.given(state, store, group.ids)
        yield ClientModels(group.ids, *fit(exp.algorithm, exp.federation, group, given))


def _network(exp: Experiment, state: RunState, store: ClientStore) -> dict[str, float]:
    """The average model of a network, its nodes one by one, and their distance from it."""
    total = torch.zeros(exp.task.size, dtype=torch.float64, device=exp.device)
    everyone = living(exp, state).nonzero().squeeze(1)
    for part in everyones_models(exp, state, store, everyone):
        total += part.w.double().sum(0)
    mean = total / len(everyone)
    apart, scored = torch.zeros((), dtype=torch.float64, device=exp.device), []
    for part in everyones_models(exp, state, store, everyone):
        apart = apart + (part.w.double() - mean).square().sum()
        scored.append(nodes_scored(exp, part))
    distance = (float(apart) / len(everyone)) ** 0.5
    buffers = state.buffers[everyone.to(exp.device)].mean(0)
    found = _common("consensus/test", exp, mean.float(), buffers)
    found |= over_nodes("nodes/test", exp.task.criterion, *tree.cat(scored))
    found |= {"consensus/distance": distance, "consensus/relative": distance / max(float(mean.norm()), 1e-12)}
    return found | _flatness("consensus", exp, mean.float(), buffers)


def living(exp: Experiment, state: RunState) -> Tensor:
    """The clients that took part in the last round: all except dead nodes of a network.  ``[N]``"""
    count = exp.federation.clients
    if exp.topology is None:
        return torch.ones(count, dtype=torch.bool)
    at = Moment(exp.seed, max(0, state.round - 1))
    dead = exp.topology.dead(count, at)
    refuse_no_nodes(dead, at)
    return torch.from_numpy(~dead)


def nodes_scored(exp: Experiment, part: ClientModels) -> tuple[Tensor, Tensor]:
    """Accuracy and loss [J] on the common test set of the evaluated ones among these nodes, on every rank."""
    limit = exp.evaluate.nodes or exp.evaluate.clients
    chosen = set(_sample(exp, exp.federation.train.sizes >= 0, limit).tolist())
    places = [k for k, node in enumerate(part.ids.tolist()) if node in chosen]
    table = torch.zeros(2, len(places), dtype=torch.float64, device=exp.device)
    for j, k in enumerate(places):
        if j % exp.ranks.size == exp.ranks.rank:
            scores = rows_scored(exp, part.w[k], part.buffers[k], exp.federation.common)
            table[:, j] = torch.stack([scores.correct.mean(), scores.loss.mean()])
    accuracy, loss = exp.ranks.merged(table)
    return accuracy, loss


def over_nodes(name: str, criterion: Criterion, accuracy: Tensor, loss: Tensor) -> dict[str, float]:
    """Accuracy (or error) and loss over nodes: the mean, and of the accuracy also the lowest and the spread."""
    first = first_measure(criterion.regression)
    end, worst = ("max", accuracy.max()) if criterion.regression else ("min", accuracy.min())
    return {
        f"{name}/{first}": float(accuracy.mean()),
        f"{name}/{first}_{end}": float(worst),
        f"{name}/{first}_std": float(accuracy.std(correction=0)),
        f"{name}/loss": float(loss.mean()),
    }
