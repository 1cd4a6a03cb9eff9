"""A search for settings with Optuna: every trial is a cell for each seed, scored on validation rows.

The study is a SQLite file in the folder of the search, and cells are found again by their hash, so that repeating the
command continues where it stopped.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import tomli_w

from fedloom.compare import gpu
from fedloom.compare.cells import Cell, single_cell
from fedloom.compare.crew import Crew, Standing, Watcher
from fedloom.compare.folder import Fingerprints, alone, stale_reasons, state_of, storage_errors
from fedloom.compare.foreseen import metric_names
from fedloom.compare.memory import default_jobs, on_gpu
from fedloom.compare.ranges import Range
from fedloom.compare.read import result_of
from fedloom.core import disk
from fedloom.core.errors import ConfigError, Fault, StorageError, nearest
from fedloom.core.vocabulary import accuracies, first_measure, leaf, lower_is_better, matching
from fedloom.report.comparison.notes import short_note
from fedloom.report.comparison.selected import validation_metric
from fedloom.report.comparison.statistics import Mean, evaluations, mean_of, recorded, summary_of
from fedloom.report.tables import csv_text
from fedloom.runs.folder import as_json, write_text
from fedloom.runs.look import csv_lines
from fedloom.runs.overrides import assign, without_idle
from fedloom.runs.prepare import check_functions, refuse_wrong_data
from fedloom.runs.settings import Config, as_toml, parse, read_toml

if TYPE_CHECKING:
    import optuna

_RECORD, _STUDY, _CELLS = "tune.toml", "study.db", "cells.csv"
_AGAIN = "again"  # an attribute of a trial: which failed one it repeats


class Search(NamedTuple):
    """What is searched."""

    base: Mapping[str, Any]  # the experiment
    ranges: tuple[Range, ...]
    trials: int
    metric: str  # on validation rows: a quantity or a full name; empty: the accuracy, or the error in regression
    seeds: int = 1

    def config(self, settings: Mapping[str, Any], seed: int | None = None) -> Config:
        """The experiment with these settings; one thread, so that no number depends on how many run side by side."""
        table, notes = assign(self.base, settings)
        if isinstance(table.setdefault("engine", {}), Mapping):
            table["engine"] = {"threads": 1, **table["engine"]}
        config = parse(without_idle(table, keep=settings)[0], notes)
        return config if seed is None else config._replace(basics=config.basics.model_copy(update={"seed": seed}))

    def record(self) -> dict[str, Any]:
        """What a folder records of its search; the number of trials may grow."""
        asked = {"metric": self.metric, "seeds": self.seeds, "ranges": [each.words() for each in self.ranges]}
        return {**self.base, "tune": asked}


class Trial(NamedTuple):
    """One of the settings that were tried."""

    number: int
    settings: dict[str, Any]
    state: str  # done, diverged, refused or failed
    value: float | None  # on validation rows, over seeds


class Tuned(NamedTuple):
    """A search that has ended."""

    folder: Path
    metric: str
    trials: tuple[Trial, ...]
    best: Trial | None
    test: Mapping[str, Mean]  # the best trial on test rows, by metric
    failures: Mapping[str, str]
    notes: tuple[str, ...] = ()  # about the values of trials

    def as_json(self) -> dict[str, Any]:
        """What ``fedloom tune --json`` prints."""
        return {
            "folder": str(self.folder),
            "metric": self.metric,
            "trials": [trial._asdict() for trial in self.trials],
            "best": self.best._asdict() if self.best else None,
            "test": {name: value.mean for name, value in self.test.items()},
            "notes": list(self.notes),
            "failures": dict(self.failures),
        }


class InterruptedSearch(KeyboardInterrupt):
    """A search that was stopped on request; its trials were saved."""

    def __init__(self, done: int, trials: int) -> None:
        super().__init__(f"stopped with {done} of {trials} trials done")
        self.done, self.trials = done, trials


def checked_search(search: Search) -> Search:
    """The search, if everything it may try can be run and has the metric; else one ConfigError with all faults."""
    if not search.ranges:
        fix = "as in local.lr=0.001..1:log, local.epochs=1..5 or local.batch=16,32,64"
        raise ConfigError([Fault("fedloom tune", "no setting has a range to search", fix)])
    faults: dict[Fault, None] = {}
    for settings in _at_ends(search):
        try:
            config = search.config(settings)
            check_functions(config)
        except ConfigError as error:
            faults |= dict.fromkeys(error.faults)
    if faults:
        raise ConfigError(faults)
    if not config.evaluate.validation:
        fix = "set evaluate.validation=0.2: a fifth of each client's training rows"
        raise ConfigError([Fault("fedloom tune", "a search needs validation rows, but evaluate.validation is 0", fix)])
    wanted = search.metric or first_measure(config.task.is_regression)
    names = [name for name in metric_names(config) if "/validation/" in name]
    if not any(matching(wanted, [*names, *map(leaf, names)])):
        fix = nearest(wanted, names if "/" in wanted else dict.fromkeys(map(leaf, names)))
        raise ConfigError([Fault("--metric", f"nothing on validation rows is called '{wanted}'", fix)])
    return search._replace(metric=wanted)


def _at_ends(search: Search) -> Iterator[dict[str, Any]]:
    """Settings at the ends of every range, one range after the other."""
    first = {each.key: each.ends[0] for each in search.ranges}
    return (first | {each.key: value} for each in search.ranges for value in each.ends)


def tune(search: Search, folder: Path, root: Path, jobs: int | None, watcher: Watcher) -> Tuned:
    """Try settings until the study in ``folder`` has the requested number of trials."""
    search = checked_search(search)
    refuse_wrong_data(map(search.config, _at_ends(search)), root)
    with storage_errors(folder), _own(folder), _study_errors(folder):
        _refuse_other_search(search, folder)
        disk.make_folder(folder / "cells")
        write_text(folder / _RECORD, tomli_w.dumps(search.record()))
        trials = _Trials(search, folder, _study(search, folder), watcher)
        trials.refuse_stale(root)
        trials.retry()
        failures: dict[str, str] = {}
        try:
            missing = trials.first(jobs or default_jobs([search.config({})]))
            if missing:
                failures = _work(trials, missing, folder, root, jobs)
        except KeyboardInterrupt as stop:
            trials.write()
            raise InterruptedSearch(trials.done, search.trials) from stop
        return trials.write(failures)


def _work(trials: _Trials, missing: Sequence[Cell], folder: Path, root: Path, jobs: int | None) -> dict[str, str]:
    configs = [cell.config for cell in missing]
    side_by_side = jobs or default_jobs(configs)
    crew = Crew(folder, folder / "cells", root, missing, done=0, watcher=trials, more=trials.ended)
    with gpu.shared(side_by_side if on_gpu(configs) else 1) as environment:
        return crew.work(side_by_side, environment)


# -- the folder ------------------------------------------------------------------------------------
def _own(folder: Path) -> AbstractContextManager[None]:
    """The folder, locked for this process; one with other contents is refused."""
    inside = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if (folder.exists() and not folder.is_dir()) or (inside - {".lock"} and _RECORD not in inside):
        raise ConfigError([Fault("--out", f"{folder} already exists and is not a search", "choose another")])
    return alone(folder, "--out")


def _refuse_other_search(search: Search, folder: Path) -> None:
    if not (folder / _RECORD).is_file():
        return
    there, here = read_toml(folder / _RECORD), json.loads(json.dumps(search.record()))
    differ = [key for key in dict.fromkeys([*there, *here]) if there.get(key) != here.get(key)]
    if differ:
        key = differ[0]
        what = f"{folder} contains another search: {key} is {there.get(key)} there and {here.get(key)} here"
        raise ConfigError([Fault("--out", what, "choose another folder, or delete that one")])


@contextmanager
def _study_errors(folder: Path) -> Iterator[None]:
    """Turn errors of the study's database into one that names its file; without optuna, say how to get it."""
    try:
        from optuna.exceptions import StorageInternalError
        from sqlalchemy.exc import DBAPIError
    except ImportError:
        raise ConfigError([Fault("fedloom tune", "needs optuna", "pip install 'fedloom[tune]'")]) from None
    try:
        yield
    except (DBAPIError, StorageInternalError) as error:
        why = next((each.orig for each in (error, error.__cause__) if isinstance(each, DBAPIError)), error)
        raise StorageError(f"{folder / _STUDY}: {why}") from error


