"""DP-FedAvg with adaptive clipping: S finds the quantile, and one release pays for the move and for the indicator."""

from __future__ import annotations

import math
from typing import Any

import dp_accounting
import pytest
import torch
from dp_accounting import rdp

import fedloom
from fedloom.algorithm import Inbox, Work
from fedloom.algorithms.dp_fedavg import DpFedAvg, Sent, Server
from fedloom.core import tree
from fedloom.core.errors import ConfigError
from fedloom.engine.rounds import advance, begin
from fedloom.engine.store import RamStore
from fedloom.runs.settings import parse

SIZES = (20, 12, 7, 9, 30, 11)


def moves(count: int = 200) -> torch.Tensor:
    """Moves of very different lengths."""
    g = torch.Generator().manual_seed(0)
    ways = torch.randn(count, 30, generator=g)
    return ways / ways.norm(dim=1, keepdim=True) * torch.randn(count, 1, generator=g).exp()


def heard(alg: DpFedAvg, server: Server, dw: torch.Tensor) -> Inbox[Sent]:
    one = torch.ones(())
    sent = torch.vmap(lambda d: alg.finish(server.w + d, server, (), Work(one, one, one, one))[0])(dw)
    total = tree.tmap(lambda part: part.double().sum(0), sent)
    count = torch.tensor(float(len(dw)), dtype=torch.float64)
    return Inbox(total, count, count, count, count)


@pytest.mark.slow
@pytest.mark.parametrize("quantile", [0.2, 0.5, 0.9])
@pytest.mark.parametrize("clip", [0.01, 30.0])
def test_the_clip_finds_its_quantile(quantile: float, clip: float) -> None:
    alg, dw = DpFedAvg(clip=clip, quantile=quantile), moves()
    server = alg.init(torch.zeros(30))
    for _ in range(150):
        server = alg.update(server, heard(alg, server, dw))
    assert float((dw.norm(dim=1) <= server.clip).double().mean()) == pytest.approx(quantile, abs=0.02)


def test_the_mean_is_that_of_clipped_moves_and_no_upload_is_longer_than_one() -> None:
    alg, dw = DpFedAvg(clip=0.7, indicator=0.3), moves()
    server = alg.init(torch.zeros(30))
    after = alg.update(server, heard(alg, server, dw))
    short = dw * (0.7 / dw.norm(dim=1, keepdim=True)).clamp(max=1)
    torch.testing.assert_close(after.w, short.mean(0), rtol=1e-5, atol=1e-6)
    one = torch.ones(())
    sent = [alg.finish(d, server, (), Work(one, one, one, one))[0] for d in dw]
    lengths = torch.stack([torch.cat([s.dw, s.within[None]]).norm() for s in sent])
    assert float(lengths.max()) <= 1 + 1e-6
    assert float(lengths[dw.norm(dim=1) > 0.7].min()) == pytest.approx(1)
    share = float((dw.norm(dim=1) <= 0.7).double().mean())
    assert float(after.clip) == pytest.approx(0.7 * math.exp(-0.2 * (share - 0.5)))


@pytest.mark.slow
def test_the_noise_is_split_as_it_says(world: Any) -> None:
    """Clients that do not move: what moves the model, and the clip, is noise alone."""
    settings = {"local": {"lr": 1e-12}}
    algorithm = {"kind": "dp_fedavg", "clip": 0.5, "indicator": 0.6, "rate": 1.0}
    private = {"clip": 1.0, "noise": 2.0, "noise_from": "seed"}  # from a fresh secret it would fail by chance some day
    drawn = []
    for seed in range(40):
        wide = {} if seed else {"model": {"kind": "mlp", "widths": [3000]}}
        exp = world(SIZES, algorithm=algorithm, privacy=private, seed=seed, **settings, **wide)
        server = advance(exp, begin(exp), RamStore(6))[0].server
        drawn.append(-math.log(float(server.clip) / 0.5) + 0.5 - 1.0)  # all were unclipped
        if not seed:
            moved = server.w - exp.task.w0
            assert float(moved.std()) == pytest.approx(2.0 * 0.5 / (0.8 * 6), rel=0.02)
    assert float(torch.tensor(drawn).std()) == pytest.approx(2.0 / (2 * 0.6) / 6, rel=0.3)
    accountant = rdp.RdpAccountant()
    accountant.compose(dp_accounting.GaussianDpEvent(2.0 / 0.8), 7)
    accountant.compose(dp_accounting.GaussianDpEvent(2.0 / 0.6), 7)
    guard = world(SIZES, algorithm=algorithm, privacy={"clip": 1.0, "noise": 2.0}, rounds=7).guard
    assert guard.epsilon(7) == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-9)


@pytest.mark.slow
def test_a_clip_that_follows_beats_one_that_is_far_too_wide() -> None:
    """At the same epsilon, from the same clip, on digits."""
    settings: dict[str, Any] = {
        "rounds": 25,
        "model": "logistic",
        "partition": {"kind": "iid", "clients": 100},
        "cohort": {"sampling": "poisson", "size": 50},
        "privacy": {"clip": 1.0, "noise": 1.9, "noise_from": "seed"},
        "evaluate": {"every": 25, "diagnostics": ["updates"]},
    }
    found = {rate: fedloom.run({"kind": "dp_fedavg", "clip": 20.0, "rate": rate}, **settings) for rate in (0.0, 0.5)}
    last = {rate: history.summary["global/test/accuracy"].last for rate, history in found.items()}
    assert last[0.5] > last[0.0] + 0.1
    spent = [history.metrics["privacy/epsilon_simulated"][-1] for history in found.values()]
    assert spent[0] == spent[1] <= 8
    assert found[0.5].metrics["clip/norm"][-1] < 5


def test_privacy_clips_by_the_same_unit() -> None:
    with pytest.raises(ConfigError, match=r"privacy\.clip: uploads of DpFedAvg are no longer than 1.*privacy\.clip=1"):
        parse({"algorithm": "dp_fedavg", "privacy": {"clip": 0.5, "noise": 1.0}})
