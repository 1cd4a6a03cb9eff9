"""The rows that the server keeps for itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedloom.compare.plan import plan
from fedloom.core.errors import ConfigError
from fedloom.data.arrays import Arrays
from fedloom.data.proxy import Proxy, without
from fedloom.runs.prepare import share
from fedloom.runs.settings import as_table, parse


def arrays(rows: int = 400, test: int = 100) -> Arrays:
    """Three classes, the first of them half of all rows; the first ``test`` rows are test rows."""
    y = np.random.default_rng(0).choice(3, rows, p=[0.5, 0.3, 0.2])
    x = np.arange(rows, dtype=np.float32)[:, None]
    return Arrays("rows", x, y, np.arange(rows) < test, ("a", "b", "c"), client=np.arange(rows) % 7)


def taken(wanted: bool = True, of: Arrays | None = None, **settings: object) -> np.ndarray:
    return Proxy(**settings).rows(of or arrays(), wanted, np.random.default_rng(1))


def test_nobody_gets_any_unless_they_are_asked_for() -> None:
    assert not taken(wanted=False).any()
    assert taken().sum() == 30  # a tenth of the training rows
    assert taken(wanted=False, size=12).sum() == 12
    assert taken(wanted=False, size="auto").sum() == 30
    assert not taken(wanted=False, of=arrays(test=0), source="test").any()


@pytest.mark.parametrize(("source", "test"), [("train", False), ("test", True)])
def test_they_come_from_where_the_settings_say(source, test) -> None:
    data = arrays()
    assert (data.test[taken(size=20, source=source)] == test).all()


def test_classes_are_balanced_or_as_they_come_or_in_a_geometric_row() -> None:
    y = arrays().y
    assert np.bincount(y[taken(size=60)]).tolist() == [20, 20, 20]
    one_sided = np.bincount(y[taken(size=60, imbalance=0.25)])
    assert one_sided.tolist() == pytest.approx([34, 17, 9], abs=1)
    assert np.bincount(y[taken(size=150, balanced=False)])[0] > 60


def test_the_rest_is_what_is_dealt_out() -> None:
    data = arrays()
    rows = taken(size=40)
    rest = without(data, rows)
    assert len(rest.y) == 360
    assert set(rest.x[:, 0]).isdisjoint(data.x[rows, 0])
    assert without(data, np.zeros(400, dtype=bool)) is data


def test_more_than_there_are_is_refused() -> None:
    with pytest.raises(ConfigError, match="300 of the 300 train rows would leave none"):
        taken(size=300)


# -- in a comparison -------------------------------------------------------------------------------
METHODS = ["fedavg", "fedlaw", "law_afl", "dpsgd", "local_only"]


def test_all_methods_of_a_comparison_train_on_the_same_rows() -> None:
    planned = plan({"compare": {"algorithms": METHODS, "seeds": [3]}})
    shared = [share(parse(as_table(cell.config)), Path()) for cell in planned.cells]
    assert len({one.described()["sha256"] for one in shared}) == 1
    assert len({one.described()["data_sha256"] for one in shared}) == 1
    assert {len(one.proxy.y) for one in shared} == {143}
    assert [note for note in planned.notes if "proxy" in note] == [
        "all methods train without the server's proxy rows, needed only by fedlaw, law_afl"
    ]


def test_a_comparison_that_uses_no_proxy_rows_or_says_how_many_is_left_as_it_is() -> None:
    for table in (
        {"compare": {"algorithms": ["fedavg", "fedprox"]}},
        {"proxy": {"size": 50}, "compare": {"algorithms": METHODS}},
    ):
        planned = plan(table)
        assert {cell.config.proxy.size for cell in planned.cells} == {table.get("proxy", {}).get("size")}
        assert not any("proxy" in note for note in planned.notes)


def test_a_proxy_set_that_comes_with_a_method_is_left_by_all() -> None:
    given = {"kind": "fedlaw", "with": {"proxy": {"size": 60, "balanced": False}}}
    planned = plan({"compare": {"algorithms": ["fedavg", given]}})
    assert len({str(cell.config.proxy) for cell in planned.cells}) == 1


# -- what it lacks ---------------------------------------------------------------------------------
def lacking(algorithm: str, **proxy: object) -> list[str]:
    data = arrays()
    table = {"algorithm": algorithm, "partition": {"kind": "natural", "holdout": 0.0}, "proxy": proxy}
    return [note for note in share(parse(table), Path(), data).notes if "proxy" in note]


def test_classes_that_the_proxy_set_lacks_are_named() -> None:
    assert lacking("fedlaw", size=2) == [
        "the proxy set has no row of class 'c': what the server learns from it favours the other classes"
    ]
    assert lacking("fedlaw", size=1)[0].startswith("the proxy set has no row of classes 'a' and 'c':")
    assert lacking("fedlaw", size=3) == []
    assert lacking("fedavg", size=2) == []  # which does not learn from it
