"""The values that the functions of an algorithm are given, and those that they return."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor

from fedloom.core import tree
from fedloom.core.optim import Local, Optimizer
from fedloom.core.task import Batch, Task

Nothing: TypeAlias = tuple[()]


class HasModel(Protocol):
    @property
    def w(self) -> Tensor: ...


S = TypeVar("S", bound=HasModel)  # what the server (or a node) keeps and sends
C = TypeVar("C")  # what a client keeps
U = TypeVar("U")  # what a client uploads


class Model(NamedTuple):
    """The state of a server that keeps one model.

    Attributes:
        w: ``[P]`` all parameters of the model in one vector.
    """

    w: Tensor


class Update(NamedTuple):
    """The upload of a client that sends its model update.

    Attributes:
        dw: ``[P]`` the model after local training minus the model that the client was sent.
    """

    dw: Tensor


class Work(NamedTuple):
    """What one client does in this round.

    Attributes:
        steps: ``[]`` local steps of the client in this round.
        examples: ``[]`` number of the client's training examples.
        lr: ``[]`` local learning rate of this round.
        round: ``[]`` number of the round, counted from 0.
        survey: sum of ``survey`` over all of the client's data, for algorithms that are ``Surveys``.
        client: ``[]`` the client's number.
        extra: ``[]`` epochs that the client has time for while it waits, for ``TrainsWhileWaiting``.
        staleness: ``[]`` server steps since the client was sent its model, if the server is asynchronous.
    """

    steps: Tensor
    examples: Tensor
    lr: Tensor
    round: Tensor
    survey: Any = ()
    client: Any = ()
    extra: Any = ()
    staleness: Any = ()


class Held(NamedTuple):
    """The server's own examples, normalised.

    Attributes:
        x: ``[n, ...]`` inputs.
        y: ``[n]`` classes, or regression targets.
    """

    x: Tensor
    y: Tensor


class Noise(NamedTuple):
    """What privacy does to sums over examples before a client sends them.

    Attributes:
        norm: R, to which the features of an example are clipped.
        std: deviation of the noise in each number of G.
        cross_std: deviation of the noise in each number of B.
        of_means: clients send means over their examples instead of sums, which protects the client.
    """

    norm: float
    std: float
    cross_std: float
    of_means: bool = False


class Setup(NamedTuple):
    """What an algorithm is bound to before a run.

    Attributes:
        task: the net and its loss as functions of one flat vector.
        optimizer: the local one.
        sizes: ``[N]`` training examples of each client.
        proxy: the server's own examples, if it has any.
        noise: noise in sums over examples, if these are private.
        first_lr: the local learning rate of the first round.
        seed: seed of the run, for clients that draw: see ``fedloom.core.rng``.
        rounds: planned number of rounds.
        local: the section ``local``: epochs, steps, batch, momentum and so on.
    """

    task: Task
    optimizer: Optimizer
    sizes: Tensor = torch.empty(0)
    proxy: Held | None = None
    noise: Noise | None = None
    first_lr: float = float("nan")
    seed: int = 0
    rounds: int = 1
    local: Local = Local()


class Carry(NamedTuple):
    """What local training carries from step to step.

    Attributes:
        x: what is trained: a vector ``[P]`` or a tree of them.
        memory: the state of the local optimizer.
    """

    x: Any
    memory: Any


class Phase(NamedTuple):
    """A part of a client's round: passes over its data, with one step for each batch.

    Like the algorithm's own functions, these are written for one client.

    Attributes:
        step: one local step: ``(carry, batch, down, mine) -> carry``.
        name: the purpose of its random numbers; phases of different names draw different batches.
        epochs: passes over the data; if this and ``steps`` are unset, the section ``local`` sets them.
        steps: exactly this many steps instead.
        share: share of the client's examples that a pass reads, but at least one batch.
        sampling: how the share is taken: drawn, or a block in stored order.
        repeat: every pass reads the same batches in the same order.
        enter: ``(at, down, mine) -> at``, before the first pass.
        passes: ``(mine, work) -> []`` how many passes this client makes. In the main phase at most as many as
            ``local.epochs`` or ``local.steps`` allow, which is also what simulated time counts.
        look: ``(batch, x, down, mine)``, summed over all examples.
        look_gradients: gradients that ``look`` takes for each batch of a pass.
        after: ``(at, the sum of look, down, mine, work) -> at, and whether to stop``, after each pass.
        leave: ``(at, down, mine) -> at``, after the last pass.
        keeps_statistics: whether running statistics are updated.
        cost: time that a pass takes, in passes of plain training; the main phase costs ``gradients_per_step``.
        waiting: done while the client waits for others, so that it takes no time of a round.
        rare: done in few rounds, so that neither simulated time nor a forecast counts it.
    """

    step: Callable[[Carry, Batch, Any, Any], Carry]
    name: str = "batches"
    epochs: int | None = None
    steps: int | None = None
    share: float = 1.0
    sampling: Literal["draw", "block"] = "draw"
    repeat: bool = False
    enter: Callable[[Carry, Any, Any], Carry] | None = None
    passes: Callable[[Any, Work], Tensor] | None = None
    look: Callable[[Batch, Any, Any, Any], Any] | None = None
    look_gradients: float = 0.0
    after: Callable[[Carry, Any, Any, Any, Work], tuple[Carry, Tensor]] | None = None
    leave: Callable[[Carry, Any, Any], Carry] | None = None
    keeps_statistics: bool = True
    cost: float = 1.0
    waiting: bool = False
    rare: bool = False

    @property
    def is_main(self) -> bool:
        """Whether the section ``local`` sets the length of this phase."""
        return self.epochs is None and self.steps is None


class Inbox(NamedTuple, Generic[U]):
    """What the server (or a node) received: ``total`` = sum_k a_k u_k in float64, and what is needed to use it.

    Attributes:
        total: weighted sum of the uploads, in float64.
        weight: ``[]`` sum of the weights ``a_k``.
        senders: ``[]`` number of uploads; a client that was drawn twice counts twice.
        population: ``[]`` number of clients in the federation.
        examples: ``[]`` training examples of all clients together.
        uploads: ``[K, ...]`` every upload, only for algorithms with the trait ``each_upload``.
        weights: ``[K]`` the weights ``a_k`` in the order of ``uploads``, likewise.
        address: the seed and the round, for a server that draws: see ``fedloom.core.rng``.
        clients: ``[K]`` the senders' numbers, in the order of ``uploads``.
        own: ``[]`` how much of the sum is a node's own upload; only in networks without a server.
        round: ``[]`` number of the round, counted from 0; only in networks, a server reads ``address``.
    """

    total: U
    weight: Tensor
    senders: Tensor
    population: Tensor
    examples: Tensor
    uploads: Any = ()
    weights: Any = ()
    address: Any = ()
    clients: Any = ()
    own: Any = ()
    round: Any = ()

    @property
    def mean(self) -> U:
        """The weighted mean of the uploads, in float64."""
        return tree.tmap(lambda x: x / self.weight, self.total)


def like(x: Tensor, reference: Tensor) -> Tensor:
    """``x`` in the precision of ``reference``: sums are float64, models are not."""
    return x.to(reference.dtype)
