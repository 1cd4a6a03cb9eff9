"""FedALR: the server gives each client's update its own learning rate, by its agreement with the others.

Zhu, A Federated Learning Algorithm with Adaptive Learning Rate, 2025.

    client i:  as FedAvg;  u_i = w - w_i,  r_i = ||u_i||,  uh_i = u_i / r_i
    server:    t <- t + 1;  gbar = (1 / K) sum_i uh_i;  m <- gbar / t + m (t - 1) / t         (eq. 7)
               s_i = <uh_i, m>                                                               (eq. 6)
               eta_i = exp(s_i - 1)
               w <- w - server_lr (1 / K) sum_i eta_i uh_i                                   (eq. 3)

The text leaves several readings open; each is an option, and the first value is the literal one.
``apply``: (3) with unit updates, with unit updates times the mean (or median) norm, or with raw ones.
``momentum``: (7) as the mean over all rounds, bias-corrected exponential, or only this round's mean.
``map = "const"`` is the control that every result must be compared with: m shrinks over the rounds, the rates
all tend to exp(-1), and what is left is normalised averaging with a constant step.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, NamedTuple

import torch
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, model_validator
from torch import Tensor

from fedloom.algorithm import Algorithm, Diagnoses, Inbox, Nothing, Traits, Update, like
from fedloom.core import tree
from fedloom.core.schema import other_than, when

PRESETS: dict[str, dict[str, Any]] = {
    "literal": {},
    "fedavg_scale": {"apply": "mean_norm", "eta_norm": "mean1"},
    "no_adapt": {"map": "const"},
    "raw": {"apply": "raw"},
}


class Server(NamedTuple):
    w: Tensor  # [P]
    m: Tensor  # [P] float64: the running direction, not corrected for bias
    t: Tensor  # [] aggregations in m


class Received(NamedTuple):
    """What the server computes from a round's updates, before its step."""

    unit: Tensor  # [K, P] uh_i
    r: Tensor  # [K]
    n: Tensor  # [K] the weight of each; 0 if it is left out
    share: Tensor  # [K] of each in a mean over clients
    m: Tensor  # [P]
    t: Tensor  # []
    eta: Tensor  # [K]


