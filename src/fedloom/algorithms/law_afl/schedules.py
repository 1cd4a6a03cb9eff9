"""LAW-AFL's schedules: in which rounds clients train, in which they send statistics, and what the server then does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedloom.algorithm import Inbox
from fedloom.algorithms.law_afl.head import HeadSolver
from fedloom.algorithms.law_afl.models import ModelAggregation
from fedloom.algorithms.law_afl.settings import LawAFLSettings
from fedloom.algorithms.law_afl.state import (
    NO_LOSS,
    LawAFLServer,
    LawAFLUpload,
    claims_of,
    example_counts,
    with_learned,
)
from fedloom.core.task import Task
from fedloom.maths.learned_heads import better, blended
from fedloom.maths.learned_weights import Weighing
from fedloom.maths.linear_head import head_of, with_head
from fedloom.maths.proxy_set import proxy_features, proxy_loss
from fedloom.maths.registry import Registry, body_fingerprint, enrolled, of_body
from fedloom.maths.weighted_ridge import weighted_head

_BLENDS = (0.0, 0.25, 0.5, 0.75, 1.0)


class Tools(NamedTuple):
    """The parts of every schedule."""

    models: ModelAggregation
    head: HeadSolver

    @property
    def gate(self) -> bool:
        """Whether to keep the previous head, or to blend with it, if that is better."""
        return self.head.how.gate


@dataclass(frozen=True)
class Schedule:
    """The rounds of a run, counted from 0."""

    def trains_in(self, round_: Any) -> Any:
        """Whether clients train in this round; a tensor if the round is one."""
        raise NotImplementedError

    def asks_in(self, round_: float) -> bool:
        """Whether clients send statistics in this round."""
        raise NotImplementedError

    @property
    def both_at_once(self) -> bool:
        """Whether clients train and send statistics in the same round."""
        return False

    @property
    def keeps_statistics(self) -> bool:
        """Whether a client sends statistics once, and the server keeps them."""
        return True

    def releases_in(self, round_: int) -> int:
        """How many separately noised uploads a client makes in this round."""
        return 1

    def body(self, task: Task, w: Tensor, t: Tensor | float) -> int:
        """Which body the statistics belong to."""
        raise NotImplementedError

    def update(self, tools: Tools, round_: float, server: LawAFLServer, inbox: Inbox[LawAFLUpload]) -> LawAFLServer:
        """The server's step of this round."""
        raise NotImplementedError


@dataclass(frozen=True)
class Frozen(Schedule):
    """The body is never trained: each client sends its statistics once, and the head is solved from all of them."""

    def trains_in(self, round_: Any) -> Any:
        return False

    def asks_in(self, round_: float) -> bool:
        return True

    def body(self, task: Task, w: Tensor, t: Tensor | float) -> int:
        return body_fingerprint([w[task.mask("body.").bool()], task.buffers0, *task.fixed])

    def update(self, tools: Tools, round_: float, server: LawAFLServer, inbox: Inbox[LawAFLUpload]) -> LawAFLServer:
        return solved_from_all(tools, self.body(tools.head.task, server.w, server.t), server, inbox)


@dataclass(frozen=True)
class WarmupThenAnalytic(Schedule):
    """``warmup`` rounds of FedLAW; then the body is frozen, and the head is solved as in ``Frozen``."""

    warmup: int

    def trains_in(self, round_: Any) -> Any:
        return round_ < self.warmup

    def asks_in(self, round_: float) -> bool:
        return not self.trains_in(round_)

    def body(self, task: Task, w: Tensor, t: Tensor | float) -> int:
        """For how many rounds it was trained.

        A fingerprint would distinguish trained bodies that differ only by the rounding of the executor.
        """
        return min(int(t), self.warmup)

    def update(self, tools: Tools, round_: float, server: LawAFLServer, inbox: Inbox[LawAFLUpload]) -> LawAFLServer:
        if self.trains_in(round_):
            return tools.models.update(server, inbox)
        return solved_from_all(tools, self.body(tools.head.task, server.w, server.t), server, inbox)


