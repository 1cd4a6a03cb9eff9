"""Every recipe is a valid experiment in all its cells, and says of its paper what the paper says."""

from __future__ import annotations

import functools
import itertools
import json
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from torch import Tensor

from fedloom.algorithm.capabilities import needs_proxy
from fedloom.compare.cells import Cell
from fedloom.compare.claims import claims_of
from fedloom.compare.equal_terms import equalised
from fedloom.compare.plan import ComparisonPlan, plan
from fedloom.compare.table import ClaimEntry
from fedloom.core.errors import FedloomError
from fedloom.core.task import Task
from fedloom.data.arrays import Arrays
from fedloom.data.files import Layout, Rows
from fedloom.data.sources import PublishedSet, from_arrays
from fedloom.models.net import NetSpec
from fedloom.models.resnet import ResNet20, ResNet50
from fedloom.runs import prepare as preparing
from fedloom.runs.find import find_algorithm
from fedloom.runs.overrides import without_idle
from fedloom.runs.prepare import Shared, initial_task, prepare, share
from fedloom.runs.settings import Config, as_table, parse
from fedloom.runs.start import start
from support.comparisons import question

ROOT = Path(__file__).parents[2] / "experiments"
FILES = sorted(ROOT.glob("*/*.toml"))
COMPARED = [path for path in FILES if "compare" in tomllib.loads(path.read_text(encoding="utf-8"))]
Table = dict[str, Any]


def named(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}"


def split(path: Path) -> tuple[Table, Table]:
    """The experiment of a file, and its table of comparisons."""
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    return table, table.pop("compare", {})


@functools.cache
def planned(path: Path) -> ComparisonPlan:
    """The cells of a recipe with all its seeds: several tests look at them."""
    return plan(tomllib.loads(path.read_text(encoding="utf-8")))


def first_cells(path: Path) -> list[Cell]:
    """Those of its first seed; none where nothing is compared."""
    compare = split(path)[1]
    return [c for c in planned(path).cells if c.config.basics.seed == compare["seeds"][0]] if compare else []


