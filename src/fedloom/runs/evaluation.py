"""The lines of metrics.jsonl."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from fedloom.core.errors import DivergedError
from fedloom.core.vocabulary import is_evaluation
from fedloom.engine.divergence import names_of, rate
from fedloom.engine.evaluate import evaluate
from fedloom.engine.state import Experiment, RunState
from fedloom.engine.store import ClientStore


def evaluation_line(
    exp: Experiment,
    state: RunState,
    store: ClientStore,
    excluded: tuple[int, ...] = (),
    found: Mapping[str, float] = MappingProxyType({}),
) -> dict[str, Any]:
    """The line of an evaluation, with what was ``found`` during the round."""
    metrics = evaluate(exp, state, store)
    bad = ", ".join(name for name, value in (metrics | dict(found)).items() if not math.isfinite(value))
    if bad:
        before = max(0, state.round - 1)
        ids = exp.present(before).drawn.ids.tolist()
        what = f"the evaluation is not finite ({bad}); clients of the round: {names_of(ids)}"
        raise DivergedError(f"round {state.round}: {what}; {rate(exp, before)}")
    line = {
        "round": state.round,
        **metrics,
        "bytes/up": state.up,
        "bytes/down": state.down,
        "bytes/busiest": state.busiest,
        "work/gradients": state.gradients,
        "time/simulated": state.seconds,
        **_spent(exp, state),
    }
    # JSON cannot express a number that is not finite, such as the time of a device that is infinitely slow.
    line = {name: value for name, value in line.items() if math.isfinite(value)}
    return line | dict(found) | ({"excluded": list(excluded)} if excluded else {})


def _spent(exp: Experiment, state: RunState) -> dict[str, float]:
    """Epsilon up to this round, if uploads are private; at the end, later rounds that were undone are included."""
    if exp.guard is None or state.ledger is None:
        return {}
    before = exp.guard.spent if state.round == exp.rounds else 0.0
    return {exp.guard.metric: max(state.ledger.epsilon(), before)}


def lines_of(
    exp: Experiment, state: RunState, store: ClientStore, excluded: tuple[int, ...], found: dict[str, float]
) -> list[dict[str, Any]]:
    """What is recorded of a round: its evaluation, or only the excluded clients, or nothing.

    Where a run ends between two evaluations, its last evaluation has a separate line, which is removed
    if the run continues.
    """
    if state.round % exp.evaluate.every == 0:
        return [evaluation_line(exp, state, store, excluded, found)]
    lines: list[dict[str, Any]] = [{"round": state.round, "excluded": list(excluded)}] if excluded else []
    if exp.evaluate.due(state.round, exp.rounds):
        lines.append(evaluation_line(exp, state, store, (), found))
    return lines


def evaluates(line: dict[str, Any], round_: int) -> bool:
    """Whether a line is the evaluation after this round."""
    return line["round"] == round_ and is_evaluation(line)
