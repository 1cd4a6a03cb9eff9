"""fedloom from Python: data in any form, algorithms by name, class or object, and a history that answers."""

from __future__ import annotations

import importlib
import json
import random
import re
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import fedloom
from fedloom import FedAvg, History, Model, Update
from fedloom.algorithms.fedopt import FedOpt
from fedloom.algorithms.fedprox import FedProx
from fedloom.core.errors import CheckpointError, ConfigError, DataError
from fedloom.data.handed import from_anything
from fedloom.data.sources import Digits, from_arrays
from fedloom.runs.in_memory import GivenNet, as_arrays
from fedloom.runs.prepare import prepare
from fedloom.runs.settings import parse
from support import warm
from support.terminal import environment, files

SMALL: dict[str, Any] = {"model": "logistic", "partition": {"clients": 5}, "cohort": {"size": 3}}
PLAIN = {"curves": False}  # a picture takes longer than most runs here
SMALL["checkpoint"] = PLAIN


@pytest.fixture(autouse=True)
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def blobs(n: int = 200, seed: int = 0) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 3, n)
    return (rng.normal(size=(n, 4)) + 2 * y[:, None]).astype(np.float32), y


def test_a_short_run_imports_only_what_it_needs() -> None:
    """Each of these takes longer to import than a round takes to compute, torch's compiler longer than the run."""
    code = """
import sys, fedloom
fedloom.run(rounds=1, engine={"executor": "lanes"})
print({"torch._dynamo", "networkx", "scipy", "sklearn", "pandas", "matplotlib"} & set(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


# -- what comes back -------------------------------------------------------------------------------
def test_the_promised_call(desk: Path) -> None:
    torch.manual_seed(3)
    random_state = torch.random.get_rng_state()
    history = fedloom.run("fedavg", data="digits", rounds=3, seed=1)
    assert torch.equal(random_state, torch.random.get_rng_state())
    assert isinstance(history, History)
    assert (history.algorithm, history.rounds, history.run_dir) == ("fedavg", 3, None)
    assert history.seconds > 0
    assert files(desk) == set()
    again = fedloom.run("fedavg", data="digits", rounds=3, seed=1)
    assert again.records == history.records
    assert fedloom.run("fedavg", data="digits", rounds=3, seed=2).records != history.records


@pytest.fixture(scope="module")
def history() -> History:
    return fedloom.run("fedavg", rounds=4, seed=1, **SMALL)


def test_metrics_are_a_table(history: History) -> None:
    table = history.metrics
    assert len(table) == 5
    assert table["round"].tolist() == [0, 1, 2, 3, 4]
    assert "global/test/accuracy" in table
    assert list(table) == table.columns
    assert table.row(-1)["global/test/loss"] == history.records[-1]["global/test/loss"]
    frame = table.to_pandas()
    assert frame.shape == (5, len(table.columns))
    assert frame["global/test/accuracy"].iloc[-1] == table["global/test/accuracy"][-1]
    assert "5 rows" in repr(table)
    with pytest.raises(KeyError, match=r"no column 'accuracy' \(there are: round, global/test/accuracy"):
        table["accuracy"]


def test_the_summary_lists_its_metrics(history: History) -> None:
    with pytest.raises(KeyError, match=r"no metric 'accuracy' \(there are: global/test/accuracy"):
        history.summary["accuracy"]


@pytest.mark.parametrize(
    ("algorithm", "given", "fix"),
    [
        ("fedprox", {"mu": 1.0}, "write fedloom.run({'kind': 'fedprox', 'mu': 1.0})"),
        ({"kind": "fedprox"}, {"mu": 1.0}, "write fedloom.run({'kind': 'fedprox', 'mu': 1.0})"),
        (FedProx(), {"mu": 1.0}, "write FedProx(mu=1.0)"),
        ("fedavg", {"lr": 0.1}, "write local={'lr': 0.1}"),
        ("fedavg", {"clients": 3}, "write partition={'clients': 3}"),
    ],
)
def test_a_bare_setting_gets_the_words_for_python(algorithm: Any, given: Any, fix: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(fix)):
        fedloom.run(algorithm, **given)


def test_a_wrong_setting_of_a_method_is_said_in_words() -> None:
    with pytest.raises(ConfigError, match=r"FedProx.mmu: unknown key \(got 2.0\) \(did you mean 'mu'\?\)$"):
        FedProx(mmu=2.0)  # type: ignore[call-arg]


def test_the_summary_says_last_best_and_mean(history: History) -> None:
    got = history.summary["global/test/loss"]
    trained = history.metrics["global/test/loss"][1:]
    assert got.last == trained[-1]
    assert got.best == trained.min()
    assert got.mean_last_10 == pytest.approx(trained.mean())
    assert "round" not in history.summary
    as_json = history.as_json()
    assert as_json["run_dir"] is None
    assert json.loads(json.dumps(as_json)) == as_json


def test_plots_are_figures_and_files(history: History, desk: Path) -> None:
    figure = history.plot()
    assert isinstance(figure, Figure)
    assert [axis.get_ylabel() for axis in figure.axes] == ["accuracy", "loss"]
    asked = fedloom.run(rounds=1, evaluate={"diagnostics": ["updates", "gamma"]}, **SMALL).plot()
    assert [axis.get_ylabel() for axis in asked.axes if axis.axison] == [
        "accuracy",
        "loss",
        "updates",
        "server",
        "gamma",
    ]
    for name in ("curves.png", "again.png", "curves.svg"):
        history.plot(desk / name)
    assert (desk / "curves.png").read_bytes() == (desk / "again.png").read_bytes()
    assert files(desk) == {"curves.png", "again.png", "curves.svg"}


def test_the_model_is_the_one_that_was_evaluated(history: History, desk: Path) -> None:
    assert isinstance(history.model, nn.Module)
    assert not history.model.training
    digits = Digits().load(desk, 1)
    x = torch.from_numpy(digits.x[digits.test]).float() / 255
    logits = history.model((x - digits.mean[0]) / digits.std[0])
    accuracy = float((logits.argmax(1).numpy() == digits.y[digits.test]).mean())
    assert accuracy == pytest.approx(history.records[-1]["global/test/accuracy"])


def test_where_every_client_has_its_own_model_there_is_no_common_one() -> None:
    history = fedloom.run("local_only", rounds=1, **SMALL)
    assert history.model is None
    assert "personal/post_fit/test/accuracy" in history.metrics
    assert not any(name.startswith("global/") for name in history.metrics)


def test_a_network_returns_the_average_of_its_nodes() -> None:
    history = fedloom.run("dpsgd", rounds=2, model="logistic", partition={"clients": 4}, topology="full")
    assert isinstance(history.model, nn.Module)
    assert {"consensus/test/accuracy", "consensus/distance", "nodes/test/accuracy"} <= set(history.metrics)


# -- data ------------------------------------------------------------------------------------------
class Squares(Dataset[tuple[Tensor, int]]):
    def __init__(self) -> None:
        self.x, self.y = blobs()

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.from_numpy(self.x[index]), int(self.y[index])


def test_the_same_data_in_every_form_gives_the_same_run(desk: Path) -> None:
    x, y = blobs()
    np.savez(desk / "own.npz", x=x, y=y)
    forms: dict[str, Any] = {
        "numpy": (x, y),
        "torch": (torch.from_numpy(x), torch.from_numpy(y)),
        "arrays": from_arrays(x, y, seed=3),
        "dataset": Squares(),
        "tensor dataset": TensorDataset(torch.from_numpy(x), torch.from_numpy(y)),
        "path": str(desk / "own.npz"),
        "table": {"source": "npz", "path": "own.npz"},
    }
    runs = {name: fedloom.run("fedavg", data=data, rounds=2, seed=3, **SMALL) for name, data in forms.items()}
    for name, history in runs.items():
        assert history.records == runs["numpy"].records, name


def test_data_that_is_nonsense_is_refused() -> None:
    x, y = blobs()
    for data, error in (
        ((x, y[:-1]), DataError),
        ((x * np.nan, y), DataError),
        ("nothing", ConfigError),
        ("./nothing.csv", DataError),
        ({"source": "digits", "tset": 0.1}, ConfigError),
        (3, ConfigError),
    ):
        with pytest.raises(error):
            fedloom.run("fedavg", data=data, rounds=1, **SMALL)


# -- algorithms ------------------------------------------------------------------------------------
class HalfStep(FedAvg):
    """FedAvg that takes a share of the mean update."""

    share: float = 0.5

    def update(self, server: Model, inbox: Any) -> Model:
        return Model(server.w + (self.share * inbox.mean.dw).to(server.w.dtype))


def test_an_algorithm_by_name_table_class_and_object() -> None:
    named = fedloom.run("fedopt", rounds=2, **SMALL)
    assert fedloom.run({"kind": "fedopt"}, rounds=2, **SMALL).records == named.records
    assert fedloom.run(FedOpt, rounds=2, **SMALL).records == named.records
    assert fedloom.run(FedOpt(), rounds=2, **SMALL).records == named.records
    other = fedloom.run(FedOpt(rule="yogi"), rounds=2, **SMALL)
    assert other.records != named.records
    assert fedloom.run({"kind": "fedopt", "rule": "yogi"}, rounds=2, **SMALL).records == other.records


def test_an_algorithm_of_ones_own() -> None:
    plain = fedloom.run("fedavg", rounds=2, **SMALL)
    assert fedloom.run(HalfStep(share=1.0), rounds=2, **SMALL).records == plain.records
    assert fedloom.run(HalfStep, rounds=2, **SMALL).records != plain.records


def test_an_algorithm_defined_where_no_name_reaches_it() -> None:
    class Inner(FedAvg):
        def finish(self, x: Tensor, down: Model, mine: Any, work: Any) -> Any:
            return Update(x - down.w), ()

    plain = fedloom.run("fedavg", rounds=2, **SMALL)
    assert fedloom.run(Inner(), rounds=2, **SMALL).records == plain.records
    assert fedloom.run(Inner, rounds=2, **SMALL).records == plain.records


# -- run folders -----------------------------------------------------------------------------------
def test_a_run_folder_is_written_and_resumed(desk: Path) -> None:
    whole = fedloom.run("fedavg", rounds=4, out=desk / "whole", **SMALL)
    assert whole.run_dir == desk / "whole"
    short = fedloom.run("fedavg", rounds=2, out="short", **SMALL)
    assert short.rounds == 2
    longer = fedloom.resume("short", rounds=4)
    assert longer.records == whole.records
    for name in ("metrics.jsonl", "model.safetensors"):
        assert (desk / "short" / name).read_bytes() == (desk / "whole" / name).read_bytes()


def message_bytes(kind: str) -> Any:
    """What a run folder says that a client is sent and sends, of digits and a logistic net: 64 inputs, 10 classes."""
    fedloom.run(kind, rounds=1, model="logistic", partition={"clients": 5}, checkpoint=PLAIN, out=kind)
    return json.loads(Path(kind, "environment.json").read_text())["message_bytes"]


def test_the_run_folder_says_what_a_message_is_made_of() -> None:
    net = 4 * (64 * 10 + 10)
    assert message_bytes("fedavg") == {"down": {"float32": net}, "up": {"float32": net}}
    sums = message_bytes("analytic")
    assert sums["down"]["float32"] == net
    assert sums["up"] == {"float64": 8 * (64 * 65 // 2 + 64 * 10 + 10)}  # half of G, B, and the examples of each class
    assert message_bytes("dpsgd") == {"down": {}, "up": {"float32": net}}  # of one node to another
    assert message_bytes("proxy_ridge") == {"down": {"float32": net}, "up": {}}
    assert message_bytes("local_only") == {}


def test_data_that_was_handed_over_is_handed_over_again(desk: Path) -> None:
    data = blobs()
    fedloom.run("fedavg", data=data, rounds=2, out="r", **SMALL)
    with pytest.raises(CheckpointError, match=r"its data was passed in Python.*fedloom\.resume\(run_dir, data="):
        fedloom.resume("r", rounds=3)
    with pytest.raises(CheckpointError, match="the data has changed since this run began"):
        fedloom.resume("r", data=blobs(seed=1), rounds=3)
    assert fedloom.resume("r", data=data, rounds=3).rounds == 3


def test_an_existing_folder_is_refused(desk: Path) -> None:
    (desk / "r").mkdir()
    (desk / "r" / "thesis.tex").write_text("do not lose me")
    with pytest.raises(ConfigError, match="already exists"):
        fedloom.run("fedavg", rounds=1, out="r", **SMALL)
    assert files(desk / "r") == {"thesis.tex"}


# -- the rest --------------------------------------------------------------------------------------
def test_faults_come_all_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        fedloom.run("fedvag", rounds=0, locall={}, local={"lr": -1, "epoch": 3})
    assert {fault.where for fault in caught.value.faults} == {
        "algorithm.kind",
        "rounds",
        "locall",
        "local.lr",
        "local.epoch",
    }


def test_a_run_in_another_thread(history: History) -> None:
    """Signals can only be handled in the main thread: a notebook's worker must do without."""
    found: list[History] = []
    worker = threading.Thread(target=lambda: found.append(fedloom.run("fedavg", rounds=4, seed=1, **SMALL)))
    worker.start()
    worker.join(timeout=600)
    assert found[0].records == history.records


