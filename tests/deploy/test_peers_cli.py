"""Whole networks as processes: keys, bundles, kills and restarts as between real machines."""

from __future__ import annotations

import json
import re
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from safetensors.torch import load_file

from fedloom.deploy.site import read_state
from fedloom.engine.evaluate import models_of
from fedloom.runs.settings import parse, read_toml
from support import warm
from support.federation import simulated, table_of
from support.peers import wait_until
from support.ports import free_ports

OWN = "from fedloom.algorithms.dfedavg import DFedAvg\n\n\nclass Mine(DFedAvg):\n    pass\n"
PATIENCE = 600.0  # seconds: a busy machine is no fault of the code


def peers(*words: Any, **more: Any) -> subprocess.Popen[str]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True} | more
    return warm.Popen([sys.executable, "-P", "-m", "fedloom", "peers", *map(str, words)], **pipes)


def said(process: subprocess.Popen[str], code: int = 0) -> str:
    out, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == code, out
    return out


def experiment(folder: Path, **more: Any) -> Path:
    table = table_of("dpsgd", **({"topology": {"kind": "ring"}} | more))
    del table["cohort"]
    (folder / "exp.toml").write_text(tomli_w.dumps(table))
    return folder / "exp.toml"


def test_a_node_that_is_killed_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    site = tmp_path / "site"
    hosts = ",".join(f"127.0.0.1:{port}" for port in free_ports(3))
    words = ("init", experiment(tmp_path), "--nodes", "Ada, Bea, Cem", "--hosts", hosts, "--out", site)
    assert "over a trusted channel" in said(peers(*words))
    assert [stat.S_IMODE((site / n / "node.key").stat().st_mode) for n in ("ada", "bea", "cem")] == [0o600] * 3
    secrets = {(site / name / "node.key").read_text().strip() for name in ("ada", "bea", "cem")}
    assert len(secrets) == 3
    others = b"".join(p.read_bytes() for p in (site / "ada").iterdir() if p.name != "node.key")
    assert not [secret for secret in secrets if secret.encode() in others]
    assert json.loads(said(peers("status", site / "ada", "--json")))["state"] == "idle"

    ada, cem = (peers("start", site / name, "data=experiment") for name in ("ada", "cem"))
    for files in (30, 36):  # killed before it touches so many of its files: in the first round, then in a later one
        bea = peers("start", site / "bea", "data=experiment", crash_at=files, place=str(site / "bea"))
        said(bea, -signal.SIGKILL)
        killed = json.loads(said(peers("status", site / "bea", "--json"), 5))
        assert (killed["state"], killed["round"] < 3) == ("failed", True)
    shutil.copytree(site / "bea", tmp_path / "killed")
    for process in (peers("start", site / "bea", "data=experiment"), ada, cem):
        assert "all 3 rounds are done" in said(process)

    assert "all rounds are done" in said(peers("start", site / "ada", "data=experiment"))

    found = json.loads(said(peers("status", site, "--json")))
    assert [(one["node"], one["state"], one["round"]) for one in found] == [
        (name, "completed", 3) for name in ("Ada", "Bea", "Cem")
    ]
    assert [one["closed"] for one in found] == [{}] * 3
    exp, state, store = simulated(parse(read_toml(site / "ada" / "experiment.toml")))
    (models,) = models_of(exp, state, store, torch.arange(3))
    for k, name in enumerate(("ada", "bea", "cem")):
        expected = exp.task.tensors(models.w[k], models.buffers[k])
        model = load_file(site / name / "model.safetensors")
        assert all((model[key] == expected[key]).all() for key in expected)

    # As if it had not been started again before all others had done their rounds.
    rules = tmp_path / "killed" / "node.toml"
    rules.write_text(rules.read_text().replace("grace = 60.0", "grace = 0.5"))
    alone = said(peers("start", tmp_path / "killed", "data=experiment"), 5)
    assert "nobody listens at the addresses of Ada, Cem. If their rounds are done" in alone
    assert re.search(r"the model after round [0-2] is saved", alone)
    assert (tmp_path / "killed" / "model.safetensors").is_file()


