"""What happens to nodes: one more of them, a full disk, code that fails."""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fedloom.core import usercode
from fedloom.core.errors import CheckpointError, ConfigError, DataError
from fedloom.deploy.conduct import conduct
from fedloom.deploy.contract import read_contract
from fedloom.deploy.fleet import Failed, LostNodesError, Rules, read_population, read_rounds
from fedloom.deploy.site import SERVER_TOML, read_state
from fedloom.runs.settings import parse
from fedloom.runs.start import start
from support import warm
from support.federation import Federation, a_site, config_of, here, same, table_of, weights

pytest.importorskip("flwr")
from fedloom.deploy.members import add_node
from fedloom.deploy.serve import start_run, stop_run


def test_a_node_joins_between_two_runs(tmp_path: Path) -> None:
    home = a_site(tmp_path / "site", config_of("scaffold", rounds=2), secure_sum=False)
    broken = here(home)
    broken.tamper = lambda *_: b""
    with pytest.raises(LostNodesError):
        conduct(home, broken, 1, print)
    (home / "runs" / "1").mkdir(parents=True, exist_ok=True)
    with pytest.raises(CheckpointError, match="run 1 has not ended, and a run keeps its initial nodes"):
        add_node(home.parent, "Dan")
    conduct(home, here(home), 1, print)
    before = read_contract(home).parts
    assert add_node(home.parent, "Dan") == "dan"
    contract = read_contract(home)
    assert contract.nodes == ("Ada", "Bea", "Cem", "Dan")
    assert contract.config.partition.clients == 4
    assert contract.parts != before
    for folder in ("ada", "dan", "contract"):
        assert read_contract(home.parent / folder).parts == contract.parts
    assert {path.name for path in (home.parent / "contract").iterdir()} == {"experiment.toml", "federation.json"}
    conduct(home, here(home), 2, print)
    start(contract.config, out=tmp_path / "lab", root=Path())
    assert same(weights(home / "runs" / "2"), weights(tmp_path / "lab"))
    with pytest.raises(ConfigError, match="taken twice"):
        add_node(home.parent, "Ada")
    (home.parent / "authority" / "ca.key").unlink()
    with pytest.raises(DataError, match=r"ca\.key: is missing, but is needed to sign certificates"):
        add_node(home.parent, "Eve")


def test_a_run_goes_on_without_a_node_that_was_revoked_or_is_away_if_the_quorum_allows(tmp_path: Path) -> None:
    home = a_site(tmp_path / "site", config_of("scaffold", rounds=3, evaluate={"personal": False}))
    gone = Failed("its key has been revoked", revoked=True)
    transport = here(home)
    transport.tamper = lambda count, client, answer: gone if client == 1 else answer
    with pytest.raises(
        LostNodesError, match=r"2 of 3 nodes are connected, 3 are needed \(rules\.quorum\); Bea: its key"
    ):
        conduct(home, transport, 1, print)
    (home / SERVER_TOML).write_text((home / SERVER_TOML).read_text().replace("quorum = 1.0", "quorum = 0.6"))
    conduct(home, transport, 1, print)
    assert [line["answered"] for line in read_rounds(home)] == [["Ada", "Cem"]] * 4
    assert read_population(home, 1) == ((178, 0, 195), (45, 0, 49))

    stopped = here(home)
    stopped.tamper = lambda count, client, answer: (
        stop_run(home.parent) or answer if count == 2 and not client else answer
    )
    assert conduct(home, stopped, 2, print) is None
    away, told = here(home), list[str]()
    away.tamper = lambda count, client, answer: Failed("is not connected") if client == 1 and count < 4 else answer
    conduct(home, away, 2, told.append)
    assert "Bea: is not connected; continuing without it" in told
    *_, second, third, finish = ((line["kind"], line["answered"]) for line in read_rounds(home))
    assert (second, third) == (("train", ["Ada", "Cem"]), ("train", ["Ada", "Bea", "Cem"]))
    assert finish == ("finish", ["Ada", "Bea", "Cem"])


