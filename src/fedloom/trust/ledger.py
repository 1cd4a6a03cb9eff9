"""The ledger: what a run has released so far; its epsilon follows from it alone."""

from __future__ import annotations

from typing import NamedTuple

from fedloom.trust.accountant import Release, epsilon


class Ledger(NamedTuple):
    """What has been released so far. It only grows, and is saved with the state of the run."""

    release: Release  # what one use of the mechanism was
    delta: float
    reach: float  # S, or the sensitivity to one example: the noise was release.noise times this
    uses: tuple[int, ...]  # [N] for each client, if the mechanism is local; else one number for all of them

    def epsilon(self) -> float:
        """The largest epsilon of any client."""
        return epsilon(self.release, max(self.uses), self.delta)
