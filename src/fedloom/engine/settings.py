"""The section [evaluate]: when a run is evaluated, and what is measured."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, PositiveFloat, PositiveInt, field_validator

from fedloom.core import usercode
from fedloom.core.metrics import Auc, is_taken, measure_name
from fedloom.core.own_function import named_or_own
from fedloom.core.quality import MEASURED
from fedloom.core.schema import Spec, other_than, when, worded

Diagnostic: TypeAlias = Literal[
    "updates", "gamma", "dissimilarity", "rho", "hessian", "hessian_weights", "variance", "weights"
]

_NETWORK = {"algorithm.family": worded("gossip", "the algorithm has no server", "this one has a server")}
_SERVER = {"algorithm.family": worded(other_than("gossip"), "the algorithm has a server", "this one has none")}
_GLOBAL = {
    "algorithm.has_global_model": worded(True, "the server has a model", "there is no model common to all clients")
}


class Evaluate(Spec):
    """When a run is evaluated, and on which clients."""

    every: PositiveInt = Field(1, description="rounds between evaluations; the last round is always evaluated")
    validation: float = Field(
        0.0,
        ge=0.0,
        lt=1.0,
        description="share of each client's training rows reserved for the metrics .../validation/...",
    )
    personal: bool = Field(True, description="evaluate each client's model on its own held-out rows, if it has any")
    clients: Annotated[PositiveInt | None, when(personal=True) | when(_NETWORK, nodes=None)] = Field(
        None, description="evaluate at most this many clients, the same in every round"
    )
    diagnostics: Annotated[tuple[Diagnostic, ...], when(_SERVER)] = Field(
        (), description="what else to measure in a round: see docs/diagnostics.md"
    )
    work: bool = Field(False, description="also write work.jsonl: the clients of each round and the work of each")
    train: Annotated[bool, when(_SERVER | _GLOBAL)] = Field(
        False, description="also measure the server's model on all training rows"
    )
    flatness: PositiveFloat | None = Field(
        None,
        description="also measure how flat the training loss is within this radius: R0 and R1, docs/diagnostics.md",
    )
    auc: tuple[Auc, ...] = Field(
        (), description="also measure the area under the ROC curve, in these variants: see docs/run-folder.md"
    )
    metrics: tuple[str, ...] = Field(
        (),
        description="also measure, of classes: balanced_accuracy, f1_macro, auc, brier, ece; "
        "in regression, mae, rmse and r2 are always measured; or your own, as file.py:function, which is given the "
        "outputs [n, C] and y [n] of all rows that are evaluated together and returns a number",
    )
    nodes: Annotated[PositiveInt | None, when(_NETWORK)] = Field(
        None,
        description="evaluate at most this many nodes of a network on the common test set; unset: as set in clients",
    )
    pre_mix: Annotated[bool, when(_NETWORK)] = Field(
        True, description="also evaluate the nodes of a network before they mix, in rounds that are evaluated"
    )
    participants: bool = Field(
        False,
        description="also evaluate the clients of a round on their own rows, just before and just after training",
    )

    @field_validator("metrics", mode="before")
    @classmethod
    def _a_matrix_is_no_metric(cls, names: Any) -> Any:
        if isinstance(names, list | tuple) and "confusion" in names:
            why = "the confusion matrix of the common model needs no setting: it is written to confusion.json"
            raise ValueError(why)
        return names

    @field_validator("metrics")
    @classmethod
    def _are_measures(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if usercode.is_reference(named_or_own(name, MEASURED, "metric")) and is_taken(measure_name(name)):
                raise ValueError(f"'{measure_name(name)}' is a metric of fedloom: rename the function of '{name}'")
        recorded = [measure_name(name) for name in dict.fromkeys(names)]
        if twice := [name for name in recorded if recorded.count(name) > 1]:
            raise ValueError(f"two of them would be recorded as '{twice[0]}': rename one")
        return names

    def due(self, round_: int, rounds: int) -> bool:
        """Whether the run is evaluated after this round."""
        return round_ % self.every == 0 or round_ == rounds
