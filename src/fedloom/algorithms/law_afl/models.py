"""LAW-AFL's rounds that train: models are aggregated with learned weights, as in FedLAW (Algorithm 3, lines 12-14)."""

from __future__ import annotations

from functools import partial
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from fedloom.algorithm import Held, Inbox
from fedloom.algorithms.law_afl.settings import LawAFLSettings
from fedloom.algorithms.law_afl.state import LawAFLServer, LawAFLUpload, with_learned
from fedloom.core.task import Task
from fedloom.maths.learned_weights import (
    Stack,
    aggregated,
    aggregated_by_depth,
    learn_weights,
    settings_for,
    with_shrink,
)
from fedloom.maths.proxy_set import ProxyGradient, proxy_epochs, proxy_loss


class ModelAggregation(NamedTuple):
    """w = gamma sum_i lambda_i w_i, where lambda and gamma are learned on the proxy set."""

    task: Task
    proxy: Held
    how: LawAFLSettings
    parts: Tensor  # [P] the part of the net that a parameter belongs to; 1 is the head

    def update(self, server: LawAFLServer, inbox: Inbox[LawAFLUpload]) -> LawAFLServer:
        """FedLAW's round."""
        stack = Stack(server.w, inbox.uploads.dw)
        rule, settings = self.how.shrink_rule, self.how.model_settings
        epochs = proxy_epochs(self.task, self.proxy, self.how.server_epochs, self.how.proxy_batch, inbox.address)
        along, learns = ProxyGradient(self.task, self.proxy), settings_for(rule, settings)
        weighing = learn_weights(stack, inbox.weights, along, epochs, learns, recorder=along.recorder).how
        loss = partial(proxy_loss, self.task, self.proxy)
        weighing = with_shrink(rule, weighing, stack, loss, settings, inbox.uploads.slope)
        models = with_learned(server.models, inbox.clients, weighing, inbox.weights / inbox.weights.sum())
        if self.how.depth == "all":
            w = aggregated(stack, weighing)
        else:
            w = aggregated_by_depth(stack, weighing, inbox.uploads.depth[:, 0], self.parts)
        return server._replace(w=w, models=models)


def parts_of(task: Task) -> Tensor:
    """The part of the net that each parameter belongs to: 1 is the head, 2 the part before it, and so on.  ``[P]``"""
    part = {n: "head" if n.startswith("head.") else ".".join(n.split(".")[:2]) for n in task.names}
    ordered = ["head", *reversed([name for name in dict.fromkeys(part.values()) if name != "head"])]
    depth = {name: float(k + 1) for k, name in enumerate(ordered)}
    of_each = [torch.full((prod(shape),), depth[part[name]]) for name, shape in task.layout.items()]
    return torch.cat(of_each).to(task.w0.device)
