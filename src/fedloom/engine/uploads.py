"""What clients upload: corrupted, clipped and noised as configured, and its size in bytes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedloom.algorithm.capabilities import upload_bytes
from fedloom.core import tree
from fedloom.core.errors import ConfigError, Fault
from fedloom.engine.fleet import Order
from fedloom.engine.local import Outcome
from fedloom.engine.state import Experiment, RunState
from fedloom.trust.corruption import poisoned
from fedloom.trust.mechanism import protected


def as_sent(exp: Experiment, round_: int, ids: Tensor, outcome: Outcome, senders: int) -> Outcome:
    """Uploads as sent: corrupted by bad clients, then clipped and noised; ``senders``: clients of the round."""
    address = (exp.seed, round_)
    if exp.bad and exp.corruption.changes:
        bad = torch.isin(ids, torch.tensor(exp.bad))
        outcome = outcome._replace(uploads=poisoned(exp.corruption, outcome.uploads, ids, bad, address))
    if exp.guard is None:
        return outcome
    weights = outcome.weights
    examples = exp.federation.train.sizes[ids].to(weights)
    if exp.algorithm.traits.equal_if_private and torch.equal(weights, examples):
        weights = torch.ones_like(weights)
    elif not bool((weights == 1).all()):
        what = f"{type(exp.algorithm).__name__} weights clients by their work, which the weights would reveal"
        raise ConfigError([Fault("privacy.clip", f"{what} (got {exp.guard.clip:g})", "let it weight clients equally")])
    return outcome._replace(uploads=protected(exp.guard, outcome.uploads, ids, senders, round_), weights=weights)


def upload_size(exp: Experiment, state: RunState) -> int:
    """Bytes of an upload: they do not depend on its values."""
    upload = tree.tmap(lambda x: x[None], example_upload(exp, state))
    return upload_bytes(exp.algorithm, upload) + tree.nbytes(exp.travelling(state.buffers))


def example_outcome(exp: Experiment, order: Order) -> Outcome:
    """What a client might send in a round, without training, for its structure; not stacked."""
    alg, down = exp.algorithm, order.down
    mine = alg.join(down)
    work = exp.example_work(down, mine, order.buffers)
    work = work._replace(round=torch.full_like(work.round, order.round))
    upload = alg.finish(alg.start(down, mine, work), down, mine, work)[0]
    none = torch.zeros((), dtype=torch.float64, device=exp.device)
    return Outcome(upload, (), alg.weight(upload, work), order.buffers, work.steps, gradients=none)


def example_upload(exp: Experiment, state: RunState) -> Any:
    """The upload of a client that has not trained, for its structure."""
    alg, down = exp.algorithm, exp.algorithm.send(state.server)
    mine = alg.join(down)
    work = exp.example_work(down, mine, state.buffers)
    return alg.finish(alg.start(down, mine, work), down, mine, work)[0]
