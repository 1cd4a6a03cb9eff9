"""What the server keeps of clients, and uploads that no examples can have."""

from __future__ import annotations

import math

import pytest
import torch

from fedloom.core import tree
from fedloom.maths.private_sums import (
    clipped_rows,
    noised_sums,
)
from fedloom.maths.registry import body_fingerprint, enrolled, no_registry, of_body, statistics_faults
from fedloom.maths.ridge import (
    Statistics,
    from_rows,
    no_statistics,
    statistics,
    to_rows,
    triangle,
    with_bias,
)
from support.ridge import (
    C,
    digits,
    examples,
    normal,
    normalised,
    of_clients,
)


def honest(relu=True, bias=True, norm=2.0):
    x, y = examples()
    x = x.relu() if relu else x
    x = clipped_rows(with_bias(x) if bias else x, norm)
    x = torch.cat([x[:, :-1], torch.ones(400, 1, dtype=torch.float64)], 1) if bias else x
    return statistics(x, y, C)


CHECKS = {"norm": 2.5, "bias": 12}


def test_honest_sums_have_no_fault() -> None:
    assert statistics_faults(honest(), **CHECKS) == []
    assert statistics_faults(honest(relu=False, bias=False), norm=2.0) == []
    assert statistics_faults(no_statistics(3, 2), norm=1.0) == []
    x, y, *_ = digits()
    assert statistics_faults(statistics(x, y, 10)) == []


def test_flipped_labels_pass_every_check() -> None:
    x, y = examples()
    x = with_bias(clipped_rows(x.relu(), 2.0))
    assert statistics_faults(statistics(x, (y + 1) % C, C), **CHECKS) == []


def spoiled(change):
    stats = tree.tmap(torch.clone, honest())
    change(stats)
    return stats


FAULTS = {
    "finite": lambda s: s.cross[0, 0].fill_(math.nan),
    "symmetric": lambda s: s.gram[0, 1].add_(1e-3),
    "negative count": lambda s: s.counts[0].sub_(1000),
    "above n R": lambda s: s.gram.diagonal().add_(1000),
    "longer than count": lambda s: s.cross[:, 0].mul_(100),
    "semidefinite": lambda s: s.gram.mul_(0.1),
    "sum of the columns of B": lambda s: s.cross.neg_(),
    "bias entry of G": lambda s: s.gram[12, 12].add_(1),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_cannot_be_a_sum_is_found(fault) -> None:
    assert any(fault in reason for reason in statistics_faults(spoiled(FAULTS[fault]), **CHECKS))


def test_a_negated_b_is_found_by_the_bias_alone() -> None:
    stats = honest(relu=False)
    negated = stats._replace(cross=-stats.cross)
    assert statistics_faults(negated, norm=2.5) == []
    assert len(statistics_faults(negated, norm=2.5, bias=12)) == 1


def test_noise_for_privacy_is_no_fault() -> None:
    stats = honest()
    normals = normal(triangle(13) + 13 * C)
    noisy = Statistics(*from_rows(noised_sums(to_rows(stats), 3.0, normals, C), C), stats.counts)
    assert statistics_faults(noisy, **CHECKS) != []
    assert statistics_faults(noisy, **CHECKS, noise=3.0) == []


def registry(ids, stats):
    return enrolled(no_registry(5, 12, C, 7), torch.tensor(ids), to_rows(normalised(stats)), stats.counts)


def test_l8_a_registered_client_stays_as_it_is() -> None:
    x, y = examples()
    stacked = of_clients(x, y, y % 3)
    once = registry([4, 0, 2], stacked)
    assert once.known.tolist() == [True, False, True, False, True]
    assert torch.equal(once.rows[4], to_rows(normalised(tree.take(stacked, 0))))
    again = enrolled(once, torch.tensor([4, 0, 2]), 2 * to_rows(normalised(stacked)), 2 * stacked.counts)
    for kept, was in zip(again, once, strict=True):
        assert torch.equal(kept, was)


def test_l14_statistics_of_another_body_are_discarded() -> None:
    x, y = examples()
    found = registry([0, 1, 2], of_clients(x, y, y % 3))
    assert of_body(found, 7) is found
    other = of_body(found, 8)
    assert int(other.body) == 8
    assert not other.known.any()
    assert not other.rows.any()


def test_l14_a_body_is_recognised_by_its_weights_and_running_statistics() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    before = body_fingerprint(net.state_dict().values())
    assert before == body_fingerprint([x.clone() for x in net.state_dict().values()])
    net(normal(8, 3).float())
    assert before != body_fingerprint(net.state_dict().values())
    assert body_fingerprint([torch.zeros(4)]) != body_fingerprint([torch.zeros(2, 2)])
    assert int(torch.tensor(before)) == before