@dataclass(frozen=True)
class PerRound(Schedule):
    """Algorithm 3, repaired: in every round line 14 sets the body, and line 17 the head.

    Statistics are those of the body that was sent. With ``fresh`` they are taken on the new body, in every second
    round, in which clients do not train.
    """

    fresh: bool
    share_lambda: bool

    def trains_in(self, round_: Any) -> Any:
        return round_ % 2 == 0 if self.fresh else True

    def asks_in(self, round_: float) -> bool:
        return not self.fresh or not self.trains_in(round_)

    @property
    def both_at_once(self) -> bool:
        return not self.fresh

    @property
    def keeps_statistics(self) -> bool:
        return False

    def releases_in(self, round_: int) -> int:
        return int(self.trains_in(round_)) + self.asks_in(round_)

    def body(self, task: Task, w: Tensor, t: Tensor | float) -> int:
        return 0  # statistics are not kept

    def update(self, tools: Tools, round_: float, server: LawAFLServer, inbox: Inbox[LawAFLUpload]) -> LawAFLServer:
        after = tools.models.update(server, inbox) if self.trains_in(round_) else server
        return self.with_head(tools, server, after, inbox) if self.asks_in(round_) else after

    def with_head(
        self, tools: Tools, server: LawAFLServer, after: LawAFLServer, inbox: Inbox[LawAFLUpload]
    ) -> LawAFLServer:
        """``after`` with a head from statistics of the body that was sent with ``server``."""
        solver, plausible = tools.head, tools.head.plausible(inbox.uploads)
        ids, counts, rows = inbox.clients[plausible], inbox.uploads.counts[plausible], inbox.uploads.rows[plausible]
        if solver.of_means:
            counts = counts.clamp(min=0)  # noise may have made them negative
        else:
            rows = rows / counts.sum(1, keepdim=True)
        if not len(rows):
            return after._replace(statistics=after.statistics._replace(lam=torch.zeros_like(after.statistics.lam)))
        if self.share_lambda:
            after, solved = _with_shared_weights(solver, server, after, ids, rows, counts)
        else:
            lam0 = solver.first_weights(server.w, rows, counts, claims_of(inbox.uploads)[plausible])
            found = solver.learn(server, solver.system(server.w, rows, counts, lam0), ids, inbox.address)
            after, solved = found.noted(after, ids), found.learned.head
        return _blended(tools, after, solved)


def schedule_of(how: LawAFLSettings) -> Schedule:
    """The schedule that is set."""
    if how.schedule == "per_round":
        return PerRound(how.fresh, how.share_lambda)
    return WarmupThenAnalytic(how.warmup) if how.schedule == "warmup_then_analytic" else Frozen()


def _with_shared_weights(
    solver: HeadSolver, server: LawAFLServer, after: LawAFLServer, ids: Tensor, rows: Tensor, counts: Tensor
) -> tuple[LawAFLServer, Tensor]:
    """The head whose statistics have the weights of models, and the server with these weights."""
    lam = after.models.lam[ids]
    rho, shared = solver.system(server.w, rows, counts, lam).ridge, lam / lam.sum()
    solved = solver.settings.temperature * weighted_head(rows, shared, rho, solver.classes).head
    how = Weighing(shared, torch.ones_like(server.kappa))
    return after._replace(statistics=with_learned(after.statistics, ids, how, shared)), solved


def _blended(tools: Tools, after: LawAFLServer, solved: Tensor) -> LawAFLServer:
    """The model with the best head between the aggregated one and the solved one, on its new body."""
    task = tools.head.task
    has_bias = task.linear_head.bias is not None
    aggregated = head_of(task, after.w, has_bias)
    solved = torch.cat([solved, torch.zeros_like(aggregated[len(solved) :])])
    features = proxy_features(task, after.w, tools.head.proxy, has_bias)
    best = blended(aggregated, solved, features, _BLENDS if tools.gate else (1.0,))
    new = after.loss.new_tensor
    return after._replace(w=with_head(task, after.w, best.head), kappa=new(best.kappa), loss=new(best.loss))


def solved_from_all(tools: Tools, body: int, server: LawAFLServer, inbox: Inbox[LawAFLUpload]) -> LawAFLServer:
    """The head from the statistics of all clients that ever sent them, if it is better than the previous one."""
    solver = tools.head
    registry, claims = _with_uploads(solver, body, server, inbox)
    if torch.equal(registry.known, server.registry.known):
        return server
    ids = registry.known.nonzero().squeeze(1)
    rows, counts = registry.rows[ids], registry.counts[ids]
    lam0 = solver.first_weights(server.w, rows, counts, claims[ids])
    found = solver.learn(server, solver.system(server.w, rows, counts, lam0), ids, inbox.address)
    before = float(server.loss)
    if before == NO_LOSS:
        before = float(proxy_loss(solver.task, solver.proxy, server.w))
    candidate = min(found.learned.held_out)
    server = server._replace(registry=registry, claims=claims)
    if tools.gate and not better(candidate, before):
        return server._replace(loss=server.loss.new_tensor(before))
    w, whole = with_head(solver.task, server.w, found.learned.head), torch.ones_like(server.kappa)
    return found.noted(server, ids)._replace(w=w, kappa=whole, loss=server.loss.new_tensor(candidate))


def _with_uploads(
    solver: HeadSolver, body: int, server: LawAFLServer, inbox: Inbox[LawAFLUpload]
) -> tuple[Registry, Tensor]:
    """The registry and the claims with the clients that sent statistics for the first time."""
    registry, claims = of_body(server.registry, body), server.claims
    new = ~registry.known[inbox.clients]
    if not inbox.uploads.rows.numel() or not bool(new.any()):
        return registry, claims
    new = new & solver.plausible(inbox.uploads)
    ids, counts = inbox.clients[new], inbox.uploads.counts[new].clamp(min=0)  # noise may have made them negative
    rows = inbox.uploads.rows[new] / example_counts(counts)[:, None]
    return enrolled(registry, ids, rows, counts), claims.index_copy(0, ids, claims_of(inbox.uploads)[new])
