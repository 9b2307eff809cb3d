"""The built-in inference engine: continuous batching over one packed forward per step.

A step runs one token of each decoding sequence and chunks of prompts in prefill. Sequences differ only in how many of
their tokens have KV entries (``cached``): one missing means decoding, more mean prefill. A weight update therefore
drops the KV cache and prefills every sequence again; preemption does the same to one sequence.

A prefix is prefilled once: finished sequences stay cached until their memory is needed, a request takes over or copies
what it shares with any sequence, and waits while another prefills a shared prompt.
"""

from __future__ import annotations

import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer

from turnwise.engine.batching.batch_state import Generation, MaskRecord, Output, Slots, StopStrings
from turnwise.engine.batching.kv_cache import RETAINED, KVCache, capacities
from turnwise.engine.batching.prompt_images import PromptImages
from turnwise.engine.batching.scheduler import ModelInput, Scheduler, arrange, build_model_input
from turnwise.engine.causal_lm import CausalLM
from turnwise.engine.decoding.graphs import DecodeGraphs, DecodeKernels
from turnwise.engine.decoding.sleep import EngineMemory
from turnwise.engine.experts.route_rows import RouteRows
from turnwise.engine.numerics.exact import DIGEST_EVERY, digest_logits, token_logprobs
from turnwise.engine.sampling import Sampled, sample
from turnwise.model.core import AdapterInfo, GroupAddress
from turnwise.types import Logprobs


@dataclass(slots=True)
class EngineStats:
    """Counters and gauges of an engine.

    Attributes:
        requests: Finished requests, for any reason.
        prefilled_tokens: Prompt tokens run (again, after a weight update or preemption).
        reused_tokens: Prompt tokens served from the KV cache.
        generated_tokens: Sampled ids.
        truncated_tokens: Those of them that were sampled while top-k, top-p, min-p or a grammar cut others off.
        cut_mass: The probability of what was cut off, added up over them.
        steps: Forward passes.
        preemptions: Sequences that lost their memory to an older one.
        images: Images encoded by the vision tower.
        running: Running sequences.
        waiting: Requests that wait for memory, a slot or a shared prompt.
        retained: Retained prefixes.
        kv_tokens: Allocated KV cache, in tokens.
        paused: Whether sampling is paused.
    """

    requests: int = 0
    prefilled_tokens: int = 0
    reused_tokens: int = 0
    generated_tokens: int = 0
    truncated_tokens: int = 0
    cut_mass: float = 0.0
    steps: int = 0
    preemptions: int = 0
    images: int = 0
    running: int = 0
    waiting: int = 0
    retained: int = 0
    kv_tokens: int = 0
    weight_version: int = 0
    paused: bool = False


ResultT = TypeVar("ResultT")
_NONE: Slots = np.zeros(0, dtype=np.int64)
_KV_TOKENS = 131072
# Logits of prompts that are scored are held for this many (token, vocabulary) pairs at once: 256 MiB in float32.
_SCORED_LOGITS = 1 << 26


