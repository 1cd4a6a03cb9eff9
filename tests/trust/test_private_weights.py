"""Learned weights on private uploads: FedLAW's moves, and the moves and means of LAW-AFL's Algorithm 3, line 9."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from dp_accounting import GaussianDpEvent, rdp

from fedloom.algorithms.law_afl.state import LawAFLUpload
from fedloom.core import tree
from fedloom.core.errors import ConfigError
from fedloom.engine.rounds import advance, begin
from fedloom.engine.store import RamStore
from fedloom.engine.training import groups_of, train_all
from fedloom.runs.prepare import prepare
from fedloom.runs.settings import parse
from fedloom.trust.mechanism import protected
from support.blobs import blobs

SIZES = (20, 12, 7, 9, 30, 11)
EQUAL = (12,) * 6
PER_ROUND = {"kind": "law_afl", "schedule": "per_round", "head_steps": 5, "server_epochs": 2}
FEDLAW = {"kind": "fedlaw", "weighting": "uniform", "server_epochs": 2}
BOTH = {"clip": 1.5, "feature_clip": 0.5, "noise": 2.0, "mechanism": "local"}
D = math.sqrt(0.5**4 + 0.5**2 + 1)  # of G, B and shares of classes
OPEN = {"clip": 1e6, "feature_clip": 1e6, "noise": 0.0, "mechanism": "local"}
PROXY = {"proxy": {"size": 24}}


def made(world: Any, sizes: tuple[int, ...] = SIZES, **table: Any) -> Any:
    return world(sizes, **(PROXY | {"algorithm": PER_ROUND, "privacy": BOTH, "rounds": 4} | table))


def after(exp: Any, count: int = 1) -> Any:
    state, store = begin(exp), RamStore(6)
    for _ in range(count):
        state, _ = advance(exp, state, store)
    return state


def raw(exp: Any) -> LawAFLUpload:
    """What the clients of the first round would send, before anything is hidden."""
    state = begin(exp)
    parts = train_all(exp, state, RamStore(6), groups_of(exp, 0, exp.present(0)))
    return tree.cat([part.outcome.uploads for part in parts])


def blank(exp: Any) -> LawAFLUpload:
    """Uploads of six clients that have nothing to say, with room for many numbers."""
    d, classes = exp.task.linear_head.in_features, exp.task.linear_head.out_features
    wide = d * (d + 1) // 2 + d * classes
    none = torch.zeros(6, 0)
    return LawAFLUpload(torch.zeros(6, 5000), torch.zeros(6, wide), torch.zeros(6, classes), none, none, none, none)


# -- the mechanism ---------------------------------------------------------------------------------
def test_moves_and_means_have_noise_of_their_own_size(world: Any) -> None:
    repeated = BOTH | {"noise_from": "seed"}  # what fails by chance fails some day
    exp = made(world, model={"kind": "random_features", "width": 60}, privacy=repeated)
    ids = torch.arange(6)
    one, two = (protected(exp.guard, blank(exp), ids, 6, round_) for round_ in (0, 1))
    assert float(one.dw.std()) == pytest.approx(2.0 * 1.5, rel=0.02)
    assert float(one.rows.std()) == pytest.approx(2.0 * D, rel=0.02)
    assert float(torch.stack([one.counts, two.counts]).std()) == pytest.approx(2.0 * D, rel=0.5)
    for a, b in ((one.dw, two.dw), (one.rows, two.rows), (one.rows[:1], one.rows[1:2]), (one.dw[:1], one.dw[1:2])):
        assert abs(float(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1])) < 0.08


def test_moves_are_clipped_and_means_are_short_whatever_the_data(world: Any) -> None:
    """Replacing everything that a client has moves its means by no more than D from zero, and tells no size."""
    arrays = blobs(SIZES)
    arrays.x[arrays.client == 4] *= 1000
    exp = made(world, arrays=arrays, privacy=BOTH | {"noise": 0.0})
    uploads = raw(exp)
    norms = torch.cat([uploads.rows, uploads.counts], 1).norm(dim=1)
    assert bool((norms <= D + 1e-9).all())
    assert uploads.counts.sum(1).tolist() == pytest.approx([1.0] * 6)
    sent = protected(exp.guard, uploads._replace(dw=100 * uploads.dw), torch.arange(6), 6, 0)
    assert bool((sent.dw.norm(dim=1) <= 1.5 * (1 + 1e-6)).all())
    assert torch.equal(sent.rows, uploads.rows)


def test_anything_sent_beside_is_refused(world: Any) -> None:
    exp = made(world)
    with pytest.raises(ConfigError, match="clients send more than updates and means"):
        protected(exp.guard, blank(exp)._replace(slope=torch.ones(6, 1)), torch.arange(6), 6, 0)


def test_more_noise_for_unequal_clients(world: Any) -> None:
    """Eq. 24 as printed is another z; a factor of each client is in both parts."""
    printed = made(world, privacy=BOTH | {"heterogeneity": "eq24", "concentration": 0.05})
    assert printed.guard.release.noise == pytest.approx(4.0)
    exp = made(world, privacy=BOTH | {"heterogeneity": "entropy", "histogram_epsilon": 1e6, "slope": 3.0})
    assert exp.guard.unit == "client"
    factors = exp.guard.factors
    assert float(factors.max()) > 1.5
    sent = protected(exp.guard, blank(exp), torch.arange(6), 6, 0)
    assert (sent.dw.std(dim=1) / 3.0).tolist() == pytest.approx(factors.tolist(), rel=0.05)


# -- what the server does with it ------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize("quality", ["size", "server"])
def test_without_noise_and_with_wide_clips_it_is_the_method_itself(world: Any, quality: str) -> None:
    """With equal clients, since the private server counts them alike."""
    algorithm = PER_ROUND | {"quality": quality}
    where = {"proxy": {"size": 8, "source": "test"}}  # so that clients stay equal
    private, plain = (made(world, EQUAL, algorithm=algorithm, privacy=p, **where) for p in (OPEN, {}))
    assert len(set(plain.federation.train.sizes.tolist())) == 1
    torch.testing.assert_close(after(private, 3).server.w, after(plain, 3).server.w, rtol=1e-4, atol=1e-6)


def test_no_client_counts_more_before_anything_is_learned(world: Any) -> None:
    exp = made(world, algorithm=PER_ROUND | {"prior": "fixed", "server_epochs": 0})
    state = after(exp)
    weights = state.server.statistics.lam[state.server.statistics.lam > 0]
    assert weights.tolist() == pytest.approx([1 / len(weights)] * len(weights))
    assert state.server.models.lam.tolist() == pytest.approx([1 / 6] * 6)


def test_fedlaw_learns_from_noised_moves(world: Any) -> None:
    wide = {"clip": 1e6, "noise": 0.0, "mechanism": "local"}
    private, plain = (made(world, algorithm=FEDLAW, privacy=p) for p in (wide, {}))
    assert torch.equal(after(private, 2).server.w, after(plain, 2).server.w)
    still = {"local": {"batch": 0, "lr": 1e-12}, "model": {"kind": "mlp", "widths": [2000]}}
    noisy = {"clip": 0.5, "noise": 0.01, "mechanism": "local"}
    exp = made(world, algorithm=FEDLAW | {"param": "fixed"}, privacy=noisy, **still)
    end = after(exp)
    spread = float(end.server.lam.square().sum().sqrt())
    assert float((end.server.w - exp.task.w0).std()) == pytest.approx(0.005 * spread, rel=0.05)


# -- what it costs ---------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "private", "uses"),
    [
        (PER_ROUND, BOTH, [2, 4, 6, 8]),
        (PER_ROUND | {"fresh": True}, BOTH, [1, 2, 3, 4]),
        (FEDLAW, {"clip": 1.5, "noise": 2.0, "mechanism": "local"}, [1, 2, 3, 4]),
    ],
    ids=["per_round", "fresh", "fedlaw"],
)
def test_the_ledger_counts_both_parts(world: Any, algorithm: Any, private: Any, uses: list[int]) -> None:
    exp = made(world, algorithm=algorithm, privacy=private)
    state, store = begin(exp), RamStore(6)
    for count in uses:
        state, _ = advance(exp, state, store)
        assert state.ledger.uses == (count,) * 6
        accountant = rdp.RdpAccountant()
        accountant.compose(GaussianDpEvent(2.0), count)
        assert state.ledger.epsilon() == pytest.approx(accountant.get_epsilon(1e-5))
    assert exp.guard.releases == (0, *uses)
    assert exp.guard.epsilon(4) == state.ledger.epsilon()


@pytest.mark.slow
def test_a_budget_pays_for_both_parts(world: Any) -> None:
    budget = {k: v for k, v in BOTH.items() if k != "noise"} | {"epsilon": 8.0}
    exp = made(world, privacy=budget)
    assert 7.9 < after(exp, 4).ledger.epsilon() <= 8.0


# -- what is refused -------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("algorithm", "private", "message"),
    [
        (PER_ROUND, {"clip": None}, r"privacy\.clip: is unset.*set privacy\.clip, too"),
        (PER_ROUND, {"feature_clip": None}, r"privacy\.feature_clip: is unset.*set privacy\.feature_clip, too"),
        (PER_ROUND, {"mechanism": "distributed"}, r"privacy\.mechanism: 'distributed' hides.*privacy\.mechanism=local"),
        (PER_ROUND | {"quality": "report"}, {}, r"algorithm\.quality: accuracy and loss are sent with"),
        (PER_ROUND | {"depth": "entropy"}, {}, r"algorithm\.depth: how much of the net a client trains"),
        (PER_ROUND | {"shrink_rule": "eq5"}, {}, r"algorithm\.shrink_rule: norms of gradients are sent"),
        ({"kind": "law_afl"}, {}, "clip protects clients and feature_clip protects examples.*keep one of them"),
        (FEDLAW, {}, "clip protects clients and feature_clip protects examples.*keep one of them"),
        (FEDLAW, {"feature_clip": None, "mechanism": "distributed"}, r"FedLAW reads every .*privacy\.mechanism=local"),
        ({"kind": "fedlaw"}, {"feature_clip": None}, r"weights clients by their data.*algorithm\.weighting=uniform"),
        ({"kind": "fedbe"}, {"feature_clip": None}, "how it tolerates their noise is not known"),
    ],
)
def test_what_cannot_be_private_is_refused(algorithm: Any, private: Any, message: str) -> None:
    privacy = {k: v for k, v in (BOTH | private).items() if v is not None}
    full = {"partition": {"kind": "natural", "holdout": 0.0}, "algorithm": algorithm, "privacy": privacy, **PROXY}
    with pytest.raises(ConfigError) as caught:
        prepare(parse(full), Path(), blobs(SIZES))
    assert re.search(message, str(caught.value), re.DOTALL), str(caught.value)
