"""Curves of runs that were read from their folders, as a picture."""

from __future__ import annotations

from pathlib import Path

from fedloom.core.errors import ConfigError, Fault
from fedloom.report import curves
from fedloom.report.comparison import curves as comparison_curves
from fedloom.report.comparison.question import Question, Result
from fedloom.report.view import AnyView, ComparisonView, RunView, standing_for


def draw(view: AnyView, path: Path) -> None:
    """A run's accuracy and loss; of several runs, or of a comparison, the metric that represents all of them."""
    runs = (view,) if isinstance(view, RunView) else view.cells if isinstance(view, ComparisonView) else view.runs
    shown = [run for run in runs if run.evaluations]
    if not shown:
        raise ConfigError([Fault("--plot", "nothing has been evaluated yet")])
    if isinstance(view, RunView):
        curves.draw([dict(line) for line in view.records], title=view.name, path=path)
        return
    axes = view.axes if isinstance(view, ComparisonView) else ()
    results = [_result(run) for run in shown]
    methods = tuple(dict.fromkeys(result.method for result in results))
    common = standing_for(shown)
    everywhere = all(common in run.last for run in shown)
    metrics = {run.method or run.name: common if everywhere else standing_for([run]) for run in shown}
    places = tuple(dict.fromkeys(result.place for result in results))
    seeds = tuple(dict.fromkeys(result.seed for result in results))
    question = Question(axes, places, methods, seeds, methods[0], metrics, None, {})
    comparison_curves.draw(question, results, path)


def _result(run: RunView) -> Result:
    """A run as a cell of a comparison, with its evaluations so far, also if it is still running."""
    lines = [dict(line) for line in run.records]
    return Result(run.place, run.method or run.name, run.algorithm, run.seed, "", "done", lines, "")
