"""Partitions keep their promises: complete, in range, large enough, repeatable, in bounded time."""

from __future__ import annotations

import re
from math import floor
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from pydantic import ValidationError

from fedloom.core.errors import ConfigError, DataError
from fedloom.core.rng import stream
from fedloom.core.schema import defined_in, read
from fedloom.data import partition as module
from fedloom.data.arrays import Ints
from fedloom.data.partition import (
    Assignment,
    Dirichlet,
    Iid,
    Natural,
    Partition,
    Pathological,
    Quantity,
    RandomPartition,
    Shards,
    fingerprint,
    held_out_rows,
    summary,
)

Method: TypeAlias = Literal["balanced_greedy", "deal_repair"]
Per: TypeAlias = Literal["class", "client", "prior"]

CIFAR10 = np.repeat(np.arange(10), 5000)
CIFAR100 = np.repeat(np.arange(100), 500)


def assigned(partition: Partition, y: Ints, classes: int, seed: int = 0, client: Ints | None = None) -> Assignment:
    return partition.assign(y, classes, stream(seed, "partition"), client)


def cells(y: Ints, result: Assignment, classes: int) -> Ints:
    """The number of rows of each class at each client."""
    table = np.bincount(result.owner * classes + y, minlength=result.clients * classes)
    return table.reshape(result.clients, classes)


drawn = st.sampled_from(
    [
        (Iid, {}),
        (Shards, {"method": "balanced_greedy"}),
        (Shards, {"method": "deal_repair"}),
        (Shards, {"method": "mcmahan"}),
        (Shards, {"per_client": 3}),
        (Shards, {"per_client": 3, "method": "deal_repair"}),
        (Dirichlet, {"alpha": 0.05}),
        (Dirichlet, {"alpha": 1e-300}),
        (Dirichlet, {"alpha": 0.1, "guard": True}),
        (Dirichlet, {"alpha": 0.1, "per": "client"}),
        (Dirichlet, {"alpha": 0.1, "per": "prior"}),
        (Dirichlet, {"alpha": 1e-300, "per": "prior"}),
        (Dirichlet, {"alpha": 1e300, "per": "client"}),
        (Pathological, {}),
        (Pathological, {"balanced": True, "shuffle_within_class": False}),
        (Pathological, {"random": True, "per_client": 3}),
        (Quantity, {}),
        (Quantity, {"exponent": 50.0}),
    ]
)


