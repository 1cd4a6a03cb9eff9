"""FedRep, FedPer, FedBABU and FedBN against plain loops over clients in PyTorch, and what must never travel."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import Tensor, nn

import fedloom
from fedloom.algorithm import Carry, Model, Setup, Update
from fedloom.algorithm.capabilities import sent_bytes, upload_bytes
from fedloom.algorithms.fedrep import FedRep, Mine, Parts
from fedloom.core.errors import ConfigError
from fedloom.core.optim import sgd
from fedloom.core.task import Batch, Task
from fedloom.engine import laws
from fedloom.engine.evaluate import models_of
from fedloom.engine.rounds import advance, begin
from fedloom.engine.store import RamStore
from fedloom.models.cnn import FedAvgCNN
from fedloom.models.net import Net
from fedloom.runs.settings import parse
from support import shared_laws
from support.personal import run, served
from support.quadratic import RAGGED, hear, vec, work

MLP = {"kind": "mlp", "widths": [5]}
PRESETS = ["fedrep", "fedper", "fedbabu"]


class Normed(nn.Module):
    """A net with its normalisation in the middle, so that what is private does not lie together."""

    def __init__(self, shape: tuple[int, ...], classes: int, norm: str = "group") -> None:
        super().__init__()
        made = {"group": nn.GroupNorm(2, 6), "batch": nn.BatchNorm1d(6), "layer": nn.LayerNorm(6)}[norm]
        self.body = nn.Sequential(nn.Linear(shape[0], 6), made, nn.Tanh(), nn.Linear(6, 5), nn.LayerNorm(5))
        self.head = nn.Linear(5, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(x))
        return logits


def fedrep(world, *args, **table):
    return world(*args, algorithm={"kind": "fedrep", **table.pop("algorithm", {})}, **table)


def lines() -> FedRep:
    """The algorithm on the net w_head (w_body x), without biases."""
    net = nn.Module()
    net.body, net.head = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    return FedRep().bind(Setup(Product(net), sgd()))


class Product(Task):
    """A task with two parameters and the loss 1/2 (w_body w_head x - y)^2 at one example."""

    def grad(self, w: Tensor, batch: Batch) -> Tensor:
        off = w[0] * w[1] * batch.x - batch.y
        return off * batch.x * torch.stack([w[1], w[0]])


class Reference:
    """Clients that train one after another on all of their data, with PyTorch's own optimizers."""

    def __init__(self, exp, is_private, *, momentum: float = 0.0, persist: bool = False) -> None:
        fed, count = exp.federation, exp.federation.clients
        self.nets = [exp.task.module(exp.task.w0, exp.task.buffers0).train() for _ in range(count)]
        start = fed.train.start
        self.data = [fed.examples(fed.train.rows[start[k] : start[k + 1]]) for k in range(count)]
        self.phi = {n: p.detach().clone() for n, p in self.nets[0].named_parameters() if not is_private(n)}
        self.is_private, self.momentum, self.persist, self.lr = is_private, momentum, persist, exp.local.lr
        self.optimizers = [self.fresh(net) for net in self.nets]

    def fresh(self, net: nn.Module) -> dict[str, torch.optim.Optimizer]:
        named = dict(net.named_parameters())
        h = [p for n, p in named.items() if self.is_private(n)]
        phi = [p for n, p in named.items() if not self.is_private(n)]
        groups = {"h": h, "phi": phi, "both": list(named.values())}
        return {name: torch.optim.SGD(part, self.lr, momentum=self.momentum) for name, part in groups.items()}

    def download(self, net: nn.Module) -> None:
        with torch.no_grad():
            for name, p in net.named_parameters():
                if name in self.phi:
                    p.copy_(self.phi[name])

    def round(self, *work: str) -> None:
        """One round, in which every client trains these parts one after another."""
        moved = []
        for k, (net, (x, y)) in enumerate(zip(self.nets, self.data, strict=True)):
            self.download(net)
            if not self.persist:
                self.optimizers[k] = self.fresh(net)
            for name in work:
                net.zero_grad()
                nn.functional.cross_entropy(net(x), y).backward()
                self.optimizers[k][name].step()
            moved.append({n: p.detach().clone() for n, p in net.named_parameters() if n in self.phi})
        sizes = [len(y) for _, y in self.data]
        for name in self.phi:
            self.phi[name] = sum(n * m[name] for n, m in zip(sizes, moved, strict=True)) / sum(sizes)

    def served(self) -> Tensor:
        for net in self.nets:
            self.download(net)
        return torch.stack([nn.utils.parameters_to_vector(net.parameters()).detach() for net in self.nets])


