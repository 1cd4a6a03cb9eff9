"""The values that the functions of an algorithm are given, and those that they return."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor

from fedloom.core import tree
from fedloom.core.optim import Optimizer
from fedloom.core.task import Batch, Task

Nothing: TypeAlias = tuple[()]


class HasModel(Protocol):
    @property
    def w(self) -> Tensor: ...


S = TypeVar("S", bound=HasModel)  # what the server (or a node) keeps and sends
C = TypeVar("C")  # what a client keeps
U = TypeVar("U")  # what a client uploads


class Model(NamedTuple):
    """The state of a server that keeps one model."""

    w: Tensor  # [P]


class Update(NamedTuple):
    """The upload of a client that sends how far its model moved."""

    dw: Tensor  # [P]


class Work(NamedTuple):
    """What one client does in this round."""

    steps: Tensor  # [] local steps
    examples: Tensor  # [] training examples that the client has
    lr: Tensor  # [] local learning rate
    round: Tensor  # [] counted from 0
    survey: Any = ()  # the sum of ``survey`` over all of the client's data, for algorithms that are ``Surveys``
    client: Any = ()  # [] its number
    extra: Any = ()  # [] epochs that the client has time for while it waits, for ``TrainsWhileWaiting``
    staleness: Any = ()  # [] server steps since the client was sent its model, where the server is asynchronous


class Held(NamedTuple):
    """Examples that the server has of its own, normalised."""

    x: Tensor  # [n, ...]
    y: Tensor  # [n]


class Noise(NamedTuple):
    """What privacy does to sums over examples before a client sends them."""

    norm: float  # R: the features of an example are shortened to it
    std: float  # deviation of the noise in each number of G
    cross_std: float  # and of B
    of_means: bool = False  # clients send means over their examples instead of sums, which hides the client


class Setup(NamedTuple):
    """What an algorithm is bound to before a run."""

    task: Task
    optimizer: Optimizer  # the local one
    sizes: Tensor = torch.empty(0)  # [N] training examples of each client
    proxy: Held | None = None  # the server's own examples, where it has any
    noise: Noise | None = None  # in sums over examples, where these are private
    first_lr: float = float("nan")  # the local learning rate of the first round
    seed: int = 0  # of the run, for clients that draw: see fedloom.core.rng


class Carry(NamedTuple):
    """What local training carries from step to step."""

    x: Any  # what is trained: a vector [P] or a tree of them
    memory: Any  # the optimiser's memory


class Phase(NamedTuple):
    """A part of a client's round: passes over its data, with one step for each batch.

    Like the algorithm's own functions, these are written for one client.
    """

    step: Callable[[Carry, Batch, Any, Any], Carry]
    name: str = "batches"  # of its randomness
    epochs: int | None = None  # passes over the data; if this and ``steps`` are unset, the section ``local`` decides
    steps: int | None = None  # exactly this many steps instead
    share: float = 1.0  # of the client's examples, but at least one batch
    sampling: Literal["draw", "block"] = "draw"  # how the share is taken: drawn, or a block in stored order
    repeat: bool = False  # every pass reads the same batches in the same order
    enter: Callable[[Carry, Any, Any], Carry] | None = None  # (at, down, mine), before the first pass
    passes: Callable[[Any, Work], Tensor] | None = None  # (mine, work) -> [] how many passes this client makes
    look: Callable[[Batch, Any, Any, Any], Any] | None = None  # (batch, x, down, mine), summed over all examples
    look_gradients: float = 0.0  # that ``look`` takes for each batch of a pass
    after: Callable[[Carry, Any, Any, Any, Work], tuple[Carry, Tensor]] | None = None
    # (at, the sum of ``look``, down, mine, work) -> at, and whether to stop; after each pass
    leave: Callable[[Carry, Any, Any], Carry] | None = None  # (at, down, mine), after the last pass
    keeps_statistics: bool = True  # False: running statistics do not move
    cost: float = 1.0  # time of a pass, in passes of plain training; the main phase costs ``gradients_per_step``
    waiting: bool = False  # done while the client waits for others, so that it takes no time of a round
    rare: bool = False  # done in few rounds, so that neither simulated time nor a forecast counts it

    @property
    def is_main(self) -> bool:
        """Whether the section ``local`` says how long this phase is."""
        return self.epochs is None and self.steps is None


class Inbox(NamedTuple, Generic[U]):
    """What the server (or a node) received: ``total`` = sum_k a_k u_k in float64, and what it takes to read it."""

    total: U
    weight: Tensor  # [] sum_k a_k
    senders: Tensor  # [] number of uploads; a client that was drawn twice counts twice
    population: Tensor  # [] number of clients in the federation
    examples: Tensor  # [] training examples of all clients together
    uploads: Any = ()  # [K, ...] every upload, only for algorithms with the trait ``each_upload``
    weights: Any = ()  # [K] the a_k, likewise
    address: Any = ()  # the seed and the round, for a server that draws: see fedloom.core.rng
    clients: Any = ()  # [K] the senders' numbers, in the order of ``uploads``
    own: Any = ()  # [] how much of the sum is a node's own upload; only where there is no server

    @property
    def mean(self) -> U:
        """The weighted mean of the uploads, in float64."""
        return tree.tmap(lambda x: x / self.weight, self.total)


def like(x: Tensor, reference: Tensor) -> Tensor:
    """``x`` in the precision of ``reference``: sums are float64, models are not."""
    return x.to(reference.dtype)
