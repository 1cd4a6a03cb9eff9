"""Synthetic(a, b): the published recipe, its inert parameter, and the two readings that make it work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedloom.core.errors import ConfigError
from fedloom.core.rng import stream
from fedloom.data.arrays import Arrays
from fedloom.data.sources import Synthetic
from fedloom.data.synthetic import NAME, SHARED, Device, device_sizes, labels, variances
from fedloom.runs.prepare import prepare
from fedloom.runs.settings import parse

OWN = {"kind": "natural", "holdout": 0}


def load(seed: int = 0, **settings: Any) -> Arrays:
    return Synthetic(**settings).load(Path("unused"), seed)


def clients(arrays: Arrays) -> np.ndarray[Any, np.dtype[np.int64]]:
    assert arrays.client is not None
    return arrays.client


# ---------------------------------------------------------------------------------- shapes, sizes and the split


def test_shapes_names_and_devices() -> None:
    arrays = load(devices=7, features=5, classes=3)
    assert arrays.x.dtype == np.float32
    assert arrays.shape == (5,)
    assert arrays.labels == ("0", "1", "2")
    assert np.unique(clients(arrays)).tolist() == list(range(7))
    assert (arrays.mean, arrays.std) == ((0.0,), (1.0,))
    published = load()
    assert published.shape == (60,)
    assert published.classes == 10
    assert len(np.unique(clients(published))) == 30


@pytest.mark.parametrize("sizes", ["lognormal", "pareto"])
@pytest.mark.parametrize("split", [0.8, 0.9, 0.29])
def test_each_device_trains_on_the_first_part_of_its_rows(sizes: Any, split: float) -> None:
    arrays = load(sizes=sizes, split=split, features=3)
    expected = device_sizes(30, sizes, 0)
    held = np.bincount(clients(arrays))
    train = np.bincount(clients(arrays)[~arrays.test])
    assert held.tolist() == expected.tolist()
    assert train.tolist() == [int(split * n + 1e-9) for n in expected.tolist()]
    for k in range(30):  # training rows come first
        assert not np.any(np.diff(arrays.test[clients(arrays) == k].astype(int)) < 0)


def test_split_of_eight_to_two_is_the_whole_part() -> None:
    arrays = load()
    for k, n in enumerate(np.bincount(clients(arrays)).tolist()):
        assert np.count_nonzero(~arrays.test[clients(arrays) == k]) == int(0.8 * n)


def test_all_rows_may_be_training_rows() -> None:
    assert not load(split=1.0, features=2).test.any()
    pooled, plain = load(pool=True, features=2), load(features=2)
    assert not pooled.test.any()
    assert np.array_equal(pooled.x, plain.x)


def test_a_device_always_has_a_training_row() -> None:
    arrays = load(split=0.001, features=2)
    assert np.bincount(clients(arrays)[~arrays.test]).min() == 1


def test_lognormal_sizes_have_the_published_law() -> None:
    n = device_sizes(20_000, "lognormal", 1)
    logs = np.log(n - 50 + 0.5)  # whole parts lie half a row below, on average
    assert n.min() >= 50
    assert abs(np.median(n) - (50 + np.exp(4))) < 4
    assert abs(np.median(logs) - 4.0) < 0.06
    assert abs(np.quantile(logs, 0.8413) - 6.0) < 0.08
    assert abs(n.mean() - (50 + np.exp(6))) < 60


def test_pareto_sizes_are_a_capped_power_law() -> None:
    n = device_sizes(20_000, "pareto", 1)
    assert n.min() == 50
    assert n.max() == 5000
    for factor in (2, 4, 10, 50):  # P(n >= 50 f) = 1 / f
        share = np.mean(n >= 50 * factor)
        assert abs(share - 1 / factor) < 4 * np.sqrt(1 / factor / 20_000)


# --------------------------------------------------------------------------------------------- what is drawn


def test_covariance_is_diagonal_and_falls_as_published() -> None:
    assert np.allclose(variances(60), [j**-1.2 for j in range(1, 61)])
    arrays = load(devices=40, features=6, sizes="pareto")
    inside = np.concatenate([x - x.mean(0) for k in range(40) if len(x := arrays.x[clients(arrays) == k]) > 200])
    covariance = np.cov(inside.T)
    assert np.allclose(np.diag(covariance), variances(6), rtol=0.08)
    correlation = np.corrcoef(inside.T)
    assert np.abs(correlation - np.eye(6)).max() < 5 / np.sqrt(len(inside))


@pytest.mark.slow
@pytest.mark.parametrize(("b", "spread"), [(0.0, 1.0), (1.0, 2.0), (3.0, 10.0)])
def test_centres_differ_by_b(b: float, spread: float) -> None:
    """v_kj ~ N(B_k, 1) with B_k ~ N(0, b): each entry has variance 1 + b^2, and entries of one device share B_k."""
    arrays = load(b=b, devices=400, features=30, classes=2, sizes="pareto")
    means = np.stack([arrays.x[clients(arrays) == k].mean(0) for k in range(400)])
    assert abs(means.var() - spread) < 0.15 * spread
    assert abs(means.mean(1).var() - (b**2 + 1 / 30)) < 0.2 * b**2 + 0.02


def test_a_variance_is_the_square_of_a_deviation() -> None:
    as_std, as_variance = (
        load(a=0.5, b=0.5, u_mode="per_class"),
        load(a=0.25, b=0.25, u_mode="per_class", ab_as="variance"),
    )
    assert np.array_equal(as_std.x, as_variance.x)
    assert np.array_equal(as_std.y, as_variance.y)
    assert not np.array_equal(as_std.x, load(a=0.5, b=0.5, u_mode="per_class", ab_as="variance").x)
    assert np.array_equal(load(a=1, b=1).x, load(a=1, b=1, ab_as="variance").x)


def test_softmax_does_not_change_the_label() -> None:
    rng = np.random.default_rng(0)
    device = Device(rng.normal(size=(4, 3)), rng.normal(size=4), np.zeros(3))
    x = rng.normal(size=(50, 3))
    scores = torch.softmax(torch.from_numpy(x @ device.W.T + device.b), 1)
    assert labels(device, x).tolist() == scores.argmax(1).tolist()


def test_iid_devices_share_one_model_and_one_centre() -> None:
    arrays = load(iid=True, devices=40, features=8, classes=3, sizes="pareto")
    means = np.stack([arrays.x[clients(arrays) == k].mean(0) for k in range(40)])
    counts = np.bincount(clients(arrays))
    assert np.abs(means * np.sqrt(counts)[:, None] / np.sqrt(variances(8))).max() < 5
    # one linear model explains every device: a least-squares fit to half of them labels the others
    x = np.concatenate([arrays.x, np.ones((len(arrays.x), 1), np.float32)], 1)
    half = clients(arrays) < 20
    fit = np.linalg.lstsq(x[half], np.eye(3)[arrays.y[half]], rcond=None)[0]
    assert np.mean((x[~half] @ fit).argmax(1) == arrays.y[~half]) > 0.8
    other = load(iid=True, devices=40, features=8, classes=3, sizes="pareto", a=5, b=5)
    assert np.array_equal(arrays.x, other.x)
    assert np.array_equal(arrays.y, other.y)


# --------------------------------------------------------------------------------------- the inert parameter


def test_labels_do_not_depend_on_a_as_published() -> None:
    plain = load(a=0)
    for a in (0.5, 1.0, 5.0):
        other = load(a=a)
        assert np.array_equal(plain.x, other.x)
        assert np.array_equal(plain.y, other.y)
    assert not np.array_equal(plain.y, load(a=0, b=1.0).y)


def test_per_class_shifts_make_a_effective() -> None:
    plain, small, large = (load(a=a, u_mode="per_class") for a in (0, 0.5, 5.0))
    assert np.array_equal(plain.y, load(a=3.0).y)  # without a shift it is the published recipe
    assert np.array_equal(plain.x, large.x)
    changed = [np.mean(plain.y != other.y) for other in (small, large)]
    assert 0.02 < changed[0] < changed[1]
    top = [
        np.mean([np.bincount(d.y[clients(d) == k]).max() / np.sum(clients(d) == k) for k in range(30)])
        for d in (plain, large)
    ]
    assert top[0] < top[1]  # devices become more one-sided


def test_shared_plus_goes_from_one_model_to_many() -> None:
    """With a = 0 the shared model labels every device's rows; the larger a, the fewer of them."""
    chance = stream(0, NAME, SHARED)
    shared = Device(chance.standard_normal((10, 60)), chance.standard_normal(10), np.zeros(60))

    def agreement(a: float) -> float:
        d = load(a=a, u_mode="shared_plus")
        return float(np.mean(labels(shared, d.x.astype(np.float64)) == d.y))

    agree = [agreement(a) for a in (0.0, 0.5, 1.0, 5.0)]
    assert agree[0] > 0.9999  # rows are rounded to float32 after they are labelled
    assert agree == sorted(agree, reverse=True)
    assert agree[-1] < 0.5


