"""The rounds of a run: a pure step from one RunState to the next, and the state from which it starts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import torch

from fedloom.core import tree
from fedloom.core.errors import DivergedError
from fedloom.engine.arrivals import arrivals_round, first_sent
from fedloom.engine.divergence import names_of, rate
from fedloom.engine.gossip import gossip_round
from fedloom.engine.local import mapped
from fedloom.engine.speculate import Pending, may_speculate, speculates_in, speculative_round
from fedloom.engine.star import Finished, settled, star_round
from fedloom.engine.state import Experiment, Nodes, Past, Round, RunState
from fedloom.engine.store import ClientStore
from fedloom.engine.uploads import example_upload

Started: TypeAlias = Round | Finished | Pending


def begin(exp: Experiment) -> RunState:
    """The state before the first round: every node of a network starts from the same model, or from its own."""
    server, buffers = exp.algorithm.init(exp.task.w0), exp.task.buffers0
    if exp.is_network:
        n = exp.federation.clients
        if exp.starts is not None:
            server = mapped(exp.algorithm.init, (0,))(exp.starts)
        else:  # one row per node, all the same memory
            server = tree.tmap(lambda x: x.expand(n, *x.shape), server)
        buffers = buffers.expand(n, -1)
        zero = torch.zeros(n, dtype=torch.int64)
        nodes = Nodes(zero, zero, torch.ones(n, dtype=torch.float64), _no_past(exp))
        return RunState(0, server, buffers, 0, 0, nodes=nodes)
    state = RunState(0, server, buffers, 0, 0, ledger=None if exp.guard is None else exp.guard.opened())
    return state._replace(under_way=first_sent(exp, state)) if exp.is_asynchronous else state


def _no_past(exp: Experiment) -> Any:
    """No messages yet, if nodes may reuse old ones."""
    count = exp.federation.clients
    if exp.topology is None or exp.topology.link_policy != "stale":
        return ()
    one = example_upload(exp, RunState(0, exp.algorithm.init(exp.task.w0), exp.task.buffers0, 0, 0))
    blank = tree.tmap(lambda x: torch.zeros_like(x).expand(count, *x.shape), (one, exp.task.buffers0))
    return Past(torch.full((count, count), -1), (blank,) * exp.topology.stale_after)


def advance(exp: Experiment, state: RunState, store: ClientStore) -> tuple[RunState, tuple[int, ...]]:
    """One round; also the clients that were excluded because their numbers were not finite."""
    done = advance_watched(exp, state, store)
    return done.state, done.excluded


def advance_watched(exp: Experiment, state: RunState, store: ClientStore) -> Round:
    """One round, and its measurements."""
    return _completed(exp, state, store, _started(exp, state, store))


def rounds(exp: Experiment, state: RunState, store: ClientStore, last: int | None = None) -> Iterator[Round]:
    """The rounds of a run from here to its end, or to the ``last`` requested.

    On a GPU, if clients keep no state, the next round is queued before the last one is checked, so that the GPU never
    waits. If the last one has to be repeated, the next one is discarded.
    """
    ahead, following = may_speculate(exp) and not exp.keeps_state(state), None
    last = exp.rounds if last is None else last
    while state.round < last:
        started = following or _started(exp, state, store)
        following = None
        if ahead and isinstance(started, Pending) and started.state.round < last:
            following = _started(exp, started.state, store)
        done = _completed(exp, state, store, started)
        following = following if done.state.server is started.state.server else None
        state = done.state
        yield done


def _started(exp: Experiment, state: RunState, store: ClientStore) -> Started:
    """One round; on a GPU perhaps only queued."""
    with torch.no_grad():
        if exp.is_network:
            return gossip_round(exp, state, store)
        if exp.is_asynchronous:
            return arrivals_round(exp, state, store)
        if speculates_in(exp, state.round):
            return speculative_round(exp, state, store)
        return star_round(exp, state, store)


def _completed(exp: Experiment, state: RunState, store: ClientStore, started: Started) -> Round:
    """The round after ``state``, checked; a speculative one that was not finite is repeated."""
    if isinstance(started, Pending):
        fine = started.checked(state)
        if fine is not None:
            return fine
        with torch.no_grad():
            started = star_round(exp, state, store)
    done = settled(state, started) if isinstance(started, Finished) else started
    after = done.state
    if not bool(tree.finite_rows(tree.tmap(lambda x: x[None], (after.server, after.buffers)), 1)[0]):
        raise DivergedError(
            f"round {state.round + 1}: the model is no longer finite; clients of the round: "
            f"{names_of(exp.present(state.round).drawn.ids.tolist())}; {rate(exp, state.round)}"
        )
    return done
