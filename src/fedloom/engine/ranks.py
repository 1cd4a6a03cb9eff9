"""Ranks: processes that share the work of a run, on one machine or on many.

Every rank prepares the same experiment and runs the same loop. Local training and evaluation are divided: each rank
does a part, and sends its rows to all others, so that what follows (the sums, the server's update, the metrics) is
computed by every rank from the same numbers in the same order, and agrees bit for bit.

All collective calls of ranks are here. Each is a call that every rank makes at the same place of the loop::

    gathered   rows of which each rank has some, put in one order          what clients did
    merged     numbers of which each rank has some, zeros elsewhere        outputs, verdicts
    collected  rows of which rank 0 needs all                              clients' states, for a checkpoint
    broadcast  a value of rank 0       any_rank  whether any rank says yes           agreed   one fails, all fail

``ALONE`` is a single process: none of these calls does anything then, or costs anything.

Ranks exchange tensors, and small values as JSON; nothing that is received is ever unpickled. Those that ``--ranks``
starts meet in a folder that only their user can open, listen only on the loopback interface, and prove to each other
that they know the secret in that folder. Those that torchrun starts meet as torchrun arranges, on a trusted network.
"""

from __future__ import annotations

import atexit
import hmac
import json
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fedloom.core import tree
from fedloom.core.errors import ConfigError, Fault, FedloomError, LostRankError

T = TypeVar("T")

MEETING = "FEDLOOM_MEETING"  # the folder in which ranks of one machine meet
SECRET = "secret"  # what those that were started together know
_STORE = "store"  # the rendezvous file
TIMEOUT = "FEDLOOM_TIMEOUT"  # seconds for which a rank waits for another
_PATIENCE = 1800.0  # a rank may have to wait for the slowest client of another; a rank that dies is noticed at once


class RankError(FedloomError):
    """An error of another rank, with its message."""

    def __init__(self, rank: int, words: str, exit_code: int) -> None:
        super().__init__(f"rank {rank}: {words}")
        self.exit_code = exit_code


class Ranks(NamedTuple):
    """Which of how many processes this is."""

    rank: int = 0
    size: int = 1

    @property
    def leads(self) -> bool:
        """Whether this is the one that prints and writes."""
        return self.rank == 0

    def owner(self, clients: Tensor) -> Tensor:
        """The rank that keeps the state of each of these clients.  ``[K]``"""
        return clients % self.size

    def own(self, clients: Tensor) -> Tensor:
        """The clients among these whose state this rank keeps."""
        return clients if self.size == 1 else clients[self.owner(clients) == self.rank]

    def gathered(self, rows: T, whose: Sequence[int]) -> T:
        """The rows of all ranks in one order: row k is the next row of rank ``whose[k]``.

        A rank without rows passes placeholder rows of the right shape.
        """
        if self.size == 1:
            return rows
        counts = [whose.count(rank) for rank in range(self.size)]
        most = max(counts)
        block = _packed(rows, counts[self.rank], most)
        whole = torch.empty(self.size * most, block.shape[1], dtype=torch.uint8, device=block.device)
        with _reaching():
            dist.all_gather(list(torch.split(whole, most)), block)
        seen, places = [0] * self.size, []
        for rank in whose:
            places.append(rank * most + seen[rank])
            seen[rank] += 1
        return _unpacked(whole, torch.tensor(places, device=whole.device), rows)

    def merged(self, values: Tensor) -> Tensor:
        """The sum over ranks, each of which has zeros where another has a number: exact in any order."""
        if self.size == 1:
            return values
        total = values.clone(memory_format=torch.contiguous_format)
        with _reaching():
            dist.all_reduce(total)
        return total

    def collected(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """These stacked tensors of all ranks, one rank's rows after another's, at rank 0; elsewhere nothing."""
        if self.size == 1:
            return tensors
        forms = self._exchanged({name: (x.shape, str(x.dtype)) for name, x in tensors.items()})
        with _reaching():
            if not self.leads:
                for x in tensors.values():
                    dist.send(x.contiguous(), 0)
                return {}
            parts: dict[str, list[Tensor]] = {name: [x] for name, x in tensors.items()}
            for rank in range(1, self.size):
                for name, (shape, dtype) in forms[rank].items():
                    x = torch.empty(shape, dtype=_dtype(dtype))
                    dist.recv(x, rank)
                    parts.setdefault(name, []).append(x)
        return {name: torch.cat(some) for name, some in parts.items()}

    def broadcast(self, value: Any) -> Any:
        """The value of rank 0, on every rank; for small values that JSON can express."""
        if self.size == 1:
            return value
        words = _spoken(value if self.leads else None)
        length = torch.tensor(len(words))
        with _reaching():
            dist.broadcast(length, 0)
            words = words if self.leads else torch.empty(int(length), dtype=torch.uint8)
            dist.broadcast(words, 0)
        return _understood(words)

    def _exchanged(self, value: Any) -> list[Any]:
        """The values of all ranks, on every rank."""
        words = _spoken(value)
        lengths = [torch.tensor(0) for _ in range(self.size)]
        with _reaching():
            dist.all_gather(lengths, torch.tensor(len(words)))
            most = max(int(n) for n in lengths)
            parts = [torch.empty(most, dtype=torch.uint8) for _ in range(self.size)]
            dist.all_gather(parts, torch.cat([words, words.new_zeros(most - len(words))]))
        return [_understood(part[: int(n)]) for part, n in zip(parts, lengths, strict=True)]

    def any_rank(self, yes: bool = False) -> bool:
        """Whether any rank says yes; a barrier for all."""
        if self.size == 1:
            return yes
        flag = torch.tensor(int(yes))
        with _reaching():
            dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag)

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """An error on one rank is raised on all, so that none waits for a failed one."""
        if self.size == 1:
            yield
            return
        failure: Exception | None = None
        try:
            yield
        except LostRankError:  # there is no other rank to agree with
            raise
        except Exception as error:
            failure = error
        if self.any_rank(failure is not None):
            words = self._exchanged(None if failure is None else _in_words(failure))
            if failure is not None:
                raise failure
            rank = next(rank for rank, said in enumerate(words) if said is not None)
            raise RankError(rank, *words[rank])


