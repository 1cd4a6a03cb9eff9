"""FedALA: each client starts its round from a learned interpolation between its own model and the server's.

Zhang et al., FedALA: Adaptive Local Aggregation for Personalized Federated Learning, AAAI 2023.

    v_k: the client's model at the end of its last round;  w: the server's;  top: the last `layers` layers
    ALA:       x = v_k + (w - v_k) * W_k  on top (element by element, 0 <= W_k <= 1),  x = w  below
               W_k <- clip(W_k - eta * grad_x F_k(x) * (w - v_k), 0, 1)  over a share of the client's data,
               pass after pass until the loss is steady the first time, and one pass in later rounds
    client k:  x <- SGD(x; D_k);   v_k <- x               upload  x - w
    server:    as FedAvg
    users:     predict with x after ALA, before training (``personal/pre_fit``); the other reading, x after training,
               is evaluated with ``evaluate.participants`` (``participants/post_fit``)

In a client's first round there is no v_k and it starts from w. W_k stays with the client and is learned with
plain steps, whatever the local optimizer. It changes little, so its start decides what the method is:
w_init = 1 begins as FedAvg, w_init = 0 with all layers is close to local training only. ``profile = "reference"``
is the authors' (1, 80 % of the data, the last layer, one pass in later rounds), ``profile = "paper"`` what the paper on
pFedALA states (0, 1 % of the data, all layers, and W updated "once" in later rounds, which is one batch). In simulated
time every round counts one pass of ALA, or one batch: the length of the start phase is known only after it has run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor

from fedloom.algorithm import (
    Adapts,
    Algorithm,
    Carry,
    Configures,
    HasPhases,
    Model,
    Phase,
    TrainsParts,
    Traits,
    Update,
    Weighting,
    Work,
)
from fedloom.core.schema import other_than, when
from fedloom.core.task import Batch

_PAPER = {"w_init": 0.0, "sample_percent": 1.0, "layers": "all", "later_passes": "step"}

_WORKS = when(layers=other_than("none"))


class Mine(NamedTuple):
    v: Tensor  # [P] the client's model at the end of its last round
    W: Any  # [q] the share of the server's model, on top; () if ALA has no layers
    seen: Tensor  # [] 1 if there is a v
    started: Tensor  # [] 1 after the start phase


class Walk(NamedTuple):
    w: Tensor  # [P] what is trained
    W: Any  # [q]
    loss: Tensor  # [] of the last batch
    losses: Tensor  # [window] at the ends of the last passes
    passes: Tensor  # [] of ALA so far in this round


class FedALA(Algorithm[Model, Mine, Update], HasPhases, Adapts, TrainsParts, Configures):
    family = "personal"
    fedavg_when = {"w_init": 1.0, "eta": 0.0}
    presets = {"profile": {"paper": _PAPER}}

    profile: Annotated[Literal["reference", "paper"], _WORKS] = Field(
        "reference", description="a named set of settings: see above"
    )
    w_init: Annotated[float, _WORKS] = Field(
        1.0, ge=0, le=1, description="initial W: 1 is the server's model, 0 the client's own"
    )
    layers: PositiveInt | Literal["all", "none"] = Field(1, description="number of last layers that ALA applies to")
    sample_percent: Annotated[float, _WORKS] = Field(
        80.0, gt=0, le=100, description="share of a client's data for ALA; at least a batch"
    )
    eta: Annotated[NonNegativeFloat, _WORKS] = Field(1.0, description="learning rate of W")
    threshold: Annotated[PositiveFloat, _WORKS] = Field(
        0.1, description="standard deviation of the last losses at which the start phase ends"
    )
    window: Annotated[PositiveInt, _WORKS] = Field(
        10, ge=2, description="number of these losses; the phase has one pass more"
    )
    max_start_passes: Annotated[PositiveInt, _WORKS] = Field(100, description="most passes of the start phase")
    later_passes: Annotated[Literal["epoch", "step"], _WORKS] = Field(
        "epoch", description="ALA after that: one pass, or one batch"
    )
    sampling: Annotated[Literal["draw", "block"], _WORKS] = Field(
        "draw", description="ALA's data is drawn, or a block in stored order"
    )
    model_mode: Annotated[Literal["train", "eval"], _WORKS] = Field(
        "train", description="mode of dropout and BatchNorm during ALA"
    )
    weighting: Weighting = "samples"

    @property
    def traits(self) -> Traits:
        return super().traits.weighted_by(self.weighting, distinct=True)

    def defaults(self) -> Mapping[str, Mapping[str, Any]]:
        return {"local": {"state": "persist"}}

    @property
    def low(self) -> int:
        """How many parameters are below ALA's layers."""
        return self.task.below(self.layers)

    def join(self, down: Model) -> Mine:
        top, zero = down.w[self.low :], torch.zeros_like(down.w[0])
        return Mine(torch.zeros_like(down.w), torch.full_like(top, self.w_init) if len(top) else (), zero, zero)

    def start(self, down: Model, mine: Mine, work: Work) -> Walk:
        zero = torch.zeros_like(mine.seen)
        return Walk(self.between(mine.W, down, mine), mine.W, zero, zero.expand(self.window), zero)

    def between(self, W: Any, down: Model, mine: Mine) -> Tensor:
        """The server's model below, and the interpolation by ``W`` on top; torch.lerp is exact where W is 0 or 1."""
        own, low = torch.where(mine.seen > 0, mine.v, down.w), self.low
        return torch.cat((down.w[:low], torch.lerp(own[low:], down.w[low:], W))) if low < len(own) else down.w

    # -- ALA ----------------------------------------------------------------------------------------
    def ala(self) -> tuple[Phase, ...]:
        if self.low == self.task.size:
            return ()
        share, each = self.sample_percent / 100, (1 + 2 * self.task.work_above(self.low)) / 3
        whole = Phase(
            self.aggregate,
            name="ala",
            epochs=1,
            share=share,
            sampling=self.sampling,
            repeat=True,
            passes=self.ala_passes,
            after=self.settled,
            leave=self.arrived,
            keeps_statistics=False,
            cost=share * each,  # backward costs two forwards, on top only
        )
        if self.later_passes == "epoch":
            return (whole,)
        first = whole._replace(passes=self.start_passes, rare=True)
        return first, whole._replace(epochs=None, steps=1, passes=self.later_steps, cost=each)

    def ala_passes(self, mine: Mine, work: Work) -> Tensor:
        """None in a client's first round, until convergence in its second, and one afterwards."""
        return self.start_passes(mine, work) + self.later_steps(mine, work)

    def start_passes(self, mine: Mine, work: Work) -> Tensor:
        """``max_start_passes`` at most, in a client's second round."""
        return mine.seen * (1 - mine.started) * self.max_start_passes

    def later_steps(self, mine: Mine, work: Work) -> Tensor:
        """One, after that."""
        return mine.seen * mine.started

    def aggregate(self, at: Carry, batch: Batch, down: Model, mine: Mine) -> Carry:
        """One step of W along the gradient of the loss at its interpolation."""
        low, x = self.low, at.x
        own, theirs = mine.v[low:], down.w[low:]  # only these are used: the layers below stay the server's
        training = self.model_mode == "train"
        loss, g = self.task.evaluate_and_differentiate(
            lambda top: self.task.loss((down.w[:low], top), batch, training=training), torch.lerp(own, theirs, x.W)
        )
        W = (x.W - self.eta * g * (theirs - own)).clamp(0, 1)
        return at._replace(x=x._replace(W=W, loss=loss))

    def settled(self, at: Carry, seen: Any, down: Model, mine: Mine, work: Work) -> tuple[Carry, Tensor]:
        """Whether the loss at the ends of the last passes is steady."""
        passes = at.x.passes + 1
        losses = torch.cat((at.x.losses[1:], at.x.loss[None]))
        steady = (passes > self.window) & (losses.std(correction=0) < self.threshold)
        return at._replace(x=at.x._replace(losses=losses, passes=passes)), steady

    def arrived(self, at: Carry, down: Model, mine: Mine) -> Carry:
        """Start local training from the interpolation by the current W."""
        return at._replace(x=at.x._replace(w=self.between(at.x.W, down, mine)))

    # -- the round ------------------------------------------------------------------------------------
    def phases(self) -> tuple[Phase, ...]:
        return (*self.ala(), Phase(self.step))

    def adaptation(self) -> tuple[Phase, ...]:
        return self.ala()

    def step(self, at: Carry, batch: Batch, down: Model, mine: Mine) -> Carry:
        g = self.task.grad(at.x.w, batch)
        w, memory = self.optimizer.update(g, at.memory, at.x.w, batch.lr)
        return Carry(at.x._replace(w=w), memory)

    def finish(self, x: Walk, down: Model, mine: Mine, work: Work) -> tuple[Update, Mine]:
        return Update(x.w - down.w), Mine(x.w, x.W, torch.ones_like(mine.seen), mine.seen)

    def serve(self, down: Model, mine: Mine) -> Tensor:
        return self.between(mine.W, down, mine)
