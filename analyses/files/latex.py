"""A table for a paper: the heads that the report names, in booktabs style."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pandas as pd

from ...hooks.errors import BadRequest
from ...probe.columns import columns_of

_ESCAPES = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
}


def escaped(text: object) -> str:
    """Text that LaTeX prints as it is."""
    return "".join(_ESCAPES.get(letter, letter) for letter in str(text))


def number(value: float) -> str:
    """Three significant digits; powers of ten as mathematics."""
    if pd.isna(value):
        return "--"
    if math.isinf(value):
        return r"$\infty$" if value > 0 else r"$-\infty$"
    text = f"{value:.3g}"
    if "e" not in text:
        return f"${text}$"
    mantissa, power = text.split("e")
    return rf"${mantissa}\times 10^{{{int(power)}}}$"


def heads_table(heads: pd.DataFrame, labels: Sequence[str], caption: str) -> str:
    """A table environment with one row per label, intervals in brackets where the heads table has them.

    Args:
        heads: as `Watch.heads(intervals=True)`. labels: which heads, in this order. caption: its text.

    Raises:
        BadRequest: for a label that the table does not have, or has twice.
    """
    rows = heads.set_index(heads["label"].astype(str))
    names = [name for name in columns_of("latex") if name in heads]
    lines = [
        r"% \usepackage{booktabs}",
        r"\begin{table}",
        r"\centering\footnotesize\setlength{\tabcolsep}{3pt}",  # five columns with intervals fit a page of 6.5 in
        rf"\caption{{{escaped(caption)}}}",
        rf"\begin{{tabular}}{{l{'r' * len(names)}}}",
        r"\toprule",
        " & ".join(["head", *(escaped(name.replace("_", " ")) for name in names)]) + r" \\",
        r"\midrule",
    ]
    for label in labels:
        count = int((rows.index == label).sum())
        if count != 1:
            raise BadRequest(f"The heads table has {count} heads named {label!r}; name one that it has once.")
        row = rows.loc[label]
        cells = [escaped(label)]
        for name in names:
            cell = number(row[name])
            if f"{name}_low" in heads and pd.notna(row[f"{name}_low"]):
                cell += f" [{number(row[f'{name}_low'])}, {number(row[f'{name}_high'])}]"
            cells.append(cell)
        lines.append(" & ".join(cells) + r" \\")
    lines += [r"\bottomrule", r"\end{tabular}", r"\end{table}"]
    return "\n".join(lines) + "\n"
