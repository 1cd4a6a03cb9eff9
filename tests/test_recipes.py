"""Every recipe is a valid experiment in all its cells, and says of its paper what the paper says."""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedloom.api import start
from fedloom.compare import plan
from fedloom.config import parse
from fedloom.data.sources import from_arrays
from fedloom.experiment import prepare, share

ROOT = Path(__file__).parents[1] / "experiments"
FILES = sorted(ROOT.glob("*/*.toml"))
COMPARED = [path for path in FILES if "compare" in tomllib.loads(path.read_text(encoding="utf-8"))]
Table = dict[str, Any]


def named(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}"


def split(path: Path) -> tuple[Table, Table]:
    """The experiment of a file, and its table of comparisons."""
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    return table, table.pop("compare", {})


def plain(value: Any) -> Any:
    return {k: v for k, v in value.items() if k != "label"} if isinstance(value, Mapping) else value


def label(value: Any) -> Any:
    """What a cell is called: by its label, else its kind, else its value."""
    return value.get("label", value.get("kind")) if isinstance(value, Mapping) else value


def applied(table: Table, key: str, value: Any) -> Table:
    section, _, leaf = key.partition(".")
    return table | {section: table.get(section, {}) | {leaf: plain(value)} if leaf else plain(value)}


def cells(base: Table, compare: Table) -> Iterator[Table]:
    """Every experiment of a comparison, but for its seeds."""
    grid = compare.get("grid", {})
    for values in itertools.product(*grid.values()):
        table = base
        for key, value in zip(grid, values, strict=True):
            table = applied(table, key, value)
        for algorithm in compare["algorithms"]:
            yield applied(table, "algorithm", algorithm)


def test_there_is_a_recipe_for_every_table_and_figure() -> None:
    assert {named(path) for path in FILES} >= {
        "fedalr/table1_cifar10", "fedalr/table1_cifar100", "fedalr/table2_settings", "fedalr/figure1_partitions",
        "fedalr/figure2_curves", "fedalr/figure3_settings", "fedalr/effective_step", "relaxation/figure1_loss",
        "relaxation/figure2_accuracy", "relaxation/sweep_alpha", "relaxation/stragglers",
    }  # fmt: skip


