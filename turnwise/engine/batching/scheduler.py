"""The scheduler: admission, slots and preemption of requests, and the model input of a step."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from turnwise.engine.attention import PoolPlan, StepPlan, decode_block, prefill_blocks
from turnwise.engine.batching.batch_state import WORTH_SHARING, BatchState, Generation, Output, PrefixIndex, PrefixMatch
from turnwise.engine.batching.kv_cache import KVCache
from turnwise.types import FinishReason


@dataclass(frozen=True, slots=True)
class ModelInput:
    """One packed forward.

    Attributes:
        plan: Attention plan.
        token_ids: int64 of shape [T].
        positions: int64 of shape [T].
        slots: Running sequences in token order.
        sizes: Tokens of each in this step.
        sampling: Mask of ``slots`` that have no tokens left to run after this step.
        keep: Index of the last token of each of those in the packed step.
    """

    plan: StepPlan
    token_ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    slots: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    sampling: npt.NDArray[np.int64]
    keep: npt.NDArray[np.int64]


def arrange(cache: KVCache, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return slots ordered by pool and row, as :func:`build_model_input` needs them."""
    return slots[np.lexsort((cache.row_of[slots], cache.pool_of[slots]))]


def build_model_input(cache: KVCache, slots: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]) -> ModelInput:
    """Build the model input of a step.

    Args:
        cache: The KV cache.
        slots: Running slots in the order of :func:`arrange`.
        sizes: Tokens to run of each, from its first token without KV entries.
    """
    heads = cache.pools[0].geometry.heads
    pools = cache.pool_of[slots]
    single = sizes == 1
    if not single.all():
        order = np.lexsort((cache.row_of[slots], ~single, pools))
        slots, sizes, pools = slots[order], sizes[order], pools[order]
    starts = cache.cached[slots]
    ends = np.cumsum(sizes)
    begins = ends - sizes
    total = int(ends[-1])
    capacity = cache.capacity[pools]
    rows = cache.row_of[slots]
    base = rows * heads * capacity
    if total == len(slots):
        owner, positions = slots, starts
        base_of, capacity_of = base, capacity
    else:
        owner, base_of, capacity_of = np.repeat(slots, sizes), np.repeat(base, sizes), np.repeat(capacity, sizes)
        positions = np.repeat(starts - begins, sizes) + np.arange(total)
    index = (base_of + positions)[:, None] + capacity_of[:, None] * np.arange(heads)
    flat = torch.from_numpy(index.reshape(-1)).to(cache.pools[0].device)
    parts = []
    borders = np.flatnonzero(np.diff(pools)) + 1
    for first, end in zip([0, *borders.tolist()], [*borders.tolist(), len(slots)], strict=True):
        start, stop = int(begins[first]), int(ends[end - 1])
        pool = cache.pools[int(pools[first])]
        # Decoding sequences come first, in order of their rows.
        chunks = first + int((sizes[first:end] == 1).sum())
        decode = decode_block(pool, rows[first:chunks], starts[first:chunks]) if chunks > first else None
        prefills = prefill_blocks(pool, rows[chunks:end], starts[chunks:end], sizes[chunks:end], chunks - first)
        parts.append(PoolPlan(pool, start, stop, flat[start * heads : stop * heads], decode, prefills))
    complete = starts + sizes == cache.length[slots]
    return ModelInput(
        plan=StepPlan(parts),
        token_ids=cache.token_ids[owner, positions].astype(np.int64),
        positions=positions,
        slots=slots,
        sizes=sizes,
        sampling=slots[complete],
        keep=(ends - 1)[complete],
    )


