"""Comparisons on equal terms: the number of rounds in which a method spends as much as another one."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from fedloom.compare.grid import labels_named
from fedloom.compare.plan import ComparisonPlan
from fedloom.core.errors import ConfigError, Fault
from fedloom.data.arrays import Arrays
from fedloom.engine.forecast import Spent, forecast
from fedloom.engine.state import Experiment
from fedloom.report.comparison.question import Equal, Place
from fedloom.runs.prepare import load_data, prepare
from fedloom.runs.settings import Config, hash_of

MOST_ROUNDS = 1_000_000  # a method that spends so little that it would need more rounds is refused


class Terms(NamedTuple):
    """What a method may spend at each point of the grid, and the rounds that this allows."""

    budgets: Mapping[Place, float]
    rounds: Mapping[tuple[Place, str], int]  # of each method


def equalised(planned: ComparisonPlan, root: Path) -> ComparisonPlan:
    """The comparison with the rounds that each method may spend; this needs the data."""
    return planned if planned.spec.equal == "rounds" else on_terms(planned, terms_of(planned, root))


def on_terms(planned: ComparisonPlan, terms: Terms) -> ComparisonPlan:
    """The comparison with these rounds, and with intervals at which all methods are evaluated equally often."""
    every = _intervals(planned, terms)
    cells = [
        cell.with_config(stretched(cell.config, terms.rounds[spot], every[spot]))
        for cell in planned.cells
        for spot in [(cell.place, cell.method.label)]
    ]
    return planned._replace(
        cells=tuple(cells), budgets=terms.budgets, notes=(*planned.notes, *_counted_at_most(planned))
    )


def _counted_at_most(planned: ComparisonPlan) -> list[str]:
    """Which methods may spend less than the budget, since only training shows how much they send."""
    cut = [cell.method.label for cell in planned.cells if cell.config.algorithm.traits.size_varies]
    if not cut or planned.spec.equal not in ("bytes", "busiest"):
        return []
    return [f"the upload size of {', '.join(dict.fromkeys(cut))} is an upper bound; it may send less"]


def terms_of(planned: ComparisonPlan, root: Path) -> Terms:
    """The rounds that each method may spend, counted from the data.

    The first seed decides the rounds for all seeds, so that all of them have the same number.
    """
    spec = planned.spec
    forecaster, first = Forecaster(root), spec.seeds[0]
    reference = labels_named(spec.reference, planned.methods)[0] if spec.reference else planned.baseline
    samples = {(cell.place, cell.method.label): cell.config for cell in planned.cells if cell.seed == first}
    budgets, rounds = {}, {}
    for place in planned.places:
        budget = budgets[place] = spec.budget or forecaster.cost(samples[place, reference], spec.equal)
        if not budget:
            what = f"{reference} spends no {spec.equal}, so it cannot set the budget"
            raise ConfigError([Fault("compare.reference", what, "name another, or set compare.budget")])
        for method in planned.methods:
            rounds[place, method.label] = forecaster.rounds(samples[place, method.label], spec.equal, budget)
    return Terms(budgets, rounds)


# -- recorded, so that results can be read without the data ------------------------------------------
def terms_text(planned: ComparisonPlan, terms: Terms) -> str:
    """The terms of this comparison as JSON."""
    kept = {
        "comparison": _asked(planned),
        "budgets": [[list(place), budget] for place, budget in terms.budgets.items()],
        "rounds": [[list(place), label, count] for (place, label), count in terms.rounds.items()],
    }
    return json.dumps(kept, indent=1) + "\n"


def kept_terms(planned: ComparisonPlan, texts: Iterable[str | bytes]) -> Terms | None:
    """The terms of this comparison, if one of these texts has them."""
    for text in texts:
        try:
            kept: dict[str, Any] = json.loads(text)
            if kept["comparison"] != _asked(planned):
                continue
            budgets = {tuple(place): float(budget) for place, budget in kept["budgets"]}
            rounds = {(tuple(place), label): int(count) for place, label, count in kept["rounds"]}
        except (ValueError, TypeError, KeyError):
            continue
        if set(rounds) == {(cell.place, cell.method.label) for cell in planned.cells}:
            return Terms(budgets, rounds)
    return None


def _asked(planned: ComparisonPlan) -> str:
    """What determines the terms: the cells of the first seed before any round is added, and what is equal."""
    spec, first = planned.spec, planned.spec.seeds[0]
    cells = [[list(c.place), c.method.label, c.hash] for c in planned.cells if c.seed == first]
    return hash_of({"cells": cells, "equal": spec.equal, "reference": spec.reference, "budget": spec.budget})


class Forecaster:
    """Prepares experiments to forecast what they will spend; the data set of the last one is kept for the next."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._read: tuple[tuple[str, int], Arrays] | None = None

    def prepared(self, config: Config) -> Experiment:
        """The experiment on a CPU, on whatever device it will run: nothing is trained here."""
        key = (repr((config.kinds["data"], config.data, config.task.is_regression)), config.basics.seed)
        if self._read is None or self._read[0] != key:
            self._read = key, load_data(config, self._root)
        here = config.engine.model_copy(update={"device": "cpu", "threads": None})
        return prepare(config._replace(engine=here), self._root, self._read[1]).experiment

    def cost(self, config: Config, equal: Equal) -> float:
        """What a run of this configuration will spend."""
        return amount(next(islice(forecast(self.prepared(config)), config.basics.rounds - 1, None)), equal)

    def rounds(self, config: Config, equal: Equal, budget: float) -> int:
        """The rounds in which a run of this configuration spends at most ``budget``, but at least one.

        A run that spends none of it keeps its rounds.
        """
        for spent in forecast(self.prepared(config)):
            here = amount(spent, equal)
            if here > budget * (1 + 1e-9):
                return max(1, spent.rounds - 1)
            if spent.rounds >= config.basics.rounds and here == 0:
                return config.basics.rounds
            if spent.rounds == MOST_ROUNDS:
                what = f"{budget:g} {equal} would take {config.kinds['algorithm']} more than {MOST_ROUNDS:,} rounds"
                raise ConfigError([Fault("compare.budget", what, "use fewer rounds, or a smaller budget")])
        raise AssertionError("a forecast has no end")


