"""Routed experts of the tokens in the KV cache, by slot."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from turnwise.types import Routes

_Ints = npt.NDArray[np.int64]


class RouteRows:
    """The experts that computed each cached token of a slot; they are reused and copied with its keys and values."""

    def __init__(self) -> None:
        self._rows: dict[int, Routes] = {}

    def write(self, slots: _Ints, starts: _Ints, sizes: _Ints, routes: Routes) -> None:
        """Store the routes of a step: ``sizes`` tokens of each slot, from the token ``starts`` on."""
        begin = 0
        for slot, start, size in zip(slots.tolist(), starts.tolist(), sizes.tolist(), strict=True):
            rows = self._rows.get(slot)
            if rows is None or len(rows) < start + size:
                wider = np.zeros((max(start + size, 2 * start), *routes.shape[1:]), routes.dtype)
                if rows is not None:
                    wider[:start] = rows[:start]
                self._rows[slot] = rows = wider
            rows[start : start + size] = routes[begin : begin + size]
            begin += size

    def read(self, slot: int, tokens: int) -> Routes:
        """Return a copy of the routes of a slot's first tokens."""
        return self._rows[slot][:tokens].copy()

    def copy(self, slot: int, source: int, tokens: int) -> None:
        """Give a slot the routes of the first tokens of another one."""
        self._rows[slot] = self.read(source, tokens)

    def drop(self, slot: int) -> None:
        """Forget the routes of a slot."""
        self._rows.pop(slot, None)
