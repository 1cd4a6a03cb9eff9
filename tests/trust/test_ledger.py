"""What a private run has released is accounted for whatever happens to it, and its noise is its own secret."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

import fedloom
from fedloom.core import tree
from fedloom.core.errors import CheckpointError, ConfigError
from fedloom.engine.rounds import advance, begin
from fedloom.engine.store import RamStore
from fedloom.runs.folder import read_metrics
from fedloom.trust import noise
from fedloom.trust.noise import SIMULATED
from support.blobs import blobs
from support.terminal import Quick

UNIFORM = {"kind": "fedavg", "weighting": "uniform"}
SMALL: dict[str, Any] = {
    "data": blobs((20, 12, 7, 9, 30, 11)),
    "partition": {"kind": "natural", "holdout": 0.0},
    "model": {"kind": "logistic"},
    "cohort": {"sampling": "all"},
    "checkpoint": {"every": 1, "curves": False},
}
PRIVATE = {"clip": 1.0, "noise": 2.0}
PRIVATE_WORDS = ("privacy.clip=1", "algorithm.weighting=uniform", "model=logistic", "checkpoint.curves=false")
PRIVATE_WORDS += ("partition.clients=6", "cohort.sampling=all")


@pytest.fixture(scope="module")
def quick() -> Iterator[Quick]:
    server = Quick()
    yield server
    server.close()


def started(out: Path, rounds: int = 2, **more: Any) -> fedloom.History:
    return fedloom.run(**({"algorithm": UNIFORM, "privacy": PRIVATE} | SMALL | more), rounds=rounds, out=out)


def resumed(run: Path, **more: Any) -> fedloom.History:
    return fedloom.resume(run, data=SMALL["data"], **more)


def edited(run: Path, old: str, new: str) -> None:
    path = run / "config.toml"
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


def spent(run: Path) -> list[float]:
    return [line["privacy/epsilon"] for line in read_metrics(run)]


def contents(run: Path) -> dict[str, bytes]:
    # which hold times, and where they lie
    skip = {".lock", "timings.jsonl", "curves.png", "summary.json", "manifest.json"}
    return {
        str(p.relative_to(run)): p.read_bytes() for p in sorted(run.rglob("*")) if p.is_file() and p.name not in skip
    }


# -- the generator ---------------------------------------------------------------------------------
def test_numbers_are_distributed_as_they_should_be() -> None:
    key, count = noise.seeded(3), 200_001
    assert stats.kstest(noise.normals(key, count, "a"), stats.norm.cdf).pvalue > 0.01
    assert stats.kstest(noise.laplace(key, count, "a"), stats.laplace.cdf).pvalue > 0.01
    assert stats.kstest(noise.uniforms(key, count, "a"), stats.uniform.cdf).pvalue > 0.01
    drawn = noise.normals(key, count, "a")
    assert len(drawn) == count
    assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 0.01
    assert abs(np.corrcoef(drawn[: count // 2], drawn[-(count // 2) :])[0, 1]) < 0.01


def test_blocks_of_one_address_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = noise.uniforms(noise.seeded(1), 64, "x")
    monkeypatch.setattr(noise, "_BLOCK", 16)
    parts = noise.uniforms(noise.seeded(1), 64, "x")
    assert np.array_equal(whole[:16], parts[:16])
    assert len(np.unique(parts)) == 64


def test_an_address_cannot_be_written_in_two_ways() -> None:
    key = noise.seeded(1)
    found = [noise.normals(key, 4, *address) for address in (("a", 1, 23), ("a", 12, 3), ("a1", 23), ("b", 1, 23))]
    assert len({x.tobytes() for x in found}) == 4


def test_a_key_is_from_the_system_and_does_not_print_itself() -> None:
    one, two = noise.fresh_key(), noise.fresh_key()
    assert one.secret != two.secret
    assert len(one.secret) == 32
    assert one.secret.hex() not in f"{one!r} {one}"
    assert noise.from_text(noise.as_text(one)) == one
    assert noise.seeded(4).public
    assert not one.public


# -- noise is a secret of the run ------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "more"),
    [
        (UNIFORM, {}),
        ({"kind": "dp_fedavg", "clip": 0.5}, {}),
        ({"kind": "analytic"}, {"privacy": {"feature_clip": 1.0, "noise": 2.0}}),
        ({"kind": "law_afl"}, {"privacy": {"feature_clip": 1.0, "noise": 2.0, "mechanism": "local"}}),
    ],
    ids=["fedavg", "adaptive clipping", "sums", "sums of each"],
)
def test_two_runs_of_one_seed_have_their_own_noise(world: Any, algorithm: Any, more: Any) -> None:
    """Else the noise of one would be subtracted from the other."""

    def made(**private: Any) -> list[torch.Tensor]:
        table = {"algorithm": algorithm, "privacy": PRIVATE} | more
        table["privacy"] = table["privacy"] | private
        exp = world((40, 30, 20, 25), model={"kind": "logistic"}, **table)
        server = advance(exp, begin(exp), RamStore(4))[0].server
        return [server.rows] if hasattr(server, "rows") else [server.w, *tree.leaves(getattr(server, "registry", ()))]

    one, two = made(), made()
    assert any(not torch.equal(a, b) for a, b in zip(one, two, strict=True))
    again = zip(made(noise_from="seed"), made(noise_from="seed"), strict=True)
    assert all(torch.equal(a, b) for a, b in again)


def test_the_difference_of_two_methods_has_the_noise_of_both(world: Any) -> None:
    settings = {"model": {"kind": "mlp", "widths": [400]}, "local": {"batch": 0, "lr": 1e-12}, "privacy": PRIVATE}
    prox = {"kind": "fedprox", "mu": 1.0, "weighting": "uniform"}
    ends = []
    for algorithm in (UNIFORM, prox):
        exp = world((20, 12, 7, 9), algorithm=algorithm, **settings)
        ends.append(advance(exp, begin(exp), RamStore(4))[0].server.w)
    assert float((ends[0] - ends[1]).std()) == pytest.approx(math.sqrt(2) * 2.0 / 4, rel=0.1)


def test_who_takes_part_is_a_secret_where_epsilon_counts_on_it(world: Any) -> None:
    def cohorts(**private: Any) -> list[list[int]]:
        cohort = {"sampling": "poisson", "size": 10}
        exp = world((5,) * 40, cohort=cohort, algorithm=UNIFORM, privacy=PRIVATE | private)
        return [exp.present(r).drawn.ids.tolist() for r in range(6)]

    plain = world((5,) * 40, cohort={"sampling": "poisson", "size": 10})
    public = [plain.present(r).drawn.ids.tolist() for r in range(6)]
    assert cohorts() != cohorts()
    for told in ({"noise_from": "seed"}, {"mechanism": "local"}):  # where nobody counts on it
        assert cohorts(**told) == public


def test_the_key_lies_in_the_run_folder_and_nowhere_else(quick: Quick, tmp_path: Path) -> None:
    words = (*PRIVATE_WORDS, "privacy.noise=1", "rounds=2")
    done = quick("run", *words, "--out", "run", "--json", cwd=tmp_path)
    assert done.code == 0, done.err
    key = (tmp_path / "run" / "noise.key").read_text().strip()
    assert len(bytes.fromhex(key)) == 32
    assert ((tmp_path / "run" / "noise.key").stat().st_mode & 0o777) == 0o600
    assert key not in done.out + done.err
    others = [p for p in (tmp_path / "run").rglob("*") if p.is_file() and p.name != "noise.key"]
    assert len(others) > 8
    assert not [p for p in others if key.encode() in p.read_bytes() or bytes.fromhex(key) in p.read_bytes()]


def test_simulated_noise_has_no_key_and_says_so_beside_epsilon(quick: Quick, tmp_path: Path) -> None:
    words = (*PRIVATE_WORDS, "privacy.noise=1", "privacy.noise_from=seed", "rounds=2")
    done = quick("run", *words, "--out", "run", cwd=tmp_path)
    assert done.code == 0, done.err
    assert SIMULATED in done.out
    assert "epsilon_simulated" in done.out
    assert not (tmp_path / "run" / "noise.key").exists()
    assert json.loads((tmp_path / "run" / "privacy.json").read_text())["warning"] == SIMULATED
    last = read_metrics(tmp_path / "run")[-1]
    assert last["privacy/epsilon_simulated"] > 0
    assert "privacy/epsilon" not in last


# -- resumed ---------------------------------------------------------------------------------------
@pytest.mark.slow
def test_a_resumed_run_adds_the_same_noise(tmp_path: Path) -> None:
    """With its own key, to the bit; and the ledger is the same, too."""
    private = PRIVATE | {"heterogeneity": "entropy"}
    started(tmp_path / "run", 4, privacy=private, cohort={"sampling": "poisson", "size": 3})
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    resumed(tmp_path / "copy", at=3)
    assert contents(tmp_path / "copy") == contents(tmp_path / "run")
    (tmp_path / "copy" / "noise.key").write_text(noise.as_text(noise.fresh_key()))
    with pytest.raises(CheckpointError, match=r"noise\.key: has changed since the run wrote it"):
        resumed(tmp_path / "copy", at=3)
    (tmp_path / "copy" / "manifest.json").unlink()  # which knows the key that was drawn
    resumed(tmp_path / "copy", at=3)
    assert contents(tmp_path / "copy")["model.safetensors"] != contents(tmp_path / "run")["model.safetensors"]


@pytest.mark.slow
@pytest.mark.parametrize("sampling", ["all", "poisson", "uniform"])
@pytest.mark.parametrize("mechanism", ["distributed", "local"])
def test_epsilon_only_grows(tmp_path: Path, mechanism: str, sampling: str) -> None:
    """More rounds go on in the ledger, and cost as much as if they had been asked for at first."""
    more = {"privacy": PRIVATE | {"mechanism": mechanism}, "cohort": {"sampling": sampling}}
    if sampling != "all":
        more["cohort"] |= {"size": 3}
    started(tmp_path / "part", 2, **more)
    before = spent(tmp_path / "part")
    resumed(tmp_path / "part", rounds=5)
    after = spent(tmp_path / "part")
    assert after[:3] == before
    assert after == sorted(after)
    assert after[-1] > before[-1]
    if mechanism == "distributed":
        started(tmp_path / "whole", 5, **more)
        assert spent(tmp_path / "whole") == after
    told = json.loads((tmp_path / "part" / "privacy.json").read_text())
    assert told["epsilon"] == pytest.approx(after[-1])


@pytest.mark.slow
@pytest.mark.parametrize("mechanism", ["distributed", "local"])
def test_epsilon_does_not_fall_when_a_run_goes_back(tmp_path: Path, mechanism: str) -> None:
    """Rounds that were released stay released, though the run ends before them."""
    run, private = tmp_path / "run", PRIVATE | {"mechanism": mechanism}
    started(run, 6, privacy=private, cohort={"sampling": "uniform", "size": 3})
    whole, once = spent(run), contents(run)
    resumed(run, at=5)  # to the old end
    assert contents(run) == once
    resumed(run, at=5, rounds=5)  # where no round is left to do
    assert spent(run) == [*whole[:5], whole[6]]
    assert json.loads((run / "privacy.json").read_text())["epsilon"] == pytest.approx(whole[6])
    resumed(run, rounds=7)
    *_, sixth, seventh = spent(run)
    assert sixth == whole[6]
    resumed(run, at=6, rounds=6)
    assert spent(run)[-1] == seventh


@pytest.mark.parametrize("place", ["config.toml.part", "checkpoints/.00000003.part"])
def test_epsilon_does_not_fall_after_a_kill_on_the_way_back(quick: Quick, tmp_path: Path, place: str) -> None:
    words = (*PRIVATE_WORDS, "privacy.noise=1", "rounds=4")
    assert quick("run", *words, "checkpoint.every=2", "--out", "run", cwd=tmp_path).code == 0
    whole = spent(tmp_path / "run")
    back = ("resume", "run", "--from", "2", "--rounds", "3")
    assert quick(*back, cwd=tmp_path, crash_at=1, place=place).code == -9
    assert not (tmp_path / "run" / "checkpoints" / "00000004").exists()
    assert quick("resume", "run", "--rounds", "3", cwd=tmp_path).code == 0
    assert spent(tmp_path / "run") == [*whole[:3], whole[4]]
    assert "epsilon_before" not in json.loads((tmp_path / "run" / "privacy.json").read_text())


@pytest.mark.slow
def test_the_ledger_is_in_the_checkpoint(tmp_path: Path) -> None:
    started(tmp_path / "run", 3, privacy=PRIVATE | {"mechanism": "local"}, cohort={"sampling": "uniform", "size": 2})
    meta = json.loads((tmp_path / "run" / "checkpoints" / "00000003" / "meta.json").read_text())
    assert sum(meta["ledger"]["uses"]) == 3 * 2
    assert len(meta["ledger"]["uses"]) == 6
    assert meta["ledger"]["release"]["noise"] == 2.0


@pytest.mark.slow
def test_sums_are_charged_once(tmp_path: Path) -> None:
    private = {"feature_clip": 1.0, "noise": 2.0, "mechanism": "local"}
    started(tmp_path / "run", 6, algorithm={"kind": "analytic"}, privacy=private, cohort={"size": 2})
    meta = json.loads((tmp_path / "run" / "checkpoints" / "00000006" / "meta.json").read_text())
    assert set(meta["ledger"]["uses"]) <= {0, 1}
    assert sum(meta["ledger"]["uses"]) > 2
    found = spent(tmp_path / "run")
    assert found[0] == 0
    assert len(set(found[1:])) == 1


# -- edited ----------------------------------------------------------------------------------------
EDITS = [
    ("noise = 2.0", "noise = 200.0", "privacy.noise", "2.0", "200.0"),
    ("clip = 1.0", "clip = 0.001", "privacy.clip", "1.0", "0.001"),
    ("delta = 1e-05", "delta = 1e-03", "privacy.delta", "1e-05", "0.001"),
    ('mechanism = "distributed"', 'mechanism = "local"', "privacy.mechanism", "distributed", "local"),
    ('noise_from = "secret"', 'noise_from = "seed"', "privacy.noise_from", "secret", "seed"),
    ("seed = 0", "seed = 1", "seed", "0", "1"),
    ("lr = 0.05", "lr = 0.06", "local.lr", "0.05", "0.06"),
    ('precision = "tf32"', 'precision = "bf16"', "engine.precision", "tf32", "bf16"),
]


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A private run of two rounds, for copies."""
    run = tmp_path_factory.mktemp("begun") / "run"
    started(run, 2, local={"lr": 0.05, "batch": 0})
    return run


