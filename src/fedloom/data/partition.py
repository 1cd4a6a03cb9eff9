"""Partitions: ways to split one data set among many clients, and numbers that describe a split.

A partition takes bounded time: it draws once, then repairs clients that are too small or have a class twice, and the
notes of the assignment report it. It is redrawn only if ``redraws`` is set, up to that limit; then it is an error.
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from fedloom.core import rng as randomness
from fedloom.core.errors import ConfigError, DataError, Fault
from fedloom.core.schema import Kind, when
from fedloom.data.arrays import Ints

Floats: TypeAlias = NDArray[np.float64]
Bools: TypeAlias = NDArray[np.bool_]
Inputs: TypeAlias = Callable[[], NDArray[Any]]  # a copy is made only for those who want it


class Assignment(NamedTuple):
    """The owner of every row, so that each row has exactly one, and a sentence for every repair."""

    owner: Ints  # [n] in 0..clients-1
    clients: int
    notes: tuple[str, ...] = ()


class Partition(Kind):
    """A way to split rows among clients."""

    clients: PositiveInt = Field(20, description="number of clients")
    holdout: float = Field(
        0.2, ge=0.0, lt=1.0, description="share of each client's rows that is held out to test its model"
    )
    min_size: PositiveInt | None = Field(1, description="least number of rows of a client")

    def assign(
        self, y: Ints, classes: int, rng: np.random.Generator, client: Ints | None, x: Inputs | None = None
    ) -> Assignment:
        """The owner of each row, given its label, its natural client if the data names it, and its inputs."""
        raise NotImplementedError


class RandomPartition(Partition):
    """A partition that is drawn from labels alone: faults first, then the draw, then the smallest size."""

    def assign(
        self, y: Ints, classes: int, rng: np.random.Generator, client: Ints | None, x: Inputs | None = None
    ) -> Assignment:
        """A complete split in which each client has at least ``min_size`` rows, or a ConfigError with the numbers."""
        del client, x  # only labels count
        held = int(np.count_nonzero(np.bincount(y, minlength=classes)))
        faults = [*_crowded(len(y), self.clients, self.least(len(y))), *self.faults(held)]
        if faults:
            raise ConfigError(faults)
        owner, notes = self.draw(y, classes, rng)
        owner, repairs = _topped_up(y, owner, self.clients, self.least(len(y)), rng)
        return Assignment(owner, self.clients, notes + repairs)

    def least(self, rows: int) -> int:
        """The smallest number of rows that a client may have."""
        return max(1, min(10, rows // (2 * self.clients))) if self.min_size is None else self.min_size

    def faults(self, held: int) -> list[Fault]:  # noqa: ARG002
        """Why the settings are impossible on data in which ``held`` classes occur."""
        return []

    @abstractmethod
    def draw(self, y: Ints, classes: int, rng: np.random.Generator) -> tuple[Ints, tuple[str, ...]]:
        """The owners before any client is topped up, and the notes on them."""


class Iid(RandomPartition):
    """Rows are shuffled and split in near-equal numbers, as in the IID setting of McMahan et al. (2017)."""

    kind: ClassVar[str] = "iid"

    def draw(self, y: Ints, classes: int, rng: np.random.Generator) -> tuple[Ints, tuple[str, ...]]:  # noqa: ARG002
        return _dealt(rng.permutation(len(y)), np.arange(self.clients), _near_equal(len(y), self.clients)), ()


class Shards(RandomPartition):
    """Every client has ``per_client`` classes, and a class is cut into near-equal shards for its clients.

    ``balanced_greedy`` (FLGo's diversity partitioner, as FedALR uses it): each client in turn takes, again and
    again, a random class among those used least so far that it does not have yet.
    ``deal_repair``: the shard labels are shuffled and handed out; a client that got a class twice swaps one of the
    two with a random client that has none of it, until no client has a class twice.
    ``mcmahan`` (McMahan et al. 2017): rows sorted by label are cut into clients × per_client equal shards, which
    are handed out without repair, so a client may have fewer classes and, where classes differ in size, more.
    """

    kind: ClassVar[str] = "shards"
    per_client: PositiveInt = Field(2, description="number of classes of a client")
    method: Literal["balanced_greedy", "deal_repair", "mcmahan"] = Field(
        "balanced_greedy", description="how classes are assigned to clients"
    )

    def faults(self, held: int) -> list[Fault]:
        return [] if self.method == "mcmahan" else _narrow(self.clients, self.per_client, held)

    def draw(self, y: Ints, classes: int, rng: np.random.Generator) -> tuple[Ints, tuple[str, ...]]:
        pools = _pools(y, classes, rng.permutation(len(y)))
        if self.method == "mcmahan":
            shards = self.clients * self.per_client
            clients = rng.permutation(shards) // self.per_client
            owner = _dealt(np.concatenate(pools), clients, _near_equal(len(y), shards))
        else:
            hands = _greedy_hands if self.method == "balanced_greedy" else _repaired_hands
            holders = _holders(hands(self.clients, self.per_client, len(pools), rng), len(pools))
            shares = [_near_equal(len(pool), len(group)) for pool, group in zip(pools, holders, strict=True)]
            owner = _dealt_by_class(pools, holders, shares)
        return owner, _short_hands(y, owner, self.clients, self.per_client)


class Dirichlet(RandomPartition):
    """Label mixes drawn from a Dirichlet distribution; the smaller ``alpha``, the more one-sided the clients.

    ``per = "class"`` (Yurochkin et al. 2019, NIID-Bench, PFLlib): each class is cut over the clients in
    proportions drawn from Dir(alpha · 1), so sizes differ too; ``guard`` (PFLlib) gives no more to a client that
    already has the mean size, and ``redraws`` (PFLlib, without a limit) redraws all while a client is too small.
    ``per = "client"`` (Hsu et al. 2019): each client's label mix is drawn from Dir(alpha · 1), sizes are equal.
    ``per = "prior"`` (FLGo, as FedALR uses it): each client's label mix is drawn from Dir(alpha · p), where p is
    the label mix of the data and sums to 1, so the same alpha is harsher by the number of classes; sizes are equal.
    The last two redraw single clients while that brings the mean of the mixes nearer to p, at most 3,500 times.
    """

    kind: ClassVar[str] = "dirichlet"
    alpha: PositiveFloat = Field(0.3, description="the smaller, the more one-sided the clients")
    per: Literal["class", "client", "prior"] = Field(
        "class",
        description="draw proportions for each class, each client, or each client around the label mix of the data",
    )
    guard: Annotated[bool, when(per="class")] = Field(
        False, description="give no more to a client that has the mean size"
    )
    redraws: Annotated[NonNegativeInt, when(per="class")] = Field(
        0, description="redraw at most this many times while a client is too small; 0: move rows to it instead"
    )
    min_size: PositiveInt | None = Field(
        None, description="least number of rows of a client; unset: 10, or half the mean size if that is less"
    )

    def draw(self, y: Ints, classes: int, rng: np.random.Generator) -> tuple[Ints, tuple[str, ...]]:
        pools = _pools(y, classes, rng.permutation(len(y)))
        if self.per == "class":
            return self._cut_classes(pools, rng)
        prior = np.array([len(pool) for pool in pools]) / len(y)
        weight = _near_equal(len(y), self.clients) / len(y)
        concentration = self.alpha * (prior if self.per == "prior" else np.ones(len(pools)))
        logs = _matched_mixes(concentration, prior, weight, rng) + np.log(weight)[:, None]
        # Columns are normalised as logarithms: a class with tiny proportions everywhere is still assigned.
        shares = [_cut(np.exp(logs[:, k] - logs[:, k].max()), len(pool)) for k, pool in enumerate(pools)]
        owner = _dealt_by_class(pools, [np.arange(self.clients)] * len(pools), shares)
        return owner, _unequal(owner, self.clients)

    def _cut_classes(self, pools: list[Ints], rng: np.random.Generator) -> tuple[Ints, tuple[str, ...]]:
        least = self.least(sum(len(pool) for pool in pools))
        smallest = 0
        for again in range(self.redraws + 1):
            shares = self._class_shares(pools, rng)
            found = int(np.sum(shares, axis=0).min())
            if found >= least or not self.redraws:
                notes = (f"drawn {again + 1} times until every client had {_count(least, 'row')}",) if again else ()
                return _dealt_by_class(pools, [np.arange(self.clients)] * len(pools), shares), notes
            smallest = max(smallest, found)
        what = f"none of {self.redraws + 1} draws gave every client {least} rows (the best gave {smallest})"
        fix = f"at most {smallest}, or a larger alpha, or redraws = 0, which moves rows instead"
        raise ConfigError([Fault("partition.min_size", what, fix)])

    def _class_shares(self, pools: list[Ints], rng: np.random.Generator) -> list[Ints]:
        """How many rows of each class each client gets."""
        mean = sum(len(pool) for pool in pools) / self.clients
        sizes = np.zeros(self.clients, np.int64)
        shares: list[Ints] = []
        for pool in pools:
            logs = _log_dirichlet(np.full(self.clients, self.alpha), 1, rng)[0]
            if self.guard:  # as long as a row is left, a client is below the mean
                logs = np.where(sizes < mean, logs, -np.inf)
            shares.append(_cut(np.exp(logs - logs.max()), len(pool)))
            sizes += shares[-1]
        return shares


class Pathological(RandomPartition):
    """Every client has ``per_client`` classes in blocks of neighbouring clients (PFLlib, as pFedALA uses it).

    Class by class, the first ceil(clients · per_client / classes) clients that still have room get the class. Unless
    ``balanced``, all of them but the last get a random number of rows between a tenth of the mean and the mean,
    and the last gets the rest. With as many clients as classes and ``per_client = 2``, clients 2m and 2m+1 are
    twins: both have the classes 2m and 2m+1. ``random`` draws the class sets instead, so that every
    class has a client. If the places would run out before the last class, one is kept for each later class.
    """

    kind: ClassVar[str] = "pathological"
    per_client: PositiveInt = Field(2, description="number of classes of a client")
    balanced: bool = Field(False, description="share a class equally among the clients that have it")
    shuffle_within_class: bool = Field(True, description="shuffle the rows of a class before it is cut")
    random: bool = Field(False, description="draw each client's classes, instead of assigning them in blocks")

    def faults(self, held: int) -> list[Fault]:
        return _narrow(self.clients, self.per_client, held)

    def draw(self, y: Ints, classes: int, rng: np.random.Generator) -> tuple[Ints, tuple[str, ...]]:
        order = rng.permutation(len(y)) if self.shuffle_within_class else np.arange(len(y))
        pools = _pools(y, classes, order)
        notes: tuple[str, ...] = ()
        if self.random:
            hands, notes = _random_hands(self.clients, self.per_client, len(pools), rng)
            holders = [rng.permutation(group) for group in _holders(hands, len(pools))]
        else:
            holders = _blocks(self.clients, self.per_client, len(pools))
        floor = self.least(len(y)) // len(pools)
        shares = [self._shares(len(pool), len(group), floor, rng) for pool, group in zip(pools, holders, strict=True)]
        owner = _dealt_by_class(pools, holders, shares)
        return owner, notes + _short_hands(y, owner, self.clients, self.per_client)

    def _shares(self, rows: int, holders: int, floor: int, rng: np.random.Generator) -> Ints:
        mean = rows // holders
        low = max(1, rows // (10 * holders), floor)
        if self.balanced:
            first = np.full(holders - 1, mean)
        elif low < mean:
            first = rng.integers(low, mean, holders - 1)
        else:  # too few rows to draw from
            return _near_equal(rows, holders)
        return np.append(first, rows - first.sum())


class Quantity(RandomPartition):
    """Labels are IID, but sizes follow a power law, as in the synthetic data of FedProx (Li et al. 2020).

    Each client gets ``min_size`` rows; the others are shared in proportion to rank ** -exponent, where the
    ranks 1..clients are assigned at random.
    """

    kind: ClassVar[str] = "quantity"
    exponent: PositiveFloat = Field(1.5, description="exponent of the power law of sizes; larger is more unequal")

    def draw(self, y: Ints, classes: int, rng: np.random.Generator) -> tuple[Ints, tuple[str, ...]]:  # noqa: ARG002
        least = self.least(len(y))
        weight = np.arange(1.0, self.clients + 1.0) ** -self.exponent
        sizes = rng.permutation(least + _cut(weight, len(y) - least * self.clients))
        return _dealt(rng.permutation(len(y)), np.arange(self.clients), sizes), ()


class Natural(Partition):
    """The data's own clients, as in LEAF (Caldas et al. 2018); fewer ``clients`` merge them at random."""

    kind: ClassVar[str] = "natural"
    clients: PositiveInt | None = None  # type: ignore[assignment]  # None: as many as the data has

    def assign(
        self, y: Ints, classes: int, rng: np.random.Generator, client: Ints | None, x: Inputs | None = None
    ) -> Assignment:
        """The data's clients, numbered from 0 without gaps, or merged into ``clients`` groups of near-equal count."""
        del y, classes, x  # only who has the row counts
        if client is None:
            raise DataError(
                "partition 'natural': the data does not name the client of each row "
                "(choose data with a client column, or another partition, such as 'dirichlet')"
            )
        names, owner = np.unique(client, return_inverse=True)
        found = len(names)
        notes: tuple[str, ...] = ()
        wanted = found if self.clients is None else self.clients
        if wanted > found:
            what = f"the data has {found} clients, {wanted} were requested"
            raise ConfigError([Fault("partition.clients", what, f"at most {found}, or leave it out")])
        if wanted < found:
            owner = rng.permutation(np.repeat(np.arange(wanted), _near_equal(found, wanted)))[owner]
            notes = (f"the {found} clients of the data were merged at random into {wanted}",)
        self._check_sizes(np.bincount(owner, minlength=wanted))
        return Assignment(owner.astype(np.int64), wanted, notes)

    def _check_sizes(self, sizes: Ints) -> None:
        small = np.flatnonzero(sizes < (self.min_size or 1))
        if len(small):
            what = f"{len(small)} of the data's {len(sizes)} clients have fewer than {self.min_size} rows"
            fix = f"at most {sizes.min()}, or merge clients by a smaller partition.clients"
            raise ConfigError([Fault("partition.min_size", what, fix)])


class PartitionSummary(NamedTuple):
    """How unequal a partition is; means over clients are plain, so a small client counts as much as a large one."""

    clients: int
    rows: int
    classes: int
    size_min: int
    size_median: float
    size_mean: float
    size_max: int
    size_gini: float  # 0: all sizes equal; near 1: one client has almost every row
    classes_min: int
    classes_mean: float
    classes_max: int
    effective_classes: float  # mean of 1 / sum of squared class shares
    top_share: float  # mean share of a client's largest class
    heterogeneity: float  # mean total-variation distance of a client's label mix to that of all rows
    heterogeneity_most: float  # an upper bound of it: if clients of these sizes had one class each, as far as they can


def held_out_rows(owner: Ints, clients: int, holdout: float, seed: int) -> Bools:
    """Which rows are held out: ``holdout`` of each client's rows, rounded up; at least one row is left for training."""
    return _kept_aside(owner, clients, holdout, randomness.bits(seed, "holdout", torch.arange(len(owner))).numpy())


def validation_rows(owner: Ints, clients: int, share: float, held_out: Bools, seed: int) -> Bools:
    """Which rows are for validation: ``share`` of each client's rows that are not held out, drawn in the same way."""
    rows = np.flatnonzero(~held_out)
    word = randomness.bits(seed, "validation", torch.from_numpy(rows)).numpy()
    chosen = np.zeros(len(owner), np.bool_)
    chosen[rows] = _kept_aside(owner[rows], clients, share, word)
    return chosen


def _kept_aside(owner: Ints, clients: int, share: float, word: Ints) -> Bools:
    """A share of each client's rows, rounded up, those whose random word is smallest; one row is always left."""
    sizes = np.bincount(owner, minlength=clients)
    # 1 - 0.9 is a little less than 0.1 in binary, which must not cost a client of ten its only training row
    train = np.maximum(np.floor((1.0 - share + 1e-9) * sizes).astype(np.int64), np.minimum(sizes, 1))
    order = np.lexsort((word, owner))
    aside = np.zeros(len(owner), np.bool_)
    aside[order] = _rank_in_group(sizes) < np.repeat(sizes - train, sizes)
    return aside


def fingerprint(owner: Ints, use: Bools | Ints) -> str:
    """The SHA-256 of a partition: equal exactly when every row has the same owner and the same use.

    ``use`` of a row: 0 for training, 1 for the client's own test, 2 for validation.
    """
    digest = hashlib.sha256(f"fedloom partition 1 {len(owner)}\n".encode())
    digest.update(np.ascontiguousarray(owner, "<i8").tobytes())
    digest.update(np.ascontiguousarray(use, np.uint8).tobytes())
    return digest.hexdigest()


def summary(y: Ints, owner: Ints, clients: int, classes: int) -> PartitionSummary:
    """The numbers of a partition; clients without rows count for sizes only."""
    sizes = np.bincount(owner, minlength=clients)
    # Only cells with rows exist: memory grows with the rows, not with clients × classes.
    cell, count = np.unique(owner * classes + y, return_counts=True)
    who, label = np.divmod(cell, classes)
    share = count / sizes[who]
    excess = np.maximum(share - (np.bincount(y, minlength=classes) / len(y))[label], 0.0)
    starts = np.flatnonzero(np.diff(who, prepend=-1))
    kinds = np.diff(starts, append=len(who))
    return PartitionSummary(
        clients=clients,
        rows=len(y),
        classes=classes,
        size_min=int(sizes.min()),
        size_median=float(np.median(sizes)),
        size_mean=float(sizes.mean()),
        size_max=int(sizes.max()),
        size_gini=_gini(sizes),
        classes_min=int(kinds.min()),
        classes_mean=float(kinds.mean()),
        classes_max=int(kinds.max()),
        effective_classes=float((1.0 / np.add.reduceat(share**2, starts)).mean()),
        top_share=float(np.maximum.reduceat(share, starts).mean()),
        heterogeneity=float(np.add.reduceat(excess, starts).mean()),
        heterogeneity_most=_most_heterogeneity(np.bincount(y), sizes),
    )


def _most_heterogeneity(rows_of: Ints, sizes: Ints) -> float:
    """The largest heterogeneity of classes with these numbers of rows on clients of these sizes, or a little more.

    A client is at most 1 - sum of q_k p_k away from all rows, where q and p are its label mix and that of all rows, and
    exactly as far if it has one class. The mean over clients is largest if small clients have the rare classes.
    """
    held, sizes = np.sort(rows_of[rows_of > 0]), np.sort(sizes[sizes > 0])
    share, weight = np.repeat(held / held.sum(), held), np.repeat(1.0 / sizes, sizes)
    return float(1.0 - share @ weight / len(sizes))


def _gini(sizes: Ints) -> float:
    n = len(sizes)
    return float((2.0 * np.arange(1, n + 1) - n - 1.0) @ np.sort(sizes) / (n * sizes.sum()))


def _near_equal(total: int, parts: int) -> Ints:
    """``total`` in ``parts`` whole numbers that differ by at most one, larger ones first."""
    sizes: Ints = total // parts + (np.arange(parts) < total % parts).astype(np.int64)
    return sizes


def _cut(weight: Floats, total: int) -> Ints:
    """``total`` in whole numbers proportional to ``weight``, cut at the floors of the running sum."""
    edges = np.cumsum(weight)
    # After the last positive weight the quotient is exactly 1, so a weight of 0 never gets a row.
    counts: Ints = np.diff(np.floor(edges / edges[-1] * total).astype(np.int64), prepend=0)
    return counts


def _rank_in_group(sizes: Ints) -> Ints:
    """0, 1, ... within each of several consecutive groups."""
    return np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)


