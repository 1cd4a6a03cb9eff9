"""A comparison in the layout of a paper's table, for LaTeX."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from fedloom.report.comparison.latex import tex
from fedloom.report.comparison.sheet import Sheet
from fedloom.report.comparison.sheet_text import Word, legend, lines


def latex(found: Sheet) -> str:
    """One tabular; the keys of the columns are lines of its header."""
    out = [
        "% needs \\usepackage{booktabs}",
        *(f"% {note}" for note in [*legend(found), *found.remarks]),
        f"\\begin{{tabular}}{{l{'c' * len(found.columns)}}}",
        "\\toprule",
        *_heads(found),
    ]
    for block in found.blocks:
        out.append("\\midrule")
        if block.title:
            out.append(f"\\multicolumn{{{len(found.columns) + 1}}}{{l}}{{{tex(block.title)}}} \\\\")
        for line in lines(found, block):
            label = f"\\quad \\emph{{{line.label}}}" if line.is_paper else tex(line.label)
            out.append(" & ".join([label, *(_tex_cell(words) for words in line.cells)]) + " \\\\")
    return "\n".join([*out, "\\bottomrule", "\\end{tabular}", ""])


def _heads(found: Sheet) -> list[str]:
    """The labels of the columns, level by level; a label that neighbours share is printed once above them."""
    out = []
    for level in range(len(found.layout.columns)):
        first = tex(found.layout.rows) if level == len(found.layout.columns) - 1 else ""
        words = [first]
        for shared, group in itertools.groupby(column[: level + 1] for column in found.columns):
            wide, word = len(list(group)), tex(shared[-1])
            words.append(f"\\multicolumn{{{wide}}}{{c}}{{{word}}}" if wide > 1 else word)
        out.append(" & ".join(words) + " \\\\")
    return out


def _tex_cell(words: Sequence[Word]) -> str:
    return " / ".join(f"\\textbf{{{tex(w.text)}}}" if w.best else tex(w.text) for w in words)
