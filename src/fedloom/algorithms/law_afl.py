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
                          the best on the proxy set is the head, on the new phi. With ``fresh`` statistics are taken
                          on the new phi: every second round is that light exchange, in which nobody trains.

What is repaired, beside the printed equations that modules of ``fedloom.maths`` name:
    line 8      C_k = X'Y + gamma I is not square: X'X; its gamma is the shrink of line 14, too: three names here
    line 12     sizes are divided by that of the proxy set: by their sum
    lines 13-17 what is learned in line 13 never reaches the statistics of lines 15 to 17: weighted sums
    line 14, 17 both set the model: the first sets the body, the second the head
    line 15     who is drawn again is added again, and statistics of different bodies are summed: each client once, and
                what was taken on another body is discarded
    line 6-8    statistics are taken on each client's own trained net, whose features have nothing in common

Lines 8 and 17 as printed do not fit together, and cannot be computed. What can be, as printed, is a setting:
    3.1.2           gamma in (0, 1]: param = "exp_cap", which is the default here; head_shrink_max = 1 for the head's
    eq. 5           shrink_rule = "eq5", where models are trained
    eq. 16 and 17   quality = "report", size_factor = false
    eq. 24          privacy.heterogeneity = "eq24"; eq. 26 is that times Delta / epsilon, which is z here
    eq. 29, 32, 35  kind = "analytic", agg = "eq29" ...
    Algorithm 1 line 9   param = "fixed", shrink = gamma^2         Algorithm 3 line 14   param = "fixed", shrink = 1
    Algorithm 3 lines 13 to 17   prior = "fixed", head_steps = 0   line 17 alone         kind = "analytic"
Not a setting: eq. 13, which has the clients of a round keep the old model and all others the new one, and eq. 14, which
adds models, and not moves, to the model, so that it doubles in every round.

``quality`` is where lambda0 comes from: ``size``; ``report``, eq. 16 and 17 with accuracy and loss as clients claim
them, which two forgers in ten turn into half of all weight; ``server``, the same as the server measures them, for
each client's own head on the proxy examples of the classes it has. Unless clients are bad, both give weight away from
those with few classes, and the head is no longer that of AFL where nothing is learned.

``depth = "entropy"`` is Algorithm 2, for which the paper gives no formula: in training, a client moves only the L_i
parts of the net that are nearest to the head, L_i = 1 + round((L_max - 1) H(p_i) / ln C), so that a client of one class
moves the head alone. A part is the mean over those who moved it, and what nobody moved does not shrink. The weights
are learned as if all had moved everything.

With ``privacy.feature_clip`` clients add noise to G, B and their counts of classes, each by itself, before the server
sees anything, so that all it learns from them is as private as they are. Noise of deviation sigma' in the sum by
lambda0 asks for a ridge of k sigma' sqrt(d) (``noise_ridge``), and what makes that sum of G positive semidefinite is
added whatever lambda becomes. ``spread`` keeps lambda from concentrating the noise. The body must be frozen.

Line 9 of Algorithm 3 adds noise to all that is uploaded, without a bound on it, and so without a guarantee. In schedule
``per_round``, with ``privacy.clip``, ``privacy.feature_clip`` and ``privacy.mechanism=local``, clients clip their moves
to S, send means over their examples instead of sums, and add noise to both. All begin with the same lambda0, since
nobody knows how many examples they have. As printed it is ``privacy.heterogeneity=eq24`` beside these.

What is recorded of a round in which models are trained, ``weights/...``, ``bad_clients/...`` and
``hessian/weights_top``, is of the weights of models, which made the body and W_agg. The weights of statistics are
``head/...``, over all clients whose statistics the head was solved from; ``head/kappa`` is the share that this head has
in the model, 0 where the gate has discarded it. While gamma is learned it stays in [``shrink_min``, ``shrink_max``] for
models and in [``head_shrink_min``, ``head_shrink_max``] for statistics, where it only divides the ridge;
``weights/shrink_bounded`` and ``head/shrink_bounded`` are 1 where it lies on a bound.

There is one clock, the number of the round: a round in which nobody is heard is one of the ``warmup`` and one of
``fresh``'s turns, like any other.

``ridge = "grid"`` takes of seven ridges, 1e-6 to 1 mean eigenvalues of G / n, the one whose head by lambda0 has the
least squared error on the proxy examples. ``sketch`` learns lambda, gamma and s on a random projection of the features,
the same for all, at (sketch / d)^3 of the cost, and solves for the head with all of them.

Memory: N (d (d + 1) / 2 + d C) numbers at the server, 0.1 GB for 100 clients of 512 features in float64.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple, Self

import torch
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, PrivateAttr, model_validator
from torch import Tensor