@pytest.mark.slow
@pytest.mark.parametrize(("old", "new", "key", "was", "is_"), EDITS, ids=[edit[2] for edit in EDITS])
@pytest.mark.parametrize("saved", [True, False], ids=["with a checkpoint", "before the first"])
def test_an_edit_is_refused(
    begun: Path, tmp_path: Path, old: str, new: str, key: str, was: str, is_: str, saved: bool
) -> None:
    """109.0, and after an edit of the noise 0.088: not any more."""
    shutil.copytree(begun, tmp_path / "run")
    if not saved:
        shutil.rmtree(tmp_path / "run" / "checkpoints")
    edited(tmp_path / "run", old, new)
    before = contents(tmp_path / "run")
    with pytest.raises(ConfigError) as caught:
        resumed(tmp_path / "run", rounds=4)
    said = str(caught.value)
    assert f"{key}: was {was} when this private run began, now it is {is_}" in said
    assert f"set it back to {was}, or start a new run" in said
    assert contents(tmp_path / "run") == before


@pytest.mark.slow
def test_privacy_cannot_be_left_out_or_added_later(tmp_path: Path) -> None:
    started(tmp_path / "private", 2)
    path = tmp_path / "private" / "config.toml"
    head, _, rest = path.read_text().partition("[privacy]")
    path.write_text(head + rest.partition("\n\n")[2])
    with pytest.raises(ConfigError, match=r"privacy\.clip: was 1\.0 when this private run began, now it is unset"):
        resumed(tmp_path / "private", rounds=4)
    started(tmp_path / "open", 2, privacy={})
    path = tmp_path / "open" / "config.toml"
    head, _, rest = path.read_text().partition("[privacy]\n")
    path.write_text(f"{head}[privacy]\nclip = 1.0\nnoise = 200.0\n{rest}")
    with pytest.raises(ConfigError, match="this run started without privacy"):
        resumed(tmp_path / "open", rounds=4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "edit", [("every = 1\n", "every = 2\n"), ('device = "auto"', 'device = "cpu"')], ids=["evaluate", "engine"]
)
def test_what_no_upload_depends_on_may_be_edited(tmp_path: Path, edit: tuple[str, str]) -> None:
    started(tmp_path / "run", 2, checkpoint={"every": 5, "curves": False})
    edited(tmp_path / "run", *edit)
    resumed(tmp_path / "run", rounds=4)
    assert spent(tmp_path / "run")[-1] > 0


