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
``weights/shrink_bounded`` and ``head/shrink_bounded`` are 1 if it is at a bound. At most 1, as 3.1.2 has it, gamma can
only shorten the model, round after round: where a fifth of the clients flipped their labels, the model of one seed of
three became zero (``experiments/law_afl/gamma.toml``). ``param = "fixed"`` with ``shrink = 1`` keeps its length.

Schedules count rounds: a round without uploads counts for ``warmup`` and for the alternation of ``fresh`` like any
other.

``ridge = "grid"`` uses the one of seven ridges, 1e-6 to 1 mean eigenvalues of G / n, whose head by lambda0 has the
least squared error on the proxy examples. ``sketch`` learns lambda, gamma and s on a random projection of the features,
the same for all, at (sketch / d)^3 of the cost, and solves for the head with all of them.

Memory: N (d (d + 1) / 2 + d C) numbers at the server, 0.1 GB for 100 clients of 512 features in float64, and twice
that while their weights are learned, for which G is unpacked (with ``sketch``, the G of projected features).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import torch
from pydantic import PrivateAttr
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
from fedloom.algorithms.law_afl.costs import bytes_of, foreseen
from fedloom.algorithms.law_afl.diagnostics import head_diagnostics, model_diagnostics
from fedloom.algorithms.law_afl.head import HeadSolver
from fedloom.algorithms.law_afl.models import ModelAggregation, parts_of
from fedloom.algorithms.law_afl.privacy import not_hidden
from fedloom.algorithms.law_afl.schedules import Schedule, Tools, schedule_of
from fedloom.algorithms.law_afl.settings import LawAFLSettings
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
from fedloom.core.task import Batch
from fedloom.maths.data_quality import trained_groups
from fedloom.maths.learned_weights import squared_gradient
from fedloom.maths.linear_head import body_features, check_head, feature_count
from fedloom.maths.private_sums import clipped_features
from fedloom.maths.registry import no_registry
from fedloom.maths.ridge import statistics, to_rows


