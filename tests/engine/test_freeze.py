"""``model.freeze``: parts of a net that are not trained, not sent, not counted and never moved, with every method."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.func import grad, vmap

import fedloom
from fedloom.algorithm import Setup
from fedloom.algorithms.fedavg import FedAvg
from fedloom.core.errors import ConfigError
from fedloom.core.task import Batch, Task
from fedloom.data.arrays import Arrays
from fedloom.data.federation import Federation
from fedloom.engine.evaluate import evaluate
from fedloom.engine.rounds import advance, begin
from fedloom.engine.store import RamStore
from fedloom.models.net import Net
from fedloom.runs.prepare import Prepared, has_fixed_features, initial_task, on_features, prepare
from fedloom.runs.settings import parse
from support import worlds
from support.terminal import Quick


class Body(nn.Module):
    """An extractor with everything that could move or draw: BatchNorm, its statistics, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.drop = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5)
        self.fc = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(torch.relu(self.norm(self.conv(x)))).mean((2, 3))
        return torch.tanh(self.fc(h))


class Extractor(Net):
    """A net of one's own for images, as ``model.kind = "test_freeze:Extractor"`` names it."""

    def __init__(self, classes: int) -> None:
        super().__init__(Body(), 6, classes)
        nn.init.normal_(self.body.norm.running_mean, std=0.1)


def net() -> Net:
    torch.manual_seed(3)
    return Extractor(3)


def batch(buffers: Tensor, n: int = 5, seed: int = 0) -> Batch:
    g = torch.Generator().manual_seed(seed)
    zero = torch.zeros(())
    x, y = torch.randn(n, 1, 6, 6, generator=g), torch.randint(0, 3, (n,), generator=g)
    return Batch(x, y, torch.ones(n), torch.tensor(7), zero, zero + 0.1, buffers)


# -- the task --------------------------------------------------------------------------------------
def test_only_what_is_trained_is_in_the_vector() -> None:
    task, plain = Task(net(), frozen=("body",)), Task(net())
    assert task.names == ("head.weight", "head.bias")
    assert task.size == 21
    assert task.whole == plain.whole == plain.size == sum(p.numel() for p in net().parameters())
    assert task.buffers0.numel() == 0
    assert plain.buffers0.numel() == 8
    assert not task.has_statistics
    assert plain.has_statistics
    part = Task(net(), frozen=["body.conv", "body.norm."])  # a dot at the end does no harm
    assert part.names == ("body.fc.weight", "body.fc.bias", "head.weight", "head.bias")
    assert not part.has_statistics


def test_a_frozen_body_is_in_evaluation_mode_and_has_no_gradient() -> None:
    """Neither dropout nor the statistics of a batch reach it, so that its features are those of evaluation."""
    whole = net().eval()
    for lanes in (False, True):
        task = Task(net(), frozen=("body",), lanes=lanes)
        b = batch(task.buffers0)
        features = whole.body(b.x).detach()
        assert torch.allclose(task.logits(task.w0, b), whole.head(features))
        assert torch.allclose(task.features(task.w0, b.x, b.buffers), features)
        head = Task(Net(nn.Identity(), 6, 3), lanes=lanes)
        assert torch.allclose(task.grad(task.w0, b), head.grad(task.w0, b._replace(x=features)), atol=1e-6)
        before = [x.clone() for x in task.fixed]
        task.statistics(task.w0, b)
        assert all(torch.equal(x, y) for x, y in zip(before, task.fixed, strict=True))


def test_the_frozen_part_is_not_mapped_over_clients() -> None:
    """Stacked are P numbers for each client; what is frozen enters every lane as it is."""
    task = Task(net(), frozen=("body",), lanes=True)
    b, models = batch(task.buffers0), torch.stack([task.w0, 2 * task.w0])
    both = vmap(lambda w: grad(task.loss)(w, b))(models)
    assert both.shape == (2, 21)
    assert torch.allclose(both[1], grad(task.loss)(2 * task.w0, b), atol=1e-6)


