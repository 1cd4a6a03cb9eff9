"""FedBE: the server samples models from a posterior around its clients' and distils the ensemble into their mean.

Chen and Chao, FedBE: Making Bayesian Model Ensemble Applicable to Federated Learning, ICLR 2021, Algorithm 1.

    client k:   as FedAvg
    server:     m = sum_k a_k w_k,  FedAvg's mean
                gaussian:   w ~ N(m, diag sum_k a_k (w_k - m)^2)
                dirichlet:  w = sum_k pi_k w_k,  pi ~ Dir(concentration, ...)
                teachers E = {m}, the w_k and ``samples`` draws;   p(x) = (1 / |E|) sum_E softmax f(x; w)
                p <- p^(1 / T) / sum,  sharper for T < 1
                w <- mean of the points that SGD visits from m on  KL(p || softmax f(x; w))  (SWA)

on the server's own, unlabelled x. ``sampling = "normalised"`` is the Gaussian of the authors' code: for each tensor the
unit updates u_k, their mean plus ``spread`` times their standard deviation times noise, scaled to the mean norm of the
updates. FedLAW's code has one sample, ``voice = "logits"`` and no SWA.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator
from torch import Tensor
from torch.nn.functional import log_softmax

from fedloom.algorithm import Inbox, Model, Setup, Traits, Update, UsesProxy, like
from fedloom.algorithms.fedavg import FedAvg
from fedloom.core import rng
from fedloom.core.schema import over, when
from fedloom.maths.distill import Lessons, averaged, last_student, logits, refuse_statistics, student_optimizer, swa

_VARIANCE = 1e-5  # least variance of unit updates, as in the authors' code

_TEACHES = when(epochs=over(0))
_DRAWS = when(epochs=over(0), samples=over(0))
_GAUSSIAN = when(epochs=over(0), samples=over(0), posterior="gaussian")
_NORMALISED = when(epochs=over(0), samples=over(0), posterior="gaussian", sampling="normalised")
_DIRICHLET = when(epochs=over(0), samples=over(0), posterior="dirichlet")
_SWA = when(epochs=over(0), swa=True)


class FedBE(FedAvg, UsesProxy):
    fedavg_when = {"epochs": 0}

    posterior: Annotated[Literal["gaussian", "dirichlet"], _DRAWS] = Field(
        "gaussian", description="the distribution that models are drawn from"
    )
    samples: Annotated[NonNegativeInt, _TEACHES] = Field(10, description="number of models drawn in a round")
    sampling: Annotated[Literal["plain", "normalised"], _GAUSSIAN] = Field(
        "plain", description="of the Gaussian; normalised: the code's"
    )
    spread: Annotated[NonNegativeFloat, _NORMALISED] = Field(
        0.1, description="of normalised sampling, in standard deviations"
    )
    concentration: Annotated[PositiveFloat, _DIRICHLET] = Field(
        1.0, description="of the Dirichlet; the larger, the nearer to the mean"
    )
    centre: Annotated[Literal["alike", "share"], _DIRICHLET] = Field(
        "alike", description="the Dirichlet's mean: equal, or by weight"
    )
    with_mean: Annotated[bool, _TEACHES] = Field(True, description="the mean model is a teacher, too")
    with_clients: Annotated[bool, _TEACHES] = Field(True, description="the clients' models are teachers, too")
    voice: Annotated[Literal["probabilities", "logits"], _TEACHES] = Field(
        "probabilities", description="which outputs of the teachers are averaged"
    )
    temperature: Annotated[PositiveFloat, _TEACHES] = Field(
        0.5, description="T: below 1 it sharpens the teachers' predictions"
    )
    epochs: NonNegativeInt = Field(20, description="passes of the student over the server's examples")
    batch: Annotated[PositiveInt, _TEACHES] = Field(128, description="examples in a step of the student")
    lr: Annotated[PositiveFloat, _TEACHES] = Field(1e-3, description="of the student")
    momentum: Annotated[float, _TEACHES] = Field(0.9, ge=0, lt=1, description="of the student")
    weight_decay: Annotated[NonNegativeFloat, _TEACHES] = Field(1e-5, description="weight decay of the student")
    swa: Annotated[bool, _TEACHES] = Field(
        True, description="use the average of the student's trajectory (SWA), not its end"
    )
    swa_start: Annotated[NonNegativeInt, _SWA] = Field(
        500, description="first step of the average; at the latest half-way"
    )
    swa_every: Annotated[PositiveInt, _SWA] = Field(25, description="steps between the points that are averaged")

    @model_validator(mode="after")
    def _somebody_teaches(self) -> FedBE:
        if not (self.samples or self.with_mean or self.with_clients):
            raise ValueError("there is no teacher: samples = 0, with_mean and with_clients are false")
        return self

    @property
    def traits(self) -> Traits:
        return super().traits._replace(each_upload=True, classes_only="averages probabilities of classes")

    def bind(self, setup: Setup) -> Self:
        refuse_statistics(setup.task)
        return super().bind(setup)

    def update(self, server: Model, inbox: Inbox[Update]) -> Model:
        mean = super().update(server, inbox)
        if not self.epochs:
            return mean
        x, address = self.proxy.x, inbox.address
        target = self.target(self.teachers(server.w, mean.w, inbox), x)
        rule = student_optimizer("sgd", self.momentum, self.weight_decay)
        how = Lessons(rule, self.lr, self.epochs, self.batch)
        if not self.swa:
            return Model(last_student(self.task, mean.w, x, target, how, address))
        return Model(swa(self.task, mean.w, x, target, how, address, start=self.swa_start, every=self.swa_every))

    def teachers(self, w: Tensor, mean: Tensor, inbox: Inbox[Update]) -> Iterator[Tensor]:
        """Every model of the ensemble, one after another; ``w`` is where the clients started."""
        if self.with_mean:
            yield mean
        if self.with_clients:
            yield from (w + dw for dw in inbox.uploads.dw)
        draw = self._from_dirichlet if self.posterior == "dirichlet" else self._from_gaussian
        yield from draw(w, inbox)

    def target(self, teachers: Iterator[Tensor], x: Tensor) -> Tensor:
        """The ensemble's prediction, as log-probabilities.  ``[n, classes]``"""
        said = (logits(self.task, w, x) for w in teachers)
        if self.voice == "logits":
            together = averaged(said)
        else:
            # Below the smallest positive float32, a probability and its logarithm would be lost.
            together = averaged(log_softmax(z.double(), -1).exp() for z in said).log()
        return log_softmax(together / self.temperature, -1)

    def _from_gaussian(self, w: Tensor, inbox: Inbox[Update]) -> Iterator[Tensor]:
        centre, sd = self._unit_moves(inbox.uploads.dw) if self.sampling == "normalised" else self._moves(inbox)
        for sample in range(self.samples):
            yield w + like(centre, w) + like(sd, w) * self._noise(w, inbox, sample)

    def _moves(self, inbox: Inbox[Update]) -> tuple[Tensor, Tensor]:
        """Weighted mean and standard deviation of the clients' updates.  ``[P]`` both"""
        off = inbox.uploads.dw.double() - inbox.mean.dw
        return inbox.mean.dw, ((inbox.weights / inbox.weight) @ off.square()).sqrt()

    def _unit_moves(self, dw: Tensor) -> tuple[Tensor, Tensor]:
        """The same for their directions, tensor by tensor, scaled to the mean norm of the updates."""
        parts = []
        for moves in torch.split(dw, [math.prod(shape) for shape in self.task.layout.values()], dim=1):
            norms = torch.linalg.vector_norm(moves, dim=1, keepdim=True)
            unit = moves / torch.where(norms > 0, norms, torch.ones_like(norms))
            sd = unit.var(0, correction=0).clamp(min=_VARIANCE).sqrt()
            parts.append((unit.mean(0) * norms.mean(), self.spread * sd * norms.mean()))
        means, spreads = zip(*parts, strict=True)
        return torch.cat(means), torch.cat(spreads)

    def _from_dirichlet(self, w: Tensor, inbox: Inbox[Update]) -> Iterator[Tensor]:
        count = len(inbox.weights)
        share = torch.full((count,), 1 / count) if self.centre == "alike" else inbox.weights / inbox.weights.sum()
        for sample in range(self.samples):
            drawn = self._stream(inbox, sample).dirichlet((self.concentration * count * share).cpu().numpy())
            yield w + like(torch.from_numpy(drawn).to(w.device) @ inbox.uploads.dw.double(), w)

    def _noise(self, w: Tensor, inbox: Inbox[Update], sample: int) -> Tensor:
        return torch.from_numpy(self._stream(inbox, sample).standard_normal(len(w))).to(w)

    def _stream(self, inbox: Inbox[Update], sample: int) -> Any:
        seed, round_ = inbox.address
        return rng.stream(seed, "posterior", round_, sample)
