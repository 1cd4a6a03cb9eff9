"""What LAW-AFL's server reports about a round."""

from __future__ import annotations

from torch import Tensor

from fedloom.algorithms.law_afl.settings import LawAFLSettings
from fedloom.algorithms.law_afl.state import LawAFLServer
from fedloom.maths.learned_weights import shrink_diagnostics


def model_diagnostics(how: LawAFLSettings, after: LawAFLServer) -> dict[str, Tensor]:
    """The shrink of models, after a round that trained."""
    return shrink_diagnostics("weights", after.models.shrink, how.shrink_rule, how.model_settings)


def head_diagnostics(how: LawAFLSettings, after: LawAFLServer) -> dict[str, Tensor]:
    """The weights of statistics, and the share of the head that was solved with them in the model's head."""
    found = {"head/kappa": after.kappa}
    found |= {"law_afl/temperature": after.temperature, "law_afl/freedom": after.freedom}
    lam = after.statistics.lam[after.statistics.lam > 0]
    if not len(lam):
        return found
    shrink = after.statistics.shrink
    return found | {
        "head/variance": lam.var(correction=0),
        "head/effective": 1 / lam.square().sum(),
        "head/largest": lam.max(),
        "head/shrink": shrink,
        "head/shrink_bounded": how.head_settings.bounds.reached(shrink),
    }
