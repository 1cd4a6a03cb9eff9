"""The section [evaluate]: when a run is evaluated, and what is measured."""

from __future__ import annotations

from typing import Literal, TypeAlias

from pydantic import Field, PositiveFloat, PositiveInt

from fedloom.core.metrics import Auc
from fedloom.core.schema import Spec

Diagnostic: TypeAlias = Literal[
    "updates", "gamma", "dissimilarity", "rho", "hessian", "hessian_weights", "variance", "weights"
]


class Evaluate(Spec):
    """When and on whom a run is judged."""

    every: PositiveInt = Field(1, description="rounds between evaluations; the last round is always evaluated")
    personal: bool = Field(True, description="judge each client's model on its own held-out rows, where it has any")
    clients: PositiveInt | None = Field(None, description="judge at most so many clients, the same in every round")
    diagnostics: tuple[Diagnostic, ...] = Field(
        (), description="what else to measure of a round: see docs/diagnostics.md"
    )
    work: bool = Field(False, description="also write work.jsonl: who took part in each round, and what each did")
    train: bool = Field(False, description="also measure the server's model on all training rows")
    flatness: PositiveFloat | None = Field(
        None,
        description="also measure how flat the training loss is within this radius: R0 and R1, docs/diagnostics.md",
    )
    auc: tuple[Auc, ...] = Field(
        (), description="also measure the area under the ROC curve, in these variants: see docs/run-folder.md"
    )
    nodes: PositiveInt | None = Field(
        None, description="judge at most so many nodes of a network on the common test set; unset: as clients says"
    )
    pre_mix: bool = Field(
        True, description="judge the nodes of a network also before they mix, in rounds that are judged"
    )
    participants: bool = Field(
        False,
        description="also judge the clients of a round on their own rows just before and just after their training",
    )

    def due(self, round_: int, rounds: int) -> bool:
        """Whether the run is judged after so many rounds."""
        return round_ % self.every == 0 or round_ == rounds
