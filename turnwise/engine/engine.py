"""The built-in inference engine: continuous batching over one packed forward per step.

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
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer

from turnwise.engine.batch_state import Generation, Output, Slots, StopStrings
from turnwise.engine.causal_lm import CausalLM
from turnwise.engine.kv_cache import RETAINED, KVCache, capacities
from turnwise.engine.sampling import sample
from turnwise.engine.scheduler import ModelInput, Scheduler, arrange, build_model_input
from turnwise.model.core import AdapterInfo
from turnwise.types import Logprobs


@dataclass(slots=True)
class EngineStats:
    """What an engine has done and is doing.

    Attributes:
        requests: Requests that ended, in any way.
        prefilled_tokens: Tokens of prompts that were run (again, after a weight update or for want of memory).
        reused_tokens: Tokens of prompts whose keys and values were there.
        generated_tokens: Sampled ids.
        steps: Forward passes.
        preemptions: Times that a sequence gave its memory up to an older one.
        running: Sequences that hold memory and run.
        waiting: Requests that wait for memory, a place or a shared prompt.
        retained: Prefixes kept.
        kv_tokens: Tokens that memory is allocated for.
        weight_version: Version in use.
        paused: Whether nothing is sampled.
    """

    requests: int = 0
    prefilled_tokens: int = 0
    reused_tokens: int = 0
    generated_tokens: int = 0
    steps: int = 0
    preemptions: int = 0
    running: int = 0
    waiting: int = 0
    retained: int = 0
    kv_tokens: int = 0
    weight_version: int = 0
    paused: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return all fields by name."""
        return asdict(self)


