"""Code that a configuration names: only declared kinds run, only with the user's consent, and only as it was.

Every attack ends in the same question: is there a file ``marker``, which only the attacker's code would make?
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import tomli_w
import torch
from safetensors.torch import save_file

import fedloom as package
from fedloom import FedAvg
from fedloom.core import usercode
from fedloom.core.disk import digest
from fedloom.core.errors import CheckpointError, ConfigError
from support import warm
from support.terminal import HANG, SMALL, Done, Quick, environment, files

QUICK = ("rounds=1", *SMALL)
SETTINGS: dict[str, object] = {"rounds": 2, "partition": {"clients": 6}, "cohort": {"size": 3}}
SETTINGS |= {"model": {"kind": "logistic"}, "checkpoint": {"curves": False}}
CODE = """
import os
from pathlib import Path

import numpy as np
from torch import nn

from fedloom import FedAvg
from fedloom.engine.topology.kinds import Ring
from fedloom.core.optim import sgd

Path(os.environ["MARKER"]).touch()
from os import system


class Mine(FedAvg):
    pass


class Net(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.body, self.head = nn.Flatten(), nn.Linear(64, classes)

    def forward(self, x):
        return self.head(self.body(x))


class Circle(Ring):
    pass


def load(command=""):
    y = np.arange(300) % 3
    return np.eye(3, 4, dtype=np.float32)[y], y


def deal(y, clients, command=""):
    return np.arange(len(y)) % clients


def slow():
    return sgd()


def error(outputs, y):
    return (outputs.sum(-1) - y) ** 2


def rule(uploads, weights):
    return weights @ uploads


def sampling(rng, clients, size):
    return rng.choice(clients, size, replace=False)


def metric(outputs, y):
    return 0.0
"""


@pytest.fixture(scope="module")
def quick() -> Iterator[Quick]:
    server = Quick()
    yield server
    server.close()


@pytest.fixture
def world_outside(tmp_path: Path) -> dict[str, str]:
    """An environment with a list of its own, and the place of the marker."""
    return {"XDG_STATE_HOME": str(tmp_path / "state"), "MARKER": str(tmp_path / "marker")}


@pytest.fixture
def desk(tmp_path: Path) -> Path:
    """The user's working folder, and beside it a folder of somebody else's, with code in it."""
    (tmp_path / "desk").mkdir()
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "evil.py").write_text(CODE)
    return tmp_path / "desk"


def refused(done: Done, desk: Path, *words: str) -> None:
    """One clear error with these words, and the code has not run."""
    assert done.code == 2, done.out + done.err
    assert "Traceback" not in done.err
    assert all(word in done.err for word in words), done.err
    assert not (desk.parent / "marker").exists()


# -- only declared kinds ---------------------------------------------------------------------------
CALLABLES = [
    ["data=os:system", "data.command=touch ../marker"],
    ["data=subprocess:getoutput", "data.cmd=touch ../marker"],
    ["data=pathlib:Path"],
    ["partition.kind=os:system", "partition.command=touch ../marker"],
    ["partition.kind=subprocess:getoutput", "partition.cmd=touch ../marker"],
    ["partition.kind=subprocess:Popen", "partition.args=touch ../marker", "partition.shell=true"],
    ["model.kind=subprocess:Popen", "model.args=touch ../marker", "model.shell=true"],
    ["model.kind=os:system"],
    ["algorithm.kind=os:system"],
    ["algorithm.kind=dpsgd", "topology.kind=os:system"],
    ["local.optimizer=os:system", "local.command=touch ../marker"],
    ["local.optimizer=subprocess:getoutput", "local.cmd=touch ../marker"],
    ["data=mine.py:system", "data.command=touch ../marker"],  # defined elsewhere, and only imported there
    ["partition.kind=mine.py:system", "partition.command=touch ../marker"],
    ["local.optimizer=mine.py:system", "local.command=touch ../marker"],
]


@pytest.mark.parametrize("words", CALLABLES, ids=" ".join)
def test_not_even_the_user_makes_a_callable_of_a_module_a_kind(quick: Quick, desk: Path, words: list[str]) -> None:
    (desk / "mine.py").write_text("from os import system\n")
    before = files(desk)
    command = "run" if CALLABLES.index(words) % 2 else "partition"  # which parse settings in the same way
    refused(quick(command, *words, cwd=desk), desk, "is not a")
    assert files(desk) == before


@pytest.mark.parametrize("name", ["os:system", "builtins:print", "mine.py:system"])
def test_a_loss_is_a_function_of_a_file(quick: Quick, desk: Path, name: str) -> None:
    (desk / "mine.py").write_text("from os import system\n")
    before = files(desk)
    refused(quick("run", *QUICK, f"task.loss={name}", cwd=desk), desk, f"task.loss: '{name}' is not a function")
    assert files(desk) == before


def test_a_loss_does_not_run_without_consent(quick: Quick, desk: Path, world_outside: dict[str, str]) -> None:
    """It is not loaded before it is needed: to show the settings, or to share out rows, it is not."""
    written(desk.parent / "theirs" / "config.toml", {"task": {"loss": "../theirs/evil.py:error"}})
    for words in (("run", "../theirs/config.toml"), ("resume", "../theirs")):
        refused(quick(*words, cwd=desk, env=world_outside), desk, "task.loss", "is code in", "evil.py", "--trust")
    for words in (("run", "../theirs/config.toml", "--print-config"), ("partition", "../theirs/config.toml")):
        assert quick(*words, cwd=desk, env=world_outside).code == 0
        assert not (desk.parent / "marker").exists()
    done = quick("run", "../theirs/config.toml", "--trust", "local.lr=0.001", "--out", "r", cwd=desk, env=world_outside)
    assert done.code == 0, done.err
    assert (desk.parent / "marker").exists()


def test_a_base_class_is_no_kind(quick: Quick, desk: Path) -> None:
    for name in ("algorithm=fedloom.algorithm:Algorithm", "model=fedloom.models.net:NetSpec", "model=torch.nn:Module"):
        refused(quick("run", name, cwd=desk), desk, "is not a")


# -- consent ---------------------------------------------------------------------------------------
NAMED = {  # by what is named, how a configuration names it
    "data": {"data": {"source": "../theirs/evil.py:load"}},
    "partition": {"partition": {"kind": "../theirs/evil.py:deal", "clients": 6}},
    "model": {"model": {"kind": "../theirs/evil.py:Net"}},
    "algorithm": {"algorithm": {"kind": "../theirs/evil.py:Mine"}},
    "algorithm as a file": {"algorithm": "../theirs/evil.py"},
    "algorithm of a module": {"algorithm": {"kind": "evil:Mine"}},
    "algorithm by its bare name": {"algorithm": {"kind": "evil"}},
    "topology": {
        "algorithm": {"kind": "dpsgd"},
        "topology": {"kind": "../theirs/evil.py:Circle"},
        "cohort": {},
    },
    "optimizer": {"local": {"optimizer": "../theirs/evil.py:slow"}},
}


def written(path: Path, table: dict[str, object]) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(tomli_w.dumps({k: v for k, v in (SETTINGS | table).items() if v != {}}))
    return path


def laid_out(desk: Path) -> None:
    """The code is also where a bare name and a module would be looked for."""
    (desk / "algorithms").mkdir()
    for place in (desk / "algorithms" / "evil.py", desk / "evil.py"):
        place.write_text(CODE)


@pytest.mark.parametrize("what", NAMED)
def test_code_that_a_file_or_folder_names_does_not_run_without_consent(
    quick: Quick, desk: Path, world_outside: dict[str, str], what: str
) -> None:
    laid_out(desk)
    written(desk.parent / "theirs" / "config.toml", NAMED[what])
    before = files(desk)
    commands = [("run", "../theirs/config.toml", "--print-config"), ("partition", "../theirs/config.toml")]
    commands += [("resume", "../theirs"), ("compare", "../theirs/config.toml", "fedavg", "fedprox", "--seeds", "1")]
    if what == "algorithm as a file":  # whatever is named, the ways lead through one gate; one of them goes all ways
        commands += [("run", "../theirs/config.toml", *more) for more in ((), ("rounds=3",), ("--ranks", "2"))]
        commands += [("resume", "../theirs", *more) for more in (("--ranks", "2"), ("--accept-changes",))]
    for words in commands:
        if words[0] == "compare" and "algorithm" in NAMED[what]:
            continue  # of an experiment, a comparison leaves out the algorithm
        done = quick(*words, cwd=desk, env=world_outside)
        refused(done, desk, "is code in", "evil.py", "--trust")
    assert files(desk) == before


@pytest.mark.parametrize("what", NAMED)
def test_with_trust_it_runs_and_is_not_asked_for_again(
    quick: Quick, desk: Path, world_outside: dict[str, str], what: str
) -> None:
    laid_out(desk)
    written(desk.parent / "theirs" / "config.toml", NAMED[what])
    words = ("run", "../theirs/config.toml", "--trust", "rounds=1", "--out", "r")
    done = quick(*words, cwd=desk, env=world_outside)
    assert done.code == 0, done.err
    assert (desk.parent / "marker").exists()
    assert quick("resume", "r", "--rounds", "2", cwd=desk, env=world_outside).code == 0
    assert quick("run", "../theirs/config.toml", "--print-config", cwd=desk, env=world_outside).code == 0


COMPARED = {
    "a method": {"algorithms": ["fedavg", "../theirs/evil.py"]},
    "a method by its bare name": {"algorithms": ["fedavg", "evil"]},
    "an axis": {"algorithms": ["fedavg"], "grid": {"partition.kind": ["iid", "../theirs/evil.py:deal"]}},
    "beside a method": {"algorithms": [{"kind": "fedavg", "with": {"local.optimizer": "../theirs/evil.py:slow"}}]},
}


@pytest.mark.parametrize("what", COMPARED)
def test_code_that_a_comparison_names_does_not_run_without_consent(
    quick: Quick, desk: Path, world_outside: dict[str, str], what: str
) -> None:
    laid_out(desk)
    table = SETTINGS | {"rounds": 1, "compare": COMPARED[what] | {"seeds": 1}}
    old = written(desk.parent / "theirs" / "compare.toml", table)
    done = quick("compare", old, cwd=desk, env=world_outside)
    refused(done, desk, "is code in", "evil.py", "--trust")
    done = quick("compare", "fedavg", *QUICK, "--seeds", "1", "--out", "../theirs", cwd=desk, env=world_outside)
    refused(done, desk, "../theirs/compare.toml", "is code in", "evil.py", "--trust")
    if what == "a method":
        done = quick("compare", old, "--trust", "--jobs", "1", "--out", "c", cwd=desk, env=world_outside)
        assert done.code == 0, done.err
        assert (desk.parent / "marker").exists()


FUNCTIONS = {  # the settings that name a function, which is not called before a run: how a configuration names it
    "task.loss": {"task": {"loss": "../theirs/evil.py:error"}},
    "aggregation.rule": {"aggregation": {"rule": "../theirs/evil.py:rule"}},
    "cohort.sampling": {"cohort": {"sampling": "../theirs/evil.py:sampling"}},
    "evaluate.metrics": {"evaluate": {"metrics": ["../theirs/evil.py:metric"]}},
}


def trusted(desk: Path) -> list[str]:
    """The list of what the user has vouched for."""
    listed = desk.parent / "state" / "fedloom" / "trusted"
    return listed.read_text().splitlines() if listed.exists() else []


@pytest.mark.parametrize("key", FUNCTIONS)
def test_a_function_that_a_comparison_or_a_search_names_does_not_run_without_consent(
    quick: Quick, desk: Path, world_outside: dict[str, str], key: str
) -> None:
    (desk / "mine.py").write_text(CODE)
    assert quick("run", *QUICK, "algorithm=mine.py:Mine", "--out", "r", cwd=desk, env=world_outside).code == 0
    (desk.parent / "marker").unlink()
    theirs, before, known = desk.parent / "theirs", files(desk), trusted(desk)
    ((section, setting),) = FUNCTIONS[key].items()
    plain, methods = {"rounds": 1}, {"algorithms": ["fedavg"], "seeds": 1}
    named = plain | {section: setting}
    axis = {key: [*setting.values()]}
    old = {
        "compare": written(theirs / "named.toml", named | {"compare": methods}),
        "grid": written(theirs / "grid.toml", plain | {"compare": methods | {"grid": axis}}),
        "tune": written(theirs / "tune.toml", named | {"evaluate": {"validation": 0.2, **named.get("evaluate", {})}}),
    }
    for words in (
        ("compare", old["compare"], "--jobs", "1", "--out", "c"),
        ("compare", old["grid"], "--jobs", "1", "--out", "c"),
        ("tune", old["tune"], "local.lr=0.1,0.2", "--trials", "1", "--jobs", "1", "--out", "t"),
    ):
        refused(quick(*words, cwd=desk, env=world_outside), desk, key, "is code in", "evil.py", "--trust")
    assert files(desk) == before
    assert trusted(desk) == known == [f"{desk}/mine.py:Mine"]


def test_who_names_a_function_in_a_comparison_or_a_search_may_run_it(
    quick: Quick, desk: Path, world_outside: dict[str, str]
) -> None:
    (desk / "mine.py").write_text("def loss(outputs, y):\n    return (outputs.sum(-1) - y) ** 2\n")
    (desk / "other.py").write_text((desk / "mine.py").read_text())
    words = (*QUICK, "task.loss=mine.py:loss", "--jobs", "1", "--out", "c")
    done = quick("compare", "fedavg", "--seeds", "1", *words, cwd=desk, env=world_outside)
    assert done.code == 0, done.out + done.err
    assert trusted(desk) == [f"{desk}/mine.py:loss"]
    words = (*QUICK, "task.loss=cross_entropy,other.py:loss", "evaluate.validation=0.2", "--metric", "accuracy")
    done = quick("tune", *words, "--trials", "1", "--jobs", "1", "--out", "t", cwd=desk, env=world_outside)
    assert done.code == 0, done.out + done.err
    assert trusted(desk) == [f"{desk}/{name}.py:loss" for name in ("mine", "other")]


def test_a_misspelt_function_is_refused_before_anything_is_written(
    quick: Quick, desk: Path, world_outside: dict[str, str]
) -> None:
    (desk / "mine.py").write_text("def loss(outputs, y):\n    return (outputs.sum(-1) - y) ** 2\n")
    before, words = files(desk), (*QUICK, "task.loss=mine.py:los", "evaluate.validation=0.2", "--out", "o")
    for command in (("compare", "fedavg"), ("tune", "local.lr=0.1,0.2")):
        done = quick(*command, *words, cwd=desk, env=world_outside)
        assert done.code == 2, done.out
        assert "'mine.py' has no 'los' (did you mean 'loss'?)" in done.err
        assert files(desk) == before


def test_a_cell_runs_what_the_comparison_names_and_not_what_lies_in_its_folder(
    quick: Quick, desk: Path, world_outside: dict[str, str]
) -> None:
    words = ("compare", "fedavg", *QUICK, "--seeds", "1", "--jobs", "1", "--out", "c")
    assert quick(*words, cwd=desk, env=world_outside).code == 0
    (cell,) = (desk / "c" / "cells").iterdir()
    (cell / "summary.json").unlink()
    config = tomllib.loads((cell / "config.toml").read_text())
    (cell / "config.toml").write_text(tomli_w.dumps(config | {"algorithm": {"kind": "../theirs/evil.py"}}))
    done = quick(*words, cwd=desk, env=world_outside)
    assert done.code == 1, done.out
    assert "is code in" in done.out
    assert not (desk.parent / "marker").exists()


def test_who_names_code_may_run_it_and_go_on_with_it(quick: Quick, desk: Path, world_outside: dict[str, str]) -> None:
    (desk / "mine.py").write_text(CODE)
    words = ("data=./mine.py:load", "model.kind=logistic", "algorithm=mine.py:Mine", "partition.clients=3")
    words += ("rounds=1", "checkpoint.curves=false")
    done = quick("run", *words, "--out", "r", cwd=desk, env=world_outside)
    assert done.code == 0, done.err
    assert (desk.parent / "marker").exists()
    assert quick("resume", "r", "--rounds", "2", cwd=desk, env=world_outside).code == 0
    # What was named is on a list in the user's home, for this user alone; what else the file holds is not.
    names = (desk.parent / "state" / "fedloom" / "trusted").read_text().splitlines()
    assert sorted(names) == [f"{desk}/mine.py:{name}" for name in ("Mine", "load")]
    assert (desk.parent / "state" / "fedloom" / "trusted").stat().st_mode & 0o077 == 0
    (desk.parent / "marker").unlink()
    written(desk / "other.toml", {"partition": {"kind": "mine.py:deal", "clients": 3}})
    refused(quick("run", "other.toml", cwd=desk, env=world_outside), desk, "'mine.py:deal' is code", "--trust")
    # A file that others can write to may not be what it was when it was named.
    (desk / "mine.py").chmod(0o666)
    refused(quick("resume", "r", "--rounds", "3", cwd=desk, env=world_outside), desk, "mine.py", "--trust")
    # Nor is a file of the same name in another folder.
    (desk.parent / "theirs" / "mine.py").write_text(CODE)
    done = quick("resume", "../desk/r", cwd=desk.parent / "theirs", env=world_outside)
    refused(done, desk, f"{desk.parent}/theirs/mine.py", "--trust")


@pytest.mark.parametrize(
    "words", [("check", "mine.py"), ("describe", "mine.py:Mine"), ("run", *QUICK, "algorithm=mine.py")]
)
def test_a_mode_without_any_code_of_the_users(
    quick: Quick, desk: Path, world_outside: dict[str, str], words: tuple[str, ...]
) -> None:
    (desk / "mine.py").write_text(CODE)
    done = quick(*words, "--no-user-code", cwd=desk, env=world_outside)
    refused(done, desk, "'mine.py", "all code but fedloom's own is refused")
    done = quick(*words, cwd=desk, env=world_outside | {"FEDLOOM_NO_USER_CODE": "1"})
    refused(done, desk, "'mine.py", "all code but fedloom's own is refused")


def test_no_user_code_refuses_what_is_trusted_and_lets_everything_else_run(
    quick: Quick, desk: Path, world_outside: dict[str, str]
) -> None:
    (desk / "mine.py").write_text(CODE)
    assert quick("run", *QUICK, "algorithm=mine.py", "--out", "r", cwd=desk, env=world_outside).code == 0
    (desk.parent / "marker").unlink()
    for more in ((), ("--trust",)):
        done = quick("resume", "r", "--rounds", "2", "--no-user-code", *more, cwd=desk, env=world_outside)
        refused(done, desk, "all code but fedloom's own is refused")
    assert quick("run", *QUICK, "--no-user-code", "--out", "plain", cwd=desk, env=world_outside).code == 0
    words = ("compare", "fedavg", *QUICK, "--seeds", "1", "--no-user-code", "--out", "c")
    assert quick(*words, cwd=desk, env=world_outside).code == 0


# -- modules of the working folder -----------------------------------------------------------------
LEARNS = """
import helpful
import sched
from fedloom import FedAvg

class Learns(FedAvg):
    def update(self, server, inbox):
        return server._replace(w=server.w + helpful.SHARE * inbox.mean.dw.to(server.w.dtype))
"""


def script(*words: str, cwd: Path, env: dict[str, str], kind: type[subprocess.Popen[str]] = warm.Popen) -> Done:
    """The installed command, for which the working folder is not a place of modules (unlike ``python -m``)."""
    command = [sys.executable, "-P", "-m", "fedloom", *words]
    with kind(command, cwd=cwd, env=environment(env), stdout=-1, stderr=-1, text=True) as process:
        out, err = process.communicate(timeout=HANG)
    return Done(process.returncode, out, err)


@pytest.mark.slow
def test_a_module_of_the_working_folder_hides_none_of_pythons(desk: Path, world_outside: dict[str, str]) -> None:
    """Not of those that a new process imports, nor of one that first the code of the user imports.

    Only the latter shows it where a process is forked from one that has imported the former.
    """
    for name in ("random.py", "sched.py"):
        (desk / name).write_text(f"open({str(desk.parent / 'marker')!r}, 'w').close()\n")
    (desk / "algorithms").mkdir()
    for place, name in ((desk / "algorithms", "learns.py"), (desk, "mine.py")):
        (place / "helpful.py").write_text("SHARE = 1.0\n")  # beside each, as it is imported from there
        (place / name).write_text(LEARNS)
    words = ("compare", "fedavg", "learns", "mine.py:Learns", *QUICK, "--seeds", "1", "--jobs", "1", "--out", "c")
    done = script(*words, cwd=desk, env=world_outside)
    assert done.code == 0, done.out + done.err
    assert len({record.read_bytes() for record in (desk / "c" / "cells").rglob("metrics.jsonl")}) == 1
    words = ("run", *QUICK, "algorithm=mine.py:Learns", "--out")
    for more in (("r", "--ranks", "2"), ("fresh",)):
        kind = warm.FRESH if more == ("fresh",) else warm.Popen
        done = script(*words, *more, cwd=desk, env=world_outside, kind=kind)
        assert done.code == 0, done.err
    assert not (desk.parent / "marker").exists()


# -- what a run began with -------------------------------------------------------------------------
def test_changed_code_is_refused_until_the_change_is_accepted(
    quick: Quick, desk: Path, world_outside: dict[str, str]
) -> None:
    (desk / "helpful.py").write_text("SHARE = 1.0\n")
    (desk / "mine.py").write_text(LEARNS)
    assert quick("run", *QUICK, "algorithm=mine.py:Learns", "--out", "r", cwd=desk, env=world_outside).code == 0
    began = json.loads((desk / "r" / "environment.json").read_text())
    assert began["files"] == {name: digest(desk / name) for name in ("mine.py", "helpful.py")}
    before = (desk / "r" / "metrics.jsonl").read_bytes()
    (desk / "helpful.py").write_text("SHARE = 0.5\n")
    done = quick("resume", "r", "--rounds", "2", cwd=desk, env=world_outside)
    assert done.code == 2
    assert "r: " in done.err
    assert "helpful.py has changed (SHA-256 " in done.err
    assert "mine.py" not in done.err
    assert "--accept-changes" in done.err
    assert (desk / "r" / "metrics.jsonl").read_bytes() == before
    (desk / "helpful.py").unlink()
    assert "helpful.py is missing" in quick("resume", "r", "--rounds", "2", cwd=desk, env=world_outside).err
    (desk / "helpful.py").write_text("SHARE = 0.5\n")
    done = quick("resume", "r", "--rounds", "2", "--accept-changes", cwd=desk, env=world_outside)
    assert done.code == 0, done.err
    now = json.loads((desk / "r" / "environment.json").read_text())
    assert now["files"]["helpful.py"] == digest(desk / "helpful.py")
    assert now["changes"] == [
        f"after round 1: helpful.py has changed (SHA-256 {began['files']['helpful.py'][:12]}, now "
        f"{now['files']['helpful.py'][:12]})"
    ]
    assert quick("resume", "r", "--rounds", "3", cwd=desk, env=world_outside).code == 0  # asked once


def test_what_a_function_imports_only_when_it_is_called_is_known_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "parcel").mkdir()
    texts = {
        "late.py": "def load():\n    import lately\n    from parcel import inner\n    import json.tool\n",
        "lately.py": "import latest\n",
        "latest.py": "",
        "parcel/__init__.py": "",
        "parcel/inner.py": "def f():\n    from . import outer\n    from .missing import g\n",
        "parcel/outer.py": "",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    usercode.vouch("late.py:load", lasting=False)
    usercode.load_code("late.py:load", "data")
    monkeypatch.delitem(sys.modules, "fedloom_user_late")
    assert "lately" not in sys.modules
    assert usercode.files(["late.py:load"]) == {name: digest(tmp_path / name) for name in texts}


def test_a_folder_whose_code_was_refused_is_not_searched_for_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])
    (tmp_path / "theirs.py").write_text("")
    with pytest.raises(ConfigError, match=r"'theirs:Net' is code in .*theirs\.py that you have not run before"):
        usercode.load_code("theirs:Net", "model.kind")
    assert str(tmp_path) not in sys.path


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (("algorithm=mine", "model.kind=logistic"), "algorithms/mine.py"),
        (("model.kind=own.py:Net",), "own.py"),
        (("local.optimizer=own.py:slow", "model.kind=logistic"), "own.py"),
        (("data=./own.py:load", "model.kind=logistic"), "own.py"),
        (("partition.kind=own.py:deal", "model.kind=logistic"), "own.py"),
    ],
    ids=lambda v: v[0] if isinstance(v, tuple) else "",
)
def test_code_of_every_kind_is_known_again(
    quick: Quick, desk: Path, world_outside: dict[str, str], words: tuple[str, ...], name: str
) -> None:
    (desk / "algorithms").mkdir()
    for place in (desk / "algorithms" / "mine.py", desk / "own.py"):
        place.write_text(CODE)
    small = ("rounds=1", "partition.clients=6", "checkpoint.curves=false")
    done = quick("run", *words, *small, "--out", "r", cwd=desk, env=world_outside)
    assert done.code == 0, done.err
    (desk / name).write_text(CODE + "\n# another line\n")
    done = quick("resume", "r", "--rounds", "2", cwd=desk, env=world_outside)
    assert done.code == 2
    assert f"{name} has changed" in done.err


def rewrite(path: Path, said: dict[str, object]) -> None:
    """Let a run folder say something else of itself, as if it had always done so."""
    path.write_text(json.dumps(said))
    (path.parent / "manifest.json").unlink(missing_ok=True)


def test_changed_weights_are_refused_and_other_versions_are_reported(
    quick: Quick, desk: Path, world_outside: dict[str, str]
) -> None:
    assert quick("run", *QUICK, "--out", "first", cwd=desk, env=world_outside).code == 0
    (desk / "first" / "model.safetensors").rename(desk / "w.safetensors")
    words = ("run", *QUICK, "model.weights=w.safetensors", "--out", "r")
    assert quick(*words, cwd=desk, env=world_outside).code == 0
    old = (desk / "w.safetensors").read_bytes()
    save_file({"head.weight": torch.zeros(10, 64), "head.bias": torch.zeros(10)}, desk / "w.safetensors")
    done = quick("resume", "r", "--rounds", "2", cwd=desk, env=world_outside)
    assert done.code == 2
    assert "w.safetensors has changed" in done.err
    (desk / "w.safetensors").write_bytes(old)
    path = desk / "r" / "environment.json"
    then = json.loads(path.read_text())
    assert {"fedloom", "torch", "numpy"} <= set(then["versions"])
    rewrite(path, then | {"versions": then["versions"] | {"torch": "1.0"}})
    done = quick("resume", "r", "--rounds", "2", cwd=desk, env=world_outside)
    assert done.code == 0, done.err
    told = f"torch was 1.0 when the run began and is {torch.__version__} now"
    assert f"note: {told}, so the rounds that follow may differ" in done.out
    assert json.loads(path.read_text())["changes"] == [f"after round 1: {told}"]
    assert "torch was" not in quick("resume", "r", "--rounds", "3", cwd=desk, env=world_outside).out


def test_a_damaged_record_of_files_is_no_trouble(quick: Quick, desk: Path) -> None:
    assert quick("run", *QUICK, "--out", "r", cwd=desk).code == 0
    path = desk / "r" / "environment.json"
    whole = json.loads(path.read_text())
    for wrong in ({"/dev/zero": "ab"}, {"a\0b": "ab"}, {"": "ab"}):
        rewrite(path, whole | {"files": wrong})
        done = quick("resume", "r", "--rounds", "2", cwd=desk)
        assert done.code == 2
        assert "is missing" in done.err
    torch_before = {"versions": {"torch": "1.0"}, "changes": 5}
    rewrite(path, whole | {"files": {"/dev/zero": 3}} | torch_before)
    assert quick("resume", "r", "--rounds", "2", cwd=desk).code == 0


def test_a_comparison_runs_cells_again_whose_code_has_changed(
    quick: Quick, desk: Path, world_outside: dict[str, str]
) -> None:
    (desk / "helpful.py").write_text("SHARE = 1.0\n")
    (desk / "mine.py").write_text(LEARNS)
    words = ("compare", "fedavg", "mine.py:Learns", *QUICK, "--seeds", "1", "--jobs", "1", "--out", "c")
    first = quick(*words, cwd=desk, env=world_outside)
    assert first.code == 0, first.err
    before = {record.parent.name: record.read_bytes() for record in (desk / "c" / "cells").rglob("metrics.jsonl")}
    assert len(set(before.values())) == 1
    (desk / "helpful.py").write_text("SHARE = 0.01\n")
    done = quick(*words, cwd=desk, env=world_outside)
    assert done.code == 0, done.err
    assert (
        "note: 1 cell to be run again, since helpful.py has changed (1 cell); the old ones are in c/replaced"
        in done.out
    )
    assert "1 of 2 cells are done already" in done.out
    after = {record.parent.name: record.read_bytes() for record in (desk / "c" / "cells").rglob("metrics.jsonl")}
    assert sorted(after) == sorted(before)
    assert sum(after[name] == before[name] for name in before) == 1


# -- in Python -------------------------------------------------------------------------------------
class Handed(FedAvg):
    """An algorithm that is handed over as a class."""


@pytest.mark.slow
def test_what_python_hands_over_can_be_resumed(tmp_path: Path) -> None:
    settings = {"partition": {"clients": 6}, "model": "logistic", "checkpoint": {"curves": False}}
    package.run(Handed, rounds=1, out=tmp_path / "r", **settings)
    where = json.loads((tmp_path / "r" / "environment.json").read_text())
    assert "test_usercode.py" in [Path(name).name for name in where["files"]]
    assert package.resume(tmp_path / "r", rounds=2).rounds == 2


@pytest.mark.slow
def test_python_needs_consent_for_a_folder_too(desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(desk)
    monkeypatch.setenv("MARKER", str(desk.parent / "marker"))
    monkeypatch.setenv("XDG_STATE_HOME", str(desk.parent / "state"))
    written(desk.parent / "theirs" / "config.toml", NAMED["algorithm"])
    with pytest.raises(ConfigError, match=r"evil\.py that you have not run before"):
        package.resume("../theirs")
    assert not (desk.parent / "marker").exists()
    assert package.resume("../theirs", trust=True).rounds == 2
    assert (desk.parent / "marker").exists()
    (desk.parent / "theirs" / "evil.py").write_text(CODE + "\n")
    with pytest.raises(CheckpointError, match=r"evil\.py has changed"):
        package.resume("../theirs", rounds=3)
    assert package.resume("../theirs", rounds=3, accept_changes=True).rounds == 3
    monkeypatch.setenv("FEDLOOM_NO_USER_CODE", "1")
    with pytest.raises(ConfigError, match="all code but fedloom's own is refused"):
        package.run("../theirs/evil.py", rounds=1)


def test_two_working_folders_are_not_confused(desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that was given in one folder means nothing in another."""
    monkeypatch.setenv("MARKER", str(desk.parent / "marker"))
    monkeypatch.setenv("XDG_STATE_HOME", str(desk.parent / "state"))
    monkeypatch.chdir(desk)
    usercode.vouch({"algorithm": [("evil.py",)]})
    monkeypatch.chdir(desk.parent / "theirs")
    with pytest.raises(ConfigError, match="that you have not run before"):
        usercode.load_file("evil.py", "algorithm.kind", called="evil.py")
    assert not os.path.exists(os.environ["MARKER"])


# -- what others can change, and what was only looked at -------------------------------------------
def test_a_file_that_others_can_change_is_refused_as_one(
    quick: Quick, desk: Path, world_outside: dict[str, str]
) -> None:
    own = desk / "own.py"
    own.write_text(CODE)
    (desk / "e.toml").write_text('model.kind = "own.py:Net"\nrounds = 1\n')
    first = quick("run", "model.kind=own.py:Net", "--print-config", cwd=desk, env=world_outside)
    assert first.code == 0, first.err
    (desk.parent / "marker").unlink()
    own.chmod(0o666)
    done = quick("run", "e.toml", "--print-config", cwd=desk, env=world_outside)
    refused(done, desk, "every user of this machine can change", f"chmod o-w {own}")
    assert "not run before" not in done.err
    own.chmod(0o644)
    assert quick("run", "e.toml", "--print-config", cwd=desk, env=world_outside).code == 0


def test_a_file_that_others_can_change_is_run_when_named_but_not_remembered(
    quick: Quick, desk: Path, world_outside: dict[str, str]
) -> None:
    own = desk / "own.py"
    own.write_text(CODE)
    own.chmod(0o666)
    (desk / "e.toml").write_text('model.kind = "own.py:Net"\nrounds = 1\n')
    assert quick("run", "model.kind=own.py:Net", "--print-config", cwd=desk, env=world_outside).code == 0
    (desk.parent / "marker").unlink()
    own.chmod(0o644)  # somebody may have changed it meanwhile
    done = quick("run", "e.toml", "--print-config", cwd=desk, env=world_outside)
    refused(done, desk, "not run before", "--trust")


def test_a_name_is_listed_once(quick: Quick, desk: Path, world_outside: dict[str, str]) -> None:
    own = desk / "own.py"
    own.write_text(CODE)
    for _ in range(2):
        assert quick("run", "model.kind=own.py:Net", "--print-config", cwd=desk, env=world_outside).code == 0
    listed = Path(world_outside["XDG_STATE_HOME"], "fedloom", "trusted").read_text()
    assert listed == f"{own}:Net\n"


@pytest.mark.parametrize(
    ("words", "setting"),
    [
        (["own.py:Mine"], 'algorithm.kind = "own.py:Mine"'),
        (["topology", "own.py:Circle"], 'algorithm.kind = "dpsgd"\ntopology.kind = "own.py:Circle"'),
        (["topology", "kind=own.py:Circle"], 'algorithm.kind = "dpsgd"\ntopology.kind = "own.py:Circle"'),
    ],
    ids=" ".join,
)
def test_to_describe_code_is_not_to_trust_it_later(
    quick: Quick, desk: Path, world_outside: dict[str, str], words: list[str], setting: str
) -> None:
    (desk / "own.py").write_text(CODE)
    (desk / "e.toml").write_text(f"{setting}\n")
    described = quick("describe", *words, cwd=desk, env=world_outside)
    assert described.code == 0, described.err
    (desk.parent / "marker").unlink()
    refused(quick("run", "e.toml", "--print-config", cwd=desk, env=world_outside), desk, "that you have not run before")


# -- code that does not load -----------------------------------------------------------------------
def test_a_constant_without_a_type_in_a_class_gets_both_ways_to_write_it(tmp_path: Path) -> None:
    own = tmp_path / "flags.py"
    own.write_text("from fedloom import FedAvg\n\n\nclass Mine(FedAvg):\n    stateful = True\n")
    with pytest.raises(ConfigError) as error:
        package.run(f"{own}:Mine", rounds=1)
    said = "'stateful = True' in a class has no type: write 'stateful: bool = True' for a setting"
    assert f"{said}, or 'stateful: ClassVar = True' for a constant" in str(error.value)
    assert "pydantic" not in str(error.value).lower()


def test_another_failed_import_is_reported_as_it_is(tmp_path: Path) -> None:
    own = tmp_path / "missing.py"
    own.write_text("import nothing_of_this_name\n")
    with pytest.raises(
        ConfigError, match="failed to load: ModuleNotFoundError: No module named 'nothing_of_this_name'"
    ):
        package.run(f"{own}:Mine", rounds=1)
