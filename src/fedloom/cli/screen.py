"""What a run and a comparison show: a live bar on a terminal, plain lines elsewhere, and tables at the end."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TaskID, TextColumn
from rich.table import Column, Table
from rich.text import Text

from fedloom import __version__
from fedloom.cli.console import harmless, in_one_line, plain_console
from fedloom.cli.ranks import follows
from fedloom.core.vocabulary import (
    accuracies,
    headline,
    is_diagnostic,
    is_evaluation,
    is_share,
    is_summarised,
    last_ten,
)
from fedloom.report.words import as_bytes, brief, plural, short, span

if TYPE_CHECKING:
    from fedloom.compare.crew import Standing
    from fedloom.compare.plan import ComparisonPlan
    from fedloom.compare.tune import Search
    from fedloom.compare.write import Comparison
    from fedloom.data.partition import PartitionSummary
    from fedloom.engine.state import Experiment
    from fedloom.report.comparison.sheet import Sheet
    from fedloom.report.comparison.sheet_text import Word
    from fedloom.report.comparison.text import Section
    from fedloom.runs import loop
    from fedloom.runs.prepare import Prepared
    from fedloom.runs.result import History
    from fedloom.runs.settings import Config

_EVERY = 2.0, 10.0  # seconds between two lines of a run, and of a comparison, where there is no terminal
_NAMED = 4  # cells that run at the same time and are named; of the others it is said how many there are


def show_run(as_json: bool, work: Callable[[loop.Listener], History]) -> None:
    """Run and show progress; after an interruption, print how to resume. Ranks other than 0 show nothing."""
    from fedloom.runs.loop import InterruptedRun, SilentListener

    if follows():
        try:
            work(SilentListener())
        except InterruptedRun as stop:
            raise typer.Exit(130) from stop
        return
    screen = RunScreen(plain_console(stderr=as_json, soft_wrap=True))
    try:
        history = work(screen)
    except InterruptedRun as stop:
        screen.close()
        screen.say(f"stopped and saved after round {stop.round}; continue with: fedloom resume {stop.run_dir}")
        raise typer.Exit(130) from stop
    finally:
        screen.close()
    screen.ended(history)
    if as_json:
        print(json.dumps(history.as_json()))


def has_bar(console: Console) -> bool:
    """Whether a live bar can be drawn: on a terminal, and in notebooks that have widgets."""
    return console.is_terminal or (console.is_jupyter and find_spec("ipywidgets") is not None)


class _Newest(ProgressColumn):
    """The newest numbers; before the first ones, the elapsed time."""

    def render(self, task: Task) -> Text:
        return Text(task.fields["now"] or f"{span(task.elapsed or 0.0)} so far")


class Bar:
    """A live bar, on a terminal or in a notebook."""

    def __init__(self, console: Console, what: str, done: int, total: int) -> None:
        columns = (
            SpinnerColumn(),
            TextColumn(f"{what} {{task.completed}}/{{task.total}}"),
            BarColumn(),
            _Newest(table_column=Column(no_wrap=True, overflow="ellipsis")),
        )
        self._progress = Progress(*columns, console=console, transient=True)
        self._task: TaskID = self._progress.add_task(what, total=total, completed=done, now="")
        self._progress.start()

    def move(self, done: int, now: str) -> None:
        self._progress.update(self._task, completed=done, now=now)

    def close(self) -> None:
        self._progress.stop()


class _Screen:
    """A live bar on a terminal, plain lines elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar: Bar | None = None

    def say(self, text: str) -> None:
        self._console.print(text, markup=False)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