from fedloom.algorithm import (
    Algorithm,
    Carry,
    Configures,
    Contributes,
    Costs,
    CountsRounds,
    Diagnoses,
    HasPhases,
    Inbox,
    Nothing,
    OwnStatistics,
    Phase,
    PrivateSums,
    Setup,
    Surveys,
    TrainsParts,
    Traits,
    UsesProxy,
    Work,
)
from fedloom.core import tree
from fedloom.core.errors import ConfigError, Fault
from fedloom.core.schema import GIVEN, other_than, over, when
from fedloom.core.task import Batch, Task
from fedloom.maths.data_quality import ProxyScores, data_quality, proxy_scores, quality_weights, trained_groups
from fedloom.maths.learned_heads import (
    HeadClients,
    HeadSettings,
    LearnedHead,
    better,
    blended,
    cross_validated_head,
    two_folds,
)
from fedloom.maths.learned_weights import (
    OF_HEADS,
    OF_MODELS,
    Bounds,
    ShrinkRule,
    Stack,
    Weighing,
    WeightSettings,
    aggregated,
    aggregated_by_depth,
    check_bounds,
    learn_weights,
    of_kind,
    remembered,
    settings_for,
    shrink_diagnostics,
    squared_gradient,
    with_shrink,
)
from fedloom.maths.linear_head import body_features, check_head, feature_count, head_of, with_head
from fedloom.maths.private_sums import clipped_features, mixed_noise, noise_ridge, psd
from fedloom.maths.proxy_set import ProxyFeatures, proxy_features, proxy_gradients, proxy_loss
from fedloom.maths.registry import Registry, body_fingerprint, no_registry, statistics_faults
from fedloom.maths.ridge import (
    Statistics,
    default_ridge,
    from_rows,
    pack_symmetric,
    ridge_path,
    sent_statistics,
    solve,
    statistics,
    to_rows,
)
from fedloom.maths.weighted_ridge import projection, sketched, squared_error, weighted_head

_GRID = (0.0, 0.1, 1.0, math.inf)  # strengths of the prior that cross-validation chooses from
_RIDGES = tuple(10.0**k for k in range(-6, 1))
_BLENDS = (0.0, 0.25, 0.5, 0.75, 1.0)
_NONE = torch.finfo(torch.float64).max  # the loss of a head before one has been solved for

_TRAINS = when(schedule=other_than("frozen"))
_LEARNS = when(schedule=other_than("frozen"), server_epochs=over(0))
_SHRINKS = when(schedule=other_than("frozen"), shrink_rule=other_than("grid", "ratio"))
_GAMMA_TOO = when(schedule=other_than("frozen"), server_epochs=over(0), shrink_rule="law", param=other_than("fixed"))
_BOUNDED = _GAMMA_TOO | when(schedule=other_than("frozen"), shrink_rule="ratio")
_WEIGHED = when(share_lambda=False)  # statistics have weights of their own
_STEPS = when(share_lambda=False, head_steps=over(0))
_FREE = when(share_lambda=False, head_steps=over(0), prior=other_than("fixed"))
_JUDGED = when(share_lambda=False, quality=("server", "report"))


class Weights(NamedTuple):
    """What was learned of clients."""

    lam: Tensor  # [N] how much each counts; 0 for who does not
    offsets: Tensor  # [N] ln(lambda_i / lambda0_i) when it was last learned; 0 for a client never seen
    shrink: Tensor  # [] gamma


class Server(NamedTuple):
    w: Tensor  # [P]
    t: Tensor  # [] rounds so far, also those in which nobody was heard
    registry: Registry  # the statistics of each client; of none in ``per_round``
    claims: Tensor  # [N, 2] accuracy and loss, as clients say
    models: Weights  # by FedLAW
    statistics: Weights
    kappa: Tensor  # [] share in the model's head of the one that was solved for in the last round
    temperature: Tensor  # [] s
    freedom: Tensor  # [] 1 / (1 + beta): 0 if weights had to stay as they began
    loss: Tensor  # [] cross-entropy of the head in two folds of the proxy set


class Sent(NamedTuple):
    dw: Tensor  # [P], or [0] where nobody trains
    rows: Tensor  # [d (d + 1) / 2 + d C] packed G and B; zeros from who was heard before; [0] if not asked for
    counts: Tensor  # [C] examples of each class
    accuracy: Tensor  # [1] of the model that was sent, on the client's own examples, as the client says; [0], too
    loss: Tensor  # [1]
    depth: Tensor  # [1] L_i; [0] where nobody trains, or all do everything
    slope: Tensor  # [1] |grad F_i(w)|^2; [0] where eq. 5 does not ask for it


class Deep(NamedTuple):
    """What is trained where clients train to different depths."""

    w: Tensor  # [P]
    depth: Tensor  # [] L_i


