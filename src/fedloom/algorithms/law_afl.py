"""LAW-AFL: the head of a net in closed form, from statistics of clients whose weights are learned.

Jiang et al., LAW-AFL, Algorithms 1 and 3, in a reading that computes: as printed they do not. It joins FedLAW's learned
weights (see ``fedlaw``) with analytic federated learning (see ``analytic``), over one net f = W after body phi.

    client i:  G_i = X_i' X_i,  B_i = X_i' Y_i        features of the body that was sent, before any training
    server:    W = (gamma sum_i lambda_i G_i / n_i + rho I)^-1 gamma sum_i lambda_i B_i / n_i,  logits s X W
               lambda, gamma and s descend  CE(proxy) + beta KL(lambda || lambda0)  through the solve

lambda0 = n_i / N, gamma = 1 and s = 1 is AFL with ridge N rho. beta is 0, 0.1, 1 or infinite (lambda = lambda0),
whichever does best on the half of the proxy examples it was not learned on, of equals the largest: with clean clients
AFL is the optimum already, and what is learned is for clients that are not.

``schedule``
    frozen                phi is never trained. A client is heard once; ceil(N / cohort) rounds, or one of everybody.
    warmup_then_analytic  ``warmup`` rounds of FedLAW, then phi is frozen and the rest is as above.
    per_round             Algorithm 3: every round FedLAW for phi and a head from the statistics of the round's clients,
                          taken on the phi that was sent; of (1 - kappa) W_agg + kappa s W, kappa in 0, 1/4 .. 1,
                          the best on the proxy set is the head, on the new phi.

What is repaired, beside the printed equations that ``fedloom.analytic`` and ``fedloom.law`` name:
    line 8      C_k = X'Y + gamma I is not square: X'X; its gamma is the shrink of line 14, too: three names here
    line 12     sizes are divided by that of the proxy set: by their sum
    lines 13-17 what is learned in line 13 never reaches the statistics of lines 15 to 17: weighted sums
    line 14, 17 both set the model: the first sets the body, the second the head
    line 15     who is drawn again is added again, and statistics of different bodies are summed: each client once, and
                what was taken on another body is discarded
    line 6-8    statistics are taken on each client's own trained net, whose features have nothing in common

``quality`` is where lambda0 comes from: ``size``; ``report``, eq. 16 and 17 with accuracy and loss as clients claim
them, which two forgers in ten turn into half of all weight; ``server``, the same as the server measures them, for
each client's own head on the proxy examples of the classes it has. Unless clients are bad, both give weight away from
those with few classes, and the head is no longer that of AFL where nothing is learned.

Memory: N (d (d + 1) / 2 + d C) numbers at the server, 0.1 GB for 100 clients of 512 features in float64.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor

from fedloom import analytic, law, tree
from fedloom.algorithm import Algorithm, Held, Inbox, Nothing, Phase, Work
from fedloom.algorithms.analytic import body_features, check_head, features_of, head_of, with_head
from fedloom.algorithms.fedlaw import proxy_gradients, proxy_loss, told_of
from fedloom.algorithms.proxy_ridge import held_features
from fedloom.analytic import Registry, Statistics, default_ridge, from_rows, to_rows
from fedloom.errors import ConfigError, Fault
from fedloom.law import LearnedHead, Stack, Weighing
from fedloom.optim import Optimizer
from fedloom.task import Batch, Task

_GRID = (0.0, 0.1, 1.0, math.inf)  # strengths of the prior that cross-validation chooses from
_BLENDS = (0.0, 0.25, 0.5, 0.75, 1.0)
_NONE = torch.finfo(torch.float64).max  # the loss of a head before one has been solved for


class Weights(NamedTuple):
    """What was learned of clients."""

    lam: Tensor  # [N] how much each counts; 0 for who does not
    offsets: Tensor  # [N] ln(lambda_i / lambda0_i) when it was last learned; 0 for a client never seen
    shrink: Tensor  # [] gamma


class Server(NamedTuple):
    w: Tensor  # [P]
    t: Tensor  # [] rounds in which somebody was heard
    registry: Registry  # the statistics of each client; of none in ``per_round``
    claims: Tensor  # [N, 2] accuracy and loss, as clients say
    models: Weights  # by FedLAW
    statistics: Weights
    temperature: Tensor  # [] s
    freedom: Tensor  # [] 1 / (1 + beta): 0 if weights had to stay as they began
    loss: Tensor  # [] cross-entropy of the head in two folds of the proxy set


class Sent(NamedTuple):
    dw: Tensor  # [P], or [0] where nobody trains
    rows: Tensor  # [d (d + 1) / 2 + d C] packed G and B; zeros from who was heard before; [0] if not asked for
    counts: Tensor  # [C] examples of each class
    accuracy: Tensor  # [1] of the model that was sent, on the client's own examples, as the client says; [0], too
    loss: Tensor  # [1]


class Seen(NamedTuple):
    """A client's sums over its examples."""

    statistics: Statistics
    right: Tensor  # [1] how many the model gets right, and
    losses: Tensor  # [1] the sum of its losses, if anybody asks


