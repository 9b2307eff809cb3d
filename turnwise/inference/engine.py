"""The built-in inference engine: continuous batching over one packed forward per step.

Owns: which request runs when, and everything between a prompt's ids and a completion's. Refuses: HTTP (``server.py``)
and text (only stop strings look at it).

Every step runs one new token of each sequence that has its prompt read, and pieces of the prompts that are still
being read. A sequence is told apart only by how many of its tokens have keys and values (``cached``): one missing is
decoding, more are a prompt. So a weight update is: forget all keys and values, and let every sequence wait to be read
again; and so is running out of memory, for one sequence.

A prefix is read once. A finished sequence stays in the cache until its memory is wanted; a request takes over or copies
what it shares with any sequence, also one that runs; and it waits while another reads a prompt that it shares.
"""

from __future__ import annotations

import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer

from turnwise.inference.causal_lm import CausalLM
from turnwise.inference.generation import Generation, Output, StopStrings
from turnwise.inference.kv import RETAINED, KVCache, capacities
from turnwise.inference.sampling import sample
from turnwise.inference.slots import WORTH_SHARING, Found, Prefixes, SlotTable
from turnwise.inference.stats import EngineStats
from turnwise.inference.steps import Step, arrange, build_step
from turnwise.types import FinishReason

ResultT = TypeVar("ResultT")
_KV_TOKENS = 131072


