"""The table of a comparison for LaTeX."""

from __future__ import annotations

from collections.abc import Sequence

from fedloom.report.comparison.notes import notes
from fedloom.report.comparison.question import Question
from fedloom.report.comparison.statistics import Row
from fedloom.report.comparison.text import Section, sections

_TEX = {c: f"\\{c}" for c in "&%$#_{}"} | {"\\": "\\textbackslash{}", "~": "\\textasciitilde{}"}
_TEX |= {"^": "\\textasciicircum{}", "±": "$\\pm$", "<": "$<$", ">": "$>$", "−": "$-$"}
_TEX |= {"↓": "$\\downarrow$", "↑": "$\\uparrow$"}


def latex(question: Question, table: Sequence[Row]) -> str:
    """One tabular, a block for each point of the grid; the best of a block is bold."""
    return tabular(sections(question, table), notes(question, table))


def tabular(found: Sequence[Section], comments: Sequence[str]) -> str:
    """These sections in one tabular, below comments."""
    header = found[0].header
    lines = [
        "% needs \\usepackage{booktabs}",
        *(f"% {note}" for note in comments),
        f"\\begin{{tabular}}{{l{'r' * (len(header) - 1)}}}",
        "\\toprule",
        " & ".join(tex(word) for word in header) + " \\\\",
    ]
    for section in found:
        lines.append("\\midrule")
        if section.title:
            lines.append(f"\\multicolumn{{{len(header)}}}{{l}}{{{tex(section.title)}}} \\\\")
        for index, words in enumerate(section.lines):
            cells = [tex(word) for word in words]
            if index in section.best:
                cells[0] = f"\\textbf{{{cells[0]}}}"
            lines.append(" & ".join(cells) + " \\\\")
    return "\n".join([*lines, "\\bottomrule", "\\end{tabular}", ""])


def tex(text: str) -> str:
    """The text with LaTeX's special characters escaped."""
    return "".join(_TEX.get(c, c) for c in text)
