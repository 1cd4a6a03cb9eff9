"""Local training of a round: the groups in which clients train, divided among ranks, and what they keep."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedloom.core import tree
from fedloom.engine.clock import Present
from fedloom.engine.local import Outcome, train
from fedloom.engine.plan import Address, Group, plans
from fedloom.engine.ranks import Ranks, ranks_by_cost
from fedloom.engine.state import Experiment, Kept, PlannedRound, RunState
from fedloom.engine.store import ClientStore


class TrainedGroup(NamedTuple):
    """A group that has trained, on this rank and on others."""

    group: Group
    outcome: Outcome  # of all of its clients; with several ranks, without what clients keep
    ids: Tensor  # [k] those of them that trained here
    buffers: Tensor  # [k, Q] the running statistics with which these began
    own: Outcome  # [k, ...] what these did, and all that they keep


def groups_of(
    exp: Experiment, round_: int, present: Present, extra: Mapping[int, int] | None = None
) -> Iterator[Group]:
    """The groups in which the clients of a round train."""
    lr, address = exp.local.lr_at(round_, exp.rounds), Address(exp.seed, round_)
    ids, steps = present.drawn.ids, present.steps
    how: dict[str, Any] = {"lr": lr, "lanes": exp.lanes, "steps": steps}
    how |= {"mixed": exp.captures, "usual": exp.usual_group}
    planned = exp.planned.get(round_)
    for group in plans(exp.local, exp.federation.train, ids, address, **how) if planned is None else planned.groups:
        if extra is None:
            yield group
        else:
            epochs = torch.tensor([float(extra[i]) for i in group.ids.tolist()])
            yield group._replace(work=group.work._replace(extra=epochs))


def plan_ahead(exp: Experiment, round_: int) -> None:
    """Plan a round while a GPU computes the previous one."""
    planned = exp.planned
    if not exp.captures or exp.is_network or exp.is_asynchronous or round_ >= exp.rounds or round_ in planned:
        return
    present = exp.present(round_)
    if 0 < len(present.drawn.ids) <= exp.lanes:
        groups = tuple(group.to(exp.device) for group in groups_of(exp, round_, present))
        for old in [r for r in planned if r < round_ - 2]:
            del planned[old]
        planned[round_] = PlannedRound(present, groups)


def train_all(
    exp: Experiment,
    state: RunState,
    store: ClientStore,
    groups: Iterator[Group],
    *,
    watched: bool = False,
    models: bool = False,
) -> Iterator[TrainedGroup]:
    """Local training of one group after another, each client on one rank; ``models``: also those of other ranks.

    Groups are those of one process, so that sums have the same numbers in the same order. As many groups as there
    are ranks are trained before the rows of the first are exchanged: even if a net is so large that a group is only a
    client or two, every rank has work.
    """
    if exp.ranks.size == 1:
        for group in groups:
            buffers, outcome = _trained(exp, state, store, group, watched=watched)
            plan_ahead(exp, state.round + 1)
            yield TrainedGroup(group, outcome, group.ids, buffers, outcome)
        return
    stays = exp.keeps_state(state)
    while window := list(islice(groups, exp.ranks.size)):
        whose = _shared_out(exp.ranks, window, stays=stays)
        with exp.ranks.agreed():
            mine = [[k for k, rank in enumerate(at) if rank == exp.ranks.rank] for at in whose]
            shares = [
                _trained_here(exp, state, store, group, places, watched=watched) if places else None
                for group, places in zip(window, mine, strict=True)
            ]
            form = next((share for share in shares if share is not None), None)
            if form is None:
                # Only an outcome shows its structure, so the shortest client also trains here, uncounted.
                last = window[-1]
                form = _trained_here(exp, state, store, last, [len(last.ids) - 1], watched=watched)
            plan_ahead(exp, state.round + 1)
        for group, at, share in zip(window, whose, shares, strict=True):
            part = share or TrainedGroup(group, form.outcome, *tree.take(form[2:], slice(0, 0)))
            rows = _travelling_rows(form.own if share is None else share.own, models=models)
            yield part._replace(outcome=exp.ranks.gathered(rows, at))


def _shared_out(ranks: Ranks, groups: list[Group], *, stays: bool) -> list[list[int]]:
    """The rank that trains each client of each group: if clients keep state, the one that has it, otherwise balanced by
    the number of examples."""
    if stays:
        return [ranks.owner(group.ids).tolist() for group in groups]
    costs = []
    for group in groups:
        sizes = group.plan.ranges.sizes[group.ids].tolist()
        costs += [n / e * size + n for n, e, size in zip(group.steps, group.per_epoch, sizes, strict=True)]
    supply = iter(ranks_by_cost(costs, ranks.size))
    return [list(islice(supply, len(group.ids))) for group in groups]


def _trained_here(
    exp: Experiment, state: RunState, store: ClientStore, group: Group, places: list[int], *, watched: bool
) -> TrainedGroup:
    """What these clients of a group do."""
    some = group.pick(places)
    longest = max(some.steps)
    mask = some.mask[:, :longest]
    some = some._replace(
        rows=some.rows[:, :longest],
        mask=mask,
        keys=some.keys[:, :longest],
        widths=mask.bool().any(0).sum(-1).tolist(),
    )
    buffers, own = _trained(exp, state, store, some, watched=watched)
    return TrainedGroup(group, own, some.ids, buffers, own)


def _trained(
    exp: Experiment, state: RunState, store: ClientStore, group: Group, *, watched: bool
) -> tuple[Tensor, Outcome]:
    """The running statistics with which these clients began, and what they did.

    In a loop each is given its own copy. As a row of a matrix its alignment in memory would depend on other clients,
    which changes the last bits of some products; so no number depends on which other clients train here.
    """
    done, every = [], range(len(group.ids))
    for some in [group] if exp.task.lanes or len(every) == 1 else (group.pick([k]) for k in every):
        given = exp.given(state, store, some.ids)
        done.append((given.buffers, train(exp.algorithm, exp.federation, some, given, watched=watched)))
    return tree.cat(done)


def _travelling_rows(outcome: Outcome, *, models: bool) -> Outcome:
    """The part of an outcome for other ranks: kept states stay here, except for a mark if they are not finite."""
    return marked(outcome)._replace(begun=(), models=outcome.models if models else ())


def marked(outcome: Outcome) -> Outcome:
    """An outcome in which each client's kept state is replaced by one number that is finite if the state is."""
    count, device = len(outcome.weights), outcome.weights.device
    fine = tree.finite_rows((outcome.states, outcome.memory), count).to(device)
    return outcome._replace(states=torch.zeros(count, device=device).masked_fill(~fine, math.nan), memory=())


def keep(exp: Experiment, store: ClientStore, part: TrainedGroup, ids: Tensor) -> None:
    """Store the states of the clients among these that trained here."""
    rows = torch.isin(part.ids, ids).nonzero().squeeze(1)
    if len(rows):
        own = part.own
        kept = Kept(own.states, own.buffers if exp.keeps_buffers else (), own.memory)
        kept = kept if len(rows) == len(part.ids) else tree.take(kept, rows.to(exp.device))
        store.scatter(part.ids[rows], kept)