def test_a_saved_net_is_whole() -> None:
    task = Task(net(), frozen=("body",))
    held, own = task.tensors(task.w0 + 1, task.buffers0), net().state_dict()
    assert held.keys() == own.keys()
    assert all(torch.equal(x, held[n]) for n, x in own.items() if n.startswith("body."))
    assert torch.equal(held["head.bias"], own["head.bias"] + 1)
    assert torch.equal(
        task.module(task.w0, task.buffers0).state_dict()["body.norm.running_mean"], own["body.norm.running_mean"]
    )


def test_sixteen_bits_reach_the_frozen_part() -> None:
    short = Task(net(), frozen=("body",)).to(torch.device("cpu"), lanes=False, precision="bf16")
    exact = Task(net(), frozen=("body",)).to(torch.device("cpu"), lanes=False)
    b = batch(exact.buffers0)
    assert torch.allclose(short.logits(short.w0, b), exact.logits(exact.w0, b), atol=0.05)
    assert not torch.equal(short.logits(short.w0, b), exact.logits(exact.w0, b))
    mapped = vmap(lambda w: short.logits(w, b))(short.w0[None])[0]
    assert torch.allclose(mapped, exact.logits(exact.w0, b), atol=0.05)
    assert torch.equal(short.apply(short.w0, b.x, b.buffers), exact.apply(exact.w0, b.x, b.buffers))


@pytest.mark.parametrize(
    ("frozen", "words"),
    [
        (("bodi",), "model.freeze: the net has no part 'bodi' .did you mean 'body'"),
        (("body.norm.weigth",), "the net has no part 'body.norm.weigth' .did you mean 'body.norm.weight'"),
        (("body.drop",), "model.freeze: 'body.drop' has no parameters that could be trained"),
        (("body", "head"), "all 8 parameters of the net would be frozen, so nothing would be trained"),
    ],
)
def test_a_freeze_that_makes_no_sense_is_refused(frozen: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Task(net(), frozen=frozen)


# -- runs ------------------------------------------------------------------------------------------
MODEL = {"kind": "mlp", "widths": [12]}
SMALL = {"partition": {"clients": 4, "kind": "iid", "holdout": 0.2}, "cohort": {"size": 3}, "rounds": 2}
SMALL |= {"checkpoint": {"curves": False}}


@pytest.mark.slow
def test_freezing_nothing_changes_nothing(tmp_path: Path) -> None:
    for name, model in (("plain", MODEL), ("empty", MODEL | {"freeze": []})):
        fedloom.run("fedavg", model=model, out=tmp_path / name, **SMALL)
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("plain", "empty"))
    assert all(torch.equal(x, other[n]) for n, x in one.items())
    assert (tmp_path / "plain" / "metrics.jsonl").read_bytes() == (tmp_path / "empty" / "metrics.jsonl").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["loop", "lanes"])
def test_a_frozen_layer_stays_while_those_around_it_train(executor: str, tmp_path: Path) -> None:
    """A layer in the middle: gradients pass through it to what lies below, and it stays."""
    model = {"kind": "mlp", "widths": [12, 8, 6], "freeze": "body.fc2"}
    config = parse({"model": model, "engine": {"executor": executor}, **SMALL})
    exp = prepare(config, tmp_path).experiment
    state, store = begin(exp), RamStore(4)
    before = exp.task.tensors(state.server.w, state.buffers)
    state, _ = advance(exp, state, store)
    after = exp.task.tensors(state.server.w, state.buffers)
    same = {name for name, x in before.items() if torch.equal(x, after[name])}
    assert same == {"body.fc2.0.weight", "body.fc2.0.bias"}


@pytest.mark.slow
def test_what_is_frozen_costs_no_bytes_and_no_noise(tmp_path: Path) -> None:
    history = fedloom.run("fedavg", model=MODEL | {"freeze": "body"}, out=tmp_path / "r", **SMALL)
    head = 4 * (12 * 10 + 10)
    assert history.records[-1]["bytes/up"] == history.records[-1]["bytes/down"] == 2 * 3 * head
    said = json.loads((tmp_path / "r" / "environment.json").read_text())
    assert (said["parameters"], said["parameters_whole"]) == (130, 130 + 65 * 12)
    saved = load_file(next((tmp_path / "r" / "checkpoints").iterdir()) / "state.safetensors")
    assert saved["server.w"].numel() == 130


