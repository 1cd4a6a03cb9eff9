"""Local training only: every client keeps its own model and nothing is ever sent.

The other baseline of personalised methods: what a client reaches alone.

    client k:  w_k <- SGD(w_k; D_k), from the common initial model      no upload
"""

from __future__ import annotations

from torch import Tensor

from fedloom.algorithm import Algorithm, Inbox, Model, Nothing, Traits, Work


class LocalOnly(Algorithm[Model, Model, Nothing]):
    family = "personal"

    @property
    def traits(self) -> Traits:
        return super().traits._replace(communicates=False, served="post_fit")

    def init(self, w: Tensor) -> Model:
        return Model(w)

    def join(self, down: Model) -> Model:
        return down

    def start(self, down: Model, mine: Model, work: Work) -> Tensor:
        return mine.w

    def finish(self, x: Tensor, down: Model, mine: Model, work: Work) -> tuple[Nothing, Model]:
        return (), Model(x)

    def update(self, server: Model, inbox: Inbox[Nothing]) -> Model:
        return server

    def serve(self, down: Model, mine: Model) -> Tensor:
        return mine.w