def _pools(y: Ints, classes: int, order: Ints) -> list[Ints]:
    """The rows of each class that occurs, in the given order."""
    rows = order[np.argsort(y[order], kind="stable")]
    counts = np.bincount(y, minlength=classes)
    return [pool for pool in np.split(rows, np.cumsum(counts)[:-1]) if len(pool)]


def _dealt(rows: Ints, clients: Ints, counts: Ints) -> Ints:
    owner = np.empty(len(rows), np.int64)
    owner[rows] = np.repeat(clients, counts)
    return owner


def _dealt_by_class(pools: list[Ints], holders: list[Ints], counts: list[Ints]) -> Ints:
    return _dealt(np.concatenate(pools), np.concatenate(holders), np.concatenate(counts))


def _crowded(rows: int, clients: int, least: int) -> list[Fault]:
    """The fault of requesting more rows than there are."""
    if clients > rows:
        return [Fault("partition.clients", f"{clients} clients cannot share {rows} rows", f"at most {rows}")]
    if clients * least > rows:
        what = f"{clients} clients of at least {least} rows need {clients * least} rows, but there are {rows}"
        return [Fault("partition.min_size", what, f"at most {rows // clients}, or at most {rows // least} clients")]
    return []


def _narrow(clients: int, per_client: int, held: int) -> list[Fault]:
    """The fault of requesting more classes than there are, or so few that some class has no client."""
    if per_client > held:
        what = f"{per_client} classes for each client, but the rows have {held}"
        return [Fault("partition.per_client", what, f"at most {held}")]
    if clients * per_client < held:
        what = f"{clients} clients with {per_client} classes each leave some of the {held} classes without a client"
        fix = f"at least {-(-held // clients)}, or at least {-(-held // per_client)} clients"
        return [Fault("partition.per_client", what, fix)]
    return []


