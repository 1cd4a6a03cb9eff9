"""``fedloom compare``: algorithms over seeds and settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import click
import typer

from fedloom.cli.options import JsonResult, NoUserCode, Root, Trust, WithPage, is_name, refuse_user_code
from fedloom.cli.show import show
from fedloom.core.disk import as_name
from fedloom.core.errors import ConfigError, Fault, NothingToRunError

if TYPE_CHECKING:
    from fedloom.compare.plan import ComparisonPlan
    from fedloom.compare.write import Comparison

Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[COMPARISON.toml | ALGORITHM... | RUN...] [KEY=VALUE]...",
        help="A comparison file, or algorithms, and settings that override it; or folders of runs.",
    ),
]


def _each_seed(seeds: list[str]) -> str:
    """How these seeds are written on the command line."""
    return " ".join(f"--seed {seed.strip()}" for seed in seeds)


class _Seeds(click.IntRange):
    """A number that may not be a list of seeds, with the way in which these are named."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        parts = value.split(",") if isinstance(value, str) else []
        if len(parts) > 1 and param is not None and all(part.strip().isdecimal() for part in parts):
            what, fix = f"is one number (got '{value}')", f"name each: {_each_seed(parts)}"
            raise ConfigError([Fault(param.opts[0], what, fix)])
        return super().convert(value, param, ctx)


Seeds = Annotated[
    int | None,
    typer.Option(click_type=_Seeds(min=1), help="How many seeds: 0, 1, ... (default: the file's seeds, or 3)."),
]
Seed = Annotated[
    list[int] | None,
    typer.Option(
        click_type=_Seeds(min=0), help="Add this seed (may be repeated); seeds already in the folder are kept."
    ),
]
Grid = Annotated[list[str] | None, typer.Option(help="An axis: KEY=VALUE,VALUE,... (may be repeated).")]
Baseline = Annotated[str | None, typer.Option(help="The method to test against; the first by default.")]
Metric = Annotated[str | None, typer.Option(help="The metric to compare by; by default the first accuracy.")]
Select = Annotated[
    str | None,
    typer.Option(
        metavar="METRIC",
        help="Choose each method's best point of the grid by this metric on validation rows, such as accuracy or loss.",
    ),
]
Target = Annotated[float | None, typer.Option(help="Report what it took to reach this value.")]
Against = Annotated[
    Literal["rounds", "seconds", "bytes", "busiest", "gradients"] | None,
    typer.Option(help="What curves are drawn against; by default what is equal. Seconds are simulated."),
]
Equal = Annotated[
    Literal["rounds", "gradients", "bytes", "busiest"] | None,
    typer.Option(help="The budget that all methods share; each runs as many rounds as it allows. Default: rounds."),
]
Reference = Annotated[
    str | None, typer.Option(help="The method whose spending is the budget of all; by default the baseline.")
]
Together = Annotated[int, typer.Option(min=1, help="Runs of a method that share their steps, for small nets on a GPU.")]
KeptBelow = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", help="Do not run cells whose results are kept in this folder: see fedloom collect."),
]
OnlyCells = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY=VALUE",
        help="Run only cells of this method (algorithm=NAME) or value of an axis (may be repeated).",
    ),
]
Budget = Annotated[float | None, typer.Option(help="The budget itself, in gradients or in MB, instead of a reference.")]