def is_head(name: str) -> bool:
    return name.startswith("head.")


def is_norm(name: str) -> bool:
    return name.startswith(("body.1.", "body.4."))


def test_hand_worked_numbers() -> None:
    # net w_head w_body x at x = 1, y = 4;  phi = 1, h = 2, lr 1/4
    # head:  h = 2 - 1/4 (2 - 4) 1 = 5/2;   then body:  phi = 1 - 1/4 (5/2 - 4) 5/2 = 1 + 15/16 = 31/16
    alg, zero = lines(), torch.zeros(())
    batch = Batch(vec(1)[0], vec(4)[0], torch.ones(1), zero.long(), zero, zero + 0.25, zero[None])
    down, mine = Model(vec(1)), Mine(vec(2))
    x = alg.start(down, mine, work())
    at = Carry(x, alg.memory(x))
    at = alg.head_step(at, batch, down, mine)
    assert at.x == Parts(vec(1), vec(2.5))
    at = alg.step(at, batch, down, mine)
    assert at.x == Parts(vec(31 / 16), vec(2.5))
    upload, kept = alg.finish(at.x, down, mine, work(examples=3))
    assert (upload.dw.item(), kept.h.item(), alg.weight(upload, work(examples=3))) == (15 / 16, 2.5, 3)
    assert alg.serve(down, kept).tolist() == [1, 2.5]  # the body that was received, not the one that was uploaded
    # moves 1 and 5 with 1 and 3 examples, half of their mean of 4
    heard = hear(Update(vec(1, 5)[:, None]), vec(1, 3))
    assert FedRep(server_lr=0.5).update(Model(vec(10)), heard).w.item() == 12
    assert FedRep(weighting="uniform").weight(upload, work(examples=3)) == 1


STEPS = {"fedrep": ("h", "h", "phi", "phi", "phi"), "fedper": ("both",) * 3, "fedbabu": ("phi",) * 3}


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["lanes", "loop"])
@pytest.mark.parametrize("optimizer", [{}, {"momentum": 0.7}, {"momentum": 0.7, "state": "persist"}])
@pytest.mark.parametrize("preset", PRESETS)
def test_it_is_what_a_plain_loop_over_clients_does(world, preset, optimizer, executor) -> None:
    local = {"batch": 0, "lr": 0.2, "epochs": 3} | optimizer
    algorithm = {"preset": preset} | ({} if preset == "fedper" else {"head_epochs": 2})
    exp = fedrep(world, algorithm=algorithm, model=MLP, local=local, engine={"executor": executor})
    state, store = begin(exp), RamStore(3)
    plain = Reference(exp, is_head, momentum=local.get("momentum", 0.0), persist="state" in local)
    for _ in range(3):
        state, _ = advance(exp, state, store)
        plain.round(*STEPS[preset])
    given = exp.given(state, store, torch.arange(3))
    found = torch.stack([exp.algorithm.serve(given.down, Mine(h)) for h in given.mine.h])
    torch.testing.assert_close(found, plain.served(), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["group", "batch"])