class Ears:
    """A listener that remembers."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def started(self, prepared: Any, folder: Path | None, done: int) -> None:
        self.heard.append(("started", done))

    def advanced(self, progress: Any) -> None:
        self.heard.append((progress.round, progress.clients))

    def stopping(self) -> None:
        raise AssertionError


def test_a_listener_hears_every_round() -> None:
    ears = Ears()
    fedloom.run("fedavg", rounds=3, listener=ears, **SMALL)
    assert ears.heard == [("started", 0), (1, 3), (2, 3), (3, 3)]


def test_public_names_are_there_and_others_are_not() -> None:
    for name in fedloom.__all__:
        assert getattr(fedloom, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        fedloom.nonsense  # noqa: B018


# -- data and nets as Python has them ----------------------------------------------------------------
def parts(clients: int = 3) -> list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
    return [blobs(40 + 10 * k, seed=k) for k in range(clients)]


def as_set(part: tuple[Any, Any]) -> TensorDataset:
    return TensorDataset(torch.from_numpy(part[0]), torch.from_numpy(part[1]))


def test_data_in_every_form_that_people_have() -> None:
    x, y = (np.concatenate(column) for column in zip(*parts(), strict=True))
    client = np.repeat(["0", "1", "2"], [40, 50, 60])
    by_list = from_anything([as_set(part) for part in parts()])
    for same in (
        from_anything({str(k): part for k, part in enumerate(parts())}),
        from_anything((x, y, client)),
        from_anything({"x": x, "y": y, "client": client}),
    ):
        assert same.clients == by_list.clients == ("0", "1", "2")
        assert np.array_equal(same.x, by_list.x)
        assert np.array_equal(same.test, by_list.test)
    for given in ((x, y), {"x": x, "y": y}):  # what a loader of this name returned, or what was passed in Python
        assert [from_anything(given, name=name).name for name in ("mine.py:load", "data")] == ["mine.py:load", "arrays"]
    train, test = parts(2)
    split = from_anything((as_set(train), as_set(test)))
    assert split.test.tolist() == [False] * 40 + [True] * 50
    done = fedloom.run(data=parts(), rounds=1, model="logistic", cohort={"size": 3})
    assert done.records[-1]["bytes/up"] > 0
    with pytest.raises(DataError, match="unknown key 'clients'"):
        from_anything({"x": x, "y": y, "clients": client})
    far = from_anything((x * [1, 1, 1, 5000], y))
    assert "standardise" in far.notes[0]
    scaled = from_anything({"x": x * [1, 1, 1, 5000], "y": y, "standardise": True})
    assert scaled.notes == ()
    assert scaled.std[3] > 1000


def test_a_frame_is_data() -> None:
    pd = pytest.importorskip("pandas")
    x, y = blobs(90)
    frame = pd.DataFrame(x, columns=list("abcd")).assign(kind=y, site=np.repeat(["n", "s", "w"], 30))
    data = {"frame": frame, "label": "kind", "client": "site"}
    done = fedloom.run(data=data, rounds=1, model="logistic", out="runs/frame", cohort={"size": 3})
    assert done.run_dir is not None
    models = fedloom.load(done.run_dir)
    assert models.clients == ("n", "s", "w")
    assert set(models.predict(frame)) <= {0, 1, 2}
    with pytest.raises(DataError, match="has no column 'label'"):
        fedloom.run(data=frame, rounds=1)


class TwoLayers(nn.Module):
    """A net as a user writes it, whose sizes are its own."""

    def __init__(self, outputs: int = 3) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, outputs))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


def test_a_net_is_handed_over() -> None:
    few = {"data": blobs(), "partition": {"clients": 4}, "cohort": {"size": 2}, "rounds": 2, "checkpoint": PLAIN}
    by_class = fedloom.run(model=TwoLayers, **few)
    assert isinstance(by_class.model, TwoLayers)
    net = TwoLayers()
    before = net.layers[0].weight.detach().clone()
    done = fedloom.run(model=net, out="runs/net", **few)
    assert torch.equal(net.layers[0].weight, before)  # the user's net stays as it is
    with pytest.raises(ConfigError, match=r"passed in Python.*model=\.\.\."):
        fedloom.load("runs/net")
    assert done.model is not None
    found = fedloom.load("runs/net", model=TwoLayers()).module.net
    assert torch.equal(found.layers[0].weight, done.model.layers[0].weight)
    longer = fedloom.resume("runs/net", data=few["data"], model=net, rounds=3)
    assert longer.rounds == 3
    with pytest.raises(ConfigError, match=r"returns \[2, 5\] for inputs of shape \[2, 4\] .*return \[batch, 3\]"):
        fedloom.run(model=TwoLayers(5), **few)
    with pytest.raises(ConfigError, match=r"fails for inputs of shape \[2, 4\]: RuntimeError: "):
        fedloom.run(model=nn.Linear(7, 3), **few)
    lazy = nn.Sequential(nn.LazyLinear(6), nn.ReLU(), nn.LazyLinear(3))  # which learns its sizes from the data
    trained = fedloom.run(model=lazy, **few).model
    assert isinstance(trained, nn.Sequential)
    assert trained[0].weight.shape == (6, 4)


def test_a_net_for_numbers_has_one_output() -> None:
    x, _ = blobs()
    few = {"data": (x, x.sum(1)), "task": "regression", "partition": {"clients": 4}, "rounds": 1}
    fedloom.run(model=TwoLayers(1), **few)
    with pytest.raises(ConfigError, match=r"returns \[2, 3\] .*return \[batch, 1\], one number for each row"):
        fedloom.run(model=TwoLayers(3), **few)


class Counting(nn.Module):
    """A net that changes whenever it is called: its statistics and its count."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layers, self.calls = nn.BatchNorm1d(4), TwoLayers(), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = self.layers(self.norm(x))
        return out


