"""Comparisons on equal terms: how many rounds a method has for what another spends, and the run that has so many."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

from fedloom.core.errors import ConfigError, Fault
from fedloom.data.arrays import Arrays
from fedloom.engine.forecast import Spent, forecast
from fedloom.engine.run import Experiment
from fedloom.report.comparison import Equal
from fedloom.runs.prepare import prepare
from fedloom.runs.settings import Config

MOST = 1_000_000  # rounds; who spends so little that more would be needed is compared by something else


class Forecaster:
    """Prepares experiments to see what they will spend; each data set is read once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._arrays: dict[tuple[str, int], Arrays] = {}

    def prepared(self, config: Config) -> Experiment:
        """The experiment on a CPU, whatever it will run on: nothing is trained here."""
        key = (repr((config.kinds["data"], config.data)), config.basics.seed)
        if key not in self._arrays:
            self._arrays = {key: config.data.load(self._root, config.basics.seed)}
        here = config.engine.model_copy(update={"device": "cpu", "threads": None})
        return prepare(config._replace(engine=here), self._root, self._arrays[key]).experiment

    def cost(self, config: Config, equal: Equal) -> float:
        """What a run of this config will spend."""
        return amount(next(islice(forecast(self.prepared(config)), config.basics.rounds - 1, None)), equal)

    def rounds(self, config: Config, equal: Equal, budget: float) -> int:
        """The rounds in which a run of this config spends no more than ``budget``, but at least one.

        One that spends nothing of the kind keeps the rounds that it has.
        """
        if equal == "rounds":
            return int(budget)
        for spent in forecast(self.prepared(config)):
            here = amount(spent, equal)
            if here > budget * (1 + 1e-9):
                return max(1, spent.rounds - 1)
            if spent.rounds >= config.basics.rounds and here == 0:
                return config.basics.rounds
            if spent.rounds == MOST:
                what = f"{budget:g} {equal} would take {config.kinds['algorithm']} more than {MOST:,} rounds"
                raise ConfigError([Fault("compare.budget", what, "take fewer rounds, or a smaller budget")])
        raise AssertionError("a forecast goes on for ever")


def amount(spent: Spent, equal: Equal) -> float:
    """How much of it was spent, bytes in MB."""
    value = float(getattr(spent, equal))
    return value / 1e6 if equal in ("bytes", "busiest") else value


def stretched(config: Config, rounds: int) -> Config:
    """The run with so many rounds, its learning rate over the same range, judged as often as before."""
    if rounds == config.basics.rounds:
        return config
    ratio, local = rounds / config.basics.rounds, config.local
    rate = {"exponential": {"decay": local.decay ** (1 / ratio)},
            "step": {"step_every": max(1, round(local.step_every * ratio))}}.get(local.schedule, {})  # fmt: skip
    return config._replace(
        basics=config.basics.model_copy(update={"rounds": rounds}),
        local=local.model_copy(update=rate),
        evaluate=config.evaluate.model_copy(update={"every": max(1, round(config.evaluate.every * ratio))}),
    )
