"""What a node sends to its neighbours, and what it reads from the messages it receives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from fedloom.algorithm import Inbox
from fedloom.core import tree
from fedloom.engine.mixing import mixed_rows
from fedloom.engine.topology.weights import Weights

T = TypeVar("T")


class Message(NamedTuple):
    """What a node sends to a neighbour in a gossip step."""

    round: int
    step: int
    sender: int
    upload: Any
    buffers: Tensor  # [Q] running statistics of its net
    mass: float = 1.0  # of push-sum; 1 without it


def inbox_of(
    node: int,
    weights: Mapping[int, float],
    messages: Mapping[int, Message],
    *,
    nodes: int,
    examples: int,
    push_sum: bool = False,
) -> tuple[Inbox[Any], Tensor]:
    """What ``node`` reads from its messages, including its own, and the mixed statistics.

    ``weights`` are those of each sender; ``nodes`` and ``examples`` are those of the whole network.
    """
    senders = sorted(weights)
    value = np.array([weights[sender] for sender in senders])
    row = Weights(len(senders), np.zeros(len(senders), dtype=np.int64), np.arange(len(senders)), value)
    received = [messages[sender] for sender in senders]
    bodies = tree.stack([(message.upload, message.buffers) for message in received])
    mass = np.array([message.mass for message in received])
    total, buffers = tree.take(mixed_rows(row, bodies, slice(0, 1)), 0)
    weight = (row._replace(value=value * mass) if push_sum else row).rows()[0]
    if push_sum:
        buffers = buffers / row.rows()[0]
    numbers = [weight, float((value > 0).sum()), nodes, examples, weights[node], messages[node].round]
    weight, senders_, population, rows, own, now = torch.tensor(numbers, dtype=torch.float64, device=buffers.device)
    return Inbox(total, weight, senders_, population, rows, own=own, round=now), buffers


def next_upload(inbox: Inbox[Any], upload: T) -> T:
    """What a node sends in the next gossip step of the same round, instead of ``upload``."""
    return tree.tmap(lambda x, total: total.to(x.dtype), upload, inbox.total)