def test_another_default_dtype_is_refused() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(ConfigError, match=r"torch's default dtype: is torch\.float64.*set_default_dtype"):
            fedloom.run(data=blobs(), rounds=1, **SMALL)
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_comparison_takes_numpys_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    compared = importlib.import_module("fedloom.compare.run")
    monkeypatch.setattr(compared, "run", lambda table, *_, **__: asked.append(table["compare"]))
    for seeds in (np.int64(2), np.arange(2), [np.int64(0), np.int64(1)]):
        fedloom.compare("fedavg", seeds=seeds, grid={"local.epochs": np.arange(1, 3)}, progress=False)
    assert [each["seeds"] for each in asked] == [2, [0, 1], [0, 1]]
    assert all(type(value) is int for each in asked for value in each["grid"]["local.epochs"])


class Words(nn.Module):
    """A net that looks up its inputs, which are numbers of words."""

    def __init__(self) -> None:
        super().__init__()
        self.look_up, self.last = nn.Embedding(20, 2), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.look_up(x).flatten(1))
        return out


def test_a_net_of_words_is_told_that_inputs_are_floats() -> None:
    with pytest.raises(ConfigError, match=r"inputs reach a net as float32: write x.long\(\)"):
        fedloom.run(data=blobs(), rounds=1, **(SMALL | {"model": Words()}))