# ---------------------------------------------------------------------------------------------- determinism


@pytest.mark.slow
def test_a_seed_names_the_data() -> None:
    one, again, other = load(3), load(3), load(4)
    for left, right in ((one.x, again.x), (one.y, again.y), (one.test, again.test), (clients(one), clients(again))):
        assert np.array_equal(left, right)
    assert one.x.shape != other.x.shape or not np.array_equal(one.x, other.x)


def test_fewer_devices_are_the_first_of_more() -> None:
    few, many = load(devices=4), load(devices=9)
    assert np.array_equal(few.x, many.x[clients(many) < 4])
    assert np.array_equal(few.y, many.y[clients(many) < 4])


def test_a_and_b_leave_sizes_and_splits_alone() -> None:
    one, other = load(a=0.5, b=0.5), load(a=1, b=1)
    assert np.array_equal(clients(one), clients(other))
    assert np.array_equal(one.test, other.test)


# --------------------------------------------------------------------------------------- as an experiment has it


def test_natural_clients_keep_their_own_rows() -> None:
    config = parse({"data": {"source": "synthetic", "devices": 5}, "partition": OWN, "model": {"kind": "logistic"}})
    prepared = prepare(config, Path("unused"))
    fed, arrays = prepared.experiment.federation, load(devices=5)
    assert fed.clients == 5
    assert prepared.experiment.task.size == 610
    assert fed.train.sizes.tolist() == np.bincount(clients(arrays)[~arrays.test]).tolist()
    assert fed.test.sizes.tolist() == np.bincount(clients(arrays)[arrays.test]).tolist()
    for ranges, flag in ((fed.train, False), (fed.test, True)):
        assert (arrays.test[ranges.rows.numpy()] == flag).all()
        assert clients(arrays)[ranges.rows.numpy()].tolist() == ranges.owners().tolist()
    assert fed.common.tolist() == np.flatnonzero(arrays.test).tolist()


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"a": -0.1}, "data.a"),
        ({"b": -1}, "data.b"),
        ({"split": 0}, "data.split"),
        ({"split": 1.1}, "data.split"),
        ({"devices": 0}, "data.devices"),
        ({"classes": 1}, "data.classes"),
        ({"sizes": "equal"}, "data.sizes"),
        ({"u_mode": "none"}, "data.u_mode"),
        ({"ab_as": "sd"}, "data.ab_as"),
        ({"augment": "flip"}, "data.augment"),
        ({"normalise": "half"}, "data.normalise"),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, Any], fault: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse({"data": {"source": "synthetic", **settings}, "partition": OWN})
    assert [f.where for f in caught.value.faults] == [fault]
