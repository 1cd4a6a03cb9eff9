"""Stragglers, dropouts and simulated time."""

from __future__ import annotations

import dataclasses
import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedloom.algorithms.pfedala import PFedALA
from fedloom.core import rng
from fedloom.core.errors import ConfigError
from fedloom.engine.clock import (
    Load,
    System,
    Timetable,
    attend,
    check_clients,
    links,
    speeds,
    timetable,
)
from fedloom.engine.plan import Amount, Drawn
from fedloom.engine.rounds import advance, begin
from fedloom.engine.store import RamStore
from fedloom.runs.settings import parse

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


def duration(system: System, examples: Tensor, speed: Tensor, up: int, down: int) -> float:
    """Seconds of a round, whatever else happens in it."""
    load = Load(examples, examples, torch.zeros_like(examples))
    return timetable(system, torch.arange(len(examples)), load, speed, up, down, (0, 0)).next_


def test_duration_by_hand() -> None:
    # slowest: 300 examples at 100/s = 3 s; 1 MB up at 10 Mbit/s = 0.8 s, down at 50 = 0.16 s; a round trip of 0.02 s
    system = System()
    found = duration(system, torch.tensor([50, 300]), torch.tensor([100.0, 100.0]), 1_000_000, 1_000_000)
    assert found == pytest.approx(3.98)
    assert duration(system, torch.tensor([300]), torch.tensor([100.0]), 0, 0) == 3.0


@pytest.mark.slow
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
    exp = dataclasses.replace(world(algorithm=algorithm), system=System(stragglers=1.0, policy="drop"))
    first = begin(exp)
    second, excluded = advance(exp, first, RamStore(3))
    assert second.round == 1
    assert excluded == ()
    assert all(torch.equal(a, b) for a, b in zip(first.server, second.server, strict=True))


@pytest.mark.slow
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


# -- the timetable of a round ------------------------------------------------------------------------
FREE = {"latency": 0.0}  # with no bytes, a network that costs nothing


def extra_epochs(wait: Tensor, epoch: Tensor, cap: int) -> Tensor:
    """What pFedALA makes of a wait."""
    return PFedALA(wait_mode="clock", max_extra=cap).idle_epochs(torch.arange(len(wait)), wait, epoch, (0, 0))


def table(
    system: System,
    sizes: Any,
    *,
    ids: Tensor | None = None,
    epochs: float = 5,
    prelude: float = 0.0,
    traffic: tuple[int, int] = (0, 0),
    address: tuple[int, int] = (0, 0),
) -> Timetable:
    """The timetable of a round of ``epochs`` over so many examples of each client."""
    size = torch.as_tensor(sizes, dtype=torch.float64)
    who = torch.arange(len(size)) if ids is None else ids
    speed = speeds(system, int(who.max()) + 1, address[0])[who]
    load = Load(epochs * size, size, torch.full_like(size, prelude))
    return timetable(system, who, load, speed, *traffic, address)


def extras(found: Timetable, cap: int = 100) -> list[int]:
    return extra_epochs(found.wait, found.epoch, cap).tolist()


def test_the_worked_example() -> None:
    found = table(System(slow=(0,), **FREE), [1000] * 3)
    assert found.epoch.tolist() == pytest.approx([1.5, 1, 1])
    assert found.start.tolist() == pytest.approx([7.5, 5, 5])
    assert (found.ready, found.next_) == (pytest.approx(7.5), pytest.approx(7.5))
    assert found.wait.tolist() == pytest.approx([0, 2.5, 2.5])
    assert extras(found) == [0, 2, 2]
    assert found.on_time.all()


def test_the_worked_example_with_a_deadline() -> None:
    found = table(System(slow=(0,), deadline=6, **FREE), [1000] * 3)
    assert found.on_time.tolist() == [False, True, True]
    assert found.ready == found.next_ == 6  # the server cannot know that nobody else will come
    assert found.wait.tolist() == pytest.approx([0, 1, 1])
    assert extras(found) == [0, 1, 1]