class Drawing(TwoLayers):
    """A net that draws from a generator that no seed of a run sets."""

    def __init__(self, draw: Any) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.draw(self, x))


@pytest.mark.parametrize(
    ("draw", "told"),
    [
        (lambda net, x: nn.functional.dropout(x, 0.3, net.training), "torch's hidden generator in training"),
        (lambda _, x: x + 0 * torch.randn_like(x), "torch's hidden generator, so"),
        (lambda _, x: x + 0 * float(np.random.rand()), "NumPy's hidden generator"),
        (lambda _, x: x * random.choice([1, 2]), "Python's hidden generator"),
    ],
    ids=["dropout", "randn", "numpy", "python"],
)
def test_a_net_that_draws_from_a_hidden_generator_is_refused(draw: Any, told: str) -> None:
    """Its runs would differ although they have one seed."""
    net = Drawing(draw)
    before = torch.random.get_rng_state()
    with pytest.raises(ConfigError, match=f"forward pass of the net draws from {told}") as caught:
        fedloom.run(model=net, data=blobs(), rounds=1, partition={"clients": 4})
    assert "nn.Dropout" in str(caught.value)
    assert torch.equal(torch.random.get_rng_state(), before)


def scaled(_: nn.Module, x: Tensor) -> Tensor:
    return x.mul_(0.5)


