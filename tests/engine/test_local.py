"""Local training: loop, lanes and a loop written by hand do the same thing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedloom.algorithms.dpsgd import DPSGD
from fedloom.algorithms.fedavg import FedAvg
from fedloom.algorithms.fedavg_ft import FedAvgFT
from fedloom.algorithms.local_only import LocalOnly
from fedloom.core import tree, usercode
from fedloom.core.errors import ConfigError
from fedloom.core.optim import Local
from fedloom.core.task import Task
from fedloom.data.augment import augmented
from fedloom.data.federation import Federation
from fedloom.data.sources import from_arrays
from fedloom.engine.evaluate import evaluate
from fedloom.engine.local import Outcome, choose, lane_limit, train
from fedloom.engine.plan import Address, Cohort, plans
from fedloom.engine.rounds import advance, begin
from fedloom.engine.state import Experiment
from fedloom.engine.store import RamStore
from fedloom.engine.topology.kinds import Ring
from fedloom.models.cnn import FedAvgCNN
from fedloom.models.linear import MLP, Logistic
from fedloom.runs.prepare import prepare
from fedloom.runs.settings import parse
from support.worlds import CPU, experiment, federation

RAGGED = (1, 300, 2, 47, 10, 64, 129, 7)
IMAGE = (3, 8, 8)
LOCAL = Local(batch=16, epochs=2, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3, clip=5.0)

NETS: dict[str, Callable[[], nn.Module]] = {
    "logistic": lambda: Logistic().build(IMAGE, 4),
    "mlp": lambda: MLP(widths=(16,)).build(IMAGE, 4),
    "conv": lambda: FedAvgCNN(padding="same").build(IMAGE, 4),
    "dropout": lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 4)),
}


usercode.vouch("test_local:Normed")


class Normed(nn.Module):
    """A user's module with BatchNorm of both kinds."""

    def __init__(self, shape: tuple[int, ...] = IMAGE, classes: int = 4) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(shape[0], 4, 3), nn.BatchNorm2d(4)
        self.fc, self.again = nn.Linear(4, 8), nn.BatchNorm1d(8)
        self.out = nn.Linear(8, classes)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.norm(self.conv(x))).mean((2, 3))
        out: Tensor = self.out(torch.relu(self.again(self.fc(h))))
        return out


def net_of(name: str) -> nn.Module:
    torch.manual_seed(2)
    return NETS[name]()


def uploads(exp: Experiment, round_: int = 0) -> Outcome:
    """What every client sends after a round from the initial model, in order of clients."""
    state, store = begin(exp), RamStore(exp.federation.clients)
    ids, parts = [], []
    for group in plans(
        exp.local,
        exp.federation.train,
        exp.present(round_).drawn.ids,
        Address(exp.seed, round_),
        lr=exp.local.lr_at(round_, exp.rounds),
        lanes=exp.lanes,
    ):
        with torch.no_grad():
            parts.append(train(exp.algorithm, exp.federation, group, exp.given(state, store, group.ids)))
        ids.append(group.ids)
    outcome: Outcome = tree.take(tree.cat(parts), torch.cat(ids).argsort())
    return outcome


def agree(a: Outcome, b: Outcome, atol: float = 1e-5) -> None:
    for x, y in zip(tree.leaves(a), tree.leaves(b), strict=True):
        assert torch.allclose(x, y, rtol=0, atol=atol), float((x - y).abs().max())


# -- one meaning -----------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("augment", ["none", "flip", "crop_flip"])
def test_loop_is_lanes_on_ragged_clients(name: str, augment: str) -> None:
    fed, net = federation(RAGGED, shape=IMAGE, classes=4, augment=augment), net_of(name)
    loop = uploads(experiment(fed, net, executor="loop", local=LOCAL))
    lanes = uploads(experiment(fed, net, executor="lanes", local=LOCAL))
    assert float(loop.uploads.dw.abs().max()) > 1e-2
    agree(loop, lanes)