@pytest.mark.slow
def test_the_hessian_is_that_of_what_is_trained(tmp_path: Path) -> None:
    """Of a head on fixed features the loss is convex: the lowest curvature is not below zero, as a net's mostly is."""
    model = MODEL | {"freeze": "body"}
    table = {"evaluate": {"diagnostics": ["hessian", "rho"]}, "algorithm": {"kind": "fedprox", "mu": 1.0}, **SMALL}
    found = fedloom.run(table.pop("algorithm"), model=model, **table).records[-1]
    assert found["hessian/top"] > 0
    assert found.get("theory/L_minus_estimate", 0.0) < 1e-4


def test_methods_whose_subject_is_frozen_say_so() -> None:
    with pytest.raises(ConfigError, match=r"model.freeze: MOON compares the body's features"):
        fedloom.run("moon", model=MODEL | {"freeze": "body"}, **SMALL)
    with pytest.raises(ConfigError, match=r"all 130 parameters would stay with the clients"):
        fedloom.run("fedrep", model=MODEL | {"freeze": "body"}, **SMALL)
    with pytest.raises(ConfigError, match=r"no linear layer called 'head' that can be trained"):
        fedloom.run("analytic", model=MODEL | {"freeze": "head"}, **SMALL)


def test_a_part_of_a_file_needs_a_file() -> None:
    with pytest.raises(ConfigError, match=r"model.weights_part: .*only if weights is set, but weights is not set"):
        parse({"model": MODEL | {"weights_part": "body"}})


# -- features that are computed once -----------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize(("executor", "capture"), [("loop", "eager"), ("lanes", "eager"), ("lanes", "graph")])
def test_a_frozen_body_trains_alike_in_every_executor_and_on_features(executor: Any, capture: Any) -> None:
    """Clients that share one frozen body with BatchNorm and dropout, and clients that are given its features."""
    fed = worlds.federation((9, 30, 17), shape=(1, 6, 6))
    how = {"frozen": ("body",), "executor": executor, "capture": capture}
    exp = worlds.experiment(fed, net(), **how)
    task, seen, _ = on_features(exp.task, fed, None)
    assert seen.x.shape == (len(fed.x), 6)
    plain = worlds.experiment(fed, net(), frozen=("body",), executor="loop")
    headed = replace(exp, task=task, federation=seen, algorithm=FedAvg().bind(Setup(task, exp.local.make_optimizer())))
    found = []
    for each in (plain, exp, headed):
        state, store = begin(each), RamStore(3)
        for _ in range(2):
            state, _ = advance(each, state, store)
        held = each.task.tensors(state.server.w, state.buffers)
        assert all(torch.equal(x, held[n]) for n, x in net().state_dict().items() if n.startswith("body."))
        found.append((state.server.w, torch.tensor(list(evaluate(each, state, store).values()))))
    for w, metrics in found[1:]:
        assert torch.allclose(w, found[0][0], atol=1e-6)
        assert torch.allclose(metrics, found[0][1], atol=1e-5)
    assert not torch.allclose(found[0][0], plain.task.w0, atol=1e-3)


def test_features_are_computed_once_unless_examples_vary(tmp_path: Path) -> None:
    table = {
        "model": {"kind": "cnn_fedavg", "padding": "same", "freeze": "body"},
        "partition": {"clients": 3},
        "cohort": {"size": 2},
    }
    image = np.random.default_rng(0).integers(0, 256, (60, 3, 8, 8)).astype(np.uint8)
    arrays = Arrays("images", image, np.arange(60) % 3, np.arange(60) >= 40, ("a", "b", "c"))
    once = prepare(parse(table | {"data": {"source": "in-memory"}}), tmp_path, arrays)
    assert once.experiment.federation.shape == (512,)
    assert any("features are computed once for all 60 rows" in note for note in once.config.notes)
    assert once.experiment.executor == "lanes"  # no convolution is left
    varied = federation_with(once, "crop_flip", arrays)
    assert not has_fixed_features(initial_task(once.config.model, arrays, 0), varied)
    part = table | {
        "model": {"kind": "cnn_fedavg", "padding": "same", "freeze": "body.conv1"},
        "data": {"source": "in-memory"},
    }
    assert prepare(parse(part), tmp_path, arrays).experiment.federation.shape == (3, 8, 8)


