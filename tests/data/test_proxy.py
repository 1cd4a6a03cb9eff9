"""The rows that the server keeps for itself."""

from __future__ import annotations

import numpy as np
import pytest

from fedloom.data.arrays import Arrays
from fedloom.data.proxy import Proxy, without
from fedloom.errors import ConfigError


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
