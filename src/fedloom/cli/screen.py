"""What a run and a comparison show while they last, and at their end."""

from __future__ import annotations

import json
import math
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import click
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn
from rich.table import Column, Table
from rich.text import Text

from fedloom import __version__
from fedloom.core.disk import as_name
from fedloom.core.errors import ConfigError, Fault, FedloomError
from fedloom.runs.launch import follow_parent


def shown(as_json: bool, work: Callable[[Any], Any]) -> None:
    from fedloom.runs.loop import InterruptedRun, Silence

    if follows():
        try:
            work(Silence())
        except InterruptedRun as stop:
            raise typer.Exit(130) from stop
        return
    watch = RunScreen(Console(stderr=as_json, highlight=False, soft_wrap=True))
    try:
        history = work(watch)
    except InterruptedRun as stop:
        watch.close()
        watch.say(f"stopped and saved after round {stop.round}; go on with: fedloom resume {stop.run_dir}")
        raise typer.Exit(130) from stop
    finally:
        watch.close()
    watch.ended(history)
    if as_json:
        print(json.dumps(history.as_json()))


class RunScreen:
    """Shows a run: a live bar on a terminal, plain lines elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar: Progress | None = None
        self._task: Any = None
        self._said, self._began, self._done, self._clients = 0.0, 0.0, 0, 0
        self._excluded, self._missed, self._idle = 0, 0, 0
        self._deaf = False

    def say(self, text: str) -> None:
        self._show(text)

    def _show(self, thing: Any) -> None:
        """Print, unless nobody reads any more: a reader who leaves must not end the run."""
        if self._deaf:
            return
        try:
            self._console.print(thing, markup=False)
        except BrokenPipeError:
            self._deaf = True
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115  the interpreter flushes it at exit

    def started(self, prepared: Any, folder: Path | None, done: int) -> None:
        import torch

        exp, shared = prepared.experiment, prepared.shared
        for note in prepared.config.notes:
            self.say(f"note: {note}")
        device = f"{exp.device} ({torch.get_num_threads()} threads)" if exp.device.type == "cpu" else str(exp.device)
        device += f" · {exp.ranks.size} ranks" if exp.ranks.size > 1 else ""
        place = f" · {folder}" if folder else ""
        steps = {"eager": "", "graph": ", recorded", "compiled": ", compiled and recorded"}[exp.task.capture]
        exact = exp.task.precision == "fp32" or (exp.device.type == "cpu" and exp.task.precision == "tf32")
        steps += "" if exact else f" · {exp.task.precision}"
        how = f"{exp.executor} ({prepared.reason}){steps}"
        self.say(f"fedloom {__version__} · {device} · {how} · seed {exp.seed}{place}")
        s = shared.summary()
        trained, whole = exp.task.size, exp.task.whole
        parameters = f"{trained:,} parameters" if trained == whole else f"{trained:,} of {whole:,} parameters trained"
        self.say(
            f"{shared.arrays.name}: {s.rows:,} rows on {s.clients:,} clients ({s.size_min} to {s.size_max}, median "
            f"{s.size_median:g}) · {s.classes_mean:.1f} of {s.classes} classes each · heterogeneity "
            f"{s.heterogeneity:.2f} · {len(exp.federation.common):,} test rows · {parameters}"
        )
        for note in shared.notes:
            self.say(f"partition: {note}")
        if shared.bad:
            self.say(f"bad clients: {len(shared.bad):,} of {shared.clients:,} ({shared.badness})")
        if exp.guard is not None:
            self.say(f"privacy: {exp.guard.told(exp.rounds)}")
        if exp.topology is not None:
            self._network(exp)
        if done:
            self.say(f"resumed after round {done} of {exp.rounds}")
        if forget := getattr(exp.algorithm, "forget", ()):
            self.say(f"to be forgotten: clients {list(forget)}")
        self._began, self._done = time.perf_counter(), done
        if self._console.is_terminal:
            columns = (
                SpinnerColumn(),
                TextColumn("round {task.completed}/{task.total}"),
                BarColumn(),
                TextColumn("{task.fields[now]}"),
            )
            self._bar = Progress(*columns, console=self._console, transient=True)
            self._task = self._bar.add_task("rounds", total=exp.rounds, completed=done, now="")
            self._bar.start()

    def _network(self, exp: Any) -> None:
        from fedloom.engine.topology import facts

        found = facts(exp.topology, exp.federation.clients, exp.seed, tuple(exp.federation.train.sizes.tolist()))
        low, high = found.degree_min, found.degree_max
        degree = f"{low}" if low == high else f"{low} to {high}"
        self.say(f"{found.kind}: {degree} neighbours each · psi {found.psi:.4f} in a gossip step")
        for note in found.notes:
            self.say(f"topology: {note}")

    def advanced(self, progress: Any) -> None:
        self._clients += progress.clients
        now = time.perf_counter()
        elapsed = now - self._began
        pace = (progress.round - self._done) / elapsed
        left = (progress.rounds - progress.round) / pace
        shown = [f"{short(n)} {brief(v)}" for n, v in headline(progress.metrics)]
        text = "  ".join([*shown, f"{self._clients / elapsed:,.3g} clients/s", f"{span(left)} left"])
        for note in progress.notes:
            self.say(f"round {progress.round}: {note}")
        if progress.excluded:
            self._excluded += len(progress.excluded)
            self.say(f"round {progress.round}: left out clients {list(progress.excluded)}: their work was not finite")
        if progress.late and progress.late == progress.clients:
            self._missed += 1
        self._idle += not progress.clients
        if self._bar is not None:
            self._bar.update(self._task, completed=progress.round, now=text)
        elif now - self._said >= 2.0 or progress.round == progress.rounds:
            self._said = now
            self.say(f"round {progress.round}/{progress.rounds}  {text}")

    def stopping(self) -> None:
        self.say("finishing this round, then saving (again to stop at once)")

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _sketch(self, history: Any) -> None:
        """The course of the first accuracy in one line of text."""
        frame = history.metrics
        names = [name for name in frame if name.endswith("/accuracy")]
        if not names or len(frame) < 3:
            return
        values = [v for v in frame[names[0]].tolist() if not math.isnan(v)]
        picked = [values[round(i * (len(values) - 1) / 49)] for i in range(50)] if len(values) > 50 else values
        line = "".join("▁▂▃▄▅▆▇█"[min(7, int(8 * v))] for v in picked)
        self.say(f"\n{names[0]}  {line}  {values[-1]:.1%}")

    def ended(self, history: Any) -> None:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for column in ("metric", "last", "best", "mean of last 10"):
            table.add_column(column, justify="left" if column == "metric" else "right")
        for name, value in history.summary.items():
            if name.endswith(("/accuracy", "/loss", "/accuracy_worst10", "/distance")):
                table.add_row(name, *(f"{v:.4f}" for v in value))
        self._show(table)
        self._sketch(history)
        if self._excluded:
            self.say(f"{self._excluded} client updates were not finite and left out")
        if self._missed:
            self.say(f"in {self._missed} rounds no client met system.deadline, and the model stayed as it was")
            self._missed = 0
        if self._idle:
            of = "the only round" if history.rounds == 1 else f"{self._idle} of {history.rounds} rounds"
            self.say(f"warning: in {of} nobody trained (all clients were late or lost), and the model stayed as it was")
        up, down = (history.records[-1].get(f"bytes/{way}", 0) for way in ("up", "down"))
        pace = f"{history.rounds} round{'' if history.rounds == 1 else 's'} in {history.seconds:.1f} s"
        among = up and not down  # in a network, where there is no server to receive from
        sent = f"nodes sent {as_bytes(up)}" if among else f"clients sent {as_bytes(up)} and received {as_bytes(down)}"
        self.say(f"{pace} · {sent}")
        if history.run_dir is None:
            return
        run = history.run_dir
        self.say(f"\n{run}/metrics.jsonl   every evaluation\n{run}/curves.png      the curves")
        model = "model.safetensors" if (run / "model.safetensors").exists() else "personal.safetensors"
        self.say(f"{run}/{model}")
        other = "fedopt" if history.algorithm != "fedopt" else "fedavg"
        further = f"  fedloom resume {run} --rounds {2 * history.rounds}\n"
        further = "" if (run / "privacy.json").exists() else further  # whose noise may be for just so many rounds
        self.say(
            f"\nnext:\n{further}"
            f"  fedloom run {run}/config.toml algorithm.kind={other}\n"
            f"  fedloom describe {history.algorithm}"
        )


class ComparisonScreen:
    """Shows a comparison: a live bar on a terminal, plain lines elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar: Progress | None = None
        self._task: Any = None
        self._said = time.perf_counter()

    def say(self, text: str) -> None:
        self._console.print(text, markup=False)

    def started(self, planned: Any, folder: Path, jobs: int, standing: Any) -> None:
        methods, places, seeds = len(planned.methods), len(planned.places), len(planned.spec.seeds)
        grid = f" x {places} places of the grid" if planned.axes else ""
        self.say(f"fedloom {__version__} · {methods} methods{grid} x {seeds} seeds · {jobs} side by side · {folder}")
        for note in planned.notes:
            self.say(f"note: {note}")
        if standing.reused:
            self.say(f"{standing.reused} of {standing.cells} cells are done already")
        if self._console.is_terminal and standing.reused < standing.cells:
            columns = (
                SpinnerColumn(),
                TextColumn("cells {task.completed}/{task.total}"),
                BarColumn(),
                TextColumn("{task.fields[now]}", table_column=Column(no_wrap=True, overflow="ellipsis")),
            )
            self._bar = Progress(*columns, console=self._console, transient=True)
            self._task = self._bar.add_task("cells", total=standing.cells, completed=standing.done, now="")
            self._bar.start()

    def moved(self, standing: Any) -> None:
        left = "" if standing.seconds_left is None else f"{span(standing.seconds_left)} left"
        running = "; ".join(f"{name} {done}/{rounds}" for name, done, rounds in standing.running)
        now = "  ".join(part for part in (left, running) if part)
        clock, ended = time.perf_counter(), standing.ended.partition("\n")[0]
        if self._bar is not None:
            self._bar.update(self._task, completed=standing.done, now=now)
            if ended and not ended.endswith(": done"):
                self.say(ended)
        elif ended or clock - self._said >= 10.0:
            self._said = clock
            told = (f"cells {standing.done}/{standing.cells}", ended, left if ended else now)
            self.say("  ".join(part for part in told if part))

    def stopping(self) -> None:
        self.say("finishing the rounds at work, then saving (again to stop at once)")

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def ended(self, done: Any) -> None:
        from fedloom.report import comparison as report

        console = self._console if self._console.is_terminal else Console(file=self._console.file, width=250)
        for whole in report.sections(done.question, done.rows):
            section = report.narrowed(whole, console.width)
            table = Table(box=None, pad_edge=False, header_style="bold")
            for index, column in enumerate(section.header):
                table.add_column(Text(column), justify="right" if index else "left", no_wrap=True)
            for index, line in enumerate(section.lines):
                table.add_row(*(Text(word) for word in line), style="bold" if index == section.best else None)
            self.say(f"\n{section.title}" if section.title else "")
            console.print(table)
        self.say("")
        for note in report.notes(done.question, done.rows):
            self.say(note)
        if done.sheet is not None:
            self._layout(done.sheet, console)
        for why in dict.fromkeys(done.failures.values()):
            cells = [cell for cell, reason in done.failures.items() if reason == why]
            more = f" and {len(cells) - 1} more" if len(cells) > 1 else ""
            self.say(f"failed: {cells[0]}{more}: {why}")
        folder = done.folder
        self.say(f"\n{folder}/table.md      every column; also as .csv and .tex\n{folder}/curves.png    also as .svg")
        if done.sheet is not None:
            self.say(f"{folder}/layout.md     the table in its layout; also as .csv, .tex, .png and .svg")
        self.say(f"{done.cells}/        a run folder for each cell, listed in cells.csv")

    def _layout(self, sheet: Any, console: Console) -> None:
        """The tables in the layout of the recipe, side by side as far as the terminal is wide."""
        from fedloom.report import grid

        header = ["\n".join(column) for column in sheet.columns]
        for block in sheet.blocks:
            lines = grid.lines(sheet, block)
            self.say(f"\n{block.title}" if block.title else "")
            for group in grid.across(header, lines, console.width):
                table = Table(box=None, pad_edge=False, header_style="bold")
                table.add_column(Text(sheet.layout.rows), no_wrap=True)
                for i in group:
                    table.add_column(Text(header[i]), justify="right", no_wrap=True)
                for line in lines:
                    label = Text(f"  {line.label}" if line.is_paper else line.label)
                    table.add_row(label, *(_cell(line.cells[i]) for i in group), style="dim" if line.is_paper else None)
                console.print(table)
        self.say("")
        for note in grid.legend(sheet):
            self.say(note)


def _cell(words: Any) -> Text:
    """The numbers of a cell, the best of their column in bold."""
    return Text(" / ").join(Text(word.text, style="bold" if word.best else "") for word in words)
