"""Training on while a client waits for the next model, in real time.

A worker goes on from the model that was uploaded, one epoch after the other, and folds the model after each
whole epoch into a mean. The next model ends it between two minibatches, and the epoch that was cut short
counts for nothing. The mean can also be kept on disk, where it outlives the process.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Generic, NamedTuple, Self, TypeVar

from safetensors import SafetensorError, safe_open
from torch import Tensor

from fedloom.core import disk, tree
from fedloom.core.errors import CheckpointError
from fedloom.engine import checkpoint

T = TypeVar("T")  # a tree of tensors: the model


class Waited(NamedTuple, Generic[T]):
    """What came of waiting."""

    mean: T  # of the uploaded model and of those after each whole epoch
    epochs: int  # whole ones
    last: T  # the model after the last of them


class Recalled(NamedTuple, Generic[T]):
    """What a process that is gone had kept on disk."""

    mean: T
    epochs: int
    awaits: int  # the round whose model was waited for


def running_mean(mean: T, x: T, j: int) -> T:
    """The mean of ``j + 1`` models from the mean of the first ``j``; of what is no real number, the latest."""

    def one(old: Tensor, new: Tensor) -> Tensor:
        return old + (new - old) / (j + 1) if new.is_floating_point() else new

    return tree.tmap(one, mean, x)


class Waiting(Generic[T]):
    """A client that trains on until the model of round ``awaits`` arrives.

    ``train_epoch(model, should_stop)`` returns the model after one epoch, or None where it stopped because
    ``should_stop()``, which it asks between minibatches, had become true. It is handed a copy, and may write
    into it. ``fold(mean, x, j)`` takes up the model after epoch ``j`` = 1, 2, ... and writes into nothing.
    At most ``cap`` epochs are trained, and none goes on for longer than ``budget`` seconds after the start.

        with Waiting(train_epoch, model, awaits=7, cap=3) as waiting:
            ...
            waited = waiting.arrived(round_id)  # None: not the model that is awaited
    """

    def __init__(
        self,
        train_epoch: Callable[[T, Callable[[], bool]], T | None],
        model: T,
        *,
        awaits: int,
        cap: int,
        budget: float | None = None,
        fold: Callable[[T, T, int], T] = running_mean,
        path: Path | None = None,
    ) -> None:
        self._train_epoch, self._fold = train_epoch, fold
        self._awaits, self._cap, self._path = awaits, cap, path
        self._budget, self._until = math.inf if budget is None else budget, math.inf
        own = _copy(model)
        self._held = Waited(own, 0, own)
        self._lock = threading.Lock()  # between the end of an epoch and the arrival of a model
        self._stop = threading.Event()
        self._error: BaseException | None = None
        # A daemon, so that a process that wants to end is not held up: what is on disk is whole at any moment.
        self._thread = threading.Thread(target=self._work, name=f"waiting for round {awaits}", daemon=True)

    def start(self) -> None:
        """Begin to train on; from here on the mean is on disk."""
        self._until = time.monotonic() + self._budget
        self._keep()
        self._thread.start()

    def arrived(self, round_id: int) -> Waited[T] | None:
        """A model has come: if it is the awaited one, stop and say what came of waiting.

        A model of another round, or the same once more, changes nothing and gives None. What went wrong in
        training is raised here.
        """
        with self._lock:
            if round_id != self._awaits or self._stop.is_set():
                return None
            self._stop.set()
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._held

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            told = self._stop.is_set()  # the caller has seen what became of it
            self._stop.set()
        self._thread.join()
        if kind is None and not told and self._error is not None:
            raise self._error

    def _work(self) -> None:
        try:
            for j in range(1, self._cap + 1):
                if self._over() or not self._epoch(j):
                    return
                self._keep()
        except BaseException as error:  # whatever it is, it belongs to the thread that waits
            self._error = error

    def _over(self) -> bool:
        return self._stop.is_set() or time.monotonic() >= self._until

    def _epoch(self, j: int) -> bool:
        """Train epoch ``j``; whether it was a whole one."""
        found = self._train_epoch(_copy(self._held.last), self._over)
        if found is None:
            return False
        last = _copy(found)  # the next epoch may write into what this one returned
        held = Waited(self._fold(self._held.mean, last, j), j, last)
        with self._lock:
            if self._stop.is_set():  # the next model was there first
                return False
            self._held = held
        return True

    def _keep(self) -> None:
        if self._path is not None:
            notes = {"awaits": str(self._awaits), "epochs": str(self._held.epochs)}
            checkpoint.save_model(self._path, dict(tree.named_leaves(self._held.mean)), notes)
            disk.sync(self._path.parent)


def recall(path: Path, like: T) -> Recalled[T]:
    """The mean that was kept at ``path``, a tree such as ``like``."""
    wanted = dict(tree.named_leaves(like))
    try:
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, it is no mapping
            notes = json.loads(file.metadata()["fedloom"])
        epochs, awaits = int(notes["epochs"]), int(notes["awaits"])
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: not a mean that was kept while waiting ({error})") from error
    for name, x in wanted.items():
        if name not in tensors or tensors[name].shape != x.shape or tensors[name].dtype != x.dtype:
            found = f"{tuple(tensors[name].shape)} {tensors[name].dtype}" if name in tensors else "nothing"
            raise CheckpointError(f"{path}: '{name}' should be {tuple(x.shape)} {x.dtype}, it is {found}")
    mean = tree.unflatten(like, [tensors[name].to(x.device) for name, x in wanted.items()])
    return Recalled(mean, epochs, awaits)


def _copy(model: T) -> T:
    return tree.tmap(lambda x: x.detach().clone(), model)
