"""Clients' states: memory and disk are one store, and any committed point can be gone back to."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from fedloom.core import tree
from fedloom.core.errors import CheckpointError
from fedloom.engine.store import ClientStore, DiskStore, RamStore

CLIENTS = 9


class State(NamedTuple):
    w: Tensor  # [3]
    steps: Tensor  # []
    inner: Any


def state(value: int) -> State:
    return State(torch.full((3,), float(value)), torch.tensor(value), (torch.tensor([value, -value]).double(), ()))


FRESH = state(-7)
Point = dict[int, int]  # what each client holds


class Kept(NamedTuple):
    """A checkpoint, as the engine keeps it."""

    ram: dict[str, int]
    disk: dict[str, int]
    tensors: dict[str, Tensor]
    truth: Point


def same(got: Any, want: list[State]) -> bool:
    expected = tree.stack(want)
    pairs = zip(tree.leaves(got), tree.leaves(expected), strict=True)
    return all(torch.equal(a, b) and a.dtype == b.dtype for a, b in pairs)


class TwoStores(RuleBasedStateMachine):
    """Both stores beside a dictionary, through scatters, checkpoints, crashes and returns."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())

    @initialize()
    def begin(self) -> None:
        self.ram: ClientStore = RamStore(CLIENTS)
        self.disk: ClientStore = DiskStore(self.folder, CLIENTS)
        self.truth: Point = {}
        self.kept: list[Kept] = []
        self.count = 0

    @rule(ids=st.lists(st.integers(0, CLIENTS - 1), min_size=1, max_size=CLIENTS, unique=True))
    def scatter(self, ids: list[int]) -> None:
        values = [self.count + k for k in range(len(ids))]
        self.count += len(ids)
        stacked = tree.stack([state(v) for v in values])
        for store in (self.ram, self.disk):
            store.scatter(torch.tensor(ids), stacked)
        self.truth |= dict(zip(ids, values, strict=True))

    @rule()
    def checkpoint(self) -> None:
        """As ``checkpoint.save``: commit, write, forget all but two, release."""
        kept = Kept(self.ram.commit(), self.disk.commit(), self._written(), dict(self.truth))
        assert self.disk.tensors() == {}
        self.kept = [*self.kept, kept][-2:]
        for store in (self.ram, self.disk):
            store.release()

    @rule()
    def crash_before_the_checkpoint_is_whole(self) -> None:
        self.ram.commit()
        self.disk.commit()
        self.crash()

    @rule()
    def crash_before_the_release(self) -> None:
        """The new checkpoint is there, and so is the oldest, which was about to go."""
        kept = Kept(self.ram.commit(), self.disk.commit(), self._written(), dict(self.truth))
        self.kept.append(kept)
        self.crash()
        self.kept = self.kept[-2:]

    @rule()
    def crash(self) -> None:
        self.ram, self.disk = RamStore(CLIENTS), DiskStore(self.folder, CLIENTS)
        self.truth = {}
        if self.kept:
            self._restore(self.kept)

    @precondition(lambda self: len(self.kept) == 2)
    @rule(fresh=st.booleans())
    def go_back_to_the_previous_checkpoint(self, fresh: bool) -> None:
        if fresh:
            self.ram, self.disk = RamStore(CLIENTS), DiskStore(self.folder, CLIENTS)
        self.kept = self.kept[:1]
        self._restore(self.kept)

    @invariant()
    def both_hold_the_truth(self) -> None:
        if not hasattr(self, "truth"):
            return
        ids = torch.tensor([8, 0, 3, 1, 2, 7, 4, 5, 6])
        want = [state(self.truth[i]) if i in self.truth else FRESH for i in ids.tolist()]
        for store in (self.ram, self.disk):
            got = store.gather(ids, FRESH)
            assert isinstance(got, State)
            assert same(got, want)

    def _written(self) -> dict[str, Tensor]:
        return {name: x.clone() for name, x in self.ram.tensors().items()}

    def _restore(self, kept: list[Kept]) -> None:
        *older, newest = kept
        self.ram.restore(newest.ram, [k.ram for k in older], newest.tensors)
        self.disk.restore(newest.disk, [k.disk for k in older], {})
        self.truth = dict(newest.truth)

    def teardown(self) -> None:
        shutil.rmtree(self.folder)


TestTwoStores = TwoStores.TestCase
TestTwoStores.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


