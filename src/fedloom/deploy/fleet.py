"""The nodes of a federation as the server sees them: a message to all, and the answer of each within a deadline.

The ``Transport`` carries messages. This module decides what is asked, whether an answer is valid, and whether there are
enough of them. A node that is late, refuses or sends something wrong is named, and the round continues without it; too
few answers are an error, and the last checkpoint is not changed.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from pydantic import Field, PositiveFloat

from fedloom.core import disk
from fedloom.core.errors import FedloomError
from fedloom.core.metrics import Verdicts
from fedloom.core.schema import Spec
from fedloom.deploy.contract import AgreedTerms, Contract
from fedloom.deploy.ends import Population, population_of
from fedloom.deploy.messages import HEADER, Envelope, MessageError, packed
from fedloom.deploy.talk import (
    expected,
    inquiry_tensors,
    order_tensors,
    outcome_limit,
    outcome_of,
    verdicts_of,
    whole,
)
from fedloom.deploy.wire import ALLOWANCE, CUT_OFF
from fedloom.engine.fleet import Inquiry, Order
from fedloom.engine.local import Outcome
from fedloom.engine.state import Experiment
from fedloom.runs.loop import InterruptedRun

T = TypeVar("T")
_SHOWN = ("test/accuracy", "test/mae", "test/loss")
ROUNDS, STOP, POPULATION = "rounds.jsonl", "stop", "population.json"
_MOST_ROWS = 10**8  # of a node: the server, and every node, keep a number for each row of all nodes


class LostNodesError(FedloomError):
    """Too few nodes answered; what was saved before stays readable."""

    exit_code = 5


class Rules(Spec):
    """How long the server waits, and for how many; in ``[rules]`` of server.toml."""

    deadline: PositiveFloat = Field(
        3600.0, description="seconds that nodes have for an exchange; a secure sum takes four"
    )
    quorum: float = Field(1.0, gt=0, le=1, description="share of the nodes of a round that must answer")
    secure_sum: bool = Field(False, description="let the server learn only the sum of the uploads of a round")
    join: PositiveFloat = Field(600.0, description="seconds that the server waits for all nodes to connect")

    def needed(self, count: int) -> int:
        """How many of this many nodes must answer.

        For a secure sum more than half: otherwise some could be asked for one seed of a node, and some for the other.
        """
        share = max(1, math.ceil(count * self.quorum - 1e-9))  # 100 * 0.55 is a little more than 55
        return max(share, count // 2 + 1, 2) if self.secure_sum else share


class Failed(NamedTuple):
    """No answer from a node."""

    why: str
    late: bool = False
    answered: bool = False  # with an unexpected answer
    revoked: bool = False  # its key was revoked


class Transport(Protocol):
    """Carries messages to nodes, which are known by their numbers, and their answers back."""

    def exchange(self, data: bytes, ids: list[int], seconds: float, needed: int) -> dict[int, bytes | Failed]:
        """The answers to one message; a node that has not answered by then is late.

        Nodes that are not connected are not waited for, once ``needed`` have answered.
        """


class Replies(NamedTuple):
    """The replies to one message: valid ones, failures, and how long they took."""

    good: dict[int, Any]
    failed: dict[int, Failed]
    seconds: float


class RemoteNodes:
    """The nodes of a contract, reached through a transport; a ``Fleet`` for the engine."""

    def __init__(self, contract: Contract, transport: Transport, folder: Path, rules: Rules) -> None:
        self._contract, self._transport, self._folder, self._rules = contract, transport, folder, rules
        self.population = Population((), ())
        self._most = HEADER  # bytes that an answer may have
        self._terms = AgreedTerms.of(contract)._asdict() | {"secure_sum": rules.secure_sum}  # which every message has
        self._met: set[int] = set()  # nodes that have said in this process how many rows they have
        self.run = 0
        self._evaluated: tuple[tuple[int, tuple[int, ...]], Verdicts] | None = None
        self.say: Callable[[str], None] = lambda _: None

    # -- before the first round -------------------------------------------------------------------
    def greet(self, began: Population | None = None) -> Population:
        """Compare the contract with the nodes, and learn how many rows each has.

        All nodes that have a key must be connected; one whose key was revoked has no rows in a new run, if the quorum
        allows. ``began``: for a resumed run, the rows with which it began. Then a quorum is enough, and nodes that
        connect later are greeted then.
        """
        ids = list(range(len(self._contract.nodes)))
        self.population = began or Population((), ())
        asked = [k for k in ids if began is None or began.train[k]]
        needed = self._rules.needed(len(ids))
        replies = self._hello(asked, self._rules.join, needed if began else len(ids))
        wrong = {k: one for k, one in replies.failed.items() if one.answered or not (began or one.revoked)}
        if wrong:
            raise LostNodesError(f"the federation is not complete; {self._reasons(wrong)}")
        if len(replies.good) < needed:
            what = f"{len(replies.good)} of {len(ids)} nodes are connected, {needed} are needed (rules.quorum)"
            raise LostNodesError(f"{what}; {self._reasons(replies.failed)}")
        for client, failed in replies.failed.items():
            self.say(f"{self._contract.nodes[client]}: {failed.why}; continuing without it")
        self.population = began or population_of([replies.good.get(client, (0, 0)) for client in ids])
        return self.population

    def _hello(self, ids: list[int], seconds: float, needed: int) -> Replies:
        """Greet nodes; those that have welcomed the server may take part from now on."""

        def read(client: int, data: bytes) -> tuple[int, int]:
            rows = self._welcome(client, expected(data, "welcome", HEADER).facts)
            if self.population.train and rows != self._rows_of(client):
                raise MessageError(f"has {rows} training and test rows, the run began with {self._rows_of(client)}")
            return rows

        replies = self._ask(packed(Envelope("hello", self._terms, {})), ids, seconds, read, needed)
        self._met |= set(replies.good)
        return replies

    def _rows_of(self, client: int) -> tuple[int, int]:
        return self.population.train[client], self.population.test[client]

    def _greeted(self, ids: list[int]) -> tuple[list[int], dict[int, Failed]]:
        """Which of these nodes have answered a greeting, now or before, and why the others have not."""
        strangers = [k for k in ids if k not in self._met]
        failed = self._hello(strangers, self._rules.deadline, 0).failed if strangers else {}
        return [k for k in ids if k in self._met], failed

    def _welcome(self, client: int, facts: Mapping[str, Any]) -> tuple[int, int]:
        self._check_name(client, facts)
        train, test = whole(facts, "train"), whole(facts, "test")
        if train + test > _MOST_ROWS:
            raise MessageError(f"says that it has {train + test:,} rows, where {_MOST_ROWS:,} are the most")
        return train, test

    # -- in a round -------------------------------------------------------------------------------
    def train(self, exp: Experiment, order: Order, ids: list[int]) -> dict[int, Outcome]:
        """What the nodes of a round have sent."""
        self._stop_if_asked(order.round)
        needed = self._rules.needed(len(ids))
        there, away = self._greeted(ids)
        facts = self._facts(order.round) | {
            "senders": order.senders,
            "least": needed,
            "extra": None if order.extra is None else {str(k): order.extra[k] for k in ids},
            "last_received": self._last_received(order.round),
        }
        replies = Replies({}, {}, 0.0)
        if len(there) >= needed:
            self._most = max(self._most, self._limit(exp, order))
            replies = self._uploads(exp, order, there, needed, facts)
        replies = replies._replace(failed=replies.failed | away)
        self._log("train", order.round, ids, replies)
        if len(replies.good) < needed:
            what = f"round {order.round + 1}: {len(replies.good)} of {len(ids)} nodes answered, {needed} are needed"
            raise LostNodesError(f"{what}; {self._reasons(replies.failed)}")
        return replies.good

    def _limit(self, exp: Experiment, order: Order) -> int:
        """How many bytes an answer to an order may have."""
        return outcome_limit(exp, order)

    def _uploads(self, exp: Experiment, order: Order, ids: list[int], needed: int, facts: dict[str, Any]) -> Replies:
        """The replies to an order to these nodes, of which ``needed`` must answer."""

        def read(client: int, data: bytes) -> Outcome:
            outcome, facts = outcome_of(exp, order, data)
            self._check_answer(client, order, facts)
            return outcome

        data = packed(Envelope("train", facts, order_tensors(exp, order)))
        return self._ask(data, ids, self._rules.deadline, read, needed)

    def _check_answer(self, client: int, order: Order, facts: Mapping[str, Any]) -> None:
        self._check_name(client, facts)
        if facts.get("round") != order.round:
            raise MessageError(f"is of round {facts.get('round')!r} where {order.round} is expected")

    def evaluate(self, exp: Experiment, inquiry: Inquiry, ids: list[int]) -> Verdicts:
        """The scores of the models of the nodes that answered."""
        asked = (inquiry.round, tuple(ids))
        if self._evaluated is not None and self._evaluated[0] == asked:  # a finished run asks once more
            return self._evaluated[1]
        data = packed(Envelope("evaluate", self._facts(inquiry.round), inquiry_tensors(exp, inquiry)))
        there, away = self._greeted(ids)
        needed = self._rules.needed(len(ids))  # nodes that are not connected are waited for, as in training
        replies = self._ask(
            data, there, self._rules.deadline, lambda client, reply: verdicts_of(exp, inquiry, client, reply), needed
        )
        replies = replies._replace(failed=replies.failed | away)
        self._log("evaluate", inquiry.round, ids, replies)
        self._evaluated = asked, Verdicts.cat([replies.good[client] for client in sorted(replies.good)])
        return self._evaluated[1]

    def evaluated(self, round_: int) -> tuple[int, int]:
        """How many nodes have evaluated their models after this round, and how many were asked to."""
        if self._evaluated is None or self._evaluated[0][0] != round_:
            return 0, 0
        return len(self._evaluated[1].ids), len(self._evaluated[0][1])

    def finish(self, exp: Experiment, inquiry: Inquiry) -> dict[int, Failed]:
        """Let every node save the model with which it predicts; returns those that did not."""
        data = packed(Envelope("finish", self._facts(inquiry.round), inquiry_tensors(exp, inquiry)))
        ids = [k for k, size in enumerate(self.population.train) if size]
        there, away = self._greeted(ids)
        replies = self._ask(data, there, self._rules.deadline, lambda _, reply: expected(reply, "finished", HEADER))
        replies = replies._replace(failed=replies.failed | away)
        self._log("finish", inquiry.round, ids, replies)
        return replies.failed

    # -- all of these -----------------------------------------------------------------------------
    def _facts(self, round_: int) -> dict[str, Any]:
        where = {"campaign": self._contract.campaign, "run": self.run, "round": round_}
        return self._terms | where | {"population": [list(self.population.train), list(self.population.test)]}

    def _ask(
        self, data: bytes, ids: list[int], seconds: float, read: Callable[[int, bytes], T], needed: int = 0
    ) -> Replies:
        (self._folder / CUT_OFF).unlink(missing_ok=True)  # of the last message
        disk.write_bytes(self._folder / ALLOWANCE, str(self._most).encode())
        began = time.monotonic()
        good: dict[int, T] = {}
        failed: dict[int, Failed] = {}
        answers = self._transport.exchange(data, ids, seconds, needed)
        for client in list(answers):
            answer = answers.pop(client)  # free large ones as early as possible
            if isinstance(answer, Failed):
                failed[client] = answer
                continue
            try:
                good[client] = read(client, answer)
            except MessageError as error:
                failed[client] = Failed(str(error), answered=True)
        return Replies(good, failed, time.monotonic() - began)

    def _check_name(self, client: int, facts: Mapping[str, Any]) -> None:
        if facts.get("name") != self._contract.nodes[client]:
            raise MessageError(f"claims to be {str(facts.get('name'))[:60]!r}, but its key belongs to another node")

    def _reasons(self, failed: Mapping[int, Failed]) -> str:
        return "; ".join(f"{self._contract.nodes[k]}: {failed[k].why}" for k in sorted(failed))

    def _log(self, kind: str, round_: int, ids: list[int], replies: Replies) -> None:
        """One line for each exchange, for ``fedloom deploy status`` and for a server that starts again."""
        names = self._contract.nodes
        late = [names[k] for k in sorted(replies.failed) if replies.failed[k].late]
        failed = {names[k]: replies.failed[k].why for k in sorted(replies.failed) if not replies.failed[k].late}
        line = {
            "run": self.run,
            "round": round_,
            "kind": kind,
            "asked": [names[k] for k in ids],
            "answered": [names[k] for k in sorted(replies.good)],
            "late": late,
            "failed": failed,
            "seconds": round(replies.seconds, 3),
        }
        disk.append_line(self._folder / ROUNDS, json.dumps(line).encode())
        for name, why in [*((name, "is late") for name in late), *failed.items()]:
            self.say(f"{kind}, round {round_ + (kind == 'train')}: {name}: {why}")

    def _last_received(self, round_: int) -> list[int]:
        """The last round of every node before this one that counts; -1 if there is none."""
        rounds = {  # of a repeated round, the last time counts
            line["round"]: line["answered"]
            for line in read_rounds(self._folder)
            if line["kind"] == "train" and line["run"] == self.run and line["round"] < round_
        }
        last = {
            name: max((r for r, names in rounds.items() if name in names), default=-1) for name in self._contract.nodes
        }
        return [last[name] for name in self._contract.nodes]

    def _stop_if_asked(self, round_: int) -> None:
        """Between two rounds, when everything has been saved."""
        if (self._folder / STOP).exists():
            (self._folder / STOP).unlink()
            raise InterruptedRun(self._folder / "runs" / str(self.run), round_)


def write_population(folder: Path, run: int, population: Population) -> None:
    """Record the numbers of rows with which a run began, in case it is resumed while a node is away."""
    disk.write_bytes(folder / POPULATION, json.dumps({"run": run, **population._asdict()}).encode() + b"\n")


def read_population(folder: Path, run: int) -> Population | None:
    """The numbers of rows with which a run began; None if not recorded."""
    try:
        found = json.loads((folder / POPULATION).read_bytes())
        return Population(tuple(found["train"]), tuple(found["test"])) if found["run"] == run else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def read_rounds(folder: Path) -> Iterator[dict[str, Any]]:
    """The lines of a server's log of exchanges; one that a crash cut short is left out."""
    path = folder / ROUNDS
    for line in path.read_bytes().split(b"\n")[:-1] if path.exists() else []:
        yield json.loads(line)


def shown_metrics(line: Mapping[str, Any]) -> dict[str, float]:
    """Of an evaluation, what a line about a round shows."""
    return {name: value for name, value in line.items() if name.endswith(_SHOWN)}


def last_inquiry(exp: Experiment, state: Any) -> Inquiry:
    """What nodes need to compute, or to receive, the model with which they predict."""
    alg = exp.algorithm
    common = alg.family in ("server", "closed_form") and alg.traits.has_global_model
    model = alg.global_model(state.server) if common else ()
    with torch.no_grad():
        return Inquiry(state.round, exp.sent(state.server), state.buffers, model)