def _study(search: Search, folder: Path) -> optuna.Study:
    """The study in the folder."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(
        study_name="fedloom",
        storage=f"sqlite:///{(folder / _STUDY).absolute()}",
        direction="minimize" if lower_is_better(search.metric) else "maximize",
        load_if_exists=True,
    )
    # Each start draws different numbers; a repeated search draws the same.
    study.sampler = optuna.samplers.TPESampler(seed=len(study.get_trials(deepcopy=False)))
    return study


# -- the trials ------------------------------------------------------------------------------------
class _Trials:
    """The trials of a study: which cells they wait for, and which are next. It follows the workers for a watcher."""

    def __init__(self, search: Search, folder: Path, study: optuna.Study, watcher: Watcher) -> None:
        self._search, self._folder, self._study, self._watcher = search, folder, study, watcher
        self._waiting: dict[int, set[str]] = {}  # the cells that a trial waits for, by their hash
        self._said: list[str] = []
        self._listed = {line["folder"]: line for line in csv_lines(folder / _CELLS, ("trial", "seed", "folder"))}
        self._began, self._done_before = time.perf_counter(), self.done

    @property
    def done(self) -> int:
        return sum(trial.state.is_finished() for trial in self._drawn())

    def _drawn(self) -> list[optuna.trial.FrozenTrial]:
        """The trials whose settings are complete: a process that is killed may leave one that is not.

        One that failed does not count once it is repeated.
        """
        trials, keys = self._study.get_trials(deepcopy=False), {each.key for each in self._search.ranges}
        repeated = {trial.user_attrs.get(_AGAIN) for trial in trials}
        return [trial for trial in trials if set(trial.params) == keys and trial.number not in repeated]

    def retry(self) -> None:
        """Ask again for the settings of trials that failed before: their process died, or the disk was full."""
        for trial in self._drawn():
            if trial.state.name == "FAIL":
                self._study.enqueue_trial(trial.params, user_attrs={_AGAIN: trial.number})

    def _settings(self, trial: optuna.trial.FrozenTrial) -> dict[str, Any]:
        return {each.key: each.setting(trial.params[each.key]) for each in self._search.ranges}

    def _cells(self, trial: optuna.trial.FrozenTrial) -> list[Cell]:
        settings = self._settings(trial)
        seed = self._search.config(settings).basics.seed
        configs = [self._search.config(settings, seed + k) for k in range(self._search.seeds)]
        return [single_cell(f"trial {trial.number}", config) for config in configs]

    def first(self, jobs: int) -> list[Cell]:
        """The cells to begin with: those of trials that were running when the search was stopped, and new ones."""
        found = [cell for trial in self._drawn() if not trial.state.is_finished() for cell in self._missing(trial)]
        while len(found) < jobs and (more := self._next()):
            found += more
        return found

    def ended(self, cell: Cell, _state: str) -> list[Cell]:
        """A cell has ended: report the trials that waited only for it, and begin others in their place."""
        found = []
        for number, hashes in list(self._waiting.items()):
            hashes.discard(cell.hash)
            if not hashes:
                del self._waiting[number]
                self._tell(next(trial for trial in self._drawn() if trial.number == number))
                found += self._next()
        return found

    def _next(self) -> list[Cell]:
        """The cells of the next trial that has any to run; none if there are enough trials."""
        while len(self._drawn()) < self._search.trials:
            number = self._study.ask(distributions(self._search.ranges)).number
            found = self._missing(next(trial for trial in self._drawn() if trial.number == number))
            if found:
                return found
        return []

    def _missing(self, trial: optuna.trial.FrozenTrial) -> list[Cell]:
        """The cells of a trial that are not running yet; it is reported at once if all of them have ended."""
        try:
            cells = {cell.hash: cell for cell in self._cells(trial)}
        except ConfigError as error:
            self._refuse(trial, error)
            return []
        self._list(trial.number, cells.values())
        under_way = {name for hashes in self._waiting.values() for name in hashes}
        waits = {name for name in cells if not state_of(self._home(cells[name]))}
        if not waits:
            self._tell(trial)
            return []
        self._waiting[trial.number] = waits
        return [cells[name] for name in cells if name in waits - under_way]

    def _list(self, trial: int, cells: Iterable[Cell]) -> None:
        """Write down which trial a run belongs to, before it begins; the first one if several share it."""
        drawn = {str(each.number) for each in self._drawn()}
        for cell in cells:
            home = f"cells/{cell.hash}"
            if self._listed.get(home, {}).get("trial") not in drawn:
                self._listed[home] = {"trial": str(trial), "seed": str(cell.seed), "folder": home}
        write_text(self._folder / _CELLS, csv_text(list(self._listed.values())))

    def _refuse(self, trial: optuna.trial.FrozenTrial, error: ConfigError) -> None:
        """Settings that do not go together cannot be run; the search continues without them."""
        from optuna.trial import TrialState

        self._study.tell(trial.number, state=TrialState.PRUNED)
        self._said.append(f"trial {trial.number}: refused  {'; '.join(map(str, error.faults))}")

    def _home(self, cell: Cell) -> Path:
        return self._folder / "cells" / cell.hash

    def _tell(self, trial: optuna.trial.FrozenTrial) -> None:
        """Report the value of a trial to the study; settings with which training diverged are worse than any others."""
        from optuna.trial import TrialState

        states = {state_of(self._home(cell)) for cell in self._cells(trial)}
        value = self._value(trial) if states == {"done"} else None
        words = ", ".join(f"{key}={each}" for key, each in self._settings(trial).items())
        if value is not None:
            self._study.tell(trial.number, value)
            self._said.append(f"trial {trial.number}: {self._search.metric} {value:.4g}  {words}")
        else:
            diverged = "diverged" in states
            self._study.tell(trial.number, state=TrialState.PRUNED if diverged else TrialState.FAIL)
            self._said.append(f"trial {trial.number}: {'diverged' if diverged else 'failed'}  {words}")

    def _value(self, trial: optuna.trial.FrozenTrial) -> float | None:
        found = self._measured(trial, test=False)
        return next(iter(found.values())).mean if found else None

    def _measured(self, trial: optuna.trial.FrozenTrial, *, test: bool) -> dict[str, Mean]:
        """The score of a trial over seeds: on validation rows by the metric of the search, or on test rows."""
        results = [result_of(cell, self._home(cell)) for cell in self._cells(trial)]
        names = recorded(results)
        first = next(iter(accuracies(names)), "global/test/accuracy")
        metric = validation_metric(self._search.metric, first, names)
        metric = metric.replace("/validation/", "/test/") if test else metric
        found = [summary.mean_last_10 for r in results if (summary := summary_of(r, metric)) is not None]
        mean = mean_of(found)
        return {metric: mean} if mean is not None and len(found) == len(results) else {}

    def refuse_stale(self, root: Path) -> None:
        """Refuse to continue trials of other data, code or versions: their values cannot be compared."""
        finished = [trial for trial in self._drawn() if trial.state.name in ("COMPLETE", "FAIL")]
        for cell in self._cells(finished[-1]) if finished else ():
            why = stale_reasons(self._home(cell), cell, Fingerprints(root)) if self._home(cell).is_dir() else []
            if why:
                what = f"the trials in {self._folder} cannot be continued: {'; '.join(why)}"
                raise ConfigError([Fault("--out", what, "choose another folder")])

    # -- as a watcher ------------------------------------------------------------------------------
    def started(self, plan: Any, folder: Path, jobs: int, standing: Standing) -> None: ...

    def moved(self, standing: Standing) -> None:
        done, spent = self.done, time.perf_counter() - self._began
        fresh = done - self._done_before
        left = spent / fresh * (self._search.trials - done) if fresh else None
        said, self._said = self._said or [""], []
        for ended in said:
            progress = standing._replace(done=done, cells=self._search.trials, seconds_left=left, ended=ended)
            self._watcher.moved(progress)

    def stopping(self) -> None:
        self._watcher.stopping()

    def _state(self, trial: optuna.trial.FrozenTrial) -> str:
        """The state of a trial that has ended."""
        if trial.state.name != "PRUNED":
            return {"COMPLETE": "done", "FAIL": "failed"}[trial.state.name]
        try:
            self._cells(trial)
        except ConfigError:
            return "refused"
        return "diverged"

    # -- the results -------------------------------------------------------------------------------
    def write(self, failures: Mapping[str, str] = MappingProxyType({})) -> Tuned:
        """Write the table of trials, the best settings as an experiment, and the summary."""
        finished = [trial for trial in self._drawn() if trial.state.is_finished()]
        trials = [Trial(t.number, self._settings(t), self._state(t), t.value) for t in finished]
        sign = 1 if lower_is_better(self._search.metric) else -1
        best = min((t for t in trials if t.value is not None), key=lambda t: sign * (t.value or 0.0), default=None)
        chosen = next((t for t in finished if best is not None and t.number == best.number), None)
        name = next(iter(self._measured(chosen, test=False)), self._search.metric) if chosen else self._search.metric
        test = self._measured(chosen, test=True) if chosen else {}
        counts = (
            [evaluations(result_of(cell, self._home(cell)), name) for cell in self._cells(chosen)] if chosen else []
        )
        notes = [*short_note(counts), *edge_notes(self._search.ranges, best.settings if best is not None else {})]
        tuned = Tuned(self._folder, name, tuple(trials), best, test, failures, tuple(notes))
        lines = [{"trial": t.number, **t.settings, "state": t.state, "value": t.value} for t in trials]
        if lines:
            write_text(self._folder / "trials.csv", csv_text(lines))
        if best is not None:
            write_text(self._folder / "best.toml", as_toml(self._search.config(best.settings)))
        write_text(self._folder / "summary.json", as_json(tuned.as_json(), indent=1) + "\n")
        return tuned


def edge_notes(ranges: Sequence[Range], best: Mapping[str, Any]) -> list[str]:
    """A note for each of the best settings that is at the end of its range, so that others may be better."""
    ends = {each.key: each.end_of(best[each.key]) for each in ranges if each.key in best}
    return [f"the best {key} is at the end of its range ({best[key]}, the {end})." for key, end in ends.items() if end]


def distributions(ranges: Sequence[Range]) -> dict[str, Any]:
    """The ranges as Optuna's distributions."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    def one(each: Range) -> Any:
        if each.choices:
            return CategoricalDistribution(each.choices)
        if each.whole:
            return IntDistribution(int(each.low), int(each.high), log=each.log)
        return FloatDistribution(each.low, each.high, log=each.log)

    return {each.key: one(each) for each in ranges}