def amount(spent: Spent, equal: Equal) -> float:
    """How much was spent, bytes in MB."""
    value = float(getattr(spent, equal))
    return value / 1e6 if equal in ("bytes", "busiest") else value


def stretched(config: Config, rounds: int, every: int) -> Config:
    """The run with this number of rounds, its learning rate over the same range, evaluated every so many rounds."""
    if (rounds, every) == (config.basics.rounds, config.evaluate.every):
        return config
    ratio, local = rounds / config.basics.rounds, config.local
    rate = {"exponential": {"decay": local.decay ** (1 / ratio)},
            "step": {"step_every": max(1, round(local.step_every * ratio))}}.get(local.schedule, {})  # fmt: skip
    return config._replace(
        basics=config.basics.model_copy(update={"rounds": rounds}),
        local=local.model_copy(update=rate),
        evaluate=config.evaluate.model_copy(update={"every": every}),
    )


def _intervals(planned: ComparisonPlan, terms: Terms) -> dict[tuple[Place, str], int]:
    """The interval of evaluations of each method, so that all at a point of the grid have equally many."""
    found: dict[tuple[Place, str], int] = {}
    for place in planned.places:
        here = {cell.method.label: cell.config for cell in planned.cells if cell.place == place}
        rounds = [terms.rounds[place, label] for label in here]
        wanted = min(_evaluations(c.basics.rounds, c.evaluate.every) for c in here.values())
        every = equally_often(rounds, wanted)
        found |= {(place, label): own for label, own in zip(here, every, strict=True)}
    return found


def equally_often(rounds: Sequence[int], wanted: int) -> list[int]:
    """Intervals at which runs of these rounds are evaluated as often as each other, and at most ``wanted`` times.

    No run can be evaluated more often than it has rounds, so the shortest one decides. Intervals are whole rounds, so
    numbers may differ; up to half of the evaluations are given up for numbers that differ by no more than a tenth.
    """
    most = min(wanted, *rounds)
    choices = [[_interval(each, count) for each in rounds] for count in range(most, math.ceil(most / 2) - 1, -1)]

    def unevenness(every: Sequence[int]) -> float:
        counts = [_evaluations(*each) for each in zip(rounds, every, strict=True)]
        return max(1.1, max(counts) / min(counts))

    return min(choices, key=unevenness)


def _interval(rounds: int, count: int) -> int:
    """The interval at which a run is evaluated nearly ``count`` times; of two that are as near, the shorter."""
    near = rounds / count
    return min((max(1, math.floor(near)), math.ceil(near)), key=lambda every: abs(_evaluations(rounds, every) - count))


def _evaluations(rounds: int, every: int) -> int:
    """How often a run is evaluated once training has begun: after its last round, too."""
    return math.ceil(rounds / every)
