"""The nodes of a federation for a server that learns only sums: four exchanges in a round instead of one."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedloom.deploy.contract import Contract
from fedloom.deploy.fleet import LostNodesError, RemoteNodes, Replies, Rules, Transport
from fedloom.deploy.keys import certified_key
from fedloom.deploy.messages import Envelope, MessageError, packed
from fedloom.deploy.secure_sum import BOX, CODE, Parties, Sealed, unmasked
from fedloom.deploy.secure_talk import (
    codes_of,
    masked_of,
    outcomes_of,
    sealed_of,
    secure_limit,
    shares_of,
    table_of_all,
)
from fedloom.deploy.talk import order_tensors
from fedloom.engine.fleet import Order
from fedloom.engine.state import Experiment


class SecureNodes(RemoteNodes):
    """The nodes of a contract; the server learns only the sum of their uploads."""

    def __init__(self, contract: Contract, transport: Transport, folder: Path, rules: Rules) -> None:
        super().__init__(contract, transport, folder, rules)
        self._seals: dict[int, str] = {}  # the certificate of each node

    def _welcome(self, client: int, facts: Mapping[str, Any]) -> tuple[int, int]:
        if not isinstance(facts.get("seal"), str):
            raise MessageError("has no certificate for secure sums (seal.crt); make one with: fedloom deploy renew")
        # The others would refuse a sum with a wrong certificate: here only the node that has it is left out.
        certified_key(facts["seal"], (self._folder / "ca.crt").read_bytes(), self._contract.nodes[client])
        self._seals[client] = str(facts["seal"])
        return super()._welcome(client, facts)

    def _limit(self, exp: Experiment, order: Order) -> int:
        return secure_limit(exp, order, len(self._contract.nodes))

    def _uploads(self, exp: Experiment, order: Order, ids: list[int], needed: int, facts: dict[str, Any]) -> Replies:
        attempt = secrets.token_hex(16)
        about = f"{self._contract.campaign} {self.run} {order.round} {attempt}"
        parties = Parties(about, tuple(ids), needed, self._contract.nodes)

        def ask(kind: str, more: dict[str, Any], to: list[int], read: Callable[..., Any], tensors: Any = ()) -> Replies:
            message = packed(Envelope(kind, facts | {"attempt": attempt} | more, dict(tensors)))
            # Each exchange has the full deadline: a node that is lost in one of them must not shorten the next.
            deadline = self._rules.deadline
            return self._ask(message, to, deadline, lambda k, data: self._checked(k, order, read(k, data)), needed)

        seals = {str(k): self._seals[k] for k in ids}
        asked = {"members": ids, "threshold": needed, "seals": seals}
        first = ask("seal", asked, ids, lambda k, data: sealed_of(parties, k, data))
        sealed: dict[int, Sealed] = first.good
        if len(sealed) < needed:
            return first._replace(good={})
        boxes = table_of_all(parties, {k: one.boxes for k, one in sealed.items()}, BOX)
        tensors = order_tensors(exp, order) | {"boxes": boxes}
        second = ask(
            "train", {"sealed": sorted(sealed)}, sorted(sealed), lambda _, data: masked_of(exp, order, data), tensors
        )
        found = Replies(second.good, first.failed | second.failed, first.seconds + second.seconds)
        if len(found.good) < needed:
            return found
        arrived = sorted(found.good)
        where = f"round {order.round + 1}: the masks of {len(arrived)} uploads cannot be taken away"

        def enough(of: Replies, did: str) -> Replies:
            if len(of.good) < needed:
                what = f"{len(of.good)} of {len(arrived)} nodes {did}, {needed} are needed"
                raise LostNodesError(f"{where}: {what}; {self._reasons(of.failed)}")
            return of

        third = ask("agree", {"left": arrived}, arrived, lambda _, data: codes_of(parties, data))
        agreed = sorted(enough(third, "vouched for them").good)
        codes = {"codes": table_of_all(parties, third.good, CODE)}
        fourth = ask("unmask", {"agreed": agreed}, agreed, lambda _, data: shares_of(list(sealed), data), codes)
        given = enough(fourth._replace(failed=third.failed | fourth.failed), "gave their shares").good
        try:
            total = unmasked(parties, {k: found.good[k].words for k in arrived}, sealed, given)
            outcomes = outcomes_of(exp, order, total, found.good)
        except MessageError as error:
            raise LostNodesError(f"{where}: {error}") from error
        return found._replace(good=outcomes, seconds=found.seconds + third.seconds + fourth.seconds)

    def _checked(self, client: int, order: Order, answer: tuple[Any, dict[str, Any]]) -> Any:
        """The content of an answer, if it comes from this node and belongs to this round."""
        found, facts = answer
        self._check_answer(client, order, facts)
        return found
