"""Bad clients: who they are, what they do to data and to uploads, and what is recorded of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import fedloom
from fedloom.algorithm import Update
from fedloom.core.errors import ConfigError
from fedloom.engine.rounds import advance, advance_watched, begin
from fedloom.engine.store import RamStore
from fedloom.maths.ridge import Statistics, from_rows, to_rows
from fedloom.runs.prepare import prepare
from fedloom.runs.settings import parse
from fedloom.trust.corruption import ClientRows, Corruption, corrupted, mass, poisoned
from support.blobs import blobs

NO_PICTURE: dict[str, Any] = {"checkpoint": {"curves": False}}  # which takes longer than the run itself
SIZES = (40, 12, 7, 9)


# -- who -------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("share", "count"), [(0, 0), (0.25, 5), (0.5, 10), (0.75, 15), (1, 20), (0.125, 3)])
def test_a_share_of_all_clients_is_bad(share: float, count: int) -> None:
    bad = Corruption(share=share).bad(20, seed=3)
    assert len(set(bad)) == len(bad) == count
    assert set(bad) <= set(range(20))
    assert list(bad) == sorted(bad)


def test_the_set_is_fixed_by_the_seed_and_grows_with_the_share() -> None:
    sets = [set(Corruption(share=s).bad(40, seed=1)) for s in (0.25, 0.5, 0.75)]
    assert sets[0] < sets[1] < sets[2]
    assert Corruption(share=0.5).bad(40, seed=1) == tuple(sorted(sets[1]))
    assert Corruption(share=0.5).bad(40, seed=2) != tuple(sorted(sets[1]))


def test_explicit_clients() -> None:
    assert Corruption(clients=(5, 1, 5)).bad(6, seed=0) == (1, 5)
    with pytest.raises(ConfigError, match=r"corruption\.clients: there is no client 6 among 6"):
        Corruption(clients=(1, 6)).bad(6, seed=0)
    with pytest.raises(ConfigError, match="share and clients both choose the bad clients"):
        parse({"corruption": {"share": 0.5, "clients": [1]}})


# -- data ------------------------------------------------------------------------------------------
def spoil(
    kind: str, y: list[int], *, x: Tensor | None = None, classes: int = 5, scale: float = 1.0, **more: Any
) -> ClientRows:
    x = torch.ones(len(y), 3) if x is None else x
    how = Corruption(kind=kind, share=1.0, **more)  # type: ignore[arg-type]
    return corrupted(how, ClientRows(x, torch.tensor(y)), torch.tensor([scale]), classes, seed=4, client=2)


def test_labels() -> None:
    assert spoil("label_flip_cyclic", [0, 1, 4]).y.tolist() == [1, 2, 0]
    assert spoil("label_flip_pair", [0, 1, 2, 3, 4]).y.tolist() == [1, 0, 3, 2, 4]  # the fifth has no partner
    drawn = spoil("label_random", [0] * 5000).y
    assert drawn.dtype == torch.int64
    counts = torch.bincount(drawn, minlength=5)
    assert counts.min() > 900
    assert counts.max() < 1100
    assert torch.equal(drawn, spoil("label_random", [0] * 5000).y)


def test_inputs() -> None:
    assert torch.equal(spoil("blank", [0, 1]).x, torch.zeros(2, 3))
    x = torch.full((2000, 3), 7, dtype=torch.uint8)
    noisy = spoil("feature_noise", [0] * 2000, x=x, scale=0.02, feature_std=2.0)
    normalised = (noisy.x - 7) * 0.02  # what the net sees of the noise
    assert float(normalised.std()) == pytest.approx(2.0, rel=0.03)
    assert float(normalised.mean()) == pytest.approx(0.0, abs=0.1)
    assert torch.equal(noisy.y, torch.zeros(2000, dtype=torch.int64))


@pytest.mark.parametrize(
    "kind", ["label_flip_cyclic", "label_flip_pair", "label_random", "feature_noise", "blank", "model_sign_flip"]
)
def test_only_training_rows_of_bad_clients_change(world: Any, kind: str) -> None:
    arrays = blobs(SIZES)
    before = arrays.x.copy(), arrays.y.copy()
    settings = {"partition": {"kind": "natural", "holdout": 0.25}, "arrays": arrays}
    clean = world(SIZES, **settings).federation
    bad = world(SIZES, corruption={"kind": kind, "clients": [0, 2]}, **settings).federation
    assert np.array_equal(arrays.x, before[0])  # the data itself is nobody's to change
    assert np.array_equal(arrays.y, before[1])
    owners = clean.train.owners()
    theirs = clean.train.rows[(owners == 0) | (owners == 2)]
    others = np.setdiff1d(np.arange(len(clean.y)), theirs.numpy())
    for a, b in zip(clean.examples(torch.from_numpy(others)), bad.examples(torch.from_numpy(others)), strict=True):
        assert torch.equal(a, b)
    (x, y), (bad_x, bad_y) = clean.examples(theirs), bad.examples(theirs)
    assert torch.equal(x, bad_x) == (kind not in ("feature_noise", "blank"))
    assert torch.equal(y, bad_y) == (not kind.startswith("label"))


def test_images_of_good_clients_keep_every_bit_beside_noisy_ones(world: Any) -> None:
    rng = np.random.default_rng(0)
    arrays = blobs((6, 5))._replace(x=rng.integers(0, 256, (31, 1, 4, 4)).astype(np.uint8), mean=(0.3,), std=(0.2,))
    clean = world(arrays=arrays).federation
    noisy = world(arrays=arrays, corruption={"kind": "feature_noise", "clients": [1]}).federation
    good = clean.train.rows[:6]
    assert torch.equal(clean.examples(good)[0], noisy.examples(good)[0])
    moved = noisy.examples(clean.train.rows[6:])[0] - clean.examples(clean.train.rows[6:])[0]
    assert float(moved.std()) == pytest.approx(1.0, rel=0.3)


# -- uploads ---------------------------------------------------------------------------------------
class Sums(NamedTuple):
    rows: Tensor
    counts: Tensor


class Quality(NamedTuple):
    dw: Tensor
    accuracy: Tensor
    loss: Tensor


IDS, BAD = torch.tensor([3, 5, 8]), torch.tensor([False, True, False])


def poison(uploads: Any, **settings: Any) -> Any:
    return poisoned(Corruption(share=0.5, **settings), uploads, IDS, BAD, (1, 2))


def test_models() -> None:
    dw = torch.arange(6.0).view(3, 2)
    assert poison(Update(dw), kind="model_sign_flip", kappa=5.0).dw.tolist() == [[0, 1], [-10, -15], [4, 5]]
    assert poison(Update(dw), kind="model_scale", scale=10.0).dw.tolist() == [[0, 1], [20, 30], [4, 5]]
    assert poison(Update(dw), kind="label_random").dw is dw
    wide = torch.zeros(3, 20_000)
    sent = poison(Update(wide), kind="model_gauss").dw
    assert float(sent[1].std()) == pytest.approx(0.1, rel=0.03)
    assert not sent[[0, 2]].any()
    again = poisoned(
        Corruption(share=0.5, kind="model_gauss"),
        Update(wide[:2]),
        torch.tensor([8, 5]),
        torch.tensor([False, True]),
        (1, 2),
    )
    assert torch.equal(again.dw[1], sent[1])  # drawn at the address of the client, whoever is beside it


def test_statistics_and_reports() -> None:
    gram = torch.eye(3, dtype=torch.float64).expand(3, 3, 3) * 2
    cross, counts = torch.ones(3, 3, 2, dtype=torch.float64), torch.full((3, 2), 4.0, dtype=torch.float64)
    sums = Sums(to_rows(Statistics(gram, cross, counts)), counts)
    G, B = from_rows(poison(sums, kind="stat_negate_B").rows, 2)
    assert torch.equal(G, gram)
    assert torch.equal(B[1], -cross[1])
    assert torch.equal(B[[0, 2]], cross[[0, 2]])
    G, B = from_rows(poison(sums, kind="stat_scale").rows, 2)
    assert torch.equal(G[1], 100 * gram[1])
    assert torch.equal(B[1], 100 * cross[1])
    said = Quality(torch.ones(3, 2), torch.tensor([0.5, 0.5, 0.5]), torch.tensor([1.0, 1.0, 1.0]))
    forged = poison(said, kind="quality_forge")
    assert (forged.accuracy.tolist(), forged.loss.tolist()) == ([0.5, 1.0, 0.5], [1.0, 0.0, 1.0])
    both = poison(said, kind="model_sign_flip", forge=True)
    assert both.dw[1].tolist() == [-1, -1]
    assert both.accuracy[1] == 1


@pytest.mark.slow
def test_a_flipped_sign_turns_the_round_around(world: Any) -> None:
    """All clients bad, kappa 2: the server goes twice as far, the other way."""
    honest, bad = world(SIZES), world(SIZES, corruption={"kind": "model_sign_flip", "share": 1.0, "kappa": 2.0})
    moves = [advance(e, begin(e), RamStore(4))[0].server.w - e.task.w0 for e in (honest, bad)]
    torch.testing.assert_close(moves[1], -2 * moves[0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("executor", ["loop", "lanes"])
def test_good_clients_alone_decide_if_the_bad_ones_do_not_count(world: Any, executor: str) -> None:
    """What a good client uploads does not depend on who is bad."""
    settings = {
        "algorithm": {"kind": "fedavg"},
        "engine": {"executor": executor, **({"lanes": 2} if executor == "lanes" else {})},
    }
    plain = world(SIZES, **settings)
    bad = world(SIZES, corruption={"kind": "model_scale", "clients": [1], "scale": 3.0}, **settings)
    n = plain.federation.train.sizes.double()
    moves = [advance(e, begin(e), RamStore(4))[0].server.w.double() - e.task.w0.double() for e in (plain, bad)]
    alone = world(SIZES, corruption={"kind": "model_scale", "clients": [1], "scale": 1e-9}, **settings)
    without = advance(alone, begin(alone), RamStore(4))[0].server.w.double() - alone.task.w0.double()
    torch.testing.assert_close(moves[1] - moves[0], 2 * (moves[0] - without), rtol=1e-3, atol=1e-5)
    assert float(n.sum()) == sum(SIZES)


@pytest.mark.parametrize(
    ("kind", "algorithm", "message"),
    [
        ("model_sign_flip", "dpsgd", r"corruption\.kind: changes what is sent to a server, but DPSGD has none"),
        ("model_sign_flip", "apple", r"corruption\.kind: changes the part 'dw' .* sends \['core', 'client'\]"),
        ("stat_scale", "fedavg", r"corruption\.kind: changes the part 'rows' .* sends \['dw'\]"),
        ("quality_forge", "fedavg", r"corruption\.kind: changes the part 'accuracy'"),
        ("model_gauss", "local_only", r"corruption\.kind: changes what is sent to a server"),
    ],
)
def test_what_cannot_be_corrupted_is_refused(kind: str, algorithm: str, message: str) -> None:
    partition = {"kind": "natural", "holdout": 0.3}
    table = {"algorithm": algorithm, "partition": partition, "corruption": {"kind": kind, "share": 0.5}}
    with pytest.raises(ConfigError, match=message):
        prepare(parse(table), Path(), blobs(SIZES))


def test_a_forged_report_needs_an_algorithm_that_asks() -> None:
    table = {"partition": "natural", "corruption": {"share": 0.5, "forge": True}}
    with pytest.raises(ConfigError, match=r"corruption\.forge: changes the part 'accuracy'"):
        prepare(parse(table), Path(), blobs(SIZES))


# -- what is recorded ------------------------------------------------------------------------------
def test_mass() -> None:
    found = mass(torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([False, True, True, False]))
    assert found is not None
    assert found == pytest.approx((0.25, 0.5, 1.0))
    assert mass(torch.ones(3), torch.zeros(3, dtype=torch.bool)) is None
    assert mass(torch.zeros(3), torch.ones(3, dtype=torch.bool)) is None


def test_the_weight_of_bad_clients_is_measured_where_it_is_known(world: Any) -> None:
    bad = {"corruption": {"clients": [0, 2]}}
    exp = world(SIZES, **bad)
    found = advance_watched(exp, begin(exp), RamStore(4)).found
    assert found["bad_clients/weight_total"] == pytest.approx(47 / 68)
    assert found["bad_clients/weight_mean"] == pytest.approx(47 / 136)
    assert found["bad_clients/weight_ratio"] == pytest.approx(47 / 34)
    exp = world(SIZES, algorithm="fedmgda", **bad)  # it solves for weights of its own, and does not say which
    assert not any(name.startswith("bad") for name in advance_watched(exp, begin(exp), RamStore(4)).found)


@pytest.mark.slow
def test_the_run_folder_knows_who_is_bad(tmp_path: Path) -> None:
    for name, table in (("plain", {}), ("bad", {"share": 0.25, "kind": "label_random"})):
        fedloom.run("fedavg", rounds=2, partition={"clients": 8}, corruption=table, out=tmp_path / name, **NO_PICTURE)
    plain, bad = (json.loads((tmp_path / n / "partition.json").read_text()) for n in ("plain", "bad"))
    assert "bad_clients" not in plain
    assert bad["bad_clients"] == list(Corruption(share=0.25).bad(8, 0))
    assert bad["corruption"] == "label_random"
    assert plain["data_sha256"] == bad["data_sha256"]  # it is the same data, in bad hands
    lines = [json.loads(line) for line in (tmp_path / "bad" / "metrics.jsonl").read_text().splitlines()]
    assert any("bad_clients/weight_mean" in line for line in lines)


@pytest.mark.slow
def test_resume_is_bit_for_bit(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "partition": {"clients": 8},
        "cohort": {"sampling": "poisson", "size": 4},
        "corruption": {"kind": "model_gauss", "share": 0.5},
        "aggregation": {"rule": "trimmed_mean"},
        "model": {"kind": "logistic"},
        **NO_PICTURE,
    }
    fedloom.run("fedavg", rounds=4, out=tmp_path / "whole", **settings)
    fedloom.run("fedavg", rounds=2, out=tmp_path / "part", **settings)
    fedloom.resume(tmp_path / "part", rounds=4)
    for name in ("metrics.jsonl", "model.safetensors"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "part" / name).read_bytes()


# -- closed forms, in whole runs -------------------------------------------------------------------
def closed_form(tmp_path: Path, name: str, algorithm: Any, **corruption: Any) -> tuple[dict[str, Tensor], Any]:
    """The server's last state and the history of a run on digits, of whose ten clients 2, 5 and 7 are bad."""
    settings: dict[str, Any] = {"rounds": 1, "model": "logistic", "partition": {"kind": "iid", "clients": 10}}
    bad = {"corruption": {"clients": [2, 5, 7], **corruption}} if corruption else {}
    history = fedloom.run(algorithm, out=tmp_path / name, **settings, **bad, **NO_PICTURE)
    return load_file(tmp_path / name / "checkpoints" / "00000001" / "state.safetensors"), history