class LawAFL(Algorithm[Server, Nothing, Sent]):
    family: ClassVar[Literal["server", "personal", "closed_form", "gossip"]] = "closed_form"
    linear: ClassVar[bool] = False
    distinct: ClassVar[bool] = True
    needs_proxy: ClassVar[bool] = True

    schedule: Literal["frozen", "warmup_then_analytic", "per_round"] = Field("frozen", description="see above")
    warmup: PositiveInt = Field(50, description="rounds of FedLAW before the body is frozen")
    ridge: NonNegativeFloat = Field(1e-3, description="rho in units of the mean eigenvalue of G / n")
    bias: bool = Field(False, description="give the head a bias, as a constant feature")
    prior: Literal["cv", "fixed"] | NonNegativeFloat = Field(
        "cv", description="strength beta of the KL prior: a number, by cross-validation, or fixed, that is infinite"
    )
    head_lr: PositiveFloat = Field(0.05, description="rate at which the weights of statistics are learned")
    head_steps: NonNegativeInt = Field(100, description="steps of that; in each fold, at most 60")
    head_loss: Literal["ce", "mse"] = Field("ce", description="what is learned on the proxy set; mse is worse")
    spread: NonNegativeFloat = Field(0.0, description="weight of sum lambda^2, against concentrating noise for privacy")
    temperature: PositiveFloat = Field(10.0, description="s at the start: outputs of ridge regression lie in [0, 1]")
    quality: Literal["size", "server", "report"] = Field("size", description="what lambda0 is made of: see above")
    verify: bool = Field(True, description="leave out statistics that no examples can have")
    persist: bool = Field(True, description="start from what was learned of a client before, instead of lambda0")
    gate: bool = Field(True, description="keep the head before, or blend with it, if that is better on the proxy set")
    share_lambda: bool = Field(
        False, description="per_round: statistics weigh as models do, and nothing else is learned"
    )
    precision: Literal["float64", "float32"] = Field("float64", description="in which statistics are kept")
    server_epochs: NonNegativeInt = Field(20, description="of FedLAW: passes over the proxy set in a round")
    server_lr: PositiveFloat = Field(0.01, description="of FedLAW: rate at which weights of models are learned")
    proxy_batch: PositiveInt = Field(128, description="of FedLAW: examples in a step of the server")
    param: Literal["exp", "quad", "exp_cap", "fixed"] = Field("exp", description="of FedLAW: what is learned")
    shrink: PositiveFloat = Field(1.0, description="of FedLAW: gamma at the start of a round; param = fixed keeps it")

    def bind(self, task: Task, optimizer: Optimizer, sizes: Tensor | None = None, proxy: Held | None = None) -> LawAFL:
        bound = super().bind(task, optimizer, sizes, proxy)
        assert isinstance(bound, LawAFL)
        check_head(task, self.bias)
        if task.has_statistics and self.schedule != "frozen":
            what = "the server would need the running statistics of a body that is trained, which it does not see"
            raise ConfigError([Fault("model.norm", what, "take norm = 'group', or schedule = 'frozen'")])
        return bound

    def defaults(self) -> Mapping[str, Mapping[str, Any]]:
        return {"cohort": {"sampling": "all"}} if self.schedule == "frozen" else {}

    @property
    def surveys(self) -> bool:
        return True

    @property
    def classes(self) -> int:
        return self.task.linear_head.out_features

    @property
    def lane_size(self) -> int:
        d = features_of(self.task, self.bias)
        return 2 * (d * d + d * self.classes)  # a number in float64 takes two of float32

    @property
    def trains(self) -> bool:
        return self.schedule != "frozen"

    # -- what is asked and answered --------------------------------------------------------------------
    def phases(self) -> tuple[Phase, ...]:
        if self.schedule == "warmup_then_analytic":
            return (Phase(self.step, passes=lambda _, work: torch.where(work.round < self.warmup, work.steps, 0)),)
        return (Phase(self.step),) if self.trains else ()

    def init(self, w: Tensor) -> Server:
        n, d = len(self.sizes), features_of(self.task, self.bias)
        dtype = torch.float64 if self.precision == "float64" else torch.float32
        registry = analytic.no_registry(n, d, self.classes, self.body(w, 0.0), dtype)
        if self.schedule == "per_round":
            registry = registry._replace(rows=registry.rows[:0], counts=registry.counts[:0])
        registry = tree.tmap(lambda x: x.to(w.device), registry)

        def full(value: float, *shape: int) -> Tensor:
            return torch.full(shape, value, dtype=torch.float64, device=w.device)

        models, statistics = (Weights(full(0, n), full(0, n), full(1)) for _ in range(2))
        return Server(
            w, full(0), registry, full(0, n, 2), models, statistics, full(self.temperature), full(0), full(_NONE)
        )

    def send(self, server: Server) -> Server:
        """The net; and, if statistics are asked for, who has sent them, of which a client reads its own entry."""
        asks = {
            "frozen": not bool(server.registry.known.all()),
            "warmup_then_analytic": float(server.t) >= self.warmup,
            "per_round": True,
        }[self.schedule]
        nothing = tree.tmap(lambda x: x.new_empty(0), server._replace(w=server.w[:0]))
        known = server.registry.known if asks else nothing.registry.known
        return nothing._replace(w=server.w, registry=nothing.registry._replace(known=known))

    def sent_bytes(self, down: Server) -> int:
        return tree.nbytes(down.w)

    def upload_bytes(self, uploads: Sent) -> int:
        each = uploads.rows.shape[-1] * uploads.rows.element_size()
        each += 16 if self.quality == "report" else 0  # two numbers
        sent = int(uploads.counts.any(-1).sum()) if uploads.rows.numel() else 0
        return tree.nbytes(uploads.dw) + sent * each

    def join(self, down: Server) -> Nothing:
        return ()

    def survey(self, batch: Batch, down: Server, mine: Nothing) -> Any:
        if not len(down.registry.known):
            return batch.mask[:0]
        x = body_features(self.task, down.w, batch.x, batch.buffers, self.bias)
        sums = analytic.statistics(x, batch.y, self.classes, batch.mask)
        if self.quality != "report":
            return Seen(sums, torch.zeros_like(sums.counts[:1]), torch.zeros_like(sums.counts[:1]))
        right = (self.task.apply(down.w, batch.x, batch.buffers).argmax(-1) == batch.y) * batch.mask
        losses = self.task.loss(down.w, batch, training=False) * batch.mask.sum()
        return Seen(sums, right.sum()[None].double(), losses[None].double())

    def finish(self, x: Tensor, down: Server, mine: Nothing, work: Work) -> tuple[Sent, Nothing]:
        if not len(down.registry.known):
            none = down.claims
            return Sent(x - down.w if self.trains else none, none, none, none, none), ()
        dw = x - down.w if self.schedule == "per_round" else down.claims
        new = ~down.registry.known.gather(0, work.client[None])
        sums, right, losses = work.survey
        n = work.examples
        return Sent(dw, new * to_rows(sums), new * sums.counts, right / n, losses / n), ()

    # -- at the server -------------------------------------------------------------------------------
    def update(self, server: Server, inbox: Inbox[Sent]) -> Server:
        if self.schedule == "per_round":
            after = self.trained_and_solved(server, inbox)
        elif self.trains and float(server.t) < self.warmup:
            after = self.trained(server, inbox)
        else:
            after = self.solved(server, inbox)
        return after._replace(t=server.t + 1)

    def trained(self, server: Server, inbox: Inbox[Sent]) -> Server:
        """FedLAW's round: w = gamma sum_i lambda_i w_i."""
        stack = Stack(server.w, inbox.uploads.dw)
        epochs = proxy_gradients(self.task, self.proxy, self.server_epochs, self.proxy_batch, inbox.address)
        learning = law.Settings(kind=self.param, lr=self.server_lr, shrink=self.shrink)
        how = law.learn(stack, inbox.weights, epochs, learning).how
        models = noted(server.models, inbox.clients, how, inbox.weights / inbox.weights.sum())
        return server._replace(w=law.aggregated(stack, how), models=models)

    def solved(self, server: Server, inbox: Inbox[Sent]) -> Server:
        """The head from the statistics of all who have ever been heard, if it is better than the one before."""
        registry, claims = self.enrolled(server, inbox)
        if torch.equal(registry.known, server.registry.known):
            return server
        ids = registry.known.nonzero().squeeze(1)
        rows, counts = registry.rows[ids], registry.counts[ids]
        found = self.learned(server, rows, self.begun(server.w, rows, counts, claims[ids]), ids, inbox.address)
        before = float(server.loss)
        if before == _NONE:
            before = float(proxy_loss(self.task, self.proxy, server.w))
        candidate = min(found.head.held_out)
        server = server._replace(registry=registry, claims=claims)
        if self.gate and not law.better(candidate, before):
            return server._replace(loss=server.loss.new_tensor(before))
        w = with_head(self.task, server.w, found.head.head)
        return self.noted(server, found, ids)._replace(w=w, loss=server.loss.new_tensor(candidate))

    def trained_and_solved(self, server: Server, inbox: Inbox[Sent]) -> Server:
        """Algorithm 3, repaired: line 14 sets the body, line 17 the head, on statistics of the body that was sent."""
        after, ids = self.trained(server, inbox), inbox.clients
        sound = self.sound(inbox.uploads)
        counts = inbox.uploads.counts[sound]
        rows = inbox.uploads.rows[sound] / counts.sum(1, keepdim=True)
        if not len(rows):
            return after
        if self.share_lambda:
            lam = after.models.lam[ids[sound]]
            rho = self.rho(rows, lam)
            w_an = self.temperature * analytic.weighted_head(rows, lam / lam.sum(), rho, self.classes).head
        else:
            lam0 = self.begun(server.w, rows, counts, claimed(inbox.uploads)[sound])
            found = self.learned(server, rows, lam0, ids[sound], inbox.address)
            after, w_an = self.noted(after, found, ids[sound]), found.head.head
        has_bias = self.task.linear_head.bias is not None
        w_agg = head_of(self.task, after.w, has_bias)
        w_an = torch.cat([w_an, torch.zeros_like(w_agg[len(w_an) :])])
        features = held_features(self.task, after.w, self.proxy, has_bias)
        best = law.blended(w_agg, w_an, features, _BLENDS if self.gate else (1.0,))
        w = with_head(self.task, after.w, best.head)
        return after._replace(w=w, loss=server.loss.new_tensor(best.loss))

    def learned(self, server: Server, rows: Tensor, lam0: Tensor, ids: Tensor, address: tuple[int, int]) -> Found:
        """lambda, gamma and s through the solve, under the strength of the prior that was asked for."""
        clients = law.Clients(rows, lam0, self.rho(rows, lam0), self.classes)
        proxy = held_features(self.task, server.w, self.proxy, self.bias)
        offsets = server.statistics.offsets[ids] if self.persist else None
        folds = law.two_folds(proxy[1], *address)
        return Found(law.cross_validated_head(clients, proxy, folds, self.learning, offsets), lam0)

    @property
    def learning(self) -> law.HeadSettings:
        one = math.inf if self.prior == "fixed" else self.prior
        return law.HeadSettings(
            lr=self.head_lr,
            steps=self.head_steps,
            cv_steps=min(60, self.head_steps),
            grid=_GRID if isinstance(one, str) else (one,),
            temperature=self.temperature,
            loss=self.head_loss,
            spread=self.spread,
        )

    def rho(self, rows: Tensor, lam: Tensor) -> float:
        """The ridge, by the scale of the statistics that it is added to."""
        return float(default_ridge(from_rows(tree.mix(lam[None], rows)[0], self.classes)[0], self.ridge))

    def begun(self, w: Tensor, rows: Tensor, counts: Tensor, claims: Tensor) -> Tensor:
        """lambda0 of clients with these normalised statistics.  ``[K]``"""
        sizes = counts.sum(1)
        if self.quality == "size":
            return sizes / sizes.sum()
        accuracy, loss = claims.T if self.quality == "report" else self.measured(w, rows, counts)
        return analytic.quality_weights(analytic.data_quality(counts), accuracy, loss, sizes)

    def measured(self, w: Tensor, rows: Tensor, counts: Tensor) -> analytic.Judged:
        """How each client's own head does on the proxy examples of the classes that it has."""
        x, y = held_features(self.task, w, self.proxy, self.bias)
        said = []
        for row in rows:
            gram, cross = from_rows(row.double(), self.classes)
            said.append(self.temperature * x @ analytic.solve(gram, cross, default_ridge(gram, self.ridge)))
        return analytic.judged(torch.stack(said), y, counts)

    def enrolled(self, server: Server, inbox: Inbox[Sent]) -> tuple[Registry, Tensor]:
        """The registry and the claims with those who came for the first time; all others are as they were."""
        registry, claims, body = server.registry, server.claims, self.body(server.w, server.t)
        if body != int(registry.body):
            registry = tree.tmap(torch.zeros_like, registry)._replace(body=torch.full_like(registry.body, body))
        new = ~registry.known[inbox.clients]
        if not inbox.uploads.rows.numel() or not bool(new.any()):
            return registry, claims
        new = new & self.sound(inbox.uploads)
        ids, counts = inbox.clients[new], inbox.uploads.counts[new]
        rows = (inbox.uploads.rows[new] / counts.sum(1, keepdim=True)).to(registry.rows.dtype)
        registry = Registry(
            registry.body,
            registry.known.index_fill(0, ids, True),
            registry.rows.index_copy(0, ids, rows),
            registry.counts.index_copy(0, ids, counts),
        )
        return registry, claims.index_copy(0, ids, claimed(inbox.uploads)[new])

    def sound(self, uploads: Sent) -> Tensor:
        """Whose statistics can be sums over examples.  ``[K]``"""
        holds = uploads.counts.sum(1) > 0
        last = features_of(self.task, True) - 1 if self.bias else None
        each = zip(uploads.rows, uploads.counts, holds.tolist(), strict=True)
        possible = [
            here and (not self.verify or not analytic.faults(Statistics(*from_rows(row, self.classes), n), bias=last))
            for row, n, here in each
        ]
        return torch.tensor(possible, device=holds.device)

    def noted(self, server: Server, found: Found, ids: Tensor) -> Server:
        """What the server remembers of the weights of statistics."""
        return server._replace(
            statistics=noted(server.statistics, ids, found.head.how, found.lam0),
            temperature=found.head.temperature,
            freedom=server.freedom.new_tensor(1 / (1 + found.head.beta)),
        )

    def body(self, w: Tensor, t: Tensor | float) -> int:
        """Which body statistics belong to: 64 bits of it, or, if it was trained, for how many rounds.

        Bits would tell trained bodies apart that differ by the rounding of the executor alone.
        """
        if self.trains:
            return min(int(t), self.warmup)
        return analytic.fingerprint([w[self.task.mask("body.").bool()], self.task.buffers0])

    def statistics(self, before: Tensor, mean: Tensor) -> Tensor:
        return mean if self.trains else before

    def counted(self, before: Server, inbox: Inbox[Sent], after: Server) -> Tensor:
        return self.weights(before, after).lam[inbox.clients]

    def weights(self, before: Server, after: Server) -> Weights:
        """The weights that made the head of this round."""
        warming = self.schedule == "warmup_then_analytic" and float(before.t) < self.warmup
        shared = self.schedule == "per_round" and self.share_lambda
        return after.models if warming or shared else after.statistics

    def told(self, before: Server, inbox: Inbox[Sent], after: Server) -> dict[str, Tensor]:
        weights = self.weights(before, after)
        counting = weights.lam[weights.lam > 0]
        found = {**told_of(counting), "weights/shrink": weights.shrink} if len(counting) else {}
        if self.schedule != "per_round":
            known = torch.where(after.registry.known, self.sizes.to(before.t.device), 0).sum()
            found["analytic/examples"] = known / inbox.examples
        return found | {"law_afl/temperature": after.temperature, "law_afl/freedom": after.freedom}


class Found(NamedTuple):
    """A head, and the weights it was learned from."""

    head: LearnedHead
    lam0: Tensor  # [K]


def claimed(uploads: Sent) -> Tensor:
    """Accuracy and loss, as clients say.  ``[K, 2]``"""
    return torch.cat([uploads.accuracy, uploads.loss], 1)


def noted(weights: Weights, ids: Tensor, how: Weighing, lam0: Tensor) -> Weights:
    """What is remembered of clients after these ``[K]`` were weighed."""
    offsets = law.remembered(weights.offsets, ids, how, torch.where(how.lam > 0, lam0, 0.0))
    return Weights(torch.zeros_like(weights.lam).index_copy(0, ids, how.lam), offsets, how.shrink)
