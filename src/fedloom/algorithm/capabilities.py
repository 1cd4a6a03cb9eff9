"""What a method can do beyond the contract: each capability is a class to inherit from; the engine checks for it.

The functions below the classes are what the engine calls; for a method without the capability, they return the values
of plain training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from fedloom.algorithm.values import Carry, Held, Inbox, Noise, Phase, Setup
from fedloom.core import tree
from fedloom.core.errors import Fault
from fedloom.core.optim import Optimizer
from fedloom.core.task import Batch

if TYPE_CHECKING:
    from fedloom.algorithm.contract import AnyAlgorithm


class _HasSetup(Protocol):
    @property
    def setup(self) -> Setup: ...


class _Steps(Protocol):
    def step(self, at: Carry, batch: Batch, down: Any, mine: Any) -> Carry: ...


class _Optimizes(Protocol):
    @property
    def optimizer(self) -> Optimizer: ...

    def model(self, x: Any) -> Tensor: ...


# -- training -------------------------------------------------------------------------------------
class Surveys:
    """A client passes over all of its data once before it trains."""

    @property
    def surveys(self) -> bool:
        """Whether it does so under these settings."""
        return True

    @property
    def survey_gradients(self) -> float:
        """Its cost for each batch, in gradients, in rounds in which clients train; 0 if it only evaluates."""
        return 0.0

    def survey(self, batch: Batch, down: Any, mine: Any) -> Any:
        """A sum over the real examples of one batch; the client's sum over all of its data is ``work.survey``."""
        raise NotImplementedError


class HasPhases:
    """A client's round has several parts, or a part with its own stopping rule."""

    def phases(self: _Steps) -> tuple[Phase, ...]:
        """The phases of a client's round; one phase has neither epochs nor steps: the section ``local`` sets them."""
        return (Phase(self.step),)

    def trains_in(self, round_: float) -> bool:
        """Whether the clients of this round, counted from 0, train as set in ``local``, or not at all."""
        return True


class Adapts:
    """A client adapts a throw-away copy of what it was sent before it predicts."""

    def adaptation(self) -> tuple[Phase, ...]:
        """The phases in which it does so."""
        return ()


class TrainsWhileWaiting:
    """A client continues to train while it waits for others, in phases that are ``waiting``."""

    def idle_epochs(self, ids: Tensor, wait: Tensor, epoch: Tensor, address: tuple[int, int]) -> Tensor:
        """Extra epochs of clients [K], from the seconds that each waits and those that an epoch takes it;
        ``address`` is the seed and the round."""
        raise NotImplementedError

    @property
    def reads_waiting_time(self) -> bool:
        """Whether these epochs depend on how long a client waits."""
        return True


class TrainsParts:
    """More than the model is trained: a tree of which the model is a part."""

    def model(self, x: Any) -> Tensor:
        """The model inside what is trained; it sees each batch first, to keep running statistics.  ``[P]``"""
        return x if isinstance(x, Tensor) else x.w

    def memory(self: _Optimizes, x: Any) -> Any:
        """The initial state of the local optimizer: by default that of the model."""
        return self.optimizer.init(self.model(x))


# -- the server -----------------------------------------------------------------------------------
class UsesProxy:
    """The server learns from its own examples."""

    @property
    def proxy(self: _HasSetup) -> Held:
        """The server's own examples."""
        assert self.setup.proxy is not None, "bind() with a proxy first"
        return self.setup.proxy


class OwnStatistics:
    """Running statistics of BatchNorm are not simply the clients' mean."""

    def statistics(self, before: Tensor, mean: Tensor, server: Any) -> Tensor:
        """The running statistics after the round, from those before, the clients' mean and the server's new state."""
        return mean


class CountsRounds:
    """The server's state changes also in rounds without uploads, for which ``update`` is not called."""

    def after_empty_round(self, server: Any) -> Any:
        """The state after a round without uploads."""
        return server


class Diagnoses:
    """The server can report more about a round than its result."""

    def diagnostics(self, before: Any, inbox: Inbox[Any], after: Any) -> dict[str, Tensor]:
        """Extra values to record for a round; only with ``evaluate.diagnostics=updates``, which keeps all uploads."""
        raise NotImplementedError


class Contributes:
    """The weights of a round are not those of ``weight``: the server chooses them."""

    def contributions(self, before: Any, inbox: Inbox[Any], after: Any) -> Tensor | None:
        """How much each of ``inbox.clients`` contributed, up to a common factor; None if that is unknown."""
        raise NotImplementedError