@pytest.mark.slow
def test_bad_sums_reach_the_server_of_a_run(tmp_path: Path) -> None:
    """Three clients send a multiple of G and B, or -B: exactly that is in the server's sums, and in its accuracy."""
    clean, honest = closed_form(tmp_path, "clean", "analytic")
    three, _ = closed_form(tmp_path, "three", "analytic", kind="stat_scale", scale=3.0)
    five, _ = closed_form(tmp_path, "five", "analytic", kind="stat_scale", scale=5.0)
    negated, worse = closed_form(tmp_path, "negated", "analytic", kind="stat_negate_B")
    theirs = (three["server.rows"] - clean["server.rows"]) / 2
    torch.testing.assert_close(five["server.rows"] - clean["server.rows"], 4 * theirs, rtol=1e-9, atol=1e-6)
    gram, cross = from_rows(theirs, 10)
    off = from_rows(negated["server.rows"] - clean["server.rows"], 10)
    assert not off[0].any()
    torch.testing.assert_close(off[1], -2 * cross, rtol=1e-9, atol=1e-6)
    share = float(gram.trace() / from_rows(clean["server.rows"], 10)[0].trace())
    assert share == pytest.approx(0.3, abs=0.05)
    assert torch.equal(clean["server.counts"], three["server.counts"])  # what they say of classes stays honest
    name = "global/test/accuracy"
    assert worse.summary[name].last < honest.summary[name].last
    assert worse.metrics["bad_clients/weight_total"][-1] == pytest.approx(0.3, abs=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["stat_negate_B", "stat_scale"])