class RunScreen(_Screen):
    """Shows a run."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._said, self._began, self._done, self._clients = 0.0, 0.0, 0, 0
        self._excluded, self._missed, self._idle = 0, 0, 0
        self._why = ""  # a round may be idle

    def started(self, prepared: Prepared, folder: Path | None, done: int) -> None:
        exp, shared = prepared.experiment, prepared.shared
        for note in prepared.config.notes:
            self.say(f"note: {note}")
        self.say(_where(prepared, folder))
        self.say(_data(prepared))
        for line in _columns(prepared):
            self.say(line)
        for note in shared.notes:
            self.say(f"note: {note}")
        if shared.bad:
            self.say(f"bad clients: {len(shared.bad):,} of {shared.clients:,} ({shared.corruption})")
        if exp.guard is not None:
            self.say(f"privacy: {exp.guard.summary(exp.rounds)}")
        if exp.topology is not None:
            self._network(exp)
        if done:
            self.say(f"resumed after round {done} of {exp.rounds}")
        if forget := getattr(exp.algorithm, "forget", ()):
            self.say(f"clients to forget: {list(forget)}")
        self._began, self._done, self._why = time.perf_counter(), done, _why_idle(prepared.config)
        if has_bar(self._console):
            self._bar = Bar(self._console, "round", done, exp.rounds)

    def _network(self, exp: Experiment) -> None:
        from fedloom.engine.topology.facts import facts

        assert exp.topology is not None
        found = facts(exp.topology, exp.federation.clients, exp.seed, tuple(exp.federation.train.sizes.tolist()))
        low, high = found.degree_min, found.degree_max
        degree = f"{low}" if low == high else f"{low} to {high}"
        self.say(f"{found.kind}: {degree} neighbours each · psi {found.psi:.4f} in a gossip step")
        for note in found.notes:
            self.say(f"topology: {note}")

    def advanced(self, progress: loop.Progress) -> None:
        self._clients += progress.clients
        now = time.perf_counter()
        elapsed = now - self._began
        pace = (progress.round - self._done) / elapsed
        left = (progress.rounds - progress.round) / pace
        shown = [f"{short(name)} {brief(progress.metrics[name])}" for name in headline(progress.metrics)]
        evaluated = progress.metrics.get("round", progress.round)
        if shown and evaluated != progress.round:
            shown[-1] += f" after round {evaluated:.0f}"
        text = "  ".join([*shown, f"{self._clients / elapsed:,.3g} clients/s", f"{span(left)} left"])
        for note in progress.notes:
            self.say(f"round {progress.round}: {note}")
        if progress.excluded:
            self._excluded += len(progress.excluded)
            self.say(
                f"round {progress.round}: excluded clients {list(progress.excluded)}: their updates were not finite"
            )
        if progress.late and progress.late == progress.clients:
            self._missed += 1
        self._idle += not progress.clients
        if self._bar is not None:
            self._bar.move(progress.round, text)
        elif now - self._said >= _EVERY[0] or progress.round == progress.rounds:
            self._said = now
            self.say(f"round {progress.round}/{progress.rounds}  {text}")

    def stopping(self) -> None:
        self.say("finishing this round, then saving (again to stop at once)")

    def ended(self, history: History) -> None:
        table = _table("metric", "last", "best", _tail(history))
        for name, value in history.summary.items():
            if is_summarised(name):
                table.add_row(name, *(f"{v:.4f}" for v in value))
            elif is_diagnostic(name):
                table.add_row(name, f"{value.last:.4g}", "-", f"{value.mean_last_10:.4g}")
        self._console.print(table)
        for line in (*_sketch(history), *self._losses(history), _spent(history), *_next(history)):
            self.say(line)

    def _losses(self, history: History) -> Iterable[str]:
        """Rounds and updates that changed nothing."""
        if self._excluded:
            yield f"{self._excluded} client updates were not finite and left out"
        if self._missed:
            yield f"no client met system.deadline in {plural(self._missed, 'round')}; the model did not change"
        if self._idle:
            of = "the only round" if history.rounds == 1 else f"{self._idle:,} of {history.rounds:,} rounds"
            yield f"warning: no client trained in {of} ({self._why}); the model did not change"


def _why_idle(config: Config) -> str:
    """Why no client trained in a round: whether some can be late or lost, and whether a cohort can be empty."""
    if not (config.system.stragglers or config.system.dropout):
        return "none was chosen"
    lost = "all were late or dropped out"
    can_be_empty = config.cohort.sampling == "poisson" or ":" in config.cohort.sampling
    return f"none was chosen, or {lost}" if can_be_empty else lost


def _tail(history: History) -> str:
    """The evaluations that the final mean is taken over."""
    name, count = last_ten([sum(line["round"] > 0 for line in history.records if is_evaluation(line))])
    return name.format(count)


def _where(prepared: Prepared, folder: Path | None) -> str:
    """Version, device, executor, seed and folder of a run."""
    import torch

    exp = prepared.experiment
    device = f"cpu ({plural(torch.get_num_threads(), 'thread')})" if exp.device.type == "cpu" else str(exp.device)
    device += f" · {exp.ranks.size} ranks" if exp.ranks.size > 1 else ""
    compiled = ", compiled and captured" if exp.device.type == "cuda" else ", compiled"
    steps = {"eager": "", "graph": ", captured", "compiled": compiled}[exp.task.capture]
    exact = exp.task.precision == "fp32" or (exp.device.type == "cpu" and exp.task.precision == "tf32")
    steps += "" if exact else f" · {exp.task.precision}"
    place = f" · {folder}" if folder else ""
    how = "clients side by side" if exp.executor == "lanes" else f"clients one by one ({prepared.reason})"
    how += steps
    return f"fedloom {__version__} · {device} · {how} · seed {exp.seed}{place}"


def _data(prepared: Prepared) -> str:
    """The data, the heterogeneity of its partition, and the size of the net."""
    exp, shared, s = prepared.experiment, prepared.shared, prepared.shared.summary()
    trained, whole = exp.task.size, exp.task.whole
    parameters = f"{trained:,} parameters" if trained == whole else f"{trained:,} of {whole:,} parameters trained"
    aside = len(exp.federation.validation.rows)
    tests = f"{len(exp.federation.common):,} test rows" + (f" · {aside:,} validation rows" if aside else "")
    return (
        f"{shared.arrays.name}: {plural(s.rows, 'row')} on {plural(s.clients, 'client')} ({_sizes(s)}) · "
        f"{s.classes_mean:.1f} of {s.classes} {_kinds(prepared)} each · "
        f"heterogeneity {s.heterogeneity:.2f} · {tests} · {parameters}"
    )


def _sizes(s: PartitionSummary) -> str:
    """How many rows the clients have."""
    if s.size_min == s.size_max:
        return "all of them" if s.clients == 1 else f"{s.size_min:,} each"
    return f"{s.size_min:,} to {s.size_max:,}, median {s.size_median:,g}"


def _kinds(prepared: Prepared) -> str:
    """What the partition splits by."""
    return "classes" if prepared.shared.arrays.target is None else "bins of the target"


def _columns(prepared: Prepared) -> list[str]:
    """How the columns of a table are filled, encoded and scaled."""
    from fedloom.data.columns import listed

    arrays = prepared.shared.arrays
    found = [*([] if arrays.recipe is None else listed(arrays.recipe)), *(f"note: {note}" for note in arrays.notes)]
    return [in_one_line(line) for line in found]


def _sketch(history: History) -> list[str]:
    """The first accuracy over the rounds as a sparkline."""
    frame = history.metrics
    names = accuracies(frame)
    if not names or len(frame) < 3 or not is_share(names[0]):
        return []
    values = [v for v in frame[names[0]].tolist() if not math.isnan(v)]
    picked = [values[round(i * (len(values) - 1) / 49)] for i in range(50)] if len(values) > 50 else values
    line = "".join("▁▂▃▄▅▆▇█"[min(7, int(8 * v))] for v in picked)
    return [f"\n{names[0]}  {line}  {values[-1]:.1%}"]


def _spent(history: History) -> str:
    """Time and traffic of a run."""
    up, down = (history.records[-1].get(f"bytes/{way}", 0) for way in ("up", "down"))
    pace = f"{plural(history.rounds, 'round')} in {history.seconds:.1f} s"
    among = up and not down  # in a network, where there is no server to receive from
    sent = f"nodes sent {as_bytes(up)}" if among else f"clients sent {as_bytes(up)} and received {as_bytes(down)}"
    return f"{pace} · {sent}"


def _next(history: History) -> list[str]:
    """The files of a run, and useful next commands."""
    run = history.run_dir
    if run is None:
        return []
    files = {"metrics.jsonl": "   every evaluation", "curves.png": "      the curves"}
    files |= {"model.safetensors": "", "personal.safetensors": ""}
    further = [f"  fedloom resume {run} --rounds {2 * history.rounds}"]
    return [
        "",
        *(f"{run}/{name}{meaning}" for name, meaning in files.items() if (run / name).exists()),
        "\nnext:",
        *(further if not (run / "privacy.json").exists() else []),  # noise may be calibrated for these rounds
        f"  fedloom run {run}/config.toml algorithm.kind=NAME    another method: fedloom list algorithms",
        *([f"  fedloom predict {run} NEW.csv"] if (run / "columns.json").exists() else []),
        f"  fedloom report {run}    curves, clients and settings on one page",
        f"  fedloom describe {history.algorithm}",
    ]


def _table(first: str, *others: str) -> Table:
    """A table whose first column has names, and the others numbers."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(first)
    for column in others:
        table.add_column(column, justify="right")
    return table