def test_fedbn_is_what_a_plain_loop_over_clients_does(world, norm) -> None:
    """Weights of normalisation stay with the client, and so do BatchNorm's statistics where they are local."""
    net = {"kind": "test_fedrep:Normed", "norm": norm} | ({"buffers": "local"} if norm == "batch" else {})
    exp = fedrep(world, algorithm={"preset": "fedbn"}, model=net, local={"batch": 0, "lr": 0.2, "epochs": 2})
    state, store = begin(exp), RamStore(3)
    plain = Reference(exp, is_norm)
    for _ in range(3):
        state, _ = advance(exp, state, store)
        plain.round("both", "both")
    parts = list(models_of(exp, state, store, torch.arange(3)))
    torch.testing.assert_close(torch.cat([p.w for p in parts]), plain.served(), rtol=1e-4, atol=1e-5)
    if norm == "batch":
        kept = torch.stack([torch.cat([n.body[1].running_mean, n.body[1].running_var]) for n in plain.nets])
        torch.testing.assert_close(torch.cat([p.buffers for p in parts]), kept, rtol=1e-4, atol=1e-5)
        assert state.up == 3 * 3 * 4 * len(state.server.w)  # nor are they sent


@pytest.mark.parametrize("preset", PRESETS)
def test_the_head_never_travels(world, preset) -> None:
    exp = fedrep(world, algorithm={"preset": preset}, model=MLP, local=RAGGED)
    state, _ = run(exp, 2)
    head = 5 * 3 + 3
    assert len(state.server.w) == exp.task.size - head
    assert state.up == state.down == 2 * 3 * 4 * (exp.task.size - head)
    # what a client uploads does not hold its head, whatever that is
    alg, down = exp.algorithm, exp.algorithm.send(state.server)
    x = Parts(down.w + 1, torch.full((head,), float("nan")))
    upload, kept = alg.finish(x, down, alg.join(down), work())
    assert torch.equal(upload.dw, x.phi - down.w)
    assert kept.h is x.h


@pytest.mark.parametrize(("shape", "sent"), [((1, 28, 28), 2_307_584), ((3, 32, 32), 3_493_632)])
def test_bytes_of_the_published_cnn(shape, sent) -> None:
    task = Task(FedAvgCNN().net(shape, 10))
    alg = FedRep().bind(Setup(task, sgd()))
    down = alg.send(alg.init(task.w0))
    assert sent_bytes(alg, down) == sent
    upload, _ = alg.finish(alg.start(down, alg.join(down), work()), down, alg.join(down), work())
    assert upload_bytes(alg, upload) == sent


@pytest.mark.parametrize("preset", ["fedrep", "fedper"])
def test_after_a_download_bodies_are_equal_and_heads_are_not(world, preset) -> None:
    exp = fedrep(world, algorithm={"preset": preset}, model=MLP, local=RAGGED)
    state, w = run(exp, 2)
    body, head = exp.task.mask("body.") > 0, exp.task.mask("head.") > 0
    assert torch.equal(w[:, body], state.server.w.expand(3, -1))
    assert all(not torch.equal(w[i, head], w[j, head]) for i, j in ((0, 1), (0, 2), (1, 2)))


@pytest.mark.parametrize("private", ["head", "norm", "named"])
def test_parts_put_together_are_the_whole(private) -> None:
    torch.manual_seed(0)
    task = Task(Normed((4,), 3))
    alg = FedRep(private=private, names=("body.3.",)).bind(Setup(task, sgd()))
    down = alg.init(task.w0)
    assert torch.equal(alg.serve(down, alg.join(down)), task.w0)
    prefixes = {"head": ("head.",), "norm": ("body.1.", "body.4."), "named": ()}[private]
    stays = task.mask(*prefixes, "body.3.") > 0
    assert torch.equal(task.w0[stays], alg.join(down).h)
    assert torch.equal(task.w0[~stays], down.w)


