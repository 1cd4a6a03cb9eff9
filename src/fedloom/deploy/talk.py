"""The messages of a round between server and nodes; each side validates what it receives.

hello      server: the contract             node: how many rows it has, or what differs
train      server: Order                    node: Outcome of one client
evaluate   server: Inquiry                 node: Verdicts of one client
finish     server: Inquiry                 node: nothing; its own model stays with it
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fedloom.core import tree
from fedloom.core.metrics import Verdicts
from fedloom.core.vocabulary import first_measure
from fedloom.deploy.messages import Envelope, MessageError, most_bytes, named, packed, tree_of, unpacked
from fedloom.engine.fleet import Inquiry, Order
from fedloom.engine.local import Outcome
from fedloom.engine.rounds import begin
from fedloom.engine.state import Experiment
from fedloom.engine.uploads import example_outcome


# -- from the server ------------------------------------------------------------------------------
def order_tensors(exp: Experiment, order: Order) -> dict[str, Tensor]:
    """The arrays of an order: the same for every node."""
    return named("down", order.down) | named("buffers", exp.travelling(order.buffers))


def inquiry_tensors(exp: Experiment, inquiry: Inquiry) -> dict[str, Tensor]:
    """The arrays of an inquiry: the model that all share, or what nodes derive theirs from."""
    shared = isinstance(inquiry.model, Tensor)
    part = named("model", inquiry.model) if shared else named("down", inquiry.down)
    return part | named("buffers", exp.travelling(inquiry.buffers))


def order_of(exp: Experiment, message: Envelope, client: int) -> Order:
    """The order that a node was sent."""
    facts = message.facts
    asked = facts.get("extra")
    extra = {client: whole(asked, str(client))} if isinstance(asked, dict) else None
    return Order(whole(facts, "round"), _down(exp, message), _buffers(exp, message), whole(facts, "senders"), extra)


def inquiry_of(exp: Experiment, message: Envelope) -> Inquiry:
    """What a node was asked to evaluate."""
    shared = any(name.startswith("model.") for name in message.tensors)
    down = () if shared else _down(exp, message)
    model = tree_of(exp.task.w0, "model", message.tensors) if shared else ()
    return Inquiry(whole(message.facts, "round"), down, _buffers(exp, message), model)


def _down(exp: Experiment, message: Envelope) -> Any:
    like = exp.algorithm.send(begin(exp).server)
    return tree_of(like, "down", message.tensors, shapes=False)  # a method may send less in some rounds


def _buffers(exp: Experiment, message: Envelope) -> Tensor:
    buffers = tree_of(exp.travelling(exp.task.buffers0), "buffers", message.tensors)
    return buffers if isinstance(buffers, Tensor) else exp.task.buffers0


def order_limit(exp: Experiment) -> int:
    """How many bytes a message from the server may have."""
    state = begin(exp)
    return most_bytes(exp.algorithm.send(state.server), state.buffers, exp.task.w0)


# -- from a node ----------------------------------------------------------------------------------
def packed_outcome(exp: Experiment, outcome: Outcome, facts: dict[str, Any]) -> bytes:
    """What one client sends: its upload, its weight, its statistics, and how much work it did."""
    row = tree.take(outcome, 0)
    sent = (row.uploads, row.weights.double(), exp.travelling(row.buffers), row.steps, row.gradients)
    fine = bool(tree.finite_rows((outcome.states, outcome.uploads), 1))
    return packed(Envelope("trained", facts | {"fine": fine}, named("sent", sent)))


def outcome_of(exp: Experiment, order: Order, data: bytes) -> tuple[Outcome, dict[str, Any]]:
    """The outcome that a node sent, as [1, ...], and its other facts."""
    like = example_outcome(exp, order)
    form = _sent_form(exp, order, like)
    message = expected(data, "trained", most_bytes(form))
    if message.facts.get("fine") is not True:
        raise MessageError("its numbers are not finite")
    strangers = [name for name in message.tensors if not name.startswith("sent.")]
    if strangers:
        raise MessageError(f"unexpected array '{strangers[0][:60]}'")
    uploads, weight, buffers, steps, gradients = tree_of(form, "sent", message.tensors)
    if float(weight) < 0:
        raise MessageError(f"its weight is negative (got {float(weight):g})")
    buffers = buffers if isinstance(buffers, Tensor) else order.buffers
    row = Outcome(uploads, torch.zeros(()), weight.to(like.weights), buffers, steps, (), (), (), gradients)
    return tree.tmap(lambda x: x[None], row), message.facts


def _sent_form(exp: Experiment, order: Order, like: Outcome) -> Any:
    return like.uploads, like.weights.double(), exp.travelling(order.buffers), like.steps, like.gradients


def outcome_limit(exp: Experiment, order: Order) -> int:
    """How many bytes the answer of a node to an order may have."""
    return most_bytes(_sent_form(exp, order, example_outcome(exp, order)))


def packed_verdicts(found: Verdicts, facts: dict[str, Any]) -> bytes:
    parts = {"rows": found.rows, "correct": found.correct, "loss": found.loss, **_areas(found)}
    return packed(Envelope("evaluated", facts, {name: x.double() for name, x in parts.items()}))


def _areas(found: Verdicts) -> dict[str, Tensor]:
    return {f"auc.{name}": area for name, area in found.auc.items()}


def verdicts_of(exp: Experiment, inquiry: Inquiry, client: int, data: bytes) -> Verdicts:
    """The scores of a node's model, as reported by the node.

    The loss of its own model may not be finite. That of the common one would end the run for all.
    """
    tensors = expected(data, "evaluated", most_bytes()).tensors
    names = ["rows", "correct", "loss", *(f"auc.{name}" for name in exp.measures)]
    if set(tensors) != set(names) or any(x.shape != (1,) or x.dtype != torch.float64 for x in tensors.values()):
        raise MessageError(f"should have one number each of {', '.join(names)} (got {', '.join(sorted(tensors))})")
    rows, correct, loss, *areas = (tensors[name] for name in names)
    first, most = first_measure(exp.task.criterion.regression), float(rows)
    if first != "accuracy":
        most = math.inf  # a sum of errors
    if not 0 <= float(correct) <= most or int(rows) != int(exp.federation.test.sizes[client]):
        raise MessageError(
            f"says that {first} sums up to {float(correct):g} on {float(rows):g} rows, which is impossible"
        )
    common = isinstance(inquiry.model, Tensor)
    if any(bool(area.isinf()) for area in areas) or (common and not bool(loss.isfinite())):
        raise MessageError("says that its scores are not finite")
    return Verdicts(torch.tensor([client]), rows, correct, loss, dict(zip(exp.measures, areas, strict=True)), first)


def expected(data: bytes, kind: str, limit: int) -> Envelope:
    """A message of this kind; a refusal by the other side is an error with its message."""
    message = unpacked(data, limit)
    if message.kind == "refused":
        raise MessageError(f"refuses: {str(message.facts.get('why', ''))[:1000]}")
    if message.kind != kind:
        raise MessageError(f"is of kind '{message.kind[:40]}' where '{kind}' is expected")
    return message


def refusal(why: str) -> bytes:
    """The answer of a node that refuses a request."""
    return packed(Envelope("refused", {"why": why}, {}))


def whole(facts: Mapping[str, Any], name: str) -> int:
    """A whole number that a message must have."""
    found = facts.get(name)
    if not isinstance(found, int) or isinstance(found, bool) or not 0 <= found < 1 << 53:
        raise MessageError(f"'{name}' should be a whole number (got {found!r})")
    return found