def clamped(net: Any, x: Tensor) -> Tensor:
    net.layers[0].weight.data.clamp_(-0.01, 0.01)
    return x


def counted(net: Any, x: Tensor) -> Tensor:
    net.calls = getattr(net, "calls", 0) + 1
    return x * net.calls


@pytest.mark.parametrize(
    ("draw", "told"),
    [
        (scaled, r"forward pass of the net writes into its inputs \(begin with x = x.clone\(\)\)"),
        (clamped, r"forward pass of the net writes into its parameters \(compute with others"),
        (counted, "a batch changes what the net computes for later ones"),
    ],
    ids=["inputs", "parameters", "attribute"],
)
def test_a_net_that_changes_what_it_is_given_is_refused(draw: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        fedloom.run(model=Drawing(draw), data=blobs(), rounds=1, partition={"clients": 4})


def test_a_net_that_cannot_be_copied_is_refused(tmp_path: Path) -> None:
    net: Any = TwoLayers()
    with (
        (tmp_path / "log").open("w") as net.log,
        pytest.raises(ConfigError, match="the net cannot be copied: TypeError"),
    ):
        fedloom.run(model=net, data=blobs(), rounds=1, partition={"clients": 4})


def test_parameters_that_are_not_trained_are_short_too() -> None:
    net = TwoLayers()
    net.layers[0].requires_grad_(False)
    few: dict[str, Any] = {"data": blobs(), "rounds": 1, "partition": {"clients": 4}, "engine": {"precision": "bf16"}}
    assert fedloom.run(model=net, **few).records
    with pytest.raises(ConfigError, match=r"the net fails in training .*engine.precision=bf16 computes it in 16 bits"):
        fedloom.run(model=Drawing(lambda _, x: x.double().float()), **few)


class Overwriting(TwoLayers):
    """The gradient of a sigmoid is computed from its outputs, which are lost here."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.layers[0](x).sigmoid().add_(1)[:, :3]


def test_a_net_without_a_gradient_is_refused_before_the_first_round() -> None:
    with pytest.raises(ConfigError, match="the net fails in the backward pass: RuntimeError: one of the variables"):
        fedloom.run(model=Overwriting(), data=blobs(), rounds=1, partition={"clients": 4})


def test_dropout_as_a_layer_repeats_its_run() -> None:
    net = nn.Sequential(nn.Dropout(0.3), TwoLayers())
    first, second = (fedloom.run(model=net, data=blobs(), rounds=1, partition={"clients": 4}) for _ in range(2))
    assert first.records == second.records


def test_trying_a_net_changes_neither_the_net_nor_random_numbers(tmp_path: Path) -> None:
    net, data = Counting(), as_arrays(blobs(), 0)
    before = torch.random.get_rng_state()
    task = prepare(parse({"data": {"source": "in-memory"}, "model": GivenNet.of(net)}), tmp_path, data).experiment.task
    assert torch.equal(torch.random.get_rng_state(), before)
    start = task.module(task.w0, task.buffers0)
    assert isinstance(start, Counting)
    assert (start.calls, net.calls) == (0, 0)
    assert start.norm.num_batches_tracked == 0
    assert torch.equal(start.norm.running_mean, torch.zeros(4))
    assert torch.equal(start.norm.running_var, torch.ones(4))


def test_functions_are_called_on_the_way() -> None:
    seen: dict[str, list[Any]] = {"round": [], "evaluate": [], "end": []}
    done = fedloom.run(
        data=blobs(),
        rounds=4,
        evaluate={"every": 2},
        on_round=lambda progress: seen["round"].append(progress.round),
        on_evaluate=lambda number, metrics: seen["evaluate"].append((number, metrics["global/test/accuracy"])),
        on_end=seen["end"].append,
        progress=True,
        **SMALL,
    )
    assert seen["round"] == [1, 2, 3, 4]
    assert [number for number, _ in seen["evaluate"]] == [2, 4]
    assert seen["end"] == [done]


def test_a_resumed_run_calls_functions_too_and_warns_where_nothing_is_shown(desk: Path) -> None:
    x, y = blobs()
    data = (x * [1, 1, 1, 5000], y)
    heard: list[Any] = []
    with pytest.warns(UserWarning, match="very different scales") as told:
        fedloom.run(data=data, rounds=1, out="r", **SMALL)
    assert told[0].filename == __file__
    with pytest.warns(UserWarning, match="very different scales"):
        done = fedloom.resume("r", data=data, rounds=2, on_round=lambda at: heard.append(at.round), on_end=heard.append)
    assert heard == [2, done]


def test_long_tables_say_that_rows_are_left_out() -> None:
    history = fedloom.run(data=blobs(), rounds=12, **SMALL)
    assert "..." in repr(history.metrics)
    assert re.fullmatch(r"<History of fedavg: 12 rounds in \d+\.\d s, global/test/accuracy 0\.\d{4}.*>", repr(history))
    assert "load" in dir(fedloom)


@pytest.mark.slow
def test_a_comparison_from_python(desk: Path) -> None:
    x, y = blobs()
    np.savez("mine.npz", x=x, y=y)
    with warm.processes():
        done = fedloom.compare("fedavg", "fedprox", seeds=1, data="mine.npz", rounds=1, jobs=1, out="c", **SMALL)
    assert [row.method for row in done.rows] == ["fedavg", "fedprox"]
    assert repr(done).startswith("<Comparison in c>\n\n| algorithm | last")
    with pytest.raises(ConfigError, match=r"numpy\.savez"):
        fedloom.compare("fedavg", data=(x, y))


PROGRAM = """
import fedloom
from torch import nn


class Net(nn.Sequential):
    def __init__(self, shape, classes):
        super().__init__(nn.Flatten(), nn.Linear(64, classes))


class Mine(fedloom.FedAvg):
    far: float = 1.0


def right(outputs, y):
    return (outputs.argmax(1) == y).double().mean()


def main():
    asked = {"evaluate": {"metrics": ["__main__:right"]}, "options": {"metric": "global/test/right"}}
    done = fedloom.compare("fedavg", Mine, Mine(far=2), model=Net, rounds=1, seeds=1, jobs=1, out="c", **asked)
    print([(row.method, row.seeds) for row in done.rows])


"""


@pytest.mark.slow
def test_a_comparison_of_what_the_program_defines(desk: Path) -> None:
    """Every cell is a process that imports the program; one that would then start again says so."""
    Path("mine.py").write_text(PROGRAM + 'if __name__ == "__main__":\n    main()\n')
    Path("bare.py").write_text(PROGRAM + "main()\n")
    run = partial(subprocess.run, capture_output=True, text=True, check=False)
    done = run([sys.executable, "mine.py"])
    methods = [("fedavg", 1), ("mine.py:Mine", 1), ("mine.py:Mine (far=2.0)", 1)]
    assert done.stdout.splitlines()[-1:] == [str(methods)], done.stderr
    bare = run([sys.executable, "bare.py"])
    assert "bare.py: calls fedloom.compare while it is being imported (put the call below: if __name" in bare.stderr
    prompt = run([sys.executable, "-"], input=PROGRAM + "main()")
    assert "'__main__:Net' is defined at a prompt or in a notebook" in prompt.stderr
    with pytest.raises(ConfigError, match="model: a comparison starts its own processes, which cannot be passed a net"):
        fedloom.compare("fedavg", model=torch.nn.Linear(2, 2))


def test_what_another_program_defined_is_said_to_be_its_own(desk: Path) -> None:
    ran = "import fedloom\nfedloom.run(model=Net, rounds=1, out='r')\n"
    Path("mine.py").write_text(PROGRAM.partition("def main")[0] + ran)
    subprocess.run([sys.executable, "mine.py"], check=True)
    with pytest.raises(ConfigError, match=r"'Net' was defined by a program .* name it file\.py:Net\)"):
        fedloom.resume("r", rounds=2)


def test_methods_of_a_comparison_are_not_a_list() -> None:
    with pytest.raises(ConfigError, match=r"separate arguments, not a list .*fedloom\.compare\('fedavg', 'fedprox'\)"):
        fedloom.compare(["fedavg", "fedprox"], rounds=1)  # type: ignore[arg-type]