def test_a_client_alone_with_both_parts_trained_together_is_local_training(world) -> None:
    """With one client there is nobody to share with, and the two parts move as one vector."""
    local = RAGGED | {"momentum": 0.5, "clip": 0.5, "weight_decay": 0.01}
    ours = fedrep(world, (9,), algorithm={"preset": "fedper"}, model=MLP, local=local)
    theirs = world((9,), algorithm="local_only", model=MLP, local=local)
    torch.testing.assert_close(run(ours, 3)[1], run(theirs, 3)[1], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_what_is_frozen_does_not_move_even_under_decay_and_momentum(world) -> None:
    local = RAGGED | {"momentum": 0.9, "weight_decay": 0.1, "state": "persist"}
    exp = fedrep(world, algorithm={"preset": "fedbabu"}, model=MLP, local=local)
    state, store = begin(exp), RamStore(3)
    for _ in range(3):
        state, _ = advance(exp, state, store)
    h = exp.given(state, store, torch.arange(3)).mine.h
    assert torch.equal(h, exp.task.w0[exp.algorithm.layout.h].expand(3, -1))
    # before it predicts, a client trains the head on a copy, and leaves the body alone
    w = served(exp, state, store)
    body, head = exp.task.mask("body.") > 0, exp.task.mask("head.") > 0
    assert torch.equal(w[:, body], state.server.w.expand(3, -1))
    assert (w[:, head] != h).any(1).all()
    assert torch.equal(w, served(exp, state, store))  # the copy is thrown away


def test_head_epochs_of_fedbabu_are_plain_training_of_the_head(world) -> None:
    exp = fedrep(world, algorithm={"preset": "fedbabu", "head_epochs": 3}, model=MLP, local={"batch": 0, "lr": 0.2})
    plain = Reference(exp, is_head)
    plain.round("h", "h", "h")
    torch.testing.assert_close(served(exp, begin(exp), RamStore(3)), plain.served(), rtol=1e-5, atol=1e-6)


def test_when_a_model_is_evaluated() -> None:
    assert [FedRep(preset=preset).traits.served for preset in PRESETS] == ["pre_fit", "pre_fit", "post_fit"]


@pytest.mark.slow
def test_who_does_not_take_part_keeps_its_head_and_a_late_joiner_gets_the_newest_body(world) -> None:
    exp = fedrep(world, model=MLP, local=RAGGED, cohort={"size": 1})
    state, store = begin(exp), RamStore(3)
    ids, seen = torch.arange(3), set()
    first = exp.task.w0[exp.algorithm.layout.h]
    before = exp.given(state, store, ids).mine.h
    for _ in range(8):
        now = exp.present(state.round).drawn.ids.tolist()
        state, _ = advance(exp, state, store)
        seen.update(now)
        given = exp.given(state, store, ids)
        for i in range(3):
            assert torch.equal(given.mine.h[i], before[i]) == (i not in now)
            if i not in seen:
                assert torch.equal(given.mine.h[i], first)
                assert torch.equal(exp.algorithm.start(given.down, Mine(first), work()).phi, state.server.w)
        before = given.mine.h
    assert seen == {0, 1, 2}


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("executor", ["lanes", "loop"])
def test_a_client_with_one_example_learns_it(world, executor, preset) -> None:
    algorithm = {"preset": preset} | ({} if preset == "fedper" else {"head_epochs": 3})
    exp = fedrep(world, (1, 12, 7), algorithm=algorithm, model=MLP, local=RAGGED, engine={"executor": executor})
    _, w = run(exp, 6)
    x, y = exp.federation.examples(exp.federation.train.rows[:1])
    assert exp.task.apply(w[0], x, exp.task.buffers0).argmax(1) == y


def test_presets_are_methods_that_other_settings_must_not_contradict() -> None:
    read = lambda **table: (FedRep(**table).private, FedRep(**table).schedule)  # noqa: E731
    assert read() == read(preset="fedrep") == ("head", "alternate")
    assert read(preset="fedper") == ("head", "together")
    assert read(preset="fedbabu") == ("head", "body")
    assert (FedRep(preset="fedbabu").head_epochs, FedRep(preset="fedbabu", head_epochs=2).head_epochs) == (5, 2)
    assert read(preset="fedbn") == ("norm", "together")
    assert read(private="norm") == read(preset="fedrep", private="norm") == ("norm", "alternate")
    with pytest.raises(ConfigError, match=r"preset = 'fedbn' is schedule = 'together' \(got 'alternate'\)"):
        FedRep(preset="fedbn", schedule="alternate")
    with pytest.raises(ConfigError, match=r"preset = 'fedper' is private = 'head' \(got 'norm'\)"):
        FedRep(preset="fedper", private="norm")


@pytest.mark.parametrize(
    ("net", "settings", "place", "match"),
    [
        (nn.Linear(4, 3), {}, "algorithm.private", "no part called 'head'"),
        (Net(nn.Linear(4, 5), 5, 3), {"preset": "fedbn"}, "algorithm.private", "no normalisation"),
        (Net(nn.Flatten(), 4, 3), {}, "algorithm.private", "nothing would be shared"),
        (Net(nn.Linear(4, 5), 5, 3), {"names": ("boby.",)}, "algorithm.names", "begins with 'boby.'"),
        (Net(nn.Linear(4, 5), 5, 3), {"names": ("body.",)}, "algorithm.private", "all 43 parameters"),
        (nn.Linear(4, 3), {"names": ("tail",)}, "algorithm.names", "'tail'"),
    ],
)
def test_a_net_that_cannot_be_divided_so_is_refused(net, settings, place, match) -> None:
    with pytest.raises(ConfigError, match=match) as error:
        FedRep(**settings).bind(Setup(Task(net), sgd()))
    assert place in [fault.where for fault in error.value.faults]


@pytest.mark.parametrize(
    ("table", "match"),
    [
        ({"algorithm": {"kind": "fedrep", "private": "named"}}, "names"),
        ({"algorithm": {"kind": "fedrep", "head_epochs": 0}}, "head_epochs"),
        ({"algorithm": {"kind": "fedrep", "preset": "fedfoo"}}, "preset"),
        ({"algorithm": "fedrep", "cohort": {"sampling": "proportional"}}, "sampling"),
    ],
)
def test_what_its_definition_excludes_is_refused(table, match) -> None:
    with pytest.raises(ConfigError, match=match):
        parse(table)


def test_names_of_a_users_own_come_from_a_list() -> None:
    table = {"algorithm": {"kind": "fedrep", "private": "named", "names": ["body.fc1.", "head.bias"]}}
    assert parse(table).algorithm.names == ("body.fc1.", "head.bias")


class FedPer(FedRep):
    schedule: Literal["alternate", "together", "body"] = "together"


class FedBABU(FedRep):
    schedule: Literal["alternate", "together", "body"] = "body"


class Scattered(FedRep):
    """What is private does not lie together."""

    private: Literal["head", "norm", "named"] = "named"
    names: tuple[str, ...] = ("body.0.bias", "head.weight")


@pytest.mark.slow
@pytest.mark.usefixtures("shared_laws")
@shared_laws.EVERY
@pytest.mark.parametrize("cls", [FedPer, FedBABU, Scattered])
def test_its_kin_obey_the_laws(cls, law) -> None:
    """FedPer with private norms is FedBN, whatever its name: there the preset has no effect."""
    if cls is FedPer and law is shared_laws.settings_have_an_effect:
        assert not laws._is_felt(FedPer, "preset", {"private": "norm"}, {})
    else:
        assert laws.verdict(law, cls) == ""


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS)
def test_it_learns_digits_of_which_each_client_has_four(preset) -> None:
    history = fedloom.run(
        {"kind": "fedrep", "preset": preset},
        rounds=5,
        seed=1,
        partition={"kind": "pathological", "clients": 10, "per_client": 4, "holdout": 0.25},
        evaluate={"every": 5},
    )
    point = FedRep(preset=preset).traits.served
    assert history.summary[f"personal/{point}/test/accuracy"].last > 0.93
    assert history.model is None  # nobody holds a common one
    assert not any(name.startswith("global/") for name in history.summary)