# -- one by one ------------------------------------------------------------------------------------
@pytest.fixture(params=["ram", "disk"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ClientStore:
    return RamStore(CLIENTS) if request.param == "ram" else DiskStore(tmp_path, CLIENTS)


def put(store: ClientStore, **values: int) -> None:
    ids = torch.tensor([int(name[1:]) for name in values])
    store.scatter(ids, tree.stack([state(v) for v in values.values()]))


def test_a_client_never_seen_reads_as_fresh(store: ClientStore) -> None:
    assert same(store.gather(torch.tensor([3, 1]), FRESH), [FRESH, FRESH])
    put(store, c1=5)
    assert same(store.gather(torch.tensor([3, 1]), FRESH), [FRESH, state(5)])


def test_what_was_gathered_is_a_copy(store: ClientStore) -> None:
    put(store, c1=5)
    store.gather(torch.tensor([1]), FRESH).w.zero_()
    store.gather(torch.tensor([2]), FRESH).w.zero_()
    assert same(store.gather(torch.tensor([1, 2]), FRESH), [state(5), FRESH])


def test_what_is_scattered_is_copied(store: ClientStore) -> None:
    given = tree.stack([state(4)])
    store.scatter(torch.tensor([2]), given)
    given.w.zero_()
    assert same(store.gather(torch.tensor([2]), FRESH), [state(4)])


def test_clients_without_state_cost_nothing(store: ClientStore, tmp_path: Path) -> None:
    assert store.gather(torch.tensor([1, 2]), ()) == ()
    store.scatter(torch.tensor([1, 2]), ((), ()))
    assert store.tensors() == {}
    assert not (tmp_path / "rows.bin").exists() or (tmp_path / "rows.bin").stat().st_size == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.bool], ids=str)
def test_every_data_type_comes_back_bit_by_bit(store: ClientStore, dtype: torch.dtype) -> None:
    rows = torch.randn(4, 5).mul(3).to(dtype)
    store.scatter(torch.arange(4), (rows,))
    (got,) = store.gather(torch.arange(4), (torch.zeros(5, dtype=dtype),))
    assert got.dtype == dtype
    assert torch.equal(got, rows)


def test_the_row_file_does_not_grow_with_the_rounds(tmp_path: Path) -> None:
    """A client's row exists at most three times: now, in the last checkpoint and in the one before it."""
    store, memos = DiskStore(tmp_path, CLIENTS), []
    for round_ in range(40):
        put(store, **{f"c{k}": round_ for k in range(CLIENTS)})
        put(store, c1=-round_)
        memos = [*memos, store.commit()][-2:]
        store.release()
        if round_ % 5 == 0:
            store = DiskStore(tmp_path, CLIENTS)
            store.restore(memos[-1], memos[:-1], {})
    assert (tmp_path / "rows.bin").stat().st_size <= 3 * CLIENTS * tree.nbytes(FRESH)


def test_slots_are_shared_out_anew_after_a_return_and_two_checkpoints_stay_whole(tmp_path: Path) -> None:
    """Between two checkpoints only some clients train: the slots of the others belong to both."""
    store, held, kept = DiskStore(tmp_path, CLIENTS), {}, []
    for count in range(24):
        ids = [k for k in range(CLIENTS) if count == 0 or (k + count) % 3]
        store.scatter(torch.tensor(ids), tree.stack([state(100 * count + k) for k in ids]))
        held = held | {k: 100 * count + k for k in ids}
        kept = [*kept, (store.commit(), held)][-2:]
        store.release()
        for number, (memo, truth) in enumerate(kept):
            again = DiskStore(tmp_path, CLIENTS)
            again.restore(memo, [older for older, _ in kept[:number]], {})
            assert same(again.gather(torch.arange(CLIENTS), FRESH), [state(truth[k]) for k in range(CLIENTS)])
        if count % 3 == 2:
            store = DiskStore(tmp_path, CLIENTS)
            store.restore(kept[1][0], [kept[0][0]], {})
    assert (tmp_path / "rows.bin").stat().st_size <= 3 * CLIENTS * tree.nbytes(FRESH)


# -- damage ----------------------------------------------------------------------------------------
def committed(folder: Path) -> dict[str, int]:
    store = DiskStore(folder, CLIENTS)
    put(store, c1=5, c2=6)
    return store.commit()


def test_a_damaged_row_is_refused_by_name(tmp_path: Path) -> None:
    memo = committed(tmp_path)
    raw = bytearray((tmp_path / "rows.bin").read_bytes())
    raw[-2] ^= 1
    (tmp_path / "rows.bin").write_bytes(raw)
    store = DiskStore(tmp_path, CLIENTS)
    store.restore(memo, [], {})
    assert same(store.gather(torch.tensor([1]), FRESH), [state(5)])
    with pytest.raises(CheckpointError, match=r"rows\.bin.*client 2 is damaged"):
        store.gather(torch.tensor([1, 2]), FRESH)


