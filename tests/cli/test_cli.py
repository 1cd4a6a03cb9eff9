"""The command line: what it prints, what it writes, and what it says to everything that cannot be run."""

from __future__ import annotations

import json
import os
import pty
import re
import resource
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from support import warm
from support.terminal import SMALL, Done, Quick, environment, fedloom, files, started

PLAIN = "checkpoint.curves=false"  # a picture takes longer than most runs here


@pytest.fixture(scope="module")
def quick() -> Iterator[Quick]:
    server = Quick()
    yield server
    server.close()


# -- the default run -------------------------------------------------------------------------------
@pytest.mark.slow
def test_the_first_run_that_anybody_makes(tmp_path: Path) -> None:
    done = fedloom("run", cwd=tmp_path)
    assert done.code == 0, done.err
    header, partition, *lines = done.out.splitlines()
    assert re.match(
        r"fedloom \d+\.\d+\.\d+ · cpu .* · clients side by side · seed 0 · runs/fedavg-digits-seed0", header
    )
    assert partition.startswith("digits: 1,438 rows on 20 clients")
    assert any(re.match(r"round 50/50 +loss \d\.\d+ +accuracy 0\.9\d+ +.* clients/s", line) for line in lines)
    assert sum(line.startswith("  fedloom ") for line in lines) == 4  # what to do next
    assert "\x1b" not in done.out  # no colours or bars where nobody sees them
    run = tmp_path / "runs" / "fedavg-digits-seed0"
    assert {p.name for p in run.iterdir()} == {
        *(
            ".lock",
            "checkpoints",
            "clients.csv",
            "config.toml",
            "confusion.json",
            "curves.csv",
            "curves.png",
            "environment.json",
            "manifest.json",
            "metrics.jsonl",
            "model.json",
            "model.safetensors",
        ),
        *("partition.json", "partition.safetensors", "summary.json", "timings.jsonl"),
    }
    assert json.loads(run.joinpath("summary.json").read_text())["metrics"]["global/test/accuracy"]["last"] > 0.9
    again = fedloom("run", "rounds=1", *SMALL, cwd=tmp_path)  # without a picture
    assert (tmp_path / "runs" / "fedavg-digits-seed0-2").is_dir(), again.err
    assert not (tmp_path / "runs" / "fedavg-digits-seed0-2" / "curves.png").exists()
    assert "curves.png" in done.out
    assert "curves.png" not in again.out