def _topped_up(
    y: Ints, owner: Ints, clients: int, least: int, rng: np.random.Generator
) -> tuple[Ints, tuple[str, ...]]:
    """The same owners, except that random rows of the largest clients went to those with fewer than ``least``."""
    sizes = np.bincount(owner, minlength=clients)
    need = np.maximum(least - sizes, 0)
    moved = int(need.sum())
    if moved == 0:
        return owner, ()
    give = _skimmed(sizes, moved)
    shuffled = rng.permutation(len(owner))
    order = shuffled[np.argsort(owner[shuffled], kind="stable")]
    taken = order[_rank_in_group(sizes) < np.repeat(give, sizes)]
    repaired = owner.copy()
    repaired[rng.permutation(taken)] = np.repeat(np.arange(clients), need)
    before, after = (summary(y, each, clients, int(y.max()) + 1).heterogeneity for each in (owner, repaired))
    few, empty = int(np.count_nonzero(need)), int(np.count_nonzero(sizes == 0))
    lacked = "no rows" if least == 1 else f"fewer than {least} rows"
    to = f"moved {moved:,} of {len(y):,} rows from the largest clients to {few:,} of {clients:,} that had {lacked}"
    digits = next((n for n in range(2, 7) if round(before, n) != round(after, n)), 2)  # as many as show the change
    mixed = f"this changes label mixes: heterogeneity was {before:.{digits}f} and is {after:.{digits}f}"
    gentler = f"to move only {empty:,}" if empty else "to keep the split"
    fix = "" if least == 1 else f"; set partition.min_size=1 {gentler}"
    return repaired, (f"{to}; {mixed}{fix}",)


