"""The accountant: what releases cost in epsilon, and how much noise a budget requires.

Epsilon is computed by Google's dp-accounting, through Renyi divergences, for the sampling that the run uses::

    all      no sampling; neighbours differ by one client that is present or not
    poisson  each client independently with probability q; likewise
    uniform  a fixed number of clients, without replacement; neighbours differ by one client that is replaced by
             another, which may change the sum by 2 S, so that the accountant is given z / 2
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedloom.core.errors import ConfigError, Fault

Sampling: TypeAlias = Literal["all", "poisson", "uniform"]


class Release(NamedTuple):
    """One use of the mechanism, as the accountant sees it."""

    noise: float  # z
    local: bool
    sampling: Sampling
    clients: int
    size: int  # clients of a round, or their expected number
    histogram_epsilon: float = 0.0  # 0: no histogram was released

    @property
    def sampled(self) -> bool:
        """Whether sampling amplifies privacy."""
        return not self.local and self.sampling != "all" and self.size < self.clients

    @property
    def exchanges(self) -> bool:
        """Whether neighbours replace a client: the number of drawn clients is fixed, so none can be missing."""
        return self.sampled and self.sampling == "uniform"


def relation(release: Release) -> Literal["add_or_remove_one", "replace_one"]:
    """How neighbouring federations differ."""
    return "replace_one" if release.exchanges else "add_or_remove_one"


def epsilon(release: Release, count: int, delta: float) -> float:
    """Epsilon at ``delta`` after ``count`` uses of the mechanism, and the histogram, if there is one."""
    if count and not release.noise:
        return math.inf
    if not count and not release.histogram_epsilon:
        return 0.0
    orders, once, each = _curves(release)
    spent = once + count * each if count else once  # an order may be infinite, and must not be multiplied by 0
    found: float = _accounting().rdp.compute_epsilon(orders, spent, delta)[0]
    return float(found)


def calibrated(release: Release, count: int, target: float, delta: float) -> float:
    """The least z with which ``count`` uses of the mechanism (and the histogram) cost no more than ``target``."""
    spent = epsilon(release._replace(noise=1.0), 0, delta)
    if spent >= target:
        what = f"the label histograms alone cost {spent:.3g} (got {target:g})"
        raise ConfigError([Fault("privacy.epsilon", what, "lower privacy.histogram_epsilon")])
    low, high = 0.0, 1.0
    while epsilon(release._replace(noise=high), count, delta) > target:
        low, high = high, 2 * high
        if high > 1e6:
            what = f"no noise is enough for {count} rounds (got {target:g})"
            raise ConfigError([Fault("privacy.epsilon", what, "raise it, or use fewer rounds")])
    while high - low > 1e-4 * high:
        middle = (low + high) / 2
        enough = epsilon(release._replace(noise=middle), count, delta) <= target
        low, high = (low, middle) if enough else (middle, high)
    return high


@lru_cache(maxsize=256)
def _curves(release: Release) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Renyi divergences at all orders: of the histogram, and of one use of the mechanism, which add up over rounds."""
    dp = _accounting()
    once, each = dp.NoOpDpEvent(), dp.NoOpDpEvent()
    if release.histogram_epsilon:  # two histograms of shares differ by 2 if one client replaces another
        once = dp.LaplaceDpEvent(1 / (release.histogram_epsilon * (2 if release.exchanges else 1)))
    if release.noise:
        each = dp.GaussianDpEvent(release.noise / 2 if release.exchanges else release.noise)
        if release.exchanges:
            each = dp.SampledWithoutReplacementDpEvent(release.clients, release.size, each)
        elif release.sampled:
            each = dp.PoissonSampledDpEvent(release.size / release.clients, each)
    one, other = accountant(release), accountant(release)
    with _quietly():
        one.compose(once)
        other.compose(each)
    return one._orders, one._rdp, other._rdp


def accountant(release: Release) -> Any:
    """A new accountant of dp-accounting with the neighbouring relation of this release."""
    dp = _accounting()
    return dp.rdp.RdpAccountant(neighboring_relation=dp.NeighboringRelation[relation(release).upper()])


def _accounting() -> Any:
    try:
        import dp_accounting
        import dp_accounting.rdp
    except ImportError as error:
        fix = "pip install -e '.[privacy]'"
        raise ConfigError([Fault("privacy", "epsilon needs dp-accounting, which is not installed", fix)]) from error
    return dp_accounting


@contextmanager
def _quietly() -> Iterator[None]:
    """Suppress the log line for each order at which a series does not converge: such orders are left out."""
    from absl import logging

    level = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        logging.set_verbosity(level)
