"""The numbers of a node: its experiment, its state on disk, and what it sends as bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from fedloom.core.errors import CheckpointError
from fedloom.core.metrics import client_metrics
from fedloom.deploy.contract import Contract
from fedloom.deploy.ends import OwnRows, Population, node_end
from fedloom.deploy.messages import Envelope, MessageError, most_bytes, named, packed, tree_of
from fedloom.deploy.node import save_own_model
from fedloom.deploy.peers.edges import Edges
from fedloom.deploy.talk import expected
from fedloom.engine import checkpoint
from fedloom.engine.peer import (
    OwnWork,
    Sent,
    begin_node,
    corrected,
    correction,
    evaluate_node,
    mix_node,
    model_of_node,
    sent_form,
    train_node,
)
from fedloom.engine.state import Experiment
from fedloom.engine.store import RamStore
from fedloom.runs.models import Origin, record_of

CHECKPOINTS = "checkpoints"


class PeerPlace(NamedTuple):
    """The identity of a node of a network, its data and its folder."""

    contract: Contract
    me: int
    own: OwnRows
    folder: Path


class Peer:
    """One node of a network, from one round to the next."""

    def __init__(self, place: PeerPlace, population: Population) -> None:
        self._place = place
        prepared = node_end(place.contract.config, place.own, place.me, population)
        self.exp: Experiment = prepared.experiment
        self._record = record_of(prepared)
        self.state = begin_node(self.exp, place.me)
        self._store = RamStore(len(population.train))
        self._form = sent_form(self.exp, place.me)
        self.limit = most_bytes(self._form)
        self._doubts: dict[tuple[int, int], Sent] = {}
        self._sent: dict[int, Sent] = {}  # by turn, as long as a neighbour may need it again
        self.line: dict[str, Any] = {}  # of the last round in the log, without its scores

    @property
    def steps(self) -> int:
        assert self.exp.topology is not None
        return self.exp.topology.gossip_steps

    # -- a round ----------------------------------------------------------------------------------
    def train(self) -> OwnWork:
        return train_node(self.exp, self.state, self._place.me, self._store)

    def packed(self, sent: Sent, turn: int) -> bytes:
        """What the node sends in a turn."""
        self._sent[turn] = sent
        facts = {"campaign": self._place.contract.campaign, "turn": turn, "node": self._place.me}
        return packed(Envelope("model", facts, named("sent", sent)))

    def sent_again(self) -> dict[int, bytes]:
        """What the node sent in turns that a neighbour had not saved."""
        return {turn: self.packed(sent, turn) for turn, sent in sorted(self._sent.items())}

    def read(self, j: int, turn: int, data: bytes) -> Sent:
        """What a neighbour sent; refused if it is invalid."""
        message = expected(data, "model", self.limit)
        want = {"campaign": self._place.contract.campaign, "turn": turn, "node": j}
        for name, value in want.items():
            if message.facts.get(name) != value:
                raise MessageError(f"'{name}' should be {value!r} (got {str(message.facts.get(name))[:60]!r})")
        strangers = [name for name in message.tensors if not name.startswith("sent.")]
        if strangers:
            raise MessageError(f"unexpected array '{strangers[0][:60]}'")
        return tree_of(self._form, "sent", message.tensors)

    def mix(self, own: Sent, received: dict[int, Sent], doubt: dict[int, Sent], turn: int) -> Sent:
        """Mix what was received; messages of links in doubt are kept until they are settled."""
        step, me = turn % self.steps, self._place.me
        for j, theirs in doubt.items():
            self._doubts[turn, j] = correction(self.exp, self.state, me, own, (j, theirs), step)
        self.state, following = mix_node(self.exp, self.state, me, own, received, step)
        return following

    def settle(self, settled: list[tuple[int, int, bool]]) -> None:
        """Add the corrections of settled links."""
        for turn, j, up in settled:
            late = self._doubts.pop((turn, j), None)
            if up and late is not None:
                self.state = corrected(self.state, late)

    def advance(self, rounds: int = 1, gradients: float = 0.0) -> None:
        """Count a round, or skipped rounds."""
        self.state = self.state._replace(round=self.state.round + rounds, gradients=self.state.gradients + gradients)

    def evaluated(self) -> dict[str, float]:
        """The scores of the node's model on its own held-out rows."""
        return client_metrics("test", evaluate_node(self.exp, self.state, self._place.me, self._store))

    # -- on disk ----------------------------------------------------------------------------------
    def save(self, edges: Edges, line: dict[str, Any]) -> None:
        """Write a checkpoint, with the memory of the node's links and the round's line in the log."""
        self._sent = {turn: sent for turn, sent in self._sent.items() if turn in edges.sent}
        order, turns = sorted(self._doubts), sorted(self._sent)
        kept = (*(self._doubts[key] for key in order), *(self._sent[turn] for turn in turns))
        state = self.state._replace(under_way=kept)
        lengths = {"links": edges.remembered(), "corrections": order, "sent": turns, "line": line}
        checkpoint.save(self._place.folder / CHECKPOINTS, state, self._store, lengths)

    def load(self) -> dict[str, Any] | None:
        """Go back to the newest checkpoint, and return the memory of its links; None if there is none."""
        folder = self._place.folder / CHECKPOINTS
        if not folder.is_dir() or not checkpoint.saved_rounds(folder):
            return None
        newest = max(checkpoint.saved_rounds(folder))
        try:
            lengths = checkpoint.readable(folder)[newest]["lengths"]
            order = [(int(t), int(j)) for t, j in lengths["corrections"]]
            turns = [int(turn) for turn in lengths.get("sent", [])]
        except (KeyError, ValueError, TypeError) as error:
            raise CheckpointError(
                f"{folder / f'{newest:08d}'}: is damaged; delete it to continue from the older one"
            ) from error
        begun = begin_node(self.exp, self._place.me)
        like = begun._replace(under_way=tuple(self._form for _ in (*order, *turns)))
        blank = self.exp.blank(self.exp.algorithm.send(begun.server))
        found = checkpoint.load_state(folder, like, self._store, blank=blank)
        kept = found.state.under_way
        self._doubts = dict(zip(order, kept[: len(order)], strict=True))
        self._sent = dict(zip(turns, kept[len(order) :], strict=True))
        self.state = found.state._replace(under_way=())
        self.line = found.lengths.get("line", {})  # earlier versions had none
        links: dict[str, Any] = found.lengths["links"]
        return links

    def save_model(self) -> None:
        """Write the model with which this node predicts."""
        found = model_of_node(self.exp, self.state, self._place.me, self._store)
        tensors: dict[str, Tensor] = self.exp.task.tensors(found.w[0], found.buffers[0])
        place, rounds = self._place, self.state.round
        origin = Origin(campaign=place.contract.campaign, rounds=rounds)
        record = self._record.model_copy(update={"origin": origin})
        save_own_model(place.folder, record, place.contract.nodes[place.me], tensors, place.own.arrays.recipe)
