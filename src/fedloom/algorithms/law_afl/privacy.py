"""What noise does not hide in LAW-AFL: settings that cannot be combined with ``privacy.feature_clip``."""

from __future__ import annotations

from collections.abc import Iterator

from fedloom.algorithms.law_afl.settings import LawAFLSettings
from fedloom.core.errors import Fault


def not_hidden(how: LawAFLSettings) -> Iterator[Fault]:
    """Settings under which clients send more than noise hides."""
    if how.schedule == "warmup_then_analytic":
        what = f"model updates are sent before the sums, and are not hidden (got '{how.schedule}')"
        yield Fault("algorithm.schedule", what, "set algorithm.schedule=frozen, or per_round")
    if how.depth != "all":
        what = f"how much of the net a client trains reveals its labels, and is not hidden (got '{how.depth}')"
        yield Fault("algorithm.depth", what, "set algorithm.depth=all")
    if how.trains and how.shrink_rule == "eq5":
        what = "norms of gradients are sent with the updates, and are not hidden (got 'eq5')"
        yield Fault("algorithm.shrink_rule", what, "use another rule")
    if how.quality == "report":
        what = "accuracy and loss are sent with the sums, and are not hidden (got 'report')"
        yield Fault("algorithm.quality", what, "set algorithm.quality=size, or server")