def test_a_round_by_hand() -> None:
    # down: 0.01 + 8 Mbit / 50 = 0.17 s; up: 0.01 + 8 Mbit / 10 = 0.81 s
    system = System(speeds=(100.0, 200.0), aggregation=0.5)
    found = table(system, [100, 100], epochs=2, prelude=50, traffic=(1_000_000, 1_000_000))
    assert found.start.tolist() == pytest.approx([0.17 + 2.5, 0.17 + 1.25])
    assert found.ready == pytest.approx(2.67 + 0.81)
    assert found.next_ == pytest.approx(3.48 + 0.5)
    assert found.wait.tolist() == pytest.approx([3.98 + 0.17 - 2.67, 3.98 + 0.17 - 1.42])
    assert found.epoch.tolist() == [1.0, 0.5]
    apart = table(
        system.model_copy(update={"overlap_upload": False}), [100, 100], epochs=2, prelude=50, traffic=(10**6,) * 2
    )
    assert apart.wait.tolist() == pytest.approx((found.wait - 0.81).tolist())
    assert apart._replace(wait=found.wait)[1:3] == found[1:3]  # what clients do meanwhile delays nobody


def test_a_deadline_that_nobody_meets() -> None:
    system = System(deadline=0.5, aggregation=3.0, **FREE)
    found = table(system, [1000, 2000])
    assert not found.on_time.any()
    assert found.ready == found.next_ == 0.5  # there is nothing to aggregate
    assert found.wait.tolist() == [0, 0]
    examples = torch.tensor([5000, 10_000])
    assert duration(system, examples, torch.tensor([1000.0, 1000.0]), 0, 0) == 0.5


def test_a_deadline_met_to_the_moment_is_met() -> None:
    # 0.1 + 0.2 is a little more than 0.3
    system = System(speed=1.0, deadline=0.3, **FREE)
    assert table(system, [0.1], epochs=1, prelude=0.2).on_time.all()


def test_an_upload_that_is_late_leaves_time_to_train() -> None:
    found = table(System(deadline=3, **FREE), [1000], epochs=1, traffic=(10_000_000, 0))  # 1 s, and 8 s to send
    assert not found.on_time.any()
    assert found.wait.tolist() == [2]


def test_a_round_of_nobody_takes_no_time() -> None:
    nobody = torch.tensor([], dtype=torch.int64)
    assert duration(System(aggregation=1.0, deadline=9.0), nobody, nobody.double(), 4, 4) == 0.0


def test_who_exchanges_nothing_waits_for_no_network() -> None:
    assert table(System(latency=5.0), [1000]).start.tolist() == [5.0]
    assert table(System(latency=5.0), [1000], traffic=(1, 0)).ready == pytest.approx(10.0)


@pytest.mark.slow
@given(
    st.lists(st.tuples(st.integers(1, 10**6), st.floats(1e-3, 1e6)), min_size=1, max_size=20),
    st.integers(0, 10**9),
    st.integers(0, 10**9),
    st.floats(0, 10),
)
def test_without_the_new_settings_a_round_takes_what_it_always_took(clients, up, down, latency) -> None:
    examples, speed = torch.tensor([c[0] for c in clients]), torch.tensor([c[1] for c in clients], dtype=torch.float64)
    system = System(latency=latency)
    transfer = system.latency + 8e-6 * (up / system.up + down / system.down) if up or down else 0.0
    before = float((examples.double() / speed).max()) + transfer
    assert duration(system, examples, speed, up, down) == before


def test_a_slower_client_gives_the_others_more_time() -> None:
    factors = (1.0, 1.2, 1.4, 1.6, 1.8, 2.0, 4.0)
    found = [extras(table(System(slow=(0,), slow_factor=f, **FREE), [500, 400, 500, 90])) for f in factors]
    for before, after in pairwise(found):
        assert all(a <= b for a, b in zip(before[1:], after[1:], strict=True))
    assert all(row[0] == 0 for row in found)
    equal = [extras(table(System(slow=(0,), slow_factor=f, **FREE), [500] * 3))[1] for f in factors]
    assert equal == [0, 1, 2, 3, 4, 5, 15]  # floor(E (factor - 1)), not spoilt by rounding


@pytest.mark.slow
@given(
    st.lists(st.floats(10, 5000), min_size=1, max_size=8),
    st.integers(1, 8),
    st.integers(0, 6),
)
def test_on_a_free_network_with_equal_data_extra_epochs_are_the_difference_in_speed(rates, epochs, cap) -> None:
    found = table(System(speeds=tuple(rates), **FREE), [300] * len(rates), epochs=epochs)
    slowest = max(1 / r for r in rates)
    wanted = [math.floor(epochs * (slowest * r - 1) + 1e-9) for r in rates]
    assert extras(found, cap) == [min(cap, w) for w in wanted]
    assert extras(found, cap)[rates.index(min(rates))] == 0