@pytest.mark.slow
@pytest.mark.parametrize("lanes", [1, 2, 3, 5])
def test_how_many_train_side_by_side_is_irrelevant(lanes: int) -> None:
    fed, net = federation(RAGGED, shape=IMAGE, classes=4), net_of("mlp")
    agree(uploads(experiment(fed, net, lanes=lanes, local=LOCAL)), uploads(experiment(fed, net, local=LOCAL)))


@pytest.mark.slow
@pytest.mark.parametrize("local", [Local(batch=0, epochs=3), Local(batch=7, drop_last=True), Local(batch=32, steps=5)])
def test_loop_is_lanes_for_other_amounts_of_work(local: Local) -> None:
    fed, net = federation(RAGGED, shape=IMAGE, classes=4), net_of("mlp")
    agree(
        uploads(experiment(fed, net, executor="loop", local=local)),
        uploads(experiment(fed, net, executor="lanes", local=local)),
    )


def by_hand(fed: Federation, net: nn.Module, local: Local, seed: int, client: int, round_: int) -> Tensor:
    """What anybody would write: a module, torch.optim.SGD, and the plan's batches."""
    (group,) = plans(local, fed.train, torch.tensor([client]), Address(seed, round_), lr=local.lr, lanes=1)
    before = torch.cat([p.detach().reshape(-1) for p in net.parameters()])
    sgd = torch.optim.SGD(
        net.parameters(), local.lr, local.momentum, weight_decay=local.weight_decay, nesterov=local.nesterov
    )
    net.train()
    for t in range(group.steps[0]):
        rows = group.rows[0, t][group.mask[0, t] > 0]
        x, y = fed.examples(rows)
        sgd.zero_grad()
        nn.functional.cross_entropy(net(augmented(x, group.keys[0, t], fed.augment)), y).backward()
        if local.clip:
            nn.utils.clip_grad_norm_(net.parameters(), local.clip)
        sgd.step()
    return torch.cat([p.detach().reshape(-1) for p in net.parameters()]) - before


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["loop", "lanes"])
@pytest.mark.parametrize("name", ["logistic", "mlp", "conv"])
def test_a_loop_written_by_hand_sends_the_same(name: str, executor: Any) -> None:
    fed, net = federation(RAGGED, shape=IMAGE, classes=4, augment="crop_flip"), net_of(name)
    got = uploads(experiment(fed, net, executor=executor, local=LOCAL), round_=2)
    for client, size in enumerate(RAGGED):
        want = by_hand(fed, net_of(name), LOCAL, 3, client, 2)
        assert torch.allclose(got.uploads.dw[client], want, rtol=0, atol=1e-5)
        assert float(got.weights[client]) == size


@pytest.mark.slow
def test_a_round_of_fedavg_is_the_mean_of_loops_written_by_hand() -> None:
    fed, net = federation(RAGGED, shape=IMAGE, classes=4), net_of("mlp")
    exp = experiment(fed, net, local=LOCAL)
    state, excluded = advance(exp, begin(exp), RamStore(len(RAGGED)))
    moves = torch.stack([by_hand(fed, net_of("mlp"), LOCAL, 3, c, 0) for c in range(len(RAGGED))]).double()
    share = torch.tensor(RAGGED).double() / sum(RAGGED)
    assert excluded == ()
    assert torch.allclose(state.server.w.double(), exp.task.w0.double() + share @ moves, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm", [FedAvg(), FedAvgFT(epochs=2), LocalOnly(), DPSGD(), DPSGD(order="atc")], ids=repr
)
def test_whole_runs_agree_between_executors(algorithm: Any) -> None:
    fed = federation((3, 40, 1, 17), shape=(5,), holdout=2)
    ends = []
    for executor, lanes in (("loop", 64), ("lanes", 64), ("lanes", 2)):
        torch.manual_seed(2)
        net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
        ring = {"topology": Ring()} if algorithm.family == "gossip" else {}
        exp = experiment(fed, net, algorithm, executor=executor, lanes=lanes, **ring)
        state, store = begin(exp), RamStore(4)
        for _ in range(3):
            state, _ = advance(exp, state, store)
        ends.append((state.server, evaluate(exp, state, store)))
    for server, metrics in ends[1:]:
        agree(server, ends[0][0])
        assert metrics == pytest.approx(ends[0][1], abs=1e-5)


