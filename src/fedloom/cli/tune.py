"""``fedloom tune``: search for settings on validation rows."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedloom.cli.options import (
    JsonResult,
    NoUserCode,
    Root,
    Trust,
    file_and_overrides,
    is_name,
    refuse_twice,
    refuse_user_code,
)
from fedloom.core.disk import as_name
from fedloom.core.errors import ConfigError, Fault

if TYPE_CHECKING:
    from fedloom.cli.screen import ComparisonScreen
    from fedloom.compare.tune import Tuned

Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[EXPERIMENT.toml | ALGORITHM] SETTING=RANGE... [KEY=VALUE]...",
        help="An experiment or an algorithm, what to search (LOW..HIGH, LOW..HIGH:log or A,B,C), and fixed settings.",
    ),
]


def tune(
    words: Words = None,
    trials: Annotated[int, typer.Option(min=1, help="How many settings to try in total.")] = 20,
    metric: Annotated[
        str, typer.Option(help="The metric on validation rows to search by, such as loss; accuracy by default.")
    ] = "",
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds per trial.")] = 1,
    out: Annotated[Path | None, typer.Option(help="The folder; by default one below runs/.")] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Runs side by side; by default as many as fit.")] = None,
    json_: JsonResult = False,
    trust: Trust = False,
    no_user_code: NoUserCode = False,
    data_root: Root = None,
) -> None:
    """Search for the settings that are best on validation rows.

    After an interruption, repeat the command to resume; raise --trials to continue.

    fedloom tune local.lr=0.001..1:log local.epochs=1..5 --trials 30 evaluate.validation=0.2
    """
    from fedloom.cli.console import plain_console
    from fedloom.cli.screen import ComparisonScreen
    from fedloom.compare.ranges import is_range, ranges_of
    from fedloom.compare.tune import InterruptedSearch, Search, checked_search
    from fedloom.compare.tune import tune as searched
    from fedloom.core import usercode
    from fedloom.data.files import default_root
    from fedloom.engine.ranks import is_rank

    if is_rank():
        why = "a search starts its own processes"
        raise ConfigError([Fault("torchrun", why, "run it without torchrun, and see --jobs")])
    refuse_user_code(no_user_code)
    given = [_setting(word) for word in words or []]
    refuse_twice(given)
    file, fixed = file_and_overrides([word for word in given if not is_range(word)])
    base, name = _experiment(file, fixed, trust=trust)
    ranges = ranges_of([word for word in given if is_range(word)])
    usercode.vouch([each.choices for each in ranges])  # naming code on the command line is consent to run it
    search = checked_search(Search(base, ranges, trials, metric, seeds))
    folder = out or Path("runs") / f"tune-{as_name(name)}"
    screen = ComparisonScreen(plain_console(stderr=json_, soft_wrap=True))
    screen.searching(search, folder)
    try:
        done = searched(search, folder, data_root or default_root(), jobs, screen)
    except InterruptedSearch as stop:
        screen.close()
        screen.say(f"stopped and saved with {stop.done} of {stop.trials} trials done; repeat the command to continue")
        raise typer.Exit(130) from stop
    finally:
        screen.close()
    _say(done, screen, [str(file)] if file else [], fixed)
    if json_:
        print(json.dumps(done.as_json()))
    if done.best is None or done.failures:
        raise typer.Exit(1)


def _setting(word: str) -> str:
    """An argument; the bare name of an algorithm is a setting, as it is a method for ``compare``."""
    from fedloom.runs.find import choices_named

    named = f"algorithm={word}"
    return named if is_name(word) and named in choices_named(word) and not Path(word).exists() else word


def _experiment(file: Path | None, fixed: list[str], *, trust: bool) -> tuple[dict[str, Any], str]:
    """The experiment as a table, and a name for the folder of its search."""
    from fedloom.core import usercode
    from fedloom.runs.overrides import override
    from fedloom.runs.settings import parse, read_toml

    given = read_toml(file) if file is not None else {}
    if "compare" in given:
        raise ConfigError([Fault(str(file), "is a comparison (it has a section [compare])", "see compare --select")])
    if trust:
        usercode.vouch(given)
    table, _ = override(given, fixed)
    kinds = parse(table).kinds
    return table, file.stem if file is not None else f"{kinds['algorithm']}-{kinds['data']}"


def _say(done: Tuned, screen: ComparisonScreen, file: list[str], fixed: list[str]) -> None:
    """The best settings, what they score, and how to run them."""
    for why in dict.fromkeys(done.failures.values()):
        screen.say(f"failed: {why}")
    if done.best is None:
        screen.say("no trial ended with a value")
        return
    best = done.best
    screen.say(f"\nbest of {len(done.trials)}: trial {best.number}, {done.metric} {best.value:.4f}")
    for name, value in done.test.items():
        screen.say(f"its {name}, which was not used in the search: {value.mean:.4f}")
    for key, value in best.settings.items():
        screen.say(f"  {key} = {value}")
    for note in done.notes:
        screen.say(f"note: {note}")
    chosen = [f"{key}={value}" for key, value in best.settings.items()]
    screen.say(f"\n{done.folder}/trials.csv   every trial; the study: study.db")
    screen.say(f"{done.folder}/best.toml    the experiment with the best settings")
    screen.say(f"\nnext:\n  {shlex.join(['fedloom', 'run', *file, *fixed, *chosen])}")