def compare(
    words: Words = None,
    seeds: Seeds = None,
    seed: Seed = None,
    grid: Grid = None,
    baseline: Baseline = None,
    metric: Metric = None,
    select: Select = None,
    target: Target = None,
    x: Against = None,
    equal: Equal = None,
    reference: Reference = None,
    budget: Budget = None,
    out: Annotated[Path | None, typer.Option(help="The folder; by default one below runs/.")] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Cells side by side; by default as many as fit.")] = None,
    together: Together = 1,
    kept: KeptBelow = None,
    only: OnlyCells = None,
    watch: WithPage = False,
    json_: JsonResult = False,
    trust: Trust = False,
    no_user_code: NoUserCode = False,
    data_root: Root = None,
) -> None:
    """Compare algorithms over seeds and a grid of settings.

    After an interruption, repeat the command to resume. Folders of finished runs are shown side by side.

    \b
    fedloom compare fedavg fedprox --seeds 3 --grid partition.alpha=0.1,1.0 rounds=30
    fedloom compare runs/first runs/second
    """
    refuse_user_code(no_user_code)
    _refuse_options(seeds, seed, select)
    given = _given(seeds=seed or seeds, baseline=baseline, metric=metric, select=select, target=target)
    given |= _given(x=x, equal=equal, reference=reference, budget=budget)
    words = words or []
    if _are_results(words, given, grid, out, jobs, together > 1, kept, only, watch):
        show([Path(word) for word in words], json_=json_)
    table, name = _comparison(words, grid or [], given, trust=trust)
    planned = _planned(table, words)
    folder = out or Path("runs") / f"compare-{as_name(table.get('name') or name or planned.name)}"
    planned = _with_seeds_of(folder, planned, table, words, seed or [])
    how = {
        "data_root": data_root,
        "jobs": jobs,
        "together": together,
        "kept": kept,
        "only": _only(only or []),
        "trust": trust,
    }
    done = _shown(planned, folder, how, as_json=json_, watch=watch)
    if json_:
        print(json.dumps(done.as_json()))
    if done.failures:
        raise typer.Exit(1)


def _given(**options: Any) -> dict[str, Any]:
    """The options that were written."""
    return {name: value for name, value in options.items() if value is not None}


def _planned(table: dict[str, Any], words: list[str]) -> ComparisonPlan:
    """The comparison as a plan; its faults with advice for what was typed."""
    from fedloom.compare.plan import plan

    try:
        return plan(table)
    except ConfigError as error:
        raise ConfigError([_advised(fault, words) for fault in error.faults]) from error


def _advised(fault: Fault, words: list[str]) -> Fault:
    """The fault, with the option instead of a setting that takes one value or that the comparison sets itself."""
    typed = next((word for word in words if word.partition("=")[0] == fault.where), "")
    value = typed.partition("=")[2]
    if fault.where == "seed" and value:
        return fault._replace(
            fix="write " + " ".join(f"--seed {each.strip()}" for each in value.strip("[]").split(","))
        )
    return fault._replace(fix=f"to try each of them: --grid {typed}") if "," in value and not fault.fix else fault


def _only(pairs: list[str]) -> dict[str, list[str]]:
    """The values of ``--only KEY=VALUE`` by their keys."""
    chosen: dict[str, list[str]] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise ConfigError(
                [Fault("--only", f"is not of the form key=value (got '{pair}')", "as in algorithm=fedavg")]
            )
        chosen.setdefault(key.strip(), []).append(value.strip())
    return chosen


def _refuse_options(seeds: int | None, seed: list[int] | None, select: str | None) -> None:
    """Refuse options that contradict each other or lack their value, and torchrun."""
    from fedloom.engine.ranks import is_rank

    if is_rank():
        why = "a comparison starts its own processes"
        raise ConfigError([Fault("torchrun", why, "run it without torchrun, and see --jobs")])
    if seeds is not None and seed:
        raise ConfigError([Fault("--seed", "cannot be combined with --seeds", "leave one of them out")])
    if select is not None and select.startswith("-"):  # the option after it, taken for its value
        raise ConfigError([Fault("--select", f"should be a metric (got '{select}')", "as in --select accuracy")])


def _are_results(words: list[str], *options: object) -> bool:
    """Whether the arguments are folders of results, with no option that is for new runs."""
    return bool(words) and all(map(_is_result, words)) and not any(options)


def _is_result(word: str) -> bool:
    """Whether an argument names the folder of a run or of a comparison."""
    return is_name(word) and any((Path(word) / name).is_file() for name in ("config.toml", "compare.toml"))


