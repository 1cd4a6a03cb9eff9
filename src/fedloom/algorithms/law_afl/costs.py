"""The bytes of LAW-AFL's uploads: models in rounds that train, and statistics once, or in every round."""

from __future__ import annotations

from torch import Tensor

from fedloom.algorithms.law_afl.schedules import Schedule
from fedloom.algorithms.law_afl.settings import LawAFLSettings
from fedloom.algorithms.law_afl.state import LawAFLServer, LawAFLUpload
from fedloom.core import tree
from fedloom.core.task import Task
from fedloom.maths.linear_head import feature_count
from fedloom.maths.ridge import sent_statistics, statistics_bytes


def bytes_of(how: LawAFLSettings, parts: Tensor, uploads: LawAFLUpload) -> int:
    """What these stacked uploads cost; ``parts`` [P] is the part of the net that each parameter belongs to."""
    each = uploads.rows.shape[-1] * uploads.rows.element_size() + _claims(how)
    sent = int(sent_statistics(uploads.rows, uploads.counts).sum()) if uploads.rows.numel() else 0
    moved = tree.nbytes(uploads.dw)
    if uploads.depth.numel():
        moved = int((parts <= uploads.depth).sum()) * uploads.dw.element_size()
    return moved + sent * each + tree.nbytes(uploads.slope)


def foreseen(
    how: LawAFLSettings, rounds: Schedule, task: Task, server: LawAFLServer, ids: Tensor
) -> tuple[int, LawAFLServer]:
    """What these clients will send, as if each trained the whole net and all statistics were plausible, and the
    server that then knows them."""
    round_, registry = float(server.t), server.registry
    size, each = 0, statistics_bytes(feature_count(task, how.bias), task.linear_head.out_features)
    if rounds.trains_in(round_):
        slope = server.w.element_size() if how.shrink_rule == "eq5" else 0
        size += len(ids) * (tree.nbytes(server.w) + slope)
    if rounds.asks_in(round_):
        size += int((~registry.known[ids]).sum()) * (each + _claims(how))
        if rounds.keeps_statistics:
            registry = registry._replace(known=registry.known.index_fill(0, ids, True))
    return size, server._replace(registry=registry)


def _claims(how: LawAFLSettings) -> int:
    """Accuracy and loss, if clients report them."""
    return 16 if how.quality == "report" else 0