def test_the_loop_takes_one_client_and_lanes_take_many_by_a_fixed_rule() -> None:
    gpu = torch.device("cuda")
    mlp, conv, normed = Task(net_of("mlp")), Task(net_of("conv")), Task(Normed())
    assert choose(mlp, CPU, 10)[0] == "lanes"
    assert choose(mlp, CPU, 1)[0] == "loop"
    assert choose(conv, CPU, 10)[0] == "loop"
    assert choose(conv, gpu, 10)[0] == "lanes"
    assert choose(normed, gpu, 10)[0] == choose(normed, CPU, 10)[0] == "loop"
    lstm, gru = (Task(nn.Sequential(layer(3, 4, batch_first=True))) for layer in (nn.LSTM, nn.GRU))
    assert [choose(lstm, device, 10)[0] for device in (CPU, gpu)] == ["loop", "lanes"]
    assert choose(gru, CPU, 10)[0] == "lanes"
    assert lane_limit(mlp, CPU) == 4096
    assert 1 <= lane_limit(conv, CPU) < lane_limit(conv, gpu) <= 4096


# -- augmentation ----------------------------------------------------------------------------------
def test_augmentation_depends_on_the_key_and_only_moves_pixels() -> None:
    x = torch.rand(6, 3, 8, 8) + 0.1
    flipped = augmented(x, torch.tensor(3), "flip")
    turned = [bool(torch.equal(flipped[k], x[k].flip(-1))) for k in range(6)]
    assert all(t or torch.equal(flipped[k], x[k]) for k, t in enumerate(turned))
    shares = torch.stack([augmented(x, torch.tensor(k), "flip")[0, 0, 0, 0] == x[0, 0, 0, -1] for k in range(400)])
    assert 0.4 < float(shares.double().mean()) < 0.6
    cropped = augmented(x, torch.tensor(3), "crop_flip")
    assert cropped.shape == x.shape
    assert torch.equal(cropped, augmented(x, torch.tensor(3), "crop_flip"))
    assert not torch.equal(cropped, augmented(x, torch.tensor(4), "crop_flip"))
    assert augmented(x, torch.tensor(3), "none") is x
    for k in range(6):  # every pixel comes from the image or is padding
        assert set(cropped[k].reshape(-1).tolist()) <= {0.0, *x[k].reshape(-1).tolist()}


# -- BatchNorm -------------------------------------------------------------------------------------
@pytest.mark.parametrize("buffers", ["average", "local"])
@pytest.mark.parametrize("algorithm", [FedAvg(), LocalOnly(), DPSGD()], ids=lambda a: type(a).__name__)
def test_batch_norm_trains_in_the_loop(algorithm: Any, buffers: Any) -> None:
    fed = federation((12, 40, 25), shape=IMAGE, classes=4, holdout=4)
    torch.manual_seed(0)
    ring = {"topology": Ring()} if algorithm.family == "gossip" else {}
    exp = experiment(fed, Normed(), algorithm, executor="loop", local=Local(batch=10), buffers=buffers, **ring)
    state, store = begin(exp), RamStore(3)
    for _ in range(2):
        state, excluded = advance(exp, state, store)
        assert excluded == ()
    metrics = evaluate(exp, state, store)
    assert all(torch.tensor(v).isfinite() for v in metrics.values())
    assert not torch.equal(state.buffers.reshape(-1, exp.task.buffers0.numel())[0], exp.task.buffers0)


