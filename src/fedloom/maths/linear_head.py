"""A net as a body that computes features and a linear head on them."""

from __future__ import annotations

import torch
from torch import Tensor

from fedloom.core.errors import ConfigError, Fault
from fedloom.core.task import Task
from fedloom.maths.ridge import with_bias


def check_head(task: Task, bias: bool) -> None:
    """Refuse a net whose head cannot be replaced by a solved one."""
    if not task.is_head_of_body:
        what = "the logits of the net are not those of its 'head' on the output of its 'body'"
        raise ConfigError([Fault("model.kind", what, "let forward(x) be head(body(x))")])
    if task.linear_head.bias is not None and "head.bias" not in task.names:
        what = "the method solves for the whole head, so its bias cannot be frozen (got 'head.bias')"
        raise ConfigError([Fault("model.freeze", what, "leave it out")])
    if bias and task.linear_head.bias is None:
        raise ConfigError([Fault("algorithm.bias", "the head of this net has no bias", "set algorithm.bias=false")])


def feature_count(task: Task, bias: bool) -> int:
    """d, the constant feature included."""
    return task.linear_head.in_features + bias


def body_features(task: Task, w: Tensor, x: Tensor, buffers: Tensor, bias: bool) -> Tensor:
    """The output of the body, and a constant 1 for a bias.  ``[B, d]``"""
    found = task.features(w, x, buffers)
    return with_bias(found) if bias else found


def with_head(task: Task, w: Tensor, head: Tensor) -> Tensor:
    """The parameters with W ``[d, C]`` as the head; its last row is the bias if it has one more row than features."""
    wide, out = task.linear_head.in_features, w.clone()
    out[task.place("head.weight")] = head[:wide].T.flatten().to(w.dtype)
    if task.linear_head.bias is not None:
        out[task.place("head.bias")] = head[wide].to(w.dtype) if len(head) > wide else 0.0
    return out


def head_of(task: Task, w: Tensor, bias: bool = True) -> Tensor:
    """W ``[d, C]`` in float64: the head of these parameters, its bias as the last row."""
    layer = task.linear_head
    head = w[task.place("head.weight")].view(layer.out_features, -1).T.double()
    if not bias:
        return head
    last = torch.zeros_like(head[:1]) if layer.bias is None else w[task.place("head.bias")].double()[None]
    return torch.cat([head, last])
