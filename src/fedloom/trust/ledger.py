"""The ledger: what a run has released so far, from which alone its epsilon follows."""

from __future__ import annotations

from typing import NamedTuple

from fedloom.trust.accountant import Release, epsilon


class Ledger(NamedTuple):
    """What has been released so far. It only grows, and is saved with the state of the run."""

    release: Release  # what one use of the mechanism was
    delta: float
    reach: float  # S, or what one example can move: the noise was release.noise times this
    uses: tuple[int, ...]  # [N] on each client, where the mechanism is local; else one number for all of them

    def epsilon(self) -> float:
        """The largest epsilon of any client."""
        return epsilon(self.release, max(self.uses), self.delta)
