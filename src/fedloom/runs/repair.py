"""Resuming a run whose metrics.jsonl is damaged."""

from __future__ import annotations

from fedloom.engine import checkpoint
from fedloom.runs.folder import DAMAGED, METRICS, Checksums, RunFolder


def ways_out(folder: RunFolder, done: int) -> str:
    """How to resume a run whose metrics are damaged before the checkpoint after ``done`` rounds."""
    known = checkpoint.readable(folder.checkpoints).items()
    before = [r for r, meta in known if r < done and not folder.fault(meta["lengths"])]
    back = [f"fedloom resume {folder.path} --from {r} goes back to before the damage" for r in before[-1:]]
    return "; ".join(["", *back, f"fedloom resume {folder.path} --repair continues without the damaged lines"])


def repaired(folder: RunFolder, loaded: checkpoint.Loaded) -> tuple[checkpoint.Loaded, str]:
    """Remove damaged lines from the metrics, and report it.

    After a crash in between, metrics and checkpoint disagree, which can be repaired in the same way.
    """
    kept, all_of_them = folder.intact_lines(loaded.lengths), len(loaded.lengths.get(f"{METRICS} lines", "")) // 8
    lengths = Checksums(kept).lengths()
    checkpoint.rewrite_lengths(folder.checkpoints, loaded.state.round, lengths)
    folder.mend(kept)
    kept_words = f"{len(kept)} of {all_of_them} lines are kept; the original is in {DAMAGED}"
    return loaded._replace(lengths=lengths), f"metrics.jsonl was damaged: {kept_words}"