ResultT = TypeVar("ResultT")
_NONE: Slots = np.zeros(0, dtype=np.int64)
_KV_TOKENS = 131072
# Logits of prompts that are scored are held for this many (token, vocabulary) pairs at once: 256 MiB in float32.
_SCORED_LOGITS = 1 << 26


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
        self._max_batch_tokens = max_batch_tokens
        self._tokenizer = tokenizer
        budget = kv_tokens if kv_tokens is not None else max(_KV_TOKENS, capacities(self.max_context)[-1])
        # As many prefixes as sequences: more would only grow colder.
        slots = 2 * max_seqs
        self._cache = KVCache(
            model.geometry, model.dtype, model.device, slots=slots, longest=self.max_context, budget=budget
        )
        self._roster = Scheduler(
            self._cache,
            max_seqs=max_seqs,
            max_context=self.max_context,
            eos_ids=model.eos_ids,
            prefix_cache=prefix_cache,
        )
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
        outputs = self._roster.end(ids, "abort")
        self._ended(outputs)
        return len(outputs)

    def update_weights(
        self, tensors: Mapping[str, torch.Tensor], version: int, adapter: AdapterInfo | None = None
    ) -> None:
        """Replace the weights. Sequences in flight go on under the new ones, all their tokens read again.

        Args:
            tensors: All weights, or those of an adapter.
            version: What they are called.
            adapter: What the tensors are where they are an adapter's.

        Raises:
            FormatError: A tensor does not fit; nothing has changed.
        """
        if adapter is None:
            self.model.load(tensors, version)
        else:
            self.model.load_adapter(tensors, adapter, version)
        for slot in self._roster.running.tolist():
            self._roster.requeue(slot)
        self._cache.drop_retained()
        self.set_version(version)

    def set_version(self, version: int) -> None:
        """Name the weights in use; what is sampled from now on carries this version."""
        if version == self.stats.weight_version:
            return
        self.stats.weight_version = version
        for generation in self._roster.waiting:
            generation.marks.append((version, len(generation.tokens) - len(generation.prompt)))
        for slot in self._roster.running.tolist():
            generation = self._roster.occupant(slot)
            generation.marks.append((version, int(self._cache.length[slot]) - len(generation.prompt)))

    def refresh_stats(self) -> EngineStats:
        """Return the counters with current gauges."""
        stats = self.stats
        stats.running, stats.waiting = len(self._roster.running), len(self._roster.waiting)
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
            self.stats.reused_tokens += self._roster.admit()
            if not len(self._roster.running):
                return False
            self._make_room()
            if not len(self._roster.running):
                return True
            if self._cache.compact(self._roster.running):
                self._roster.running = arrange(self._cache, self._roster.running)
            step = self._plan()
            places, targets = self._targets(step)
            keep = np.concatenate([step.keep, places]) if len(places) else step.keep
            logits = self.model.forward(step.ids, step.positions, step.plan, keep)
            if len(places):
                self._roster.table.write(*targets, self._scores(targets, logits[len(step.keep) :]))
            self._advance(step, logits[: len(step.keep)])
        return True

    def _enqueue(self, generation: Generation) -> None:
        generation.tokens = generation.prompt
        generation.marks = [(self.stats.weight_version, 0)]
        if generation.params.seed is None:
            generation.params = replace(generation.params, seed=secrets.randbits(63))
        if generation.params.stop and self._tokenizer is not None:
            generation.stops = StopStrings(self._tokenizer, generation.params.stop)
            for token in generation.prompt[len(generation.prompt) - generation.continued :].tolist():
                generation.stops.feed(token)
        self._roster.add(generation)

    def _make_room(self) -> None:
        """See that every sequence that runs has a row that holds it; the youngest wait where memory is short."""
        cache = self._cache
        slots = self._roster.running
        outgrown = slots[cache.length[slots] > cache.capacity[cache.pool_of[slots]]]
        if not len(outgrown):
            return
        for slot in sorted(outgrown.tolist(), key=lambda slot: self._roster.occupant(slot).order):
            while self._roster.runs(slot) and not cache.grow(slot, int(cache.length[slot])):
                youngest = max(self._roster.running.tolist(), key=lambda other: self._roster.occupant(other).order)
                self._roster.requeue(youngest)
                self.stats.preemptions += 1
        self._roster.running = arrange(cache, self._roster.running)

    def _plan(self) -> ModelInput:
        cache, slots = self._cache, self._roster.running
        sizes = cache.length[slots] - cache.cached[slots]
        prompts = np.flatnonzero(sizes > 1)
        if len(prompts):
            # Prompts are read in order of arrival, as far as the step's tokens reach; decoding never waits.
            left = max(self._max_batch_tokens - (len(slots) - len(prompts)), min(64, self._max_batch_tokens))
            scored = max(1, _SCORED_LOGITS // self.model.vocabulary)
            for place in sorted(prompts.tolist(), key=lambda place: self._roster.occupant(int(slots[place])).order):
                sizes[place] = min(int(sizes[place]), left)
                if int(slots[place]) in self._roster.scored:
                    sizes[place] = min(int(sizes[place]), scored)
                    scored -= int(sizes[place])
                left -= int(sizes[place])
            slots, sizes = slots[sizes > 0], sizes[sizes > 0]
        model = self.model
        return build_model_input(
            cache, slots, sizes, heads=model.geometry.heads, dtype=model.dtype, device=model.device
        )

    def _targets(self, step: ModelInput) -> tuple[Slots, tuple[Slots, Slots]]:
        """Return which tokens of a step predict an id of a prompt that is scored, and the slots and places of those."""
        places, slots, positions = [], [], []
        begins = np.cumsum(step.sizes) - step.sizes
        for index in (
            np.flatnonzero(np.isin(step.slots, list(self._roster.scored))).tolist() if self._roster.scored else ()
        ):
            slot, begin = int(step.slots[index]), int(begins[index])
            start = int(self._cache.cached[slot])
            # The last id of the prompt predicts what is sampled.
            last = len(self._roster.occupant(slot).prompt) - 1
            count = max(0, min(int(step.sizes[index]), last - start))
            places.append(np.arange(begin, begin + count))
            slots.append(np.full(count, slot))
            positions.append(np.arange(start + 1, start + 1 + count))
        if not places:
            return _NONE, (_NONE, _NONE)
        return np.concatenate(places), (np.concatenate(slots), np.concatenate(positions))

    def _scores(self, targets: tuple[Slots, Slots], logits: torch.Tensor) -> Logprobs:
        """Return the log-probabilities of the ids at these slots and places, before any temperature."""
        chosen = torch.from_numpy(self._cache.ids[targets].astype(np.int64)).to(logits.device).unsqueeze(1)
        scaled = logits.float()
        found: Logprobs = (scaled.gather(1, chosen).squeeze(1) - scaled.logsumexp(-1)).cpu().numpy()
        return found

    def _advance(self, step: ModelInput, logits: torch.Tensor) -> None:
        """Sample, write down, and end what has come to its end."""
        cache, stats, slots = self._cache, self.stats, step.sampling
        stats.steps += 1
        unread = self._roster.table.prompt_end[step.slots] - cache.cached[step.slots]
        stats.prefilled_tokens += int(np.minimum(np.maximum(unread, 0), step.sizes).sum())
        cache.cached[step.slots] += step.sizes
        if not len(slots):
            return
        places = cache.length[slots]
        table = self._roster.table
        allowed = self._roster.allowed(slots, logits.shape[1])
        ids, logprobs = sample(logits, table.rows(slots), table.draws(slots, places), allowed)
        finite = np.isfinite(logprobs)
        stats.generated_tokens += int(finite.sum())
        cache.append(slots, ids, finite)
        self._roster.table.write(slots, places, logprobs)
        stopped = self._roster.table.stops(slots, ids)
        full = cache.length[slots] >= self._roster.table.limit[slots]
        ended = stopped | full | ~finite
        if allowed is not None:
            self._roster.advance(slots[~ended], ids[~ended])
        outputs = self._watch(slots, ids, ended) if self._roster.watched else []
        for place in np.flatnonzero(ended).tolist():
            slot = int(slots[place])
            if not self._roster.runs(slot):
                continue
            if not finite[place]:
                outputs.append(self._roster.finish(slot, "error", None))
            elif stopped[place]:
                token = int(ids[place])
                outputs.append(self._roster.finish(slot, "stop", None if token in self.model.eos_ids else token))
            else:
                outputs.append(self._roster.finish(slot, "length", None))
        self._ended(outputs)

    def _watch(
        self, slots: npt.NDArray[np.int64], ids: npt.NDArray[np.int64], ended: npt.NDArray[np.bool_]
    ) -> list[Output]:
        """Look for stop strings, and collect what is streamed of sequences that go on."""
        outputs: list[Output] = []
        for place in np.flatnonzero(np.isin(slots, list(self._roster.watched))).tolist():
            slot = int(slots[place])
            generation = self._roster.occupant(slot)
            found = generation.stops.feed(int(ids[place])) if generation.stops is not None else None
            if found is not None:
                outputs.append(self._roster.finish(slot, "stop", found))
            elif generation.stream and not ended[place]:
                outputs.append(self._roster.save(slot).output(None, None))
        return outputs

    def _ended(self, outputs: list[Output]) -> None:
        if outputs:
            self.stats.requests += sum(1 for output in outputs if output.finish_reason is not None)
            self._deliver(outputs)
