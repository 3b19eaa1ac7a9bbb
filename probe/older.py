"""Tables of earlier formats, read as what the columns mean today.

Until run format 2 and history format 1 six columns were not divided by the number of query rows, and grew with the corpus.
Every row of an old table says how many rows it counted, so its columns are divided by that when it is read. Ends of old
intervals are those of another number (the size of the corpus varied within them) and are not known any more.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

ROOTS = ("routing_pressure", "content_pressure", "content_relative")  # square roots of sums
SLOPES = ("score_slope", "value_slope", "kv_value_slope")


def per_row(table: pd.DataFrame) -> pd.DataFrame:
    """An old heads or history table (with `queries`) with the six columns divided by the number of query rows."""
    n = table["queries"].astype("float64").where(lambda counted: counted > 0)
    changed = {name: table[name] / np.sqrt(n) for name in ROOTS if name in table}
    changed |= {name: table[name] / n for name in SLOPES if name in table}
    ends = [f"{name}_{end}" for name in (*ROOTS, *SLOPES) for end in ("low", "high") if f"{name}_{end}" in table]
    return table.assign(**changed, **dict.fromkeys(ends, np.nan))