class TestEveryKind:
    @pytest.mark.slow
    @settings(max_examples=120, deadline=None)
    @given(drawn, st.integers(0, 300), st.integers(1, 12), st.integers(1, 40), st.integers(1, 6), st.integers(0, 99))
    @example((Pathological, {}), 100, 10, 7, 1, 0)  # the blocks run out of places before the last class
    @example((Dirichlet, {"alpha": 1e-300, "per": "prior"}), 50, 10, 1, 1, 0)  # nobody wants most classes
    def test_complete_in_range_large_enough_and_repeatable_or_one_error(
        self, way: tuple[type[Any], dict[str, Any]], n: int, classes: int, clients: int, least: int, seed: int
    ) -> None:
        cls, fields = way
        partition = cls(clients=clients, min_size=least, **fields)
        y = np.random.default_rng(seed).integers(0, classes, n)
        try:
            result = assigned(partition, y, classes, seed)
        except ConfigError as error:
            held, per_client = len(np.unique(y)), fields.get("per_client", 2)
            needs_classes = cls in (Shards, Pathological) and fields.get("method") != "mcmahan"
            narrow = needs_classes and (per_client > held or clients * per_client < held)
            assert clients * least > n or narrow
            faults = error.faults
            assert all(fault.where.startswith("partition.") and re.search(r"\d", fault.what) for fault in faults)
            return
        assert result.owner.shape == (n,)
        assert result.owner.dtype == np.int64
        assert result.clients == clients
        assert result.owner.min() >= 0
        assert np.bincount(result.owner, minlength=clients).shape == (clients,)
        assert np.bincount(result.owner, minlength=clients).min() >= least
        again = assigned(partition, y, classes, seed)
        assert np.array_equal(result.owner, again.owner)
        assert result.notes == again.notes

    @pytest.mark.parametrize("cls", [Iid, Dirichlet, Quantity, Shards, Pathological], ids=lambda cls: cls.kind)
    def test_another_address_gives_another_deal(self, cls: type[RandomPartition]) -> None:
        first, second = (assigned(cls(), CIFAR10, 10, seed) for seed in (0, 1))
        assert not np.array_equal(first.owner, second.owner)

    def test_input_is_left_alone(self) -> None:
        y = CIFAR10.copy()
        assigned(Dirichlet(clients=100, alpha=0.05), y, 10)
        assert np.array_equal(y, CIFAR10)

    @pytest.mark.parametrize("cls", [Iid, Dirichlet, Quantity], ids=lambda cls: cls.kind)
    def test_single_row_single_client_single_class(self, cls: type[RandomPartition]) -> None:
        assert assigned(cls(clients=1), np.array([0]), 1).owner.tolist() == [0]

    @pytest.mark.parametrize("cls", [Shards, Pathological], ids=lambda cls: cls.kind)
    def test_single_class_with_one_class_per_client(self, cls: type[Shards | Pathological]) -> None:
        result = assigned(cls(clients=3, per_client=1), np.zeros(30, np.int64), 1)
        assert np.bincount(result.owner).min() >= 1

    def test_every_kind_is_found_by_name(self) -> None:
        public = [cls for cls in vars(module).values() if defined_in(cls, Partition, module)]
        found = {cls.kind: cls for cls in public if "kind" in vars(cls)}
        assert set(found) == {"iid", "shards", "dirichlet", "pathological", "quantity", "natural"}
        assert all(found[name]().holdout == 0.2 for name in found)


class TestImpossibleRequests:
    @pytest.mark.parametrize(
        ("partition", "where", "words"),
        [
            (Iid(clients=51), "partition.clients", "51 clients cannot share 50 rows"),
            (Iid(clients=10, min_size=6), "partition.min_size", "need 60 rows, but there are 50"),
            (Shards(clients=10, per_client=6), "partition.per_client", "6 classes for each client"),
            (Shards(clients=2, per_client=2), "partition.per_client", "without a client"),
            (Pathological(clients=2, per_client=2), "partition.per_client", "without a client"),
            (Pathological(clients=2, per_client=6), "partition.per_client", "but the rows have 5"),
            (Dirichlet(clients=10, min_size=10), "partition.min_size", "need 100 rows"),
        ],
    )
    def test_one_fault_names_the_field_the_numbers_and_the_fix(
        self, partition: Partition, where: str, words: str
    ) -> None:
        with pytest.raises(ConfigError) as caught:
            assigned(partition, np.repeat(np.arange(5), 10), 10)
        (fault,) = caught.value.faults
        assert fault.where == where
        assert words in fault.what
        assert fault.fix.startswith("at ")

    def test_several_faults_come_at_once(self) -> None:
        with pytest.raises(ConfigError) as caught:
            assigned(Shards(clients=51, per_client=6), np.repeat(np.arange(5), 10), 5)
        assert [fault.where for fault in caught.value.faults] == ["partition.clients", "partition.per_client"]

    def test_the_fix_that_is_named_works(self) -> None:
        y = np.repeat(np.arange(5), 10)
        assigned(Shards(clients=2, per_client=3), y, 5)
        assigned(Shards(clients=3, per_client=2), y, 5)
        assigned(Iid(clients=10, min_size=5), y, 5)

    def test_fields_are_checked_when_read(self) -> None:
        assert Dirichlet(guard=True).guard
        with pytest.raises(ValidationError):
            Dirichlet(alpha=0.0)
        with pytest.raises(ValidationError):
            Iid(holdout=1.0)
        _, faults = read(Dirichlet, {"per": "prior", "guard": True}, "partition")
        assert [fault.where for fault in faults] == ["partition.guard"]