class Engine:
    """Runs requests on a model. :meth:`submit` and :meth:`call` are thread-safe; the rest is for its own thread.

    Attributes:
        memory: Gives memory back and takes it again.
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
        adapters: Sequence[str] = (),
        tokenizer: Tokenizer | None = None,
        decode_kernels: DecodeKernels | None = None,
    ) -> None:
        """Create an engine.

        Args:
            model: The model.
            deliver: Called with the outputs of each step, on the engine's thread.
            max_seqs: Maximum running sequences.
            max_context: Maximum tokens of a sequence; None for the model's limit.
            kv_tokens: KV cache size in tokens, at least a whole sequence (else ValueError); None for 131072, or one.
            max_batch_tokens: Maximum tokens of a step (exceeded only if more sequences decode).
            prefix_cache: Whether shared prefixes are reused.
            weight_version: Version of the weights as loaded.
            adapters: Names of adapters whose factors come later; until then each is the bare model.
            tokenizer: For stop strings.
            decode_kernels: Kernels of recorded decoding steps; None for those of the device, if it has any.
        """
        self.model = model
        self.max_context = min(max_context or model.context_length, model.context_length)
        self.stats = EngineStats(weight_version=weight_version)
        self._deliver = deliver
        self._max_batch_tokens = max_batch_tokens
        self._tokenizer = tokenizer
        longest = capacities(self.max_context, model.geometry.smallest_row)[-1]
        budget = kv_tokens if kv_tokens is not None else max(_KV_TOKENS, longest)
        # As many prefixes as sequences: more would only grow colder.
        self._cache = KVCache(
            model.geometry, model.dtype, model.device, slots=2 * max_seqs, longest=self.max_context, budget=budget
        )
        self._roster = Scheduler(
            self._cache,
            max_seqs=max_seqs,
            max_context=self.max_context,
            eos_ids=model.eos_ids,
            prefix_cache=prefix_cache,
        )
        self._images = None if model.vision is None else PromptImages(model.vision)
        self._cache.routes = RouteRows() if model.keeps_routes else None
        self._graphs = DecodeGraphs.of(model, self._cache, max_seqs, decode_kernels)
        self.memory = EngineMemory(model, self._cache, self._roster, self._images, self._graphs)
        # Of the served model and of each adapter, by number.
        self._versions: dict[int, int] = {0: weight_version}
        for adapter in adapters:
            self._versions[model.adapters.reserve(adapter)] = weight_version
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Event()
        self._closed = False

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
        """Run steps until :meth:`close`, sleeping while idle. Exceptions are fatal."""
        while not self._closed:
            if not self.step():
                self._wake.wait()
                self._wake.clear()

    def _post(self, work: Callable[[], None]) -> None:
        self._inbox.append(work)
        self._wake.set()

    def pause(self, *, abort: bool) -> int:
        """Pause sampling; requests in flight are kept, or with ``abort`` finished. Returns how many were finished."""
        self.stats.paused = True
        return self.abort(None) if abort else 0

    def resume(self) -> None:
        """Resume sampling."""
        self.stats.paused = False

    def abort(self, ids: Iterable[str] | None) -> int:
        """Finish requests (None: all) with what they have; return their number. Unknown ids are ignored."""
        outputs = self._roster.end(ids, "abort")
        self._deliver_outputs(outputs)
        return len(outputs)

    def update_weights(
        self, tensors: Mapping[str, torch.Tensor] | GroupAddress, version: int, adapter: AdapterInfo | None = None
    ) -> None:
        """Replace the weights by full ones, also those that a group is sent, or an adapter's.

        Sequences in flight are prefilled again.

        An adapter with a name concerns its own requests and prefixes only. Changes nothing where it raises FormatError,
        because a tensor does not fit, or InferenceError, because the weights sleep.
        """
        self.memory.check_room(version)
        number = None
        if isinstance(tensors, GroupAddress):
            self.model.receive(tensors, version)
        elif adapter is None:
            self.model.load(tensors, version)
        elif adapter.name is None:
            self.model.load_adapter(tensors, adapter, version)
        else:
            number = self.model.load_named(tensors, adapter, version)
        for slot in self._roster.running.tolist():
            if number in (None, self._roster.occupant(slot).adapter):
                self._roster.requeue(slot)
        self._cache.drop_retained(number)
        # Rows of running sequences may have moved.
        self._roster.running = arrange(self._cache, self._roster.running)
        if self._images is not None and number is None:
            self._images.forget()
        self.set_version(version, number or 0)

    def version_of(self, adapter: int) -> int:
        """Return the version of an adapter's weights; of the served model's for number 0."""
        return self._versions[adapter]

    def set_version(self, version: int, adapter: int = 0) -> None:
        """Set the version of the current weights of an adapter, for ids sampled from now on."""
        if version == self._versions.get(adapter):
            return
        self._versions[adapter] = version
        if adapter == 0:
            self.stats.weight_version = version
        for generation in self._roster.waiting:
            if generation.adapter == adapter:
                generation.marks.append((version, len(generation.token_ids) - len(generation.prompt)))
        for slot in self._roster.running.tolist():
            generation = self._roster.occupant(slot)
            if generation.adapter == adapter:
                generation.marks.append((version, int(self._cache.length[slot]) - len(generation.prompt)))

    def refresh_stats(self) -> EngineStats:
        """Return the counters with current gauges."""
        stats = self.stats
        stats.running, stats.waiting = len(self._roster.running), len(self._roster.waiting)
        stats.retained = self._cache.count(RETAINED)
        stats.kv_tokens = self._cache.allocated
        stats.images = 0 if self._images is None else self._images.encoded
        return replace(stats)

    def step(self) -> bool:
        """Run posted calls, then one forward pass; return whether there was work."""
        with torch.inference_mode():
            while self._inbox:
                self._inbox.popleft()()
            if self.stats.paused or not self.memory.complete:
                return False
            self.stats.reused_tokens += self._roster.admit()
            if not len(self._roster.running):
                self._cache.trim()
                return False
            self._make_room()
            if not len(self._roster.running):
                return True
            if self._cache.trim() | self._cache.compact(self._roster.running):
                self._roster.running = arrange(self._cache, self._roster.running)
            step = self._plan()
            scoring, targets = self._targets(step)
            keep = np.concatenate([step.keep, scoring]) if len(scoring) else step.keep
            logits = self._forward(step, keep, plain=not len(scoring))
            if self._cache.routes is not None and self.model.routers is not None:
                starts = self._cache.cached[step.slots]
                self._cache.routes.write(step.slots, starts, step.sizes, self.model.routers.take())
            if len(scoring):
                self._roster.table.write(*targets, self._scores(targets, logits[len(step.keep) :]))
            self._advance(step, logits[: len(step.keep)])
        return True

    def _forward(self, step: ModelInput, keep: Slots, *, plain: bool) -> torch.Tensor:
        adapters = None
        if self.model.adapters.numbers:
            adapters = np.repeat(self._cache.adapter[step.slots], step.sizes)
        elif self._graphs is not None and plain:
            recorded = self._graphs.logits(step)
            if recorded is not None:
                return recorded
        if self._images is None:
            return self.model.forward(step.token_ids, step.positions, step.plan, keep, adapters=adapters)
        positions, placed = self._images.prepare(step, self._roster.seeing)
        return self.model.forward(self._images.plain(step.token_ids), positions, step.plan, keep, placed, adapters)

    def _enqueue(self, generation: Generation) -> None:
        generation.token_ids = generation.prompt
        if self._images is not None:
            self._images.enter(generation)
        generation.marks = [(self._versions[generation.adapter], 0)]
        if generation.params.sampling_mask and generation.params.truncates:
            generation.masks = MaskRecord()
        if generation.params.seed is None:
            generation.params = replace(generation.params, seed=secrets.randbits(63))
        if generation.params.stop and self._tokenizer is not None:
            generation.stops = StopStrings(self._tokenizer, generation.params.stop)
            for token in generation.prompt[len(generation.prompt) - generation.continued :].tolist():
                generation.stops.feed(token)
        self._roster.add(generation)

    def _make_room(self) -> None:
        """Grow the rows of running sequences; preempt the youngest when memory is short."""
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
            budget = max(self._max_batch_tokens - (len(slots) - len(prompts)), min(64, self._max_batch_tokens))
            scored = max(1, _SCORED_LOGITS // self.model.vocabulary)
            for index in sorted(prompts.tolist(), key=lambda index: self._roster.occupant(int(slots[index])).order):
                sizes[index] = min(int(sizes[index]), budget)
                if int(slots[index]) in self._roster.scored:
                    sizes[index] = min(int(sizes[index]), scored)
                    scored -= int(sizes[index])
                budget -= int(sizes[index])
            slots, sizes = slots[sizes > 0], sizes[sizes > 0]
        return build_model_input(cache, slots, sizes)

    def _targets(self, step: ModelInput) -> tuple[Slots, tuple[Slots, Slots]]:
        """Return which tokens of a step predict a scored prompt's ids, with the slots and positions of those ids."""
        tokens, slots, positions = [], [], []
        begins = np.cumsum(step.sizes) - step.sizes
        for index in (
            np.flatnonzero(np.isin(step.slots, list(self._roster.scored))).tolist() if self._roster.scored else ()
        ):
            slot, begin = int(step.slots[index]), int(begins[index])
            start = int(self._cache.cached[slot])
            # The last id of the prompt predicts what is sampled.
            last_position = len(self._roster.occupant(slot).prompt) - 1
            count = max(0, min(int(step.sizes[index]), last_position - start))
            tokens.append(np.arange(begin, begin + count))
            slots.append(np.full(count, slot))
            positions.append(np.arange(start + 1, start + 1 + count))
        if not tokens:
            return _NONE, (_NONE, _NONE)
        return np.concatenate(tokens), (np.concatenate(slots), np.concatenate(positions))

    def _scores(self, targets: tuple[Slots, Slots], logits: torch.Tensor) -> Logprobs:
        """Return the log-probabilities of the ids at these slots and positions, at temperature 1."""
        ids = self._cache.token_ids[targets].astype(np.int64)
        ids = ids if self._images is None else self._images.plain(ids)
        columns = torch.from_numpy(ids).to(logits.device).unsqueeze(1)
        scaled = logits.float()
        if self.model.geometry.exact:
            exact: Logprobs = token_logprobs(scaled, columns[:, 0]).numpy()
            return exact
        logprobs: Logprobs = (scaled.gather(1, columns).squeeze(1) - scaled.logsumexp(-1)).cpu().numpy()
        return logprobs

    def _advance(self, step: ModelInput, logits: torch.Tensor) -> None:
        cache, stats, slots = self._cache, self.stats, step.sampling
        stats.steps += 1
        unread = self._roster.table.prompt_end[step.slots] - cache.cached[step.slots]
        stats.prefilled_tokens += int(np.minimum(np.maximum(unread, 0), step.sizes).sum())
        cache.cached[step.slots] += step.sizes
        if not len(slots):
            return
        positions = cache.length[slots]
        table = self._roster.table
        allowed = self._roster.allowed(slots, logits.shape[1])
        draws = table.draws(slots, positions)
        sampled = sample(logits, table.rows(slots), draws, allowed, exact=self.model.geometry.exact)
        token_ids, logprobs, cut = sampled[:3]
        finite = np.isfinite(logprobs)
        if cut is not None:
            self._record_masks(slots, sampled, allowed, finite)
        if self.model.geometry.exact:
            # Lower bits, which do not choose the id: positions would be the same in all episodes of an environment.
            for row in np.flatnonzero(finite & (draws * 2.0**32 % DIGEST_EVERY < 1)).tolist():
                digests = self._roster.occupant(slots[row]).digests
                digests.append(f"{positions[row]}:{digest_logits(logits[row])}")
        stats.generated_tokens += int(finite.sum())
        if cut is not None:
            stats.truncated_tokens += int((cut > 0).sum())
            stats.cut_mass += float(cut[cut > 0].sum())
        cache.append(slots, token_ids, finite)
        self._roster.table.write(slots, positions, logprobs)
        stopped = self._roster.table.stops(slots, token_ids)
        full = cache.length[slots] >= self._roster.table.limit[slots]
        finished = stopped | full | ~finite
        if allowed is not None:
            self._roster.advance(slots[~finished], token_ids[~finished])
        outputs = self._watch(slots, token_ids, finished) if self._roster.watched else []
        for index in np.flatnonzero(finished).tolist():
            slot = int(slots[index])
            if not self._roster.runs(slot):
                continue
            if not finite[index]:
                outputs.append(self._roster.finish(slot, "error", None))
            elif stopped[index]:
                token_id = int(token_ids[index])
                outputs.append(self._roster.finish(slot, "stop", None if token_id in self.model.eos_ids else token_id))
            else:
                outputs.append(self._roster.finish(slot, "length", None))
        self._deliver_outputs(outputs)

    def _record_masks(
        self, slots: Slots, sampled: Sampled, allowed: npt.NDArray[np.bool_] | None, finite: npt.NDArray[np.bool_]
    ) -> None:
        masks = [self._roster.occupant(slot).masks for slot in slots.tolist()]
        rows = np.asarray([row for row, mask in enumerate(masks) if mask is not None and finite[row]], np.int64)
        if not len(rows):
            return
        sets = sampled.sets(rows, self._roster.table.rows(slots).truncated, allowed)
        for row, (size, words) in zip(rows.tolist(), sets, strict=True):
            if (mask := masks[row]) is not None:
                mask.add(float(sampled.kept_logprobs[row]), size, words)

    def _watch(
        self, slots: npt.NDArray[np.int64], token_ids: npt.NDArray[np.int64], finished: npt.NDArray[np.bool_]
    ) -> list[Output]:
        """Check stop strings, and collect streamed ids of sequences that continue."""
        outputs: list[Output] = []
        for index in np.flatnonzero(np.isin(slots, list(self._roster.watched))).tolist():
            slot = int(slots[index])
            generation = self._roster.occupant(slot)
            stop = generation.stops.feed(int(token_ids[index])) if generation.stops is not None else None
            if stop is not None:
                outputs.append(self._roster.finish(slot, "stop", stop))
            elif generation.stream and not finished[index] and self._roster.due(slot):
                outputs.append(self._roster.save(slot).output(None, None))
        return outputs

    def _deliver_outputs(self, outputs: list[Output]) -> None:
        if outputs:
            self.stats.requests += sum(1 for output in outputs if output.finish_reason is not None)
            self._deliver(outputs)
