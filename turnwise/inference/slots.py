"""What the engine knows of each slot beside its tokens: how it samples, where it ends, what it sampled.

Owns: :class:`SlotTable` (arrays by slot, so that a step touches no Python object per sequence) and :class:`Prefixes`
(which kept sequence a request can begin with). Refuses: memory (``kv.py``) and scheduling (``engine.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from turnwise.inference.generation import Generation
from turnwise.inference.kv import ACTIVE, RETAINED, KVCache, widen
from turnwise.inference.sampling import RowParams, seed_key, uniforms
from turnwise.types import Logprobs

WORTH_SHARING = 8
"""A shared prefix of fewer tokens is read again rather than copied."""

Slots = npt.NDArray[np.int64]


class SlotTable:
    """Sampling parameters, limits and log-probabilities by slot.

    Attributes:
        limit: int64 of shape [slots]: the length at which a sequence ends.
        prompt_end: int64 of shape [slots]: tokens that were known when it was admitted.
    """

    def __init__(self, slots: int, width: int) -> None:
        self.limit = np.zeros(slots, dtype=np.int64)
        self.prompt_end = np.zeros(slots, dtype=np.int64)
        self._logprobs = np.zeros((slots, width), dtype=np.float32)
        self._temperature = np.ones(slots, dtype=np.float32)
        self._top_p = np.ones(slots, dtype=np.float32)
        self._top_k = np.zeros(slots, dtype=np.int64)
        self._min_p = np.zeros(slots, dtype=np.float32)
        self._keys = np.zeros(slots, dtype=np.uint64)
        self._stop_ids = np.full((slots, 4), -1, dtype=np.int64)

    def occupy(self, slot: int, generation: Generation, *, eos_ids: Sequence[int], max_context: int) -> None:
        """Write down how a request samples; its log-probabilities so far come along."""
        params = generation.params
        start, stop = len(generation.prompt), len(generation.tokens)
        self.widen(stop)
        self._logprobs[slot, start:stop] = generation.logprobs
        self._temperature[slot] = params.temperature
        self._top_p[slot], self._top_k[slot], self._min_p[slot] = params.top_p, params.top_k, params.min_p
        self._keys[slot] = seed_key(params.seed or 0)
        self.limit[slot] = max_context if params.max_tokens is None else min(start + params.max_tokens, max_context)
        self.prompt_end[slot] = stop
        ends = list(params.stop_token_ids) if params.ignore_eos else [*params.stop_token_ids, *eos_ids]
        if len(ends) > self._stop_ids.shape[1]:
            wider = np.full((len(self.limit), len(ends)), -1, dtype=np.int64)
            wider[:, : self._stop_ids.shape[1]] = self._stop_ids
            self._stop_ids = wider
        self._stop_ids[slot] = -1
        self._stop_ids[slot, : len(ends)] = ends

    def widen(self, tokens: int) -> None:
        """See that log-probabilities of ``tokens`` tokens have room."""
        if self._logprobs.shape[1] < tokens:
            self._logprobs = widen(self._logprobs, max(tokens, 2 * self._logprobs.shape[1]))

    def rows(self, slots: Slots) -> RowParams:
        """Return how these slots sample."""
        return RowParams(self._temperature[slots], self._top_p[slots], self._top_k[slots], self._min_p[slots])

    def draws(self, slots: Slots, places: Slots) -> npt.NDArray[np.float64]:
        """Return the random number for each slot's token at its place."""
        return uniforms(self._keys[slots], places)

    def write(self, slots: Slots, places: Slots, logprobs: Logprobs) -> None:
        """Note the log-probabilities of the tokens at these places."""
        self.widen(int(places.max()) + 1)
        self._logprobs[slots, places] = logprobs

    def logprobs(self, slot: int, start: int, stop: int) -> Logprobs:
        """Return a copy of those of the tokens [start, stop)."""
        return self._logprobs[slot, start:stop].copy()

    def stops(self, slots: Slots, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Return which of the sampled ids end their sequence."""
        ended: npt.NDArray[np.bool_] = (ids[:, None] == self._stop_ids[slots]).any(axis=1)
        return ended


@dataclass(frozen=True, slots=True)
class Found:
    """Where a request can begin.

    Attributes:
        slot: The slot to take a prefix from, or None.
        tokens: How many tokens of it.
        wait_for: A slot that is about to have read more, or None.
    """

    slot: int | None = None
    tokens: int = 0
    wait_for: int | None = None


class Prefixes:
    """Finds the kept or running sequence that shares most with a request, and puts the request there."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._session_of: dict[int, str] = {}
        self._slot_of: dict[str, int] = {}

    def remember(self, slot: int, session_id: str) -> None:
        """Note which session's tokens a slot holds."""
        before = self._session_of.pop(slot, None)
        if before is not None and self._slot_of.get(before) == slot:
            del self._slot_of[before]
        if session_id:
            self._session_of[slot] = session_id
            self._slot_of[session_id] = slot

    def find(self, tokens: npt.NDArray[np.int32], session_id: str) -> Found:
        """Find where a request can begin. Its last token is always read: its logits are wanted."""
        cache = self._cache
        most = len(tokens) - 1
        own = self._slot_of.get(session_id)
        if own is not None and cache.state[own] == RETAINED:
            cached = int(cache.cached[own])
            if WORTH_SHARING <= cached <= most and np.array_equal(cache.ids[own, :cached], tokens[:cached]):
                return Found(own, cached)
        shared = np.minimum(cache.shared_prefixes(tokens), most)
        if not len(shared):
            return Found()
        ready = np.minimum(shared, cache.cached[: len(shared)])
        best, leader = int(ready.argmax()), int(shared.argmax())
        if shared[leader] - ready[best] >= WORTH_SHARING and cache.state[leader] == ACTIVE:
            return Found(tokens=int(shared[leader]), wait_for=leader)
        return Found(best, int(ready[best])) if ready[best] >= WORTH_SHARING else Found()

    def place(self, tokens: npt.NDArray[np.int32], found: Found, *, alone: bool) -> tuple[int, int] | None:
        """Give a request a slot: the prefix's own where nothing of it is lost, else a new one with a copy.

        Args:
            tokens: The request's.
            found: What :meth:`find` returned.
            alone: Whether nothing runs: then memory must be found, at the cost of the prefix.

        Returns:
            The slot and how many tokens were taken over, or None when the request has to wait for memory.
        """
        cache, source = self._cache, found.slot
        if source is None:
            slot = cache.take(tokens)
            return None if slot is None else (slot, 0)
        retained = cache.state[source] == RETAINED
        if retained and cache.cached[source] <= found.tokens and cache.reuse(source, tokens, found.tokens):
            return source, found.tokens
        slot = cache.take(tokens, source=source)
        if slot is not None:
            cache.share(slot, source, found.tokens)
            return slot, found.tokens
        if not retained or not alone:
            return None
        cache.release(source)
        slot = cache.take(tokens)
        return None if slot is None else (slot, 0)