def test_json_is_the_last_line_of_stdout_and_nothing_else_is(tmp_path: Path) -> None:
    done = fedloom("run", "rounds=3", *SMALL, "--json", "--out", "r", cwd=tmp_path)
    assert done.code == 0, done.err
    assert len(done.out.splitlines()) == 1
    result = done.json
    assert list(result) == ["run_dir", "algorithm", "rounds", "seconds", "rounds_per_second", "metrics"]
    assert result["run_dir"] == "r"
    assert result["algorithm"] == "fedavg"
    assert result["rounds"] == 3
    assert result["rounds_per_second"] == pytest.approx(3 / result["seconds"], rel=0.05)
    assert {"global/test/accuracy", "global/test/loss", "personal/pre_fit/test/accuracy_worst10"} <= set(
        result["metrics"]
    )
    for value in result["metrics"].values():
        assert list(value) == ["last", "best", "mean_last_10"]
        assert all(isinstance(v, float | int) for v in value.values())
    records = [json.loads(line) for line in (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()]
    assert [r["round"] for r in records] == [0, 1, 2, 3]
    assert result["metrics"]["global/test/loss"]["last"] == records[-1]["global/test/loss"]
    assert result == json.loads((tmp_path / "r" / "summary.json").read_text())
    timings = [json.loads(line) for line in (tmp_path / "r" / "timings.jsonl").read_text().splitlines()]
    assert [t["round"] for t in timings] == [1, 2, 3]


def test_the_printed_config_is_complete_and_gives_the_same_run(tmp_path: Path, quick: Quick) -> None:
    words = ("rounds=3", "seed=5", "local.momentum=0.5", "data.test=0.3", *SMALL)
    printed = quick("run", *words, "--print-config", cwd=tmp_path)
    assert printed.code == 0
    assert files(tmp_path) == set()
    table = tomllib.loads(printed.out)
    assert set(table) >= {
        "data",
        "partition",
        "model",
        "algorithm",
        "local",
        "cohort",
        "evaluate",
        "engine",
        "checkpoint",
    }
    assert table["local"]["momentum"] == 0.5
    (tmp_path / "printed.toml").write_text(printed.out)
    assert quick("run", "printed.toml", "--print-config", cwd=tmp_path).out == printed.out
    for name, experiment in (("a", words), ("b", ("printed.toml",))):
        assert quick("run", *experiment, "--out", name, cwd=tmp_path).code == 0
    for name in ("metrics.jsonl", "model.safetensors", "partition.safetensors", "config.toml"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name


@pytest.mark.parametrize("kind", ["local_only", "dpsgd", "fedopt", "fedavg_ft"])
def test_the_printed_config_of_every_family_can_be_run(tmp_path: Path, quick: Quick, kind: str) -> None:
    words = (f"algorithm.kind={kind}", "rounds=1", "partition.clients=6", "model.kind=logistic", PLAIN)
    printed = quick("run", *words, "--print-config", cwd=tmp_path)
    (tmp_path / "printed.toml").write_text(printed.out)
    done = quick("run", "printed.toml", "--out", "r", cwd=tmp_path)
    assert done.code == 0, done.err
    assert (tmp_path / "r" / "config.toml").read_text() == printed.out


def test_overrides_change_the_file_and_say_what_they_leave_out(tmp_path: Path, quick: Quick) -> None:
    (tmp_path / "exp.toml").write_text(
        'seed = 3\n[partition]\nkind = "dirichlet"\nclients = 7\nalpha = 0.5\n[local]\nlr = 0.3\n'
    )
    words = (
        "partition.kind=shards",
        "partition.per_client=3",
        "local.lr=0.01",
        "rounds=1",
        "model=logistic",
        "name=mine",
        PLAIN,
    )
    done = quick("run", "exp.toml", *words, cwd=tmp_path)
    assert done.code == 0, done.err
    assert "partition.alpha is not a setting of shards and was left out" in done.out
    table = tomllib.loads((tmp_path / "runs" / "mine" / "config.toml").read_text())
    assert table["seed"] == 3
    assert table["partition"]["kind"] == "shards"
    assert (table["partition"]["clients"], table["partition"]["per_client"]) == (7, 3)
    assert table["local"]["lr"] == 0.01
    assert table["model"]["kind"] == "logistic"


@pytest.mark.parametrize("private", [False, True])
def test_a_private_run_is_not_advised_to_go_on(quick: Quick, tmp_path: Path, private: bool) -> None:
    """Its noise may have been made for just so many rounds."""
    base = ("rounds=2", "partition.clients=6", "model.kind=logistic", PLAIN)
    words = ("privacy.clip=1", "privacy.epsilon=8", "algorithm.weighting=uniform") if private else ()
    all_of_them = "cohort.sampling=all"  # of a part of them, the noise takes seconds to find
    done = quick("run", *base, *words, all_of_them, "--out", "r", cwd=tmp_path)
    assert done.code == 0, done.err
    assert (tmp_path / "r" / "privacy.json").exists() == private
    further = [] if private else ["  fedloom resume r --rounds 4"]
    assert done.out.partition("\nnext:\n")[2].splitlines() == [
        *further,
        "  fedloom run r/config.toml algorithm.kind=NAME    another method: fedloom list algorithms",
        "  fedloom report r    curves, clients and settings on one page",
        "  fedloom describe fedavg",
    ]


def test_runs_started_together_do_not_take_each_others_folder(tmp_path: Path) -> None:
    both = [started("run", "rounds=2", *SMALL, f"local.lr={lr}", cwd=tmp_path) for lr in (0.1, 0.2)]
    ends = [p.communicate(timeout=600) for p in both]
    assert [p.returncode for p in both] == [0, 0], ends
    rates = {tomllib.loads(p.read_text())["local"]["lr"] for p in tmp_path.glob("runs/*/config.toml")}
    assert rates == {0.1, 0.2}


@pytest.mark.skipif(
    shutil.which("unshare") is None or subprocess.run(["unshare", "-n", "true"], check=False).returncode != 0,
    reason="needs network namespaces",
)
def test_a_machine_without_network_is_enough(tmp_path: Path) -> None:
    command = ["unshare", "-n", sys.executable, "-m", "fedloom", "run", "rounds=1", *SMALL, "--out", "r"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr


def test_on_a_terminal_there_is_a_live_bar(tmp_path: Path) -> None:
    screen, line = pty.openpty()
    command = [sys.executable, "-m", "fedloom", "run", "rounds=5", *SMALL, "--out", "r"]
    process = warm.Popen(
        command, cwd=tmp_path, env=environment({"TERM": "xterm-256color"}), stdin=line, stdout=line, stderr=line
    )
    os.close(line)
    shown = b""
    with suppress(OSError):  # how a closed terminal ends
        while piece := os.read(screen, 65536):
            shown += piece
    os.close(screen)
    assert process.wait(timeout=600) == 0, shown
    assert re.search(rb"round \x1b?.*5/5.*loss.*accuracy.*clients/s", shown.replace(b"\r", b""), re.DOTALL)
    assert b"\x1b[" in shown


# -- what cannot be run ----------------------------------------------------------------------------
def refused(quick: Quick, cwd: Path, *words: str, code: int = 2) -> str:
    """The message of a command that is refused: one message, no traceback, nothing written."""
    before = files(cwd)
    done = quick("run", *words, cwd=cwd)
    assert done.code == code, (done.out, done.err)
    assert done.err.startswith("error: ")
    assert "Traceback" not in done.err
    assert done.out == ""
    assert files(cwd) == before
    return done.err


BAD = [
    (["locla.lr=3"], "locla: unknown key .*did you mean 'local'"),
    (["local.lrr=3"], r"local\.lrr: unknown key \(got 3\) \(did you mean 'lr'\?\)"),
    (["ronuds=3"], "ronuds: unknown key .*did you mean 'rounds'"),
    (["lr=0.1"], r"lr: unknown key \(got 0.1\) \(did you mean local\.lr\?\)"),
    (["num_clients=9"], r"num_clients: unknown key .*did you mean partition\.clients\?"),
    (
        ["data.kind=rows.csv", "data.label=x"],
        r"data\.kind: is called data\.source here \(got 'rows.csv'\) \(write data\.source = \"rows.csv\"\)",
    ),
    (["data=rows.csv", "data.target=x"], r"data\.target: unknown key .*did you mean 'label'\?"),
    (["target=x"], r"target: unknown key .*did you mean data\.label\?"),
    (["local.learning_rate=1"], r"local\.learning_rate: unknown key .*did you mean 'lr'"),
    (["engine.device=gpu"], r"engine\.device: no such device, did you mean 'cuda'\? \(got 'gpu'\)"),
    (["fedavg"], r"fedavg: no such experiment file \(did you mean algorithm=fedavg\?\)"),
    (["rounds", "=", "5"], r"settings are written without spaces \(write rounds=5\)"),
    (["local.lr=fast"], r"local\.lr: .*number.*got 'fast'"),
    (["rounds=2.5"], "rounds: .*integer.*got 2.5"),
    (["local=3"], r"local: should be a table of settings \(got 3\)"),
    (["model.widths=wide"], r"model\.widths\.0: should be a valid integer \(got 'wide'\)"),
    (["local.lr=0"], r"local\.lr: .*greater than 0.*got 0"),
    (["local.lr=nan"], r"local\.lr: .*finite"),
    (["local.momentum=1"], r"local\.momentum: .*less than 1"),
    (["rounds=0"], "rounds: .*greater than 0"),
    (["seed=-1"], "seed: .*greater than or equal to 0"),
    (["seed=99999999999999999999"], "seed: .*less than"),
    (["partition.clients=0"], r"partition\.clients: .*greater than 0"),
    (["partition.holdout=1"], r"partition\.holdout: .*less than 1"),
    (["partition.clients=100000"], r"partition\.clients: 100000 clients cannot share 1438 rows"),
    (["local.schedule=linear"], r"local\.schedule: .*'constant'.*got 'linear'"),
    (["algorithm.kind=fedvag"], r"algorithm\.kind: there is no algorithm 'fedvag' \(did you mean 'fedavg'\?\)"),
    (["data.source=digit"], "data.source: .*did you mean 'digits'"),
    (["model.kind=mpl"], "model.kind: .*did you mean 'mlp'"),
    (["partition.kind=iidd"], "partition.kind: .*did you mean 'iid'"),
    (["algorithm.kind=dpsgd", "topology.kind=rign"], "topology.kind: .*did you mean 'ring'"),
    # each is valid, and together they are not
    (["local.steps=3", "local.epochs=2"], r"local\.epochs: has an effect only if steps is not set, but steps is 3"),
    (["local.nesterov=true"], r"local\.nesterov: .*momentum is above 0, but .*momentum is 0"),
    (["cohort.size=30"], r"cohort\.size: 30 of partition\.clients = 20"),
    (
        ["cohort.size=5", "cohort.sampling=all"],
        r"cohort\.size: has an effect only if sampling is not all, but sampling is all \(got 5\)",
    ),
    (["cohort.sampling=proportional"], "counts a client's data twice.*algorithm.weighting=uniform"),
    (["topology.kind=ring"], "topology: is only for algorithms without a server"),
    (["algorithm.kind=dpsgd", "cohort.size=3"], "cohort: a network without a server trains every node"),
    (["algorithm.kind=dpsgd", "partition.clients=1"], "a network needs at least two nodes"),
    (
        ["algorithm.kind=local_only", "partition.holdout=0"],
        r"partition\.holdout: .*no common model.*partition.holdout=0\.2",
    ),
    (["data.test=0", "partition.holdout=0"], "has no test rows"),
    (["model.kind=cnn_fedavg"], r"cnn_fedavg needs images of at least 16x16 \(got 1x8x8\)"),
    (["engine.device=cuda:9"], r"engine\.device"),
    (["engine.device=tpu"], r"engine\.device: .*got 'tpu'"),
    (["partition.kind=natural"], "does not name the client of each row"),
    # files
    (["missing.toml"], r"missing\.toml: no such experiment file"),
    (["broken.toml"], r"broken\.toml: not readable as TOML: .*line 1"),
    (["folder"], "folder: is a folder, not an experiment file"),
    (["one.toml", "two.toml"], r"two\.toml: a second experiment file"),
    (["=3"], "=3: is not of the form key=value"),
    (["data.source=./none.npz"], r"none\.npz: no such file"),
    (["model.kind=none.py:Net"], r"model\.kind: no such file: none\.py"),
    (["model.kind=own.py:Nett"], r"model\.kind: 'own\.py' has no 'Nett' \(did you mean 'Net'\?\)"),
    (["model.kind=own.py:number"], r"model\.kind: 'own\.py:number' is not a model"),
    (["model.kind=failing.py:Net"], r"failing\.py failed to load: ZeroDivisionError"),
    (["algorithm.kind=own.py:Net"], "is not a subclass of fedloom.Algorithm"),
    (["model.kind=own.py:Net", "model.hiden=3"], r"model\.hiden: unknown key \(did you mean 'hidden'\?\)"),
    (["comparison.toml"], r"comparison\.toml: is a comparison .*\(fedloom compare comparison\.toml\)"),
    (["--out", "full"], "--out: full already exists and is not empty"),
    (["--out", "broken.toml"], r"--out: broken\.toml already exists"),
]


@pytest.fixture
def desk(tmp_path: Path) -> Path:
    """A working folder with what the bad commands refer to."""
    (tmp_path / "broken.toml").write_text("rounds = = 3\n")
    (tmp_path / "comparison.toml").write_text("[compare]\nalgorithms = ['fedavg']\n")
    (tmp_path / "folder").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "something").touch()
    (tmp_path / "own.py").write_text(
        "from torch import nn\nnumber = 3\n"
        "class Net(nn.Module):\n    def __init__(self, shape, classes, hidden=3): super().__init__()\n"
    )
    (tmp_path / "failing.py").write_text("1 / 0\n")
    return tmp_path


@pytest.mark.parametrize(("words", "message"), BAD, ids=lambda v: " ".join(v) if isinstance(v, list) else "")
def test_bad_input_is_refused(quick: Quick, desk: Path, words: list[str], message: str) -> None:
    assert re.search(message, refused(quick, desk, *words))


def test_all_faults_are_reported_at_once(quick: Quick, tmp_path: Path) -> None:
    (tmp_path / "exp.toml").write_text(
        """
seed = "seven"
round = 5
[locall]
lr = 0.1
[local]
lr = -1.0
batchsize = 3
[partition]
kind = "dirichlet"
clients = 0
alpah = 3
[model]
kind = "mpl"
[algorithm]
kind = "fedavg"
server_lr = "fast"
[cohort]
size = 5
sampling = "all"
"""
    )
    message = refused(quick, tmp_path, "exp.toml", "topology.kind=rign", "engine.store=floppy")
    places = [line.split(":")[0].strip() for line in message.splitlines()[1:]]
    assert set(places) == {
        *("seed", "round", "locall", "partition.clients", "partition.alpah", "model.kind", "algorithm.server_lr"),
        *("local.lr", "local.batchsize", "cohort.size", "topology.kind", "engine.store"),
    }
    assert message.startswith("error: the configuration has 12 faults")
    for hint in ("'rounds'", "'local'", "'alpha'", "'mlp'", "'batch'", "'ring'"):
        assert f"did you mean {hint}?" in message


def test_wrong_names_on_the_command_line_are_reported_together(quick: Quick, tmp_path: Path) -> None:
    message = refused(
        quick, tmp_path, "algorithm.kind=fedavgg", "model.kind=mpl", "local.lrr=3", "cohort.size=0", "noequals="
    )
    assert message.startswith("error: the configuration has 5 faults")


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist", "cifar10", "cifar100"])
def test_a_missing_data_set_names_its_files_and_both_commands(quick: Quick, tmp_path: Path, name: str) -> None:
    done = quick("run", f"data.source={name}", "--data-root", tmp_path / "data", cwd=tmp_path)
    assert done.code == 2
    assert str(tmp_path / "data") in done.err
    assert ("train-images-idx3-ubyte.gz" if "mnist" in name else ".bin") in done.err
    assert f"fedloom data get {name}" in done.err
    assert f"fedloom data import {name} DIR" in done.err
    assert files(tmp_path) == set()
    by_variable = quick("run", f"data.source={name}", cwd=tmp_path, env={"FEDLOOM_DATA": str(tmp_path / "elsewhere")})
    assert str(tmp_path / "elsewhere") in by_variable.err


def test_an_unknown_option_and_an_unknown_command(quick: Quick, tmp_path: Path) -> None:
    for words, says in (
        (("run", "--jsn"), "No such option"),
        (("rnu",), "No such command 'rnu'"),
        (("describe",), "Missing argument 'NAME'"),
        (("list", "nonsense"), "nonsense: there is no such list"),
    ):
        done = quick(*words, cwd=tmp_path)
        assert (done.code, "Traceback" in done.err) == (2, False)
        assert says in done.err


def test_a_folder_that_cannot_be_written_is_a_storage_error(quick: Quick, tmp_path: Path) -> None:
    assert "writing below /proc/fedloom/x failed" in refused(
        quick, tmp_path, "rounds=1", "--out", "/proc/fedloom/x", code=4
    )


def test_poison_for_a_model_that_is_never_sent_is_refused(quick: Quick, tmp_path: Path) -> None:
    """Clients of LAW-AFL send moves of a model only where they train one; else they would seem to bear poison."""
    bad = ("corruption.kind=model_sign_flip", "corruption.share=0.3")
    poison = ("algorithm.kind=law_afl", "model.kind=logistic", "partition.clients=6", "rounds=1", PLAIN, *bad)
    said = refused(quick, tmp_path, *poison, "algorithm.schedule=frozen")
    assert re.search(r"corruption\.kind: changes the part 'dw'.* sends \['rows', .*'model_sign_flip'", said)
    assert "'dw'" not in said.partition(" sends ")[2]
    done = quick("run", *poison, "algorithm.schedule=per_round", "--out", "r", cwd=tmp_path)
    assert done.code == 0, done.err


# -- numbers that are not finite -------------------------------------------------------------------
@pytest.mark.parametrize("executor", ["loop", "lanes"])
def test_divergence_stops_with_round_clients_and_rate(quick: Quick, tmp_path: Path, executor: str) -> None:
    words = ("local.lr=1e8", "rounds=20", "local.epochs=3", f"engine.executor={executor}", "--out", "r")
    done = quick("run", *words, cwd=tmp_path)
    assert done.code == 3, done.err
    message = done.err.splitlines()[-1]
    assert re.match(
        r"error: round \d+: .*clients \d+, \d+.*the local learning rate was 1e\+08 \(try local\.lr=1e\+07", message
    )
    assert "Traceback" not in done.err
    assert not (tmp_path / "r" / "model.safetensors").exists()
    for line in (tmp_path / "r" / "metrics.jsonl").read_text().splitlines():
        assert "NaN" not in line
        assert "Infinity" not in line


NAN_CLIENT = '''
"""FedAvg with one broken client.

Nobody, Never.
"""
import torch
from fedloom import FedAvg, Update


class Broken(FedAvg):
    examples: int

    def finish(self, x, down, mine, work):
        hit = (work.examples == self.examples) & (work.round % 2 == 1)
        return Update(torch.where(hit, torch.full_like(x, float("nan")), x - down.w)), ()
'''


@pytest.mark.parametrize("every", [1, 4])
def test_one_client_that_is_not_finite_is_left_out_counted_and_named(quick: Quick, tmp_path: Path, every: int) -> None:
    (tmp_path / "broken.py").write_text(NAN_CLIENT)
    base = ("partition.clients=5", "cohort.sampling=all", "model.kind=logistic", "rounds=4", PLAIN)
    assert quick("run", *base, "rounds=1", "--out", "plain", cwd=tmp_path).code == 0
    parts = load_file(tmp_path / "plain" / "partition.safetensors")
    kept = np.bincount(parts["owner"][parts["held_out"] == 0])
    client = int(np.flatnonzero([np.count_nonzero(kept == n) == 1 for n in kept])[0])
    words = ("algorithm.kind=./broken.py:Broken", f"algorithm.examples={kept[client]}", f"evaluate.every={every}")
    done = quick("run", *base, *words, "--out", "r", cwd=tmp_path)
    assert done.code == 0, done.err
    records = [json.loads(line) for line in (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()]
    named = {r["round"]: r["excluded"] for r in records if "excluded" in r}
    assert named == {2: [client], 4: [client]}
    assert [r["round"] for r in records] == ([0, 1, 2, 3, 4] if every == 1 else [0, 2, 4])
    assert f"round 2: excluded clients [{client}]" in done.out
    assert "2 client updates were not finite and left out" in done.out


# -- the user's own --------------------------------------------------------------------------------
OWN = '''
import numpy as np
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, shape, classes, hidden=8):
        super().__init__()
        self.a, self.b = nn.Linear(int(np.prod(shape)), hidden), nn.Linear(hidden, classes)

    def forward(self, x):
        return self.b(torch.relu(self.a(x.flatten(1))))


def halves(y, clients, rng, small=0.25):
    """The first client gets a quarter of the rows, the others share the rest."""
    owner = rng.integers(1, clients, len(y))
    owner[rng.random(len(y)) < small] = 0
    return owner


def wrong(y, clients):
    return np.full(len(y), clients)


def blobs(seed, n=300):
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 3, n)
    return (rng.normal(size=(n, 4)) + 3 * y[:, None]).astype(np.float32), y
'''


def test_the_users_own_model_partition_and_data(quick: Quick, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    words = ("model.kind=own.py:Net", "model.hidden=5", "partition.kind=own.py:halves", "partition.small=0.5")
    done = quick(
        "run",
        *words,
        "data=./own.py:blobs",
        "data.n=200",
        "rounds=2",
        "partition.clients=4",
        PLAIN,
        "--json",
        "--out",
        "r",
        cwd=tmp_path,
    )
    assert done.code == 0, done.err
    assert "160 rows" in done.err
    model = load_file(tmp_path / "r" / "model.safetensors")
    assert {n: x.shape for n, x in model.items()} == {
        "a.weight": (5, 4),
        "a.bias": (5,),
        "b.weight": (3, 5),
        "b.bias": (3,),
    }
    parts = load_file(tmp_path / "r" / "partition.safetensors")
    assert 0.35 < (parts["owner"] == 0).mean() < 0.65
    resumed = quick("resume", "r", "--rounds", "3", cwd=tmp_path)
    assert resumed.code == 0, resumed.err
    bad = quick("run", "partition.kind=own.py:wrong", "--out", "w", cwd=tmp_path)
    assert bad.code == 2
    assert re.search(
        r"partition\.kind: 'own\.py:wrong' must return for each of the 1438 rows a client in 0\.\.19", bad.err
    )


ALGORITHM = '''
"""Half steps: the server takes half of the mean update.

A test of fedloom, 2025.

    w <- w + share * mean
"""
from pydantic import Field
from fedloom import FedAvg, Inbox, Model, Update


class HalfStep(FedAvg):
    share: float = Field(0.5, gt=0, le=1, description="how much of it")

    def update(self, server: Model, inbox: Inbox[Update]) -> Model:
        return Model(server.w + (self.share * inbox.mean.dw).to(server.w.dtype))
'''


def test_an_algorithm_in_the_working_folder_is_listed_described_and_run_by_its_bare_name(
    quick: Quick, tmp_path: Path
) -> None:
    (tmp_path / "algorithms").mkdir()
    (tmp_path / "algorithms" / "half_step.py").write_text(ALGORITHM)
    listed = quick("list", "algorithms", "--json", cwd=tmp_path)
    mine = [entry for entry in json.loads(listed.out) if entry["name"] == "half_step"]
    assert mine == [
        {
            "name": "half_step",
            "summary": "Half steps: the server takes half of the mean update.",
            "origin": "algorithms/half_step.py",
        }
    ]
    assert "half_step" in quick("list", "algorithms", cwd=tmp_path).out
    page = quick("describe", "half_step", cwd=tmp_path).out
    assert "w <- w + share * mean" in page
    assert re.search(r"share +number, > 0, <= 1 +0\.5 +how much of it", page)
    done = quick(
        "run", "algorithm.kind=half_step", "algorithm.share=1.0", "rounds=2", *SMALL, "--out", "mine", cwd=tmp_path
    )
    assert done.code == 0, done.err
    plain = quick("run", "rounds=2", *SMALL, "--out", "plain", cwd=tmp_path)
    assert plain.code == 0
    assert (tmp_path / "mine" / "metrics.jsonl").read_bytes() == (tmp_path / "plain" / "metrics.jsonl").read_bytes()
    assert "half_stepp" in refused_name(quick, tmp_path)
    assert quick("resume", "mine", "--rounds", "3", cwd=tmp_path).code == 0


def refused_name(quick: Quick, cwd: Path) -> str:
    done = quick("run", "algorithm.kind=half_stepp", cwd=cwd)
    assert done.code == 2
    assert "did you mean 'half_step'?" in done.err
    return done.err


# -- looking around --------------------------------------------------------------------------------
@pytest.mark.parametrize("family", ["algorithms", "datasets", "partitions", "models", "topologies"])
def test_lists(quick: Quick, tmp_path: Path, family: str) -> None:
    listed = json.loads(quick("list", family, "--json", cwd=tmp_path).out)
    expected = {
        "algorithms": {"fedavg", "fedavg_ft", "fedopt", "local_only", "dpsgd"},
        "datasets": {"digits", "mnist", "fashion_mnist", "cifar10", "cifar100", "npz", "csv", "parquet", "images"},
        "partitions": {"iid", "shards", "dirichlet", "pathological", "quantity", "natural"},
        "models": {
            "logistic",
            "mlp",
            "cnn_fedavg",
            "cnn64",
            "cnn_law",
            "lenet5",
            "resnet20",
            "resnet50",
            "densenet121",
        },
        "topologies": {"ring", "full"},
    }[family]
    assert {entry["name"] for entry in listed} >= expected
    assert all(entry["summary"] for entry in listed)
    text = quick("list", family, cwd=tmp_path)
    assert text.code == 0
    assert all(name in text.out for name in expected)


@pytest.mark.parametrize(
    "name", ["fedavg", "fedopt", "dpsgd", "local_only", "fedavg_ft", "dirichlet", "cnn64", "digits", "ring", "local"]
)
def test_pages(quick: Quick, tmp_path: Path, name: str) -> None:
    page = json.loads(quick("describe", name, "--json", cwd=tmp_path).out)
    assert page["name"] == name
    assert page["text"]
    assert quick("describe", name, cwd=tmp_path).out.startswith(name)


def test_the_page_of_an_algorithm_has_paper_settings_state_and_bytes(quick: Quick, tmp_path: Path) -> None:
    page = quick("describe", "fedopt", cwd=tmp_path).out
    assert "Adaptive Federated Optimization" in page
    assert "v <- beta2 v" in page
    assert re.search(r"beta1 +number, >= 0, < 1 +unset", page)
    assert "bytes" in page
    assert "keeps" in page


def test_an_unknown_name_is_refused_with_the_nearest(quick: Quick, tmp_path: Path) -> None:
    done = quick("describe", "fedpot", cwd=tmp_path)
    assert done.code == 2
    assert "did you mean 'fedopt'?" in done.err


def test_data_lists_what_is_here(quick: Quick, tmp_path: Path) -> None:
    listed = json.loads(quick("data", "list", "--json", "--data-root", tmp_path, cwd=tmp_path).out)
    assert listed["root"] == str(tmp_path)
    assert listed["present"] == {
        "digits": True,
        **dict.fromkeys(["mnist", "fashion_mnist", "cifar10", "cifar100"], False),
    }
    text = quick("data", "list", cwd=tmp_path).out
    assert "fedloom data get cifar10" in text


def test_the_doctor_trains_a_little(tmp_path: Path) -> None:
    done = fedloom("doctor", cwd=tmp_path)
    assert done.code == 0, done.out + done.err
    assert "FAIL" not in done.out
    assert re.search(r"training: 3 rounds of FedAvg on digits in .* accuracy 0\.\d+", done.out)
    assert files(tmp_path) == set()


def test_what_a_run_says_is_what_was_meant(tmp_path: Path, quick: Quick) -> None:
    """Names as they are, diagnostics that were asked for, of which round a value is, and of how many a mean."""
    (tmp_path / "loaders.py").write_text(
        "import numpy as np\ndef three(seed): return np.eye(90, 3), np.arange(90) % 2\n"
    )
    settings = ("rounds=3", "evaluate.every=2", "partition.clients=3", "model=logistic", "evaluate.diagnostics=updates")
    done = quick("run", "data=loaders.py:three", *settings, PLAIN, cwd=tmp_path)
    assert done.code == 0, done.err
    assert "loaders.py:three: 72 rows" in done.out
    assert re.search(r"^round 1/3 .*accuracy \S+ after round 0 ", done.out, re.MULTILINE)
    assert re.search(r"^metric +last +best +mean of all 2$", done.out, re.MULTILINE)
    assert re.search(r"^server/step_norm +\S+ +- +\S+$", done.out, re.MULTILINE)


def test_version_and_help_do_not_wait_for_torch(tmp_path: Path) -> None:
    script = """
import os, sys
import fedloom.cli.main
sys.argv = ["fedloom", "--version"]
try:
    fedloom.cli.main.main()
finally:
    assert "torch" not in sys.modules
    assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert re.match(r"fedloom \d+\.\d+\.\d+", done.stdout)
    shown: Done = fedloom("run", "--help", cwd=tmp_path)
    assert shown.code == 0
    for option in ("--out", "--json", "--print-config", "--data-root"):
        assert option in shown.out


def test_help_is_whole_and_plain(quick: Quick, tmp_path: Path) -> None:
    """At 80 columns no summary is cut, no markup is escaped, and arguments are explained."""
    shown = quick("-h", cwd=tmp_path).out
    commands = re.findall(r"^  (\w+) {2,}\S", shown.partition("Commands:")[2], re.MULTILINE)
    assert {"run", "compare", "data"} <= set(commands)
    assert "..." not in shown.partition("Commands:")[2]
    for command in commands:
        page = quick(command, "--help", cwd=tmp_path).out
        assert "\\[" not in page, command
        assert "Positional arguments" not in page, command
        assert "..." not in page.partition("Commands:")[2], command
    assert "One of: algorithms" in quick("list", "-h", cwd=tmp_path).out


def test_a_setting_that_is_written_as_an_option_is_corrected(quick: Quick, tmp_path: Path) -> None:
    done = quick("run", "--rounds", "5", cwd=tmp_path)
    assert done.code == 2
    assert "settings are written KEY=VALUE, as in rounds=5" in done.err
    assert "Did you mean" not in done.err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("list",), "name one of algorithms, optimizers, datasets, partitions, models, topologies"),
        (("describe", "local.lr"), "error: local.lr: is a setting (see fedloom describe local)"),
        (("describe", "lr"), "error: lr: is a setting (see fedloom describe local)"),
        (
            ("describe", "nothing_at_all"),
            "error: nothing_at_all: nothing of this name (fedloom list shows what there is)",
        ),
        (("run", "model=resnet"), "did you mean 'resnet18' or 'resnet20' or 'resnet50'?"),
        (("run", "seeds=2"), "for several seeds: fedloom compare METHOD --seeds N"),
        (("deploy", "init", "--nodes", "3"), "names at least two nodes (got '3') (names with commas between them"),
        (("deploy", "node", "nowhere", "data=x.csv"), "error: nowhere: there is no such folder"),
    ],
)
def test_a_first_guess_leads_to_what_was_meant(words: Sequence[str], says: str, quick: Quick, tmp_path: Path) -> None:
    done = quick(*words, cwd=tmp_path)
    assert done.code == 2
    assert says in done.err
    assert "1 fault" not in done.err


def test_a_near_command_is_named_once(quick: Quick, tmp_path: Path) -> None:
    assert quick("plot", cwd=tmp_path).err.count("report") == 1


def test_settings_that_were_never_set_are_left_out_without_a_note(quick: Quick, tmp_path: Path) -> None:
    (tmp_path / "exp.toml").write_text('[algorithm]\nkind = "fedavg"\nserver_lr = 1.0\nweighting = "uniform"\n')
    done = quick("run", "exp.toml", "algorithm.kind=fedopt", "rounds=1", PLAIN, cwd=tmp_path)
    assert "algorithm.weighting is not a setting of fedopt and was left out" in done.out
    assert "server_lr" not in done.out


@pytest.mark.parametrize("setting", ["rounds=true", 'rounds="5"', "rounds=5.0", "local.nesterov=yes", "local.lr=true"])
def test_a_value_of_another_type_is_not_converted(setting: str) -> None:
    from fedloom.core.errors import ConfigError
    from fedloom.runs.start import load_config

    with pytest.raises(ConfigError, match=setting.split("=", maxsplit=1)[0].replace(".", r"\.")):
        load_config(None, [setting])


# -- what a machine, or a method, cannot do --------------------------------------------------------
BRANCHING = """
from fedloom.algorithms.fedavg import FedAvg

class Branching(FedAvg):
    def step(self, at, batch, down, mine):
        g = self.task.grad(at.x, batch)
        return at._replace(x=at.x - batch.lr * (g if float(g.norm()) < 1 else g / g.norm()))
"""


def test_a_method_that_cannot_run_in_lanes_is_described_as_such_and_runs_in_a_loop(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(BRANCHING)
    kind = "algorithm.kind=mine.py:Branching"
    said = fedloom("describe", "mine.py:Branching", cwd=tmp_path).out
    assert "local steps cannot run side by side; set engine.executor=loop" in said
    assert fedloom("run", *SMALL, kind, "rounds=1", "engine.executor=loop", "--out", "a", cwd=tmp_path).code == 0
    wrong = fedloom("run", *SMALL, kind, "rounds=1", "engine.executor=lanes", "--out", "b", cwd=tmp_path)
    assert wrong.code == 2
    assert wrong.err.startswith("error: ")
    assert "mine.py, line 7, in step: " in wrong.err
    assert "train one client after another with engine.executor=loop" in wrong.err
    assert "Traceback" not in wrong.err


def test_what_a_cpu_does_not_do_is_reported(tmp_path: Path) -> None:
    words = ("rounds=1", "engine.compile=on", "cohort.size=1")  # a single client is trained in a loop
    done = fedloom("run", *SMALL, *words, "--out", "run", cwd=tmp_path)
    assert done.code == 0
    assert "note: engine.compile = 'on' does nothing here: clients train one by one" in done.out
    where = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert (where["precision"], where["steps"]) == ("fp32", "eager")  # there is no tf32 on a CPU


def test_more_data_than_memory_is_one_error_and_nothing_written(tmp_path: Path) -> None:
    words = ("data=synthetic", "data.devices=1000000", "data.features=10000")  # 80 GB
    words += ("partition=natural", "model=logistic", "rounds=1")
    limits = {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_AS, (9 << 30, 9 << 30))}
    done = fedloom("run", *words, "--out", "run", cwd=tmp_path, **limits)
    assert done.code == 2
    assert done.err.startswith("error: there is not enough memory")
    assert "Traceback" not in done.err
    assert not list(tmp_path.iterdir())


def test_a_second_partition_is_refused(quick: Quick, tmp_path: Path) -> None:
    done = quick("partition", "iid", "shards", cwd=tmp_path)
    assert (done.code, done.out) == (2, "")
    assert "shards: a second partition, after 'iid' (draw one after the other, or name one: " in done.err
    assert files(tmp_path) == set()
