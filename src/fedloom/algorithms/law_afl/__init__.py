"""LAW-AFL: the head of a net in closed form, from statistics of clients whose weights are learned.

Jiang et al., LAW-AFL, Algorithms 1 and 3, in a reading that can be computed: as printed they cannot. It joins FedLAW's
learned weights (see ``fedlaw``) with analytic federated learning (see ``analytic``), over one net f = W after body phi.

    client i:  G_i = X_i' X_i,  B_i = X_i' Y_i        features of the body that was sent, before any training
    server:    W = (gamma sum_i lambda_i G_i / n_i + rho I)^-1 gamma sum_i lambda_i B_i / n_i,  logits s X W
               lambda, gamma and s descend  CE(proxy) + beta KL(lambda || lambda0)  through the solve

lambda0 = n_i / N, gamma = 1 and s = 1 is AFL with ridge N rho. beta is 0, 0.1, 1 or infinite (lambda = lambda0),
whichever does best on the half of the proxy examples it was not learned on; the largest of equals. With clean clients
AFL is the optimum already; the learned weights are for clients that are not clean.

``schedule``
    frozen                phi is never trained. A client sends once: ceil(N / cohort) rounds, or one round with all.
    warmup_then_analytic  ``warmup`` rounds of FedLAW, then phi is frozen and the rest is as above.
    per_round             Algorithm 3: every round FedLAW for phi and a head from the statistics of the round's clients,
                          taken on the phi that was sent; of (1 - kappa) W_agg + kappa s W, kappa in 0, 1/4 .. 1,
                          the best on the proxy set is the head, on the new phi. With ``fresh`` statistics are taken
                          on the new phi: every second round is this light exchange, without training.

What is repaired, in addition to the printed equations that modules of ``fedloom.maths`` name:
    line 8      C_k = X'Y + gamma I is not square: X'X; its gamma is also the shrink of line 14: three names here
    line 12     sizes are divided by that of the proxy set: by their sum
    lines 13-17 the weights of line 13 never reach the statistics of lines 15 to 17: weighted sums
    line 14, 17 both set the model: the first sets the body, the second the head
    line 15     a client that is drawn again is added again, and statistics of different bodies are summed: each client
                once, and statistics of another body are discarded
    line 6-8    statistics are taken on each client's own trained net, whose features have nothing in common

Lines 8 and 17 as printed do not fit together, and cannot be computed. What can be computed as printed is a setting:
    3.1.2           gamma in (0, 1]: param = "exp_cap", which is the default here; head_shrink_max = 1 for the head's
    eq. 5           shrink_rule = "eq5", where models are trained
    eq. 16 and 17   quality = "report", size_factor = false
    eq. 24          privacy.heterogeneity = "eq24"; eq. 26 is that times Delta / epsilon, which is z here
    eq. 29, 32, 35  kind = "analytic", agg = "eq29" ...
    Algorithm 1 line 9   param = "fixed", shrink = gamma^2         Algorithm 3 line 14   param = "fixed", shrink = 1
    Algorithm 3 lines 13 to 17   prior = "fixed", head_steps = 0   line 17 alone         kind = "analytic"
Not a setting: eq. 13, which has the clients of a round keep the old model and all others the new one, and eq. 14, which
adds models instead of updates to the model, so that it doubles in every round.

``quality`` decides lambda0: ``size``; ``report``, eq. 16 and 17 with accuracy and loss as clients claim them, by which
two forgers in ten get half of all weight; ``server``, the same with accuracy and loss that the server measures, of each
client's own head on the proxy examples of the classes it has. Unless clients are bad, both take weight from clients
with few classes, and the head is no longer that of AFL if nothing is learned.

``depth = "entropy"`` is Algorithm 2, for which the paper gives no formula: a client trains only the L_i parts of the
net that are nearest to the head, L_i = 1 + round((L_max - 1) H(p_i) / ln C), so that a client of one class trains only
the head. A part is the mean over the clients that trained it, and a part that no client trained does not shrink. The
weights are learned as if all clients had trained everything.

With ``privacy.feature_clip`` each client adds noise to G, B and its counts of classes before the server sees anything,
so that everything learned from them is as private as they are. Noise of deviation sigma' in the sum by
lambda0 requires a ridge of k sigma' sqrt(d) (``noise_ridge``); the correction that makes that sum of G positive
semidefinite is added whatever lambda becomes. ``spread`` keeps lambda from concentrating the noise. The body
must be frozen.

Line 9 of Algorithm 3 adds noise to all that is uploaded, without a bound on it, and so without a guarantee. In schedule
``per_round``, with ``privacy.clip``, ``privacy.feature_clip`` and ``privacy.mechanism=local``, clients clip their
updates to S, send means over their examples instead of sums, and add noise to both. All begin with the same lambda0,
since the server does not know how many examples they have. As printed it also needs ``privacy.heterogeneity=eq24``.

Of a round in which models are trained, ``weights/...``, ``bad_clients/...`` and
``hessian/weights_top`` are of the weights of models, which made the body and W_agg. The weights of statistics are
``head/...``, over all clients whose statistics the head was solved from; ``head/kappa`` is the share that this head has
in the model, 0 where the gate has discarded it. While gamma is learned it stays in [``shrink_min``, ``shrink_max``] for
models and in [``head_shrink_min``, ``head_shrink_max``] for statistics, where it only divides the ridge;
``weights/shrink_bounded`` and ``head/shrink_bounded`` are 1 if it is at a bound.

Schedules count rounds: a round without uploads counts for ``warmup`` and for the alternation of ``fresh`` like any
other.

``ridge = "grid"`` uses the one of seven ridges, 1e-6 to 1 mean eigenvalues of G / n, whose head by lambda0 has the
least squared error on the proxy examples. ``sketch`` learns lambda, gamma and s on a random projection of the features,
the same for all, at (sketch / d)^3 of the cost, and solves for the head with all of them.

Memory: N (d (d + 1) / 2 + d C) numbers at the server, 0.1 GB for 100 clients of 512 features in float64.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

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
    ForeseesUploads,
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
from fedloom.algorithms.law_afl.head import HeadSolver
from fedloom.algorithms.law_afl.models import ModelAggregation, parts_of
from fedloom.algorithms.law_afl.schedules import Frozen, PerRound, Schedule, Tools, WarmupThenAnalytic
from fedloom.algorithms.law_afl.state import (
    NO_LOSS,
    ClientSums,
    ClientWeights,
    LawAFLServer,
    LawAFLUpload,
    PartlyTrained,
)
from fedloom.core import tree
from fedloom.core.errors import ConfigError, Fault
from fedloom.core.schema import GIVEN, other_than, over, under, when
from fedloom.core.task import Batch
from fedloom.maths.data_quality import trained_groups
from fedloom.maths.learned_heads import HeadSettings
from fedloom.maths.learned_weights import (
    OF_HEADS,
    OF_MODELS,
    Bounds,
    ShrinkRule,
    WeightSettings,
    check_bounds,
    of_kind,
    shrink_diagnostics,
    squared_gradient,
)
from fedloom.maths.linear_head import body_features, check_head, feature_count
from fedloom.maths.private_sums import clipped_features
from fedloom.maths.registry import no_registry
from fedloom.maths.ridge import sent_statistics, statistics, statistics_bytes, to_rows

_GRID = (0.0, 0.1, 1.0, math.inf)  # strengths of the prior that cross-validation chooses from

_TRAINS = when(schedule=other_than("frozen"))
_LEARNS = when(schedule=other_than("frozen"), server_epochs=over(0))
_SHRINKS = when(schedule=other_than("frozen"), shrink_rule=other_than("grid", "ratio"))
_GAMMA_TOO = when(schedule=other_than("frozen"), server_epochs=over(0), shrink_rule="law", param=other_than("fixed"))
_GROWS = when(schedule=other_than("frozen"), server_epochs=over(0), shrink_rule="law", param=("exp", "quad")) | when(
    schedule=other_than("frozen"), server_epochs=over(0), shrink_rule="law", param="exp_cap", shrink=under(1)
)
_BOUNDED = _GAMMA_TOO | when(schedule=other_than("frozen"), shrink_rule="ratio")
_WEIGHED = when(share_lambda=False)  # statistics have separate weights
_STEPS = when(share_lambda=False, head_steps=over(0))
_FREE = when(share_lambda=False, head_steps=over(0), prior=other_than("fixed"))
_BY_QUALITY = when(share_lambda=False, quality=("server", "report"))


class LawAFL(
    Algorithm[LawAFLServer, Nothing, LawAFLUpload],
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
    ForeseesUploads,
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
    head_lr: Annotated[PositiveFloat, _STEPS] = Field(0.05, description="learning rate of the weights of statistics")
    head_steps: Annotated[NonNegativeInt, _WEIGHED] = Field(100, description="steps of that; in each fold, at most 60")
    head_loss: Literal["ce", "mse"] = Field("ce", description="what is learned on the proxy set; mse is worse")
    spread: Annotated[NonNegativeFloat, _FREE] = Field(
        0.0, description="weight of sum lambda^2, against concentrating noise for privacy"
    )
    noise_ridge: Annotated[NonNegativeFloat, when({"privacy.feature_clip": GIVEN}, schedule="frozen")] = Field(
        0.5, description="with privacy: k, the least ridge in units of sigma sqrt(d)"
    )
    temperature: PositiveFloat = Field(10.0, description="s at the start: outputs of ridge regression are in [0, 1]")
    quality: Annotated[Literal["size", "server", "report"], _WEIGHED] = Field(
        "size", description="how lambda0 is computed: see above"
    )
    size_factor: Annotated[bool, _BY_QUALITY] = Field(
        True, description="quality times the number of examples; false: eq. 17 as printed"
    )
    verify: bool = Field(True, description="exclude statistics that cannot be sums over examples")
    persist: Annotated[bool, _STEPS] = Field(
        True, description="start from the weight learned for a client earlier, instead of lambda0"
    )
    gate: bool = Field(True, description="keep the previous head, or blend with it, if that is better on the proxy set")
    depth: Annotated[Literal["all", "entropy"], _TRAINS] = Field(
        "all", description="how much of the net a client trains: see above"
    )
    share_lambda: Annotated[bool, when(schedule="per_round")] = Field(
        False, description="per_round: statistics have the weights of models, and nothing else is learned"
    )
    precision: Annotated[Literal["float64", "float32"], when(schedule=other_than("per_round"))] = Field(
        "float64", description="precision of the kept statistics"
    )
    server_epochs: Annotated[NonNegativeInt, _TRAINS] = Field(
        20, description="of FedLAW: passes over the proxy set in a round"
    )
    server_lr: Annotated[PositiveFloat, _LEARNS] = Field(
        0.01, description="of FedLAW: learning rate of the weights of models"
    )
    proxy_batch: Annotated[PositiveInt, _LEARNS] = Field(128, description="of FedLAW: examples in a step of the server")
    param: Annotated[Literal["exp", "quad", "exp_cap", "fixed"], _TRAINS] = Field(
        "exp_cap", description="of FedLAW: what is learned; exp_cap: gamma is at most 1, as the paper says"
    )
    shrink: Annotated[PositiveFloat, _SHRINKS] = Field(
        1.0, description="of FedLAW: gamma at the start of a round; param = fixed keeps it"
    )
    shrink_rule: Annotated[ShrinkRule, _TRAINS] = Field("law", description="of FedLAW: how gamma is set, see fedlaw")
    shrink_min: Annotated[PositiveFloat, _BOUNDED] = Field(OF_MODELS.low, description="of FedLAW: lower bound of gamma")
    shrink_max: Annotated[PositiveFloat, _GROWS] = Field(OF_MODELS.high, description="of FedLAW: upper bound of gamma")
    head_shrink_min: Annotated[PositiveFloat, _STEPS] = Field(OF_HEADS.low, description="the least gamma of statistics")
    head_shrink_max: Annotated[PositiveFloat, _STEPS] = Field(
        OF_HEADS.high, description="the largest gamma of statistics"
    )

    _parts: Tensor | None = PrivateAttr(None)  # [P] the part of the net that a parameter belongs to; 1 is the head

    @model_validator(mode="after")
    def _fits_the_schedule(self) -> LawAFL:
        if self.shrink_rule != "law" and self.param == "fixed":
            raise ValueError("shrink_rule and param = 'fixed' both set gamma; keep one of them")
        if self.fresh and self.share_lambda:
            raise ValueError("fresh statistics come from other clients than the models that share_lambda weighs")
        if self.trains and self.shrink_rule == "law" and self.param != "fixed":
            check_bounds(self.shrink, of_kind(self.param, self.model_settings.bounds))
        check_bounds(1.0, self.head_settings.bounds, "head_")
        return self

    @property
    def traits(self) -> Traits:
        reports = "" if self.quality == "report" else f"algorithm.quality = '{self.quality}' does not use them"
        classes = "weights clients by how well they separate classes"
        return super().traits._replace(each_upload=True, distinct=True, classes_only=classes, ignores_reports=reports)

    def bind(self, setup: Setup) -> Self:
        bound, task = super().bind(setup), setup.task
        check_head(task, self.bias)
        bound._parts = parts_of(task)
        if task.has_statistics and self.schedule != "frozen":
            what = "the server would need the running statistics of a body that is trained, which it does not see"
            raise ConfigError([Fault("model.norm", what, "use norm = 'group', or schedule = 'frozen'")])
        return bound

    def against_noise(self, local: bool) -> list[Fault]:
        faults = []
        if self.schedule == "warmup_then_analytic":
            what = f"model updates are sent before the sums, and are not hidden (got '{self.schedule}')"
            faults.append(Fault("algorithm.schedule", what, "set algorithm.schedule=frozen, or per_round"))
        if self.depth != "all":
            what = f"how much of the net a client trains reveals its labels, and is not hidden (got '{self.depth}')"
            faults.append(Fault("algorithm.depth", what, "set algorithm.depth=all"))
        if self.trains and self.shrink_rule == "eq5":
            what = "norms of gradients are sent with the updates, and are not hidden (got 'eq5')"
            faults.append(Fault("algorithm.shrink_rule", what, "use another rule"))
        if self.quality == "report":
            what = "accuracy and loss are sent with the sums, and are not hidden (got 'report')"
            faults.append(Fault("algorithm.quality", what, "set algorithm.quality=size, or server"))
        return faults

    @property
    def sends_counts(self) -> bool:
        return True

    @property
    def sends_moves_and_sums(self) -> bool:
        return self.schedule == "per_round"

    def releases_in(self, round_: int) -> int:
        rounds = self.rounds
        return rounds.trains_in(round_) + rounds.asks_in(round_) if self.schedule == "per_round" else 1

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
        """R, to which features are clipped before they are summed; None if sums are not private."""
        return None if self.noise is None else self.noise.norm

    @property
    def trains(self) -> bool:
        return self.schedule != "frozen"

    @property
    def parts(self) -> Tensor:
        assert self._parts is not None, "bind() first"
        return self._parts

    # -- its parts -----------------------------------------------------------------------------------
    @property
    def rounds(self) -> Schedule:
        if self.schedule == "per_round":
            return PerRound(self.fresh, self.share_lambda)
        return WarmupThenAnalytic(self.warmup) if self.schedule == "warmup_then_analytic" else Frozen()

    @property
    def tools(self) -> Tools:
        return Tools(self.model_aggregation, self.head_solver, self.gate)

    @property
    def model_aggregation(self) -> ModelAggregation:
        parts = None if self.depth == "all" else self.parts
        how, rule = self.model_settings, self.shrink_rule
        return ModelAggregation(self.task, self.proxy, how, rule, self.server_epochs, self.proxy_batch, parts)

    @property
    def head_solver(self) -> HeadSolver:
        return HeadSolver(
            task=self.task,
            proxy=self.proxy,
            noise=self.noise,
            settings=self.head_settings,
            bias=self.bias,
            ridge=self.ridge,
            noise_ridge=self.noise_ridge,
            sketch=self.sketch,
            quality=self.quality,
            size_factor=self.size_factor,
            verify=self.verify,
            persist=self.persist,
        )

    @property
    def model_settings(self) -> WeightSettings:
        """How FedLAW's server learns."""
        bounds = Bounds(self.shrink_min, self.shrink_max)
        return WeightSettings(kind=self.param, lr=self.server_lr, shrink=self.shrink, bounds=bounds)

    @property
    def head_settings(self) -> HeadSettings:
        """How the weights of statistics are learned."""
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

    # -- clients ---------------------------------------------------------------------------------------
    def phases(self) -> tuple[Phase, ...]:
        if not self.trains:
            return ()
        return (Phase(self.step, passes=None if self.rounds.both_at_once else self.passes),)

    def passes(self, mine: Nothing, work: Work) -> Tensor:
        """None in rounds in which clients only send statistics."""
        return torch.where(self.rounds.trains_in(work.round), work.steps, 0)

    def start(self, down: LawAFLServer, mine: Nothing, work: Work) -> Tensor | PartlyTrained:
        if self.depth == "all":
            return down.w
        depth = trained_groups(work.survey.counts, int(self.parts.max()))
        return PartlyTrained(down.w, depth.to(down.w.dtype))

    def step(self, at: Carry, batch: Batch, down: LawAFLServer, mine: Nothing) -> Carry:
        if isinstance(at.x, Tensor):
            return super().step(at, batch, down, mine)
        w, depth = at.x
        moved, memory = self.optimizer.update(self.task.grad(w, batch), at.memory, w, batch.lr)
        return Carry(PartlyTrained(torch.where(self.parts <= depth, moved, w), depth), memory)

    def trains_in(self, round_: float) -> bool:
        return bool(self.rounds.trains_in(round_))

    def init(self, w: Tensor) -> LawAFLServer:
        n, d = len(self.setup.sizes), feature_count(self.task, self.bias)
        dtype = torch.float64 if self.precision == "float64" else torch.float32
        registry = no_registry(n, d, self.classes, self.rounds.body(self.task, w, 0.0), dtype)
        if self.schedule == "per_round":
            registry = registry._replace(rows=registry.rows[:0], counts=registry.counts[:0])
        registry = tree.tmap(lambda x: x.to(w.device), registry)

        def full(value: float, *shape: int) -> Tensor:
            return torch.full(shape, value, dtype=torch.float64, device=w.device)

        models, statistics = (ClientWeights(full(0, n), full(0, n), full(1)) for _ in range(2))
        claims, temperature = full(0, n, 2), full(self.temperature)
        return LawAFLServer(
            w, full(0), registry, claims, models, statistics, full(0), temperature, full(0), full(NO_LOSS)
        )

    def after_empty_round(self, server: LawAFLServer) -> LawAFLServer:
        return server._replace(t=server.t + 1, kappa=torch.zeros_like(server.kappa))

    def send(self, server: LawAFLServer) -> LawAFLServer:
        """The net; and, if statistics are requested, which clients have sent them: a client reads its own entry."""
        everybody = self.schedule == "frozen" and bool(server.registry.known.all())
        asks = self.rounds.asks_in(float(server.t)) and not everybody
        nothing = tree.tmap(lambda x: x.new_empty(0), server._replace(w=server.w[:0]))
        known = server.registry.known if asks else nothing.registry.known
        return nothing._replace(w=server.w, registry=nothing.registry._replace(known=known))

    def sent_bytes(self, down: LawAFLServer) -> int:
        return tree.nbytes(down.w)

    def upload_bytes(self, uploads: LawAFLUpload) -> int:
        each = uploads.rows.shape[-1] * uploads.rows.element_size()
        each += 16 if self.quality == "report" else 0  # two numbers
        sent = int(sent_statistics(uploads.rows, uploads.counts).sum()) if uploads.rows.numel() else 0
        moved = tree.nbytes(uploads.dw)
        if uploads.depth.numel():
            moved = int((self.parts <= uploads.depth).sum()) * uploads.dw.element_size()
        return moved + sent * each + tree.nbytes(uploads.slope)

    def foresee_uploads(self, server: LawAFLServer, ids: Tensor) -> tuple[int, LawAFLServer]:
        """As if every client trained the whole net, and all statistics were plausible."""
        round_, registry = float(server.t), server.registry
        size, each = 0, statistics_bytes(feature_count(self.task, self.bias), self.classes)
        if self.trains_in(round_):
            slope = server.w.element_size() if self.shrink_rule == "eq5" else 0
            size += len(ids) * (tree.nbytes(server.w) + slope)
        if self.rounds.asks_in(round_):
            size += int((~registry.known[ids]).sum()) * (each + (16 if self.quality == "report" else 0))
            if self.schedule != "per_round":
                registry = registry._replace(known=registry.known.index_fill(0, ids, True))
        return size, self.after_empty_round(server)._replace(registry=registry)

    def trained_by(self, down: LawAFLServer) -> bool:
        """Whether a client that receives this trains, and sends its update."""
        asked = len(down.registry.known) > 0
        return self.trains and (not asked or self.rounds.both_at_once)

    def survey(self, batch: Batch, down: LawAFLServer, mine: Nothing) -> ClientSums:
        slope: Any = ()
        if self.shrink_rule == "eq5" and self.trained_by(down):
            slope = self.task.grad(down.w, batch) * batch.mask.sum()
        if not len(down.registry.known):
            labels = torch.arange(self.classes if self.depth != "all" else 0, device=batch.y.device)
            return ClientSums(batch.mask @ (batch.y[:, None] == labels).to(batch.mask), slope=slope)
        x = clipped_features(body_features(self.task, down.w, batch.x, batch.buffers, self.bias), self.feature_norm)
        sums = statistics(x, batch.y, self.classes, batch.mask)
        none = torch.zeros_like(sums.counts[:1])
        if self.quality != "report":
            return ClientSums(sums.counts, sums, none, none, slope)
        right = (self.task.apply(down.w, batch.x, batch.buffers).argmax(-1) == batch.y) * batch.mask
        losses = self.task.loss(down.w, batch, training=False) * batch.mask.sum()
        return ClientSums(sums.counts, sums, right.sum()[None].double(), losses[None].double(), slope)

    def finish(
        self, x: Tensor | PartlyTrained, down: LawAFLServer, mine: Nothing, work: Work
    ) -> tuple[LawAFLUpload, Nothing]:
        none, seen, moves = down.claims, work.survey, self.trained_by(down)
        dw = self.model(x) - down.w if moves else none
        depth = x.depth[None] if moves and not isinstance(x, Tensor) else none
        slope = squared_gradient(seen.slope, work.examples) if tree.leaves(seen.slope) else none
        if not len(down.registry.known):
            return LawAFLUpload(dw, none, none, none, none, depth, slope), ()
        new, n = ~down.registry.known.gather(0, work.client[None]), work.examples
        means = self.noise is not None and self.noise.of_means  # which hide how many examples a client has
        over = n if means else torch.ones_like(n)
        rows, counts = new * to_rows(seen.statistics) / over, new * seen.counts / over
        return LawAFLUpload(dw, rows, counts, seen.right / n, seen.losses / n, depth, slope), ()

    # -- the server ------------------------------------------------------------------------------------
    def update(self, server: LawAFLServer, inbox: Inbox[LawAFLUpload]) -> LawAFLServer:
        return self.rounds.update(self.tools, float(server.t), self.after_empty_round(server), inbox)

    def statistics(self, before: Tensor, mean: Tensor, server: LawAFLServer) -> Tensor:
        return mean if self.trains else before

    def contributions(self, before: LawAFLServer, inbox: Inbox[LawAFLUpload], after: LawAFLServer) -> Tensor:
        """As models in rounds that train; else as statistics, which in ``fresh`` may all have been discarded."""
        if self.trains_in(float(before.t)):
            return after.models.lam[inbox.clients]
        lam = after.statistics.lam[inbox.clients]
        return lam if self.schedule != "per_round" or bool(after.kappa > 0) else torch.zeros_like(lam)

    def diagnostics(self, before: LawAFLServer, inbox: Inbox[LawAFLUpload], after: LawAFLServer) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        if self.trains_in(float(before.t)):
            found |= shrink_diagnostics("weights", after.models.shrink, self.shrink_rule, self.model_settings)
        if self.rounds.asks_in(float(before.t)):
            found |= self.head_diagnostics(after)
        if self.schedule != "per_round":
            known = torch.where(after.registry.known, self.setup.sizes.to(before.t.device), 0).sum()
            found["analytic/examples"] = known / inbox.examples
        return found

    def head_diagnostics(self, after: LawAFLServer) -> dict[str, Tensor]:
        """The weights of statistics, and the share of the head that was solved with them in the model's head."""
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
            "head/shrink_bounded": self.head_settings.bounds.reached(shrink),
        }