class Seen(NamedTuple):
    """A client's sums over its examples."""

    counts: Tensor  # [C] of each class; [0] if nobody asks
    statistics: Any = ()  # G and B: Statistics
    right: Any = ()  # [1] how many the model gets right, and
    losses: Any = ()  # [1] the sum of its losses
    slope: Any = ()  # [P] the sum of its gradients


class LawAFL(
    Algorithm[Server, Nothing, Sent],
    Surveys,
    HasPhases,
    TrainsParts,
    UsesProxy,
    OwnStatistics,
    CountsRounds,
    PrivateSums,
    Diagnoses,
    Contributes,
    Costs,
    Configures,
):
    family = "closed_form"

    schedule: Literal["frozen", "warmup_then_analytic", "per_round"] = Field("frozen", description="see above")
    warmup: Annotated[PositiveInt, when(schedule="warmup_then_analytic")] = Field(
        50, description="rounds of FedLAW before the body is frozen"
    )
    fresh: Annotated[bool, when(schedule="per_round")] = Field(
        False, description="per_round: take statistics of the new body, in rounds between"
    )
    ridge: Literal["grid"] | NonNegativeFloat = Field(
        1e-3, description="rho in units of the mean eigenvalue of G / n; grid: the best of seven on the proxy set"
    )
    sketch: Annotated[PositiveInt | None, _WEIGHED] = Field(
        None, description="features to which statistics are projected while weights are learned; unset: all of them"
    )
    bias: bool = Field(False, description="give the head a bias, as a constant feature")
    prior: Annotated[Literal["cv", "fixed"] | NonNegativeFloat, _WEIGHED] = Field(
        "cv", description="strength beta of the KL prior: a number, by cross-validation, or fixed, that is infinite"
    )
    head_lr: Annotated[PositiveFloat, _STEPS] = Field(
        0.05, description="rate at which the weights of statistics are learned"
    )
    head_steps: Annotated[NonNegativeInt, _WEIGHED] = Field(100, description="steps of that; in each fold, at most 60")
    head_loss: Literal["ce", "mse"] = Field("ce", description="what is learned on the proxy set; mse is worse")
    spread: Annotated[NonNegativeFloat, _FREE] = Field(
        0.0, description="weight of sum lambda^2, against concentrating noise for privacy"
    )
    noise_ridge: Annotated[NonNegativeFloat, when({"privacy.feature_clip": GIVEN}, schedule="frozen")] = Field(
        0.5, description="with privacy: k, the least ridge in units of sigma sqrt(d)"
    )
    temperature: PositiveFloat = Field(10.0, description="s at the start: outputs of ridge regression lie in [0, 1]")
    quality: Annotated[Literal["size", "server", "report"], _WEIGHED] = Field(
        "size", description="what lambda0 is made of: see above"
    )
    size_factor: Annotated[bool, _JUDGED] = Field(
        True, description="quality times the number of examples; false: eq. 17 as printed"
    )
    verify: bool = Field(True, description="leave out statistics that no examples can have")
    persist: Annotated[bool, _STEPS] = Field(
        True, description="start from what was learned of a client before, instead of lambda0"
    )
    gate: bool = Field(True, description="keep the head before, or blend with it, if that is better on the proxy set")
    depth: Annotated[Literal["all", "entropy"], _TRAINS] = Field(
        "all", description="how much of the net a client trains: see above"
    )
    share_lambda: Annotated[bool, when(schedule="per_round")] = Field(
        False, description="per_round: statistics weigh as models do, and nothing else is learned"
    )
    precision: Annotated[Literal["float64", "float32"], when(schedule=other_than("per_round"))] = Field(
        "float64", description="in which statistics are kept"
    )
    server_epochs: Annotated[NonNegativeInt, _TRAINS] = Field(
        20, description="of FedLAW: passes over the proxy set in a round"
    )
    server_lr: Annotated[PositiveFloat, _LEARNS] = Field(
        0.01, description="of FedLAW: rate at which weights of models are learned"
    )
    proxy_batch: Annotated[PositiveInt, _LEARNS] = Field(128, description="of FedLAW: examples in a step of the server")
    param: Annotated[Literal["exp", "quad", "exp_cap", "fixed"], _TRAINS] = Field(
        "exp_cap", description="of FedLAW: what is learned; exp_cap: gamma is at most 1, as the paper says"
    )
    shrink: Annotated[PositiveFloat, _SHRINKS] = Field(
        1.0, description="of FedLAW: gamma at the start of a round; param = fixed keeps it"
    )
    shrink_rule: Annotated[ShrinkRule, _TRAINS] = Field(
        "law", description="of FedLAW: where gamma comes from, see there"
    )
    shrink_min: Annotated[PositiveFloat, _BOUNDED] = Field(
        OF_MODELS.low, description="of FedLAW: the least that gamma may become"
    )
    shrink_max: Annotated[PositiveFloat, _GAMMA_TOO] = Field(
        OF_MODELS.high, description="of FedLAW: the most that it may become"
    )
    head_shrink_min: Annotated[PositiveFloat, _STEPS] = Field(OF_HEADS.low, description="the least gamma of statistics")
    head_shrink_max: Annotated[PositiveFloat, _STEPS] = Field(
        OF_HEADS.high, description="the largest gamma of statistics"
    )

    _parts: Tensor | None = PrivateAttr(None)  # [P] to which part of the net a parameter belongs; 1 is the head

    @model_validator(mode="after")
    def _fits_the_schedule(self) -> LawAFL:
        if self.shrink_rule != "law" and self.param == "fixed":
            raise ValueError("shrink_rule and param = 'fixed' both say what gamma is; keep one of them")
        if self.fresh and self.share_lambda:
            raise ValueError("fresh statistics are those of other clients than the models that share_lambda weighs")
        if self.trains and self.shrink_rule == "law" and self.param != "fixed":
            check_bounds(self.shrink, of_kind(self.param, self.of_models.bounds))
        check_bounds(1.0, self.learning.bounds, "head_")
        return self

    @property
    def traits(self) -> Traits:
        return super().traits._replace(each_upload=True, distinct=True)

    def bind(self, setup: Setup) -> Self:
        bound, task = super().bind(setup), setup.task
        check_head(task, self.bias)
        bound._parts = parts_of(task)
        if task.has_statistics and self.schedule != "frozen":
            what = "the server would need the running statistics of a body that is trained, which it does not see"
            raise ConfigError([Fault("model.norm", what, "take norm = 'group', or schedule = 'frozen'")])
        return bound

    def against_noise(self, local: bool) -> list[Fault]:
        faults = []
        if self.schedule == "warmup_then_analytic":
            what = f"moves of models are sent before the sums, and are not hidden (got '{self.schedule}')"
            faults.append(Fault("algorithm.schedule", what, "set algorithm.schedule=frozen, or per_round"))
        if self.depth != "all":
            what = f"how much of the net a client trains tells of its labels, and is not hidden (got '{self.depth}')"
            faults.append(Fault("algorithm.depth", what, "set algorithm.depth=all"))
        if self.trains and self.shrink_rule == "eq5":
            what = "lengths of gradients are sent beside the moves, and are not hidden (got 'eq5')"
            faults.append(Fault("algorithm.shrink_rule", what, "take another rule"))
        if self.quality == "report":
            what = "accuracy and loss are sent beside the sums, and are not hidden (got 'report')"
            faults.append(Fault("algorithm.quality", what, "set algorithm.quality=size, or server"))
        return faults

    @property
    def sends_counts(self) -> bool:
        return True

    @property
    def sends_moves_and_sums(self) -> bool:
        return self.schedule == "per_round"

    def releases_in(self, round_: int) -> int:
        return self.trains_in(round_) + self.asks_in(round_) if self.schedule == "per_round" else 1

    @property
    def sends_means(self) -> bool:
        """Whether clients send means over their examples, to hide how many these are."""
        return self.noise is not None and self.noise.of_means

    def warnings(self, lr: float, rounds: int) -> list[str]:
        if self.schedule != "warmup_then_analytic" or rounds > self.warmup:
            return []
        return [f"algorithm.warmup = {self.warmup} of {rounds} rounds: the head is never solved for"]

    def defaults(self) -> Mapping[str, Mapping[str, Any]]:
        return {"cohort": {"sampling": "all"}} if self.schedule == "frozen" else {}

    @property
    def survey_gradients(self) -> float:
        return float(self.shrink_rule == "eq5")

    @property
    def classes(self) -> int:
        return self.task.linear_head.out_features

    @property
    def lane_size(self) -> int:
        d = feature_count(self.task, self.bias)
        return 2 * (d * d + d * self.classes)  # a number in float64 takes two of float32

    @property
    def feature_norm(self) -> float | None:
        """R, to which features are clipped before they are summed; None where sums are not private."""
        return None if self.noise is None else self.noise.norm

    @property
    def trains(self) -> bool:
        return self.schedule != "frozen"

    @property
    def parts(self) -> Tensor:
        assert self._parts is not None, "bind() first"
        return self._parts

    # -- what is asked and answered --------------------------------------------------------------------
    def phases(self) -> tuple[Phase, ...]:
        if not self.trains:
            return ()
        passes = self.passes if self.fresh or self.schedule == "warmup_then_analytic" else None
        return (Phase(self.step, passes=passes),)

    def passes(self, mine: Nothing, work: Work) -> Tensor:
        """As many as there are, in rounds in which clients train."""
        trains = work.round % 2 == 0 if self.fresh else work.round < self.warmup
        return torch.where(trains, work.steps, 0)

    def start(self, down: Server, mine: Nothing, work: Work) -> Tensor | Deep:
        if self.depth == "all":
            return down.w
        depth = trained_groups(work.survey.counts, int(self.parts.max()))
        return Deep(down.w, depth.to(down.w.dtype))

    def step(self, at: Carry, batch: Batch, down: Server, mine: Nothing) -> Carry:
        if isinstance(at.x, Tensor):
            return super().step(at, batch, down, mine)
        w, depth = at.x
        moved, memory = self.optimizer.update(self.task.grad(w, batch), at.memory, w, batch.lr)
        return Carry(Deep(torch.where(self.parts <= depth, moved, w), depth), memory)

    def trains_in(self, round_: float) -> bool:
        if self.schedule == "warmup_then_analytic":
            return round_ < self.warmup
        return self.trains and (not self.fresh or round_ % 2 == 0)

    def asks_in(self, round_: float) -> bool:
        """Whether statistics are asked for in this round."""
        return not self.trains_in(round_) or (self.schedule == "per_round" and not self.fresh)

    def init(self, w: Tensor) -> Server:
        n, d = len(self.setup.sizes), feature_count(self.task, self.bias)
        dtype = torch.float64 if self.precision == "float64" else torch.float32
        registry = no_registry(n, d, self.classes, self.body(w, 0.0), dtype)
        if self.schedule == "per_round":
            registry = registry._replace(rows=registry.rows[:0], counts=registry.counts[:0])
        registry = tree.tmap(lambda x: x.to(w.device), registry)

        def full(value: float, *shape: int) -> Tensor:
            return torch.full(shape, value, dtype=torch.float64, device=w.device)

        models, statistics = (Weights(full(0, n), full(0, n), full(1)) for _ in range(2))
        claims, temperature = full(0, n, 2), full(self.temperature)
        return Server(w, full(0), registry, claims, models, statistics, full(0), temperature, full(0), full(_NONE))

    def after_empty_round(self, server: Server) -> Server:
        return server._replace(t=server.t + 1, kappa=torch.zeros_like(server.kappa))

    def send(self, server: Server) -> Server:
        """The net; and, if statistics are asked for, who has sent them, of which a client reads its own entry."""
        everybody = self.schedule == "frozen" and bool(server.registry.known.all())
        asks = self.asks_in(float(server.t)) and not everybody
        nothing = tree.tmap(lambda x: x.new_empty(0), server._replace(w=server.w[:0]))
        known = server.registry.known if asks else nothing.registry.known
        return nothing._replace(w=server.w, registry=nothing.registry._replace(known=known))

    def sent_bytes(self, down: Server) -> int:
        return tree.nbytes(down.w)

    def upload_bytes(self, uploads: Sent) -> int:
        each = uploads.rows.shape[-1] * uploads.rows.element_size()
        each += 16 if self.quality == "report" else 0  # two numbers
        sent = int(sent_statistics(uploads.rows, uploads.counts).sum()) if uploads.rows.numel() else 0
        moved = tree.nbytes(uploads.dw)
        if uploads.depth.numel():
            moved = int((self.parts <= uploads.depth).sum()) * uploads.dw.element_size()
        return moved + sent * each + tree.nbytes(uploads.slope)

    def trained_by(self, down: Server) -> bool:
        """Whether who is sent this trains, and sends how far it moved."""
        asked = len(down.registry.known) > 0
        return self.trains and (not asked or (self.schedule == "per_round" and not self.fresh))

    def survey(self, batch: Batch, down: Server, mine: Nothing) -> Seen:
        slope: Any = ()
        if self.shrink_rule == "eq5" and self.trained_by(down):
            slope = self.task.grad(down.w, batch) * batch.mask.sum()
        if not len(down.registry.known):
            labels = torch.arange(self.classes if self.depth != "all" else 0, device=batch.y.device)
            return Seen(batch.mask @ (batch.y[:, None] == labels).to(batch.mask), slope=slope)
        x = clipped_features(body_features(self.task, down.w, batch.x, batch.buffers, self.bias), self.feature_norm)
        sums = statistics(x, batch.y, self.classes, batch.mask)
        none = torch.zeros_like(sums.counts[:1])
        if self.quality != "report":
            return Seen(sums.counts, sums, none, none, slope)
        right = (self.task.apply(down.w, batch.x, batch.buffers).argmax(-1) == batch.y) * batch.mask
        losses = self.task.loss(down.w, batch, training=False) * batch.mask.sum()
        return Seen(sums.counts, sums, right.sum()[None].double(), losses[None].double(), slope)

    def finish(self, x: Tensor | Deep, down: Server, mine: Nothing, work: Work) -> tuple[Sent, Nothing]:
        none, seen, moves = down.claims, work.survey, self.trained_by(down)
        dw = self.model(x) - down.w if moves else none
        depth = x.depth[None] if moves and not isinstance(x, Tensor) else none
        slope = squared_gradient(seen.slope, work.examples) if tree.leaves(seen.slope) else none
        if not len(down.registry.known):
            return Sent(dw, none, none, none, none, depth, slope), ()
        new, n = ~down.registry.known.gather(0, work.client[None]), work.examples
        over = n if self.sends_means else torch.ones_like(n)
        rows, counts = new * to_rows(seen.statistics) / over, new * seen.counts / over
        return Sent(dw, rows, counts, seen.right / n, seen.losses / n, depth, slope), ()

    # -- at the server -------------------------------------------------------------------------------
    def update(self, server: Server, inbox: Inbox[Sent]) -> Server:
        trains, asks = self.trains_in(float(server.t)), self.asks_in(float(server.t))
        server = self.after_empty_round(server)  # the clock goes on, whoever is heard
        if self.schedule != "per_round" and asks:
            return self.solved(server, inbox)
        after = self.trained(server, inbox) if trains else server
        return self.headed(server, after, inbox) if asks else after

    def trained(self, server: Server, inbox: Inbox[Sent]) -> Server:
        """FedLAW's round: w = gamma sum_i lambda_i w_i."""
        stack = Stack(server.w, inbox.uploads.dw)
        epochs = proxy_gradients(self.task, self.proxy, self.server_epochs, self.proxy_batch, inbox.address)
        how = learn_weights(stack, inbox.weights, epochs, settings_for(self.shrink_rule, self.of_models)).how
        loss = partial(proxy_loss, self.task, self.proxy)
        how = with_shrink(self.shrink_rule, how, stack, loss, self.of_models, inbox.uploads.slope)
        models = noted(server.models, inbox.clients, how, inbox.weights / inbox.weights.sum())
        w = aggregated(stack, how)
        if self.depth != "all":
            w = aggregated_by_depth(stack, how, inbox.uploads.depth[:, 0], self.parts)
        return server._replace(w=w, models=models)

    def solved(self, server: Server, inbox: Inbox[Sent]) -> Server:
        """The head from the statistics of all who have ever been heard, if it is better than the one before."""
        registry, claims = self.enrolled(server, inbox)
        if torch.equal(registry.known, server.registry.known):
            return server
        ids = registry.known.nonzero().squeeze(1)
        rows, counts = registry.rows[ids], registry.counts[ids]
        lam0 = self.begun(server.w, rows, counts, claims[ids])
        found = self.learned(server, self.believed(server.w, rows, counts, lam0), ids, inbox.address)
        before = float(server.loss)
        if before == _NONE:
            before = float(proxy_loss(self.task, self.proxy, server.w))
        candidate = min(found.head.held_out)
        server = server._replace(registry=registry, claims=claims)
        if self.gate and not better(candidate, before):
            return server._replace(loss=server.loss.new_tensor(before))
        w, taken = with_head(self.task, server.w, found.head.head), torch.ones_like(server.kappa)
        return self.noted(server, found, ids)._replace(w=w, kappa=taken, loss=server.loss.new_tensor(candidate))

    def headed(self, server: Server, after: Server, inbox: Inbox[Sent]) -> Server:
        """Algorithm 3, repaired: line 14 has set the body, line 17 sets the head, on statistics of the body that was
        sent with ``server``."""
        ids, sound = inbox.clients, self.sound(inbox.uploads)
        counts, rows = inbox.uploads.counts[sound], inbox.uploads.rows[sound]
        if self.sends_means:
            counts = counts.clamp(min=0)  # which noise may have made less
        else:
            rows = rows / counts.sum(1, keepdim=True)
        if not len(rows):
            return after._replace(statistics=after.statistics._replace(lam=torch.zeros_like(after.statistics.lam)))
        if self.share_lambda:
            lam = after.models.lam[ids[sound]]
            rho, shared = self.believed(server.w, rows, counts, lam).ridge, lam / lam.sum()
            w_an = self.temperature * weighted_head(rows, shared, rho, self.classes).head
            how = Weighing(shared, torch.ones_like(server.kappa))
            after = after._replace(statistics=noted(after.statistics, ids[sound], how, shared))
        else:
            lam0 = self.begun(server.w, rows, counts, claimed(inbox.uploads)[sound])
            found = self.learned(server, self.believed(server.w, rows, counts, lam0), ids[sound], inbox.address)
            after, w_an = self.noted(after, found, ids[sound]), found.head.head
        has_bias = self.task.linear_head.bias is not None
        w_agg = head_of(self.task, after.w, has_bias)
        w_an = torch.cat([w_an, torch.zeros_like(w_agg[len(w_an) :])])
        features = proxy_features(self.task, after.w, self.proxy, has_bias)
        best = blended(w_agg, w_an, features, _BLENDS if self.gate else (1.0,))
        w = with_head(self.task, after.w, best.head)
        new = server.loss.new_tensor
        return after._replace(w=w, kappa=new(best.kappa), loss=new(best.loss))

    def learned(self, server: Server, clients: HeadClients, ids: Tensor, address: tuple[int, int]) -> Found:
        """lambda, gamma and s through the solve, under the strength of the prior that was asked for."""
        proxy = self.held(server.w)
        offsets = server.statistics.offsets[ids] if self.persist else None
        folds, wide = two_folds(proxy[1], *address), proxy[0].shape[1]
        if self.sketch is None or self.sketch >= wide:
            return Found(cross_validated_head(clients, proxy, folds, self.learning, offsets), clients.lam0)
        p = projection(wide, self.sketch, address[0]).to(proxy[0].device)
        small = sketched(clients.rows, p, self.classes)
        # The mean eigenvalue of P'GP is so much larger, as its trace is that of G.
        fewer = clients._replace(rows=small, ridge=clients.ridge * wide / self.sketch)
        found = cross_validated_head(fewer, (proxy[0] @ p, proxy[1]), folds, self.learning, offsets)
        head = weighted_head(clients.rows, found.how.mu, clients.ridge, self.classes).head
        return Found(found._replace(head=found.temperature * head), clients.lam0)

    @property
    def of_models(self) -> WeightSettings:
        """How FedLAW's server learns."""
        bounds = Bounds(self.shrink_min, self.shrink_max)
        return WeightSettings(kind=self.param, lr=self.server_lr, shrink=self.shrink, bounds=bounds)

    @property
    def learning(self) -> HeadSettings:
        one = math.inf if self.prior == "fixed" else self.prior
        return HeadSettings(
            lr=self.head_lr,
            steps=self.head_steps,
            cv_steps=min(60, self.head_steps),
            grid=_GRID if isinstance(one, str) else (one,),
            temperature=self.temperature,
            loss=self.head_loss,
            bounds=Bounds(self.head_shrink_min, self.head_shrink_max),
            spread=self.spread,
        )

    def believed(self, w: Tensor, rows: Tensor, counts: Tensor, lam0: Tensor) -> HeadClients:
        """These statistics as they are solved with: the ridge goes by their scale and by the noise in them."""
        gram, cross = from_rows(tree.mix(lam0[None], rows)[0], self.classes)
        ridge = self.gridded(w, gram, cross) if self.ridge == "grid" else float(default_ridge(gram, self.ridge))
        if self.noise is not None and self.noise.std:
            sigma = mixed_noise(self.noise.std, lam0 / self.examples(counts))
            ridge = max(ridge, noise_ridge(sigma, len(gram), self.noise_ridge))
            lift = pack_symmetric(psd(gram) - gram)
            rows = torch.cat([rows[:, : len(lift)] + lift, rows[:, len(lift) :].double()], 1)
        return HeadClients(rows, lam0, ridge, self.classes)

    def gridded(self, w: Tensor, gram: Tensor, cross: Tensor) -> float:
        """The ridge of least squared error on the proxy examples, of equals the largest."""
        ridges = [float(default_ridge(gram, r)) for r in reversed(_RIDGES)]
        proxy, zero = self.held(w), torch.zeros_like(gram[0, 0])
        losses = [squared_error(h, zero, proxy).value for h in ridge_path(gram, cross, ridges)]
        return ridges[int(torch.stack(losses).argmin())]

    def held(self, w: Tensor) -> ProxyFeatures:
        """Features of the server's examples, as long as those of clients may be, and their labels."""
        x, y = proxy_features(self.task, w, self.proxy, self.bias)
        return clipped_features(x, self.feature_norm), y

    def begun(self, w: Tensor, rows: Tensor, counts: Tensor, claims: Tensor) -> Tensor:
        """lambda0 of clients with these normalised statistics.  ``[K]``"""
        sizes = self.examples(counts)
        if self.quality == "size":
            return sizes / sizes.sum()
        accuracy, loss = claims.T if self.quality == "report" else self.measured(w, rows, counts)
        by = sizes if self.size_factor else None
        return quality_weights(data_quality(counts), accuracy, loss, by)

    def examples(self, counts: Tensor) -> Tensor:
        """How many examples clients have, as far as anybody knows: one each where they send means.  ``[K]``"""
        return torch.ones_like(counts[:, 0]) if self.sends_means else examples(counts)

    def measured(self, w: Tensor, rows: Tensor, counts: Tensor) -> ProxyScores:
        """How each client's own head does on the proxy examples of the classes that it has."""
        x, y = self.held(w)
        said = []
        for row in rows:
            gram, cross = from_rows(row.double(), self.classes)
            rho = default_ridge(gram, 1e-3 if self.ridge == "grid" else self.ridge)
            said.append(self.temperature * x @ solve(gram, cross, rho))
        return proxy_scores(torch.stack(said), y, counts)

    def enrolled(self, server: Server, inbox: Inbox[Sent]) -> tuple[Registry, Tensor]:
        """The registry and the claims with those who came for the first time; all others are as they were."""
        registry, claims, body = server.registry, server.claims, self.body(server.w, server.t)
        if body != int(registry.body):
            registry = tree.tmap(torch.zeros_like, registry)._replace(body=torch.full_like(registry.body, body))
        new = ~registry.known[inbox.clients]
        if not inbox.uploads.rows.numel() or not bool(new.any()):
            return registry, claims
        new = new & self.sound(inbox.uploads)
        ids, counts = inbox.clients[new], inbox.uploads.counts[new].clamp(min=0)  # which noise may have made less
        rows = (inbox.uploads.rows[new] / examples(counts)[:, None]).to(registry.rows.dtype)
        registry = Registry(
            registry.body,
            registry.known.index_fill(0, ids, True),
            registry.rows.index_copy(0, ids, rows),
            registry.counts.index_copy(0, ids, counts),
        )
        return registry, claims.index_copy(0, ids, claimed(inbox.uploads)[new])

    def sound(self, uploads: Sent) -> Tensor:
        """Whose statistics can be sums over examples.  ``[K]``"""
        holds = sent_statistics(uploads.rows, uploads.counts)
        last = feature_count(self.task, True) - 1 if self.bias else None
        norm, std, cross_std, _ = self.noise or (None, 0.0, 0.0, False)
        wrong = partial(statistics_faults, bias=last, norm=norm, noise=max(std, cross_std))
        each = zip(uploads.rows, uploads.counts, holds.tolist(), strict=True)
        possible = [
            here and (not self.verify or not wrong(Statistics(*from_rows(row, self.classes), n)))
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
        return body_fingerprint([w[self.task.mask("body.").bool()], self.task.buffers0, *self.task.fixed])

    def statistics(self, before: Tensor, mean: Tensor, server: Server) -> Tensor:
        return mean if self.trains else before

    def contributions(self, before: Server, inbox: Inbox[Sent], after: Server) -> Tensor:
        """As models in rounds that train; else as statistics, which in ``fresh`` may all have been discarded."""
        if self.trains_in(float(before.t)):
            return after.models.lam[inbox.clients]
        lam = after.statistics.lam[inbox.clients]
        return lam if self.schedule != "per_round" or bool(after.kappa > 0) else torch.zeros_like(lam)

    def diagnostics(self, before: Server, inbox: Inbox[Sent], after: Server) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        if self.trains_in(float(before.t)):
            found |= shrink_diagnostics("weights", after.models.shrink, self.shrink_rule, self.of_models)
        if self.asks_in(float(before.t)):
            found |= self.told_of_head(after)
        if self.schedule != "per_round":
            known = torch.where(after.registry.known, self.setup.sizes.to(before.t.device), 0).sum()
            found["analytic/examples"] = known / inbox.examples
        return found

    def told_of_head(self, after: Server) -> dict[str, Tensor]:
        """The weights of statistics, and how much of the head that was solved with them is in the model."""
        found = {"head/kappa": after.kappa}
        found |= {"law_afl/temperature": after.temperature, "law_afl/freedom": after.freedom}
        lam = after.statistics.lam[after.statistics.lam > 0]
        if not len(lam):
            return found
        shrink = after.statistics.shrink
        return found | {
            "head/variance": lam.var(correction=0),
            "head/effective": 1 / lam.square().sum(),
            "head/largest": lam.max(),
            "head/shrink": shrink,
            "head/shrink_bounded": self.learning.bounds.reached(shrink),
        }


class Found(NamedTuple):
    """A head, and the weights it was learned from."""

    head: LearnedHead
    lam0: Tensor  # [K]


def parts_of(task: Task) -> Tensor:
    """To which part of the net each parameter belongs: 1 is the head, 2 what comes before it, and so on.  ``[P]``"""
    names = dict.fromkeys("head." if n.startswith("head.") else ".".join(n.split(".")[:2]) + "." for n in task.names)
    ordered = ["head.", *reversed([name for name in names if name != "head."])]
    return torch.stack([(k + 1) * task.mask(name) for k, name in enumerate(ordered)]).sum(0)


def examples(counts: Tensor) -> Tensor:
    """How many examples clients have; noise does not make it less than one.  ``[K]``"""
    return counts.sum(1).clamp(min=1)


def claimed(uploads: Sent) -> Tensor:
    """Accuracy and loss, as clients say.  ``[K, 2]``"""
    return torch.cat([uploads.accuracy, uploads.loss], 1)


def noted(weights: Weights, ids: Tensor, how: Weighing, lam0: Tensor) -> Weights:
    """What is remembered of clients after these ``[K]`` were weighed."""
    offsets = remembered(weights.offsets, ids, how, torch.where(how.lam > 0, lam0, 0.0))
    return Weights(torch.zeros_like(weights.lam).index_copy(0, ids, how.lam), offsets, how.shrink)