# -- networks without a server --------------------------------------------------------------------
class GossipFacts:
    """The messages of nodes have special properties."""

    @property
    def columnwise(self) -> bool:
        """Whether ``update`` treats each parameter separately."""
        return False

    @property
    def sends_once(self) -> bool:
        """Whether a message is not a model, so that it cannot be forwarded in the same round; see gossip_steps."""
        return False

    @property
    def remembers_neighbours(self) -> bool:
        """Whether nodes accumulate what each neighbour has sent, which a new link, or a lost message, would break."""
        return False


# -- settings, costs, privacy ---------------------------------------------------------------------
class Configures:
    """The method has defaults or warnings for settings of other sections."""

    def defaults(self) -> Mapping[str, Mapping[str, Any]]:
        """Settings of other sections that belong to the method's definition, unless the user sets them."""
        return {}

    def warnings(self, lr: float, rounds: int) -> list[str]:
        """Legal settings that are probably mistakes, at this local learning rate and with this many rounds."""
        return []


class Costs:
    """Messages are smaller or larger than the tensors they are simulated with, or clients keep more than models."""

    def sent_bytes(self, down: Any) -> int:
        """What ``send`` costs on the wire, for one client."""
        return tree.nbytes(down)

    def upload_bytes(self, uploads: Any) -> int:
        """What these stacked uploads cost on the wire, all together."""
        return tree.nbytes(uploads)

    @property
    def lane_size(self) -> int:
        """Numbers that one client keeps in addition to models, which limits how many train side by side."""
        return 0


class ForeseesUploads:
    """The size of uploads changes from round to round, as settings and participation decide."""

    def foresee_uploads(self, server: Any, ids: Tensor) -> tuple[int, Any]:
        """The bytes that these clients upload together in a round, and the server's state after it.

        Only the part of the state on which the bytes of later rounds depend needs to be up to date.
        """
        raise NotImplementedError


class Unlearns:
    """Clients can be unlearned exactly: those in the setting ``forget``, the next time that they take part."""

    def cannot_forget(self, server: Any, clients: Sequence[int]) -> str:
        """Why one of these clients cannot be forgotten; empty if all can."""
        return ""


class PrivateSums:
    """Clients send sums over their examples, which noise can hide (``privacy.feature_clip``)."""

    @property
    def noise(self: _HasSetup) -> Noise | None:
        """How clients hide their sums; None if they do not."""
        return self.setup.noise

    @property
    def sends_counts(self) -> bool:
        """Whether the server reads how many examples of each class a client has."""
        return False

    @property
    def sends_moves_and_sums(self) -> bool:
        """Whether clients send moves ``dw`` of models as well as sums ``rows`` and ``counts`` over their examples."""
        return False

    def against_noise(self, local: bool) -> list[Fault]:
        """Settings under which noise does not hide the examples; ``local``: there is noise in each client's sums."""
        return []

    def releases_in(self, round_: int) -> int:
        """How many separately noised uploads a client makes in this round."""
        return 1


CAPABILITIES: tuple[type, ...] = (
    Surveys,
    HasPhases,
    Adapts,
    TrainsWhileWaiting,
    TrainsParts,
    UsesProxy,
    OwnStatistics,
    CountsRounds,
    Diagnoses,
    Contributes,
    GossipFacts,
    Configures,
    Costs,
    ForeseesUploads,
    Unlearns,
    PrivateSums,
)


# -- what the engine calls ------------------------------------------------------------------------
def has_survey(alg: AnyAlgorithm) -> bool:
    return isinstance(alg, Surveys) and alg.surveys


def survey_of(alg: AnyAlgorithm, batch: Batch, down: Any, mine: Any) -> Any:
    """The client's sum over one batch, or () without a survey."""
    return alg.survey(batch, down, mine) if isinstance(alg, Surveys) and alg.surveys else ()


def survey_gradients(alg: AnyAlgorithm) -> float:
    return alg.survey_gradients if isinstance(alg, Surveys) else 0.0


def phases_of(alg: AnyAlgorithm) -> tuple[Phase, ...]:
    return alg.phases() if isinstance(alg, HasPhases) else (Phase(alg.step),)


def takes_steps(alg: AnyAlgorithm) -> bool:
    """Whether clients compute gradients: in a closed form they may only send sums over their data."""
    return alg.family != "closed_form" or bool(phases_of(alg)) or survey_gradients(alg) > 0