def plain(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    return value.get("value", {k: v for k, v in value.items() if k not in ("label", "with")})


def label(value: Any) -> Any:
    """What a cell is called: by its label, else its kind, else its value."""
    return value.get("label", value.get("kind")) if isinstance(value, Mapping) else value


def beside(value: Any) -> Table:
    """Settings of other sections that go with a value or a method."""
    given: Table = value.get("with", {}) if isinstance(value, Mapping) else {}
    return given


def applied(table: Table, key: str, value: Any) -> Table:
    section, _, leaf = key.partition(".")
    return table | {section: table.get(section, {}) | {leaf: plain(value)} if leaf else plain(value)}


def cells(base: Table, compare: Table) -> Iterator[Table]:
    """Every experiment of a comparison, but for its seeds."""
    grid = compare.get("grid", {})
    for values in itertools.product(*grid.values()):
        chosen = dict(zip(grid, values, strict=True))
        settings = {key.removeprefix("algorithm."): v for key, v in chosen.items() if key.startswith("algorithm.")}
        table = base
        for key, value in chosen.items():
            table = table if key.startswith("algorithm.") else applied(table, key, value)
        for algorithm in compare["algorithms"]:
            mine = {"kind": algorithm} if isinstance(algorithm, str) else algorithm
            known = find_algorithm(mine["kind"], "").model_fields
            cell = applied(table, "algorithm", mine | {k: v for k, v in settings.items() if k in known})
            for key, value in itertools.chain(*(beside(v).items() for v in (*values, algorithm))):
                cell = applied(cell, key, value)
            yield cell


def of_use(table: Table) -> Table:
    """The settings that have an effect: those that all methods of a recipe share may have none in one of them."""
    return without_idle(table)[0]


def algorithms(path: Path) -> set[Any]:
    """Every algorithm of a recipe, with its settings, laid out without the planner."""
    each = {json.dumps(cell["algorithm"], sort_keys=True): cell for cell in cells(*split(path))}
    return {parse(of_use(cell)).algorithm for cell in each.values()}


def test_there_is_a_recipe_for_every_table_and_figure() -> None:
    assert {named(path) for path in FILES} >= {
        "fedalr/table1_cifar10", "fedalr/table1_cifar100", "fedalr/table2_settings", "fedalr/figure1_partitions",
        "fedalr/figure2_curves", "fedalr/figure3_settings", "fedalr/effective_step", "relaxation/figure1_loss",
        "relaxation/figure2_accuracy", "relaxation/sweep_alpha", "relaxation/stragglers", "pfedala/table1_fedavg",
        "pfedala/table2_fedala", "pfedala/table3_pfedala", "pfedala/figure1_mnist_practical",
        "pfedala/figure2_cifar10_practical", "pfedala/figure3_mnist_pathological",
        "pfedala/figure4_cifar10_pathological", "pfedala/controls", "pfedala/tuned", "pfedala/smoke",
        "law_afl/tables3to6_shrink", "law_afl/table7", "law_afl/table8_malicious", "law_afl/table9_sharpness",
        "law_afl/table10_alpha01", "law_afl/table11_alpha005", "law_afl/table12_bytes", "law_afl/figure1_shrink",
        "law_afl/figures_curves", "law_afl/figure11_corrupted", "law_afl/figure12_hessian", "law_afl/figure13_time",
        "law_afl/pretrain", "law_afl/extractor", "pfedala/asynchronous",
        "law_afl/figures_one_round", "law_afl/figure10_clients", "pfedala/after_training", "dfedgam/graphs",
        "dfedgam/net_and_labels", "dfedgam/flatness",
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
    parse(of_use(split(path)[0]))


@pytest.mark.parametrize("path", COMPARED, ids=named)
def test_every_cell_of_a_recipe_is_valid(path: Path) -> None:
    """The planner parses them all, and refuses the recipe for any fault."""
    compare, configs = split(path)[1], [cell.config for cell in first_cells(path)]
    assert set(compare) <= {
        *("algorithms", "seeds", "baseline", "metric", "target", "grid", "cells", "paper"),
        *("x", "layout", "notes", "caveats", "claims", "equal", "reference", "gain"),
    }
    assert len(set(compare["seeds"])) == len(compare["seeds"])
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
        assert entry["algorithm"] in algorithms + [a["kind"] for a in compare["algorithms"] if isinstance(a, dict)]
        assert set(entry["where"]) == set(grid)  # a number belongs to one cell
        for key, value in entry["where"].items():
            assert value in grid[key]
        spots.add((entry["algorithm"], *sorted(entry["where"].items())))
    assert len(spots) == len(compare.get("paper", []))


@pytest.mark.parametrize("path", COMPARED, ids=named)
def test_the_number_of_runs_is_as_said(path: Path) -> None:
    base, compare = split(path)
    runs = len(compare["seeds"]) * sum(1 for _ in cells(base, compare))
    rounds = f"{base['rounds']} round{'s' if base['rounds'] > 1 else ''}"
    assert f"= {runs} runs of {rounds}" in path.read_text(encoding="utf-8").replace("\n# ", " ")


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


def personalised(number: int) -> dict[tuple[str, ...], list[float]]:
    """The numbers of one of pFedALA's tables, by optimizer, partition and data set."""
    path = next((ROOT / "pfedala").glob(f"table{number}_*.toml"))
    found = {tuple(entry["where"].values()): entry["value"] for entry in split(path)[1]["paper"]}
    assert len(found) == 28
    return found


def test_the_tables_of_pfedala_have_the_relations_that_are_said_of_them() -> None:
    fedavg, fedala, pfedala = (personalised(number) for number in (1, 2, 3))
    assert min(fedala[at][0] - fedavg[at][0] for at in fedavg) == pytest.approx(0.108)
    gains = [pfedala[at][0] - fedala[at][0] for at in fedala]
    assert (min(gains), max(gains)) == pytest.approx((0.0001, 0.0096))
    assert (np.mean(gains), np.median(gains)) == pytest.approx((0.0044, 0.0052), abs=1e-4)
    residuals = {at: pfedala[at][1] - fedala[at][1] - 0.25 * (pfedala[at][0] - fedala[at][0]) for at in fedala}
    assert [at for at, gap in residuals.items() if abs(gap) > 0.00014] == [("adadelta", "practical", "MNIST")]
    for table in (fedavg, fedala, pfedala):
        for partition, data in {at[1:] for at in table}:
            weak = max(table[name, partition, data][0] for name in ("adam", "rmsprop"))
            assert all(table[name, partition, data][0] > weak for name in ("sgd", "asgd", "adagrad"))


def test_table_1_of_dfedgam_has_the_relations_that_are_said_of_it() -> None:
    """The gains of its text are relative; and DFedGAM is the best on one partition of three, not on all."""
    value: dict[str, dict[str, float]] = {}
    for entry in split(ROOT / "dfedgam" / "table1.toml")[1]["paper"]:
        value.setdefault(entry["algorithm"], {})[entry["where"]["partition"]] = entry["value"]
    gains = {at: 100 * (value["DFedGAM"][at] / value["DFedSAM"][at] - 1) for at in value["DFedGAM"]}
    assert gains == pytest.approx({"IID": 1.30, "Dir-0.3": 1.19, "Dir-0.6": 1.46}, abs=0.005)
    points = {at: value["DFedGAM"][at] - value["DFedSAM"][at] for at in gains}
    assert points == pytest.approx({"IID": 1.06, "Dir-0.3": 0.95, "Dir-0.6": 1.17})
    best = {at: max(value, key=lambda method: value[method][at]) for at in gains}
    assert best == {"Dir-0.3": "DFedGAM", "Dir-0.6": "FedSAM", "IID": "FedSAM"}
    assert all(row["Dir-0.3"] < row["Dir-0.6"] < row["IID"] for row in value.values())


def test_equal_gradients_are_the_rounds_that_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few rows stand for CIFAR-10, and 100 rounds for 500: with 20 steps for everybody, gradients do not depend on
    the number of rows, and a fifth of the rounds takes a fifth of the gradients."""
    base, compare = split(ROOT / "dfedgam" / "compute_matched.toml")
    y = np.repeat(np.arange(10), 100)
    rows = from_arrays(np.zeros((1000, 3, 8, 8), np.uint8), y, test=np.zeros(1000, bool))
    monkeypatch.setattr("fedloom.data.sources.PublishedSet.load", lambda *_: rows._replace(test=np.arange(1000) < 10))
    assert (base["rounds"], base["evaluate"]["every"]) == (500, 10)
    fewer = {"rounds": 100, "evaluate": base["evaluate"] | {"every": 2}}
    small = base | fewer | {"model": {"kind": "logistic"}, "compare": compare | {"grid": {}, "seeds": [0]}}
    equal = equalised(plan(small), Path("unused"))
    assert {cell.method.label: cell.config.basics.rounds for cell in equal.cells} == {
        "FedAvg": 3_000, "FedSAM": 1_500, "SCAFFOLD": 3_000, "FedAvg, all clients": 100,
        "DFedAvg": 300, "DFedAvgM": 300, "DFedSAM": 150, "DFedGAM": 100,
    }  # fmt: skip
    for cell in equal.cells:
        ends = (cell.config.local.lr_at(cell.config.basics.rounds * k // 2, 0) for k in (0, 1, 2))
        assert list(ends) == pytest.approx([0.1, 0.1 * 0.995**50, 0.1 * 0.995**100], rel=1e-6)
        assert cell.config.basics.rounds == 50 * cell.config.evaluate.every


def settings(folder: str) -> Iterator[tuple[str, Config]]:
    """Every experiment of a folder's recipes, by the label of its method."""
    for path in sorted((ROOT / folder).glob("*.toml")):
        yield from [(c.method.label, c.config) for c in first_cells(path)] or [("", parse(split(path)[0]))]


def test_fedalr_has_the_loader_of_flgo() -> None:
    """Which fills the last batch from a new pass, and does not train on the two rows that are left of 450."""
    assert all(config.local.wrap_last for _, config in settings("fedalr"))


def test_relaxation_counts_devices_alike_unless_a_reading_says_otherwise() -> None:
    by_size = {label for label, config in settings("relaxation") if config.algorithm.traits.weighs_examples}
    assert by_size == {"FedProx, by size", "FedProx + Relaxation, by size"}


def test_law_afl_has_the_nets_and_the_gamma_of_its_paper() -> None:
    nets: set[int | str] = set()
    params: set[tuple[str, str]] = set()
    heads: set[str] = set()  # whose gamma of statistics may exceed 1
    for label, config in settings("law_afl"):
        if isinstance(config.model, ResNet20 | ResNet50):
            nets.add(config.model.width if isinstance(config.model, ResNet20) else config.model.stem)
        if config.kinds["algorithm"] == "law_afl" and config.algorithm.schedule != "frozen":
            free = config.algorithm.server_epochs > 0 and config.algorithm.param != "fixed"
            params |= {(label, config.algorithm.param)} if free else set()
            learns = config.algorithm.head_steps > 0 and not config.algorithm.share_lambda
            heads |= {label} if learns and config.algorithm.head_shrink_max > 1 else set()
    # 16 channels stand beside 64 in Table 12, where the paper's bytes are nearer to them
    assert nets == {64, 16, "imagenet"}
    assert {label for label, param in params if param != "exp_cap"} == {"gamma above 1, too"}
    assert heads == {"gamma above 1, too"}


def test_figure_12_has_the_rounds_and_the_methods_that_are_stated() -> None:
    base, compare = split(ROOT / "law_afl" / "figure12_hessian.toml")
    stated = {"LAW-AFL", "FedLAW", "FedAvg", "FedProx", "FedDyn", "FedBE", "FedDF"}
    assert base["rounds"] == 1000
    assert {label(method) for method in compare["algorithms"]} >= stated


def test_training_iterations_are_local_ones_of_one_round() -> None:
    one, many = (split(ROOT / "law_afl" / f"{name}.toml") for name in ("figures_one_round", "figures_curves"))
    assert (one[0]["rounds"], one[1]["grid"]["local.steps"], many[0]["rounds"]) == (1, [100, 500, 1000], 1000)
    assert all(entry["where"].pop("local.steps") == 1000 for entry in one[1]["paper"])
    assert one[1]["paper"] == many[1]["paper"]


def test_dpsgd_by_epochs_mixes_first_as_public_code_does() -> None:
    found = {config.algorithm.order for label, config in settings("dfedgam") if label == "D-PSGD, epochs"}
    assert found == {"mix_then_train"}


# Recipes with values of a paper but without a claim, and why; none today.
WITHOUT_CLAIMS: dict[str, str] = {}


@pytest.mark.parametrize("path", COMPARED, ids=named)
def test_a_recipe_with_values_of_a_paper_has_its_claims(path: Path) -> None:
    compare = split(path)[1]
    claims = compare.get("claims", [])
    assert (bool(claims) or "paper" not in compare) != (named(path) in WITHOUT_CLAIMS)
    assert all(claim["source"] for claim in claims)
    said = [claim["says"] for claim in claims]
    assert len(set(said)) == len(said)


def reported(spec: ComparisonPlan) -> dict[tuple[Any, str], float]:
    """What the paper reports of the metric of a comparison, accuracies as shares."""
    table, metric = spec.spec, spec.spec.metric
    out = {}
    for entry in table.paper:
        value = entry.value
        if isinstance(value, list):
            if metric not in table.metrics:
                continue
            value = value[table.metrics.index(metric)]
        out |= dict.fromkeys(spec.spots(entry), value / 100 if "accuracy" in metric and value > 1.5 else value)
    return out


def values_against(spec: ComparisonPlan, claim: ClaimEntry, value: Mapping[tuple[Any, str], float]) -> set[str]:
    """The values of an axis by which the numbers of a paper contradict what it claims of that axis."""
    at = [axis.key for axis in spec.axes].index(claim.along)
    asked = question(tuple(method.label for method in spec.methods), 1)
    (found,) = claims_of(spec._replace(spec=spec.spec.model_copy(update={"claims": [claim]})), asked)
    assert found.pairs
    both = [(a, b) for a, b in found.pairs if (a, found.method) in value and (b, found.method) in value]
    return {f"{a[at]} < {b[at]}" for a, b in both if value[a, found.method] <= value[b, found.method]}


def test_claims_that_the_numbers_of_their_paper_contradict() -> None:
    """All others agree with what the paper reports, so that a wrong name, place or margin is found here."""
    found, compared = set(), 0
    against: dict[str, set[str]] = defaultdict(set)
    for path in COMPARED:
        spec = planned(path)
        value = reported(spec)
        for claim in spec.spec.claims:
            if claim.metric or claim.statistic not in ("last", "best", "mean_last_10"):
                continue
            if claim.value:
                compared += 1
                against[named(path)] |= values_against(spec, claim, value)
            if claim.value or claim.test not in ("above", "order"):
                continue
            chain = [claim.algorithm, *claim.over]
            pairs = itertools.pairwise(chain) if claim.test == "order" else [(chain[0], other) for other in chain[1:]]
            for (place, _), (better, worse) in itertools.product(spec.spots(claim), list(pairs)):
                if (place, better) in value and (place, worse) in value:
                    compared += 1
                    if value[place, better] - value[place, worse] < claim.by - 1e-9:
                        found.add((named(path), claim.says, worse))
    assert compared > 100
    assert found == {
        ("dfedgam/table1", "DFedGAM is better than all seven other methods at Dir-0.6", "FedSAM"),
        ("dfedgam/table1", "DFedGAM is better than all seven other methods at IID", "FedSAM"),
        ("law_afl/table11_alpha005", "LAW-AFL is better than the six other methods on CIFAR-10, CNN", "FedLAW"),
        ("law_afl/table11_alpha005", "LAW-AFL is better than the six other methods on CIFAR-100, ResNet", "FedDyn"),
    }
    not_worst, radam = {"adadelta < adam", "rmsprop < adam"}, {"asgd < radam", "sgd < radam"}
    assert {name: wrong for name, wrong in against.items() if wrong} == {
        "law_afl/tables3to6_shrink": {"0.95 < 0.93", "0.95 < 0.97"},
        "pfedala/table1_fedavg": not_worst | radam | {"adagrad < radam", "radam < adam"},
        "pfedala/table2_fedala": not_worst | radam,
        "pfedala/table3_pfedala": not_worst | radam,
    }


def test_readings_repeat_the_numbers_of_their_tables() -> None:
    after = split(ROOT / "pfedala" / "after_training.toml")[1]["paper"]
    tables = {"fedavg": personalised(1), "fedala": personalised(2), "pfedala": personalised(3)}
    assert len(after) == 24
    for entry in after:
        assert entry["value"] == tables[entry["algorithm"]][tuple(entry["where"].values())][0]
    said = {
        (entry["algorithm"], entry["where"]["partition"]): entry["value"]
        for entry in split(ROOT / "dfedgam" / "table1.toml")[1]["paper"]
    }
    for entry in split(ROOT / "dfedgam" / "net_and_labels.toml")[1]["paper"]:
        assert entry["value"] == said[entry["algorithm"], "Dir-0.3"]


# ------------------------------------------------------------------------------- every cell of them can begin

SOUND: set[str] = set()  # sides of experiments that were prepared without a fault: cells and files share many


@functools.cache
def blank(layout: Layout, column: int) -> Rows:
    """As many classes and pixels as the published set has, but only 6000 rows, and nothing on the pictures."""
    count, classes = 6000, layout.classes[column]
    labels = np.random.default_rng(0).permutation(np.arange(count) % len(classes))
    return Rows(np.zeros((count, *layout.shape), np.uint8), labels, classes, np.arange(count) >= 4800)


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small data of the right shape, no weights of earlier runs, and one net for all cells that have the same."""
    monkeypatch.setattr("fedloom.data.sources.places_below", lambda *_: {})
    monkeypatch.setattr("fedloom.data.sources.read_published", lambda layout, _, column=0: blank(layout, column))
    monkeypatch.setattr("fedloom.models.net.start_from", lambda *_, **__: None)
    seen = Task.features

    def features(task: Task, w: Tensor, x: Tensor, buffers: Tensor) -> Tensor:
        """All pictures of a set are alike, and so are their features; a single one is another, which tests the net."""
        if len(x) == 1:
            return seen(task, w, x, buffers)
        if "first" not in vars(task):
            vars(task)["first"] = seen(task, w, x[:1], buffers)
        return vars(task)["first"].expand(len(x), -1)

    monkeypatch.setattr(Task, "features", features)
    monkeypatch.setattr(preparing, "initial_task", lambda *given: one_net(*given[:3]))
    monkeypatch.setattr(preparing, "share", lambda config, *_: dealt_out(config))
    monkeypatch.setattr(Task, "learning", LEARNING)  # the same task each time
    monkeypatch.setattr(Task, "to", PLACED)  # it copies the net
    monkeypatch.setattr(Task, "is_head_of_body", property(TRIED))  # it runs the net


KEPT = 6  # nets, some of which are of 100 MB
NETS: dict[str, Task] = {}  # the last few: cells of a recipe come sorted by nets, and recipes have the same ones
LEARNING = functools.lru_cache(KEPT)(Task.learning)
PLACED = functools.lru_cache(KEPT)(Task.to)
TRIED = functools.lru_cache(KEPT)(vars(Task)["is_head_of_body"].fget)


def one_net(model: NetSpec, arrays: Arrays, seed: int) -> Task:
    """What ``initial_task`` gives, for cells with the same net once."""
    name = f"{model!r} {arrays.shape} {arrays.classes}"
    if name not in NETS:
        while len(NETS) >= KEPT:
            del NETS[next(iter(NETS))]
        NETS[name] = initial_task(model, arrays, seed)
    return NETS[name]


@pytest.fixture(autouse=True, scope="module")
def _forget() -> Iterator[None]:
    """The nets, when all recipes have been looked at."""
    yield
    for kept in (LEARNING, PLACED, TRIED):
        kept.cache_clear()
    NETS.clear()
    DEALT.clear()


DEALT: dict[str, Shared] = {}  # data that was dealt out, of the last few kinds


def dealt_out(config: Config) -> Shared:
    """What ``share`` gives, for cells with the same data once."""
    table = as_table(config)
    asked = {key: table.get(key) for key in ("seed", "data", "partition", "proxy", "corruption", "evaluate", "task")}
    name = json.dumps({"needs_proxy": needs_proxy(config.algorithm)} | asked, sort_keys=True)
    if name not in DEALT:
        while len(DEALT) >= 4:
            del DEALT[next(iter(DEALT))]
        DEALT[name] = share(config, Path("unused"))
    return DEALT[name]


# How much is trained and what is measured: parsing has checked it, and nothing that is built depends on it.
AMOUNTS = {"lr", "decay", "steps", "epochs"}


def sides(config: Config) -> set[str]:
    """The data and who has it, the net with the method that trains it, and the method with those who take part: parts
    that meet in the shape of a row only, or in the settings of the method, which both have."""
    table = as_table(config)
    kind = type(config.data)
    published = (kind.layout.shape, [*map(len, kind.layout.classes)]) if issubclass(kind, PublishedSet) else None
    local = {key: value for key, value in table.get("local", {}).items() if key not in AMOUNTS}
    method = {"local": local} | {key: table.get(key) for key in ("algorithm", "engine", "privacy", "task")}
    present = {key: table.get(key) for key in ("proxy", "corruption", "cohort", "topology", "system")}
    needs = {"needs_proxy": needs_proxy(config.algorithm), "validation": config.evaluate.validation}
    data = needs | present | {key: table.get(key) for key in ("seed", "data", "partition")}
    net = method | {"rows": published or table["data"], "model": table["model"]}
    parts = (data, net, method | present | {"aggregation": table.get("aggregation")})
    return {json.dumps(side, sort_keys=True) for side in parts}


def fault(config: Config) -> str:
    """Why this experiment cannot begin: with its data dealt out, its net built and its algorithm bound."""
    parts = sides(config)
    if not parts <= SOUND:
        try:
            prepare(config, Path("unused"))
        except FedloomError as error:
            return str(error)
        SOUND.update(parts)
    return ""


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("path", FILES, ids=named)
def test_every_cell_of_a_recipe_can_begin(path: Path) -> None:
    found = {cell.name: cell.config for cell in first_cells(path)} or {named(path): parse(split(path)[0])}
    by_net = sorted(found, key=lambda name: repr((found[name].model, found[name].data, found[name].partition)))
    assert {name: why for name in by_net if (why := fault(found[name]))} == {}


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
        used, _ = without_idle(applied(small, "algorithm", entry))  # as a comparison does
        history = start(parse(used), out=None, root=Path("unused"))
        last[label(entry)] = float(history.metrics[compare["metric"]][-1])
    assert all(np.isfinite(value) for value in last.values())
    assert len(set(last.values())) > 1  # the methods differ


def test_an_extractor_is_trained_and_all_methods_train_heads_on_it(tmp_path: Path) -> None:
    """Digits and a narrow ResNet-20 stand for the data and for ResNet-50: the flow is that of the two recipes."""
    small = {"data": {"source": "digits"}, "rounds": 1, "checkpoint": {"curves": False}}
    net = {"kind": "resnet20", "width": 4}
    pretrained, _ = split(ROOT / "law_afl" / "pretrain.toml")
    pretrained["model"].pop("stem")  # which is for larger pictures
    start(parse(pretrained | small | {"model": pretrained["model"] | net}), out=tmp_path / "pre", root=Path("unused"))
    file = tmp_path / "pre" / "model.safetensors"
    body = {name: x for name, x in load_file(file).items() if name.startswith("body.")}
    assert any("running_mean" in name for name in body)
    base, compare = split(ROOT / "law_afl" / "extractor.toml")
    base["model"].pop("stem")
    base |= small | {"model": base["model"] | net | {"weights": str(file)}, "proxy": {"size": 100}}
    base |= {"partition": base["partition"] | {"clients": 10}, "cohort": {"size": 5}}
    found = {}
    for entry in compare["algorithms"]:
        out = tmp_path / label(entry)
        history = start(parse(of_use(applied(base, "algorithm", entry))), out=out, root=Path("unused"))
        held = load_file(out / "model.safetensors")
        assert all(np.array_equal(x, held[name]) for name, x in body.items()), label(entry)
        assert not np.array_equal(held["head.weight"], load_file(file)["head.weight"])
        found[label(entry)] = float(history.metrics[compare["metric"]][-1])
    assert len(set(found.values())) > 5  # the methods differ


@pytest.mark.parametrize("path", COMPARED, ids=named)
def test_compare_plans_the_same_cells(path: Path) -> None:
    compare, found = split(path)[1], planned(path)
    assert all("draws other clients" in note for note in found.notes)  # FedProx as its paper has it
    assert len(found.cells) == len(compare["seeds"]) * sum(1 for _ in cells(*split(path)))
    assert {cell.config.algorithm for cell in found.cells} == algorithms(path)


def test_figures_and_tables_share_their_runs() -> None:
    def hashes(name: str) -> set[str]:
        return {cell.hash for cell in planned(ROOT / f"{name}.toml").cells}

    assert hashes("fedalr/figure2_curves") <= hashes("fedalr/table1_cifar10") | hashes("fedalr/table1_cifar100")
    assert hashes("fedalr/table2_settings") <= hashes("fedalr/figure3_settings")
    assert hashes("relaxation/figure1_loss") == hashes("relaxation/figure2_accuracy")
    assert hashes("law_afl/figure1_shrink") <= hashes("law_afl/tables3to6_shrink")
    assert len(hashes("law_afl/figure1_shrink")) == 192
    assert len(hashes("law_afl/figure13_time") & hashes("law_afl/figures_curves")) == 132
    tables = [hashes(f"pfedala/{name}") for name in ("table1_fedavg", "table2_fedala", "table3_pfedala")]
    for path in sorted((ROOT / "pfedala").glob("figure*.toml")):
        assert hashes(named(path)) <= set().union(*tables)
    assert (len(tables[0] & tables[1]), len(tables[1] & tables[2])) == (168, 168)
    assert len(hashes("pfedala/controls")) == 216 - 36  # LocalOnly has no profile
    assert len(hashes("pfedala/controls") & set().union(*tables)) == 90


def test_the_data_of_pfedala_is_dealt_as_said() -> None:
    """Digits stand for MNIST: everything is pooled, a quarter of a client's rows is its test, which is measured."""
    base, _ = split(ROOT / "pfedala" / "smoke.toml")
    fed = prepare(parse(of_use(base)), Path("unused")).experiment.federation
    sizes = (fed.train.sizes + fed.test.sizes).tolist()
    assert sum(sizes) == 1797
    assert fed.train.sizes.tolist() == [n * 3 // 4 for n in sizes]
    assert fed.common.tolist() == sorted(fed.test.rows.tolist())  # there is no other test set
    x, _ = fed.examples(fed.train.rows)
    assert (float(x.min()), float(x.max())) == (-1.0, 1.0)


@pytest.mark.parametrize(
    ("name", "shape", "size"), [("mnist", (1, 28, 28), 582_026), ("cifar10", (3, 32, 32), 878_538)]
)
def test_a_message_of_pfedala_is_as_long_as_its_net(name: str, shape: tuple[int, ...], size: int) -> None:
    base, _ = split(ROOT / "pfedala" / "table1_fedavg.toml")
    rows = np.arange(200) % 10
    arrays = from_arrays(np.zeros((200, *shape), np.uint8), rows, test=np.zeros(200, bool), name=name)
    table = applied(applied(base, "data.source", name), "partition.min_size", 1) | {"rounds": 1}
    history = start(
        parse(of_use(table | {"local": base["local"] | {"epochs": 1}})), out=None, root=Path("unused"), arrays=arrays
    )
    assert history.metrics["bytes/up"][-1] == history.metrics["bytes/down"][-1] == 10 * 4 * size


def test_recipes_whose_runs_are_the_same_keep_them_in_one_folder() -> None:
    """Else the second figure would make all runs of the first once more."""
    paths = sorted((ROOT / "relaxation").glob("*.toml"))
    assert {split(path)[1]["cells"] for path in paths} == {"runs/relaxation-cells"}
    cells = [{cell.hash for cell in planned(path).cells} for path in paths]
    said = f"{sum(map(len, cells))} runs, {sum(map(len, cells)) - len(set().union(*cells))} of which"
    assert said in (ROOT / "README.md").read_text(encoding="utf-8")