@pytest.mark.slow
def test_rounds_cannot_be_edited_where_noise_was_calibrated_for_them(tmp_path: Path) -> None:
    started(tmp_path / "run", 2, privacy={"clip": 1.0, "epsilon": 8.0})
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    edited(tmp_path / "run", "rounds = 2", "rounds = 1")
    with pytest.raises(ConfigError, match="rounds: was 2 when this private run began, now it is 1"):
        resumed(tmp_path / "run")


@pytest.mark.slow
def test_who_forges_what_the_run_began_with_meets_the_ledger(begun: Path, tmp_path: Path) -> None:
    shutil.copytree(begun, tmp_path / "run")
    edited(tmp_path / "run", "noise = 2.0", "noise = 200.0")
    path = tmp_path / "run" / "privacy.json"
    told = json.loads(path.read_text())
    told["settings"]["privacy.noise"] = 200.0
    path.write_text(json.dumps(told))
    (tmp_path / "run" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"noise of its noise was 2\.0, now it would be 200\.0"):
        resumed(tmp_path / "run", rounds=4)


OWN = """
from fedloom import FedAvg


class Own(FedAvg):
    def finish(self, x, down, mine, work):
        return super().finish(x, down, mine, work)
"""


@pytest.mark.slow
def test_other_code_is_refused_whatever_is_accepted(tmp_path: Path) -> None:
    """The same noise on two models of one round would cancel, and what clients sent would be bare."""
    code = tmp_path / "own.py"
    code.write_text(OWN)
    started(tmp_path / "run", 3, algorithm={"kind": f"{code}:Own", "weighting": "uniform"})
    before = contents(tmp_path / "run")
    code.write_text(OWN.replace("finish(x,", "finish(down.w,"))
    with pytest.raises(
        CheckpointError, match=r"own\.py has changed .* private run cannot continue with different code"
    ):
        resumed(tmp_path / "run", at=2, accept_changes=True)
    assert contents(tmp_path / "run") == before
    code.write_text(OWN)
    resumed(tmp_path / "run", at=2, accept_changes=True)
    assert contents(tmp_path / "run") == before


