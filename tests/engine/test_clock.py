"""Stragglers, dropouts and simulated time."""

from __future__ import annotations

import pytest
import torch

from fedloom.config import parse
from fedloom.engine.clock import System, attend, duration, speeds
from fedloom.engine.plan import Amount, Drawn
from fedloom.engine.run import advance, begin
from fedloom.engine.store import RamStore
from fedloom.errors import ConfigError

IDS = torch.arange(40)
DRAWN = Drawn(IDS, torch.ones(40))
AMOUNT = Amount(torch.full((40,), 50), torch.full((40,), 10), torch.full((40,), 5), torch.full((40,), 100))


@pytest.mark.parametrize(("share", "left"), [(0.0, 40), (0.5, 20), (0.9, 4), (1.0, 0)])
def test_late_clients_are_dropped(share, left) -> None:
    found = attend(System(stragglers=share), DRAWN, AMOUNT, 20, (0, 3), partial=False)
    assert len(found.drawn.ids) == left
    assert (found.steps == 100).all()


def test_late_clients_send_whole_epochs() -> None:
    found = attend(System(stragglers=0.9), DRAWN, AMOUNT, 20, (0, 3), partial=True)
    late = found.steps[found.steps < 100]
    assert len(found.drawn.ids) == 40
    assert len(late) == 36
    assert (late % 5 == 0).all()
    assert late.min() >= 5
    assert late.max() <= 95


def test_with_one_epoch_the_part_is_counted_in_steps() -> None:
    one = AMOUNT._replace(steps=AMOUNT.per_epoch)
    draws = [attend(System(stragglers=1.0), DRAWN, one, 1, (0, t), partial=True).steps for t in range(50)]
    steps = torch.cat(draws)
    assert steps.unique().tolist() == [1, 2, 3, 4, 5]


def test_partial_work_covers_the_whole_range_evenly() -> None:
    system = System(stragglers=1.0, unit="step")
    steps = torch.cat([attend(system, DRAWN, AMOUNT, 20, (0, t), partial=True).steps for t in range(200)])
    assert (steps.min(), steps.max()) == (1, 100)
    assert float(steps.double().mean()) == pytest.approx(50.5, abs=1.5)


def test_the_same_clients_are_late_for_every_algorithm() -> None:
    a = attend(System(stragglers=0.5), DRAWN, AMOUNT, 20, (7, 2), partial=False)
    b = attend(System(stragglers=0.5), DRAWN, AMOUNT, 20, (7, 2), partial=True)
    late = set(IDS.tolist()) - set(a.drawn.ids.tolist())
    assert late == set(b.drawn.ids[b.steps < 100].tolist())
    other = attend(System(stragglers=0.5), DRAWN, AMOUNT, 20, (7, 3), partial=False)
    assert a.drawn.ids.tolist() != other.drawn.ids.tolist()


def test_dropouts_come_at_their_rate() -> None:
    here = [len(attend(System(dropout=0.3), DRAWN, AMOUNT, 1, (0, t), partial=False).drawn.ids) for t in range(300)]
    assert sum(here) / (300 * 40) == pytest.approx(0.7, abs=0.015)


def test_speeds_are_lognormal_and_fixed() -> None:
    system = System(speed=100, speed_spread=0.5)
    found = speeds(system, 20_000, 1)
    assert torch.equal(found, speeds(system, 20_000, 1))
    assert float(found.median()) == pytest.approx(100, rel=0.03)
    assert float(found.log().std()) == pytest.approx(0.5, rel=0.03)
    assert (speeds(System(speed=100), 5, 0) == 100).all()


def test_duration_by_hand() -> None:
    # slowest: 300 examples at 100/s = 3 s; 1 MB up at 10 Mbit/s = 0.8 s, down at 50 = 0.16 s; a round trip of 0.02 s
    system = System()
    found = duration(system, torch.tensor([50, 300]), torch.tensor([100.0, 100.0]), 1_000_000, 1_000_000)
    assert found == pytest.approx(3.98)
    assert duration(system, torch.tensor([300]), torch.tensor([100.0]), 0, 0) == 3.0


def test_partial_work_is_what_a_shorter_client_does(world) -> None:
    """A late client's update is that of a run in which everybody takes so few steps."""
    local = {"batch": 2, "lr": 0.1, "epochs": 3}
    late = world((8,), local=local, algorithm={"kind": "fedprox", "mu": 0.0}, system={"stragglers": 1.0})
    steps = int(late.present(0).steps)
    assert steps in (4, 8)
    short = world((8,), local={"batch": 2, "lr": 0.1, "steps": steps})
    a, b = (advance(exp, begin(exp), RamStore(1))[0].server.w for exp in (late, short))
    torch.testing.assert_close(a, b)


@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold", "fedalr", "moon"])
def test_a_round_in_which_everybody_is_lost_changes_nothing(world, algorithm) -> None:
    exp = world(algorithm=algorithm, system={"stragglers": 1.0, "policy": "drop"})
    first = begin(exp)
    second, excluded = advance(exp, first, RamStore(3))
    assert second.round == 1
    assert excluded == ()
    assert all(torch.equal(a, b) for a, b in zip(first.server, second.server, strict=True))


def test_scaffold_uses_the_steps_that_were_taken(world) -> None:
    exp = world(
        (8, 8),
        local={"batch": 2, "lr": 0.1, "epochs": 3},
        algorithm="scaffold",
        system={"stragglers": 1.0, "policy": "partial"},
    )
    store = RamStore(2)
    state, _ = advance(exp, begin(exp), store)
    steps = exp.present(0).steps
    kept = exp.given(state, store, torch.arange(2)).mine.c
    # option II from zero: c_i = (w - y_i) / (steps * lr), and w moved by the mean of y_i - w
    moved = -(kept * steps[:, None] * 0.1).mean(0)
    torch.testing.assert_close(state.server.w - exp.task.w0, moved, rtol=1e-4, atol=1e-6)


def test_a_network_refuses_stragglers() -> None:
    with pytest.raises(ConfigError, match="system"):
        parse({"algorithm": "dpsgd", "system": {"stragglers": 0.5}})


def test_a_model_that_was_sent_to_a_late_client_is_counted(world) -> None:
    exp = world((8, 8, 8, 8), system={"stragglers": 0.5, "policy": "drop"})
    state, _ = advance(exp, begin(exp), RamStore(4))
    once = 4 * exp.task.size
    assert (state.up, state.down) == (2 * once, 4 * once)
