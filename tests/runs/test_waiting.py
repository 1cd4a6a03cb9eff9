"""Training on while waiting: real threads, a real net, and processes that are really killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from fedloom.core.errors import CheckpointError
from fedloom.runs import waiting
from fedloom.runs.waiting import Waited, Waiting, recall, running_mean

SOON = 20.0  # seconds in which anything that happens at all has happened


class Model(NamedTuple):
    weight: Tensor
    bias: Tensor


class Trainer:
    """A linear net that learns by SGD in place, as a client's own code would; remembers every whole epoch."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(0)
        self.x = torch.randn(40, 3, generator=draw)
        self.y = self.x @ torch.tensor([[1.0], [-2.0], [0.5]]) + 0.1 * torch.randn(40, 1, generator=draw)
        self.net = nn.Linear(3, 1)
        self.seen: list[Model] = []

    def __call__(self, model: Model, should_stop: Callable[[], bool]) -> Model | None:
        with torch.no_grad():
            self.net.weight.copy_(model.weight)
            self.net.bias.copy_(model.bias)
        rule = torch.optim.SGD(self.net.parameters(), lr=0.05)
        for at in range(0, 40, 10):
            if should_stop():
                return None
            rule.zero_grad()
            nn.functional.mse_loss(self.net(self.x[at : at + 10]), self.y[at : at + 10]).backward()
            rule.step()
        self.seen.append(Model(self.net.weight.detach().clone(), self.net.bias.detach().clone()))
        return Model(self.net.weight, self.net.bias)  # its live parameters, which the next epoch overwrites


FIRST = Model(torch.zeros(1, 3), torch.zeros(1))


def mean_of(models: list[Model]) -> Model:
    return Model(*(torch.stack(leaves).double().mean(0).float() for leaves in zip(*models, strict=True)))


def ended() -> None:
    """Wait until no worker is left."""
    for thread in threading.enumerate():
        if thread.name.startswith("waiting for round"):
            thread.join(SOON)
            assert not thread.is_alive()


@contextmanager
def held_in(epoch: int, then: str = "stop") -> Iterator[tuple[Callable[..., Any], threading.Event]]:
    """Training that is in the midst of ``epoch`` when the event is set; then it stops, or goes on to the end."""
    inside, trainer, calls = threading.Event(), Trainer(), [0]

    def train(model: Model, should_stop: Callable[[], bool]) -> Model | None:
        calls[0] += 1
        if calls[0] < epoch:
            return trainer(model, lambda: False)
        trainer(model, lambda: False)
        inside.set()
        while not should_stop():
            threading.Event().wait(0.005)
        return None if then == "stop" else Model(model.weight + 99, model.bias)

    train.seen = trainer.seen  # type: ignore[attr-defined]
    yield train, inside
    ended()


@pytest.mark.parametrize("cap", [0, 1, 3, 10])
def test_the_mean_of_the_upload_and_of_every_epoch_up_to_the_cap(cap) -> None:
    trainer = Trainer()
    with Waiting(trainer, FIRST, awaits=7, cap=cap) as client:
        ended()
        found = client.arrived(7)
    assert found is not None
    assert found.epochs == cap == len(trainer.seen)
    torch.testing.assert_close(found.mean, mean_of([FIRST, *trainer.seen]), rtol=1e-6, atol=1e-7)
    last = trainer.seen[-1] if cap else FIRST
    assert all(torch.equal(a, b) for a, b in zip(found.last, last, strict=True))
    assert isinstance(found.mean, Model)
    assert not found.mean.weight.requires_grad
    assert not FIRST.weight.any()  # the model that was handed over is as it was