def test_other_data_is_refused_whatever_is_accepted(tmp_path: Path) -> None:
    """One changed row, the same noise: the difference of the two models would show what the row did."""
    started(tmp_path / "run", 3)
    before, data = contents(tmp_path / "run"), SMALL["data"]
    x = data.x.copy()
    x[0] += 1
    with pytest.raises(
        CheckpointError, match=r"the data has changed .* private run cannot continue with different data"
    ):
        fedloom.resume(tmp_path / "run", data=data._replace(x=x), at=2, accept_changes=True)
    assert contents(tmp_path / "run") == before


@pytest.mark.slow
def test_other_weights_are_refused_whatever_is_accepted(tmp_path: Path) -> None:
    """Also where the folder does not say with which files it began."""
    started(tmp_path / "first", 1, privacy={})
    weights = shutil.copy(tmp_path / "first" / "model.safetensors", tmp_path / "w.safetensors")
    started(tmp_path / "run", 2, model=SMALL["model"] | {"weights": str(weights)})
    started(tmp_path / "second", 2, privacy={})
    shutil.copy(tmp_path / "second" / "model.safetensors", weights)
    before = contents(tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"w\.safetensors has changed .* different code or weights"):
        resumed(tmp_path / "run", at=1, accept_changes=True)
    assert contents(tmp_path / "run") == before
    path = tmp_path / "run" / "environment.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"files": {}}))
    (tmp_path / "run" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"the net \(model\.weights: .*\) has changed since this run began"):
        resumed(tmp_path / "run", at=1, accept_changes=True)