class Scheduler:
    """Requests by slot, and the waiting queue.

    Attributes:
        running: int64: running slots, in the order of :func:`arrange` after :meth:`admit`.
        waiting: Requests without a slot, in order of arrival.
        watched: Slots checked id by id (stop strings, streams).
        held: Slots with structured output.
        scored: Slots with scored prompts.
        seeing: Requests with images, by slot.
        table: Sampling state of each slot.
    """

    def __init__(
        self, cache: KVCache, *, max_seqs: int, max_context: int, eos_ids: tuple[int, ...], prefix_cache: bool
    ) -> None:
        slots, width = cache.token_ids.shape
        self.running: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self.waiting: deque[Generation] = deque()
        self.watched: set[int] = set()
        self.guided: set[int] = set()
        self.scored: set[int] = set()
        self.seeing: dict[int, Generation] = {}
        self.table = BatchState(slots, width)
        self._cache = cache
        self._prefixes = PrefixIndex(cache)
        self._generations: list[Generation | None] = [None] * slots
        self._max_seqs = max_seqs
        self._max_context = max_context
        self._eos_ids = eos_ids
        self._prefix_cache = prefix_cache
        self._arrivals = 0

    def add(self, generation: Generation) -> None:
        """Queue a request."""
        self._arrivals += 1
        generation.order = self._arrivals
        self.waiting.append(generation)

    def occupant(self, slot: int) -> Generation:
        """Return the request in a slot."""
        generation = self._generations[slot]
        if generation is None:
            raise RuntimeError(f"slot {slot} runs without a request")
        return generation

    def runs(self, slot: int) -> bool:
        """Return whether a request runs in this slot."""
        return self._generations[slot] is not None

    def admit(self) -> int:
        """Admit waiting requests while there is room; return the number of reused tokens."""
        deferred: list[Generation] = []
        admitted: list[int] = []
        reused = 0
        moved = False
        while self.waiting and len(self.running) + len(admitted) < self._max_seqs:
            generation = self.waiting.popleft()
            if self._leader_reads(generation):
                deferred.append(generation)
                continue
            match = PrefixMatch()
            if self._prefix_cache and not generation.scored:
                match = self._prefixes.find(generation.token_ids, generation.session_id, generation.adapter)
            if match.wait_for is not None:
                generation.leader = (match.wait_for, self.occupant(match.wait_for).id, match.tokens)
                deferred.append(generation)
                continue
            alone = not len(self.running) and not admitted
            # Memory is gathered by moving rows, also if that is too little.
            moved = True
            placed = self._prefixes.place(generation.token_ids, match, generation.adapter, alone=alone)
            if placed is None:
                self.waiting.appendleft(generation)
                break
            slot, shared = placed
            reused += shared
            self._occupy(slot, generation)
            admitted.append(slot)
        self.waiting.extendleft(reversed(deferred))
        if moved:
            joined = np.concatenate([self.running, np.asarray(admitted, dtype=np.int64)])
            self.running = arrange(self._cache, joined)
        return reused

    def end(self, ids: Iterable[str] | None, reason: FinishReason) -> list[Output]:
        """Finish requests (None: all), running or waiting, with what they have. Unknown ids are ignored."""
        selected = None if ids is None else set(ids)
        slots = [slot for slot in self.running.tolist() if selected is None or self.occupant(slot).id in selected]
        outputs = [self.finish(slot, reason, None) for slot in slots]
        remaining: deque[Generation] = deque()
        for generation in self.waiting:
            if selected is None or generation.id in selected:
                outputs.append(generation.output(reason, None))
            else:
                remaining.append(generation)
        self.waiting = remaining
        return outputs

    def finish(self, slot: int, reason: FinishReason, stop_reason: int | str | None) -> Output:
        """Finish a slot's request; its KV entries are retained as a prefix if finite."""
        generation = self.save(slot)
        self._save_routes(slot, generation)
        self._vacate(slot, retain=reason != "error" and self._prefix_cache, poisoned=reason == "error")
        return generation.output(reason, stop_reason)

    def requeue(self, slot: int) -> None:
        """Preempt a slot's request: free its memory and queue it by order of arrival."""
        generation = self.save(slot)
        self._save_routes(slot, generation)
        self._vacate(slot, retain=False, poisoned=False)
        generation.leader = None
        index = 0
        while index < len(self.waiting) and self.waiting[index].order < generation.order:
            index += 1
        self.waiting.insert(index, generation)

    def allowed(self, slots: npt.NDArray[np.int64], vocabulary: int) -> npt.NDArray[np.bool_] | None:
        """Return which ids grammars allow next, bool of shape [slots, vocabulary]; None without structured output."""
        if not self.guided or self.guided.isdisjoint(slots.tolist()):
            return None
        rows = np.ones((len(slots), vocabulary), dtype=np.bool_)
        for row, slot in enumerate(slots.tolist()):
            grammar = self.occupant(slot).grammar
            if grammar is not None:
                rows[row] = grammar.allowed()
        return rows

    def advance(self, slots: npt.NDArray[np.int64], token_ids: npt.NDArray[np.int64]) -> None:
        """Advance the grammars by the sampled ids, except of sequences that end."""
        for slot, token_id in zip(slots.tolist(), token_ids.tolist(), strict=True):
            grammar = self.occupant(slot).grammar
            if grammar is not None:
                grammar.take(token_id)

    def due(self, slot: int) -> bool:
        """Whether a streamed request has ids to deliver."""
        generation = self.occupant(slot)
        sampled = int(self._cache.length[slot]) - len(generation.prompt)
        return generation.delivered == 0 or sampled - generation.delivered >= generation.stream_interval

    def save(self, slot: int) -> Generation:
        """Copy a slot's tokens and log-probabilities into its request; return the request."""
        generation = self.occupant(slot)
        length, start = int(self._cache.length[slot]), len(generation.prompt)
        generation.token_ids = self._cache.token_ids[slot, :length].copy()
        generation.logprobs = self.table.logprobs(slot, start, length)
        if generation.scored and length > start:
            generation.scores = self.table.logprobs(slot, 1, start)
        return generation

    def _save_routes(self, slot: int, generation: Generation) -> None:
        """Copy the routes of a slot's tokens into its request, but keep those by which ids were sampled already."""
        table, tokens = self._cache.routes, len(generation.token_ids) - 1
        if table is None or generation.params.routes_from is None or tokens < len(generation.prompt):
            return
        if self._cache.cached[slot] < tokens:
            # Nothing was sampled since it was queued again.
            return
        rows = table.read(slot, tokens)
        if generation.routes is not None:
            rows[: len(generation.routes)] = generation.routes
        generation.routes = rows

    def _leader_reads(self, generation: Generation) -> bool:
        """Whether the prompt that a request waits for is still in prefill."""
        if generation.leader is None:
            return False
        slot, request, tokens = generation.leader
        leader = self._generations[slot]
        if leader is not None and leader.id == request and self._cache.cached[slot] < tokens:
            return True
        generation.leader = None
        return False

    def _occupy(self, slot: int, generation: Generation) -> None:
        self._generations[slot] = generation
        if generation.cached < 0:
            generation.cached = int(self._cache.cached[slot])
        self.table.occupy(slot, generation, eos_ids=self._eos_ids, max_context=self._max_context)
        self._prefixes.remember(slot, generation.session_id)
        if generation.stream or generation.stops is not None:
            self.watched.add(slot)
        if generation.grammar is not None:
            self.guided.add(slot)
        if generation.scored:
            self.scored.add(slot)
        if generation.images:
            self.seeing[slot] = generation

    def _vacate(self, slot: int, *, retain: bool, poisoned: bool) -> None:
        self._generations[slot] = None
        self.watched.discard(slot)
        self.guided.discard(slot)
        self.scored.discard(slot)
        self.seeing.pop(slot, None)
        self.running = self.running[self.running != slot]
        if retain and self._cache.cached[slot] >= WORTH_SHARING:
            # Only cached tokens can be shared; the id that was sampled last is not cached.
            self._cache.retain(slot)
            return
        self._prefixes.remember(slot, "")
        self._cache.release(slot, poisoned=poisoned)
