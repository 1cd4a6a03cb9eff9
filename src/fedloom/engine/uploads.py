"""What clients upload: corrupted, clipped and noised as the settings say, and how many bytes it takes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedloom.algorithm import Algorithm, Work
from fedloom.core import tree
from fedloom.core.errors import ConfigError, Fault
from fedloom.engine.local import Outcome, plain_batch
from fedloom.engine.state import Experiment, RunState
from fedloom.trust.corruption import poisoned
from fedloom.trust.mechanism import protected


def as_sent(exp: Experiment, round_: int, ids: Tensor, outcome: Outcome, senders: int) -> Outcome:
    """What these clients, among so many of the round, send: bad ones poison it, and all protect it if they are to."""
    address = (exp.seed, round_)
    if exp.bad and exp.corruption.changes:
        bad = torch.isin(ids, torch.tensor(exp.bad))
        outcome = outcome._replace(uploads=poisoned(exp.corruption, outcome.uploads, ids, bad, address))
    if exp.guard is None:
        return outcome
    weights = outcome.weights
    if type(exp.algorithm).weight is Algorithm.weight:
        weights = torch.ones_like(weights)
    elif not bool((weights == 1).all()):
        what = f"{type(exp.algorithm).__name__} weighs clients by what they did, which the weights would tell"
        raise ConfigError([Fault("privacy.clip", f"{what} (got {exp.guard.clip:g})", "let it count clients alike")])
    return outcome._replace(uploads=protected(exp.guard, outcome.uploads, ids, senders, round_), weights=weights)


def upload_size(exp: Experiment, state: RunState) -> int:
    """Bytes of an upload, from one of a client that has not trained: their number does not depend on its values."""
    upload = tree.tmap(lambda x: x[None], example_upload(exp, state))
    return exp.algorithm.upload_bytes(upload) + tree.nbytes(exp.travelling(state.buffers))


def example_upload(exp: Experiment, state: RunState) -> Any:
    """The upload of a client that has not trained, to see of what it consists."""
    alg, one = exp.algorithm, torch.ones((), device=exp.device)
    down = alg.send(state.server)
    mine = alg.join(down)
    survey: Any = ()
    if alg.surveys:
        survey = alg.survey(
            plain_batch(exp.federation, exp.federation.train.rows[:1], one[None], state.buffers), down, mine
        )
    first = torch.zeros((), dtype=torch.int64, device=exp.device)
    work = Work(one, one, one, one, survey, first, one)
    return alg.finish(alg.start(down, mine), down, mine, work)[0]
