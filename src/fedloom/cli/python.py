"""``fedloom.run``, ``resume``, ``load`` and ``compare`` for Python and notebooks, with a display."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from fedloom.algorithm import AnyAlgorithm
    from fedloom.compare.write import Comparison
    from fedloom.runs.callbacks import OnEvaluate, OnRound
    from fedloom.runs.load import Predictor
    from fedloom.runs.loop import Listener, Progress
    from fedloom.runs.prepare import Prepared
    from fedloom.runs.result import History


def run(
    algorithm: str | Mapping[str, Any] | AnyAlgorithm | type[AnyAlgorithm] = "fedavg",
    *,
    data: Any = "digits",
    out: str | Path | None = None,
    data_root: str | Path | None = None,
    progress: bool | None = None,
    on_round: OnRound | None = None,
    on_evaluate: OnEvaluate | None = None,
    on_end: Callable[[History], object] | None = None,
    listener: Listener | None = None,
    **settings: Any,
) -> History:
    """Run one experiment and return its history.

    ``algorithm`` is a name, a table such as ``{"kind": "fedprox", "mu": 0.1}``, or an Algorithm.
    ``data`` is the name of a source, a path, a table of settings, or the data itself: ``(x, y)`` or ``(x, y, client)``
    arrays, a torch Dataset, ``(train, test)`` Datasets, a list or dict with a Dataset or ``(x, y)`` for each client, a
    pandas DataFrame whose column ``label`` is to be predicted, ``{"frame": df, "label": "ill", "client": "hospital"}``,
    or ``Arrays``.
    ``model`` is a name, a table, a class of ``nn.Module`` or a net. Other keywords are the sections and keys of an
    experiment file: ``rounds=20``, ``partition={"kind": "iid"}``, ``local={"lr": 0.05}``. Nothing is written unless
    ``out`` names a folder. A loss or a metric of your own is named: ``task={"loss": "own.py:focal"}``,
    ``evaluate={"metrics": ["own.py:top3"]}``; ``"__main__:focal"`` is one of the program or notebook itself.

    ``progress``: whether to show a bar; by default in notebooks and on terminals. Where nothing is shown, important
    messages are Python warnings. ``on_round(progress)`` is called after each round,
    ``on_evaluate(round, metrics)`` after each evaluation, ``on_end(history)`` at the end.
    """
    from fedloom.core import usercode
    from fedloom.runs.start import run as quietly

    usercode.refuse_while_loading("fedloom.run")
    given: dict[str, Any] = {"data": data, "out": out, "data_root": data_root}
    given |= {"on_round": on_round, "on_evaluate": on_evaluate, "on_end": on_end, **settings}
    return _followed(lambda hears: quietly(algorithm, listener=hears, **given), progress, listener)


def resume(
    run_dir: str | Path,
    *,
    rounds: int | None = None,
    at: int | None = None,
    data: Any = None,
    model: nn.Module | None = None,
    data_root: str | Path | None = None,
    forget: Sequence[int] = (),
    repair: bool = False,
    trust: bool = False,
    accept_changes: bool = False,
    progress: bool | None = None,
    on_round: OnRound | None = None,
    on_evaluate: OnEvaluate | None = None,
    on_end: Callable[[History], object] | None = None,
    listener: Listener | None = None,
) -> History:
    """Continue a run from its newest checkpoint (or the one ``at`` a round), perhaps to more ``rounds``.

    ``data`` and ``model``: the objects that were passed in Python when the run began. ``forget``: clients to unlearn
    the next time they take part (closed forms only). ``repair``: drop damaged lines of metrics.jsonl and continue.
    ``trust``: run code that the run folder names even if you have never run it. ``accept_changes``: continue even if
    this code, ``model.weights`` or the data has changed; a private run never does. A run that is refused stays
    unchanged. Relative paths are resolved from the folder in which the run began, unless all files are found from the
    current one; ``data_root`` defaults to the one with which the run began. ``progress`` and the callbacks are those
    of ``run``.
    """
    from fedloom.runs.callbacks import Calling
    from fedloom.runs.resume import resume as quietly

    given: dict[str, Any] = {"data": data, "model": model, "data_root": data_root, "at": at, "rounds": rounds}
    given |= {"forget": forget, "repair": repair, "trust": trust, "accept_changes": accept_changes}

    def work(hears: Listener) -> History:
        return quietly(run_dir, listener=Calling(hears, on_round, on_evaluate), **given)

    history = _followed(work, progress, listener)
    if on_end is not None:
        on_end(history)
    return history


def load(run_dir: str | Path, *, model: nn.Module | None = None, trust: bool = False) -> Predictor:
    """The models of a finished run.

    ``model``: the net itself, for a run whose net was passed in Python. ``trust``: run code that the run folder names
    even if you have never run it. Doubts about new rows are Python warnings.
    """
    from fedloom.runs.load import load as quietly

    return quietly(run_dir, model=model, trust=trust, on_note=_warn)


def _followed(work: Callable[[Listener], History], progress: bool | None, listener: Listener | None) -> History:
    """Run with a display, with the user's listener, or with warnings only."""
    if listener is not None or not _is_shown(progress):
        return work(listener or _Warnings())
    from fedloom.cli.console import plain_console
    from fedloom.cli.screen import RunScreen

    with closing(RunScreen(plain_console(soft_wrap=True))) as screen:
        history = work(screen)
    screen.ended(history)
    return history