ALONE = Ranks()


def joined(world: Mapping[str, str] = os.environ) -> Ranks:
    """This process among those that torchrun, or ``--ranks``, started, or ``ALONE``."""
    if not is_rank(world):
        return ALONE
    if not dist.is_initialized():
        here, folder = _asked(world), world.get(MEETING)
        secret = _secret_of(Path(folder)) if folder is not None else b""
        # Small values use gloo even with GPUs: it notices at once that a rank is gone.
        way = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        how: dict[str, Any] = {"timeout": timedelta(seconds=_patience())}
        if folder is not None:
            store = dist.FileStore(str(Path(folder) / _STORE), here.size)  # type: ignore[attr-defined]
            how |= {"store": store, "rank": here.rank, "world_size": here.size}
        try:
            dist.init_process_group(way, **how)
        except (RuntimeError, ValueError) as error:
            where = folder or f"{world['MASTER_ADDR']}:{world['MASTER_PORT']}"
            raise LostRankError(f"the ranks could not meet at {where} ({_first(error)})") from error
        atexit.register(_left, folder)
        if folder is not None:
            _introduced(here, secret)
    return Ranks(dist.get_rank(), dist.get_world_size())


def _asked(world: Mapping[str, str]) -> Ranks:
    """The rank of this process."""
    faults, names = [], ["RANK", "WORLD_SIZE", *([] if MEETING in world else ["MASTER_PORT"])]
    fix = "start ranks with --ranks or torchrun, or unset RANK and WORLD_SIZE"
    for name in names:
        if not world.get(name, "").isdecimal():
            what = "is not set" if name not in world else f"should be a whole number (got '{world[name]}')"
            faults.append(Fault(name, what, fix))
    if MEETING not in world and not world.get("MASTER_ADDR"):
        faults.append(Fault("MASTER_ADDR", "is not set", fix))
    if faults:
        raise ConfigError(faults)
    rank, size = int(world["RANK"]), int(world["WORLD_SIZE"])
    if rank >= size:
        raise ConfigError([Fault("RANK", f"should be below WORLD_SIZE, which is {size} (got {rank})", fix)])
    return Ranks(rank, size)


def _secret_of(folder: Path) -> bytes:
    """The secret of the ranks that meet in a folder."""
    try:
        return (folder / SECRET).read_bytes()
    except OSError as error:
        what = f"the secret of the ranks cannot be read: {error.strerror} (got '{folder}')"
        raise ConfigError([Fault(MEETING, what, "start ranks with --ranks, or unset it")]) from error