def _with_seeds_of(
    folder: Path, planned: ComparisonPlan, table: dict[str, Any], words: list[str], added: list[int]
) -> ComparisonPlan:
    """The plan with the seeds that are already in its folder, if some were added one by one."""
    others = _seeds_in(folder) - set(added) if added else set()
    if not others:
        return planned
    return _planned({**table, "compare": {**table["compare"], "seeds": sorted({*added, *others})}}, words)


def _seeds_in(folder: Path) -> set[int]:
    """The seeds of the comparison in a folder."""
    from fedloom.runs.settings import read_toml

    if not (folder / "compare.toml").is_file():
        return set()
    found = read_toml(folder / "compare.toml").get("compare")
    seeds = found.get("seeds") if isinstance(found, dict) else None
    return {seed for seed in seeds if isinstance(seed, int)} if isinstance(seeds, list) else set()


def _shown(planned: ComparisonPlan, folder: Path, how: dict[str, Any], *, as_json: bool, watch: bool) -> Comparison:
    """Run the cells and show progress; after an interruption, print how to resume."""
    from fedloom.cli.console import plain_console
    from fedloom.cli.screen import ComparisonScreen
    from fedloom.cli.watch import watched
    from fedloom.compare.crew import InterruptedComparison
    from fedloom.compare.run import run

    screen = ComparisonScreen(plain_console(stderr=as_json, soft_wrap=True))
    try:
        with watched(screen, watch) as watcher:
            done = run(planned, folder, **how, watcher=watcher)
    except NothingToRunError as nothing:
        print(json.dumps({"folder": None, "cells": 0}) if as_json else nothing)
        raise typer.Exit(0) from nothing
    except InterruptedComparison as stop:
        screen.close()
        screen.say(f"stopped and saved with {stop.done} of {stop.cells} cells done; repeat the command to continue")
        if (stop.folder / "table.md").is_file():
            screen.say(f"the tables of the cells that are done: {stop.folder / 'table.md'}")
        raise typer.Exit(130) from stop
    finally:
        screen.close()
    screen.ended(done)
    return done


def _comparison(
    words: list[str], grid: list[str], options: dict[str, Any], *, trust: bool
) -> tuple[dict[str, Any], str]:
    """The table of a comparison from command-line arguments, and the name of its file."""
    from fedloom.core import usercode
    from fedloom.runs.overrides import override
    from fedloom.runs.settings import read_toml

    files = [w for w in words if "=" not in w and w.endswith(".toml")]
    kinds = [w for w in words if is_name(w)]
    if folders := [w for w in kinds if _is_result(w)]:
        fix = f"folders are shown side by side without other arguments: fedloom compare {' '.join(folders)}"
        raise ConfigError([Fault(folders[0], "is a folder of results, but the other arguments are for new runs", fix)])
    if len(files) > 1:
        raise ConfigError([Fault(files[1], "a second comparison file", "settings are written key=value")])
    given = read_toml(Path(files[0])) if files else {}
    usercode.vouch([kinds, given if trust else {}])
    table, _ = override(given, [w for w in words if "=" in w])
    chosen = table.setdefault("compare", {})
    if not isinstance(chosen, dict):
        raise ConfigError([Fault("compare", f"should be a table of settings (got {chosen!r})")])
    if not kinds and "algorithms" not in chosen:
        raise ConfigError([Fault("fedloom compare", "no algorithm is named", "as in fedloom compare fedavg fedprox")])
    if kinds:
        chosen["algorithms"] = kinds
    axes = dict(_axis(words) for words in grid)
    usercode.vouch(axes)
    if axes:
        chosen["grid"] = {**chosen.get("grid", {}), **axes}
    return {**table, "compare": {**chosen, **options}}, Path(files[0]).stem if files else ""


def _axis(words: str) -> tuple[str, list[Any]]:
    """The setting and the values of ``--grid KEY=VALUE,VALUE``."""
    from fedloom.runs.overrides import value_of

    key, equals, text = words.partition("=")
    if not equals:
        raise ConfigError([Fault("--grid", f"is not of the form key=value,value (got '{words}')")])
    several = (value for value in (value_of(text), value_of(f"[{text}]")) if isinstance(value, list))
    return key, next(several, [value_of(v.strip()) for v in text.split(",")])