class LawAFL(
    LawAFLSettings,
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

    _parts: Tensor | None = PrivateAttr(None)  # [P] the part of the net that a parameter belongs to; 1 is the head

    @property
    def traits(self) -> Traits:
        reports = "" if self.quality == "report" else f"algorithm.quality = '{self.quality}' does not use them"
        classes = "weights clients by how well they separate classes"
        return super().traits._replace(each_upload=True, distinct=True, classes_only=classes, ignores_reports=reports)

    def bind(self, setup: Setup) -> Self:
        bound, task = super().bind(setup), setup.task
        check_head(task, self.bias)
        bound._parts = parts_of(task)
        if task.has_running_statistics and self.trains:
            what = "the server would need the running statistics of a body that is trained, which it does not see"
            raise ConfigError([Fault("model.norm", what, "use norm = 'group', or schedule = 'frozen'")])
        return bound

    @property
    def rounds(self) -> Schedule:
        return schedule_of(self)

    @property
    def tools(self) -> Tools:
        models = ModelAggregation(self.task, self.proxy, self, self.parts)
        return Tools(models, HeadSolver(self.task, self.proxy, self.noise, self))

    @property
    def parts(self) -> Tensor:
        assert self._parts is not None, "bind() first"
        return self._parts

    @property
    def classes(self) -> int:
        return self.task.linear_head.out_features

    # -- the server sends --------------------------------------------------------------------------------
    def init(self, w: Tensor) -> LawAFLServer:
        n, d = len(self.setup.sizes), feature_count(self.task, self.bias)
        dtype = torch.float64 if self.precision == "float64" else torch.float32
        registry = no_registry(n, d, self.classes, self.rounds.body(self.task, w, 0.0), dtype)
        if not self.rounds.keeps_statistics:
            registry = registry._replace(rows=registry.rows[:0], counts=registry.counts[:0])
        registry = tree.tmap(lambda x: x.to(w.device), registry)

        def full(value: float, *shape: int) -> Tensor:
            return torch.full(shape, value, dtype=torch.float64, device=w.device)

        models, statistics = (ClientWeights(full(0, n), full(0, n), full(1)) for _ in range(2))
        claims, temperature = full(0, n, 2), full(self.temperature)
        return LawAFLServer(
            w, full(0), registry, claims, models, statistics, full(0), temperature, full(0), full(NO_LOSS)
        )

    def send(self, server: LawAFLServer) -> LawAFLServer:
        """The net; and, if statistics are requested, which clients have sent them: a client reads its own entry."""
        everybody = self.schedule == "frozen" and bool(server.registry.known.all())
        asks = self.rounds.asks_in(float(server.t)) and not everybody
        nothing = tree.tmap(lambda x: x.new_empty(0), server._replace(w=server.w[:0]))
        known = server.registry.known if asks else nothing.registry.known
        return nothing._replace(w=server.w, registry=nothing.registry._replace(known=known))

    # -- clients -----------------------------------------------------------------------------------------
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

    def phases(self) -> tuple[Phase, ...]:
        if not self.trains:
            return ()
        return (Phase(self.step, passes=None if self.rounds.both_at_once else self.passes),)

    def passes(self, mine: Nothing, work: Work) -> Tensor:
        """None in rounds in which clients only send statistics."""
        return torch.where(self.rounds.trains_in(work.round), work.steps, 0)

    def trains_in(self, round_: float) -> bool:
        return bool(self.rounds.trains_in(round_))

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

    # -- the server receives -----------------------------------------------------------------------------
    def update(self, server: LawAFLServer, inbox: Inbox[LawAFLUpload]) -> LawAFLServer:
        return self.rounds.update(self.tools, float(server.t), self.after_empty_round(server), inbox)

    def after_empty_round(self, server: LawAFLServer) -> LawAFLServer:
        return server._replace(t=server.t + 1, kappa=torch.zeros_like(server.kappa))

    def statistics(self, before: Tensor, mean: Tensor, server: LawAFLServer) -> Tensor:
        return mean if self.trains else before

    def contributions(self, before: LawAFLServer, inbox: Inbox[LawAFLUpload], after: LawAFLServer) -> Tensor:
        """As models in rounds that train; else as statistics, which in ``fresh`` may all have been discarded."""
        if self.trains_in(float(before.t)):
            return after.models.lam[inbox.clients]
        lam = after.statistics.lam[inbox.clients]
        return lam if self.rounds.keeps_statistics or bool(after.kappa > 0) else torch.zeros_like(lam)

    def diagnostics(self, before: LawAFLServer, inbox: Inbox[LawAFLUpload], after: LawAFLServer) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        if self.trains_in(float(before.t)):
            found |= model_diagnostics(self, after)
        if self.rounds.asks_in(float(before.t)):
            found |= head_diagnostics(self, after)
        if self.rounds.keeps_statistics:
            known = torch.where(after.registry.known, self.setup.sizes.to(before.t.device), 0).sum()
            found["analytic/examples"] = known / inbox.examples
        return found

    # -- costs, other sections, privacy ------------------------------------------------------------------
    @property
    def survey_gradients(self) -> float:
        return float(self.shrink_rule == "eq5")

    @property
    def lane_size(self) -> int:
        d = feature_count(self.task, self.bias)
        return 2 * (d * d + d * self.classes)  # a number in float64 takes two of float32

    def sent_bytes(self, down: LawAFLServer) -> int:
        return tree.nbytes(down.w)

    def upload_bytes(self, uploads: LawAFLUpload) -> int:
        return bytes_of(self, self.parts, uploads)

    def foresee_uploads(self, server: LawAFLServer, ids: Tensor) -> tuple[int, LawAFLServer]:
        size, after = foreseen(self, self.rounds, self.task, server, ids)
        return size, self.after_empty_round(after)

    def defaults(self) -> Mapping[str, Mapping[str, Any]]:
        return {"cohort": {"sampling": "all"}} if self.schedule == "frozen" else {}

    def warnings(self, lr: float, rounds: int) -> list[str]:
        if self.schedule != "warmup_then_analytic" or rounds > self.warmup:
            return []
        return [f"algorithm.warmup = {self.warmup} of {rounds} rounds: the head is never solved for"]

    def against_noise(self, local: bool) -> list[Fault]:
        return list(not_hidden(self))

    @property
    def sends_counts(self) -> bool:
        return True

    @property
    def sends_moves_and_sums(self) -> bool:
        return not self.rounds.keeps_statistics

    def releases_in(self, round_: int) -> int:
        return self.rounds.releases_in(round_)

    @property
    def feature_norm(self) -> float | None:
        """R, to which features are clipped before they are summed; None if sums are not private."""
        return None if self.noise is None else self.noise.norm
