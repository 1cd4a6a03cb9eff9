"""The facts about an algorithm that settings are checked against and that the engine reads."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

Family: TypeAlias = Literal["server", "personal", "closed_form", "gossip"]


class Traits(NamedTuple):
    """What is true of a method under its settings; the defaults are those of FedAvg.

    A method changes the ones that differ: ``return super().traits._replace(distinct=True)``.
    """

    # -- what the server does with uploads
    each_upload: bool = False  # ``update`` reads every upload (``inbox.uploads``), and not only their sum
    weighs_examples: bool = True  # clients count by their number of examples; False: all alike
    server_lr: float = 1.0  # how much of the mean move the server takes
    relaxation: float = 0.0  # share of the old model that the server keeps
    synchronous: bool = True  # False: the server takes each upload when it arrives
    has_global_model: bool = True  # False: clients share less than a model, and there is no global one to evaluate
    mirrored: bool = False  # the server keeps the mean of clients' states; a client it did not receive keeps none

    # -- what clients do
    communicates: bool = True  # False: nothing is sent, and no byte is counted
    served: Literal["pre_fit", "post_fit"] = "pre_fit"  # a client's model is evaluated before or after it trains
    partial_work: bool = False  # the server also uses the unfinished work of a late client
    plain_sgd: bool = False  # the method is defined for local steps without momentum, decay or clipping
    distinct: bool = False  # a client must not be drawn twice in a round
    proximal: float = 0.0  # the weight mu of a proximal term in what clients minimise

    classes_only: str = ""  # why the method learns classes and no numbers, after its name; empty: it learns both

    # -- what a round costs
    gradients_per_step: float = 1.0  # gradients of one net on one batch; a Hessian-vector product counts as two
    # It is what ``work/gradients`` counts and what a step takes in simulated time. A gradient on a part of a batch
    # counts as that part. Steps of phases beside the main one take one gradient each, or none if they cost nothing.
    sends_to_all: bool = False  # the server sends its model to every client, and not only to those that will train

    # -- under privacy
    equal_if_private: bool = True  # weights are numbers of examples, which privacy may replace by 1; else it refuses
    unit_uploads: bool = False  # no upload is longer than 1, whatever it is clipped to
    tolerates_noise: bool = False  # the method reads every upload, and may be given noised ones
    size_varies: bool = False  # the size of an upload depends on the client's data
