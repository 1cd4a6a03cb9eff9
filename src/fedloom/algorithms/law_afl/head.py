"""LAW-AFL's head: solved from clients' statistics, whose weights are learned through the solve."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from fedloom.algorithm import Held, Noise
from fedloom.algorithms.law_afl.settings import LawAFLSettings
from fedloom.algorithms.law_afl.state import ClientWeights, LawAFLServer, LawAFLUpload, example_counts, with_learned
from fedloom.core import tree
from fedloom.core.task import Task
from fedloom.maths.data_quality import ProxyScores, data_quality, proxy_scores, quality_weights
from fedloom.maths.learned_heads import HeadClients, HeadSettings, LearnedHead, cross_validated_head, two_folds
from fedloom.maths.linear_head import feature_count
from fedloom.maths.private_sums import clipped_features, mixed_noise, noise_ridge, psd
from fedloom.maths.proxy_set import ProxyFeatures, proxy_features
from fedloom.maths.registry import statistics_faults
from fedloom.maths.ridge import (
    Statistics,
    default_ridge,
    from_rows,
    pack_symmetric,
    ridge_path,
    sent_statistics,
    solve,
)
from fedloom.maths.weighted_ridge import one_part, projection, sketched, squared_error, weighted_head

_RIDGES = tuple(10.0**k for k in range(-6, 1))


class SolvedHead(NamedTuple):
    """A head, and the weights from which learning began."""

    learned: LearnedHead
    lam0: Tensor  # [K]

    def noted(self, server: LawAFLServer, ids: Tensor) -> LawAFLServer:
        """The server with the weights of the statistics of these clients."""
        statistics: ClientWeights = with_learned(server.statistics, ids, self.learned.how, self.lam0)
        return server._replace(
            statistics=statistics,
            temperature=self.learned.temperature,
            freedom=server.freedom.new_tensor(1 / (1 + self.learned.beta)),
        )


class HeadSolver(NamedTuple):
    """Everything that turns statistics into a head."""

    task: Task
    proxy: Held
    noise: Noise | None
    how: LawAFLSettings

    @property
    def settings(self) -> HeadSettings:
        return self.how.head_settings

    @property
    def classes(self) -> int:
        return self.task.linear_head.out_features

    @property
    def of_means(self) -> bool:
        """Whether clients send means over their examples, to hide how many they have."""
        return self.noise is not None and self.noise.of_means

    def features(self, w: Tensor) -> ProxyFeatures:
        """Features of the proxy examples, clipped like those of clients, and their labels."""
        x, y = proxy_features(self.task, w, self.proxy, self.how.bias)
        return clipped_features(x, None if self.noise is None else self.noise.norm), y

    def plausible(self, uploads: LawAFLUpload) -> Tensor:
        """Which uploads contain statistics that can be sums over examples.  ``[K]``"""
        holds = sent_statistics(uploads.rows, uploads.counts)
        last = feature_count(self.task, True) - 1 if self.how.bias else None
        norm, std, cross_std, _ = self.noise or (None, 0.0, 0.0, False)
        wrong = partial(statistics_faults, bias=last, norm=norm, noise=max(std, cross_std))
        each = zip(uploads.rows, uploads.counts, holds.tolist(), strict=True)
        possible = [
            here and (not self.how.verify or not wrong(Statistics(*from_rows(row, self.classes), n)))
            for row, n, here in each
        ]
        return torch.tensor(possible, device=holds.device)

    # -- lambda0 ---------------------------------------------------------------------------------------
    def first_weights(self, w: Tensor, rows: Tensor, counts: Tensor, claims: Tensor) -> Tensor:
        """lambda0 of clients with these normalised statistics.  ``[K]``"""
        sizes = self.examples(counts)
        if self.how.quality == "size":
            return sizes / sizes.sum()
        accuracy, loss = claims.T if self.how.quality == "report" else self.measured(w, rows, counts)
        by = sizes if self.how.size_factor else None
        return quality_weights(data_quality(counts), accuracy, loss, by)

    def examples(self, counts: Tensor) -> Tensor:
        """How many examples clients have, as far as the server knows: one each if they send means.  ``[K]``"""
        return torch.ones_like(counts[:, 0]) if self.of_means else example_counts(counts)

    def measured(self, w: Tensor, rows: Tensor, counts: Tensor) -> ProxyScores:
        """The quality of each client's own head on the proxy examples of the classes that it has."""
        x, y = self.features(w)
        logits = []
        for row in rows:
            gram, cross = from_rows(row.double(), self.classes)
            rho = default_ridge(gram, 1e-3 if self.how.ridge == "grid" else self.how.ridge)
            logits.append(self.settings.temperature * x @ solve(gram, cross, rho))
        return proxy_scores(torch.stack(logits), y, counts)

    # -- the system that is solved -----------------------------------------------------------------
    def system(self, w: Tensor, rows: Tensor, counts: Tensor, lam0: Tensor) -> HeadClients:
        """The linear system of these statistics: the ridge follows their scale and the noise in them."""
        gram, cross = from_rows(tree.mix(lam0[None], rows)[0], self.classes)
        share = self.how.ridge
        ridge = self.best_ridge(w, gram, cross) if share == "grid" else float(default_ridge(gram, share))
        if self.noise is not None and self.noise.std:
            sigma = mixed_noise(self.noise.std, lam0 / self.examples(counts))
            ridge = max(ridge, noise_ridge(sigma, len(gram), self.how.noise_ridge))
            lift = pack_symmetric(psd(gram) - gram)
            rows = torch.cat([rows[:, : len(lift)] + lift, rows[:, len(lift) :].double()], 1)
        return HeadClients(rows, lam0, ridge, self.classes)

    def best_ridge(self, w: Tensor, gram: Tensor, cross: Tensor) -> float:
        """The ridge of least squared error on the proxy examples; the largest of equals."""
        ridges = [float(default_ridge(gram, r)) for r in reversed(_RIDGES)]
        heads = ridge_path(gram, cross, ridges)[None]
        losses = squared_error(heads, torch.zeros_like(heads[..., 0, 0]), one_part(self.features(w))).value
        return ridges[int(losses.argmin())]

    # -- learning through the solve ----------------------------------------------------------------
    def learn(self, server: LawAFLServer, clients: HeadClients, ids: Tensor, address: tuple[int, int]) -> SolvedHead:
        """lambda, gamma and s through the solve, under the chosen strength of the prior."""
        proxy = self.features(server.w)
        offsets = server.statistics.offsets[ids] if self.how.persist else None
        folds, wide = two_folds(proxy[1], *address), proxy[0].shape[1]
        if self.how.sketch is None or self.how.sketch >= wide:
            found = cross_validated_head(clients, proxy, folds, self.settings, offsets, self.task.recorder())
            return SolvedHead(found, clients.lam0)
        p = projection(wide, self.how.sketch, address[0]).to(proxy[0].device)
        small = sketched(clients.rows, p, self.classes)
        # The mean eigenvalue of P'GP is larger by this factor, as its trace is that of G.
        fewer = clients._replace(rows=small, ridge=clients.ridge * wide / self.how.sketch)
        seen = proxy[0] @ p, proxy[1]
        found = cross_validated_head(fewer, seen, folds, self.settings, offsets, self.task.recorder())
        head = weighted_head(clients.rows, found.how.mu, clients.ridge, self.classes).head
        return SolvedHead(found._replace(head=found.temperature * head), clients.lam0)