def test_learned_weights_withstand_bad_sums_in_a_run(tmp_path: Path, kind: str) -> None:
    """Checked by the bias they are left out; believed, learning takes weight from them."""
    _, plain = closed_form(tmp_path, "plain", "analytic", kind=kind)
    for name, settings in (("checked", {"bias": True}), ("believed", {"verify": False, "prior": 0.0})):
        state, history = closed_form(tmp_path, name, {"kind": "law_afl", **settings}, kind=kind)
        total = history.metrics["bad_clients/weight_total"][-1]
        assert total == pytest.approx(float(state["server.statistics.lam"][[2, 5, 7]].sum()))
        assert total == 0 if name == "checked" else total < 0.2
        if kind == "stat_negate_B":  # all sums scaled alike would be the same head
            accuracy = "global/test/accuracy"
            assert history.summary[accuracy].last > plain.summary[accuracy].last


@pytest.mark.parametrize(("quality", "vain"), [("size", True), ("server", True), ("report", False)])
def test_reports_that_nobody_asks_for_are_forged_in_vain(quality: str, vain: bool) -> None:
    table = {"algorithm": {"kind": "law_afl", "quality": quality}, "proxy": {"size": 50}}
    for how in ({"kind": "quality_forge"}, {"kind": "label_random", "forge": True}):
        notes = parse(table | {"corruption": {"share": 0.5, **how}}).notes
        assert any("forged reports have no effect" in note for note in notes) == vain
    assert not parse(table | {"corruption": {"share": 0.5}}).notes


@pytest.mark.slow
@pytest.mark.parametrize("corruption", [{"kind": "quality_forge"}, {"kind": "label_flip_cyclic", "forge": True}])
def test_forged_quality_in_a_run(tmp_path: Path, corruption: dict[str, Any]) -> None:
    """Believed, forgers gain weight; measured by the server, honest data keeps its share and flipped labels lose it."""
    total = {}
    for quality in ("size", "report", "server"):
        settings = {"kind": "law_afl", "quality": quality, "prior": "fixed", "gate": False}
        _, history = closed_form(tmp_path, quality, settings, **corruption)
        total[quality] = history.metrics["bad_clients/weight_total"][-1]
    assert total["size"] == pytest.approx(0.3, abs=0.02)
    assert total["report"] > 0.6
    if corruption["kind"] == "quality_forge":
        assert total["server"] == pytest.approx(0.3, abs=0.05)
    else:
        assert total["server"] < 0.05
