"""The facts about an algorithm that settings are checked against and that the engine reads."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

from pydantic import Field

Family: TypeAlias = Literal["server", "personal", "closed_form", "gossip"]
Weighting: TypeAlias = Annotated[
    Literal["samples", "uniform"], Field(description="weight clients by their number of examples, or equally")
]


class Traits(NamedTuple):
    """What is true of a method under its settings; the defaults are those of FedAvg.

    A method changes the ones that differ: ``return super().traits._replace(distinct=True)``.

    Attributes:
        each_upload: ``update`` reads every upload (``inbox.uploads``), not only their sum.
        weighs_examples: whether clients are weighted by their number of examples, or equally.
        server_lr: the server's learning rate for the mean update.
        relaxation: share of the old model that the server keeps.
        synchronous: whether the server waits for a round's uploads; False: it takes each when it arrives.
        has_global_model: False if clients share less than a model, and there is no global one to evaluate.
        mirrored: the server keeps the mean of clients' states; a client it did not receive keeps none.
        communicates: False if nothing is sent, and no byte is counted.
        served: a client's model is evaluated before or after it trains.
        partial_work: the server also uses the unfinished work of a straggler.
        plain_sgd: the method is defined for local steps without momentum, decay or clipping.
        distinct: a client must not be drawn twice in a round.
        proximal: the weight mu of a proximal term in the clients' objective.
        pull: the setting that weighs a pull towards another model, followed by the method's own learning rates in
            addition to ``local.lr``, if any: at a rate of 2 / weight and above the steps diverge, with a warning.
        classes_only: why the method does classification only, after its name; empty: it also does regression.
        gradients_per_step: gradients of one net on one batch; a Hessian-vector product counts as two. It is what
            ``work/gradients`` counts and what a step takes in simulated time. A gradient on a part of a batch counts as
            that part. Steps of other phases than the main one take one gradient each, or none if they cost nothing.
        sends_to_all: the server sends its model to every client, not only to those that will train.
        has_weighting: the method has a setting ``weighting``, of which ``uniform`` is a value.
        equal_if_private: weights are numbers of examples, which privacy may replace by 1; else it refuses.
        unit_uploads: no upload is longer than 1, at any clipping bound.
        tolerates_noise: the method reads every upload, and accepts noised ones.
        ignores_reports: why the server does not use the quality that clients report of themselves; empty: it does, if
            they report it.
        size_varies: the size of an upload depends on the client's data.
    """

    # -- what the server does with uploads
    each_upload: bool = False
    weighs_examples: bool = True
    has_weighting: bool = False
    server_lr: float = 1.0
    relaxation: float = 0.0
    synchronous: bool = True
    has_global_model: bool = True
    mirrored: bool = False
    ignores_reports: str = ""

    # -- what clients do
    communicates: bool = True
    served: Literal["pre_fit", "post_fit"] = "pre_fit"
    partial_work: bool = False
    plain_sgd: bool = False
    distinct: bool = False
    proximal: float = 0.0
    pull: tuple[str, ...] = ()
    classes_only: str = ""

    # -- what a round costs
    gradients_per_step: float = 1.0
    sends_to_all: bool = False

    # -- under privacy
    equal_if_private: bool = True
    unit_uploads: bool = False
    tolerates_noise: bool = False
    size_varies: bool = False

    @property
    def common_model(self) -> bool:
        """Whether all clients have a model in common: the server's, or the average of a network's nodes."""
        return self.communicates and self.has_global_model

    def weighted_by(self, weighting: str, **others: Any) -> Traits:
        """These traits, for a method whose setting ``weighting`` decides the weights of clients."""
        return self._replace(
            has_weighting=True, weighs_examples=weighting != "uniform", equal_if_private=False, **others
        )