class ComparisonScreen(_Screen):
    """Shows a comparison."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._said = time.perf_counter()
        self._pace: float | None = None
        self._kind = "cells"  # what is counted

    def started(self, plan: ComparisonPlan, folder: Path, jobs: int, standing: Standing) -> None:
        methods, places, seeds = len(plan.methods), len(plan.places), len(plan.spec.seeds)
        grid = f" x {plural(places, 'point')} of the grid" if plan.axes else ""
        runs = f"{plural(methods, 'method')}{grid} x {plural(seeds, 'seed')}"
        self.say(f"fedloom {__version__} · {runs} · {jobs} at a time · {folder}")
        for note in plan.notes:
            self.say(f"note: {note}")
        if standing.reused:
            self.say(f"{standing.reused} of {standing.cells} cells are done already")
        if has_bar(self._console) and standing.reused < standing.cells:
            self._bar = Bar(self._console, "cells", standing.done, standing.cells)

    def searching(self, search: Search, folder: Path) -> None:
        """A search begins; its trials are counted like cells."""
        tried = ", ".join(each.words() for each in search.ranges)
        self.say(f"fedloom {__version__} · {plural(search.trials, 'trial')} of {tried} · {folder}")
        self._kind = "trials"
        if has_bar(self._console):
            self._bar = Bar(self._console, self._kind, 0, search.trials)

    def moved(self, standing: Standing) -> None:
        left = "" if standing.seconds_left is None else f"{span(standing.seconds_left)} left"
        self._pace = standing.cells_an_hour
        each = [f"{name} {done}/{rounds}" for name, done, rounds in standing.running]
        running = "; ".join([*each[:_NAMED], *([f"{len(each) - _NAMED} more"] if len(each) > _NAMED else [])])
        now = "  ".join(part for part in (left, running) if part)
        clock, ended = time.perf_counter(), standing.ended.partition("\n")[0]
        if self._bar is not None:
            self._bar.move(standing.done, now)
            if ended and not ended.endswith(": done"):
                self.say(ended)
        elif ended or clock - self._said >= _EVERY[1]:
            self._said = clock
            parts = (f"{self._kind} {standing.done}/{standing.cells}", ended, left if ended else now)
            self.say("  ".join(part for part in parts if part))

    def stopping(self) -> None:
        self.say("finishing the current rounds, then saving (again to stop at once)")

    def ended(self, done: Comparison) -> None:
        from fedloom.report.comparison.claims import sentences
        from fedloom.report.comparison.notes import notes
        from fedloom.report.comparison.text import narrowed, sections

        console = self._console if self._console.is_terminal else plain_console(file=self._console.file, width=250)
        for whole in sections(done.question, done.rows):
            self._section(narrowed(whole, console.width), console)
        self.say("")
        for note in notes(done.question, done.rows):
            self.say(note)
        self._selected(done, console)
        for sentence in sentences(done.question, done.decided):
            self.say(f"claim {sentence}")
        if done.sheet is not None:
            self._layout(done.sheet, console)
        for why in dict.fromkeys(done.failures.values()):
            cells = [cell for cell, reason in done.failures.items() if reason == why]
            more = f" and {len(cells) - 1} more" if len(cells) > 1 else ""
            self.say(f"failed: {cells[0]}{more}: {why}")
        folder = done.folder
        self.say(f"\n{folder}/table.md      every column; also as .csv and .tex")
        self.say(f"{folder}/curves.png    also as .svg, .pdf and .csv")
        if done.sheet is not None:
            self.say(f"{folder}/layout.md     the table in its layout; also as .csv, .tex, .png, .svg and .pdf")
        pace = "" if self._pace is None else f" ({self._pace:,.0f} cells an hour)"
        self.say(f"{done.cells}/        a run folder for each cell, listed in cells.csv{pace}")

    def _section(self, section: Section, console: Console) -> None:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for index, column in enumerate(section.header):
            table.add_column(Text(harmless(column)), justify="right" if index else "left", no_wrap=True)
        for index, line in enumerate(section.lines):
            table.add_row(*(Text(harmless(word)) for word in line), style="bold" if index in section.best else None)
        self.say(f"\n{section.title}" if section.title else "")
        console.print(table)

    def _selected(self, done: Comparison, console: Console) -> None:
        """The settings chosen on validation rows, and their scores on test rows."""
        from fedloom.report.comparison.selected import chosen_sections, selection_notes
        from fedloom.report.comparison.text import narrowed

        if done.selection is None:
            return
        self.say("\nchosen by validation:")
        for section in chosen_sections(done.selection):
            self._section(narrowed(section, console.width), console)
        self.say("")
        for note in selection_notes(done.selection):
            self.say(note)

    def _layout(self, sheet: Sheet, console: Console) -> None:
        """The tables in the layout of the recipe, side by side as far as the terminal is wide."""
        from fedloom.report.comparison.sheet_text import across, legend
        from fedloom.report.comparison.sheet_text import lines as lines_of

        header = ["\n".join(column) for column in sheet.columns]
        for block in sheet.blocks:
            lines = lines_of(sheet, block)
            self.say(f"\n{block.title}" if block.title else "")
            for group in across(header, lines, console.width):
                table = Table(box=None, pad_edge=False, header_style="bold")
                table.add_column(Text(harmless(sheet.layout.rows)), no_wrap=True)
                for i in group:
                    table.add_column(Text(harmless(header[i])), justify="right", no_wrap=True)
                for line in lines:
                    label = Text(harmless(f"  {line.label}" if line.is_paper else line.label))
                    table.add_row(label, *(_cell(line.cells[i]) for i in group), style="dim" if line.is_paper else None)
                console.print(table)
        self.say("")
        for note in legend(sheet):
            self.say(note)


def _cell(words: Iterable[Word]) -> Text:
    """The numbers of a cell, the best of their column in bold."""
    return Text(" / ").join(Text(word.text, style="bold" if word.best else "") for word in words)
