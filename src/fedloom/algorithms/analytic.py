"""AFL, analytic federated learning: the head of a frozen net in closed form, from one pass and one upload.

He et al., AFL: A Single-Round Analytic Approach for Federated Learning with Pre-trained Models, CVPR 2025. It is not
*agnostic* federated learning (Mohri et al., 2019), which has the same initials.

    client i:  G_i = X_i' X_i,  B_i = X_i' Y_i,  once      X: features of the frozen body, Y: one-hot labels
    server:    W = (sum_i G_i + rho I)^-1 sum_i B_i        over all clients that have sent so far; the head of the net

W is that of one machine with all the data, for any partition, number of clients and order; with
``partition.holdout = 0``, since the partition also decides which rows are held out.
A client that takes part again is not counted twice, and a late one is added. A client to be forgotten (``forget``, or
``fedloom resume RUN --forget CLIENT`` after a run has ended) sends its statistics once more, to be subtracted: the
result is as if it had never taken part.

``agg``
    sum            as above: the server needs only the sum of uploads, so that secure aggregation suffices.
    aa             AFL's law of absolute aggregation, pair by pair: W = K_u W_u + K_v W_v of clients' own
                   W_i = C_i^-1 B_i, C_i = G_i + rho_loc I; then rho_loc is removed. It loses up to seven digits.
    aa_simplified  the same, as W = (C_u + C_v)^-1 (C_u W_u + C_v W_v).
    eq29, eq32, eq35   K_u and K_v as LAW-AFL prints them, none of which gives W. They are included to be measured.

With R = C^-1 and S = C_u + C_v, and K_v likewise:
    aa     K_u = I - R_u C_v + R_u C_v S^-1 C_v, which is S^-1 C_u
    eq29   K_u = I - R_u C_v S^-1 C_v             the middle term is missing, and the last sign is wrong
    eq32   K_u = I - R_u C_v - R_u C_v S^-1 C_v   the last sign is wrong
    eq35   K_u = I - R_u C_v S^-1                 its last factor C_u is missing, with which it is right

All but the first need every upload, at K times the memory. W_i is solved for at the server: (W_i, C_i) and (G_i, B_i)
follow from each other and take the same bytes. AFL's code removes rho_loc times the
number of configured clients; here it is that of the clients merged.

With ``privacy.feature_clip`` clients clip features to the norm R before they sum, and send G + E and B + F, E and F
of deviation sigma, and no counts. The server makes the sum of G positive semidefinite and adds a ridge of at least
k sigma' sqrt(d) (``noise_ridge``), sigma' being the deviation in the sum. Features are clipped in the sums but not in
predictions: this changes no predicted class, and increases the loss.

d features and C classes are d (d + 1) / 2 + d C numbers of 8 bytes from each client: 1.1 MB for 512 and 10, 67.4 MB for
4,096. The server keeps one such sum (``sum``) and solves once, in d^3 / 3 multiplications. MNIST with 4,096 random
features took 39 s on two cores and 2.4 GB with 100 clients, for 96.9 %.

The features are the outputs of the net's ``body``: pixels (``model.kind=logistic``), random features
(``model.kind=random_features``), the body of an earlier run or of your own net (``model.weights``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from typing import Annotated, Any, Literal, NamedTuple, Self

import torch
from pydantic import Field, NonNegativeFloat, NonNegativeInt, model_validator
from torch import Tensor

from fedloom.algorithm import (
    Algorithm,
    Configures,
    Contributes,
    Costs,
    Diagnoses,
    ForeseesUploads,
    HasPhases,
    Inbox,
    Nothing,
    OwnStatistics,
    Phase,
    PrivateSums,
    Setup,
    Surveys,
    Traits,
    Unlearns,
    Work,
)
from fedloom.core import tree
from fedloom.core.errors import ConfigError, Fault, outside
from fedloom.core.schema import GIVEN, other_than, when
from fedloom.core.task import Batch
from fedloom.maths.as_printed import merge_as_printed
from fedloom.maths.linear_head import body_features, check_head, feature_count, with_head
from fedloom.maths.merging import Solution, merge, merge_product, own_solution, remove_ridge, scaled
from fedloom.maths.private_sums import clipped_features, mixed_noise, noise_ridge, private_head
from fedloom.maths.ridge import (
    Statistics,
    default_ridge,
    from_rows,
    no_statistics,
    sent_statistics,
    solve,
    statistics,
    to_rows,
    with_ridge,
)

_NEVER, _COUNTS, _FORGOTTEN = 0, 1, 2  # the status of a client at the server
_MERGES: dict[str, Callable[[Solution, Solution], Solution]] = {
    "aa": merge_product,
    "aa_simplified": merge,
    "eq29": partial(merge_as_printed, form="eq29"),
    "eq32": partial(merge_as_printed, form="eq32"),
    "eq35": partial(merge_as_printed, form="eq35"),
}


class Server(NamedTuple):
    w: Tensor  # [P] the net with its head
    rows: Tensor  # [d (d + 1) / 2 + d C] the sums of G and B, in float64
    counts: Tensor  # [C] examples of each class in them
    standing: Tensor  # [N] of each client
    head: Tensor  # [d, C] W, in float64
    merged: Tensor  # [d, C] by ``aa``, W before the intermediary ridge is removed; else [0, C]


class AnalyticUpload(NamedTuple):
    rows: Tensor  # [d (d + 1) / 2 + d C] packed G and B; negative if they are to be subtracted; empty if not requested
    counts: Tensor  # [C]


class Analytic(
    Algorithm[Server, Nothing, AnalyticUpload],
    Surveys,
    HasPhases,
    OwnStatistics,
    PrivateSums,
    Unlearns,
    Diagnoses,
    Contributes,
    Costs,
    ForeseesUploads,
    Configures,
):
    family = "closed_form"

    ridge: NonNegativeFloat = Field(
        1e-3, description="rho in units of the mean eigenvalue of the sum of G; 0 is as published, and of least norm"
    )
    bias: bool = Field(False, description="give the head a bias, as a constant feature; the paper has none")
    agg: Literal["sum", "aa", "aa_simplified", "eq29", "eq32", "eq35"] = Field(
        "sum", description="how clients are merged: see above"
    )
    ri_ridge: Annotated[NonNegativeFloat, when(agg=other_than("sum", "aa_simplified"))] = Field(
        1.0, description="rho_loc, the intermediary ridge"
    )
    forget: tuple[NonNegativeInt, ...] = Field(
        (), description="clients that are forgotten in the first round in which they take part a second time"
    )
    noise_ridge: Annotated[NonNegativeFloat, when({"privacy.feature_clip": GIVEN}, agg="sum")] = Field(
        0.5, description="with privacy: k, the least ridge in units of sigma sqrt(d), half the norm of the noise in G"
    )

    @model_validator(mode="after")
    def _solvable(self) -> Analytic:
        if self.agg not in ("sum", "aa_simplified") and not self.ri_ridge:
            raise ValueError(f"agg = '{self.agg}' inverts each client's Gram matrix, and needs ri_ridge > 0")
        return self

    @property
    def traits(self) -> Traits:
        return super().traits._replace(distinct=True, each_upload=self.agg != "sum", weighs_examples=False)

    def bind(self, setup: Setup) -> Self:
        check_head(setup.task, self.bias)
        clients = len(setup.sizes)
        faults = outside("algorithm.forget", "client", self.forget, clients) if clients else []
        if faults:
            raise ConfigError(faults)
        return super().bind(setup)

    def against_noise(self, local: bool) -> list[Fault]:
        faults = []
        if self.agg != "sum":
            what = f"inverts each client's own Gram matrix, which noise makes indefinite (got '{self.agg}')"
            faults.append(Fault("algorithm.agg", what, "set algorithm.agg=sum"))
        if self.forget and not local:
            what = "a client to be forgotten sends its sums alone, without those of others to hide its examples"
            faults.append(Fault("algorithm.forget", what, "set privacy.mechanism=local"))
        return faults

    def defaults(self) -> Mapping[str, Mapping[str, Any]]:
        return {"cohort": {"sampling": "all"}}

    @property
    def lane_size(self) -> int:
        d, classes = feature_count(self.task, self.bias), self.task.linear_head.out_features
        return 2 * (d * d + d * classes)  # a number in float64 takes two of float32

    @property
    def feature_norm(self) -> float | None:
        """R, to which features are clipped before they are summed; None if sums are not private."""
        return None if self.noise is None else self.noise.norm

    def phases(self) -> tuple[Phase, ...]:
        return ()

    def init(self, w: Tensor) -> Server:
        d, classes = feature_count(self.task, self.bias), self.task.linear_head.out_features
        none = Statistics(*(x.to(w.device) for x in no_statistics(d, classes)))
        standing = torch.full((len(self.setup.sizes),), _NEVER, dtype=torch.uint8, device=w.device)
        merged = torch.zeros_like(none.cross if self.traits.each_upload else none.cross[:0])
        return Server(w, to_rows(none), none.counts, standing, none.cross, merged)

    def send(self, server: Server) -> Server:
        """The net, and which clients are to send statistics: a client reads its own entry; empty if none."""
        asked = server.standing if bool(self.turns(server.standing).any()) else server.standing[:0]
        return Server(server.w, server.rows[:0], server.counts[:0], asked, server.head[:0], server.merged[:0])

    def sent_bytes(self, down: Server) -> int:
        return down.w.numel() * down.w.element_size()

    def upload_bytes(self, uploads: AnalyticUpload) -> int:
        """The triangle of G and B, of each client that sends them."""
        sent = int(sent_statistics(uploads.rows, uploads.counts).sum()) if uploads.rows.numel() else 0
        return sent * uploads.rows.shape[-1] * uploads.rows.element_size()

    def foresee_uploads(self, server: Server, ids: Tensor) -> tuple[int, Server]:
        standing = self.after(server.standing, ids)
        return int((standing != server.standing).sum()) * tree.nbytes(server.rows), server._replace(standing=standing)

    def survey(self, batch: Batch, down: Server, mine: Nothing) -> Any:
        if not len(down.standing):
            return batch.mask[:0]
        classes = self.task.linear_head.out_features
        x = clipped_features(body_features(self.task, down.w, batch.x, batch.buffers, self.bias), self.feature_norm)
        return statistics(x, batch.y, classes, batch.mask)

    def finish(self, x: Tensor, down: Server, mine: Nothing, work: Work) -> tuple[AnalyticUpload, Nothing]:
        if not len(down.standing):
            return AnalyticUpload(down.rows, down.rows), ()
        turn = self.turns(down.standing).gather(0, work.client[None])
        return AnalyticUpload(turn * to_rows(work.survey), turn * work.survey.counts), ()

    def update(self, server: Server, inbox: Inbox[AnalyticUpload]) -> Server:
        standing = self.after(server.standing, inbox.clients)
        if torch.equal(standing, server.standing):
            return server
        if not bool((standing == _COUNTS).any()):  # no client is left, and no rounding error should be
            empty = self.init(self.task.w0)
            return empty._replace(w=with_head(self.task, server.w, empty.head), standing=standing)
        rows, counts = server.rows + inbox.total.rows, server.counts + inbox.total.counts
        gram, cross = from_rows(rows, len(counts))
        rho = default_ridge(gram, self.ridge)
        if self.noise is not None and self.noise.std:
            head, merged = self.despite(self.noise.std, gram, cross, standing), server.merged
        elif self.agg == "sum":
            head, merged = solve(gram, cross, rho), server.merged
        else:
            whole = self.absolute(server, inbox.uploads.rows, self.turns(server.standing)[inbox.clients])
            head, merged = remove_ridge(whole, float(rho)), whole.head
        return Server(with_head(self.task, server.w, head), rows, counts, standing, head, merged)

    def despite(self, std: float, gram: Tensor, cross: Tensor, standing: Tensor) -> Tensor:
        """The head from sums in which each counted client has noise of this deviation."""
        sigma = mixed_noise(std, (standing == _COUNTS).double())
        least = noise_ridge(sigma, len(gram), self.noise_ridge)
        return private_head(gram, cross, max(least, float(default_ridge(gram, self.ridge))))

    def statistics(self, before: Tensor, mean: Tensor, server: Server) -> Tensor:
        return before  # the body is frozen, and so are its statistics

    def contributions(self, before: Server, inbox: Inbox[AnalyticUpload], after: Server) -> Tensor:
        return (self.setup.sizes.to(after.w.device) * (after.standing == _COUNTS))[inbox.clients]

    def diagnostics(self, before: Server, inbox: Inbox[AnalyticUpload], after: Server) -> dict[str, Tensor]:
        found = {"analytic/clients": (after.standing == _COUNTS).sum()}
        if self.noise is None:  # otherwise the server does not know
            found["analytic/examples"] = after.counts.sum() / inbox.examples
        return found

    def cannot_forget(self, server: Server, clients: Sequence[int]) -> str:
        why = {_NEVER: "has sent nothing yet", _FORGOTTEN: "is forgotten already"}
        found = [f"client {i} {why[s]}" for i in clients if (s := int(server.standing[i])) in why]
        return found[0] if found else ""

    def turns(self, standing: Tensor) -> Tensor:
        """The factor of each client's statistics if it takes part: 1 to join, -1 to leave, else 0.  ``[N]``"""
        asks = torch.zeros_like(standing, dtype=torch.bool)
        asks[list(self.forget)] = True
        return (standing == _NEVER).double() - (asks & (standing == _COUNTS)).double()

    def after(self, standing: Tensor, clients: Tensor) -> Tensor:
        """The status of clients after these have joined, or left.  ``[N]``"""
        came = torch.zeros_like(standing, dtype=torch.bool).index_fill(0, clients, True)
        turns = torch.where(came, self.turns(standing), 0.0)
        return standing.masked_fill(turns > 0, _COUNTS).masked_fill(turns < 0, _FORGOTTEN)

    def absolute(self, server: Server, rows: Tensor, turns: Tensor) -> Solution:
        """All merged with the clients of the round ``[K, ...]``, one by one; one that leaves has the weight -1."""
        classes, already = len(server.counts), int((server.standing == _COUNTS).sum())
        parts = []
        if already:
            ridge = already * self.ri_ridge
            parts.append(Solution(server.merged, with_ridge(from_rows(server.rows, classes)[0], ridge), ridge))
        for row, turn in zip(rows, turns.tolist(), strict=True):
            if turn:
                own = Statistics(*from_rows(turn * row, classes), server.counts)
                parts.append(scaled(own_solution(own, self.ri_ridge), turn))
        return reduce(_MERGES[self.agg], parts)
