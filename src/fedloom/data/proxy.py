"""The proxy set: rows that the server keeps, taken from the training data before it is split among clients."""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, NonNegativeInt

from fedloom.core.errors import ConfigError, Fault
from fedloom.core.schema import Spec, other_than, when, worded
from fedloom.data.arrays import Arrays, Ints

_SOME = worded(other_than(None, 0), "size is set and not 0", "size is not set, or is 0")
_USES = {"algorithm.uses_proxy": worded(True, "the algorithm uses proxy rows", "this one uses no proxy rows")}
_USED = when(_USES) | when(size=_SOME)


class Proxy(Spec):
    """The server's own rows, for algorithms that learn at the server."""

    size: NonNegativeInt | Literal["auto"] | None = Field(
        None,
        description="number of rows; auto: 1000, or a tenth of the training rows if less; unset: as auto if the "
        "algorithm, or another that it is compared with, uses them",
    )
    source: Annotated[Literal["train", "test"], _USED] = Field(
        "train", description="the rows they are taken from; test is what FedLAW's authors did, and is optimistic"
    )
    balanced: Annotated[bool, when(_USES, imbalance=1.0) | when(size=_SOME, imbalance=1.0)] = Field(
        True, description="equally many of each class, as far as possible; else at random"
    )
    imbalance: Annotated[float, _USED] = Field(
        1.0, gt=0, le=1, description="ratio of the rows of the last class to those of the first, geometric in between"
    )

    def rows(self, arrays: Arrays, wanted: bool, rng: np.random.Generator) -> NDArray[np.bool_]:
        """Which rows are the server's; none, unless they are ``wanted`` or their number is given."""
        pool = np.flatnonzero(arrays.test if self.source == "test" else ~arrays.test)
        if wanted and self.size == 0:
            what = "the server of this algorithm learns from its own rows (got 0)"
            raise ConfigError([Fault("proxy.size", what, "leave it out, or choose another algorithm")])
        usual = min(1000, len(pool) // 10)
        size = (usual if wanted else 0) if self.size is None else usual if self.size == "auto" else self.size
        chosen = np.zeros(len(arrays.y), dtype=bool)
        if not size:  # with a million clients, shuffling all rows would take two seconds
            return chosen
        if size >= len(pool):
            what = f"{size} of the {len(pool)} {self.source} rows would leave none"
            raise ConfigError([Fault("proxy.size", what, f"at most {len(pool) - 1}")])
        chosen[self._drawn(pool, arrays.y, arrays.classes, size, rng)] = True
        return chosen

    def _drawn(self, pool: Ints, y: Ints, classes: int, size: int, rng: np.random.Generator) -> Ints:
        order = rng.permutation(pool)
        if not self.balanced and self.imbalance == 1:
            return order[:size]
        share = self.imbalance ** (np.arange(classes) / max(classes - 1, 1))
        turn = np.zeros(len(order))  # when a row's turn comes, if classes take turns by their shares
        for c in range(classes):
            of_class = np.flatnonzero(y[order] == c)
            turn[of_class] = (np.arange(len(of_class)) + 0.5) / share[c]
        return order[np.argsort(turn, kind="stable")[:size]]


def without(arrays: Arrays, rows: NDArray[np.bool_]) -> Arrays:
    """The data without these rows."""
    if not rows.any():
        return arrays
    client = None if arrays.client is None else arrays.client[~rows]
    target = None if arrays.target is None else arrays.target[~rows]
    rest = arrays._replace(x=arrays.x[~rows], y=arrays.y[~rows], test=arrays.test[~rows])
    return rest._replace(client=client, target=target)


def lacking(proxy: Arrays, rest: Arrays) -> list[str]:
    """A note if classes of the training rows are missing from the server's rows."""
    missing = np.setdiff1d(rest.y[~rest.test], proxy.y)
    if not len(missing):
        return []
    shown = missing if len(missing) <= 10 else missing[:9]
    more = [f"{len(missing) - 9} more"] if len(missing) > 10 else []
    *named, last = [*(f"'{rest.labels[c]}'" for c in shown), *more]
    words = f"classes {', '.join(named)} and {last}" if named else f"class {last}"
    return [f"the proxy set has no row of {words}: what the server learns from it favours the other classes"]