def _skimmed(sizes: Ints, rows: int) -> Ints:
    """How many of ``rows`` each client gives when each is taken from the client that is largest at that moment."""
    low, high = 0, int(sizes.max())
    while low < high:  # the lowest level that needs no more than ``rows`` taken above it
        level = (low + high) // 2
        if np.maximum(sizes - level, 0).sum() <= rows:
            high = level
        else:
            low = level + 1
    give = np.maximum(sizes - low, 0)
    give[np.flatnonzero(sizes >= low)[: rows - int(give.sum())]] += 1
    return give


def _short_hands(y: Ints, owner: Ints, clients: int, per_client: int) -> tuple[str, ...]:
    cells = np.unique(owner * (int(y.max()) + 1) + y)
    short = int(np.count_nonzero(np.bincount(cells // (int(y.max()) + 1), minlength=clients) < per_client))
    verb = "holds" if short == 1 else "hold"
    return (f"{short} of {_count(clients, 'client')} {verb} fewer than {per_client} classes",) if short else ()


def _unequal(owner: Ints, clients: int) -> tuple[str, ...]:
    sizes = np.bincount(owner, minlength=clients)
    low, high, mean = int(sizes.min()), int(sizes.max()), len(owner) / clients
    if high - mean <= max(1.0, 0.05 * mean) and mean - low <= max(1.0, 0.05 * mean):
        return ()
    return (f"the label mixes drawn do not allow equal sizes: clients have {low} to {high} rows",)


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def _holders(hands: Ints, classes: int) -> list[Ints]:
    """The clients of each class, in order, from the classes of each client."""
    flat = hands.ravel()
    clients = np.argsort(flat, kind="stable") // hands.shape[1]
    return np.split(clients, np.cumsum(np.bincount(flat, minlength=classes))[:-1])


def _greedy_hands(clients: int, per_client: int, classes: int, rng: np.random.Generator) -> Ints:
    """Each client in turn takes classes that were used least so far, at random, never one twice.

    All classes are used up once before any is used again, so the choices are shuffled decks of all classes,
    laid end to end; only a client that a new deck begins inside needs care.
    """
    decks = -(-clients * per_client // classes)
    laid = np.empty(decks * classes, np.int64)
    for start in range(0, len(laid), classes):
        deck = rng.permutation(classes)
        begun = start % per_client  # classes that the client at the border already took from the deck before
        if begun:
            first = deck[~np.isin(deck, laid[start - begun : start])][: per_client - begun]
            deck = np.concatenate([first, rng.permutation(np.setdiff1d(deck, first))])
        laid[start : start + classes] = deck
    return laid[: clients * per_client].reshape(clients, per_client)


def _repaired_hands(clients: int, per_client: int, classes: int, rng: np.random.Generator) -> Ints:
    """Classes assigned at random in equal numbers; a client that got one twice swaps it away.

    Each swap leaves fewer duplicates in all: the partner lacks the class it is given, and gives one that the
    client lacks or, failing that, one that it has twice itself. So there are at most clients × per_client swaps.
    """
    usage = rng.permutation(_near_equal(clients * per_client, classes))
    hands = rng.permutation(np.repeat(np.arange(classes), usage)).reshape(clients, per_client)
    rows = np.sort(hands, axis=1)
    for me in np.flatnonzero((rows[:, 1:] == rows[:, :-1]).any(axis=1)):
        while (extra := _repeated(hands[me])).any():
            mine = int(np.flatnonzero(extra)[0])
            other = _without(hands, int(hands[me, mine]), rng)
            fresh = np.flatnonzero(~np.isin(hands[other], hands[me]))
            theirs = int(rng.choice(fresh if len(fresh) else np.flatnonzero(_repeated(hands[other]))))
            hands[me, mine], hands[other, theirs] = hands[other, theirs], hands[me, mine]
    return hands


def _repeated(hand: Ints) -> Bools:
    """Which entries equal an earlier one."""
    mask = np.ones(len(hand), np.bool_)
    mask[np.unique(hand, return_index=True)[1]] = False
    return mask


def _without(hands: Ints, label: int, rng: np.random.Generator) -> int:
    """A random client without ``label``; one exists, since another client has it twice."""
    for candidate in rng.integers(len(hands), size=32):
        if label not in hands[candidate]:
            return int(candidate)
    return int(rng.choice(np.flatnonzero((hands != label).all(axis=1))))


def _random_hands(
    clients: int, per_client: int, classes: int, rng: np.random.Generator
) -> tuple[Ints, tuple[str, ...]]:
    """Each client's classes drawn at random; a class that no client drew replaces one that several drew."""
    hands = rng.random((clients, classes)).argsort(axis=1)[:, :per_client]
    missing = np.flatnonzero(np.bincount(hands.ravel(), minlength=classes) == 0)
    for label in missing:
        common = np.bincount(hands.ravel(), minlength=classes)[hands] > 1
        who, slot = np.unravel_index(rng.choice(np.flatnonzero(common)), hands.shape)
        hands[who, slot] = label
    if not len(missing):
        return hands, ()
    verb, plural = ("was", "") if len(missing) == 1 else ("were", "es")
    return hands, (f"{len(missing)} class{plural} that no client drew {verb} given to random clients",)


def _blocks(clients: int, per_client: int, classes: int) -> list[Ints]:
    """For each class the first clients with room, as many as an even spread needs, places kept for later classes."""
    room = np.full(clients, per_client)
    share = -(-clients * per_client // classes)
    holders = []
    for later in range(classes - 1, -1, -1):
        chosen = np.flatnonzero(room)[: min(share, int(room.sum()) - later)]
        room[chosen] -= 1
        holders.append(chosen)
    return holders


def _log_dirichlet(concentration: Floats, draws: int, rng: np.random.Generator) -> Floats:
    """Logarithms of Dirichlet draws, one in each row; exact where the draws themselves would underflow to 0/0."""
    a = np.clip(concentration, 1e-100, 1e100)  # beyond, every draw is a corner or the centre anyway
    shape = (draws, len(a))
    # Gamma(a) = Gamma(a + 1) · U^(1/a), and -log U is exponential
    logs: Floats = np.log(np.maximum(rng.standard_gamma(a + 1.0, shape), 1e-300)) - rng.standard_exponential(shape) / a
    logs -= logs.max(axis=1, keepdims=True)
    logs -= np.log(np.exp(logs).sum(axis=1, keepdims=True))
    return logs


def _matched_mixes(concentration: Floats, prior: Floats, weight: Floats, rng: np.random.Generator) -> Floats:
    """Logarithms of label mixes, one for each client, whose mean by ``weight`` comes near ``prior``.

    One client after another is redrawn and keeps the best of many draws if that lowers the squared error. The
    error allowed starts at 1e-6 and grows tenfold with every 500 tries, so that the seventh growth ends the search.
    """
    clients, classes = len(weight), len(prior)
    logs = _log_dirichlet(concentration, clients, rng)
    mean = weight @ np.exp(logs)
    error, allowed, tries = float(((mean - prior) ** 2).sum()), 1e-6, 0
    draws = max(10, min(100, 10_000 // classes))
    while error > allowed:
        who = tries % clients
        fresh = _log_dirichlet(concentration, draws, rng)
        means = mean + weight[who] * (np.exp(fresh) - np.exp(logs[who]))
        errors = ((means - prior) ** 2).sum(axis=1)
        best = int(errors.argmin())
        if errors[best] < error:
            logs[who], mean, error = fresh[best], means[best], float(errors[best])
        tries += 1
        if tries % 500 == 0:
            allowed *= 10.0
    return logs