def trains_in(alg: AnyAlgorithm, round_: float) -> bool:
    return not isinstance(alg, HasPhases) or alg.trains_in(round_)


def adaptation_of(alg: AnyAlgorithm) -> tuple[Phase, ...]:
    return alg.adaptation() if isinstance(alg, Adapts) else ()


def idle_epochs(alg: AnyAlgorithm, ids: Tensor, wait: Tensor, epoch: Tensor, address: tuple[int, int]) -> Tensor | None:
    """Epochs that clients train while they wait [K]; None if they do not."""
    return alg.idle_epochs(ids, wait, epoch, address) if isinstance(alg, TrainsWhileWaiting) else None


def model_of(alg: AnyAlgorithm, x: Any) -> Tensor:
    """The model inside what is trained.  ``[P]``"""
    if isinstance(alg, TrainsParts):
        return alg.model(x)
    found: Tensor = x if isinstance(x, Tensor) else x.w
    return found


def memory_of(alg: AnyAlgorithm, x: Any) -> Any:
    """The initial state of the local optimizer: of all that is trained, unless the method overrides it."""
    return alg.memory(x) if isinstance(alg, TrainsParts) else alg.optimizer.init(x)


def needs_proxy(alg: AnyAlgorithm) -> bool:
    return isinstance(alg, UsesProxy)


def statistics_after(alg: AnyAlgorithm, before: Tensor, mean: Tensor, server: Any) -> Tensor:
    """The running statistics after a round."""
    return alg.statistics(before, mean, server) if isinstance(alg, OwnStatistics) else mean


def after_empty_round(alg: AnyAlgorithm, server: Any) -> Any:
    """The server's state after a round without uploads."""
    return alg.after_empty_round(server) if isinstance(alg, CountsRounds) else server


def diagnostics_of(alg: AnyAlgorithm, before: Any, inbox: Inbox[Any], after: Any) -> dict[str, Tensor]:
    return alg.diagnostics(before, inbox, after) if isinstance(alg, Diagnoses) else {}


def contributions_of(alg: AnyAlgorithm, before: Any, inbox: Inbox[Any], after: Any) -> Tensor | None:
    """How much each client contributed to a round, up to a common factor; None if that is unknown."""
    if isinstance(alg, Contributes):
        return alg.contributions(before, inbox, after)
    return inbox.weights if not alg.traits.each_upload and isinstance(inbox.weights, Tensor) else None


def gossip_facts(alg: AnyAlgorithm) -> GossipFacts:
    return alg if isinstance(alg, GossipFacts) else GossipFacts()


def defaults_of(alg: AnyAlgorithm) -> Mapping[str, Mapping[str, Any]]:
    return alg.defaults() if isinstance(alg, Configures) else {}


def warnings_of(alg: AnyAlgorithm, lr: float, rounds: int) -> list[str]:
    own = alg.warnings(lr, rounds) if isinstance(alg, Configures) else []
    return own + _diverging(alg, lr)


def _diverging(alg: AnyAlgorithm, lr: float) -> list[str]:
    """Learning rates at which a pull towards another model overshoots."""
    if not alg.traits.pull:
        return []
    setting, *own = alg.traits.pull
    sizes = {"local.lr": lr} | {f"algorithm.{name}": getattr(alg, name) for name in own}
    products = {name: rate * getattr(alg, setting) for name, rate in sizes.items()}
    return [
        f"{name} x algorithm.{setting} is {size:g}: proximal steps diverge from 2 on"
        for name, size in products.items()
        if size >= 2
    ]


def sent_bytes(alg: AnyAlgorithm, down: Any) -> int:
    """What the server's message costs on the wire, for one client."""
    return alg.sent_bytes(down) if isinstance(alg, Costs) else tree.nbytes(down)


def upload_bytes(alg: AnyAlgorithm, uploads: Any) -> int:
    """What these stacked uploads cost on the wire, all together."""
    return alg.upload_bytes(uploads) if isinstance(alg, Costs) else tree.nbytes(uploads)


def lane_size(alg: AnyAlgorithm) -> int:
    return alg.lane_size if isinstance(alg, Costs) else 0


def private_sums(alg: AnyAlgorithm) -> PrivateSums | None:
    """The algorithm, if its clients send sums over their examples that noise can hide."""
    return alg if isinstance(alg, PrivateSums) else None
