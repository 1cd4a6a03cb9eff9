"""pFedALA: FedALA whose clients continue to train while they wait for the others, and keep the average of the iterates.

Fu, Comparative Analysis of Optimizers in Federated Learning Algorithms under Non-IID Data, 2024.

    client k:  as FedALA, up to the upload of x_0;  then, while it waits, epoch after epoch from there: x_1 ... x_J
               v_k <- sum_j a_j x_j,  a_j = 1 / (1 + J)           the next round's ALA starts from v_k
    server:    as FedALA; with several aggregation centres  w <- sum_c b_c w_c

The upload is always x_0: what is learned while waiting reaches the server only through the client's next start, and
only on ALA's layers, since the server's model replaces the layers below. Only whole epochs are trained. ``wait_mode``
sets their number: ``fixed`` as in the paper's experiment (none for slow clients, 1 to 3 for the others), ``clock`` by
the simulated time at which the slowest client finishes (section ``system``).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple

import torch
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt, field_validator, model_validator
from torch import Tensor

from fedloom.algorithm import Carry, Costs, Inbox, Model, Phase, TrainsWhileWaiting, Traits, Work, like
from fedloom.algorithms.fedala import FedALA, Mine
from fedloom.core import rng, tree
from fedloom.core.schema import other_than, over, when
from fedloom.maths.centres import Centres

_SLACK = 1e-9  # tolerate rounding

_DIVIDED = when(centres=over(1), topology=other_than("replicated"))


class Sent(NamedTuple):
    dw: Tensor  # [P]
    client: Any = ()  # [] its number, if that decides which centre receives it


class Wait(NamedTuple):
    """FedALA's carry, and the state of a client that waits."""

    w: Tensor
    W: Any
    loss: Tensor
    losses: Tensor
    passes: Tensor
    sent: Tensor  # [P] x_0
    mean: Tensor  # [P] of x_0 ... x_j
    epochs: Tensor  # [] j
    memory: Any = ()  # the optimizer state at the upload, if the next round begins with it