def test_equal_clients_wait_only_for_the_network() -> None:
    assert extras(table(System(**FREE), [100] * 4)) == [0] * 4
    # 0.8 s up and 0.16 s down with epochs of 0.1 s
    assert extras(table(System(**FREE), [100] * 4, traffic=(10**6,) * 2), cap=20) == [9] * 4
    assert extras(table(System(**FREE), [100] * 4, traffic=(10**6,) * 2), cap=3) == [3] * 4


def test_extra_epochs_at_the_edges() -> None:
    wait, epoch = torch.tensor([[0, 5, 5, 0.3, 9], [0, 0, 1e-300, 0.1, 10]], dtype=torch.float64)
    assert extra_epochs(wait, epoch, 7).tolist() == [0, 0, 7, 3, 0]
    assert extra_epochs(wait, epoch, 0).tolist() == [0] * 5
    assert extra_epochs(wait, epoch, 7).dtype == torch.int64


SYSTEMS = st.builds(
    System,
    speed_spread=st.floats(0, 1),
    link_spread=st.floats(0, 1),
    jitter=st.floats(0, 0.9),
    aggregation=st.floats(0, 5),
    deadline=st.none() | st.floats(0.1, 60),
    overlap_upload=st.booleans(),
    slow=st.lists(st.integers(0, 9), max_size=4).map(tuple),
    slow_factor=st.floats(1, 4),
)
SIZES = st.lists(st.integers(1, 6000), min_size=1, max_size=10)
BYTES = st.tuples(st.integers(0, 10**7), st.integers(0, 10**7))
ADDRESS = st.tuples(st.integers(0, 2**31), st.integers(0, 1000))


@pytest.mark.slow
@given(SYSTEMS, SIZES, BYTES, ADDRESS)
def test_laws_of_a_timetable(system, sizes, traffic, address) -> None:
    found = table(system, sizes, traffic=traffic, address=address)
    assert all(x.dtype == torch.float64 for x in (found.start, found.wait, found.epoch))
    assert (found.wait >= 0).all()
    assert found.next_ >= found.ready > 0
    assert found.ready <= (system.deadline or math.inf)
    assert (found.start[found.on_time] <= found.ready + 1e-9).all()
    if bool(found.on_time.all()):
        assert found.next_ == found.ready + system.aggregation
    if system.deadline is None:
        assert found.on_time.all()
    elif not bool(found.on_time.all()):
        assert found.ready == system.deadline


@pytest.mark.slow
@given(SYSTEMS, SIZES, BYTES, ADDRESS, st.randoms(use_true_random=False))
@settings(max_examples=50)
def test_the_order_of_clients_is_irrelevant(system, sizes, traffic, address, random) -> None:
    order = list(range(len(sizes)))
    random.shuffle(order)
    at, size = torch.tensor(order), torch.tensor(sizes)
    plain, mixed = (
        table(system, size[ids], ids=ids, traffic=traffic, address=address) for ids in (torch.arange(len(sizes)), at)
    )
    for a, b in zip(plain, mixed, strict=True):
        assert torch.equal(a[at], b) if isinstance(a, Tensor) else a == b


@pytest.mark.slow
@given(SYSTEMS, SIZES, BYTES, ADDRESS, st.data())
@settings(max_examples=50)
def test_a_client_with_more_to_do_never_shortens_a_round(system, sizes, traffic, address, data) -> None:
    who = data.draw(st.integers(0, len(sizes) - 1))
    more = [n + (data.draw(st.integers(0, 5000)) if i == who else 0) for i, n in enumerate(sizes)]
    a, b = (table(system, n, traffic=traffic, address=address) for n in (sizes, more))
    assert b.ready >= a.ready


@pytest.mark.slow
@given(SYSTEMS, SIZES, ADDRESS, st.data())
@settings(max_examples=50)
def test_a_client_meets_the_same_times_in_any_cohort(system, sizes, address, data) -> None:
    """But for how long it waits, which is the others' doing."""
    few = torch.tensor(sorted(data.draw(st.sets(st.integers(0, len(sizes) - 1), min_size=1))))
    size = torch.tensor(sizes)
    everyone = table(system, size, traffic=(10**6, 10**6), address=address)
    some = table(system, size[few], ids=few, traffic=(10**6, 10**6), address=address)
    for name in ("start", "epoch", "on_time"):
        assert torch.equal(getattr(everyone, name)[few], getattr(some, name))