def test_a_row_file_that_was_cut_off_is_refused(tmp_path: Path) -> None:
    memo = committed(tmp_path)
    os.truncate(tmp_path / "rows.bin", 40)
    store = DiskStore(tmp_path, CLIENTS)
    store.restore(memo, [], {})
    with pytest.raises(CheckpointError, match="client 2 is damaged"):
        store.gather(torch.tensor([2]), FRESH)


def test_a_journal_that_was_cut_off_is_refused(tmp_path: Path) -> None:
    memo = committed(tmp_path)
    os.truncate(tmp_path / "journal.bin", 30)
    with pytest.raises(CheckpointError, match=r"journal\.bin.*cut off after line 1.*needs 2"):
        DiskStore(tmp_path, CLIENTS).restore(memo, [], {})


@pytest.mark.parametrize("at", range(40))
def test_a_damaged_journal_is_refused(tmp_path: Path, at: int) -> None:
    """A flipped bit in a client's number, its slot or its checksum never passes for a state."""
    memo = committed(tmp_path)
    raw = bytearray((tmp_path / "journal.bin").read_bytes())
    raw[at] ^= 1 << at % 8
    (tmp_path / "journal.bin").write_bytes(raw)
    store = DiskStore(tmp_path, CLIENTS)
    with pytest.raises(CheckpointError):  # noqa: PT012
        store.restore(memo, [], {})
        store.gather(torch.arange(CLIENTS), FRESH)


@pytest.mark.slow
def test_a_write_that_the_disk_cut_short_is_an_error(tmp_path: Path) -> None:
    """Near the end of a disk (here: a limit on file sizes), a write may take only part of a row and say so."""
    store, limits = DiskStore(tmp_path, 10), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))  # Python ignores the signal that comes with it
    try:
        with pytest.raises(OSError, match="large"):
            store.scatter(torch.arange(3), (torch.ones(3, 100),))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


# -- a million -------------------------------------------------------------------------------------
MILLION = """
import resource, tempfile, torch
from pathlib import Path
import numpy as np
from fedloom.engine.store import DiskStore
cohort, rounds, width = 1000, 8, 2_500
fresh = (torch.zeros(width),)
for clients in (10_000, 1_000_000):
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        store = DiskStore(Path(folder), clients)
        memos = []
        for r in range(rounds):
            ids = torch.from_numpy(np.sort(rng.choice(clients, cohort, replace=False)))
            (mine,) = store.gather(ids, fresh)
            store.scatter(ids, (mine + 1,))
            if r % 2:
                memos = [*memos, store.commit()][-2:]
                store.release()
        again = DiskStore(Path(folder), clients)
        again.restore(memos[-1], memos[:-1], {})
        (back,) = again.gather(ids, fresh)
        assert torch.equal(back, mine + 1)
        del store, again
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)  # the most so far
"""


@pytest.mark.slow
def test_a_million_clients_take_little_more_memory_than_ten_thousand() -> None:
    """Rows of 10 kB: in memory, those of a million clients would take 10 GB."""
    done = subprocess.run([sys.executable, "-c", MILLION], capture_output=True, text=True, check=True, timeout=600)
    few, many = map(int, done.stdout.split())
    assert many - few < 100  # MB: the index of a million clients is 12 MB, twice while restoring


@pytest.mark.slow
def test_hundreds_of_thousands_of_clients_train(tmp_path: Path) -> None:
    """A whole run: clients of one or two rows each, a thousand of them in a round, states on disk."""
    script = f"""
import re, numpy as np, fedloom
from pathlib import Path
n = 450_000
rng = np.random.default_rng(0)
y = rng.integers(0, 2, n)
x = (rng.normal(size=(n, 4)) + 2 * y[:, None]).astype(np.float32)
history = fedloom.run(
    "local_only", data=(x, y), rounds=5, out={str(tmp_path / "run")!r},
    partition={{"kind": "iid", "clients": 320_000, "holdout": 0.2}}, model="logistic", cohort={{"size": 1000}},
    engine={{"store": "disk"}}, evaluate={{"clients": 200, "every": 5}}, checkpoint={{"every": 2}},
)
# Not getrusage: it counts the process that started this one, until Python takes its place.
status = Path("/proc/self/status").read_text()
print(int(re.search(r"VmHWM:\\s+(\\d+) kB", status)[1]) // 1024)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 1150