class _Warnings:
    """A listener that shows nothing except important warnings."""

    def started(self, prepared: Prepared, folder: Path | None, done: int) -> None:  # noqa: ARG002
        if prepared.experiment.ranks.rank == 0:
            for note in (*prepared.config.notes, *prepared.shared.arrays.notes):
                _warn(note)

    def advanced(self, progress: Progress) -> None:
        from fedloom.runs.tracking import is_tracker_failure

        for note in filter(is_tracker_failure, progress.notes):
            _warn(note)

    def stopping(self) -> None: ...


def _warn(note: str) -> None:
    """A warning at the line of the user's code that is being run."""
    package, level, frame = str(Path(__file__).parents[1]), 1, sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(package):
        level, frame = level + 1, frame.f_back
    warnings.warn(note, stacklevel=level)


def compare(
    *algorithms: str | Mapping[str, Any] | AnyAlgorithm | type[AnyAlgorithm],
    out: str | Path | None = None,
    seeds: int | Sequence[int] = 3,
    grid: Mapping[str, Sequence[Any]] | None = None,
    data_root: str | Path | None = None,
    jobs: int | None = None,
    together: int = 1,
    only: Mapping[str, Any] | None = None,
    progress: bool | None = None,
    options: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Comparison:
    """Compare algorithms over seeds and a grid of settings, as ``fedloom compare`` does.

    ``jobs`` processes run cells side by side; ``together`` runs of a method share the steps of one process, on a GPU.
    ``only={"algorithm": "fedavg"}`` runs only the cells of these methods or values of axes.
    ``grid={"local.lr": [0.01, 0.1]}`` has an axis for each key; ``options`` are further keys of the ``[compare]``
    table, such as ``metric`` or ``baseline``; other keywords are the sections of an experiment. Every cell is a
    separate process: data is named, by a source or a path, and a program whose own classes or functions are used
    calls this below ``if __name__ == "__main__":``.
    """
    from fedloom.compare.run import run as compared
    from fedloom.core import usercode
    from fedloom.core.errors import ConfigError, Fault
    from fedloom.runs.find import as_choice
    from fedloom.runs.in_memory import GivenNet, is_handed_over
    from fedloom.runs.start import handed_net

    usercode.refuse_while_loading("fedloom.compare")
    if any(isinstance(each, list | tuple) for each in algorithms):
        fix = "as in fedloom.compare('fedavg', 'fedprox')"
        raise ConfigError([Fault("algorithms", f"are separate arguments, not a list (got {algorithms!r})", fix)])
    if is_handed_over(settings.get("data")):
        what = "a comparison starts its own processes, which cannot be passed data"
        raise ConfigError([Fault("data", what, "save it, as with numpy.savez, and give the path")])
    if "model" in settings:
        settings["model"] = handed_net(settings["model"])
    if isinstance(settings.get("model"), GivenNet):
        what = "a comparison starts its own processes, which cannot be passed a net"
        raise ConfigError([Fault("model", what, "pass its class, or a class that builds it")])
    chosen = {"algorithms": [as_choice(each) for each in algorithms], "seeds": _plain(seeds)}
    axes = {"grid": {key: _plain(values) for key, values in grid.items()}} if grid else {}
    table = usercode.importable({**settings, "compare": {**chosen, **axes, **(options or {})}})
    folder = Path(out) if out is not None else None
    chosen_cells = {
        key: values if isinstance(values, list | tuple) else [values] for key, values in (only or {}).items()
    }
    how: dict[str, Any] = {"data_root": data_root, "jobs": jobs, "together": together, "only": chosen_cells}
    if not _is_shown(progress):
        return compared(table, folder, **how)
    from fedloom.cli.console import plain_console
    from fedloom.cli.screen import ComparisonScreen

    with closing(ComparisonScreen(plain_console(soft_wrap=True))) as screen:
        done = compared(table, folder, **how, watcher=screen)
    screen.ended(done)
    return done


def _plain(value: Any) -> Any:
    """A value, or a list of values, without NumPy's types, which no file can say."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return (
        [_plain(each) for each in value]
        if isinstance(value, Iterable) and not isinstance(value, str | Mapping)
        else value
    )


def _is_shown(progress: bool | None) -> bool:
    """Whether output is interactive: on a terminal, or in a notebook."""
    if progress is not None:
        return progress
    return sys.stdout.isatty() or "ipykernel" in sys.modules
