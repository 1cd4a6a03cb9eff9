"""The plan: every example once an epoch, nothing lost to grouping, and a fair draw of clients."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.core.optim import Local
from fedloom.data.federation import Ranges
from fedloom.engine.plan import Address, Cohort, Group, amounts, draw_cohort, groups, plans
from support.worlds import ranges

ragged = st.lists(st.integers(1, 400), min_size=1, max_size=12)
Steps = dict[tuple[int, int], tuple[int, ...]]


def planned(
    local: Local, sizes: Sequence[int], *, lanes: int = 64, round_: int = 0, seed: int = 1, **more: int
) -> list[Group]:
    ids = torch.arange(len(sizes))
    return list(plans(local, ranges(sizes), ids, Address(seed, round_), lr=0.1, lanes=lanes, **more))


def steps_of(found: list[Group]) -> Steps:
    """(client, step) to the rows that it reads, in order."""
    out: Steps = {}
    for group in found:
        for k, client in enumerate(group.ids.tolist()):
            for t in range(group.steps[k]):
                out[client, t] = tuple(group.rows[k, t][group.mask[k, t] > 0].tolist())
    return out


# -- what a client reads ---------------------------------------------------------------------------
@pytest.mark.slow
@given(ragged, st.sampled_from([0, 1, 7, 10, 64]), st.integers(1, 3), st.integers(1, 20))
@settings(max_examples=30, deadline=None)
def test_every_example_is_read_exactly_once_in_every_epoch(
    sizes: list[int], batch: int, epochs: int, lanes: int
) -> None:
    local = Local(batch=batch, epochs=epochs)
    read = steps_of(planned(local, sizes, lanes=lanes))
    start = np.concatenate([[0], np.cumsum(sizes)])
    for client, size in enumerate(sizes):
        per_epoch = 1 if batch == 0 else -(-size // batch)
        assert sum(1 for c, _ in read if c == client) == per_epoch * epochs
        for epoch in range(epochs):
            seen = [row for t in range(per_epoch) for row in read[client, epoch * per_epoch + t]]
            assert sorted(seen) == list(range(start[client], start[client + 1]))
        widths = [len(read[client, t]) for t in range(per_epoch)]
        width = min(size, batch or size)
        assert widths[:-1] == [width] * (per_epoch - 1)
        assert 1 <= widths[-1] <= width


@pytest.mark.slow
@given(ragged, st.sampled_from([0, 5, 10, 64]), st.sampled_from([1, 2, 3, 5, 100]), st.booleans())
@settings(max_examples=30, deadline=None)
def test_grouping_changes_nothing(sizes: list[int], batch: int, lanes: int, drop_last: bool) -> None:
    local = Local(batch=batch, epochs=2, drop_last=drop_last)
    alone, together = planned(local, sizes, lanes=1), planned(local, sizes, lanes=lanes)
    assert steps_of(alone) == steps_of(together)
    keys = [
        {int(i): g.keys[k, : g.steps[k]].tolist() for g in some for k, i in enumerate(g.ids)}
        for some in (alone, together)
    ]
    assert keys[0] == keys[1]


def test_the_order_of_clients_and_who_else_takes_part_change_nothing() -> None:
    sizes = [5, 300, 40, 1, 77]
    local, at = Local(batch=8, epochs=2), Address(4, 9)
    whole = steps_of(list(plans(local, ranges(sizes), torch.arange(5), at, lr=0.1, lanes=64)))
    part = steps_of(list(plans(local, ranges(sizes), torch.tensor([4, 1]), at, lr=0.1, lanes=64)))
    assert part == {k: v for k, v in whole.items() if k[0] in (1, 4)}


def test_drop_last_leaves_out_a_ragged_batch_but_never_the_only_one() -> None:
    read = steps_of(planned(Local(batch=10, drop_last=True), [25, 30, 7, 10]))
    widths = {c: [len(rows) for (i, _), rows in sorted(read.items()) if i == c] for c in range(4)}
    assert widths == {0: [10, 10], 1: [10, 10, 10], 2: [7], 3: [10]}


def test_steps_replace_epochs_and_run_on_into_further_epochs() -> None:
    read = steps_of(planned(Local(batch=10, steps=7), [25, 3, 200]))
    assert Counter(c for c, _ in read) == {0: 7, 1: 7, 2: 7}
    small = [read[1, t] for t in range(7)]
    assert all(sorted(rows) == [25, 26, 27] for rows in small)
    assert len(set(small)) > 1  # reshuffled
    first, second = ([r for t in range(3) for r in read[0, e * 3 + t]] for e in (0, 1))
    assert sorted(first) == sorted(second) == list(range(25))
    assert first != second
    assert len({r for t in range(7) for r in read[2, t]}) == 70


def test_steps_of_a_drop_last_client_run_on_without_the_ragged_batch() -> None:
    read = steps_of(planned(Local(batch=10, steps=5, drop_last=True), [25]))
    assert [len(read[0, t]) for t in range(5)] == [10] * 5


def test_full_batch_is_one_step_of_everything() -> None:
    read = steps_of(planned(Local(batch=0, epochs=2), [25, 3]))
    assert {k: len(v) for k, v in read.items()} == {(0, 0): 25, (0, 1): 25, (1, 0): 3, (1, 1): 3}


@pytest.mark.slow
def test_rounds_seeds_and_clients_are_shuffled_differently() -> None:
    plans_ = (planned(Local(), [500, 500], round_=r, seed=s) for r, s in ((0, 1), (1, 1), (0, 2)))
    orders = {
        tuple(r - 500 * c for t in range(50) for r in read[c, t]) for read in map(steps_of, plans_) for c in (0, 1)
    }
    assert len(orders) == 6


@pytest.mark.slow
def test_shuffles_are_uniform() -> None:
    """The six orders of three examples are equally likely over 6,000 rounds."""
    rounds = (steps_of(planned(Local(batch=0), [3] * 100, lanes=100, round_=r)) for r in range(60))
    places = Counter(tuple(x % 3 for x in rows) for read in rounds for rows in read.values())
    assert len(places) == 6
    assert sum((n - 1000) ** 2 / 1000 for n in places.values()) < 20.5  # 99.9 % with 5 degrees of freedom


def test_work_says_what_is_done() -> None:
    (group,) = planned(Local(batch=10, epochs=2), [25, 21], round_=6)
    assert group.steps == [6, 6]
    assert group.work.steps.tolist() == [6.0, 6.0]
    assert group.work.examples.tolist() == [25.0, 21.0]
    assert group.work.round.tolist() == [6.0, 6.0]
    assert group.work.lr.tolist() == pytest.approx([0.1, 0.1])


def test_epochs_of_the_caller_override_steps() -> None:
    assert planned(Local(batch=10, steps=7), [25], epochs=2)[0].steps == [6]


@pytest.mark.parametrize(
    "local", [Local(batch=10), Local(batch=10, steps=3), Local(batch=0)], ids=["epoch", "steps", "full"]
)
@pytest.mark.parametrize("sizes", [[0], [0, 25], [25, 0, 1], [0, 0, 2]])
def test_a_node_without_data_reads_nothing(local: Local, sizes: list[int]) -> None:
    """A network trains every node, also one to which a partition gave nothing."""
    for lanes in (1, 64):
        read = steps_of(planned(local, sizes, lanes=lanes))
        assert all(rows == () for (client, _), rows in read.items() if sizes[client] == 0)
        assert all(rows for (client, _), rows in read.items() if sizes[client])


# -- side by side ----------------------------------------------------------------------------------
@given(ragged, st.sampled_from([0, 10, 64]), st.integers(1, 8))
@settings(max_examples=40, deadline=None)
def test_groups_cover_every_client_once_and_never_exceed_the_lanes(sizes: list[int], batch: int, lanes: int) -> None:
    amount = amounts(Local(batch=batch), torch.tensor(sizes))
    found = groups(torch.arange(len(sizes)), amount, lanes)
    assert sorted(i for part in found for i in part.tolist()) == list(range(len(sizes)))
    for part in found:
        assert 1 <= len(part) <= lanes
        width, steps = amount.width[part], amount.steps[part]
        assert int(width.max()) < 2 * int(width.min()) or int(width.max()) == 1
        assert steps.tolist() == sorted(steps.tolist(), reverse=True)


def lane_rows(found: list[Group]) -> tuple[int, int]:
    """The rows that lanes compute, padding included, and those of them that are real."""
    computed = sum(sum(s > t for s in g.steps) * width for g in found for t, width in enumerate(g.widths))
    return computed, int(sum(g.mask.sum() for g in found))


@pytest.mark.slow
@pytest.mark.parametrize(("batch", "bound"), [(10, 1.05), (64, 1.15), (0, 1.45)])
@pytest.mark.parametrize("lanes", [8, 4096])
def test_padding_costs_little_on_ragged_clients(batch: int, bound: float, lanes: int) -> None:
    """Measured: at most 1.03 for batches of 10, 1.10 for 64, 1.38 for full batches (where 2 is the limit by design)."""
    rng = np.random.default_rng(0)
    cohorts = [
        np.exp(rng.uniform(0, np.log(2000), 100)).astype(int).clip(1),
        (rng.dirichlet(np.full(100, 0.3)) * 30_000).astype(int).clip(1, 2000),
        (rng.dirichlet(np.full(100, 0.1)) * 30_000).astype(int).clip(1, 2000),
        rng.integers(1, 2001, 100),
        np.array([1, 2000] * 20),
    ]
    for sizes, epochs in itertools.product(cohorts, (1, 3)):
        computed, real = lane_rows(planned(Local(batch=batch, epochs=epochs), sizes.tolist(), lanes=lanes))
        assert real == sizes.sum() * epochs
        assert computed / real < bound


# -- who takes part --------------------------------------------------------------------------------
SIZES = torch.tensor([5, 0, 10, 20, 40, 0, 80, 1, 3, 41])
ABLE = [0, 2, 3, 4, 6, 7, 8, 9]


@pytest.mark.slow
def test_uniform_draws_without_replacement_and_evenly() -> None:
    seen: Counter[int] = Counter()
    pairs: Counter[tuple[int, ...]] = Counter()
    for r in range(4000):
        drawn = draw_cohort(Cohort(size=2), SIZES, 1, r)
        ids = drawn.ids.tolist()
        assert ids == sorted(set(ids))
        assert drawn.times.tolist() == [1.0, 1.0]
        seen.update(ids)
        pairs[tuple(ids)] += 1
    assert sorted(seen) == ABLE
    assert sum((n - 1000) ** 2 / 1000 for n in seen.values()) < 24.3  # 99.9 % with 7 degrees of freedom
    assert len(pairs) == 28


@pytest.mark.slow
def test_proportional_draws_by_size_with_replacement() -> None:
    seen = np.zeros(10)
    repeated = 0
    for r in range(3000):
        drawn = draw_cohort(Cohort(size=6, sampling="proportional"), SIZES, 1, r)
        assert float(drawn.times.sum()) == 6
        assert drawn.ids.tolist() == sorted(set(drawn.ids.tolist()))
        repeated += bool((drawn.times > 1).any())
        seen[drawn.ids.numpy()] += drawn.times.numpy()
    want = 18_000 * SIZES.numpy() / int(SIZES.sum())
    assert seen[[1, 5]].tolist() == [0, 0]
    able = np.array(ABLE)
    assert float(((seen[able] - want[able]) ** 2 / want[able]).sum()) < 24.3
    assert repeated > 2000


def test_proportional_may_draw_more_than_there_are() -> None:
    drawn = draw_cohort(Cohort(size=50, sampling="proportional"), SIZES, 1, 0)
    assert float(drawn.times.sum()) == 50


def test_all_means_every_client_that_has_data() -> None:
    drawn = draw_cohort(Cohort(sampling="all"), SIZES, 1, 0)
    assert drawn.ids.tolist() == ABLE
    assert drawn.times.tolist() == [1.0] * 8


def test_the_cohort_is_ten_or_all_there_are() -> None:
    assert len(draw_cohort(Cohort(), torch.ones(50), 1, 0).ids) == 10
    assert draw_cohort(Cohort(), SIZES, 1, 0).ids.tolist() == ABLE
    assert draw_cohort(Cohort(size=9), SIZES, 1, 0).ids.tolist() == ABLE  # two of the ten have no data


@pytest.mark.parametrize("sampling", ["uniform", "proportional"])
def test_a_draw_is_a_function_of_seed_and_round(sampling: str) -> None:
    cohort = Cohort.model_validate({"size": 3, "sampling": sampling})
    sizes = torch.arange(1, 200)

    def ids(seed: int, round_: int) -> list[int]:
        return list(draw_cohort(cohort, sizes, seed, round_).ids.tolist())

    assert ids(1, 5) == ids(1, 5)
    assert len({tuple(ids(s, r)) for s in range(3) for r in range(3)}) == 9


def test_wrapping_begins_a_new_pass_instead_of_a_short_batch() -> None:
    """450 examples in batches of 64 are seven full batches and one of a new pass, as in FLGo."""
    everything = Ranges(torch.arange(450), torch.tensor([0, 450]))
    local = Local(batch=64, wrap_last=True)
    group = next(plans(local, everything, torch.tensor([0]), Address(0, 0), lr=0.1, lanes=1))
    assert group.steps == [8]
    assert (group.mask.sum(-1) == 64).all()
    assert len(set(group.rows[0, :7].flatten().tolist())) == 7 * 64
    tiny = next(
        plans(local, Ranges(torch.arange(9), torch.tensor([0, 9])), torch.tensor([0]), Address(0, 0), lr=0.1, lanes=1)
    )
    assert tiny.steps == [1]
    assert tiny.mask.sum() == 9