class FedALR(Algorithm[Server, Nothing, Update], Diagnoses):
    presets = {"preset": PRESETS}

    preset: Literal["literal", "fedavg_scale", "no_adapt", "raw"] = Field("literal", description="a named reading")
    server_lr: PositiveFloat = Field(1.0, description="the server's step")
    normalise: bool = Field(True, description="divide updates by their norm before (6) and (7)")
    momentum: Literal["cumulative", "ema", "none"] = Field("cumulative", description="the average in (7)")
    ema_beta: Annotated[float, when(momentum="ema")] = Field(
        0.9, ge=0, lt=1, description="decay of the exponential mean"
    )
    momentum_input: Annotated[Literal["unit", "raw"], when(normalise=True)] = Field(
        "unit", description="what enters (7)"
    )
    momentum_lag: Annotated[Literal[0, 1], when(map=other_than("const"))] = Field(
        0, description="1: (6) uses the direction of the round before"
    )
    momentum_reset_every: Annotated[NonNegativeInt, when(momentum=other_than("none"))] = Field(
        0, description="rounds after which m is reset; 0: never"
    )
    align: Annotated[Literal["inner", "cosine"], when(map=other_than("const"))] = Field(
        "inner", description="(6) as printed, or divided by ||m||"
    )
    map: Literal["exp", "clip01", "relu", "identity", "const"] = Field("exp", description="from s_i to the rate")
    const_value: Annotated[float, when(map="const", eta_norm="none")] = Field(
        math.exp(-1), description="the rate of all"
    )
    temperature: Annotated[PositiveFloat, when(map="exp")] = Field(1.0, description="exp((s_i - 1) / temperature)")
    apply: Literal["unit", "mean_norm", "median_norm", "raw"] = Field("unit", description="what (3) sums")
    eta_norm: Literal["none", "mean1"] = Field("none", description="mean1: divide the rates by their mean")
    weight_by: Literal["cohort", "population", "samples"] = Field("cohort", description="1/K, 1/N or by data in (3)")
    eps_norm: NonNegativeFloat = Field(1e-12, description="an update shorter than this is left out")
    clip_step: NonNegativeFloat = Field(0.0, description="largest norm of the whole step; 0: none")

    @model_validator(mode="after")
    def _is_that_reading(self) -> FedALR:
        for name, value in PRESETS[self.preset].items():
            if getattr(self, name) != value:
                fix = f"leave {name} out, or use another preset"
                raise ValueError(f"preset = '{self.preset}' is {name} = '{value}' (got '{getattr(self, name)}'): {fix}")
        return self

    @property
    def traits(self) -> Traits:
        by_size = self.weight_by == "samples"
        return super().traits._replace(each_upload=True, weighs_examples=by_size, equal_if_private=False)

    def init(self, w: Tensor) -> Server:
        return Server(
            w, torch.zeros_like(w, dtype=torch.float64), torch.zeros((), dtype=torch.float64, device=w.device)
        )

    def send(self, server: Server) -> Server:
        return Server(server.w, server.m[:0], server.t.new_empty(0))

    def update(self, server: Server, inbox: Inbox[Update]) -> Server:
        received = self.received(server, inbox)
        n = received.n
        a = {"samples": n / n.sum(), "population": n / inbox.population}.get(self.weight_by, received.share)
        step = self.server_lr * (a * received.eta * self._length(received)) @ received.unit
        if self.clip_step:
            step = step * (self.clip_step / torch.linalg.vector_norm(step).clamp(min=self.clip_step))
        moved = Server(server.w + like(step, server.w), received.m, received.t)
        return tree.tmap(lambda new, old: torch.where((n > 0).any(), new, old), moved, server)

    def received(self, server: Server, inbox: Inbox[Update]) -> Received:
        """The weight of each update, the direction after them and the rate of each."""
        dw = inbox.uploads.dw.double()
        r = torch.linalg.vector_norm(dw, dim=1)
        # An update that is too short has weight zero; removing it would wait for the GPU.
        n = inbox.weights * (r > self.eps_norm)
        often = (n > 0).to(n.dtype) if self.weight_by == "samples" else n  # a client that was drawn twice counts twice
        share, r = often / often.sum(), torch.where(n > 0, r, 1)
        unit = dw / r[:, None]
        m, t = self._remember(server, share @ (unit if self.normalise and self.momentum_input == "unit" else dw))
        direction = self._direction(server.m, server.t) if self.momentum_lag else self._direction(m, t)
        eta = self.rates(unit if self.normalise else dw / r.square()[:, None], direction, share)
        return Received(unit, r, n, share, m, t, eta)

    def diagnostics(self, before: Server, inbox: Inbox[Update], after: Server) -> dict[str, Tensor]:
        received = self.received(before, inbox)
        eta, direction = received.eta[received.n > 0], self._direction(after.m, after.t)
        if not len(eta):
            return {}
        mean = received.share[received.n > 0] @ eta
        found = {"fedalr/eta_min": eta.min(), "fedalr/eta_mean": mean, "fedalr/eta_max": eta.max()}
        return found | {"fedalr/m_norm": torch.linalg.vector_norm(direction)}

    def _length(self, received: Received) -> Tensor:
        """The norm of each term of (3)."""
        if self.apply == "unit":
            return torch.ones_like(received.r)
        if self.apply == "mean_norm":
            return (received.share @ received.r).expand_as(received.r)
        if self.apply == "median_norm":
            moved = received.share > 0
            if not bool(moved.any()):  # no client moved, and nothing is summed
                return received.r
            counts = (received.share / received.share[moved].min()).round().long()
            return received.r.repeat_interleave(counts).quantile(0.5).expand_as(received.r)
        return received.r

    def rates(self, g: Tensor, m: Tensor, share: Tensor | None = None) -> Tensor:
        """eta_i for the updates ``g`` [K, P] and the running direction ``m``; ``share`` [K]: of each in a mean."""
        s = g @ m
        if self.align == "cosine":
            s = s / torch.linalg.vector_norm(m).clamp(min=1e-12)
        if self.map == "exp":
            eta = torch.exp((s - 1) / self.temperature)
        elif self.map == "const":
            eta = torch.full_like(s, self.const_value)
        else:
            eta = s.clamp(0, 1) if self.map == "clip01" else s.clamp(min=0) if self.map == "relu" else s
        if self.eta_norm == "mean1":
            mean = eta.mean() if share is None else share @ eta
            # rates that cancel out have no scale: fall back to equal weights
            eta = torch.where(mean.abs() < 1e-8, torch.ones_like(eta), eta / mean)
        return eta

    def _remember(self, server: Server, gbar: Tensor) -> tuple[Tensor, Tensor]:
        """Eq. (7), with the estimate of the round before on its right-hand side."""
        anew = self.momentum == "none" or (self.momentum_reset_every and int(server.t) >= self.momentum_reset_every)
        m, t = (torch.zeros_like(server.m), torch.zeros_like(server.t)) if anew else (server.m, server.t)
        if self.momentum == "ema":
            return self.ema_beta * m + (1 - self.ema_beta) * gbar, t + 1
        return gbar / (t + 1) + m * (t / (t + 1)), t + 1

    def _direction(self, m: Tensor, t: Tensor) -> Tensor:
        """The estimate that (6) uses: an exponential mean is corrected for having started at zero."""
        return m / (1 - self.ema_beta**t).clamp(min=1e-12) if self.momentum == "ema" else m