@pytest.mark.parametrize("then", ["stop", "go on"])
def test_an_epoch_that_is_cut_short_counts_for_nothing(tmp_path, then) -> None:
    """Nor does one whose code does not listen, and which ends after the next model has come."""
    with held_in(3, then) as (train, inside), Waiting(train, FIRST, awaits=7, cap=9, path=tmp_path / "mean") as client:
        assert inside.wait(SOON)
        found = client.arrived(7)
        assert found is not None
        assert found.epochs == 2
        torch.testing.assert_close(found.mean, mean_of([FIRST, *train.seen[:2]]), rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(found.last, train.seen[1])
        kept = recall(tmp_path / "mean", FIRST)
        assert (kept.epochs, kept.awaits) == (2, 7)
        assert all(torch.equal(a, b) for a, b in zip(kept.mean, found.mean, strict=True))


def test_only_the_awaited_model_stops_it_and_only_once() -> None:
    with held_in(2) as (train, inside), Waiting(train, FIRST, awaits=7, cap=9) as client:
        assert inside.wait(SOON)
        assert client.arrived(6) is None
        assert client.arrived(8) is None
        assert client._thread.is_alive()
        assert client.arrived(7) is not None
        assert not client._thread.is_alive()
        assert client.arrived(7) is None
        assert client.arrived(6) is None


def test_of_many_messengers_one_gets_the_mean() -> None:
    found: list[Waited[Model] | None] = []
    with held_in(1) as (train, inside), Waiting(train, FIRST, awaits=7, cap=9) as client:
        assert inside.wait(SOON)
        threads = [threading.Thread(target=lambda: found.append(client.arrived(7))) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SOON)
    assert len(found) == 16
    assert sum(x is not None for x in found) == 1


def test_a_budget_ends_training_in_the_midst_of_an_epoch(monkeypatch) -> None:
    now, trainer = [100.0], Trainer()
    monkeypatch.setattr(waiting, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def train(model: Model, should_stop: Callable[[], bool]) -> Model | None:
        def ask() -> bool:
            now[0] += 0.25  # four minibatches: a second for an epoch
            return should_stop()

        return trainer(model, ask)

    with Waiting(train, FIRST, awaits=7, cap=9, budget=2.6) as client:
        ended()
        found = client.arrived(7)
    assert found is not None
    assert found.epochs == 2


def test_a_budget_in_real_seconds() -> None:
    trainer = Trainer()
    with Waiting(trainer, FIRST, awaits=7, cap=10**9, budget=0.2) as client:
        ended()
        found = client.arrived(7)
    assert found is not None
    assert found.epochs == len(trainer.seen) >= 1


def test_without_budget_no_time_is_left() -> None:
    with Waiting(lambda x, stop: x, FIRST, awaits=7, cap=9, budget=0.0) as client:
        ended()
        found = client.arrived(7)
    assert found is not None
    assert found.epochs == 0


def failing(model: Model, should_stop: Callable[[], bool]) -> Model:
    if model.weight.any():
        raise ZeroDivisionError("in the second epoch")
    return Model(model.weight + 2, model.bias)


def test_what_goes_wrong_is_raised_where_the_model_arrives(tmp_path) -> None:
    path = tmp_path / "mean.safetensors"
    client = Waiting(failing, FIRST, awaits=7, cap=9, path=path)
    client.start()
    ended()
    assert client.arrived(6) is None
    with pytest.raises(ZeroDivisionError, match="in the second epoch"):
        client.arrived(7)
    assert client.arrived(7) is None
    assert recall(path, FIRST).epochs == 1
    assert (recall(path, FIRST).mean.weight == 1).all()


def test_what_goes_wrong_is_not_lost_where_no_model_arrives() -> None:
    with pytest.raises(ZeroDivisionError), Waiting(failing, FIRST, awaits=7, cap=9):
        ended()
    with pytest.raises(KeyError), Waiting(failing, FIRST, awaits=7, cap=9):  # nor does it hide another error
        raise KeyError(ended())
    with Waiting(failing, FIRST, awaits=7, cap=9) as client:
        ended()
        with pytest.raises(ZeroDivisionError):
            client.arrived(7)


def test_leaving_the_block_ends_training() -> None:
    with held_in(1) as (train, inside):
        with Waiting(train, FIRST, awaits=7, cap=9) as client:
            assert inside.wait(SOON)
        assert not client._thread.is_alive()
        assert client.arrived(7) is None


def test_training_cannot_reach_what_is_kept() -> None:
    def spoil(model: Model, should_stop: Callable[[], bool]) -> Model:
        model.weight.add_(1)
        given.append(model)
        for old in given[:-1]:
            old.weight.fill_(torch.nan)
        return model

    given: list[Model] = []
    with Waiting(spoil, FIRST, awaits=1, cap=4) as client:
        ended()
        found = client.arrived(1)
    assert found is not None
    assert (found.mean.weight == 2).all()
    assert (found.last.weight == 4).all()


def test_other_ways_to_fold() -> None:
    schemes: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {
        "last": lambda mean, x, j: x,
        "upload": lambda mean, x, j: mean,
        "index": lambda mean, x, j: mean + j,
    }
    found = {}
    for name, fold in schemes.items():
        with Waiting(lambda x, stop: x + 10, torch.zeros(2), awaits=1, cap=3, fold=fold) as client:
            ended()
            waited = client.arrived(1)
        assert waited is not None
        found[name] = waited.mean.tolist()
    assert found == {"last": [30.0] * 2, "upload": [0.0] * 2, "index": [6.0] * 2}


def test_of_counters_the_mean_is_the_latest() -> None:
    mean = running_mean((torch.tensor([1.0]), torch.tensor(3)), (torch.tensor([4.0]), torch.tensor(8)), 2)
    assert mean[0].tolist() == [2.0]
    assert mean[1].item() == 8
    assert mean[1].dtype == torch.int64


def test_training_has_gradients_whatever_the_caller_has() -> None:
    with torch.no_grad(), Waiting(Trainer(), FIRST, awaits=1, cap=1) as client:
        ended()
        found = client.arrived(1)
    assert found is not None
    assert found.last.weight.any()


# -- on disk -----------------------------------------------------------------------------------------
def test_the_upload_is_on_disk_before_the_first_epoch(tmp_path) -> None:
    path = tmp_path / "mean.safetensors"
    with held_in(1) as (train, inside), Waiting(train, FIRST, awaits=7, cap=9, path=path):
        assert inside.wait(SOON)
        kept = recall(path, FIRST)
        assert (kept.epochs, kept.awaits) == (0, 7)
        assert not kept.mean.weight.any()


def test_the_next_wait_takes_the_place_of_the_last(tmp_path) -> None:
    path = tmp_path / "mean.safetensors"
    for awaits in (7, 8):
        with Waiting(Trainer(), FIRST, awaits=awaits, cap=2, path=path) as client:
            ended()
            assert client.arrived(awaits) is not None
        assert recall(path, FIRST)[1:] == (2, awaits)
    assert [p.name for p in tmp_path.iterdir()] == ["mean.safetensors"]


def test_a_disk_that_refuses_is_told(tmp_path) -> None:
    path = tmp_path / "gone" / "mean.safetensors"
    with pytest.raises(OSError, match="No such file"):
        Waiting(Trainer(), FIRST, awaits=7, cap=2, path=path).start()
    path.parent.mkdir()

    def train(model: Model, should_stop: Callable[[], bool]) -> Model:
        path.unlink()
        path.parent.rmdir()
        return model

    client = Waiting(train, FIRST, awaits=7, cap=2, path=path)
    client.start()
    with pytest.raises(OSError, match="No such file"):
        ended() or client.arrived(7)


def test_what_cannot_be_the_mean_is_refused(tmp_path) -> None:
    path = tmp_path / "mean.safetensors"
    for write in (
        lambda: None,
        lambda: path.write_bytes(b"\x00" * 100),
        lambda: save_file(FIRST._asdict(), path),
        lambda: save_file(FIRST._asdict(), path, metadata={"fedloom": "{}"}),
    ):
        write()
        with pytest.raises(CheckpointError, match=r"mean\.safetensors: not a mean that was kept"):
            recall(path, FIRST)
    with Waiting(Trainer(), FIRST, awaits=7, cap=0, path=path):
        ended()
    with pytest.raises(CheckpointError, match=r"'weight' should be \(2, 3\) torch.float32, it is \(1, 3\)"):
        recall(path, Model(torch.zeros(2, 3), torch.zeros(1)))
    with pytest.raises(CheckpointError, match=r"'value' should be .*, it is nothing"):
        recall(path, torch.zeros(1))


HEAD = """
import sys, threading
from pathlib import Path
sys.path.insert(0, {here!r})
from test_waiting import FIRST, Trainer
from fedloom.runs import waiting
from fedloom.runs.waiting import Waiting

trainer, path = Trainer(), Path({path!r})
"""
TAIL = """
with Waiting(train, FIRST, awaits=12, cap=10**9, path=path):
    threading.Event().wait()
"""
STUCK = """
train, step, done = trainer, {step}, 0
def stuck(*args):
    global done
    done += 1
    if done == 5:
        print("here", flush=True)
        threading.Event().wait()  # until killed
    step(*args)
{step} = stuck
"""
TELLING = """
def train(model, should_stop):
    if len(trainer.seen) == 5:
        print("here", flush=True)
    return trainer(model, should_stop)
"""


def kill(path: Path, body: str) -> None:
    """Run a client in a process of its own, and kill it when it says so."""
    code = HEAD.format(here=str(Path(__file__).parent), path=str(path)) + body + TAIL
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment) as child:
        assert child.stdout is not None
        alarm = threading.Timer(3 * SOON, child.kill)  # a client that never says so must not be waited for
        alarm.start()
        said = child.stdout.readline()
        alarm.cancel()
        child.kill()
        assert (said, child.wait(SOON)) == ("here\n", -signal.SIGKILL)


def mean_after(epochs: int) -> Model:
    trainer, model = Trainer(), FIRST
    for _ in range(epochs):
        model = trainer(model, lambda: False) or model
    return mean_of([FIRST, *trainer.seen])


@pytest.mark.parametrize(
    "step",
    [
        "waiting.checkpoint.save_model",  # the fourth epoch is done, and nothing of it is on disk
        "waiting.checkpoint.os.replace",  # its file is written, and not yet in place
    ],
)
def test_a_process_killed_while_it_saves_leaves_the_mean_before(tmp_path, step) -> None:
    path = tmp_path / "mean.safetensors"
    kill(path, STUCK.format(step=step))
    kept = recall(path, FIRST)
    assert (kept.epochs, kept.awaits) == (3, 12)
    torch.testing.assert_close(kept.mean, mean_after(3), rtol=1e-6, atol=1e-7)


def test_a_process_killed_at_any_moment_leaves_a_whole_mean(tmp_path) -> None:
    path = tmp_path / "mean.safetensors"
    kill(path, TELLING)
    kept = recall(path, FIRST)
    assert kept.epochs >= 5
    assert kept.awaits == 12
    torch.testing.assert_close(kept.mean, mean_after(kept.epochs), rtol=1e-5, atol=1e-6)
