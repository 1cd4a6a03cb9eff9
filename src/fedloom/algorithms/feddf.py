"""FedDF: the server distils the ensemble of the clients' models into their mean.

Lin et al., Ensemble Distillation for Robust Model Fusion in Federated Learning, NeurIPS 2020, Algorithm 1.

    client k:  as FedAvg
    server:    w <- FedAvg's mean;   z(x) = (1 / K) sum_k f(x; w_k)  on the server's own, unlabelled x
               w <- Adam on  KL( softmax(z / T) || softmax(f(x; w) / T) )

All teachers have equal weights. Labels of the server's examples are not used: the student that is kept is the one
closest to its teachers on a held-out share of the examples. The authors' own schedule is ``cosine``
over many epochs with ``patience``; FedLAW's code distils with ``rule = "sgd"``, lr 0.08, decay 0.99,
momentum 0.9 and weight_decay 5e-4.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

import torch
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor
from torch.nn.functional import log_softmax

from fedloom.algorithm import Inbox, Model, Setup, Traits, Update, UsesProxy
from fedloom.algorithms.fedavg import FedAvg
from fedloom.core.schema import over, when
from fedloom.maths.distill import Lessons, averaged, best_student, logits, refuse_statistics, student_optimizer

_TEACHES = when(epochs=over(0))


class FedDF(FedAvg, UsesProxy):
    fedavg_when = {"epochs": 0}

    epochs: NonNegativeInt = Field(20, description="most passes of the student over the server's examples")
    batch: Annotated[PositiveInt, _TEACHES] = Field(128, description="examples in a step of the student")
    temperature: Annotated[PositiveFloat, _TEACHES] = Field(
        1.0, description="T: the larger, the softer the predictions of teachers and student"
    )
    rule: Annotated[Literal["adam", "sgd"], _TEACHES] = Field("adam", description="the student's optimizer")
    lr: Annotated[PositiveFloat, _TEACHES] = Field(1e-3, description="of the student")
    decay: Annotated[float, _TEACHES] = Field(1.0, gt=0, le=1, description="factor of lr per round")
    schedule: Annotated[Literal["constant", "cosine"], _TEACHES] = Field(
        "constant", description="of lr over the steps of a round"
    )
    momentum: Annotated[float, when(epochs=over(0), rule="sgd")] = Field(0.0, ge=0, lt=1, description="of sgd")
    weight_decay: Annotated[NonNegativeFloat, _TEACHES] = Field(0.0, description="weight decay of the student")
    held_out: Annotated[float, _TEACHES] = Field(
        0.1, ge=0, lt=1, description="share of the server's examples that select the best student; 0 keeps the last"
    )
    patience: Annotated[PositiveInt | None, when(epochs=over(0), held_out=over(0))] = Field(
        None, description="epochs without a gain after which the student stops"
    )

    @property
    def traits(self) -> Traits:
        return super().traits._replace(each_upload=True, classes_only="distils probabilities of classes")

    def bind(self, setup: Setup) -> Self:
        refuse_statistics(setup.task)
        return super().bind(setup)

    def update(self, server: Model, inbox: Inbox[Update]) -> Model:
        student = super().update(server, inbox)
        if not self.epochs:
            return student
        x, address = self.proxy.x, inbox.address
        z = averaged((logits(self.task, server.w + dw, x) for dw in inbox.uploads.dw), self._voices(inbox))
        target = log_softmax(z / self.temperature, -1)
        how = self._lessons(address[1])
        w = best_student(self.task, student.w, x, target, how, address, held_out=self.held_out, patience=self.patience)
        return Model(w)

    def _voices(self, inbox: Inbox[Update]) -> list[float]:
        """A client that was drawn twice counts twice; how much data it has does not matter."""
        voices: Tensor = torch.ones_like(inbox.weights) if self.traits.weighs_examples else inbox.weights
        return [float(voice) for voice in voices]

    def _lessons(self, round_: int) -> Lessons:
        rule = student_optimizer(self.rule, self.momentum, self.weight_decay)
        return Lessons(rule, self.lr * self.decay**round_, self.epochs, self.batch, self.temperature, self.schedule)