@pytest.mark.slow
@given(st.floats(0, 0.99), ADDRESS)
@settings(max_examples=50)
def test_jitter_stays_within_its_bounds(jitter, address) -> None:
    found = table(System(jitter=jitter, **FREE), [1000] * 50, address=address)
    assert float(found.epoch.min()) >= 1 - jitter - 1e-12
    assert float(found.epoch.max()) <= 1 + jitter + 1e-12
    torch.testing.assert_close(found.start, 5 * found.epoch)


def test_jitter_is_even_and_new_in_every_round() -> None:
    rounds = [table(System(jitter=0.4, **FREE), [1000] * 200, address=(3, t)).epoch for t in range(50)]
    drawn = torch.stack(rounds)
    assert float(drawn.mean()) == pytest.approx(1, abs=0.01)
    assert float(drawn.std()) == pytest.approx(0.4 / math.sqrt(3), rel=0.03)
    assert (drawn.std(0) > 0.1).all()
    assert not torch.equal(drawn[0], table(System(jitter=0.4, **FREE), [1000] * 200, address=(4, 0)).epoch)


def test_links_are_lognormal_and_fixed() -> None:
    system = System(link_spread=0.5)
    found = links(system, torch.arange(20_000), 1)
    assert float(found.up.median()) == pytest.approx(10, rel=0.03)
    assert float(found.down.median()) == pytest.approx(50, rel=0.03)
    both = torch.stack([found.up.log(), found.down.log()])
    assert both.std(1).tolist() == pytest.approx([0.5, 0.5], rel=0.03)
    assert abs(float(torch.corrcoef(both)[0, 1])) < 0.03
    assert torch.equal(links(system, torch.tensor([17, 3]), 1).up, found.up[[17, 3]])
    assert (links(System(), torch.arange(5), 1).up == 10).all()
    starts = [table(system, [10] * 4, traffic=(0, 10**6), address=(1, t)).start for t in range(2)]
    assert torch.equal(*starts)


def test_no_draw_makes_a_link_that_never_delivers(monkeypatch) -> None:
    for draw in (0.0, 1 - 2.0**-24):
        monkeypatch.setattr(rng, "uniform", lambda *path, draw=draw: torch.full((1,), draw))
        found = links(System(link_spread=1.0), torch.tensor([0]), 0)
        assert all(0.01 < float(x) < 100_000 for x in found)


# -- who is slow -------------------------------------------------------------------------------------
def test_slow_clients_are_slower_to_the_last_bit() -> None:
    plain = speeds(System(speed_spread=0.3), 6, 4)
    found = speeds(System(speed_spread=0.3, slow=(1, 4), slow_factor=1.2), 6, 4)
    assert found.tolist() == [v / 1.2 if i in (1, 4) else v for i, v in enumerate(plain.tolist())]


def test_speeds_can_be_set_one_by_one() -> None:
    system = System(speeds=(10.0, 20.0, 40.0), speed=7.0, speed_spread=2.0, slow=(2,), slow_factor=2)
    assert speeds(system, 3, 0).tolist() == [10.0, 20.0, 20.0]


def test_settings_for_other_clients_are_refused() -> None:
    check_clients(System(speeds=(1.0, 2.0), slow=(0, 1)), 2)
    check_clients(System(), 0)
    with pytest.raises(ConfigError) as error:
        check_clients(System(speeds=(1.0, 2.0), slow=(0, 3, 7)), 3)
    speed, slow = error.value.faults
    assert speed.where == "system.speeds"
    assert str(speed) == (
        "system.speeds: has 2 numbers, but there are 3 clients (give 3 numbers, or use speed and speed_spread)"
    )
    assert str(slow) == "system.slow: there is no client 3 among 3 (clients are numbered 0 to 2)"


def test_lists_may_be_written_in_a_file() -> None:
    system = parse({"system": {"speeds": [100, 50.5], "slow": [1], "deadline": 3}}).system
    assert (system.speeds, system.slow, system.deadline) == ((100.0, 50.5), (1,), 3.0)


@pytest.mark.parametrize(
    "wrong",
    [{"slow": [-1]}, {"slow_factor": 0.9}, {"jitter": 1.0}, {"speeds": [0.0]}, {"deadline": 0}, {"aggregation": -1.0}],
)
def test_settings_out_of_bounds_are_refused(wrong) -> None:
    with pytest.raises(ConfigError, match=f"system.{next(iter(wrong))}"):
        parse({"system": wrong})