def federation_with(prepared: Prepared, augment: str, arrays: Arrays) -> Federation:
    """The examples of a prepared experiment as they were, and to be varied."""
    return prepared.experiment.federation._replace(x=torch.from_numpy(arrays.x), augment=augment)


# -- from pre-training to heads, on the command line --------------------------------------------------
@pytest.fixture(scope="module")
def quick() -> Iterator[Quick]:
    server = Quick()
    yield server
    server.close()


METHODS = {
    "fedavg": (),
    "law_afl": ("proxy.size=100",),
    "analytic": (),
    "ditto": (),
    "dfedavgm": (),
}


def test_pre_train_freeze_and_train_heads_with_many_methods(tmp_path: Path, quick: Quick) -> None:
    """What an extractor is for: it is trained once, in one place, and then only heads are trained on it."""
    small = ("model.widths=[24]", "partition.kind=iid", "checkpoint.every=1")
    # One client that has everything is training in one place.
    first = quick("run", *small, "partition.clients=1", "rounds=5", "local.lr=0.1", "--out", "pre", cwd=tmp_path)
    assert first.code == 0, first.err
    extractor = {n: x for n, x in load_file(tmp_path / "pre" / "model.safetensors").items() if n.startswith("body.")}
    frozen = ("model.weights=pre/model.safetensors", "model.weights_part=body", "model.freeze=body")
    few = ("partition.clients=5", "rounds=2")
    for kind, beside in METHODS.items():
        done = quick("run", f"algorithm={kind}", *small, *frozen, *few, *beside, "--out", kind, cwd=tmp_path)
        assert done.code == 0, (kind, done.err)
        assert "250 of 1,810 parameters trained" in done.out
        held = load_file(tmp_path / kind / "model.safetensors")
        assert all(torch.equal(x, held[n]) for n, x in extractor.items()), kind
        assert held["head.weight"].shape == (10, 24)
    # The net that comes out can be the weights of another run, of a server's method or of a network's.
    for kind in ("fedavg", "dfedavgm"):
        weights = f"model.weights={kind}/model.safetensors"
        again = quick("run", *small, *few, weights, "rounds=1", "--out", f"{kind}2", cwd=tmp_path)
        assert again.code == 0, again.err
    # Resumed from its first round, a run ends as it did.
    metrics, model = ((tmp_path / "fedavg" / n).read_bytes() for n in ("metrics.jsonl", "model.safetensors"))
    assert quick("resume", "fedavg", "--from", "1", cwd=tmp_path).code == 0
    assert (tmp_path / "fedavg" / "metrics.jsonl").read_bytes() == metrics
    assert (tmp_path / "fedavg" / "model.safetensors").read_bytes() == model
    # With another extractor in the same place, it would be another run.
    other = quick("run", *small, "partition.clients=1", "rounds=1", "seed=5", "--out", "other", cwd=tmp_path)
    assert other.code == 0, other.err
    shutil.copy(tmp_path / "other" / "model.safetensors", tmp_path / "pre" / "model.safetensors")
    refused = quick("resume", "fedavg", "--from", "1", cwd=tmp_path)
    assert refused.code == 2
    assert "pre/model.safetensors has changed" in refused.err
    # Also where the folder does not say with which files it began.
    path = tmp_path / "fedavg" / "environment.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"files": {}}))
    (tmp_path / "fedavg" / "manifest.json").unlink()
    refused = quick("resume", "fedavg", "--from", "1", cwd=tmp_path)
    assert refused.code == 2
    assert "fedavg: the net (model.weights: pre/model.safetensors) has changed since this run began" in refused.err