def test_a_quorum_is_exact_and_a_secure_sum_needs_more_than_half() -> None:
    assert [Rules(quorum=share).needed(count) for share, count in ((0.55, 100), (0.07, 100), (0.56, 25))] == [55, 7, 14]
    assert [Rules(quorum=0.5).needed(count) for count in (0, 1, 4, 5)] == [1, 1, 2, 3]
    assert [Rules(quorum=0.5, secure_sum=True).needed(count) for count in (2, 3, 4, 5)] == [2, 2, 3, 3]


def test_a_run_is_not_started_if_too_few_keys_are_left_for_a_secure_sum(tmp_path: Path) -> None:
    home = a_site(tmp_path / "site", config_of("fedavg"), secure_sum=True)
    text = (home / SERVER_TOML).read_text()
    (home / SERVER_TOML).write_text(text.replace("quorum = 1.0", "quorum = 0.3"))
    for name in ("ada", "bea"):
        (home / f"{name}.pub").unlink()
    with pytest.raises(ConfigError, match="2 of 3 nodes are needed, and keys were revoked: Ada, Bea"):
        start_run(home.parent)


def test_a_node_whose_disk_is_full_says_so_and_goes_on_when_it_is_not(tmp_path: Path) -> None:
    federation = Federation(tmp_path, config_of("scaffold"), quorum=0.6)
    state = federation.advanced(rounds=1)
    full = federation.transport.nodes[1].answer
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)

    def answer(data: bytes) -> bytes:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1, usual[1]))
        try:
            return full(data)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, usual)

    federation.transport.nodes[1].answer = answer  # type: ignore[method-assign]
    state = federation.advanced(state, rounds=1)
    *_, line = read_rounds(tmp_path)
    assert line["answered"] == ["Ada", "Cem"]
    assert "cannot write its audit log, OSError: [Errno 27] File too large" in line["failed"]["Bea"]
    federation.restart(1)
    federation.advanced(state, rounds=1)
    *_, line = read_rounds(tmp_path)
    assert line["answered"] == ["Ada", "Bea", "Cem"]


def test_own_code_that_fails_at_a_node_is_named_and_the_node_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "mine.py").write_text(
        "import os\nfrom fedloom import FedAvg\n\n\nclass Mine(FedAvg):\n    def start(self, *given):\n"
        "        if os.environ.get('FAILS'):\n            raise ZeroDivisionError('by chance')\n"
        "        return super().start(*given)\n"
    )
    table = table_of("fedavg", algorithm={"kind": f"{tmp_path / 'mine.py'}:Mine"}, evaluate={"personal": False})
    usercode.vouch(table, lasting=False)
    home = a_site(tmp_path / "site", parse(table))
    (home / SERVER_TOML).write_text((home / SERVER_TOML).read_text().replace("quorum = 1.0", "quorum = 0.6"))
    transport = here(home, trust=True)
    working = transport.nodes[2].answer

    def answer(data: bytes) -> bytes:
        monkeypatch.setenv("FAILS", "1" if transport.count == 2 else "")
        try:
            return working(data)
        finally:
            monkeypatch.setenv("FAILS", "")

    transport.nodes[2].answer = answer  # type: ignore[method-assign]
    conduct(home, transport, 1, print)
    lines = [line for line in read_rounds(home) if line["kind"] == "train"]
    assert "ZeroDivisionError: by chance" in lines[0]["failed"]["Cem"]
    assert [len(line["answered"]) for line in lines] == [2, 3, 3]


def test_a_run_is_stopped_at_once(tmp_path: Path) -> None:
    """Also where the server does not answer: the process of the run is ended, and a later one may go on."""
    home = a_site(tmp_path / "site", config_of("fedavg"))
    with warm.Popen([sys.executable, "-m", "support.conducting", str(home)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        stop_run(home.parent, now=True)
        assert process.wait(600) == -signal.SIGKILL
    assert read_state(home) == {"run": 1, "state": "stopped", "why": "stopped in a round, which is lost"}
    with pytest.raises(CheckpointError, match="no run is under way"):
        stop_run(home.parent, now=True)
    assert conduct(home, here(home), 1, print) is not None
