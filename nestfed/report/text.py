"""A table as plain text, CSV or LaTeX."""

from __future__ import annotations

import csv
import io

from nestfed.report.page import Cell, Table

_TEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "±": r"$\pm$", "–": "--", "−": "$-$", "×": r"$\times$", "ε": r"$\varepsilon$", "…": r"\ldots{}",
}  # fmt: skip


def as_text(table: Table) -> str:
    """Return the table in aligned columns, and its note."""
    rows = [list(table.columns), *([_cell(cell) for cell in row] for row in table.rows)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(table.columns))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    return "\n".join([*lines, *(["", table.note] if table.note else [])])


def as_csv(table: Table) -> str:
    """Return the table as CSV."""
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows([table.columns, *([_cell(c) for c in row] for row in table.rows)])
    return file.getvalue()


def as_tex(table: Table) -> str:
    """Return a LaTeX table (needs the package booktabs); the best rows are bold."""
    lines = [r"\begin{table}", r"\centering"]
    if table.title or table.note:
        lines.append(
            rf"\caption{{{tex(' '.join(filter(None, (f'{table.title}.' if table.title else '', table.note))))}}}"
        )
    lines += [rf"\begin{{tabular}}{{l{'r' * (len(table.columns) - 1)}}}", r"\toprule"]
    lines += [" & ".join(map(tex, table.columns)) + r" \\", r"\midrule"]
    for i, row in enumerate(table.rows):
        cells = [tex(_cell(cell)) for cell in row]
        lines.append(" & ".join(rf"\textbf{{{c}}}" if i in table.best and c else c for c in cells) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", r"\end{table}", ""])


def tex(text: str) -> str:
    """Return text with LaTeX's special characters escaped."""
    return "".join(_TEX.get(c, c) for c in text)


def _cell(cell: Cell) -> str:
    return "" if cell is None else str(cell)