class Engine:
    """Runs requests on a model. :meth:`submit` and :meth:`call` may be used from any thread, all else from its own.

    Attributes:
        model: The model.
        max_context: Most tokens of prompt and completion together.
        stats: Counters; gauges are current after :meth:`refresh_stats`.
    """

    def __init__(
        self,
        model: CausalLM,
        deliver: Callable[[list[Output]], None],
        *,
        max_seqs: int = 256,
        max_context: int | None = None,
        kv_tokens: int | None = None,
        max_batch_tokens: int = 2048,
        prefix_cache: bool = True,
        weight_version: int = 0,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        """Make an engine.

        Args:
            model: The model.
            deliver: Is given the outputs of each step, on the engine's thread.
            max_seqs: Most sequences that run at the same time.
            max_context: Most tokens of a sequence; None is the model's limit.
            kv_tokens: Tokens that memory may be allocated for; None is 131072, or one whole sequence.
            max_batch_tokens: Most tokens of a step (more only where more sequences decode).
            prefix_cache: Whether shared prefixes are used again.
            weight_version: Version of the weights as loaded.
            tokenizer: For stop strings.

        Raises:
            ValueError: ``kv_tokens`` does not hold one sequence of ``max_context`` tokens.
        """
        self.model = model
        self.max_context = min(max_context or model.context_length, model.context_length)
        self.stats = EngineStats(weight_version=weight_version)
        self._deliver = deliver
        self._max_seqs = max_seqs
        self._max_batch_tokens = max_batch_tokens
        self._prefix_cache = prefix_cache
        self._tokenizer = tokenizer
        budget = kv_tokens if kv_tokens is not None else max(_KV_TOKENS, capacities(self.max_context)[-1])
        # As many prefixes as sequences: more would only grow colder.
        slots = 2 * max_seqs
        self._cache = KVCache(
            model.geometry, model.dtype, model.device, slots=slots, longest=self.max_context, budget=budget
        )
        self._table = SlotTable(slots, self._cache.ids.shape[1])
        self._prefixes = Prefixes(self._cache)
        self._generations: list[Generation | None] = [None] * slots
        self._waiting: deque[Generation] = deque()
        self._running = np.zeros(0, dtype=np.int64)
        self._watched: set[int] = set()
        self._arrivals = 0
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Event()
        self._closed = False

    # -- from any thread

    def submit(self, generation: Generation) -> None:
        """Queue a request."""
        self._post(lambda: self._enqueue(generation))

    def call(self, function: Callable[[], ResultT]) -> Future[ResultT]:
        """Run ``function`` on the engine's thread, between two steps."""
        future: Future[ResultT] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except Exception as error:  # noqa: BLE001 - handed to whoever waits for the result
                future.set_exception(error)

        self._post(run)
        return future

    def close(self) -> None:
        """Make :meth:`run` return after the current step."""
        self._closed = True
        self._wake.set()

    def run(self) -> None:
        """Run until :meth:`close`: steps while there is work, asleep otherwise. Any exception is the engine's end."""
        while not self._closed:
            if not self.step():
                self._wake.wait()
                self._wake.clear()

    def _post(self, work: Callable[[], None]) -> None:
        self._inbox.append(work)
        self._wake.set()

    # -- on the engine's thread

    def pause(self, *, abort: bool) -> int:
        """Stop sampling; what is in flight is kept, or ended with what it has. Returns how many were ended."""
        self.stats.paused = True
        return self.abort(None) if abort else 0

    def resume(self) -> None:
        """Sample again."""
        self.stats.paused = False

    def abort(self, ids: Iterable[str] | None) -> int:
        """End requests (None: all) with what they have; returns how many. Unknown ids are ignored."""
        wanted = None if ids is None else set(ids)
        outputs = []
        for slot in self._running.tolist():
            generation = self._occupant(slot)
            if wanted is None or generation.id in wanted:
                outputs.append(self._finish(slot, "abort", None))
        kept: deque[Generation] = deque()
        for generation in self._waiting:
            if wanted is None or generation.id in wanted:
                outputs.append(self._output(generation, "abort", None))
            else:
                kept.append(generation)
        self._waiting = kept
        self._ended(outputs)
        return len(outputs)

    def update_weights(self, tensors: Mapping[str, torch.Tensor], version: int) -> None:
        """Replace the weights. Sequences in flight go on under the new ones, all their tokens read again.

        Raises:
            FormatError: A tensor does not fit; nothing has changed.
        """
        self.model.load(tensors, version)
        for slot in self._running.tolist():
            self._requeue(slot)
        self._cache.drop_retained()
        self.set_version(version)

    def set_version(self, version: int) -> None:
        """Name the weights in use; what is sampled from now on carries this version."""
        if version == self.stats.weight_version:
            return
        self.stats.weight_version = version
        for generation in self._waiting:
            generation.marks.append((version, len(generation.tokens) - len(generation.prompt)))
        for slot in self._running.tolist():
            generation = self._occupant(slot)
            generation.marks.append((version, int(self._cache.length[slot]) - len(generation.prompt)))

    def refresh_stats(self) -> EngineStats:
        """Return the counters with current gauges."""
        stats = self.stats
        stats.running, stats.waiting = len(self._running), len(self._waiting)
        stats.retained = self._cache.count(RETAINED)
        stats.kv_tokens = self._cache.allocated
        return replace(stats)

    def step(self) -> bool:
        """Do what was posted, then run one forward pass.

        Returns:
            Whether there was anything to run.
        """
        with torch.inference_mode():
            while self._inbox:
                self._inbox.popleft()()
            if self.stats.paused:
                return False
            self._admit()
            if not len(self._running):
                return False
            self._make_room()
            if not len(self._running):
                return True
            if self._cache.compact(self._running):
                self._running = arrange(self._cache, self._running)
            step = self._plan()
            logits = self.model.forward(step.ids, step.positions, step.plan, step.keep)
            self._advance(step, logits)
        return True

    # -- admission

    def _enqueue(self, generation: Generation) -> None:
        self._arrivals += 1
        generation.order = self._arrivals
        generation.tokens = generation.prompt
        generation.marks = [(self.stats.weight_version, 0)]
        if generation.params.seed is None:
            generation.params = replace(generation.params, seed=secrets.randbits(63))
        if generation.params.stop and self._tokenizer is not None:
            generation.stops = StopStrings(self._tokenizer, generation.params.stop)
            for token in generation.prompt[len(generation.prompt) - generation.continued :].tolist():
                generation.stops.feed(token)
        self._waiting.append(generation)

    def _admit(self) -> None:
        held: list[Generation] = []
        admitted: list[int] = []
        while self._waiting and len(self._running) + len(admitted) < self._max_seqs:
            generation = self._waiting.popleft()
            if self._leader_reads(generation):
                held.append(generation)
                continue
            found = Found()
            if self._prefix_cache:
                found = self._prefixes.find(generation.tokens, generation.session_id)
            if found.wait_for is not None:
                generation.leader = (found.wait_for, self._occupant(found.wait_for).id, found.tokens)
                held.append(generation)
                continue
            alone = not len(self._running) and not admitted
            placed = self._prefixes.place(generation.tokens, found, alone=alone)
            if placed is None:
                self._waiting.appendleft(generation)
                break
            slot, shared = placed
            self.stats.reused_tokens += shared
            self._occupy(slot, generation)
            admitted.append(slot)
        self._waiting.extendleft(reversed(held))
        if admitted:
            joined = np.concatenate([self._running, np.asarray(admitted, dtype=np.int64)])
            self._running = arrange(self._cache, joined)

    def _leader_reads(self, generation: Generation) -> bool:
        """Whether the prompt that a request waits for is still being read."""
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
        self._table.occupy(slot, generation, eos_ids=self.model.eos_ids, max_context=self.max_context)
        self._prefixes.remember(slot, generation.session_id)
        if generation.stream or generation.stops is not None:
            self._watched.add(slot)

    # -- steps

    def _make_room(self) -> None:
        """See that every sequence that runs has a row that holds it; the youngest wait where memory is short."""
        cache = self._cache
        slots = self._running
        outgrown = slots[cache.length[slots] > cache.capacity[cache.pool_of[slots]]]
        if not len(outgrown):
            return
        for slot in sorted(outgrown.tolist(), key=lambda slot: self._occupant(slot).order):
            while self._generations[slot] is not None and not cache.grow(slot, int(cache.length[slot])):
                youngest = max(self._running.tolist(), key=lambda other: self._occupant(other).order)
                self._requeue(youngest)
                self.stats.preemptions += 1
        self._running = arrange(cache, self._running)

    def _plan(self) -> Step:
        cache, slots = self._cache, self._running
        sizes = cache.length[slots] - cache.cached[slots]
        prompts = np.flatnonzero(sizes > 1)
        if len(prompts):
            # Prompts are read in order of arrival, as far as the step's tokens reach; decoding never waits.
            left = max(self._max_batch_tokens - (len(slots) - len(prompts)), min(64, self._max_batch_tokens))
            for place in sorted(prompts.tolist(), key=lambda place: self._occupant(int(slots[place])).order):
                sizes[place] = min(int(sizes[place]), left)
                left -= int(sizes[place])
            slots, sizes = slots[sizes > 0], sizes[sizes > 0]
        model = self.model
        return build_step(cache, slots, sizes, heads=model.geometry.heads, dtype=model.dtype, device=model.device)

    def _advance(self, step: Step, logits: torch.Tensor) -> None:
        """Sample, write down, and end what has come to its end."""
        cache, stats, slots = self._cache, self.stats, step.sampling
        stats.steps += 1
        read = np.clip(self._table.prompt_end[step.slots] - cache.cached[step.slots], 0, step.sizes)
        stats.prefilled_tokens += int(read.sum())
        cache.cached[step.slots] += step.sizes
        if not len(slots):
            return
        places = cache.length[slots]
        ids, logprobs = sample(logits, self._table.rows(slots), self._table.draws(slots, places))
        finite = np.isfinite(logprobs)
        stats.generated_tokens += int(finite.sum())
        cache.append(slots, ids, finite)
        self._table.write(slots, places, logprobs)
        stopped = self._table.stops(slots, ids)
        full = cache.length[slots] >= self._table.limit[slots]
        ended = stopped | full | ~finite
        outputs = self._watch(slots, ids, ended) if self._watched else []
        for place in np.flatnonzero(ended).tolist():
            slot = int(slots[place])
            if self._generations[slot] is None:
                continue
            if not finite[place]:
                outputs.append(self._finish(slot, "error", None))
            elif stopped[place]:
                token = int(ids[place])
                outputs.append(self._finish(slot, "stop", None if token in self.model.eos_ids else token))
            else:
                outputs.append(self._finish(slot, "length", None))
        self._ended(outputs)

    def _watch(
        self, slots: npt.NDArray[np.int64], ids: npt.NDArray[np.int64], ended: npt.NDArray[np.bool_]
    ) -> list[Output]:
        """Look for stop strings, and collect what is streamed of sequences that go on."""
        outputs: list[Output] = []
        for place in np.flatnonzero(np.isin(slots, list(self._watched))).tolist():
            slot = int(slots[place])
            generation = self._occupant(slot)
            found = generation.stops.feed(int(ids[place])) if generation.stops is not None else None
            if found is not None:
                outputs.append(self._finish(slot, "stop", found))
            elif generation.stream and not ended[place]:
                self._save(slot, generation)
                outputs.append(self._output(generation, None, None))
        return outputs

    def _finish(self, slot: int, reason: FinishReason, stop_reason: int | str | None) -> Output:
        generation = self._occupant(slot)
        self._save(slot, generation)
        self._vacate(slot, retain=reason != "error" and self._prefix_cache, poisoned=reason == "error")
        return self._output(generation, reason, stop_reason)

    def _requeue(self, slot: int) -> None:
        """Take a sequence's memory; it waits, in its order of arrival, to be read again with what it has."""
        generation = self._occupant(slot)
        self._save(slot, generation)
        self._vacate(slot, retain=False, poisoned=False)
        generation.leader = None
        place = 0
        while place < len(self._waiting) and self._waiting[place].order < generation.order:
            place += 1
        self._waiting.insert(place, generation)

    def _save(self, slot: int, generation: Generation) -> None:
        length, start = int(self._cache.length[slot]), len(generation.prompt)
        generation.tokens = self._cache.ids[slot, :length].copy()
        generation.logprobs = self._table.logprobs(slot, start, length)

    def _vacate(self, slot: int, *, retain: bool, poisoned: bool) -> None:
        self._generations[slot] = None
        self._watched.discard(slot)
        self._running = self._running[self._running != slot]
        if retain and self._cache.cached[slot] >= WORTH_SHARING:
            # What stands beyond the cached tokens cannot be shared: one id that was sampled last.
            self._cache.retain(slot)
            return
        self._prefixes.remember(slot, "")
        self._cache.release(slot, poisoned=poisoned)

    def _output(self, generation: Generation, reason: FinishReason | None, stop_reason: int | str | None) -> Output:
        start = len(generation.prompt)
        sampled = len(generation.tokens) - start
        first = generation.delivered if generation.stream else 0
        generation.delivered = sampled
        return Output(
            id=generation.id,
            token_ids=generation.tokens[start + first :],
            logprobs=generation.logprobs[first:],
            finish_reason=reason,
            stop_reason=stop_reason,
            weight_versions=generation.spans(sampled),
            prompt_tokens=start,
            cached_tokens=max(0, generation.cached),
        )

    def _ended(self, outputs: list[Output]) -> None:
        if outputs:
            self.stats.requests += sum(1 for output in outputs if output.finish_reason is not None)
            self._deliver(outputs)

    def _occupant(self, slot: int) -> Generation:
        generation = self._generations[slot]
        if generation is None:
            raise RuntimeError(f"slot {slot} runs without a request")
        return generation
