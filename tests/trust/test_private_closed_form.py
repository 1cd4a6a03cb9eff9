"""Privacy of closed forms: sums are bounded and noised as they say, told once, and the head stands the noise."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import dp_accounting
import pytest
import torch
from dp_accounting import rdp
from scipy.stats import kstest

import fedloom
from fedloom.core.errors import ConfigError
from fedloom.engine.rounds import advance, begin
from fedloom.engine.store import RamStore
from fedloom.maths.ridge import from_rows, statistics, to_rows
from fedloom.runs.prepare import prepare
from fedloom.runs.settings import parse
from support.blobs import blobs
from support.terminal import fedloom as in_a_terminal

SIZES = (20, 12, 7, 9, 30, 11)
WIDE = {"kind": "random_features", "width": 300}
ON = {"feature_clip": 0.5, "noise": 3.0}
LOCAL = ON | {"mechanism": "local"}
REPEATED = {"noise_from": "seed"}  # the same noise in each run of the tests: what fails by chance fails some day
SEEDED = LOCAL | {"noise_from": "seed"}


def rounds(exp: Any, count: int = 1) -> Any:
    """The server after some rounds."""
    state, store = begin(exp), RamStore(exp.federation.clients)
    for _ in range(count):
        state, _ = advance(exp, state, store)
    return state.server


def exact(exp: Any, clients: list[int], norm: float) -> torch.Tensor:
    """The sums of these clients over features that are no longer than ``norm``."""
    fed, task = exp.federation, exp.task
    rows = torch.cat([fed.train.rows[fed.train.start[i] : fed.train.start[i + 1]] for i in clients])
    x, y = fed.examples(rows)
    with torch.no_grad():
        x = task.features(task.w0, x, task.buffers0).double()
    x = x * (norm / x.norm(dim=1, keepdim=True)).clamp(max=1)
    return to_rows(statistics(x, y, fed.classes))


# -- the mechanism ---------------------------------------------------------------------------------
@pytest.mark.parametrize(("private", "in_the_sum"), [(ON, 1.0), (LOCAL, math.sqrt(6))])
def test_the_sums_have_noise_of_the_stated_scale(world: Any, private: dict[str, Any], in_the_sum: float) -> None:
    """z times how far one example can move them, in the sum or in each of six; and the noise is normal."""
    exp = world(SIZES, algorithm="analytic", model=WIDE, privacy=private | REPEATED)
    drawn = rounds(exp).rows - exact(exp, list(range(6)), 0.5)
    assert len(drawn) == 300 * 301 // 2 + 300 * 3
    std = 3.0 * math.sqrt(0.5**4 + 0.5**2) * in_the_sum
    assert float(drawn.std()) == pytest.approx(std, rel=0.01)
    assert abs(float(drawn.mean())) < 4 * std / math.sqrt(len(drawn))
    assert kstest(drawn[::7].numpy() / std, "norm").pvalue > 0.01


def test_cross_scale_moves_noise_from_one_sum_to_the_other(world: Any) -> None:
    exp = world(
        SIZES,
        algorithm="analytic",
        model={"kind": "random_features", "width": 60},
        privacy=ON | REPEATED | {"cross_scale": 2},
    )
    drawn = rounds(exp).rows - exact(exp, list(range(6)), 0.5)
    std = 3.0 * math.sqrt(0.5**4 + (2 * 0.5) ** 2)
    assert float(drawn[: 60 * 61 // 2].std()) == pytest.approx(std, rel=0.05)
    assert float(drawn[60 * 61 // 2 :].std()) == pytest.approx(std / 2, rel=0.15)


@pytest.mark.parametrize("executor", ["loop", "lanes"])
def test_no_example_is_summed_that_is_longer_than_the_bound(world: Any, executor: str) -> None:
    """D7 in a run, the constant feature of a bias included: without noise, tr(G) is at most n R^2."""
    settings = {"algorithm": {"kind": "analytic", "bias": True}, "engine": {"executor": executor}}
    exp = world(SIZES, privacy={"feature_clip": 0.25, "noise": 0.0}, **settings)
    gram, _ = from_rows(rounds(exp).rows, 3)
    assert float(gram.trace()) == pytest.approx(sum(SIZES) * 0.25**2, rel=1e-12)  # every example is longer


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["analytic", "law_afl"])
def test_without_noise_and_with_a_wide_clip_nothing_changes(world: Any, algorithm: str) -> None:
    """D5, bit for bit, but for counts, which are not told; and epsilon is infinite."""
    settings = {"algorithm": algorithm, "proxy": {"size": 20}, "arrays": blobs((30, 20, 30))}
    plain, private = (
        world(**settings),
        world(privacy={"feature_clip": 1e6, "noise": 0.0, "mechanism": "local"}, **settings),
    )
    assert torch.equal(rounds(plain).w, rounds(private).w)
    assert private.guard.epsilon(1) == math.inf
    assert private.guard.described()["epsilon"] is None


def test_counts_are_noised_where_the_server_needs_them_and_else_not_sent(world: Any) -> None:
    none = rounds(world(SIZES, algorithm="analytic", privacy=LOCAL))
    assert not none.counts.any()
    arrays = blobs((40,) * 40)
    law = {"kind": "law_afl", "head_steps": 0, "verify": False}
    exp = world(
        arrays=arrays,
        algorithm=law,
        proxy={"size": 20},
        privacy={"feature_clip": 1.0, "noise": 0.5, "mechanism": "local", "noise_from": "seed"},
    )
    told = rounds(exp).registry.counts
    owners, labels = exp.federation.train.owners(), exp.federation.y[exp.federation.train.rows]
    off = told - torch.zeros_like(told).index_put((owners, labels), torch.ones(len(owners)).double(), accumulate=True)
    assert float(off.std()) == pytest.approx(0.5 * math.sqrt(3), rel=0.15)
    assert exp.guard.sums.sensitivity == pytest.approx(math.sqrt(3))


@pytest.mark.slow
def test_the_noise_of_a_client_has_an_address(world: Any) -> None:
    """Whoever comes beside it, in whatever round; so that one who is forgotten tells nothing new."""
    settings = {"algorithm": {"kind": "analytic", "forget": [1]}, "model": {"kind": "random_features", "width": 40}}
    exp = world(SIZES, privacy=SEEDED, **settings)
    first, second, later = rounds(exp, 1), rounds(exp, 2), rounds(exp, 4)
    others = second.rows - exact(exp, [0, 2, 3, 4, 5], 0.5)
    std = 3.0 * math.sqrt(0.5**4 + 0.5**2)
    assert float(others.std()) == pytest.approx(std * math.sqrt(5), rel=0.1)
    assert float((first.rows - second.rows - exact(exp, [1], 0.5)).std()) == pytest.approx(std, rel=0.1)
    assert torch.equal(later.rows, second.rows)
    assert exp.guard.releases[-1] == 1
    alone = world(SIZES, privacy=SEEDED, cohort={"size": 1}, **settings)
    together = rounds(world(SIZES, privacy=SEEDED, cohort={"size": 3}, **settings), 9)
    assert int((together.standing == 1).sum()) > 3
    one = rounds(alone, 1)
    client = int(one.standing.argmax())
    noise = one.rows - exact(alone, [client], 0.5)
    everybody = rounds(world(SIZES, privacy=SEEDED, **settings)).rows - exact(exp, list(range(6)), 0.5)
    rest = [i for i in range(6) if i != client]
    assert float((everybody - noise).std()) == pytest.approx(std * math.sqrt(len(rest)), rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["analytic", "law_afl"])
def test_d8_heads_stand_the_noise(world: Any, kind: str) -> None:
    """Where noise has made the sum of G indefinite, a plain solve is worth nothing, and the head is still finite."""
    algorithm = {"kind": kind, "noise_ridge": 0.5} | ({"verify": False} if kind == "law_afl" else {})
    exp = world(
        SIZES, algorithm=algorithm, model={"kind": "random_features", "width": 40}, privacy=LOCAL, proxy={"size": 20}
    )
    server = rounds(exp)
    assert bool(server.w.isfinite().all())
    if kind == "analytic":
        gram, _ = from_rows(server.rows, 3)
    else:
        known = server.registry
        lam0 = known.counts.sum(1).clamp(min=1) / known.counts.sum(1).clamp(min=1).sum()
        found = exp.algorithm.tools.head.system(server.w, known.rows, known.counts, lam0)
        gram, _ = from_rows(lam0 @ known.rows, 3)
        lifted, _ = from_rows(lam0 @ found.rows, 3)
        assert float(torch.linalg.eigvalsh(lifted)[0]) > -1e-12
        std = exp.algorithm.noise.std * float((lam0 / known.counts.sum(1).clamp(min=1)).norm())
        assert found.ridge == pytest.approx(0.5 * std * math.sqrt(40))
    assert float(torch.linalg.eigvalsh(gram)[0]) < 0


# -- the accountant --------------------------------------------------------------------------------
def spent(z: float) -> float:
    """What one Gaussian release costs, by dp-accounting itself."""
    accountant = rdp.RdpAccountant()
    accountant.compose(dp_accounting.GaussianDpEvent(z))
    return float(accountant.get_epsilon(1e-5))


@pytest.mark.slow
@pytest.mark.parametrize("mechanism", ["distributed", "local"])
def test_the_epsilon_of_a_run_folder_is_that_of_dp_accounting(tmp_path: Path, mechanism: str) -> None:
    """One release of each example, however many rounds there are."""
    private = {"feature_clip": 1.0, "noise": 1.5, "mechanism": mechanism}
    cohort = {} if mechanism == "distributed" else {"size": 4}
    plain: dict[str, Any] = {"model": "logistic", "checkpoint": {"curves": False}}
    fedloom.run("analytic", rounds=6, cohort=cohort, privacy=private, out=tmp_path / "run", **plain)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["privacy/epsilon"] for line in lines] == pytest.approx([0.0] + [spent(1.5)] * 6, rel=1e-12)
    told = json.loads((tmp_path / "run" / "privacy.json").read_text())
    assert (told["unit"], told["relation"], told["releases"]) == ("example", "add_or_remove_one", 1)
    assert told["sensitivity"] == pytest.approx(math.sqrt(2))
    assert told["epsilon"] == pytest.approx(spent(1.5), rel=1e-12)
    parts = math.sqrt(told["clients"]) if mechanism == "distributed" else 1.0
    assert told["deviation"] == pytest.approx(1.5 * math.sqrt(2) / parts)


@pytest.mark.slow
def test_from_the_command_line(tmp_path: Path) -> None:
    """Digits under epsilon 8: far better than chance, and said in one line and in the folder."""
    words = ["algorithm=analytic", "model=logistic", "privacy.feature_clip=1", "privacy.epsilon=8", "rounds=1"]
    done = in_a_terminal("run", *words, "--out", tmp_path / "run", cwd=tmp_path)
    assert done.code == 0, done.err
    said = done.out + done.err
    assert "features clipped to 1 · one example changes sums by 1.414 at most · noise 0.6377 times that in the" in said
    assert "epsilon 8 at delta 1e-05, for each example" in said
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert 7.99 < last["privacy/epsilon"] <= 8
    assert last["privacy/epsilon"] == pytest.approx(spent(0.6376953125))
    assert last["global/test/accuracy"] > 0.85


@pytest.mark.slow
def test_more_privacy_costs_accuracy_and_a_ridge_that_covers_the_noise_wins_some_back() -> None:
    settings: dict[str, Any] = {"rounds": 1, "model": WIDE, "partition": {"kind": "dirichlet", "clients": 20}}

    def accuracy(kind: str, epsilon: float, **algorithm: Any) -> float:
        private = {"feature_clip": 1.0, "epsilon": epsilon, "mechanism": "local", "noise_from": "seed"}
        found = fedloom.run({"kind": kind, **algorithm}, privacy=private, **settings)
        return float(found.summary["global/test/accuracy"].last)

    usual = accuracy("analytic", 8.0)
    assert accuracy("analytic", 100.0) > usual > accuracy("analytic", 0.5)
    assert usual > accuracy("analytic", 8.0, noise_ridge=0.0) + 0.02
    assert accuracy("law_afl", 8.0) > 0.6


@pytest.mark.slow
def test_resume_adds_the_same_noise(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"model": "logistic", "cohort": {"size": 6}, "privacy": SEEDED}
    settings |= {"checkpoint": {"curves": False}}
    for kind in ("analytic", "law_afl"):
        fedloom.run(kind, rounds=2, out=tmp_path / kind, **settings)
        fedloom.run(kind, rounds=1, out=tmp_path / f"{kind}-part", **settings)
        fedloom.resume(tmp_path / f"{kind}-part", rounds=2)
        for name in ("metrics.jsonl", "model.safetensors", "privacy.json"):
            assert (tmp_path / kind / name).read_bytes() == (tmp_path / f"{kind}-part" / name).read_bytes()


# -- refusals --------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"algorithm": "fedavg"}, r"privacy\.feature_clip: hides examples in sums .* clients of FedAvg do not send"),
        ({"algorithm": "proxy_ridge"}, r"privacy\.feature_clip: hides examples in sums"),
        ({"algorithm": "dpsgd"}, r"privacy\.feature_clip: hides examples in sums"),
        ({"privacy": ON | {"clip": 1.0}}, "clip protects clients and feature_clip protects examples"),
        ({"privacy": {"feature_clip": 1.0}}, "clip alone gives no privacy"),
        ({"privacy": ON | {"heterogeneity": "alpha"}}, "heterogeneity is for clip"),
        ({"privacy": ON | {"delta": 0.2}}, r"privacy\.delta: 0\.2 is too large for 89 examples.*below 0\.011"),
        ({"algorithm": {"kind": "analytic", "agg": "aa"}}, r"algorithm\.agg: inverts each client's own Gram matrix"),
        ({"algorithm": {"kind": "analytic", "forget": [0]}}, r"algorithm\.forget: a client to be forgotten"),
        ({"cohort": {"size": 3}}, r"cohort\.sampling: clients of other rounds are not in the sum"),
        ({"system": {"dropout": 0.1}}, r"system\.dropout: a missing client takes its share of the noise"),
        (
            {"privacy": LOCAL, "system": {"deadline": 9.0}},
            r"system\.deadline: which clients are late depends on how much data",
        ),
        ({"algorithm": "law_afl"}, r"privacy\.mechanism: 'distributed' hides single uploads"),
        (
            {"algorithm": {"kind": "law_afl", "schedule": "warmup_then_analytic"}, "privacy": LOCAL},
            r"algorithm\.schedule: model updates are sent before the sums",
        ),
        (
            {"algorithm": {"kind": "law_afl", "quality": "report"}, "privacy": LOCAL},
            r"algorithm\.quality: accuracy and loss are sent with the sums",
        ),
    ],
)
def test_what_is_not_covered_is_refused(table: dict[str, Any], message: str) -> None:
    full = {"partition": {"kind": "natural", "holdout": 0.0}, "algorithm": "analytic", "privacy": ON} | table
    with pytest.raises(ConfigError, match=message):
        prepare(parse(full), Path(), blobs(SIZES))


@pytest.mark.parametrize(
    ("kind", "advice"),
    [
        ("analytic", "set privacy.feature_clip instead"),
        ("law_afl", "set privacy.feature_clip and privacy.mechanism=local instead"),
        ("proxy_ridge", "leave the section out"),  # a closed form whose clients send no sums
        ("dpsgd", "leave the section out"),
        ("local_only", "leave the section out"),
        ("fedmgda", "use an algorithm that only sums uploads"),  # it reads each of them, hidden or not
    ],
)
def test_a_clip_without_effect_gets_an_error_that_says_what_to_set(kind: str, advice: str) -> None:
    """feature_clip, but only where it can hide what clients send; and no mechanism that is refused as well."""
    base = {"partition": {"kind": "natural", "holdout": 0.2}, "algorithm": kind}

    def tried(private: dict[str, Any]) -> Any:
        return prepare(parse(base | {"privacy": private}), Path(), blobs(SIZES)).experiment

    with pytest.raises(ConfigError) as caught:
        tried({"clip": 1.0, "noise": 1.0})
    assert [fault.fix for fault in caught.value.faults] == [advice]
    if "feature_clip" in advice:
        assert tried(LOCAL).guard is not None
    else:
        with pytest.raises(ConfigError, match=r"privacy\.feature_clip"):
            tried(LOCAL)