class TestShards:
    @pytest.mark.parametrize("method", ["balanced_greedy", "deal_repair"])
    @pytest.mark.parametrize(("y", "classes"), [(CIFAR10, 10), (CIFAR100, 100)], ids=["cifar10", "cifar100"])
    def test_two_classes_of_250_rows_at_every_client(self, method: Method, y: Ints, classes: int) -> None:
        result = assigned(Shards(clients=100, method=method), y, classes)
        table = cells(y, result, classes)
        assert ((table == 250) | (table == 0)).all()
        assert ((table > 0).sum(axis=1) == 2).all()
        assert ((table > 0).sum(axis=0) == 200 // classes).all()
        assert result.notes == ()

    @pytest.mark.slow
    @settings(max_examples=200, deadline=None)
    @given(st.sampled_from(["balanced_greedy", "deal_repair"]), st.integers(1, 30), st.integers(1, 12), st.data())
    def test_classes_per_client_are_exact_and_usage_is_even(
        self, method: Method, clients: int, classes: int, data: st.DataObject
    ) -> None:
        least = -(-classes // clients)
        per_client = data.draw(st.integers(least, classes))
        y = np.tile(np.arange(classes), 40)
        seed = data.draw(st.integers(0, 9))
        result = assigned(Shards(clients=clients, per_client=per_client, method=method), y, classes, seed)
        held = cells(y, result, classes) > 0
        assert (held.sum(axis=1) == per_client).all()
        usage = held.sum(axis=0)
        assert usage.max() - usage.min() <= 1

    def test_without_repair_about_one_in_ten_clients_holds_a_single_class(self) -> None:
        partition = Shards(clients=100, method="mcmahan")
        tables = [cells(CIFAR10, assigned(partition, CIFAR10, 10, seed), 10) for seed in range(40)]
        assert np.mean([(table > 0).sum(axis=1) == 1 for table in tables]) == pytest.approx(19 / 199, abs=0.02)

    def test_a_class_with_fewer_rows_than_holders_is_noted(self) -> None:
        y = np.array([0] * 100 + [1] * 3)
        result = assigned(Shards(clients=10), y, 2)
        assert result.notes == ("7 of 10 clients hold fewer than 2 classes",)

    def test_a_label_that_does_not_occur_takes_no_place(self) -> None:
        y = np.array([1] * 50 + [3] * 50)
        result = assigned(Shards(clients=10), y, 5)
        assert ((cells(y, result, 5) > 0).sum(axis=0) == [0, 10, 0, 10, 0]).all()


class TestDirichlet:
    @pytest.mark.parametrize("per", ["class", "client", "prior"])
    def test_500_clients_and_100_classes_each_get_enough(self, per: Per) -> None:
        result = assigned(Dirichlet(clients=500, alpha=0.05, per=per, min_size=10), CIFAR100, 100)
        assert np.bincount(result.owner, minlength=500).min() >= 10

    def test_rejection_would_never_end_here(self) -> None:
        result = assigned(Dirichlet(clients=100, alpha=0.05), CIFAR10, 10)
        assert np.bincount(result.owner, minlength=100).min() == 10
        assert len(result.notes) == 1
        assert "had fewer than 10 rows" in result.notes[0]

    def test_the_note_says_what_a_repair_does_to_the_label_mixes_and_how_to_avoid_it(self) -> None:
        y = CIFAR10[::25]
        for alpha, fix in ((0.01, "to move only "), (0.3, "to keep the split")):
            partition = Dirichlet(clients=50, alpha=alpha)
            free, _ = partition.draw(y, 10, stream(0, "partition"))
            result = assigned(partition, y, 10)
            before, after = (summary(y, owner, 50, 10).heterogeneity for owner in (free, result.owner))
            (note,) = result.notes
            digits = 3 if alpha == 0.3 else 2
            assert (round(before, 2) == round(after, 2)) is (alpha == 0.3)
            assert (
                f"heterogeneity was {before:.{digits}f} and is {after:.{digits}f}; set partition.min_size=1 {fix}"
                in note
            )
            if alpha == 0.3:
                assert assigned(Dirichlet(clients=50, alpha=alpha, min_size=1), y, 10).notes == ()

    def test_a_client_without_rows_is_said_to_have_none(self) -> None:
        (note,) = assigned(Dirichlet(clients=50, alpha=0.01, min_size=1), CIFAR10[::25], 10).notes
        assert "of 50 that had no rows; " in note
        assert "set partition" not in note

    def test_the_note_counts_the_rows_that_moved(self) -> None:
        y = CIFAR10
        partition = Dirichlet(clients=100, alpha=0.05, min_size=10)
        free, _ = partition.draw(y, 10, stream(0, "partition"))
        result = assigned(partition, y, 10)
        sizes = np.bincount(free, minlength=100)
        few = int((sizes < 10).sum())
        need = int(np.maximum(10 - sizes, 0).sum())
        assert need > 0
        says = f"moved {need:,} of 50,000 rows from the largest clients to {few} of 100 that had fewer than 10 rows; "
        assert result.notes[0].startswith(says)
        assert np.count_nonzero(result.owner != free) == need

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("y", "classes", "seeds", "held", "effective", "distance"),
        [(CIFAR10, 10, 4, 2.0, 1.22, 0.86), (CIFAR100, 100, 1, 2.5, 1.22, 0.98)],
        ids=["cifar10", "cifar100"],
    )
    def test_prior_looks_as_measured_for_flgo(
        self, y: Ints, classes: int, seeds: int, held: float, effective: float, distance: float
    ) -> None:
        results = [assigned(Dirichlet(clients=100, alpha=0.1, per="prior"), y, classes, seed) for seed in range(seeds)]
        facts = [summary(y, result.owner, 100, classes) for result in results]
        assert np.mean([fact.classes_mean for fact in facts]) == pytest.approx(held, abs=0.25)
        assert np.mean([fact.effective_classes for fact in facts]) == pytest.approx(effective, abs=0.12)
        assert np.mean([fact.heterogeneity for fact in facts]) == pytest.approx(distance, abs=0.02)

    @pytest.mark.parametrize("seed", range(4))
    def test_prior_sizes_are_near_equal_on_cifar10(self, seed: int) -> None:
        result = assigned(Dirichlet(clients=100, alpha=0.1, per="prior"), CIFAR10, 10, seed)
        fact = summary(CIFAR10, result.owner, 100, 10)
        assert fact.size_min >= 475
        assert fact.size_max <= 525
        assert 1.1 <= fact.effective_classes <= 1.35
        assert result.notes == ()

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("fields", "y", "classes", "seeds", "held", "effective", "distance"),
        [
            ({"per": "client"}, CIFAR10, 10, 4, 5.2, 2.06, 0.72),
            ({"per": "client"}, CIFAR100, 100, 1, 36, 11.0, 0.75),  # a hundred classes need the longest search
            ({"guard": True}, CIFAR10, 10, 4, 4.1, 1.99, 0.74),
            ({"guard": True}, CIFAR100, 100, 4, 32, 9.8, 0.77),
            ({"min_size": 1}, CIFAR10, 10, 4, 4.9, 2.0, 0.72),
        ],
    )
    def test_the_other_ways_look_as_measured(
        self, fields: dict[str, Any], y: Ints, classes: int, seeds: int, held: float, effective: float, distance: float
    ) -> None:
        results = [assigned(Dirichlet(clients=100, alpha=0.1, **fields), y, classes, seed) for seed in range(seeds)]
        facts = [summary(y, result.owner, 100, classes) for result in results]
        assert np.mean([fact.classes_mean for fact in facts]) == pytest.approx(held, rel=0.08)
        assert np.mean([fact.effective_classes for fact in facts]) == pytest.approx(effective, rel=0.12)
        assert np.mean([fact.heterogeneity for fact in facts]) == pytest.approx(distance, abs=0.04)

    def test_guard_lowers_the_largest_client(self) -> None:
        def largest(guard: bool) -> float:
            partition = Dirichlet(clients=100, alpha=0.1, guard=guard)
            deals = [assigned(partition, CIFAR10, 10, seed) for seed in range(5)]
            return float(np.mean([np.bincount(deal.owner).max() for deal in deals]))

        assert largest(True) < largest(False)

    @pytest.mark.parametrize("per", ["class", "client", "prior"])
    def test_a_large_alpha_mixes_labels_evenly(self, per: Per) -> None:
        result = assigned(Dirichlet(clients=10, alpha=1000.0 * (10 if per == "prior" else 1), per=per), CIFAR10, 10)
        fact = summary(CIFAR10, result.owner, 10, 10)
        assert fact.heterogeneity < 0.03
        assert fact.size_gini < 0.05

    @pytest.mark.parametrize("per", ["client", "prior"])
    def test_a_tiny_alpha_gives_nearly_one_class_to_each_client(self, per: Per) -> None:
        result = assigned(Dirichlet(clients=100, alpha=1e-200, per=per), CIFAR10, 10)
        assert summary(CIFAR10, result.owner, 100, 10).effective_classes < 1.05

    def test_sizes_that_cannot_be_equal_are_noted(self) -> None:
        y = np.array([0] * 900 + [1] * 100)
        result = assigned(Dirichlet(clients=3, alpha=1e-9, per="prior", min_size=1), y, 2)
        assert "do not allow equal sizes" in result.notes[0]

    def test_the_default_minimum_never_asks_for_more_than_half_the_mean(self) -> None:
        result = assigned(Dirichlet(clients=20), np.tile(np.arange(10), 10), 10)
        assert np.bincount(result.owner, minlength=20).min() >= 2


