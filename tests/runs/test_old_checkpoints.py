"""A run folder of another version of fedloom, whose checkpoint holds another state, is refused in one sentence."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

import fedloom
from fedloom.core import disk
from fedloom.core.errors import ConfigError
from fedloom.engine import checkpoint
from support.terminal import fedloom as in_a_terminal

Tensors = dict[str, Any]

PRIVATE = {"clip": 1.0, "noise": 1.0, "noise_from": "seed"}
PROXY = {"proxy": {"size": 20}}


def started(out: Path, algorithm: Any, **more: Any) -> Path:
    table = {"rounds": 2, "partition": {"clients": 4}, "model": "logistic", "checkpoint": {"curves": False}} | more
    fedloom.run(algorithm, out=out, **table)
    return out


def rewritten(
    run: Path, file: str, change: Callable[[Tensors], Any], record: Callable[[Any], Any] | None = None
) -> None:
    """Let the newest checkpoint hold other tensors, as another version would have written it."""
    home = max((run / "checkpoints").iterdir())
    meta = json.loads((home / "meta.json").read_text())
    tensors = load_file(home / file)
    change(tensors)
    save_file(tensors, home / file)
    meta["sha256"][file] = disk.digest(home / file)
    if record is not None:
        record(meta)
    checkpoint._write_record(home / "meta.json", meta)
    (run / "manifest.json").unlink()  # which knows the checksums, too


def contents(run: Path) -> dict[str, bytes]:
    return {str(p.relative_to(run)): p.read_bytes() for p in sorted(run.rglob("*")) if p.is_file()}


def refusal(run: Path) -> str:
    """What is said by ``fedloom resume``, which fails and changes nothing."""
    before = contents(run)
    done = in_a_terminal("resume", run, "--rounds", "3", cwd=run.parent)
    assert done.code == 2
    assert "Traceback" not in done.out + done.err
    assert contents(run) == before
    return " ".join((done.out + done.err).split())


@pytest.mark.parametrize(
    ("algorithm", "name", "more"),
    [("fedlaw", "server.offsets", PROXY), ("law_afl", "server.statistics.lam", PROXY), ("fedopt", "server.m", {})],
)
def test_a_state_that_lacks_a_tensor_or_has_another_is_refused(
    algorithm: str, name: str, more: Any, tmp_path: Path
) -> None:
    run = started(tmp_path / "run", algorithm, **more)
    rewritten(run, "state.safetensors", lambda t: t.update({"server.old": t.pop(name)}), lambda m: m.pop("fedloom"))
    said = refusal(run)
    assert f"was written by an earlier version of fedloom with another state (this is {fedloom.__version__}" in said
    assert f"it lacks '{name}' and has 'server.old'" in said
    assert "resume it with that version, or start a new run" in said


def test_the_version_that_wrote_it_is_named(tmp_path: Path) -> None:
    run = started(tmp_path / "run", "fedopt")
    rewritten(run, "state.safetensors", lambda t: t.pop("server.m"), lambda m: m.update(fedloom="0.0.7"))
    assert "was written by fedloom 0.0.7 with another state" in refusal(run)


def test_clients_of_another_form_are_refused(tmp_path: Path) -> None:
    run = started(tmp_path / "run", "scaffold")
    rewritten(run, "clients.safetensors", lambda t: t.update({"state.009": t["state.000"].clone()}))
    assert "it has 'state.009'" in refusal(run)


@pytest.mark.parametrize("kept", ["disk", "ram"])  # as it was, and as it is now: the states are on disk
def test_clients_of_another_form_on_disk_are_refused(tmp_path: Path, kept: str) -> None:
    run = started(tmp_path / "run", "scaffold", engine={"store": "disk"})
    rewritten(run, "state.safetensors", lambda t: None, lambda m: m["store"].update(form=["(3,) float32"]))
    file = run / "config.toml"
    file.write_text(file.read_text().replace('store = "disk"', f'store = "{kept}"'))
    assert "it lacks 'state.000 (650,) float32' and has 'state.000 (3,) float32'" in refusal(run)


def test_a_ledger_of_another_form_is_refused(tmp_path: Path) -> None:
    run = started(tmp_path / "run", {"kind": "fedavg", "weighting": "uniform"}, privacy=PRIVATE)
    rewritten(run, "state.safetensors", lambda t: None, lambda m: m["ledger"]["release"].pop("size"))
    assert "it lacks 'ledger.release.size'" in refusal(run)


def test_a_run_whose_config_was_edited_is_told_what_differs(tmp_path: Path) -> None:
    """The version is the same: it is the experiment that is another one."""
    run = started(tmp_path / "run", "fedavg")
    file = run / "config.toml"
    file.write_text(re.sub(r"\[algorithm\]\n[^\[]*", '[algorithm]\nkind = "fedopt"\n\n', file.read_text()))
    said = refusal(run)
    assert "does not fit the settings of the run, which were other ones when it was written (it lacks 'server.m" in said
    assert "undo the changes of config.toml" in said


def test_fewer_rounds_in_the_config_than_were_done_are_refused(tmp_path: Path) -> None:
    run = started(tmp_path / "run", "fedavg")
    file = run / "config.toml"
    file.write_text(file.read_text().replace("rounds = 2", "rounds = 1"))
    with pytest.raises(ConfigError, match=r"rounds: is 1 in config\.toml, but this run has done 2 \(set it back"):
        fedloom.resume(run)
    assert fedloom.resume(run, rounds=3).rounds == 3
