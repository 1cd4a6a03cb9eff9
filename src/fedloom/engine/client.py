"""One client's part of a deployment: train, keep, protect and send; evaluate on its own rows.

The experiment is the server's, except for its data: ``federation`` has the number of examples of every client, and the
rows of this one. Instead of the server's state it has what the server has sent (``Experiment.at_client``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedloom.core import tree
from fedloom.core.metrics import Verdicts
from fedloom.engine.clock import Present
from fedloom.engine.evaluate import ClientModels, evaluate_models, evaluate_shared, models_of
from fedloom.engine.fleet import Inquiry, Order
from fedloom.engine.local import Outcome
from fedloom.engine.plan import Drawn, amounts
from fedloom.engine.state import Experiment, RunState
from fedloom.engine.store import ClientStore
from fedloom.engine.training import groups_of, keep, marked, train_all
from fedloom.engine.uploads import as_sent


def train_client(exp: Experiment, order: Order, client: int, store: ClientStore) -> Outcome:
    """What one client sends after its training, as [1, ...]; the store keeps the client's state.

    The server learns only whether the kept state is finite. If it or the upload is not, nothing is kept.
    """
    with torch.no_grad():
        ids = torch.tensor([client])
        steps = amounts(exp.local, exp.federation.train.sizes[ids]).steps
        groups = groups_of(exp, order.round, Present(Drawn(ids, torch.ones(1)), steps, 1), order.extra)
        (trained,) = train_all(exp, received(order.round, order), store, groups)
        outcome = as_sent(exp, order.round, ids, trained.outcome, order.senders)
        if bool(tree.finite_rows(outcome, 1)):
            keep(exp, store, trained, ids)
        return marked(outcome)._replace(begun=(), models=())


def evaluate_client(exp: Experiment, inquiry: Inquiry, client: int, store: ClientStore) -> Verdicts:
    """The scores of one client's model, or of the common one, on the client's own held-out rows."""
    with torch.no_grad():
        ids = torch.tensor([client])
        if isinstance(inquiry.model, Tensor):
            return evaluate_shared(exp, ids, inquiry.model, inquiry.buffers)
        return evaluate_models(exp, own_model(exp, inquiry, client, store))


def own_model(exp: Experiment, inquiry: Inquiry, client: int, store: ClientStore) -> ClientModels:
    """The model with which one client predicts."""
    with torch.no_grad():
        (found,) = models_of(exp, received(inquiry.round, inquiry), store, torch.tensor([client]))
        return found


def received(round_: int, sent: Order | Inquiry) -> RunState:
    """The state of the run as far as a client knows it."""
    return RunState(round_, sent.down, sent.buffers, 0, 0)