def test_bundles_that_cannot_be_written_are_one_error(tmp_path: Path) -> None:
    words = ("init", experiment(tmp_path), "--nodes", "Ada, Bea", "--out", tmp_path / "site")
    assert said(peers(*words, largest_file=30), 4) == (
        f"error: writing below {tmp_path} failed: File too large; what was saved before is intact: make room, then try "
        "again\n"
    )


def test_a_network_on_one_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a method of one's own, named on the command line alone."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "mine.py").write_text(OWN)
    method = f"algorithm.kind={tmp_path / 'mine.py'}:Mine"
    words = ("local", experiment(tmp_path, rounds=2), method, "--nodes", 2, "--out", tmp_path / "site", "--json")
    found = json.loads(said(peers(*words)).splitlines()[-1])
    assert [(one["state"], one["round"], one["last_round"]["up"]) for one in found] == [
        ("completed", 2, ["Node 2"]),
        ("completed", 2, ["Node 1"]),
    ]
    for k in (1, 2):  # a network is continued with more rounds
        contract = tmp_path / "site" / f"node-{k}" / "experiment.toml"
        contract.write_text(contract.read_text().replace("rounds = 2", "rounds = 3"))
    for node in [peers("start", tmp_path / "site" / f"node-{k}", "data=experiment", "--trust") for k in (1, 2)]:
        out = said(node)
        assert "continuing after round 2" in out
        assert "all 3 rounds are done" in out


def test_nodes_with_tables_and_a_method_of_their_own_stop_run_out_of_space_and_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One node has rows of one class alone, as a small hospital may."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    site = tmp_path / "site"
    (tmp_path / "mine.py").write_text(OWN)
    rows = [f"{40 + k},{('red', 'blue')[k % 2]},{('ill', 'well')[k % 4 > 1]}" for k in range(40)]
    for name, own in (("lab", rows), ("ada", [row for row in rows if row.endswith("ill")]), ("bea", rows[::2])):
        (tmp_path / f"{name}.csv").write_text("\n".join(["age,colour,outcome", *own]))
    table = {"data": {"source": str(tmp_path / "lab.csv"), "label": "outcome"}, "partition": {"kind": "iid"}}
    exp = experiment(tmp_path, algorithm={"kind": f"{tmp_path / 'mine.py'}:Mine"}, **table)
    hosts = ",".join(f"127.0.0.1:{port}" for port in free_ports(2))
    said(peers("init", exp, "--nodes", "Ada, Bea", "--hosts", hosts, "--out", site, "--trust"))

    def started(name: str, *words: str, **more: Any) -> subprocess.Popen[str]:
        return peers("start", site / name, f"data={tmp_path / name}.csv", *words, **more)

    assert "--trust" in said(started("ada"), 2)
    ada = started("ada", "--trust")
    full = said(started("bea", "--trust", largest_file=200), 4)
    assert f"File too large; what was saved before is intact: make room, then fedloom peers start {site}/bea" in full
    assert "Traceback" not in full
    wait_until(lambda: read_state(site / "ada").get("state") in ("joining", "running"))
    ada.send_signal(signal.SIGTERM)  # without Bea it cannot go on
    assert "continue with: fedloom peers start" in said(ada)
    assert json.loads(said(peers("status", site / "ada", "--json")))["state"] == "stopped"
    for process in (started("ada"), started("bea", "--trust")):
        assert "all 3 rounds are done" in said(process)
    for name in ("ada", "bea"):
        words = [sys.executable, "-P", "-m", "fedloom", "predict", str(site / name), str(tmp_path / "lab.csv")]
        out = tmp_path / f"{name}-predicted.csv"
        told = said(
            warm.Popen([*words, "--out", str(out)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
        assert f"40 rows predicted by the model of {name.title()}: " in told
        assert len(out.read_text().splitlines()) == 41