def test_averaged_statistics_are_the_weighted_mean_and_local_ones_stay() -> None:
    fed = federation((12, 40, 25), shape=IMAGE, classes=4)
    torch.manual_seed(0)
    net = Normed()
    averaging = experiment(fed, net, executor="loop", local=Local(batch=10))
    sent = uploads(averaging).buffers.double()  # [3, Q]
    state, _ = advance(averaging, begin(averaging), RamStore(3))
    want = torch.tensor([12, 40, 25]).double() @ sent / 77
    assert torch.allclose(state.buffers.double(), want, atol=1e-6)
    local = experiment(fed, net, executor="loop", local=Local(batch=10), buffers="local")
    store = RamStore(3)
    after, _ = advance(local, begin(local), store)
    kept = local.given(after, store, torch.arange(3)).buffers
    assert torch.allclose(kept.double(), sent, atol=1e-6)
    assert torch.equal(averaging.given(state, RamStore(3), torch.arange(3)).buffers[1], state.buffers)


def test_statistics_in_the_loop_are_those_of_a_plain_module() -> None:
    fed, local = federation((40,), shape=IMAGE, classes=4), Local(batch=10, lr=0.05)
    torch.manual_seed(0)
    net = Normed()
    got = uploads(experiment(fed, net, executor="loop", local=local, cohort=Cohort(sampling="all")))
    moved = by_hand(fed, net, local, 3, 0, 0)
    assert torch.allclose(got.uploads.dw[0], moved, rtol=0, atol=1e-5)
    want = torch.cat([b.reshape(-1) for _, b in net.named_buffers() if b.is_floating_point()])
    assert torch.allclose(got.buffers[0], want, atol=1e-5)


def images(n: int = 120) -> Any:
    rng = torch.Generator().manual_seed(0)
    return from_arrays(torch.randint(0, 256, (n, *IMAGE), generator=rng, dtype=torch.uint8), torch.arange(n) % 4)


def test_lanes_refuse_batch_norm(tmp_path: Any) -> None:
    table = {
        "data": {"source": "in-memory"},
        "model": {"kind": "resnet20", "norm": "batch"},
        "partition": {"clients": 3},
        "engine": {"executor": "lanes"},
    }
    with pytest.raises(ConfigError, match=r"engine\.executor.*BatchNorm"):
        prepare(parse(table), tmp_path, images())


@pytest.mark.slow
@pytest.mark.parametrize("buffers", ["average", "local"])
def test_a_users_module_with_batch_norm_chooses_its_buffers(tmp_path: Any, buffers: str) -> None:
    table = {
        "data": {"source": "in-memory"},
        "model": {"kind": "test_local:Normed", "buffers": buffers},
        "partition": {"clients": 3},
    }
    prepared = prepare(parse(table), tmp_path, images())
    assert prepared.experiment.executor == "loop"
    assert prepared.experiment.buffers == buffers
    assert prepared.experiment.keeps_buffers == (buffers == "local")


def test_a_batch_of_one_that_batch_norm_cannot_normalise_is_refused_by_name() -> None:
    fed = federation((30, 41, 25), shape=IMAGE, classes=4)
    exp = experiment(fed, Normed(), executor="loop", local=Local(batch=10))
    with pytest.raises(ConfigError, match=r"client 1 has a batch of 1.*drop_last"):
        advance(exp, begin(exp), RamStore(3))
    dropping = experiment(fed, Normed(), executor="loop", local=Local(batch=10, drop_last=True))
    assert advance(dropping, begin(dropping), RamStore(3))[1] == ()


def test_without_communication_statistics_stay_with_the_clients(tmp_path: Any) -> None:
    table = {
        "data": {"source": "in-memory"},
        "model": {"kind": "test_local:Normed"},
        "partition": {"clients": 3},
        "algorithm": "local_only",
    }
    exp = prepare(parse(table), tmp_path, images()).experiment
    assert exp.keeps_buffers
