"""A node: it answers the server's messages from its own data, within the limits that its owner has set.

Everything that is sent is first recorded in the node's audit log: its kind, its round and its size.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field, NonNegativeInt
from torch import Tensor

from fedloom.core import disk
from fedloom.core.errors import DataError, FedloomError
from fedloom.core.metrics import client_metrics
from fedloom.core.schema import Spec
from fedloom.data.columns import Recipe
from fedloom.deploy.audit import IN_ROUND, write_audit
from fedloom.deploy.contract import AgreedTerms, Contract, differences
from fedloom.deploy.ends import OwnRows, Population, node_end
from fedloom.deploy.memory import Memory
from fedloom.deploy.messages import HEADER, SEALED_BYTES, Envelope, MessageError, outline, packed, unpacked
from fedloom.deploy.talk import (
    inquiry_of,
    order_limit,
    order_of,
    packed_outcome,
    packed_verdicts,
    refusal,
    whole,
)
from fedloom.engine import checkpoint
from fedloom.engine.client import evaluate_client, own_model, train_client
from fedloom.engine.state import Experiment
from fedloom.runs.folder import read_key, write_key
from fedloom.runs.models import COLUMNS, COMMON, RECORD, ModelRecord, Origin, record_of
from fedloom.runs.prepare import data_fingerprint
from fedloom.trust import noise

ROWS = "rows.sha256"  # of the rows with which a run began, beside its states
_IN_THE_CLEAR = "policy.require_secure_sum: the server asks for uploads in the clear (its rules.secure_sum is off)"


class Policy(Spec):
    """What the owner of a node allows; in ``[policy]`` of its node.toml."""

    min_cohort: NonNegativeInt = Field(0, description="refuse rounds with fewer nodes than this")
    require_secure_sum: bool = Field(False, description="refuse to send uploads other than into secure sums")
    require_privacy: bool = Field(False, description="refuse experiments without noise in what is sent")
    algorithms: tuple[str, ...] = Field(
        (), description="refuse other methods than these, your own as file.py:Class; empty: all are allowed"
    )
    accept_columns: tuple[str, ...] = Field(
        (), description="use these columns of the node's table even if they do not look like those of the contract"
    )

    def refusal(self, contract: Contract) -> str:
        """Why an experiment is not allowed here; empty if it is."""
        kind, privacy = Path(contract.config.kinds["algorithm"]).name, contract.config.privacy
        if self.algorithms and kind not in self.algorithms:
            return f"policy.algorithms: '{kind}' is not allowed here (allowed: {', '.join(self.algorithms)})"
        if self.require_privacy and not (privacy.multiplier or privacy.epsilon is not None):
            return "policy.require_privacy: the experiment adds no noise to what nodes send"
        return ""


class Place(NamedTuple):
    """The identity of a node, its data and its folder."""

    contract: Contract
    client: int  # its number
    own: OwnRows
    folder: Path  # for its states, its log and its model
    policy: Policy = Policy()


class Node:
    """One node of a federation, from one message to the next.

    ``say``: told in a line about each answer.
    """

    def __init__(self, place: Place, say: Callable[[str], None] = lambda _: None) -> None:
        self._place, self._say = place, say
        self._built: tuple[tuple[Population, int], Experiment, Memory] | None = None
        self._record: Any = None  # of the model
        self._limit = HEADER
        self._rows_file = place.folder / ROWS  # of the run under way
        self._session: Any = None  # of a secure sum
        self._sent: tuple[int, int] | None = None  # run and round of the last upload
        self._told = ""  # what the line about this answer adds
        disk.make_folder(place.folder)

    def answer(self, data: bytes) -> bytes:
        """The answer to a message; if it is refused, the answer says why, and the node is ready for the next."""
        message, self._told = Envelope("unknown", {}, {}), ""
        try:
            message = unpacked(data, max(self._limit, len(data) if self._built is None else 0))
            del data  # free large ones as early as possible
            self._refuse_other_terms(message)
            reply = self._kinds.get(message.kind, _unknown)(self, message)
        except FedloomError as error:
            reply = refusal(str(error))
        except Exception as error:  # for example a full disk, or user code: the server continues without this node
            reply = refusal(f"{type(error).__name__}: {error}")
        try:
            self._log(message, reply)
        except OSError as error:  # nothing is sent that is not in the log
            reply = refusal(f"cannot write its audit log, {type(error).__name__}: {error}")
        self._say(self._line(message, reply))
        return reply

    def _line(self, message: Envelope, reply: bytes) -> str:
        """What was asked and answered, for the terminal."""
        rounds = self._place.contract.config.basics.rounds
        kind, facts, _ = outline(reply)
        round_, at = _number(message, "round"), ""
        if round_ is not None:
            counted = message.kind in IN_ROUND  # counted from 1, as in the server's log
            at = f"round {round_ + 1} of {rounds}: " if counted else f"after round {round_} of {rounds}: "
        if kind == "refused":
            return f"{at}refused: {facts['why']}"
        return f"{at}{self._told}sent {len(reply):,} bytes"

    def _refuse_other_terms(self, message: Envelope) -> None:
        """Refuse a message that belongs to another contract, or to an experiment that the owner does not allow.

        This is checked for every message, not only for the first: either side may have started again with other files,
        and a server need not begin with a greeting.
        """
        why = differences(self._terms, message.facts, ("at this node", "at the server"))
        refused = self._place.policy.refusal(self._place.contract)
        if self._place.policy.require_secure_sum and message.facts.get("secure_sum") is not True:
            refused = refused or _IN_THE_CLEAR
        if why or refused:
            raise MessageError("; ".join([*why, *([refused] if refused else [])]))

    def _hello(self, _message: Envelope) -> bytes:
        own, seal = self._place.own, self._place.folder / "seal.crt"
        facts = {"seal": seal.read_text()} if seal.is_file() else {}
        self._told = "the server has the same contract; "
        return packed(Envelope("welcome", facts | {"train": own.train, "test": own.test, "name": self._name}, {}))

    def _seal(self, message: Envelope) -> bytes:
        """Begin a secure sum: what the other nodes need to remove the masks of this one, should it be lost."""
        from fedloom.deploy.secure_sum import Parties, new_session
        from fedloom.deploy.secure_talk import packed_sealed

        self._end(message)
        facts, names = message.facts, self._place.contract.nodes
        members, seals = facts.get("members"), facts.get("seals")
        if not isinstance(members, list) or not isinstance(seals, dict) or not set(members) <= set(range(len(names))):
            raise MessageError("'members' and 'seals' should name nodes of the contract")
        about = f"{facts['campaign']} {facts['run']} {whole(facts, 'round')} {facts.get('attempt')}"
        self._refuse_small(set(members), "members")
        parties = Parties(about, tuple(members), whole(facts, "threshold"), names)
        certificates = {int(k): str(seal) for k, seal in seals.items()}
        self._session = None
        session = new_session(self._place.folder, parties, self._place.client, certificates)
        reply = packed_sealed(parties, session.sealed(), {"round": facts["round"], "name": self._name})
        self._session = session
        return reply

    def _agree(self, message: Envelope) -> bytes:
        """Vouch to the other nodes for what the server says has arrived, once."""
        from fedloom.deploy.secure_talk import packed_codes

        facts, session = message.facts, self._session_of(message)
        left = facts.get("left")
        if not isinstance(left, list):
            raise MessageError("'left' should name the nodes whose uploads arrived")
        self._refuse_small(set(left) & set(session.parties.members), "left")
        told = {"round": facts.get("round"), "name": self._name}
        return packed_codes(session.parties, session.vouched(left), told)

    def _unmask(self, message: Envelope) -> bytes:
        """Give one share of each node's seeds, once, if enough nodes were told the same."""
        from fedloom.deploy.secure_sum import CODE
        from fedloom.deploy.secure_talk import column_for, packed_shares

        session = self._session_of(message)
        codes = column_for(session.parties, self._place.client, message, "agreed", "codes", CODE)
        return packed_shares(session.shares_of(codes), {"round": message.facts.get("round"), "name": self._name})

    def _session_of(self, message: Envelope) -> Any:
        facts, found = message.facts, self._session
        about = f"{facts.get('campaign')} {facts.get('run')} {facts.get('round')} {facts.get('attempt')}"
        if found is None or found.parties.about != about:
            raise MessageError("has sealed nothing for this secure sum (it was started again, or is of another round)")
        return found

    def _refuse_small(self, nodes: set[int], name: str) -> None:
        """Refuse a secure sum of fewer nodes than the owner demands."""
        least = self._place.policy.min_cohort
        if len(nodes) < least:
            raise MessageError(f"policy.min_cohort: '{name}' should name {least} nodes or more (got {len(nodes)})")

    def _train(self, message: Envelope) -> bytes:
        exp, memory = self._end(message)
        self._report_loss(message)
        order, client = order_of(exp, message, self._place.client), self._place.client
        if order.senders < self._place.policy.min_cohort:
            what = f"the round has {order.senders} nodes; this node requires at least {self._place.policy.min_cohort}"
            raise MessageError(f"policy.min_cohort: {what}")
        if "attempt" not in message.facts and self._place.policy.require_secure_sum:
            raise MessageError(_IN_THE_CLEAR)
        session, boxes = None, {}
        if "attempt" in message.facts:
            session = self._session_of(message)
            boxes = self._boxes_of(message, session)
        counted = self._last_counted(message)
        memory.go_to(order.round, counted if exp.algorithm.traits.mirrored else None)
        newest = memory.newest
        # Shares of common noise must add up to all of it, even if only the required number of nodes answers.
        least = whole(message.facts, "least")
        if session is not None:  # this number is known here, and does not depend on the server's word
            least = min(least, session.parties.threshold)
        order = order._replace(senders=min(order.senders, least))
        noisy = self._with_noise(exp, whole(message.facts, "run"), in_sum=session is not None)
        outcome = train_client(noisy, order, client, memory.store)
        if not self._rows_file.exists():
            disk.write_bytes(self._rows_file, self._rows.encode())
        memory.keep(order.round)
        if newest < counted and memory.has_state:
            began = f"with that after round {newest + 1}" if newest >= 0 else "anew"
            self._say(f"round {order.round + 1}: its state after round {counted + 1} is lost, so it began {began}")
        self._sent = whole(message.facts, "run"), order.round
        facts = {"round": order.round, "name": self._name}
        if session is None:
            return packed_outcome(exp, outcome, facts)
        from fedloom.deploy.secure_talk import packed_masked

        return packed_masked(exp, outcome, session, boxes, facts)

    def _boxes_of(self, message: Envelope, session: Any) -> dict[int, bytes]:
        """What the other nodes of a secure sum have sealed for this one."""
        from fedloom.deploy.secure_sum import BOX
        from fedloom.deploy.secure_talk import column_for

        boxes = column_for(session.parties, self._place.client, message, "sealed", "boxes", BOX)
        self._refuse_small({self._place.client, *boxes}, "sealed")
        return boxes

    def _report_loss(self, message: Envelope) -> None:
        """Say if the last upload did not count, which the next order tells: it was late, refused or lost."""
        run, round_ = whole(message.facts, "run"), whole(message.facts, "round")
        if self._sent is None or self._sent[0] != run or self._sent[1] >= round_:  # of another run, or done again
            return
        if self._last_counted(message) < self._sent[1]:
            why = "it was late, refused or lost; its log says which"
            self._say(f"round {self._sent[1] + 1}: the server did not count what was sent: {why}")

    def _evaluate(self, message: Envelope) -> bytes:
        exp, memory = self._end(message)
        if not exp.evaluate.personal:
            raise MessageError("evaluate.personal: no scores of nodes were agreed on, and the server asks for some")
        inquiry = inquiry_of(exp, message)
        memory.go_to(inquiry.round)
        found = evaluate_client(exp, inquiry, self._place.client, memory.store)
        scores = client_metrics("test", found)
        shown = (name for name in (f"test/{found.first}", "test/loss") if name in scores)
        self._told = "".join(f"{name} {scores[name]:.4f}, " for name in shown)
        return packed_verdicts(found, {"round": inquiry.round, "name": self._name})

    def _finish(self, message: Envelope) -> bytes:
        """Save the model with which this node predicts, so that ``fedloom predict`` finds it; it is not sent."""
        exp, memory = self._end(message)
        inquiry = inquiry_of(exp, message)
        memory.go_to(inquiry.round)
        if isinstance(inquiry.model, Tensor):
            tensors = exp.task.tensors(inquiry.model, inquiry.buffers)
        else:
            own = own_model(exp, inquiry, self._place.client, memory.store)
            tensors = exp.task.tensors(own.w[0], own.buffers[0])
        place, run = self._place, whole(message.facts, "run")
        record = self._record.model_copy(
            update={"origin": Origin(campaign=place.contract.campaign, run=run, rounds=inquiry.round)}
        )
        for folder in (place.folder / "runs" / str(run), place.folder):  # the latest is also where it is looked for
            save_own_model(folder, record, self._name, tensors, place.own.arrays.recipe)
        self._told = f"model saved: fedloom predict {place.folder} FILE; "
        return packed(Envelope("finished", {"round": inquiry.round, "name": self._name}, {}))

    _kinds = {  # noqa: RUF012
        "hello": _hello,
        "seal": _seal,
        "train": _train,
        "agree": _agree,
        "unmask": _unmask,
        "evaluate": _evaluate,
        "finish": _finish,
    }

    @property
    def _name(self) -> str:
        return self._place.contract.nodes[self._place.client]

    @cached_property
    def _terms(self) -> AgreedTerms:
        return AgreedTerms.of(self._place.contract)

    @cached_property
    def _rows(self) -> str:
        """What identifies the rows of this node, and which of them it holds out."""
        return data_fingerprint(self._place.own.arrays._replace(test=self._place.own.held_out))

    @cached_property
    def _data(self) -> str:
        """What identifies the data of this node, however it is split."""
        return data_fingerprint(self._place.own.arrays)

    def _end(self, message: Envelope) -> tuple[Experiment, Memory]:
        """This node's experiment, for the population that the server sent."""
        place, facts = self._place, message.facts
        if facts.get("campaign") != place.contract.campaign:
            raise MessageError(f"'campaign' should be {place.contract.campaign} (got {facts.get('campaign')!r})")
        try:
            population = Population(*(tuple(int(n) for n in facts["population"][part]) for part in (0, 1)))
        except (KeyError, ValueError, TypeError, IndexError) as error:
            raise MessageError("'population' should be two lists of whole numbers") from error
        if len(population.train) != len(place.contract.nodes) or len(population.test) != len(population.train):
            raise MessageError(f"'population' should have {len(place.contract.nodes)} nodes")
        run, rounds = whole(facts, "run"), place.contract.config.basics.rounds
        last = rounds - 1 if message.kind in ("seal", "train") else rounds
        if whole(facts, "round") > last:
            raise MessageError(f"'round' should be {last} at most: the experiment has {rounds} (got {facts['round']})")
        if self._built is None or self._built[0] != (population, run):
            prepared = node_end(place.contract.config, place.own, place.client, population)
            exp, self._record = prepared.experiment, record_of(prepared)
            self._limit = order_limit(exp) + SEALED_BYTES * len(place.contract.nodes) ** 2
            self._rows_file = place.folder / "runs" / str(run) / ROWS
            if self._rows_file.exists() and self._rows_file.read_text() != self._rows:
                what = "this node's rows are not those with which the run began, although there are as many"
                raise DataError(f"{what}: restore its data; other rows need a new run")
            memory = Memory(place.folder / "runs" / str(run), len(population.train))
            self._built = (population, run), exp, memory
        return self._built[1], self._built[2]

    def _last_counted(self, message: Envelope) -> int:
        """The last round of this node that counts for the server; -1 if there is none."""
        last = message.facts.get("last_received")
        if not isinstance(last, list) or len(last) != len(self._place.contract.nodes):
            raise MessageError("'last_received' should have one number for each node")
        return int(last[self._place.client])

    def _with_noise(self, exp: Experiment, run: int, *, in_sum: bool) -> Experiment:
        """The experiment with noise from a key of this node.

        A simulation draws noise at an address, so that a resumed run adds the same again. Here a repeated round may
        have another model, and the same noise on two different uploads would show their difference. So the noise of an
        upload depends on what it is added to: a node that is asked for the same upload again, by a server that lost it
        or one that hopes to average noise away, sends the same numbers, which reveal nothing new.
        A share of common noise in a secure sum is new each time: the difference of two sums can be the upload of one
        node, for which its share alone is too little.
        Sums over examples are the same in every run, but for the sign of those to be forgotten; so is their noise.
        """
        if exp.guard is None or exp.guard.key.public:
            return exp
        if exp.guard.sums is not None and exp.guard.features is None:
            key = self._kept_key()
        elif in_sum and not exp.guard.release.local:
            key = noise.fresh_key()
        else:
            key = replace(self._kept_key(self._place.contract.campaign, str(run)), by_content=True)
        return replace(exp, guard=exp.guard._replace(key=key))

    def _kept_key(self, *run: str) -> noise.Key:
        """The key of the same experiment on the same rows, perhaps of one run, or a new one.

        It is not in the node's folder, which the coordinator has made: anyone who knows the key can subtract the noise.
        """
        which = "\n".join([self._place.contract.parts["experiment"], self._name, self._data, *run])
        home = disk.state_home() / "noise" / hashlib.sha256(which.encode()).hexdigest()
        key = read_key(home)
        if key is None:
            key = noise.fresh_key()
            disk.make_folder(home)
            write_key(home, key)
        return key

    def _log(self, message: Envelope, reply: bytes) -> None:
        """One line for what is about to be sent."""
        contract = self._place.contract
        round_, run = (_number(message, name) for name in ("round", "run"))
        about = {"campaign": contract.campaign, "algorithm": contract.config.kinds["algorithm"], "run": run}
        write_audit(self._place.folder, reply, asked=message.kind[:40], round_=round_, **about)


def _number(message: Envelope, name: str) -> int | None:
    """A number that a message may have, which is not checked yet."""
    found = message.facts.get(name)
    return found if isinstance(found, int) else None


def save_own_model(
    folder: Path, record: ModelRecord, name: str, tensors: dict[str, Tensor], recipe: Recipe | None
) -> None:
    """Write the model with which a node predicts after a round, so that ``fedloom predict`` finds it in the folder."""
    rounds = "" if record.origin is None else str(record.origin.rounds)
    checkpoint.save_model(folder / COMMON, tensors, {"algorithm": record.algorithm, "round": rounds})
    record = record.model_copy(update={"personal": False, "clients": (name,), "named": True})
    disk.write_bytes(folder / RECORD, record.model_dump_json(indent=1).encode())
    if recipe is not None:
        disk.write_bytes(folder / COLUMNS, recipe.model_dump_json(indent=1).encode())


def _unknown(_node: Node, message: Envelope) -> bytes:
    raise MessageError(f"is of kind '{message.kind[:40]}', which this version does not know")
