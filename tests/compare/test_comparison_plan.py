"""From a table to cells: what is refused, what goes where, and what is noted."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedloom.cli.compare import _axis
from fedloom.compare.cells import counted_alike, step_settings
from fedloom.compare.grid import versus
from fedloom.compare.plan import plan
from fedloom.compare.read import as_result
from fedloom.compare.write import drawn, write_tables
from fedloom.core.errors import ConfigError
from fedloom.runs.settings import config_hash
from support.comparisons import table
from support.terminal import fedloom, files


def test_every_fault_at_once_and_nothing_written(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(
        """
        seed = 3
        local = { lr = -1 }
        [compare]
        algorithms = ["fedavg", "fedproxx", { kind = "fedprox", mu = -2 }]
        baseline = "moon"
        grid = { "partition.alpha" = [0.1, -1.0] }
        [[compare.paper]]
        algorithm = "fedalr"
        where = { partition = "c=2" }
        value = 1
        """
    )
    done = fedloom("compare", "c.toml", cwd=tmp_path)
    assert done.code == 2
    for words in (
        r"seed: is set by compare.seeds",
        r"local\.lr: .*greater than.*-1",
        r"no algorithm 'fedproxx'.*fedproxx.*did you mean 'fedprox'",
        r"algorithm\.mu: .*\[in fedprox",
        r"compare\.baseline: 'moon' is not one",
        r"partition\.alpha: .*-1\.0.*\[in .*fedavg · -1\.0",
        r"compare\.paper\.0\.algorithm: there is no method 'fedalr'",
        r"compare\.paper\.0\.where\.partition: is not an axis",
    ):
        assert re.search(words, done.err), (words, done.err)
    assert files(tmp_path) == {"c.toml"}


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"algorithms": []}, "compare.algorithms"),
        ({"algorithms": ["fedavg", "fedavg"]}, "duplicate label 'fedavg'"),
        ({"seeds": 0}, "compare.seeds"),
        ({"seeds": [1, 1]}, "duplicate seed"),
        ({"grid": {"seed": [1, 2]}}, "cannot be an axis"),
        ({"grid": {"rounds": []}}, "has no values"),
        ({"grid": {"rounds": [1, 1]}}, "same label"),
        ({"grid": {"algorithm.muu": [1]}}, "no method has this setting"),
        ({"best": 1}, "compare.best: unknown key"),
        ({"claims": [{"claim": "x"}]}, "compare.claims.0.claim: unknown key (got 'x') (known: algorithm, along, "),
        ({"claims": [{"saus": "x"}]}, "compare.claims.0.saus: unknown key (got 'x') (did you mean 'says'?)"),
        ({"paper": [{"seeds": 1}]}, "compare.paper.0.seeds: unknown key (got 1) (known: algorithm, "),
    ],
)
def test_faults_of_the_compare_table(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        plan(table(**settings))


@pytest.mark.parametrize(
    "settings",
    [{"seeds": [1, 1]}, {"grid": {"seed": [1, 2]}}, {"grid": {"rounds": []}}, {"grid": {"rounds": [1, 1]}}],
)
def test_faults_of_the_compare_table_come_with_a_fix(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as error:
        plan(table(**settings))
    assert all(fault.fix for fault in error.value.faults)


def test_missing_data_is_reported_once_and_nothing_written(tmp_path: Path) -> None:
    done = fedloom("compare", "fedavg", "fedprox", "data=cifar10", "--data-root", "none", cwd=tmp_path)
    assert done.code == 2
    assert done.err.count("fedloom data get cifar10") == 1
    assert files(tmp_path) == set()


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("0.1, 1e-3,.5", [0.1, 0.001, 0.5]),
        ("mlp,logistic", ["mlp", "logistic"]),
        ("[64,32],[16]", [[64, 32], [16]]),
        ("[64,32]", [64, 32]),
        ('"a,b.csv","c.csv"', ["a,b.csv", "c.csv"]),
        ("{ kind = 'iid', clients = 4 },{ kind = 'shards' }", [{"kind": "iid", "clients": 4}, {"kind": "shards"}]),
        ("[]", []),
        ("", []),
    ],
)
def test_values_of_an_axis_on_the_command_line(text: str, values: list[Any]) -> None:
    assert _axis(f"model.widths={text}") == ("model.widths", values)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("data=mine.npz",), "error: mine.npz: no such file"),
        (("--grid", "partition.clients=6,5000"), "partition.clients: 5000 clients cannot share 1438 rows"),
    ],
)
def test_data_that_every_run_would_refuse_is_one_error_and_nothing_written(
    words: tuple[str, ...], says: str, tmp_path: Path
) -> None:
    done = fedloom("compare", "fedavg", "fedprox", *words, cwd=tmp_path)
    assert (done.code, done.out, done.err.count(says)) == (2, "", 1)
    assert files(tmp_path) == set()


def test_tables_can_be_redrawn_without_the_data(tmp_path: Path) -> None:
    x, y = np.random.default_rng(0).normal(size=(80, 3)), np.arange(80) % 2
    np.savez(tmp_path / "mine.npz", x=x, y=y)
    words = ("compare", "fedavg", "data=mine.npz", "rounds=1", "partition.clients=3", "--seeds", 1, "--out", "c")
    assert fedloom(*words, cwd=tmp_path).code == 0
    (tmp_path / "mine.npz").unlink()
    assert fedloom(*words, "--target", "0.1", cwd=tmp_path).code == 0
    assert fedloom(*words[:6], "--seed", 1, "--out", "c", cwd=tmp_path).code == 2


def test_shared_settings_go_to_the_methods_that_know_them() -> None:
    given = table(algorithms=["fedavg", "fedprox", "dpsgd"], seeds=1) | {"algorithm": {"mu": 0.5}}
    configs = {c.method.label: c.config for c in plan(given).cells}
    assert getattr(configs["fedprox"].algorithm, "mu", None) == 0.5
    assert configs["dpsgd"].topology is not None
    assert configs["fedavg"].cohort.size == 3


def test_labels_grids_and_nested_keys() -> None:
    shards = {"kind": "shards", "clients": 10, "label": "c=2"}
    spec = table(
        algorithms=["fedavg", {"kind": "fedprox", "mu": 0.1}, {"kind": "fedprox", "mu": 1.0, "label": "strong"}],
        seeds=[7],
        grid={"partition": [shards, "iid"], "local": {"lr": [0.1, 0.2]}},
    )
    planned = plan(spec)
    assert [m.label for m in planned.methods] == ["fedavg", "fedprox (mu=0.1)", "strong"]
    assert planned.places == (("c=2", "0.1"), ("c=2", "0.2"), ("iid", "0.1"), ("iid", "0.2"))
    assert [c.config.local.lr for c in planned.cells[:4]] == [0.1, 0.1, 0.1, 0.2]
    assert {c.seed for c in planned.cells} == {7}
    assert [c.hash for c in planned.cells] == [config_hash(c.config)[:16] for c in planned.cells]
    again = plan(tomllib.loads(planned.as_toml()))
    assert [c.hash for c in again.cells] == [c.hash for c in planned.cells]
    assert again.as_toml() == planned.as_toml()


def test_sentences_and_labels_are_one_line_each(tmp_path: Path) -> None:
    """A line break would leave a comment of LaTeX, and a line of a table."""
    entry = {"kind": "fedprox", "label": "FedProx\n(strong)"}
    axis = [{"value": 0.1, "label": "slow\nrate"}, 0.2]
    planned = plan(
        table(
            algorithms=["fedavg", entry],
            grid={"local.lr": axis},
            notes=["first\n\nsecond & third"],
            paper=[{"algorithm": "fedavg", "value": 70}],
            caveats=[{"why": "one\ntwo"}],
            claims=[{"says": "a is\nbest", "algorithm": "fedavg", "test": "best"}],
        )
    )
    results = [as_result(cell, "failed") for cell in planned.cells]
    write_tables(planned, drawn(planned, tmp_path, tmp_path, results))
    before, _, _ = (tmp_path / "table.tex").read_text().partition("\\begin{tabular}")
    assert all(line.startswith("% ") for line in before.splitlines())
    assert {"% first  second & third", "% ?1: one two"} <= set(before.splitlines())
    assert "| FedProx (strong) |" in (tmp_path / "table.md").read_text()
    assert "| a is best |" in (tmp_path / "table.md").read_text()
    assert "### local.lr = slow rate" in (tmp_path / "table.md").read_text()


def test_gains_in_a_file_and_in_json(tmp_path: Path) -> None:
    methods = [
        {"kind": "fedavg"},
        {"kind": "fedopt", "rule": "sgd"},
        {"kind": "fedavg", "server_lr": 0.5, "label": "half"},
    ]
    planned = plan(table(algorithms=methods, gain="half", seeds=[0], baseline="fedopt"))
    assert versus(planned.spec.gain, planned.methods) == (
        "half",
        ("fedopt",),
    )  # no variant of its own
    assert tomllib.loads(planned.as_toml())["compare"]["gain"] == {"of": "half"}
    for gain, said in (
        ("halve", "compare.gain.of: 'halve' is not one of the methods (did you mean 'half'?)"),
        ({"of": "half", "over": ["fedprox"]}, "compare.gain.over: 'fedprox' is not one of the methods"),
        ({"of": "half", "over": ["half"]}, "compare.gain: needs another method than 'half' to be better than"),
    ):
        with pytest.raises(ConfigError, match=re.escape(said)):
            plan(table(algorithms=methods, gain=gain))


def test_what_the_grid_overrides_and_who_is_not_paired_is_said() -> None:
    planned = plan(
        {
            "partition": {"clients": 5},
            "compare": {
                "algorithms": ["fedavg", {"kind": "fedprox", "preset": "paper"}],
                "grid": {"partition": [{"kind": "iid", "clients": 10}, {"kind": "iid", "clients": 12}]},
            },
        }
    )
    assert any("partition.clients = 5 is in no cell" in note for note in planned.notes)
    assert any("fedprox draws other clients than fedavg" in note for note in planned.notes)


def test_policies_that_differ_by_definition_are_reported() -> None:
    """FedALA's clients keep their optimizers' memory, others do not: with Adam that is half of a difference."""
    table = {"compare": {"algorithms": ["fedavg", "fedala"], "seeds": 1}, "local": {"optimizer": "adam"}}
    said = "local.state differs by the methods' own definitions: reset for fedavg; persist for fedala"
    assert any(said in note for note in plan(table).notes)
    for state in ("reset", "persist"):
        agreed = {**table, "local": {"optimizer": "adam", "state": state}}
        assert not any("own definitions" in note for note in plan(agreed).notes)
    meant = {"kind": "fedala", "with": {"local.state": "persist"}}
    told = plan({**table, "compare": {"algorithms": ["fedavg", meant], "seeds": 1}}).notes
    assert not any("own definitions" in note for note in told)
    plain = {**table, "local": {"optimizer": "sgd"}}  # which has no memory to keep
    assert not any("own definitions" in note for note in plan(plain).notes)


def test_what_comes_with_a_method_stays_with_it() -> None:
    """Also where the grid sets the whole section that it is in."""
    planned = plan(
        {
            "rounds": 1,
            "compare": {
                "algorithms": ["fedavg", {"kind": "fedprox", "with": {"local.momentum": 0.9}}, "fedsam"],
                "seeds": [0, 1],
                "grid": {"local": [{"lr": 0.1}, {"lr": 0.2}]},
            },
        }
    )
    momentum = {(cell.method.kind, cell.config.local.momentum) for cell in planned.cells}
    assert momentum == {("fedavg", 0.0), ("fedprox", 0.9), ("fedsam", 0.0)}


def test_the_number_of_clients_can_be_an_axis() -> None:
    """With what goes with each number, under whatever else the section partition says."""
    planned = plan(
        {
            "rounds": 1,
            "partition": {"kind": "iid", "holdout": 0.0},
            "compare": {
                "algorithms": ["fedavg"],
                "seeds": [0],
                "grid": {"partition.clients": [4, {"value": 8, "label": "eight", "with": {"cohort.size": 2}}]},
            },
        }
    )
    found = {cell.place: (cell.config.partition.clients, cell.config.cohort.size) for cell in planned.cells}
    assert found == {("4",): (4, None), ("eight",): (8, 2)}
    assert all(cell.config.partition.holdout == 0 for cell in planned.cells)


def test_compiling_steps_makes_no_other_cell_and_another_precision_does() -> None:
    """A cell may be computed on a machine on which compiling pays; its rounding differs, as between machines."""

    def names(**engine: str) -> list[str]:
        return [cell.hash for cell in plan(table() | {"engine": engine}).cells]

    assert names(compile="on") == names(compile="off") == names()
    assert not set(names(precision="bf16")) & set(names())


def test_cells_that_use_the_same_compiled_code_are_counted_together() -> None:
    """Seeds and learning rates are not in the code; a method's settings and the shapes of batches are."""
    grid = {"local.lr": [0.1, 0.2], "local.batch": [8, 16]}
    planned = plan(table(algorithms=["fedavg", {"kind": "fedprox", "mu": 0.1}], seeds=3, grid=grid)).cells
    cells = counted_alike(planned)
    assert {cell.config.alike for cell in cells} == {6}
    assert [cell.hash for cell in cells] == [cell.hash for cell in planned]
    assert [cell.with_config(cell.config._replace(notes=())).hash for cell in cells] == [c.hash for c in planned]
    assert [c.config.alike for c in counted_alike([*planned[:1], *planned[:1]])] == [1, 1]  # it is run once


def test_seeds_rates_and_partitions_have_the_same_steps() -> None:
    """Unlike batches, optimizers and a method's own settings."""
    grid = {"partition.alpha": [0.1, 1.0], "local.lr": [0.1, 0.2]}
    assert (
        len({step_settings(cell.config) for cell in plan(table(algorithms=["fedavg"], seeds=2, grid=grid)).cells}) == 1
    )
    grid = {"local.batch": [8, 16], "local.optimizer": ["sgd", "adam"]}
    methods = ["fedavg", {"kind": "fedprox", "mu": 0.1}, {"kind": "fedprox", "mu": 0.2, "label": "more"}]
    assert len({step_settings(cell.config) for cell in plan(table(algorithms=methods, seeds=2, grid=grid)).cells}) == 12


def test_a_setting_of_a_method_that_has_no_effect_is_refused_and_not_dropped() -> None:
    """Unlike one that all methods share, which is of use to others."""
    own = {"kind": "fedopt", "rule": "momentum", "beta2": 0.5}
    with pytest.raises(ConfigError, match=r"algorithm\.beta2: has an effect only if"):
        plan(table(algorithms=["fedavg", own]))
