"""What a federated algorithm is: a frozen record of hyper-parameters and a dozen pure functions.

Client functions are written for *one* client and the engine maps them over a cohort, so they must
not branch on the value of a tensor, write into an argument, draw randomness or do I/O. Override the
smallest thing that differs: ``loss`` before ``gradient`` before ``step``.

A round, in the order in which the functions are called::

    server   down = send(server)
    client   mine = join(down), once; then  x = start(down, mine)
             x, memory = step(...)  for each batch  -- by default the optimiser along gradient(...) of loss(...)
             (several phases(), each with its own step and passes over the data, where one is not enough)
             upload, mine = finish(x, down, mine, work);  a = weight(upload, work)
    server   server = update(server, inbox)           -- inbox.total = sum of a * upload, inbox.mean = total / sum of a
    users    w = serve(down, mine)                    -- the model that a client predicts with, after fitting(), if any

Without a server every node is its own: ``update`` runs at each node on what it heard from its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Generic, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

from pydantic import ConfigDict, PrivateAttr
from torch import Tensor

from fedloom.core import tree
from fedloom.core.errors import Fault
from fedloom.core.optim import Optimizer
from fedloom.core.schema import Spec
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
    survey: Any = ()  # what ``survey`` found in all of the client's data, for algorithms that ask for it
    client: Any = ()  # [] its number
    extra: Any = ()  # [] epochs that the client has time for while it waits, for algorithms that use it
    staleness: Any = ()  # [] steps of the server since it sent the model, where it waits for nobody


class Held(NamedTuple):
    """Examples that the server has of its own, normalised."""

    x: Tensor  # [n, ...]
    y: Tensor  # [n]


class Noise(NamedTuple):
    """What privacy does to sums over examples before a client sends them."""

    norm: float  # R: the features of an example are shortened to it
    std: float  # deviation of what is added to each number of G
    cross_std: float  # and of B
    of_means: bool = False  # means over a client's examples are sent instead of sums, so that they hide the client


class Carry(NamedTuple):
    """What local training carries from step to step."""

    x: Any  # what is trained: a vector [P] or a tree of them
    memory: Any  # the optimiser's memory


class Phase(NamedTuple):
    """A part of a client's round: passes over its data, each batch of which takes one step.

    Like the algorithm's own functions, these are written for one client.
    """

    step: Callable[[Carry, Batch, Any, Any], Carry]
    name: str = "batches"  # of its randomness
    epochs: int | None = None  # passes over the data; unset, as ``steps`` is: what the settings of ``local`` say
    steps: int | None = None  # exactly so many steps instead
    share: float = 1.0  # of the client's examples, but at least one batch
    sampling: Literal["draw", "block"] = "draw"  # how the share is taken: drawn, or a block in stored order
    repeat: bool = False  # every pass reads the same batches in the same order
    enter: Callable[[Carry, Any, Any], Carry] | None = None  # (at, down, mine), before the first pass
    passes: Callable[[Any, Work], Tensor] | None = None  # (mine, work) -> [] how many passes this client makes
    look: Callable[[Batch, Any, Any, Any], Any] | None = None  # (batch, x, down, mine), summed over all examples
    look_gradients: float = 0.0  # that ``look`` takes for each batch of a pass
    after: Callable[[Carry, Any, Any, Any, Work], tuple[Carry, Tensor]] | None = None
    # (at, what ``look`` saw, down, mine, work) -> at, and whether to stop; after each pass
    leave: Callable[[Carry, Any, Any], Carry] | None = None  # (at, down, mine), after the last pass
    keeps_statistics: bool = True  # False: running statistics do not move
    cost: float = 1.0  # of a pass in time, in passes of plain training; the main phase costs ``gradients_per_step``
    waiting: bool = False  # done while the client waits for others, so that it takes no time of a round
    rare: bool = False  # done in few rounds, so that neither simulated time nor a forecast counts it

    @property
    def is_main(self) -> bool:
        """Whether this is the local training of which ``local`` says how much there is."""
        return self.epochs is None and self.steps is None


class Inbox(NamedTuple, Generic[U]):
    """What the server (or a node) heard: ``total`` = sum_k a_k u_k in float64, and what it takes to read it."""

    total: U
    weight: Tensor  # [] sum_k a_k
    senders: Tensor  # [] how many sent, draws with replacement counted each
    population: Tensor  # [] how many clients there are
    examples: Tensor  # [] how many training examples they have together
    uploads: Any = ()  # [K, ...] every upload, only for algorithms that are not ``linear``
    weights: Any = ()  # [K] the a_k, likewise
    address: Any = ()  # the seed and the round, for a server that draws: see fedloom.core.rng
    clients: Any = ()  # [K] who sent, in the order of ``uploads``
    own: Any = ()  # [] how much of the sum is a node's own upload; only where there is no server

    @property
    def mean(self) -> U:
        """The weighted mean of the uploads, in float64."""
        return tree.tmap(lambda x: x / self.weight, self.total)


class Algorithm(Spec, Generic[S, C, U]):
    """The base of all methods; the defaults of the client's part are those of FedAvg."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    family: ClassVar[Literal["server", "personal", "closed_form", "gossip"]] = "server"
    linear: ClassVar[bool] = True  # uploads are only ever summed; False: ``update`` needs each of them
    communicates: ClassVar[bool] = True  # False: nothing travels, and no byte is counted
    waits: ClassVar[bool] = True  # False: the server takes each upload when it arrives, and ``update`` what is there
    common: ClassVar[bool] = True  # False: clients share less than a model, and there is no common one to judge
    served: ClassVar[Literal["pre_fit", "post_fit"]] = "pre_fit"  # is a client's model judged before or after training?
    fedavg_when: ClassVar[Mapping[str, Any] | None] = None  # the settings under which it is FedAvg, if there are any
    fedavg_as: ClassVar[Mapping[str, Any]] = {}  # the settings of FedAvg which it then is
    partial_work: ClassVar[bool] = False  # True: what a late client has done so far is welcome
    plain_sgd: ClassVar[bool] = False  # True: its definition needs local steps without momentum, decay or clipping
    distinct: ClassVar[bool] = False  # True: a client must not be drawn twice in a round
    mirrored: ClassVar[bool] = False  # True: the server keeps count of clients' states; who is not heard keeps none
    columnwise: ClassVar[bool] = False  # True: without a server, ``update`` takes each parameter by itself
    needs_proxy: ClassVar[bool] = False  # True: the server learns from rows of its own, ``self.proxy``
    unit_uploads: ClassVar[bool] = False  # True: no upload is longer than 1, whatever it is clipped to
    bears_noise: ClassVar[bool] = False  # True: it reads every upload, and may be given noised ones
    needs_counts: ClassVar[bool] = False  # True: its server reads how many examples of each class a client has

    _task: Task | None = PrivateAttr(None)
    _optimizer: Optimizer | None = PrivateAttr(None)
    _sizes: Tensor | None = PrivateAttr(None)
    _proxy: Held | None = PrivateAttr(None)
    _hiding: Noise | None = PrivateAttr(None)
    _lr: float | None = PrivateAttr(None)
    _seed: int = PrivateAttr(0)

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        """A setting must not hide a function of the same name: a round would call a number."""
        super().__pydantic_init_subclass__()
        hidden = [name for name in cls.model_fields if callable(getattr(Algorithm, name, None))]
        if hidden:
            raise TypeError(f"{cls.__name__}: the setting '{hidden[0]}' hides the function of that name; rename it")

    def bind(
        self, task: Task, optimizer: Optimizer, sizes: Tensor | None = None, proxy: Held | None = None
    ) -> Algorithm[S, C, U]:
        """The same algorithm, tied to a task, a local optimiser, how many examples each client has [N], and the
        server's own examples."""
        bound = self.model_copy()
        bound._task, bound._optimizer, bound._sizes, bound._proxy = task, optimizer, sizes, proxy
        return bound

    def told_of_noise(self, noise: Noise) -> Algorithm[S, C, U]:
        """The same algorithm, which knows how the sums that its clients send are hidden."""
        told = self.model_copy()
        told._hiding = noise
        return told

    def paced(self, lr: float) -> Algorithm[S, C, U]:
        """The same algorithm, which knows the local learning rate of the first round."""
        bound = self.model_copy()
        bound._lr = lr
        return bound

    def seeded(self, seed: int) -> Algorithm[S, C, U]:
        """The same algorithm, which knows the seed of the run, for clients that draw: see fedloom.core.rng."""
        bound = self.model_copy()
        bound._seed = seed
        return bound

    @property
    def seed(self) -> int:
        """The seed of the run."""
        return self._seed

    @property
    def task(self) -> Task:
        assert self._task is not None, "bind() first"
        return self._task

    @property
    def optimizer(self) -> Optimizer:
        assert self._optimizer is not None, "bind() first"
        return self._optimizer

    @property
    def sizes(self) -> Tensor:
        """How many training examples each client has, for algorithms with something for each client.  ``[N]``"""
        assert self._sizes is not None, "bind() with sizes first"
        return self._sizes

    @property
    def proxy(self) -> Held:
        """The examples that the server has of its own."""
        assert self._proxy is not None, "bind() with a proxy first"
        return self._proxy

    @property
    def first_lr(self) -> float:
        """The local learning rate with which a run begins."""
        assert self._lr is not None, "paced() first"
        return self._lr

    @property
    def own_rows(self) -> Held | None:
        """The same, or None where the server has none."""
        return self._proxy

    @property
    def noise(self) -> Noise | None:
        """How sums over examples are hidden by the clients; None where they are not."""
        return self._hiding

    def against_noise(self, local: bool) -> list[Fault]:
        """Settings under which noise in sums over examples does not hide these; ``local``: in each client's own."""
        what = f"hides examples in sums over them, which clients of {type(self).__name__} do not send"
        fix = "leave the section out" if self.family == "closed_form" else "set privacy.clip instead"
        return [Fault("privacy.feature_clip", what, fix)]

    @property
    def sends_moves_and_sums(self) -> bool:
        """Whether clients send moves ``dw`` of models as well as sums ``rows`` and ``counts`` over their examples."""
        return False

    def releases_in(self, round_: int) -> int:
        """How many uploads with noise of their own a client makes in this round."""
        return 1

    @property
    def proximal(self) -> float:
        """The weight mu of a proximal term in what clients minimise; 0 where there is none."""
        return 0.0

    @property
    def weighs_examples(self) -> bool:
        """Whether clients with more data count for more in the mean."""
        return True

    @property
    def surveys(self) -> bool:
        """Whether a client first looks at all of its data once, by ``survey``."""
        return False

    @property
    def sends_to_all(self) -> bool:
        """Whether the server sends its model to every client, and not only to those who will train."""
        return False

    @property
    def gradients_per_step(self) -> float:
        """What one local step costs, in gradients of one net on one batch; a Hessian-vector product counts as two.

        It is what ``work/gradients`` counts and what a step takes in simulated time. A gradient on a part of a batch
        counts as that part. Steps of phases beside the main one take one gradient each, or none if they cost nothing.
        """
        return 1.0

    @property
    def survey_gradients(self) -> float:
        """The same for ``survey``, in rounds in which clients train; 0 where it only evaluates."""
        return 0.0

    @property
    def sends_once(self) -> bool:
        """Whether what a node sends is no model that others could pass on in the same round; see gossip_steps."""
        return False

    @property
    def remembers_neighbours(self) -> bool:
        """Whether nodes keep what each neighbour has sent so far, which a new link, or a lost message, would break."""
        return False

    @property
    def lane_size(self) -> int:
        """How many numbers one client holds beside models, which limits how many are side by side."""
        return 0

    @property
    def hears_each(self) -> bool:
        """Whether ``update`` reads every upload, and not only their sum."""
        return not self.linear

    def phases(self) -> tuple[Phase, ...]:
        """What a client does in a round; one phase has neither epochs nor steps, and is as long as ``local`` says."""
        return (Phase(self.step),)

    def trains_in(self, round_: float) -> bool:
        """Whether the clients of this round, counted from 0, train as long as ``local`` says, or not at all."""
        return True

    def fitting(self) -> tuple[Phase, ...]:
        """What a client does with what it was sent, on a throw-away copy, before it predicts with it."""
        return ()

    def idle_epochs(self, ids: Tensor, wait: Tensor, epoch: Tensor, address: tuple[int, int]) -> Tensor | None:
        """Epochs that clients train on while they wait [K], if they do: from the seconds that each waits
        and those that an epoch takes it; ``address`` is the seed and the round."""
        return None

    def defaults(self) -> Mapping[str, Mapping[str, Any]]:
        """Settings of other sections that belong to the method's definition, where the user says nothing."""
        return {}

    def doubts(self, lr: float, rounds: int) -> list[str]:
        """What of its settings, at this local rate and in so many rounds, can be meant and is more likely a mistake."""
        return []

    # -- at the server, or at each node of a network without one ------------------------------------
    def init(self, w: Tensor) -> S:
        """The state before the first round."""
        raise NotImplementedError

    def send(self, server: S) -> S:
        """The part of the state that clients are sent."""
        return server

    def update(self, server: S, inbox: Inbox[U]) -> S:
        """The state after the round."""
        raise NotImplementedError

    def unheard(self, server: S) -> S:
        """The state after a round in which nobody was heard, and for which ``update`` is not called."""
        return server

    def judged(self, server: S) -> Tensor:
        """The server's model as it is judged and saved, if not the one that is sent.  ``[P]``"""
        return self.send(server).w

    def statistics(self, before: Tensor, mean: Tensor, server: S) -> Tensor:
        """The running statistics after the round, from those before, the clients' mean and the server's new state."""
        return mean

    def sent_bytes(self, down: S) -> int:
        """What ``send`` costs on the wire, for one client."""
        return tree.nbytes(down)

    def upload_bytes(self, uploads: U) -> int:
        """What these stacked uploads cost on the wire, all together."""
        return tree.nbytes(uploads)

    def told(self, before: S, inbox: Inbox[U], after: S) -> dict[str, Tensor]:
        """What the server can tell of a round beside its result, for diagnosis."""
        return {}

    def counted(self, before: S, inbox: Inbox[U], after: S) -> Tensor | None:
        """How much each of ``inbox.clients`` counted in this round, up to a common factor; None if that is unknown."""
        return inbox.weights if not self.hears_each and isinstance(inbox.weights, Tensor) else None

    # -- at one client --------------------------------------------------------------------------
    def join(self, down: S) -> C:
        """The state of a client that takes part for the first time."""
        raise NotImplementedError

    def survey(self, batch: Batch, down: S, mine: C) -> Any:
        """A sum over the real examples of one batch; the client's sum over all its data is ``work.survey``."""
        raise NotImplementedError

    def start(self, down: S, mine: C) -> Any:
        """Where local training starts."""
        return down.w

    def loss(self, x: Any, batch: Batch, down: S, mine: C) -> Tensor:
        """What local training descends."""
        return self.task.loss(x, batch)

    def gradient(self, x: Any, batch: Batch, down: S, mine: C) -> Any:
        """The direction that the local optimiser is given."""
        return self.task.differentiate(lambda at: self.loss(at, batch, down, mine), x)

    def step(self, at: Carry, batch: Batch, down: S, mine: C) -> Carry:
        """One local step."""
        g = self.gradient(at.x, batch, down, mine)
        return Carry(*self.optimizer.update(g, at.memory, at.x, batch.lr))

    def memory(self, x: Any) -> Any:
        """What the local optimiser remembers before its first step; of all that is trained, if nothing else is said."""
        return self.optimizer.init(x)

    def model(self, x: Any) -> Tensor:
        """The model inside what is trained; it sees each batch first, to keep running statistics."""
        return x if isinstance(x, Tensor) else x.w

    def finish(self, x: Any, down: S, mine: C, work: Work) -> tuple[U, C]:
        """What is uploaded, and what the client keeps."""
        raise NotImplementedError

    def weight(self, upload: U, work: Work) -> Tensor:
        """How much this upload counts."""
        return work.examples

    def serve(self, down: S, mine: C) -> Tensor:
        """The model with which this client predicts.  ``[P]``"""
        return down.w


def like(x: Tensor, reference: Tensor) -> Tensor:
    """``x`` in the precision of ``reference``: sums are float64, models are not."""
    return x.to(reference.dtype)
