"""Tables as text, CSV and LaTeX: everything is there, and no character of a name breaks the file."""

from __future__ import annotations

import csv
import io

from nestfed.report.page import Table
from nestfed.report.text import as_csv, as_tex, as_text, tex

ODD = Table(
    "a_title",
    ["method", "ap & more", "100 %"],
    [["my_method#1", "0.5 ± 0.1", None], ["$x^2$ {b}", 'say "a, b"', "~\\<end>"]],
    "A note_of 5 %.",
    [1],
)


def test_csv_is_read_back_as_it_was() -> None:
    rows = list(csv.reader(io.StringIO(as_csv(ODD))))
    assert rows == [list(ODD.columns), *([cell or "" for cell in row] for row in ODD.rows)]


def test_latex_has_no_bare_special_character() -> None:
    text = as_tex(ODD)
    assert r"my\_method\#1 & 0.5 $\pm$ 0.1 &  \\" in text
    assert r"\textbf{\$x\textasciicircum{}2\$ \{b\}} & " in text
    assert r"\textbf{\textasciitilde{}\textbackslash{}\textless{}end\textgreater{}} \\" in text
    assert r"\caption{a\_title. A note\_of 5 \%.}" in text
    assert r"method & ap \& more & 100 \% \\" in text
    assert text.count("{") - text.count(r"\{") == text.count("}") - text.count(r"\}")
    assert tex("plain text 1.5") == "plain text 1.5"
    assert text.isascii()


def test_text_is_aligned() -> None:
    head, first, second, blank, note = as_text(ODD).splitlines()
    assert head.index("ap & more") == first.index("0.5 ±") == second.index('say "a')
    assert (blank, note) == ("", ODD.note)