class PFedALA(FedALA, TrainsWhileWaiting, Costs):
    fedavg_when = {"w_init": 1.0, "eta": 0.0}

    wait_mode: Literal["fixed", "clock"] = Field("fixed", description="how the number of epochs is decided: see above")
    slow_clients: Annotated[NonNegativeInt, when(wait_mode="fixed")] = Field(
        1, description="this many clients, the first ones, have no time left"
    )
    extra_min: Annotated[NonNegativeInt, when(wait_mode="fixed")] = Field(
        1, description="fewest epochs of the other clients"
    )
    extra_max: Annotated[NonNegativeInt, when(wait_mode="fixed")] = Field(
        3, description="most epochs of the other clients"
    )
    redraw: Annotated[Literal["round", "once"], when(wait_mode="fixed")] = Field(
        "round", description="drawn in every round, or once for a client"
    )
    max_extra: Annotated[NonNegativeInt, when(wait_mode="clock")] = Field(
        3, description="most epochs, however long a client waits"
    )
    average: Literal["uniform", "last", "upload", "geometric"] = Field(
        "uniform", description="a_j: equal, only x_J, only x_0 (a control), or powers of ratio"
    )
    ratio: Annotated[NonNegativeFloat, when(average="geometric")] = Field(
        0.5, description="a_j is proportional to ratio^j"
    )
    extra_optimizer: Annotated[Literal["continue", "fork"], when({"local.state": "persist"})] = Field(
        "continue", description="the next round continues with the optimizer's last state, or its state at the upload"
    )
    centres: PositiveInt = Field(1, description="number of aggregation centres")
    topology: Annotated[Literal["replicated", "sharded", "overlap"], when(centres=over(1))] = Field(
        "replicated", description="each client uploads to all centres, to one, or to `copies` of them"
    )
    copies: Annotated[PositiveInt, when(topology="overlap", centres=over(1))] = Field(
        2, description="to how many centres a client uploads"
    )
    mix: Annotated[Literal["uniform", "samples"] | tuple[NonNegativeFloat, ...], _DIVIDED] = Field(
        "uniform", description="b_c: equal, by the examples behind each centre's model, or these numbers"
    )
    fused: Annotated[Literal["client", "root"], when(centres=over(1))] = Field(
        "client", description="where the centres' models are fused: affects only the byte count"
    )
    lost: Annotated[tuple[NonNegativeInt, ...], _DIVIDED] = Field(
        (), description="centres that never respond: b is spread over the others"
    )

    @field_validator("mix", mode="before")
    @classmethod
    def _numbers_of_a_file(cls, given: Any) -> Any:
        return tuple(given) if isinstance(given, list) else given

    @model_validator(mode="after")
    def _settings_agree(self) -> PFedALA:
        if self.extra_min > self.extra_max:
            raise ValueError(f"extra_min = {self.extra_min} is more than extra_max = {self.extra_max}")
        if isinstance(self.mix, tuple) and (len(self.mix) != self.centres or not sum(self.mix)):
            raise ValueError(f"mix has {len(self.mix)} numbers for {self.centres} centres, or they are all 0")
        if any(c >= self.centres for c in self.lost):
            raise ValueError(f"lost = {list(self.lost)}, but centres are numbered 0 to {self.centres - 1}")
        answering = set(range(self.centres)) - set(self.lost)
        if not answering:
            raise ValueError(f"lost = {list(self.lost)} leaves none of {self.centres} centres")
        if isinstance(self.mix, tuple) and not any(self.mix[c] for c in answering):
            raise ValueError(f"mix = {list(self.mix)} is 0 for all centres that are not lost")
        if self.topology == "overlap" and self.copies > self.centres:
            raise ValueError(f"copies = {self.copies} is more than centres = {self.centres}")
        return self

    # -- waiting ------------------------------------------------------------------------------------
    def phases(self) -> tuple[Phase, ...]:
        waiting = Phase(
            self.step,
            name="waiting",
            epochs=max(self.extra_max, self.max_extra, 1),
            enter=self.uploaded,
            passes=lambda _, work: work.extra,
            after=self.passed,
            leave=self.resumed,
            keeps_statistics=False,  # those of x_0 are uploaded with it
            waiting=True,
        )
        return (*super().phases(), waiting)

    def idle_epochs(self, ids: Tensor, wait: Tensor, epoch: Tensor, address: tuple[int, int]) -> Tensor:
        if self.wait_mode == "clock":
            return torch.where(epoch > 0, wait / epoch + _SLACK, 0.0).clamp(0, self.max_extra).floor().long()
        seed, round_ = address
        chance = rng.uniform(seed, "extra_epochs", round_ if self.redraw == "round" else 0, ids).double()
        drawn = self.extra_min + (chance * (self.extra_max - self.extra_min + 1)).long()
        return torch.where(ids < self.slow_clients, 0, drawn)

    @property
    def reads_waiting_time(self) -> bool:
        return self.wait_mode == "clock"

    def start(self, down: Model, mine: Mine, work: Work) -> Wait:  # type: ignore[override]
        walk = super().start(down, mine, work)
        return Wait(*walk, sent=walk.w, mean=walk.w, epochs=walk.passes)

    def uploaded(self, at: Carry, down: Model, mine: Mine) -> Carry:
        memory = at.memory if self.extra_optimizer == "fork" else ()
        return at._replace(x=at.x._replace(sent=at.x.w, mean=at.x.w, memory=memory))

    def passed(self, at: Carry, seen: Any, down: Model, mine: Mine, work: Work) -> tuple[Carry, Tensor]:
        """One more epoch in the mean: mean <- mean + share (x_j - mean)."""
        x, j = at.x, at.x.epochs + 1
        mean = torch.lerp(x.mean, x.w, self.share_of(j)) if self.average != "upload" else x.mean
        return at._replace(x=x._replace(mean=mean, epochs=j)), j < 0

    def share_of(self, j: Tensor) -> Tensor:
        """a_j / (a_0 + ... + a_j)."""
        if self.average == "last":
            return torch.ones_like(j)
        if self.average == "geometric":
            powers = self.ratio ** torch.arange(max(self.extra_max, self.max_extra) + 1, device=j.device)
            place = torch.arange(len(powers), device=j.device)
            return torch.where(place == j, powers, 0.0).sum() / torch.where(place <= j, powers, 0.0).sum()
        return 1 / (1 + j)

    def resumed(self, at: Carry, down: Model, mine: Mine) -> Carry:
        """The end of the round: its model is again the one that was uploaded."""
        if self.extra_optimizer == "fork":
            at = at._replace(memory=at.x.memory)
        return at._replace(x=at.x._replace(w=at.x.sent, memory=()))

    def finish(self, x: Wait, down: Model, mine: Mine, work: Work) -> tuple[Sent, Mine]:  # type: ignore[override]
        client = work.client if self.divided else ()
        return Sent(x.sent - down.w, client), Mine(x.mean, x.W, torch.ones_like(mine.seen), mine.seen)

    # -- aggregation centres ----------------------------------------------------------------------------
    @property
    def divided(self) -> bool:
        """Whether centres receive different uploads; if all receive all, they have one model."""
        return self.centres > 1 and self.topology != "replicated"

    @property
    def layout(self) -> Centres:
        return Centres(self.centres, self.copies if self.topology == "overlap" else 1, self.mix, self.lost)

    @property
    def traits(self) -> Traits:
        return super().traits._replace(each_upload=self.divided, size_varies=True)

    def init(self, w: Tensor) -> Any:
        return self.layout.start(w) if self.divided else Model(w)

    def send(self, server: Model) -> Model:
        return Model(server.w)

    def sent_bytes(self, down: Model) -> int:
        return tree.nbytes(down) * (self.centres if self.fused == "client" else 1)

    def upload_bytes(self, uploads: Sent) -> int:
        copies = {"replicated": self.centres, "sharded": 1, "overlap": self.copies}[self.topology]
        return tree.nbytes(uploads.dw) * copies

    def update(self, server: Any, inbox: Inbox[Any]) -> Any:
        if not self.divided:
            return Model(server.w + like(inbox.mean.dw, server.w))
        uploads = inbox.uploads
        return self.layout.aggregated(server, uploads.dw, uploads.client, inbox.weights)