class TestPathological:
    @pytest.mark.parametrize("seed", range(5))
    def test_twins(self, seed: int) -> None:
        table = cells(CIFAR10, assigned(Pathological(clients=10), CIFAR10, 10, seed), 10)
        for even in range(0, 10, 2):
            for client in (even, even + 1):
                assert np.flatnonzero(table[client]).tolist() == [even, even + 1]
            assert (table[even + 1, even : even + 2] > 2500).all()
            assert (table[even, even : even + 2] >= 250).all()

    def test_balanced_blocks_are_equal(self) -> None:
        table = cells(CIFAR10, assigned(Pathological(clients=10, balanced=True), CIFAR10, 10), 10)
        assert set(table.ravel().tolist()) == {0, 2500}

    def test_without_a_shuffle_blocks_are_contiguous(self) -> None:
        result = assigned(Pathological(clients=10, balanced=True, shuffle_within_class=False), CIFAR10, 10)
        assert result.owner[:5000].tolist() == [0] * 2500 + [1] * 2500

    def test_places_are_kept_for_later_classes(self) -> None:
        y = np.tile(np.arange(10), 30)
        result = assigned(Pathological(clients=7), y, 10)
        assert (cells(y, result, 10) > 0).any(axis=0).all()
        assert np.bincount(result.owner, minlength=7).min() > 0

    @pytest.mark.parametrize("clients", [5, 10, 50])
    def test_random_sets_hold_every_class(self, clients: int) -> None:
        for seed in range(10):
            table = cells(CIFAR10, assigned(Pathological(clients=clients, random=True), CIFAR10, 10, seed), 10) > 0
            assert (table.sum(axis=1) == 2).all()
            assert table.any(axis=0).all()

    def test_classes_that_nobody_drew_are_noted(self) -> None:
        result = assigned(Pathological(clients=50, random=True), CIFAR100, 100)
        assert "that no client drew were given to random clients" in result.notes[0]


