"""``fedloom collect``: keep the results of comparisons, and draw their tables again without training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedloom.cli.options import JsonResult, NoUserCode, Root, Trust, refuse_user_code
from fedloom.core.errors import ConfigError, Fault

if TYPE_CHECKING:
    from fedloom.compare.collect import Collected
    from fedloom.compare.plan import ComparisonPlan
    from fedloom.compare.sources import FinishedCells

Words = Annotated[
    list[str],
    typer.Argument(
        metavar="COMPARISON.toml|FOLDER|LIST.txt... [KEY=VALUE]...",
        help="Comparisons, folders or lists of them, and the settings that were changed when they ran.",
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(help="The folder of the results; of several comparisons, the folder above theirs (results)."),
]
From = Annotated[
    list[Path] | None,
    typer.Option(
        "--from",
        help="Where to look for finished cells (may be repeated): any folder above them, a results folder, or a tar "
        "archive. Default: where compare puts them.",
    ),
]


def collect(
    words: Words,
    out: Out = None,
    from_: From = None,
    replace: Annotated[bool, typer.Option("--replace", help="Take the newly found result where two differ.")] = False,
    missing: Annotated[bool, typer.Option("--missing", help="Only list the cells that are still missing.")] = False,
    json_: JsonResult = False,
    trust: Trust = False,
    no_user_code: NoUserCode = False,
    data_root: Root = None,
) -> None:
    """Keep finished cells as small files; make tables from them.

    Nothing is trained. Cells of several machines and days are matched by the hash of their settings. Without
    --out the results of experiments/PAPER/RECIPE.toml go to results/PAPER/RECIPE.
    """
    from fedloom.compare.sources import look

    refuse_user_code(no_user_code)
    recipes = _recipes([Path(word) for word in words if "=" not in word])
    settings = [word for word in words if "=" in word]
    if missing:
        _print_missing(recipes, settings, out or Path("results"), trust=trust, as_json=json_)
        return
    sources = {path: look(path) for path in from_ or ()}
    many = len(recipes) > 1
    found = {}
    for recipe in recipes:
        folder = _folder(recipe, out, many=many)
        done = _collected(recipe, settings, folder, sources, replace=replace, trust=trust, data_root=data_root)
        if done is not None:
            found[recipe] = done
    if not found:
        where = ", ".join(map(str, from_ or ())) or "where compare puts them"
        fix = "run it with fedloom compare, or name the folder of its cells"
        raise ConfigError(
            [Fault("--from", f"no finished cell of {', '.join(map(str, recipes))} is below {where}", fix)]
        )
    _print(found, as_json=json_, many=many)


def _recipes(paths: list[Path]) -> list[Path]:
    """The comparisons in these files and folders."""
    from fedloom.compare.pages import recipes_in
    from fedloom.runs.settings import read_toml

    out = []
    for path in paths:
        if path.suffix == ".txt" and path.is_file():
            out += recipes_in(path)
        elif path.is_dir():
            out += [file for file in sorted(path.rglob("*.toml")) if "compare" in read_toml(file)]
        else:
            out.append(path)
    if not out:
        raise ConfigError([Fault("collect", f"no comparison in {', '.join(map(str, paths)) or 'the arguments'}")])
    return out


def _folder(recipe: Path, out: Path | None, *, many: bool) -> Path:
    if out is not None and not many:
        return out
    if _is_of_folder(recipe):
        return (out or Path("results")) / recipe.resolve().parent.name
    return (out or Path("results")) / recipe.resolve().parent.name / recipe.stem


def _is_of_folder(recipe: Path) -> bool:
    """Whether this is the file that compare writes beside its tables."""
    return recipe.name == "compare.toml"


def _collected(
    recipe: Path,
    settings: list[str],
    out: Path,
    sources: dict[Path, FinishedCells],
    *,
    replace: bool,
    trust: bool,
    data_root: Path | None,
) -> Collected | None:
    from fedloom.compare.collect import collect as gather
    from fedloom.compare.sources import look
    from fedloom.core.disk import as_name

    planned = _planned(recipe, settings, trust=trust)
    usual = Path("runs") / f"compare-{as_name(planned.base.get('name') or recipe.stem)}"
    own = [recipe.parent] if _is_of_folder(recipe) else []
    places = [place for place in (*own, usual, Path(planned.spec.cells or usual)) if place.is_dir()]
    found = list(sources.values()) or [look(place) for place in dict.fromkeys(places)]
    return gather(planned, out, found, data_root=data_root, replace=replace)


def _planned(recipe: Path, settings: list[str], *, trust: bool) -> ComparisonPlan:
    from fedloom.compare.plan import plan
    from fedloom.core import usercode
    from fedloom.runs.overrides import override
    from fedloom.runs.settings import read_toml

    table = read_toml(recipe)
    usercode.vouch(table if trust else {})
    return plan(override(table, settings)[0])


def _print_missing(recipes: list[Path], settings: list[str], results: Path, *, trust: bool, as_json: bool) -> None:
    """For each comparison the cells that are missing from all results, and how to run the next ones."""
    from fedloom.cli.console import plain_console
    from fedloom.compare.collect import coverage

    found = {recipe: coverage(_planned(recipe, settings, trust=trust), results) for recipe in recipes}
    if as_json:
        print(json.dumps({str(recipe): each.as_json() for recipe, each in found.items()}))
        return
    screen = plain_console(soft_wrap=True)
    for recipe, each in found.items():
        by_seed = ", ".join(f"seed {seed}: {there} of {cells}" for seed, (there, cells) in each.seeds.items())
        screen.print(f"{recipe}: {len(each.kept)} of {len(each.cells)} cells ({by_seed})", markup=False)
        if each.missing:
            seed = each.missing[0].seed
            left = sum(cell.seed == seed for cell in each.missing)
            kept = f" --kept {results}" if each.kept else ""
            screen.print(f"  next {left} cells: fedloom compare {recipe} --seed {seed}{kept}", markup=False)


def _print(found: dict[Path, Collected], *, as_json: bool, many: bool) -> None:
    """The tables of one comparison, or a line for each of several."""
    from fedloom.cli.console import plain_console
    from fedloom.report.comparison import text

    if as_json:
        each = {str(recipe): _as_json(done) for recipe, done in found.items()}
        print(json.dumps(each if many else next(iter(each.values()))))
        return
    screen = plain_console(soft_wrap=True)
    for recipe, done in found.items():
        if not many:
            screen.print(text.markdown(done.comparison.question, done.comparison.rows), markup=False)
        there = f"{done.cells - len(done.missing)} of {done.cells} cells, {done.new} of them new"
        screen.print(f"{f'{recipe}: ' if many else ''}{there}: {done.comparison.folder}", markup=False)


def _as_json(done: Collected) -> dict[str, Any]:
    missing = [cell.name for cell in done.missing]
    return done.comparison.as_json() | {"new": done.new, "missing": missing}
