"""``fedloom.run`` and ``fedloom.compare`` for Python and notebooks: what the library does, with a display."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedloom.algorithm import AnyAlgorithm
    from fedloom.compare.write import Comparison
    from fedloom.runs.callbacks import OnEvaluate, OnRound
    from fedloom.runs.loop import Listener
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
    pandas DataFrame, ``{"frame": df, "label": "ill", "client": "hospital"}``, or ``Arrays``.
    ``model`` is a name, a table, a class of ``nn.Module`` or a net. Other keywords are the sections and keys of an
    experiment file: ``rounds=20``, ``partition={"kind": "iid"}``, ``local={"lr": 0.05}``. Nothing is written unless
    ``out`` names a folder.

    ``progress``: whether to show a bar; by default in notebooks and on terminals. ``on_round(progress)`` is called
    after each round, ``on_evaluate(round, metrics)`` after each evaluation, ``on_end(history)`` at the end.
    """
    from fedloom.runs.start import run as quietly

    given: dict[str, Any] = {"data": data, "out": out, "data_root": data_root}
    given |= {"on_round": on_round, "on_evaluate": on_evaluate, "on_end": on_end, **settings}
    if listener is not None or not _is_shown(progress):
        return quietly(algorithm, listener=listener, **given)
    from fedloom.cli.console import plain_console
    from fedloom.cli.screen import RunScreen

    with closing(RunScreen(plain_console(soft_wrap=True))) as screen:
        history = quietly(algorithm, listener=screen, **given)
    screen.ended(history)
    return history


def compare(
    *algorithms: str,
    out: str | Path | None = None,
    seeds: int | Sequence[int] = 3,
    grid: Mapping[str, Sequence[Any]] | None = None,
    data_root: str | Path | None = None,
    jobs: int | None = None,
    progress: bool | None = None,
    options: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Comparison:
    """Compare algorithms over seeds and a grid of settings, as ``fedloom compare`` does.

    ``grid={"local.lr": [0.01, 0.1]}`` has an axis for each key; ``options`` are further keys of the ``[compare]``
    table, such as ``metric`` or ``baseline``; other keywords are the sections of an experiment. Data is named, by a
    source or a path, since every cell is a process of its own.
    """
    from fedloom.compare.run import run as compared
    from fedloom.core.errors import ConfigError, Fault
    from fedloom.runs.in_memory import is_handed_over
    from fedloom.runs.start import handed_net

    if is_handed_over(settings.get("data")):
        what = "a comparison starts processes of its own, which cannot be handed data"
        raise ConfigError([Fault("data", what, "save it, as with numpy.savez, and give the path")])
    if "model" in settings:
        settings["model"] = handed_net(settings["model"])
    chosen = {"algorithms": list(algorithms), "seeds": seeds if isinstance(seeds, int) else list(seeds)}
    axes = {"grid": {key: list(values) for key, values in grid.items()}} if grid else {}
    table = {**settings, "compare": {**chosen, **axes, **(options or {})}}
    folder = Path(out) if out is not None else None
    if not _is_shown(progress):
        return compared(table, folder, data_root=data_root, jobs=jobs)
    from fedloom.cli.console import plain_console
    from fedloom.cli.screen import ComparisonScreen

    with closing(ComparisonScreen(plain_console(soft_wrap=True))) as screen:
        done = compared(table, folder, data_root=data_root, jobs=jobs, watcher=screen)
    screen.ended(done)
    return done


def _is_shown(progress: bool | None) -> bool:
    """Whether there is somebody to look: on a terminal, or in a notebook."""
    if progress is not None:
        return progress
    return sys.stdout.isatty() or "ipykernel" in sys.modules
