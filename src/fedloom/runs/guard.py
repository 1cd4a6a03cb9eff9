"""Privacy in one run: for its sampling, its rounds and its clients."""

from __future__ import annotations

from typing import get_args

import numpy as np
import torch
from numpy.typing import NDArray

from fedloom.algorithm import Noise
from fedloom.algorithm.capabilities import private_sums
from fedloom.data.federation import Federation
from fedloom.engine.plan import draw_cohort
from fedloom.maths.private_sums import sensitivity
from fedloom.runs.settings import Config
from fedloom.trust import noise
from fedloom.trust.accountant import Release, Sampling, calibrated
from fedloom.trust.heterogeneity import noise_factors
from fedloom.trust.mechanism import Guard, HiddenSums
from fedloom.trust.noise import Key


def guard_of(config: Config, fed: Federation, key: Key | None) -> Guard | None:
    """Privacy in this run: for its sampling, its rounds and its clients."""
    how = config.privacy
    key = noise.seeded(config.basics.seed) if how.noise_from == "seed" else key or noise.fresh_key()
    if how.feature_clip is not None and how.clip is None:
        return _guard_of_sums(config, fed, how.feature_clip, key)
    sampling = _accounted(config.cohort.sampling)
    if how.clip is None or sampling is None:  # what is not accounted for was refused
        return None
    release, uses = _releases(config, fed, sampling)
    # A sum over a Poisson sample is divided by its expected size: the size that was drawn is not public.
    fixed = bool(release.noise) and not release.local and sampling == "poisson"
    weight = float(release.size) if fixed else None
    sums = None if how.feature_clip is None else _sums(config, how.feature_clip)
    noisier = noise_factors(how, _label_counts(fed), key) if how.asks_for_labels else torch.ones(fed.clients)
    return Guard(key, how.clip, noisier, release, uses, how.delta, weight, sums, how.feature_clip)


def _releases(config: Config, fed: Federation, sampling: Sampling) -> tuple[Release, tuple[int, ...]]:
    """What is released of clipped uploads, and how often before each round."""
    how, able = config.privacy, int((fed.train.sizes > 0).sum())
    size = able if sampling == "all" else min(config.cohort.size or 10, able)
    charged = how.histogram_epsilon if how.asks_for_labels else 0.0
    release = Release(how.multiplier, how.mechanism == "local", sampling, able, size, charged)
    uses = _local_uses(config, fed) if release.local else tuple(range(config.basics.rounds + 1))
    if how.epsilon is not None:
        release = release._replace(noise=calibrated(release, uses[-1], how.epsilon, how.delta))
    return release, uses


def _accounted(sampling: str) -> Sampling | None:
    """The sampling, if it is one that epsilon can be computed for."""
    return next((known for known in get_args(Sampling) if known == sampling), None)


def _label_counts(fed: Federation) -> NDArray[np.float64]:
    """How many training rows of each class each client has.  ``[N, C]``"""
    counts = np.zeros((fed.clients, fed.classes))
    np.add.at(counts, (fed.train.owners().numpy(), fed.y.cpu()[fed.train.rows].numpy()), 1)
    return counts


def _local_uses(config: Config, fed: Federation) -> tuple[int, ...]:
    """How often any one client has released something before each round; only rounds that it takes part in count."""
    seed, rounds, sends = config.basics.seed, config.basics.rounds, private_sums(config.algorithm)
    uses, most = torch.zeros(fed.clients, dtype=torch.int64), [0]
    for r in range(rounds):
        uses[draw_cohort(config.cohort, fed.train.sizes, seed, r).ids] += 1 if sends is None else sends.releases_in(r)
        most.append(int(uses.max()))
    return tuple(most)


def noise_of(guard: Guard, sums: HiddenSums) -> Noise:
    """What the algorithm must know of the noise on its sums or means."""
    if guard.features is not None:
        std = guard.release.noise * sums.sensitivity
        return Noise(guard.features, std, std / sums.cross_scale, of_means=True)
    std = guard.deviation(guard.release.size)
    return Noise(guard.clip, std, std / sums.cross_scale)


def _sums(config: Config, norm: float) -> HiddenSums:
    """The sensitivity: of a client's sums to one example with features of at most ``norm``, or of means to a client."""
    scale, sends = config.privacy.cross_scale, private_sums(config.algorithm)
    counts = sends is not None and sends.sends_counts
    return HiddenSums(sensitivity(norm, cross_scale=scale, counts=counts), scale, counts)


def _guard_of_sums(config: Config, fed: Federation, norm: float, key: Key) -> Guard:
    """The same for sums over examples; each example is in one sum of one client, and is released once."""
    how, able, sums = config.privacy, int((fed.train.sizes > 0).sum()), _sums(config, norm)
    release = Release(how.multiplier, how.mechanism == "local", "all", able, able)
    if how.epsilon is not None:
        release = release._replace(noise=calibrated(release, 1, how.epsilon, how.delta))
    uses = (0, *[1] * config.basics.rounds)
    return Guard(key, norm, torch.ones(fed.clients), release, uses, how.delta, None, sums)