def _introduced(ranks: Ranks, secret: bytes) -> None:
    """Stop if one of the ranks does not know the secret of those that were started together."""
    proofs = [
        hmac.digest(secret, f"rank {rank} of {ranks.size}".encode(), "sha256").hex() for rank in range(ranks.size)
    ]
    said = ranks._exchanged(proofs[ranks.rank])
    if not hmac.compare_digest("".join(map(str, said)), "".join(proofs)):
        raise LostRankError("a process that was not started with the others has joined them; nothing was exchanged")


def take_device(device: torch.device, world: Mapping[str, str] = os.environ) -> None:
    """Let ``cuda`` mean this rank's own GPU."""
    if device.type != "cuda" or not is_rank(world):
        return
    if ":" in str(device):
        what = f"names one GPU, but every rank uses its own (got '{device}')"
        raise ConfigError([Fault("engine.device", what, "use cuda or auto")])
    local, here = int(world.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local >= here:
        what = f"there is no GPU for rank {local} of this machine, which has {here}"
        raise ConfigError([Fault("--ranks", what, f"start {here} on this machine, or set engine.device=cpu")])
    torch.cuda.set_device(local)


def is_rank(world: Mapping[str, str] = os.environ) -> bool:
    """Whether this process is one of several that torchrun, or ``--ranks``, started."""
    return "RANK" in world and world.get("WORLD_SIZE", "1") != "1"


def ranks_by_cost(costs: Sequence[float], size: int) -> list[int]:
    """Which of ``size`` ranks each piece of work goes to: the longest first, each to the rank with the least so far."""
    loads, ranks = [0.0] * size, [0] * len(costs)
    for k in sorted(range(len(costs)), key=lambda k: -costs[k]):
        ranks[k] = min(range(size), key=lambda rank: loads[rank])
        loads[ranks[k]] += costs[k]
    return ranks


def _packed(rows: Any, count: int, most: int) -> Tensor:
    """The first ``count`` rows of a stacked tree as bytes, a row of bytes for each, in ``most`` rows."""
    flat = [x[:count].reshape(count, math.prod(x.shape[1:])).contiguous() for x in tree.leaves(rows)]
    bytes_ = torch.cat([x.view(torch.uint8) for x in flat], 1)
    block = bytes_.new_zeros(most, bytes_.shape[1])
    block[:count] = bytes_
    return block


def _unpacked(block: Tensor, places: Tensor, like: T) -> T:
    """These rows of bytes as a stacked tree again."""
    found, at = [], 0
    for x in tree.leaves(like):
        wide = math.prod(x.shape[1:]) * x.element_size()
        flat = block[:, at : at + wide].index_select(0, places).flatten()
        found.append(flat.view(x.dtype).view(len(places), *x.shape[1:]))
        at += wide
    return tree.unflatten(like, found)


def _spoken(value: Any) -> Tensor:
    """A small value as the bytes of its JSON."""
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _understood(words: Tensor) -> Any:
    return json.loads(words.numpy().tobytes())


def _dtype(name: str) -> torch.dtype:
    """The type of this name, as ``str`` writes it."""
    found = getattr(torch, name.removeprefix("torch."), None)
    assert isinstance(found, torch.dtype), name
    return found


def _in_words(error: Exception) -> tuple[str, int]:
    if isinstance(error, FedloomError):
        return str(error), error.exit_code
    return f"{type(error).__name__}: {_first(error)}", 1


def _first(error: Exception) -> str:
    """The first line of an error; the rest is for developers."""
    words = re.sub(r"^\[\S+\] ", "", (str(error).splitlines() or [""])[0])
    return words.partition(". ")[0] or type(error).__name__


@contextmanager
def _reaching() -> Iterator[None]:
    """Turn any error while ranks meet into one: another rank is gone."""
    try:
        yield
    except RuntimeError as error:
        raise LostRankError(f"another rank has ended, or cannot be reached ({_first(error)})") from error


def _patience() -> float:
    given = os.environ.get(TIMEOUT, "")
    try:
        seconds = float(given or _PATIENCE)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < 1e7:
        raise ConfigError([Fault(TIMEOUT, f"should be a number of seconds above 0 (got '{given}')", "leave it out")])
    return seconds


def _left(folder: str | None) -> None:
    """Leave the group; the last rank removes the rendezvous folder, in case the launcher is gone.

    The last to leave the store deletes it. Nobody may do so before: torch aborts a rank that leaves a store whose file
    disappears meanwhile.
    """
    with suppress(RuntimeError, AssertionError):
        dist.destroy_process_group()
    if folder is not None and not (Path(folder) / _STORE).exists():
        shutil.rmtree(folder, ignore_errors=True)
