"""Privacy: the mechanism does what it says, the accountant is dp-accounting, and what it does not cover is refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import dp_accounting
import numpy as np
import pytest
import torch
from dp_accounting import rdp
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm
from torch import Tensor

import fedloom
from fedloom.algorithm import Update
from fedloom.algorithms.fedopt import FedOpt
from fedloom.core.errors import ConfigError, DivergedError
from fedloom.engine.rounds import advance, advance_watched, begin
from fedloom.engine.store import RamStore
from fedloom.runs.prepare import prepare
from fedloom.runs.settings import parse
from fedloom.trust.accountant import Release, calibrated, epsilon
from fedloom.trust.heterogeneity import concentrations, entropies, mean_entropy, noise_factors
from fedloom.trust.mechanism import clipped_uploads, noised_uploads
from fedloom.trust.noise import seeded
from fedloom.trust.privacy import Privacy
from support.blobs import blobs

DELTA = 1e-5
KEY = seeded(1)
SIZES = (20, 12, 7, 9, 30, 11)
UNIFORM = {"kind": "fedavg", "weighting": "uniform"}


class Two(NamedTuple):
    dw: Tensor
    dc: Tensor


def poisson(q: float, z: float) -> Release:
    return Release(z, False, "poisson" if q < 1 else "all", 1000, round(q * 1000))


# -- the mechanism ---------------------------------------------------------------------------------
@pytest.mark.slow
@given(st.integers(0, 10_000), st.floats(1e-3, 1e3), st.floats(1e-3, 1e3))
@settings(max_examples=60, deadline=None)
def test_no_upload_is_longer_than_the_clip(seed: int, size: float, clip: float) -> None:
    """D1, over all tensors jointly."""
    g = torch.Generator().manual_seed(seed)
    before = Two(size * torch.randn(4, 3, 5, generator=g), size * torch.randn(4, 7, generator=g))
    after = clipped_uploads(before, clip)

    def norms(u: Two) -> Tensor:
        return torch.cat([u.dw.flatten(1), u.dc], 1).double().norm(dim=1)

    assert bool((norms(after) <= clip * (1 + 1e-6)).all())
    for k in range(4):
        if norms(before)[k] <= clip:
            assert torch.equal(after.dw[k], before.dw[k])
        else:  # shortened to the clip, and turned by nothing
            assert float(norms(after)[k]) == pytest.approx(clip, rel=1e-5)
            torch.testing.assert_close(after.dw[k] * before.dc[k, 0], after.dc[k, 0] * before.dw[k])


def test_an_upload_of_zeros_stays() -> None:
    assert torch.equal(clipped_uploads(Update(torch.zeros(2, 3)), 1.0).dw, torch.zeros(2, 3))


def test_noise_has_the_stated_scale() -> None:
    """D2: the deviation of a million draws is within 1 % of what it should be, and they are normal."""
    x = Update(torch.ones(4, 250_000))
    drawn = noised_uploads(x, torch.tensor([0.5, 0.5, 2.0, 0.0]), torch.arange(4), KEY, 2).dw - 1
    assert float(drawn[:2].std()) == pytest.approx(0.5, rel=0.01)
    assert float(drawn[2].std()) == pytest.approx(2.0, rel=0.01)
    assert not drawn[3].any()
    assert abs(float(drawn[:3].mean())) < 0.005
    assert float((drawn[2].abs() < 2.0).double().mean()) == pytest.approx(2 * norm.cdf(1) - 1, abs=0.003)
    assert abs(float(torch.corrcoef(drawn[:2])[0, 1])) < 0.01


def test_noise_has_an_address() -> None:
    x = Update(torch.zeros(3, 50))
    std, ids = torch.ones(3), torch.tensor([4, 1, 9])
    drawn = noised_uploads(x, std, ids, KEY, 2).dw
    order = torch.tensor([2, 0, 1])
    assert torch.equal(noised_uploads(x, std, ids[order], KEY, 2).dw, drawn[order])
    assert torch.equal(noised_uploads(Update(x.dw[:1]), std[:1], ids[:1], KEY, 2).dw, drawn[:1])
    for other in ((KEY, 3), (seeded(2), 2)):
        assert not torch.isclose(noised_uploads(x, std, ids, *other).dw, drawn).any()
    both = noised_uploads(Two(torch.zeros(3, 50), torch.zeros(3, 50)), std, ids, KEY, 2)
    assert torch.equal(both.dw, drawn)
    assert not torch.isclose(both.dw, both.dc).any()


@pytest.mark.parametrize(("mechanism", "each"), [("distributed", 1 / math.sqrt(6)), ("local", 1.0)])
def test_the_noise_of_a_round(world: Any, mechanism: str, each: float) -> None:
    """Clients that do not move send noise alone; their mean has the deviation of their sum over their number."""
    settings = {"model": {"kind": "mlp", "widths": [3000]}, "algorithm": UNIFORM, "local": {"lr": 1e-12}}
    private = {"clip": 0.5, "noise": 3.0, "mechanism": mechanism, "noise_from": "seed"}
    exp = world(SIZES, privacy=private, **settings)
    moved = advance(exp, begin(exp), RamStore(6))[0].server.w - exp.task.w0
    assert len(moved) > 20_000
    assert float(moved.std()) == pytest.approx(3.0 * 0.5 * each * math.sqrt(6) / 6, rel=0.02)


def test_under_poisson_sampling_the_sum_is_divided_by_the_expected_number(world: Any) -> None:
    """And where nobody comes, there is noise all the same: else its absence would tell."""
    settings = {"model": {"kind": "mlp", "widths": [3000]}, "algorithm": UNIFORM, "local": {"lr": 1e-12}}
    exp = world(
        SIZES,
        cohort={"sampling": "poisson", "size": 1},
        privacy={"clip": 1.0, "noise": 2.0, "noise_from": "seed"},
        **settings,
    )
    counts, state, store = set(), begin(exp), RamStore(6)
    for round_ in range(12):
        after, _ = advance(exp, state, store)
        assert float((after.server.w - state.server.w).std()) == pytest.approx(2.0, rel=0.03)
        counts.add(len(exp.present(round_).drawn.ids))
        state = after
    assert 0 in counts
    assert len(counts) > 1


def test_poisson_cohorts(world: Any) -> None:
    exp = world((5,) * 50, cohort={"sampling": "poisson", "size": 10}, rounds=400)
    drawn = [exp.present(r).drawn for r in range(400)]
    sizes = [len(d.ids) for d in drawn]
    assert np.mean(sizes) == pytest.approx(10, abs=0.5)
    assert np.var(sizes) == pytest.approx(50 * 0.2 * 0.8, rel=0.3)
    often = torch.bincount(torch.cat([d.ids for d in drawn]), minlength=50)
    assert 45 < int(often.min()) <= int(often.max()) < 125
    assert all(bool((d.times == 1).all()) for d in drawn)


# -- the accountant --------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("q", "rounds", "z", "spec"),
    [
        *((0.1, 120, z, e) for z, e in ((1, 8.61), (2, 2.83), (4, 1.19))),
        *((0.1, 200, z, e) for z, e in ((1, 11.14), (2, 3.68), (4, 1.56))),
        *((0.1, 1000, z, e) for z, e in ((1, 27.16), (2, 9.09), (4, 3.74))),
        *((1.0, 1, z, e) for z, e in ((1, 4.75), (2, 2.17), (4, 1.01))),
        (1.0, 120, 4, 16.05),
    ],
)
def test_epsilon_of_the_specification(q: float, rounds: int, z: float, spec: float) -> None:
    """D3: no more than the value from integer orders, and not much less."""
    assert 0.9 * spec <= epsilon(poisson(q, z), rounds, DELTA) <= spec + 6e-3  # which is given to two digits


@pytest.mark.slow
@pytest.mark.parametrize(
    ("q", "rounds", "targets"),
    [
        (0.1, 120, {1.0: 4.64, 8.0: 1.05}),
        (0.1, 1000, {2.0: 6.89}),
        (1.0, 1, {1.0: 4.05, 2.0: 2.15, 4.0: 1.16, 8.0: 0.64}),
    ],
    ids=["120", "1000", "everyone once"],
)
def test_calibrated_noise_of_the_specification(q: float, rounds: int, targets: dict[float, float]) -> None:
    for target, z in targets.items():
        found = calibrated(poisson(q, 0.0), rounds, target, DELTA)
        assert found == pytest.approx(z, abs=0.011)
        assert epsilon(poisson(q, found), rounds, DELTA) <= target
        assert epsilon(poisson(q, 0.999 * found), rounds, DELTA) > target


@pytest.mark.parametrize(("target", "sigma"), [(0.5, 7.032), (1, 3.731), (2, 1.994), (4, 1.081), (8, 0.600)])
def test_one_release_is_not_cheaper_than_the_exact_gaussian_mechanism(target: float, sigma: float) -> None:
    exact = norm.cdf(1 / (2 * sigma) - target * sigma) - math.exp(target) * norm.cdf(-1 / (2 * sigma) - target * sigma)
    assert exact == pytest.approx(DELTA, rel=0.02)  # Balle and Wang
    assert sigma < calibrated(poisson(1.0, 0.0), 1, target, DELTA) < 1.13 * sigma


@pytest.mark.slow
def test_epsilon_falls_with_noise_and_grows_with_sampling_and_rounds() -> None:
    """D4."""
    by_noise = [epsilon(poisson(0.1, z), 100, DELTA) for z in (0.5, 1, 2, 4, 8)]
    by_share = [epsilon(poisson(q, 2.0), 100, DELTA) for q in (0.01, 0.1, 0.3, 1.0)]
    by_round = [epsilon(poisson(0.1, 2.0), t, DELTA) for t in (0, 1, 10, 100, 1000)]
    assert by_noise == sorted(by_noise, reverse=True)
    assert by_share == sorted(by_share)
    assert by_round == sorted(by_round)
    assert by_round[0] == 0
    assert len({*by_noise, *by_share, *by_round}) == 12  # one of them is in all three
    fixed = Release(4.0, False, "uniform", 100, 10)
    assert epsilon(fixed, 50, DELTA) < epsilon(fixed._replace(size=20), 50, DELTA) < epsilon(fixed, 5000, DELTA)


def test_a_choice_of_clients_hides_nothing_from_who_sees_every_upload() -> None:
    for sampling in ("poisson", "uniform", "all"):
        local = Release(2.0, True, sampling, 100, 10)  # type: ignore[arg-type]
        assert epsilon(local, 7, DELTA) == epsilon(Release(2.0, False, "all", 100, 100), 7, DELTA)


@pytest.mark.slow
def test_exchanging_a_client_moves_the_sum_twice_as_far() -> None:
    """A round of all clients but one, without replacement, is hardly better than one of all, at half the noise."""
    fixed = Release(4.0, False, "uniform", 10_000, 9_999)
    accountant = rdp.RdpAccountant()
    accountant.compose(dp_accounting.GaussianDpEvent(2.0), 5)
    assert epsilon(fixed, 5, DELTA) == pytest.approx(accountant.get_epsilon(DELTA), rel=0.35)
    assert epsilon(fixed._replace(size=10_000), 5, DELTA) < epsilon(fixed, 5, DELTA)  # then none can be exchanged


def test_no_noise_is_no_privacy() -> None:
    assert epsilon(poisson(0.1, 0.0), 1, DELTA) == math.inf
    assert epsilon(poisson(0.1, 0.0), 0, DELTA) == 0


@pytest.mark.slow
def test_all_releases_are_charged() -> None:
    """D9: the histogram, once, and every update."""
    with_histogram = poisson(0.1, 2.0)._replace(histogram_epsilon=0.5)
    accountant = rdp.RdpAccountant()
    accountant.compose(dp_accounting.LaplaceDpEvent(2.0))
    once = accountant.get_epsilon(DELTA)
    assert epsilon(with_histogram, 0, DELTA) == once > 0
    accountant.compose(dp_accounting.PoissonSampledDpEvent(0.1, dp_accounting.GaussianDpEvent(2.0)), 50)
    assert epsilon(with_histogram, 50, DELTA) == pytest.approx(accountant.get_epsilon(DELTA), rel=1e-12)
    assert epsilon(with_histogram, 50, DELTA) > epsilon(poisson(0.1, 2.0), 50, DELTA)
    everyone = poisson(1.0, 2.0)  # whose epsilon takes least time
    z = calibrated(everyone._replace(histogram_epsilon=0.5), 50, 3.0, DELTA)
    assert z > calibrated(everyone, 50, 3.0, DELTA)
    with pytest.raises(ConfigError, match=r"privacy\.epsilon: the label histograms alone cost"):
        calibrated(with_histogram, 50, 0.1, DELTA)


# -- noise by heterogeneity ------------------------------------------------------------------------
def test_a_factor_is_never_below_one() -> None:
    """D6, whatever the labels and the noise of their histograms."""
    counts = np.random.default_rng(0).integers(0, 30, (500, 10)).astype(np.float64)
    counts[0], counts[1] = 0, [100] + [0] * 9
    for kind in ("alpha", "entropy"):
        for cost in (0.1, 1.0, 1000.0):
            how = Privacy(clip=1.0, noise=1.0, heterogeneity=kind, histogram_epsilon=cost, most=3.0, slope=5.0)  # type: ignore[arg-type]
            f = noise_factors(how, counts, KEY)
            assert float(f.min()) >= 1
            assert float(f.max()) <= 3
            assert torch.equal(f, noise_factors(how, counts, KEY))


def test_factors_of_known_clients() -> None:
    """An exact histogram: an even client is plain, one with a single class has the most noise."""
    counts = np.array([[10.0] * 10, [100.0] + [0.0] * 9])
    for kind, most in (("alpha", 4.0), ("entropy", 2.0)):
        how = Privacy(clip=1.0, noise=1.0, heterogeneity=kind, histogram_epsilon=1e9)  # type: ignore[arg-type]
        assert noise_factors(how, counts, KEY).tolist() == pytest.approx([1.0, most], rel=1e-3)
    assert noise_factors(Privacy(clip=1.0, noise=1.0), counts, KEY).tolist() == [1, 1]


@pytest.mark.parametrize(("alpha", "factor"), [(0.1, 1.0), (0.05, 2.0), (0.025, 4.0), (0.01, 4.0), (1.0, 1.0)])
def test_the_factor_follows_the_papers_formula(alpha: float, factor: float) -> None:
    even = mean_entropy(np.array([alpha]), 10)
    found = concentrations(even, 10)[0]
    assert found == pytest.approx(alpha, rel=1e-2)
    assert float(np.clip(0.1 / found, 1, 4)) == pytest.approx(factor, rel=1e-2)


def test_entropies_against_draws() -> None:
    drawn = np.random.default_rng(0).dirichlet([0.3] * 6, 20_000)
    assert entropies(drawn).mean() == pytest.approx(mean_entropy(np.array([0.3]), 6)[0], rel=0.01)
    assert entropies(np.array([[1.0, 1.0], [3.0, 0.0], [-1.0, -2.0]])).tolist() == pytest.approx([1, 0, 0])


def test_unequal_clients_add_more_noise(world: Any) -> None:
    private = {"clip": 1.0, "noise": 1.0, "heterogeneity": "entropy", "slope": 3.0, "histogram_epsilon": 1e6}
    exp = world(SIZES, algorithm=UNIFORM, privacy=private)
    f = exp.guard.factors
    assert float(f.min()) >= 1
    assert float(f.max()) > 1
    assert exp.guard.epsilon(0) > 0  # the histograms


@pytest.mark.parametrize(("alpha", "multiplier"), [(0.1, 3.0), (0.05, 6.0), (1.0, 0.3)])
def test_equation_24_as_printed(world: Any, alpha: float, multiplier: float) -> None:
    """sigma_base sigma_ref / alpha for everybody, no histogram, and the epsilon of just that much noise."""
    private = {"clip": 1.0, "noise": 3.0, "heterogeneity": "eq24", "concentration": alpha}
    guard = world(SIZES, algorithm=UNIFORM, privacy=private).guard
    plain = world(SIZES, algorithm=UNIFORM, privacy={"clip": 1.0, "noise": multiplier}).guard
    assert guard.release.noise == pytest.approx(multiplier)
    assert guard.factors.tolist() == [1.0] * len(SIZES)
    assert guard.epsilon(0) == 0
    assert guard.epsilon(2) == pytest.approx(plain.epsilon(2))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"noise": 1.0, "heterogeneity": "eq24"}, "belong together"),
        ({"noise": 1.0, "concentration": 0.1}, "belong together"),
        ({"epsilon": 1.0, "heterogeneity": "eq24", "concentration": 0.1}, "would calibrate it away"),
    ],
)
def test_equation_24_needs_its_alpha_and_noise(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Privacy(clip=1.0, **given)


def test_equation_24_hides_examples_too() -> None:
    how = Privacy(feature_clip=1.0, noise=1.0, heterogeneity="eq24", concentration=0.05)
    assert how.multiplier == pytest.approx(2)


@pytest.mark.parametrize("given", [{"heterogeneity": "alpha"}, {"mechanism": "local"}, {"delta": 1e-6}])
def test_settings_that_protect_nothing_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(
        ConfigError, match=f"privacy.{next(iter(given))}: has an effect only if clip is set, or if feature_clip is set"
    ):
        parse({"privacy": given})
    assert not Privacy().on


# -- in a run --------------------------------------------------------------------------------------
LINEAR = ["fedavg", "fedprox", "fedopt", "moon", "ditto", "fedprox_adaptive", "fedrep", "fedsam"]


@pytest.mark.parametrize("algorithm", LINEAR)
def test_linear_algorithms_can_be_private(world: Any, algorithm: str) -> None:
    table: dict[str, Any] = {"kind": algorithm}
    if algorithm in ("fedavg", "fedprox", "moon", "ditto", "fedrep", "fedsam"):
        table["weighting"] = "uniform"
    private = {"clip": 0.1, "noise": 0.5}
    exp = world(SIZES, model={"kind": "mlp", "widths": [6]}, algorithm=table, privacy=private)
    state, store = begin(exp), RamStore(6)
    for _ in range(2):
        state, _ = advance(exp, state, store)
    assert bool(state.server.w.isfinite().all())
    assert exp.guard.epsilon(2) > exp.guard.epsilon(1) > 0


@pytest.mark.parametrize("algorithm", ["scaffold", "feddyn"])
def test_states_that_the_server_keeps_count_of_cannot_be_private(algorithm: str) -> None:
    with pytest.raises(ConfigError, match=r"privacy\.clip: changes what clients of .* send, but not what they keep"):
        parse({"algorithm": algorithm, "privacy": {"clip": 0.1, "noise": 0.0}})


@pytest.mark.parametrize("sampling", ["all", "poisson", "uniform"])
@pytest.mark.parametrize("mechanism", ["distributed", "local"])
def test_without_noise_and_with_a_wide_clip_nothing_changes(world: Any, sampling: str, mechanism: str) -> None:
    """D5, bit for bit; and epsilon is infinite."""
    size = {} if sampling == "all" else {"size": 3}
    settings = {"algorithm": UNIFORM, "cohort": {"sampling": sampling, **size}}
    plain = world(SIZES, **settings)
    private = world(SIZES, privacy={"clip": 1e6, "noise": 0.0, "mechanism": mechanism}, **settings)
    ends = []
    for exp in (plain, private):
        state, store = begin(exp), RamStore(6)
        for _ in range(4):
            state, _ = advance(exp, state, store)
        ends.append(state.server.w)
    assert torch.equal(*ends)
    assert private.guard.epsilon(4) == math.inf
    assert private.guard.described()["epsilon"] is None


def test_an_algorithm_that_leaves_weights_to_the_engine_counts_clients_alike(world: Any) -> None:
    sgd = {"kind": "fedopt", "rule": "sgd"}
    exp = world(SIZES, algorithm=sgd, privacy={"clip": 1e6, "noise": 0.0})
    plain = world(SIZES, algorithm=UNIFORM)
    a, b = (advance(e, begin(e), RamStore(6))[0].server.w for e in (exp, plain))
    torch.testing.assert_close(a, b)
    assert any(
        "equal weights" in note for note in parse({"algorithm": sgd, "privacy": {"clip": 1.0, "noise": 1.0}}).notes
    )


def test_what_weights_are_counts_and_not_who_wrote_them_down(world: Any) -> None:
    class Same(FedOpt):
        def weight(self, upload: Any, work: Any) -> Any:
            return work.examples

    class Telling(FedOpt):
        def weight(self, upload: Any, work: Any) -> Any:
            return 2 * work.examples

    exp = world(SIZES, algorithm={"kind": "fedopt"}, privacy={"clip": 1e6, "noise": 0.0})
    same, telling = (replace(exp, algorithm=cls().bind(exp.algorithm.setup)) for cls in (Same, Telling))
    a, b = (advance(e, begin(e), RamStore(6))[0].server.w for e in (exp, same))
    assert torch.equal(a, b)
    with pytest.raises(ConfigError, match="Telling weights clients by their work"):
        advance(telling, begin(telling), RamStore(6))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cohort", "private", "event", "neighbours"),
    [
        (
            {"sampling": "poisson", "size": 4},
            {"noise": 1.5},
            dp_accounting.PoissonSampledDpEvent(0.2, dp_accounting.GaussianDpEvent(1.5)),
            "ADD_OR_REMOVE_ONE",
        ),
        ({"sampling": "all"}, {"noise": 1.5}, dp_accounting.GaussianDpEvent(1.5), "ADD_OR_REMOVE_ONE"),
        (
            {"sampling": "uniform", "size": 4},
            {"noise": 5.0},
            dp_accounting.SampledWithoutReplacementDpEvent(20, 4, dp_accounting.GaussianDpEvent(2.5)),
            "REPLACE_ONE",
        ),
    ],
)
def test_the_epsilon_of_a_run_folder_is_that_of_dp_accounting(
    tmp_path: Path, cohort: dict[str, Any], private: dict[str, Any], event: Any, neighbours: str
) -> None:
    fedloom.run(
        UNIFORM,
        rounds=4,
        cohort=cohort,
        privacy={"clip": 1.0, **private},
        evaluate={"every": 3},
        model="logistic",
        checkpoint={"curves": False},
        out=tmp_path / "run",
    )
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == [0, 3, 4]
    assert lines[0]["privacy/epsilon"] == 0
    for line in lines[1:]:
        accountant = rdp.RdpAccountant(neighboring_relation=dp_accounting.NeighboringRelation[neighbours])
        accountant.compose(event, line["round"])
        assert line["privacy/epsilon"] == pytest.approx(accountant.get_epsilon(DELTA), rel=1e-12)
    told = json.loads((tmp_path / "run" / "privacy.json").read_text())
    assert told["epsilon"] == lines[-1]["privacy/epsilon"]
    assert (told["relation"], told["releases"], told["unit"]) == (neighbours.lower(), 4, "client")


def test_local_noise_composes_over_a_clients_own_rounds(world: Any) -> None:
    private = {"clip": 1.0, "noise": 3.0, "mechanism": "local"}
    exp = world((5,) * 12, cohort={"size": 3}, algorithm=UNIFORM, privacy=private, rounds=20)
    often = torch.bincount(torch.cat([exp.present(r).drawn.ids for r in range(20)]), minlength=12)
    assert exp.guard.releases[0] == 0
    assert exp.guard.releases[-1] == int(often.max()) < 20
    accountant = rdp.RdpAccountant()
    accountant.compose(dp_accounting.GaussianDpEvent(3.0), int(often.max()))
    assert exp.guard.epsilon(20) == pytest.approx(accountant.get_epsilon(DELTA))


@pytest.mark.slow
def test_a_budget_is_kept_to_the_last_round(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"cohort": {"sampling": "all"}, "privacy": {"clip": 1.0, "epsilon": 3.0}}
    settings |= {"checkpoint": {"curves": False}}
    out = tmp_path / "run"
    history = fedloom.run(UNIFORM, rounds=5, model="logistic", out=out, **settings)
    spent = history.metrics["privacy/epsilon"]
    assert 2.99 < spent[-1] <= 3.0
    assert list(spent) == sorted(spent)
    with pytest.raises(ConfigError, match=r"--rounds: the noise of this run was calibrated for 5 rounds"):
        fedloom.resume(out, rounds=9)


@pytest.mark.slow
def test_resume_adds_the_same_noise(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "cohort": {"sampling": "poisson", "size": 5},
        "privacy": {"clip": 1.0, "noise": 1.0, "heterogeneity": "alpha", "noise_from": "seed"},
        "model": {"kind": "logistic"},
        "checkpoint": {"curves": False},
    }
    fedloom.run(UNIFORM, rounds=4, out=tmp_path / "whole", **settings)
    fedloom.run(UNIFORM, rounds=2, out=tmp_path / "part", **settings)
    fedloom.resume(tmp_path / "part", rounds=4)
    for name in ("metrics.jsonl", "model.safetensors", "privacy.json"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "part" / name).read_bytes()


def test_a_client_that_is_left_out_would_be_reported(world: Any) -> None:
    arrays = blobs(SIZES)
    arrays.x[arrays.client == 2] = 1e38  # with such a rate, this client's work will not be finite
    exp = world(arrays=arrays, algorithm=UNIFORM, local={"batch": 0, "lr": 100.0}, privacy={"clip": 1.0, "noise": 1.0})
    with pytest.raises(DivergedError, match=r"client 2 are not finite; .* epsilon would no longer hold"):
        advance(exp, begin(exp), RamStore(6))


def test_robust_rules_read_private_uploads(world: Any) -> None:
    private = {"clip": 0.5, "noise": 0.01, "mechanism": "local"}
    bad = {"kind": "model_scale", "clients": [0]}
    exp = world(SIZES, algorithm=UNIFORM, privacy=private, aggregation={"rule": "median"}, corruption=bad)
    done = advance_watched(exp, begin(exp), RamStore(6))
    assert float((done.state.server.w - exp.task.w0).norm()) < 0.6  # a bad client's upload is clipped, too


# -- refusals --------------------------------------------------------------------------------------
ON = {"clip": 1.0, "noise": 1.0}
LOCAL = ON | {"mechanism": "local"}


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"privacy": {"noise": 1.0}}, "noise hides only what is bounded; set clip"),
        ({"privacy": {"clip": 1.0}}, "clip alone gives no privacy"),
        ({"privacy": ON | {"epsilon": 1.0}}, "noise and epsilon both set"),
        ({"privacy": ON | {"clip": 0.0}}, r"privacy\.clip: .*greater than 0"),
        ({"privacy": ON | {"delta": 1.0}}, r"privacy\.delta: .*less than 1"),
        ({"privacy": ON | {"delta": 0.2}}, r"privacy\.delta: 0.2 is too large for 6 clients"),
        (
            {"privacy": ON, "algorithm": "fedavg"},
            r"privacy\.clip: FedAvg weights clients .* \(set algorithm.weighting=uniform\)",
        ),
        ({"privacy": ON, "algorithm": "fedmgda"}, r"privacy\.mechanism: 'distributed' hides single uploads"),
        ({"privacy": LOCAL, "algorithm": "fedmgda"}, r"privacy\.clip: FedMGDA is not linear"),
        ({"privacy": ON, "algorithm": "fedkd"}, r"privacy\.clip: the size of an upload of FedKD"),
        ({"privacy": ON, "algorithm": "dpsgd"}, r"privacy\.clip: covers clients that send updates to a server"),
        ({"privacy": ON, "algorithm": "analytic"}, r"privacy\.clip: covers clients that send updates to a server"),
        ({"privacy": ON, "algorithm": "local_only"}, r"privacy\.clip: covers clients that send updates to a server"),
        ({"privacy": ON, "cohort": {"sampling": "proportional"}}, r"cohort\.sampling: 'proportional' draws clients by"),
        ({"privacy": ON, "aggregation": {"rule": "median"}}, r"aggregation\.rule: 'median' needs every upload"),
        (
            {"privacy": ON, "system": {"dropout": 0.1}},
            r"system\.dropout: a missing client takes its share of the noise",
        ),
        (
            {"privacy": ON, "task": {"class_weights": "balanced"}},
            r"task\.class_weights: counts the classes of all clients",
        ),
        ({"privacy": ON, "system": {"stragglers": 0.5}}, r"system\.stragglers: a missing client takes its share"),
        (
            {"privacy": LOCAL, "system": {"deadline": 9.0}},
            r"system\.deadline: which clients are late depends on how much data",
        ),
        (
            {"privacy": ON, "model": {"kind": "resnet20", "norm": "batch"}},
            r"model: \d+ running statistics of BatchNorm are sent in addition to the clipped upload",
        ),
        ({"cohort": {"sampling": "poisson", "size": 7}}, r"cohort\.size: 7, but the data has 6 clients"),
        ({"partition": "iid", "cohort": {"sampling": "poisson", "size": 21}}, r"cohort\.size: 21 of partition.clients"),
    ],
)
def test_what_is_not_covered_is_refused(table: dict[str, Any], message: str) -> None:
    full = {"partition": {"kind": "natural", "holdout": 0.2}, "algorithm": UNIFORM} | table
    arrays = blobs(SIZES)
    if "model" in table:
        arrays = arrays._replace(x=np.zeros((len(arrays.y), 3, 32, 32), dtype=np.uint8))
    with pytest.raises(ConfigError, match=message):
        prepare(parse(full), Path(), arrays)


@pytest.mark.parametrize(("statistics", "warned"), [("all", True), ("sums", True), ("own", False)])
def test_statistics_of_all_rows_are_named_as_public(statistics: str, warned: bool, tmp_path: Path) -> None:
    rows = "\n".join(f"{k % 7},{k % 2},h{k % 6}" for k in range(60))
    (tmp_path / "t.csv").write_text(f"a,y,h\n{rows}\n")
    data = {"source": "csv", "path": str(tmp_path / "t.csv"), "label": "y", "client": "h", "statistics": statistics}
    config = parse({"data": data, "algorithm": UNIFORM, "privacy": ON | {"delta": 0.1}})
    notes = prepare(config, tmp_path).shared.notes
    assert any("epsilon assumes that they are public" in note for note in notes) == warned


def test_late_clients_may_send_what_they_have(world: Any) -> None:
    system = {"stragglers": 0.5, "policy": "partial"}
    assert world(SIZES, algorithm=UNIFORM, privacy=ON, system=system).guard is not None


def test_without_the_accountant_there_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "dp_accounting", None)
    with pytest.raises(ConfigError, match=r"privacy: epsilon needs dp-accounting.*pip install -e '\.\[privacy\]'"):
        epsilon(poisson(0.123, 1.0), 1, DELTA)