def test_an_edited_file_is_one_error_of_the_command_line(quick: Quick, tmp_path: Path) -> None:
    words = (*PRIVATE_WORDS, "privacy.noise=0.2", "rounds=2")
    assert quick("run", *words, "--out", "run", cwd=tmp_path).code == 0
    edited(tmp_path / "run", "noise = 0.2", "noise = 20.0")
    done = quick("resume", "run", "--rounds", "4", cwd=tmp_path)
    assert done.code == 2
    assert done.err.count("error:") == 1
    assert "privacy.noise: was 0.2 when this private run began, now it is 20.0" in done.err
    assert "Traceback" not in done.err


# -- lost ------------------------------------------------------------------------------------------
def _gone(path: Path) -> None:
    path.unlink()


def _short(path: Path) -> None:
    path.write_text("abcd\n")


def _no_number(path: Path) -> None:
    path.write_text("not a key, but perhaps another secret\n")


@pytest.mark.slow
@pytest.mark.parametrize("spoil", [_gone, _short, _no_number])
def test_a_lost_key_is_reported(begun: Path, tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    shutil.copytree(begun, tmp_path / "run")
    spoil(tmp_path / "run" / "noise.key")
    for found in ("is missing|has changed since the run wrote it", "is (missing|damaged)"):
        with pytest.raises(CheckpointError, match=rf"noise\.key: ({found})") as caught:
            resumed(tmp_path / "run", rounds=4)
        assert "perhaps another secret" not in str(caught.value)
        (tmp_path / "run" / "manifest.json").unlink(missing_ok=True)


@pytest.mark.slow
def test_a_key_that_came_with_a_folder_is_not_used(tmp_path: Path) -> None:
    """Whoever hands over a folder in which no round was computed may know the key in it."""
    started(tmp_path / "theirs", 2)
    given = tmp_path / "given"
    given.mkdir()
    for name in ("config.toml", "noise.key"):
        shutil.copy(tmp_path / "theirs" / name, given)
    resumed(given)
    key = (given / "noise.key").read_text()
    assert key != (tmp_path / "theirs" / "noise.key").read_text()
    resumed(given, rounds=3)
    assert (given / "noise.key").read_text() == key


@pytest.mark.parametrize("touch", [1, 2, 3])
def test_a_start_that_is_killed_while_the_key_is_written_goes_on(quick: Quick, tmp_path: Path, touch: int) -> None:
    words = (*PRIVATE_WORDS, "privacy.noise=1", "rounds=1")
    done = quick("run", *words, "--out", "run", cwd=tmp_path, crash_at=touch, place="noise.key")
    assert done.code == -9
    assert quick("resume", "run", cwd=tmp_path).code == 0
    assert ((tmp_path / "run" / "noise.key").stat().st_mode & 0o777) == 0o600
    assert [p.name for p in (tmp_path / "run").glob("noise.key*")] == ["noise.key"]
    assert spent(tmp_path / "run")[-1] > 0


@pytest.mark.slow
def test_a_run_of_an_earlier_version_is_reported(begun: Path, tmp_path: Path) -> None:
    shutil.copytree(begun, tmp_path / "run")
    path = tmp_path / "run" / "privacy.json"
    told = json.loads(path.read_text())
    del told["settings"]
    path.write_text(json.dumps(told))
    (tmp_path / "run" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="of an earlier version: start a new run"):
        resumed(tmp_path / "run", rounds=4)