@pytest.mark.parametrize("path", FILES, ids=named)
def test_a_recipe_says_what_it_is_and_what_it_costs(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    head = "".join(itertools.takewhile(lambda line: line.startswith("#"), text.splitlines(keepends=True)))
    assert "# Cost: " in head
    assert f"experiments/{named(path)}.toml" in head
    assert named(path).split("/")[1] in (ROOT / "README.md").read_text(encoding="utf-8")
    assert max(map(len, text.splitlines())) <= 120


@pytest.mark.parametrize("path", FILES, ids=named)
def test_the_experiment_of_a_recipe_is_valid(path: Path) -> None:
    parse(split(path)[0])


@pytest.mark.parametrize("path", COMPARED, ids=named)
def test_every_cell_of_a_recipe_is_valid(path: Path) -> None:
    base, compare = split(path)
    assert set(compare) <= {"algorithms", "seeds", "baseline", "metric", "target", "grid", "paper"}
    assert len(set(compare["seeds"])) == len(compare["seeds"])
    configs = [parse(cell) for cell in cells(base, compare)]
    assert len(configs) == len(compare["algorithms"]) * np.prod([len(v) for v in compare["grid"].values()])
    for config in configs:
        assert not (compare["metric"].startswith("global/train") and not config.evaluate.train)


@pytest.mark.parametrize("path", COMPARED, ids=named)
def test_the_labels_of_a_recipe_are_distinct_and_exist(path: Path) -> None:
    _, compare = split(path)
    algorithms = [label(entry) for entry in compare["algorithms"]]
    assert len(set(algorithms)) == len(algorithms)
    assert compare["baseline"] in algorithms
    grid = {key: [label(value) for value in values] for key, values in compare["grid"].items()}
    assert all(len(set(labels)) == len(labels) for labels in grid.values())
    spots = set()
    for entry in compare.get("paper", []):
        assert set(entry) == {"algorithm", "where", "value"}
        assert entry["algorithm"] in algorithms
        assert set(entry["where"]) == set(grid)  # a number belongs to one cell
        for key, value in entry["where"].items():
            assert value in grid[key]
        spots.add((entry["algorithm"], *sorted(entry["where"].items())))
    assert len(spots) == len(compare.get("paper", []))


@pytest.mark.parametrize("path", COMPARED, ids=named)
def test_the_number_of_runs_is_as_said(path: Path) -> None:
    base, compare = split(path)
    runs = len(compare["seeds"]) * sum(1 for _ in cells(base, compare))
    assert f"= {runs} runs of {base['rounds']} rounds" in path.read_text(encoding="utf-8").replace("\n# ", " ")


# ------------------------------------------------------------------------------------ what the papers print


@pytest.mark.parametrize(
    ("name", "column", "gain", "best"),
    [
        ("table1_cifar10", "c=2", 12.89, "fedavg"),
        ("table1_cifar10", "d=0.1", 30.74, "fedavg"),
        ("table1_cifar100", "c=2", 3.57, "fedmgda"),
        ("table1_cifar100", "d=0.1", 7.07, "fedmgda"),
    ],
)
def test_the_gains_of_table_1_follow_from_its_numbers(name: str, column: str, gain: float, best: str) -> None:
    _, compare = split(ROOT / "fedalr" / f"{name}.toml")
    value = {e["algorithm"]: e["value"] for e in compare["paper"] if e["where"]["partition"] == column}
    assert len(value) == 7
    others = {k: v for k, v in value.items() if k != "fedalr"}
    assert max(others, key=lambda k: others[k]) == best
    assert abs(100 * (value["fedalr"] / others[best] - 1) - gain) < 0.01


def test_table_2_has_the_spreads_of_the_text() -> None:
    _, compare = split(ROOT / "fedalr" / "table2_settings.toml")
    fedalr, fedavg = ([e["value"] for e in compare["paper"] if e["algorithm"] == name] for name in ("fedalr", "fedavg"))
    assert max(fedalr) - min(fedalr) == pytest.approx(10.15)
    assert max(fedavg) - min(fedavg) == pytest.approx(13.70)


def test_the_figures_repeat_the_numbers_of_the_tables() -> None:
    figure = split(ROOT / "fedalr" / "figure2_curves.toml")[1]["paper"]
    for data in ("cifar10", "cifar100"):
        table = split(ROOT / "fedalr" / f"table1_{data}.toml")[1]["paper"]
        mine = [e | {"where": {"partition": e["where"]["partition"]}} for e in figure if e["where"]["data"] == data]
        assert sorted(mine, key=str) == sorted(table, key=str)


# ----------------------------------------------------------------------------------------- and they really run


@pytest.mark.parametrize("column", ["c=2", "d=0.1"])
def test_the_partitions_of_figure_1_are_those_of_table_1(column: str) -> None:
    """Ten classes of 500 rows stand for CIFAR-10: the ways of dealing read labels only."""
    _, compare = split(ROOT / "fedalr" / "table1_cifar10.toml")
    chosen = next(plain(v) for v in compare["grid"]["partition"] if v["label"] == column)
    y = np.repeat(np.arange(10), 500)
    arrays = from_arrays(np.zeros((5000, 1), np.float32), y, test=np.zeros(5000, bool))
    dealt = share(parse({"partition": chosen}), Path("unused"), arrays).summary()
    assert dealt.clients == 100
    if column == "c=2":
        assert (dealt.size_min, dealt.size_max, dealt.classes_min, dealt.classes_max) == (50, 50, 2, 2)
    else:
        assert 45 <= dealt.size_min <= dealt.size_max <= 55
        assert 1.1 <= dealt.effective_classes <= 1.35


def test_every_data_set_of_the_relaxation_recipes_can_be_laid_out() -> None:
    for path in (ROOT / "relaxation" / "figure1_loss.toml", ROOT / "relaxation" / "readings.toml"):
        base, compare = split(path)
        for data in compare["grid"]["data"]:
            experiment = prepare(parse(applied(base, "data", data)), Path("unused")).experiment
            assert experiment.federation.clients == 30
            assert experiment.task.size == 610


@pytest.mark.parametrize("name", ["figure1_loss", "stragglers"])
def test_a_small_relaxation_recipe_runs(name: str) -> None:
    base, compare = split(ROOT / "relaxation" / f"{name}.toml")
    small = base | {"rounds": 2, "local": base["local"] | {"epochs": 2}, "cohort": {"size": 3}}
    small = applied(small, "data", base["data"] | {"devices": 4, "sizes": "pareto"})
    last = {}
    for entry in compare["algorithms"]:
        history = start(parse(applied(small, "algorithm", entry)), out=None, root=Path("unused"))
        last[label(entry)] = float(history.metrics[compare["metric"]][-1])
    assert all(np.isfinite(value) for value in last.values())
    assert len(set(last.values())) > 1  # the methods differ


@pytest.mark.parametrize("path", COMPARED, ids=named)
def test_compare_plans_the_same_cells(path: Path) -> None:
    base, compare = split(path)
    planned = plan(base | {"compare": compare})
    assert all("draws other clients" in note for note in planned.notes)  # FedProx as its paper has it
    assert len(planned.cells) == len(compare["seeds"]) * sum(1 for _ in cells(base, compare))
    assert {cell.config.algorithm for cell in planned.cells} == {parse(c).algorithm for c in cells(base, compare)}


def test_figures_and_tables_share_their_runs() -> None:
    def hashes(name: str) -> set[str]:
        base, compare = split(ROOT / f"{name}.toml")
        return {cell.hash for cell in plan(base | {"compare": compare}).cells}

    assert hashes("fedalr/figure2_curves") <= hashes("fedalr/table1_cifar10") | hashes("fedalr/table1_cifar100")
    assert hashes("fedalr/table2_settings") <= hashes("fedalr/figure3_settings")
    assert hashes("relaxation/figure1_loss") == hashes("relaxation/figure2_accuracy")