class TestPersonalisedProtocol:
    """The data of FedALA and pFedALA: ten clients, each with a quarter of its rows for its own test."""

    MNIST = np.repeat(np.arange(10), 7000)
    practical = Dirichlet(clients=10, alpha=0.1, guard=True, redraws=10_000, min_size=40)
    ways: ClassVar[list[RandomPartition]] = [
        practical,
        Pathological(clients=10, min_size=40),
        Pathological(clients=10, min_size=40, balanced=True),
        Pathological(clients=10, min_size=40, random=True),
        Pathological(clients=10, min_size=40, shuffle_within_class=False),
    ]

    @pytest.mark.parametrize("way", ways, ids=str)
    def test_complete_large_enough_and_three_quarters_train(self, way: RandomPartition) -> None:
        for seed in range(3):
            result = assigned(way, self.MNIST, 10, seed)
            held_out = held_out_rows(result.owner, 10, 0.25, seed)
            sizes = np.bincount(result.owner, minlength=10)
            assert sizes.sum() == 70_000
            assert sizes.min() >= 40
            assert np.bincount(result.owner[~held_out]).tolist() == [floor(0.75 * n) for n in sizes]
            again = assigned(way, self.MNIST, 10, seed)
            assert fingerprint(again.owner, held_out_rows(again.owner, 10, 0.25, seed)) == fingerprint(
                result.owner, held_out
            )
            if isinstance(way, Pathological):
                assert ((cells(self.MNIST, result, 10) > 0).sum(axis=1) == 2).all()

    def test_the_smaller_twin_has_between_a_tenth_and_all_of_the_mean(self) -> None:
        tables = [cells(self.MNIST, assigned(self.ways[1], self.MNIST, 10, seed), 10) for seed in range(20)]
        small = np.array([[table[2 * (k // 2), k] for k in range(10)] for table in tables])
        assert small.min() >= 350
        assert small.max() < 3500
        assert abs(small.mean() - (350 + 3499) / 2) < 200  # uniform in between

    def test_the_mask_caps_sizes_softly(self) -> None:
        """Below n/N a client may get one more class, but no second one after it."""
        for seed in range(10):
            table = cells(self.MNIST, assigned(self.practical, self.MNIST, 10, seed), 10)
            before = np.cumsum(table, axis=1) - table
            assert (table[before >= 7000] == 0).all()

    def test_draws_are_repeated_while_a_client_is_too_small(self) -> None:
        way = Dirichlet(clients=10, alpha=0.1, redraws=10_000, min_size=3000)
        result = assigned(way, self.MNIST, 10)
        first, _ = Dirichlet(clients=10, alpha=0.1).draw(self.MNIST, 10, stream(0, "partition"))
        assert np.bincount(first, minlength=10).min() < 3000 <= np.bincount(result.owner).min()
        assert re.fullmatch(r"drawn \d+ times until every client had 3000 rows", result.notes[0])
        enough = Dirichlet(clients=10, alpha=0.1, redraws=5, min_size=1)
        assert np.array_equal(assigned(enough, self.MNIST, 10).owner, first)  # and not where there is no need

    def test_the_limit_of_redraws_is_an_error_with_the_numbers(self) -> None:
        with pytest.raises(ConfigError, match=r"none of 21 draws gave every client 40 rows \(the best gave \d"):
            assigned(Dirichlet(clients=100, alpha=0.01, redraws=20, min_size=40), self.MNIST, 10)
        _, faults = read(Dirichlet, {"per": "client", "redraws": 3}, "partition")
        assert [fault.where for fault in faults] == ["partition.redraws"]

    def test_a_class_is_shuffled_before_it_is_cut(self) -> None:
        """Unless it is, the twins of sorted data share a class at one point."""
        shuffled, plain = (assigned(self.ways[i], self.MNIST, 10).owner[:7000] for i in (1, 4))
        assert np.count_nonzero(np.diff(plain)) == 1
        assert np.count_nonzero(np.diff(shuffled)) > 100


class TestIidAndQuantity:
    def test_iid_sizes_differ_by_at_most_one(self) -> None:
        sizes = np.bincount(assigned(Iid(clients=7), CIFAR10, 10).owner)
        assert sizes.max() - sizes.min() <= 1

    def test_iid_mixes_labels(self) -> None:
        assert summary(CIFAR10, assigned(Iid(), CIFAR10, 10).owner, 20, 10).heterogeneity < 0.05

    def test_quantity_follows_the_power_law(self) -> None:
        sizes = np.sort(np.bincount(assigned(Quantity(clients=50, exponent=1.0), CIFAR10, 10).owner))[::-1]
        expected = np.arange(1.0, 51.0) ** -1.0
        assert sizes == pytest.approx(1 + expected / expected.sum() * (50000 - 50), abs=1.0)

    def test_quantity_keeps_labels_iid(self) -> None:
        result = assigned(Quantity(clients=10, min_size=1000), CIFAR10, 10)
        assert summary(CIFAR10, result.owner, 10, 10).heterogeneity < 0.05
        assert result.notes == ()


class TestNatural:
    client = np.array([7, 7, 3, 9, 9, 9, 3, 12])
    y = np.array([0, 1, 0, 1, 0, 1, 0, 1])

    def test_ids_are_numbered_without_gaps(self) -> None:
        result = assigned(Natural(), self.y, 2, client=self.client)
        assert result.owner.tolist() == [1, 1, 0, 2, 2, 2, 0, 3]
        assert result.clients == 4
        assert result.notes == ()

    def test_the_number_of_clients_may_be_stated(self) -> None:
        assert assigned(Natural(clients=4), self.y, 2, client=self.client).clients == 4

    def test_fewer_clients_merge_whole_ones(self) -> None:
        result = assigned(Natural(clients=2), self.y, 2, client=self.client)
        assert result.clients == 2
        assert set(result.owner.tolist()) == {0, 1}
        assert all(len(set(result.owner[self.client == name].tolist())) == 1 for name in (3, 7, 9, 12))
        assert result.notes == ("the 4 clients of the data were merged at random into 2",)

    def test_more_clients_than_the_data_has_is_an_error(self) -> None:
        with pytest.raises(ConfigError, match="the data has 4 clients, 5 were requested"):
            assigned(Natural(clients=5), self.y, 2, client=self.client)

    def test_small_clients_are_an_error_since_rows_do_not_change_hands(self) -> None:
        with pytest.raises(ConfigError, match="1 of the data's 4 clients have fewer than 2 rows"):
            assigned(Natural(min_size=2), self.y, 2, client=self.client)

    def test_data_without_clients_names_the_fix(self) -> None:
        with pytest.raises(DataError, match="client column"):
            assigned(Natural(), self.y, 2)


class TestSplit:
    @settings(max_examples=100, deadline=None)
    @given(st.lists(st.integers(0, 60), min_size=1, max_size=20), st.integers(0, 99), st.integers(0, 5))
    def test_sizes(self, sizes: list[int], percent: int, seed: int) -> None:
        owner = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(sizes)), sizes))
        held_out = held_out_rows(owner, len(sizes), percent / 100, seed)
        for client, n in enumerate(sizes):
            train = int((~held_out[owner == client]).sum())
            assert train == max((100 - percent) * n // 100, min(n, 1))

    def test_three_quarters_train(self) -> None:
        result = assigned(Dirichlet(clients=20, alpha=0.1), CIFAR10, 10)
        held_out = held_out_rows(result.owner, 20, 0.25, 0)
        for client in range(20):
            mine = held_out[result.owner == client]
            assert (~mine).sum() == floor(0.75 * len(mine))

    def test_edges(self) -> None:
        owner = np.array([0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1])
        assert not held_out_rows(owner, 2, 0.0, 0).any()
        assert held_out_rows(owner, 2, 0.9, 0).sum() == 9
        assert not held_out_rows(owner, 2, 0.9, 0)[0]
        assert held_out_rows(np.empty(0, np.int64), 3, 0.5, 0).shape == (0,)

    def test_the_seed_decides(self) -> None:
        owner = np.repeat(np.arange(10), 100)
        first, again, other = (
            held_out_rows(owner, 10, 0.2, 0),
            held_out_rows(owner, 10, 0.2, 0),
            held_out_rows(owner, 10, 0.2, 1),
        )
        assert np.array_equal(first, again)
        assert not np.array_equal(first, other)

    def test_rows_are_chosen_evenly(self) -> None:
        owner = np.zeros(40, np.int64)
        share = np.mean([held_out_rows(owner, 1, 0.25, seed) for seed in range(400)], axis=0)
        assert np.abs(share - 0.25).max() < 0.1


class TestFingerprint:
    def test_it_is_the_same_for_the_same_partition_only(self) -> None:
        owner = assigned(Iid(), CIFAR10, 10).owner
        held_out = held_out_rows(owner, 20, 0.2, 0)
        print_of = fingerprint(owner, held_out)
        assert len(print_of) == 64
        assert print_of == fingerprint(owner.copy(), held_out.copy())
        assert print_of == fingerprint(owner.astype(np.int32).astype(np.int64), held_out)
        assert print_of != fingerprint(assigned(Iid(), CIFAR10, 10, 1).owner, held_out)
        assert print_of != fingerprint(owner, ~held_out)

    def test_it_never_changes_between_releases(self) -> None:
        expected = "d4627128438f919acdaa342bc948c36f81347ec63766addc4eb84dc7238e2c2f"
        assert fingerprint(np.array([0, 1, 1]), np.array([False, False, True])) == expected


class TestSummary:
    def test_by_hand(self) -> None:
        y = np.array([0, 0, 1, 1, 1, 1, 0, 1])
        owner = np.array([0, 0, 1, 1, 1, 1, 2, 2])
        fact = summary(y, owner, 3, 2)
        assert (fact.clients, fact.rows, fact.classes) == (3, 8, 2)
        assert (fact.size_min, fact.size_median, fact.size_max) == (2, 2.0, 4)
        assert fact.size_mean == pytest.approx(8 / 3)
        assert fact.size_gini == pytest.approx(1 / 6)
        assert (fact.classes_min, fact.classes_max) == (1, 2)
        assert fact.classes_mean == pytest.approx(4 / 3)
        assert fact.effective_classes == pytest.approx(4 / 3)
        assert fact.top_share == pytest.approx(2.5 / 3)
        assert fact.heterogeneity == pytest.approx((5 / 8 + 3 / 8 + 1 / 8) / 3)
        assert fact.heterogeneity_most == pytest.approx((5 / 8 + 4 / 8 + 3 / 8) / 3)  # 0 0 | 0 1 | 1 1 1 1

    @pytest.mark.parametrize(("classes", "most"), [(2, 0.5), (4, 0.75), (10, 0.9)])
    def test_clients_that_share_no_label_have_the_largest_heterogeneity(self, classes: int, most: float) -> None:
        y = np.repeat(np.arange(classes), 6)
        fact = summary(y, y, classes, classes)
        assert (fact.heterogeneity, fact.heterogeneity_most) == pytest.approx((most, most))

    @settings(max_examples=50, deadline=None)
    @given(st.integers(1, 200), st.integers(1, 8), st.integers(1, 20), st.integers(0, 99))
    def test_it_equals_the_dense_definition(self, n: int, classes: int, clients: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        y, owner = rng.integers(0, classes, n), rng.integers(0, clients, n)
        table = cells(y, Assignment(owner, clients), classes)
        held = table[table.sum(axis=1) > 0]
        q: NDArray[np.float64] = held / held.sum(axis=1, keepdims=True)
        sizes = table.sum(axis=1)
        fact = summary(y, owner, clients, classes)
        assert fact.heterogeneity == pytest.approx((np.abs(q - table.sum(axis=0) / n).sum(axis=1) / 2).mean())
        assert fact.heterogeneity <= fact.heterogeneity_most + 1e-12
        assert fact.effective_classes == pytest.approx((1 / (q**2).sum(axis=1)).mean())
        assert fact.top_share == pytest.approx(q.max(axis=1).mean())
        assert fact.classes_mean == pytest.approx((held > 0).sum(axis=1).mean())
        assert fact.size_gini == pytest.approx(np.abs(sizes[:, None] - sizes).sum() / (2 * clients * n))

    def test_one_client_is_no_different_from_the_whole(self) -> None:
        fact = summary(CIFAR10, np.zeros(50000, np.int64), 1, 10)
        assert fact.heterogeneity == 0.0
        assert fact.size_gini == 0.0
        assert fact.effective_classes == pytest.approx(10.0)


@pytest.mark.slow
def test_a_million_clients() -> None:
    y = np.random.default_rng(0).integers(0, 10, 2_000_000)
    result = assigned(Iid(clients=1_000_000), y, 10)
    held_out = held_out_rows(result.owner, result.clients, 0.5, 0)
    fact = summary(y, result.owner, result.clients, 10)
    assert held_out.sum() == 1_000_000
    assert (fact.size_min, fact.size_max) == (2, 2)
