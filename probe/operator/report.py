"""Which way each module's attention was computed, and why: two columns of `watch.modules()`."""

from __future__ import annotations

import pandas as pd

from ...hooks.call import AttentionCall


class Ways:
    """The last way of every module and use."""

    def __init__(self) -> None:
        self._last: dict[str, dict[int, tuple[str, str]]] = {}

    def note(self, call: AttentionCall, way: str, reason: str) -> None:
        self._last.setdefault(call.site.module, {})[call.use] = (way, reason)

    def beside(self, modules: pd.DataFrame) -> pd.DataFrame:
        """The table with `way` and `reason` of every module; several uses of one module that differ, side by side."""
        known = [list(dict.fromkeys(self._last.get(module, {}).values())) for module in modules["module"]]
        return modules.assign(
            **{
                name: pd.array(["; ".join(way[place] for way in ways if way[place]) for ways in known], dtype="str")
                for place, name in enumerate(("way", "reason"))
            }
        )
