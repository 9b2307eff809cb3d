"""Per-slot state of the batch: requests, sampling parameters, stop conditions and prefix reuse."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from turnwise.engine.batching.kv_cache import ACTIVE, RETAINED, KVCache, widen
from turnwise.engine.sampling import RowParams, seed_key, uniforms
from turnwise.engine.structured_output import GrammarState
from turnwise.types import FinishReason, Logprobs, Routes, SamplingMask, SamplingParams, TokenIds, VersionSpan, Words

Slots = npt.NDArray[np.int64]


class StopStrings:
    """Finds the first stop string in the decoded text (special tokens spelled out), id by id."""

    __slots__ = ("_longest", "_stops", "_stream", "_text", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stops = tuple(stops)
        self._longest = max(len(stop) for stop in stops)
        self._stream = DecodeStream(skip_special_tokens=False)
        self._text = ""

    def feed(self, token: int) -> str | None:
        """Add one id; return the stop string that it completes, or None."""
        piece = self._stream.step(self._tokenizer, token)
        if not piece:
            return None
        text = self._text + piece
        matches = [(text.find(stop), stop) for stop in self._stops if stop in text]
        # Any match lies partly in the new piece: what could begin one is all that is kept.
        self._text = text[-(self._longest - 1) :] if self._longest > 1 else ""
        return min(matches)[1] if matches else None


class MaskRecord:
    """The sampling masks of a completion, token by token."""

    __slots__ = ("_logprobs", "_sizes", "_words")

    def __init__(self) -> None:
        self._logprobs: list[float] = []
        self._sizes: list[int] = []
        self._words: list[Words] = []

    def add(self, logprob: float, size: int, words: Words) -> None:
        """Add a token: its log-probability after truncation, size and words of its kept set."""
        self._logprobs.append(logprob)
        self._sizes.append(size)
        self._words.append(words)

    def read(self, first: int) -> SamplingMask:
        """Return the masks of the tokens from ``first`` on."""
        words = np.concatenate([np.zeros(0, np.int32), *self._words[first:]], dtype=np.int32)
        logprobs = np.asarray(self._logprobs[first:], np.float32)
        return SamplingMask(logprobs, np.asarray(self._sizes[first:], np.int32), words)


@dataclass(frozen=True, slots=True)
class PromptImage:
    """An image of a prompt.

    Attributes:
        digest: Of its content.
        places: int64 of shape [N], ascending: positions of its placeholders in the prompt.
        features: What the vision tower takes (``engine/vision.py``).
    """

    digest: str
    positions: Slots
    features: Mapping[str, npt.NDArray[np.generic]]


@dataclass(slots=True)
class Generation:
    """A request and its progress.

    Attributes:
        id: Unique among the requests in flight.
        prompt: int32 of shape [tokens].
        params: Sampling parameters, with ``seed`` set.
        session_id: Requests of one session prefer the prefix that it left.
        continued: Number of last prompt ids that are a resumed completion (stop strings may begin in them).
        stream: Whether ids are delivered before the end, at first as soon as there are any.
        stream_interval: Ids that are delivered at a time from then on.
        scored: Whether the prompt's log-probabilities are returned, which rules out prefix reuse.
        token_ids: Prompt and sampled ids; current while the request holds no slot.
        logprobs: Of the sampled ids; likewise.
        marks: (weight version, number of ids sampled before it).
        delivered: Number of ids streamed.
        cached: Prompt tokens reused at first admission; -1 before.
        order: Arrival order.
        held: Grammar of structured output, if any.
        leader: Slot, request id and tokens of a shared prompt in prefill that this request waits for.
        scores: Log-probabilities of the prompt's ids but the first, once computed.
        images: Images of the prompt, in order.
        rotary: int64 of shape [3, tokens + 1]: rotary positions of the prompt, and of the token after it; None where
            they are the tokens' own.
        adapter: Number of the adapter that samples; 0 for the served model.
        routes: Routed experts of the tokens by which ids were sampled; current while the request holds no slot.
        masks: Sampling masks of the sampled ids, if they are asked for and anything is truncated.
        digests: Of the logits of some sampled ids (``Completion.digests``).
    """

    id: str
    prompt: TokenIds
    params: SamplingParams
    session_id: str = ""
    continued: int = 0
    stream: bool = False
    stream_interval: int = 1
    scored: bool = False
    token_ids: TokenIds = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    logprobs: Logprobs = field(default_factory=lambda: np.zeros(0, dtype=np.float32))
    marks: list[tuple[int, int]] = field(default_factory=list)
    stops: StopStrings | None = None
    delivered: int = 0
    cached: int = -1
    order: int = 0
    grammar: GrammarState | None = None
    leader: tuple[int, str, int] | None = None
    scores: Logprobs | None = None
    images: tuple[PromptImage, ...] = ()
    rotary: npt.NDArray[np.int64] | None = None
    adapter: int = 0
    routes: Routes | None = None
    masks: MaskRecord | None = None
    digests: list[str] = field(default_factory=list)

    def spans(self, sampled: int) -> tuple[VersionSpan, ...]:
        """Return the version spans of the first ``sampled`` ids."""
        ends = [start for _, start in self.marks[1:]] + [sampled]
        return tuple(
            (version, start, end) for (version, start), end in zip(self.marks, ends, strict=True) if end > start
        )

    def output(self, reason: FinishReason | None, stop_reason: int | str | None) -> Output:
        """Return the output so far; of a streamed request, what was not delivered yet."""
        start = len(self.prompt)
        sampled = len(self.token_ids) - start
        first = self.delivered if self.stream else 0
        self.delivered = sampled
        return Output(
            id=self.id,
            token_ids=self.token_ids[start + first :],
            logprobs=self.logprobs[first:],
            finish_reason=reason,
            stop_reason=stop_reason,
            weight_versions=self.spans(sampled),
            prompt_tokens=start,
            cached_tokens=max(0, self.cached),
            # What was interrupted may have been read under several weights, or in part.
            prompt_logprobs=self.scores if reason in ("stop", "length") else None,
            routes=None if reason is None or self.routes is None else self.routes[self.routes_start :],
            mask=None if self.masks is None else self.masks.read(first),
            digests=None if reason is None else " ".join(self.digests) or None,
        )

    @property
    def routes_start(self) -> int:
        """The first token whose routed experts are asked for."""
        return max(0, (self.params.routes_from or 0) - 1)


@dataclass(frozen=True, slots=True)
class Output:
    """Output of a request: its end, or the ids of one step.

    Attributes:
        id: The request.
        token_ids: The completion; of a streamed request, the ids since the last output.
        logprobs: Of ``token_ids``.
        finish_reason: None while it runs.
        stop_reason: Stop id (other than the model's EOS) or stop string.
        weight_versions: Spans over the whole completion so far.
        cached_tokens: Prompt tokens not prefilled.
        prompt_logprobs: float32 of shape [prompt_tokens - 1], of the prompt's ids but the first, at temperature 1; None
            unless requested.
        routes: At the end: routed experts of the tokens from ``params.routes_from`` on; None unless requested.
        mask: Sampling masks of ``token_ids``; None unless requested, and where nothing is truncated.
        digests: At the end: as in ``Completion``.
    """

    id: str
    token_ids: TokenIds
    logprobs: Logprobs
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    weight_versions: tuple[VersionSpan, ...]
    prompt_tokens: int
    cached_tokens: int
    prompt_logprobs: Logprobs | None = None
    routes: Routes | None = None
    mask: SamplingMask | None = None
    digests: str | None = None


WORTH_SHARING = 8
"""A shared prefix of fewer tokens is read again rather than copied."""


class BatchState:
    """Sampling parameters, limits and log-probabilities by slot.

    Attributes:
        limit: int64 of shape [slots]: length at which a sequence ends.
        prompt_end: int64 of shape [slots]: tokens known at admission.
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
        """Set a slot's request, with its log-probabilities so far."""
        params = generation.params
        start, stop = len(generation.prompt), len(generation.token_ids)
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
        """Make room for log-probabilities of ``tokens`` tokens."""
        if self._logprobs.shape[1] < tokens:
            self._logprobs = widen(self._logprobs, max(tokens, 2 * self._logprobs.shape[1]))

    def rows(self, slots: Slots) -> RowParams:
        """Return the sampling parameters of slots."""
        return RowParams(self._temperature[slots], self._top_p[slots], self._top_k[slots], self._min_p[slots])

    def draws(self, slots: Slots, positions: Slots) -> npt.NDArray[np.float64]:
        """Return the random number for each slot's token at its position."""
        return uniforms(self._keys[slots], positions)

    def write(self, slots: Slots, positions: Slots, logprobs: Logprobs) -> None:
        """Store the log-probabilities of the tokens at these positions."""
        self.widen(int(positions.max()) + 1)
        self._logprobs[slots, positions] = logprobs

    def logprobs(self, slot: int, start: int, stop: int) -> Logprobs:
        """Return a copy of the log-probabilities of tokens [start, stop)."""
        return self._logprobs[slot, start:stop].copy()

    def stops(self, slots: Slots, token_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Return which of the sampled ids end their sequence."""
        stopped: npt.NDArray[np.bool_] = (token_ids[:, None] == self._stop_ids[slots]).any(axis=1)
        return stopped


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """A prefix match: its slot and length, and a slot that is about to prefill a longer one."""

    slot: int | None = None
    tokens: int = 0
    wait_for: int | None = None


class PrefixIndex:
    """Prefix matching: finds the slot that shares most with a request, and places the request."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._session_of: dict[int, str] = {}
        self._slot_of: dict[str, int] = {}

    def remember(self, slot: int, session_id: str) -> None:
        """Record the session of a slot's tokens."""
        previous = self._session_of.pop(slot, None)
        if previous is not None and self._slot_of.get(previous) == slot:
            del self._slot_of[previous]
        if session_id:
            self._session_of[slot] = session_id
            self._slot_of[session_id] = slot

    def find(self, token_ids: npt.NDArray[np.int32], session_id: str, adapter: int = 0) -> PrefixMatch:
        """Find the longest prefix of an adapter, without the last token: its logits are needed."""
        cache = self._cache
        limit = len(token_ids) - 1
        recent = self._slot_of.get(session_id)
        if recent is not None and cache.state[recent] == RETAINED and cache.adapter[recent] == adapter:
            cached = int(cache.cached[recent])
            if WORTH_SHARING <= cached <= limit and np.array_equal(
                cache.token_ids[recent, :cached], token_ids[:cached]
            ):
                return PrefixMatch(recent, cached)
        shared = np.minimum(cache.shared_prefixes(token_ids, adapter), limit)
        if not len(shared):
            return PrefixMatch()
        ready = np.minimum(shared, cache.cached[: len(shared)])
        best, leader = int(ready.argmax()), int(shared.argmax())
        if shared[leader] - ready[best] >= WORTH_SHARING and cache.state[leader] == ACTIVE:
            return PrefixMatch(tokens=int(shared[leader]), wait_for=leader)
        return PrefixMatch(best, int(ready[best])) if ready[best] >= WORTH_SHARING else PrefixMatch()

    def place(
        self, token_ids: npt.NDArray[np.int32], match: PrefixMatch, adapter: int = 0, *, alone: bool
    ) -> tuple[int, int] | None:
        """Place a request in the prefix's own slot if nothing of it is lost, else in a new one with a copy.

        Args:
            token_ids: Ids of the request.
            match: Result of :meth:`find`, for the same adapter.
            adapter: Number of its adapter.
            alone: Whether nothing runs: then memory is reclaimed even at the cost of the prefix.

        Returns:
            Slot and number of reused tokens, or None if the request has to wait for memory.
        """
        cache, source = self._cache, match.slot
        if source is None:
            slot = cache.take(token_ids, adapter)
            return None if slot is None else (slot, 0)
        retained = cache.state[source] == RETAINED
        if retained and cache.cached[source] <= match.tokens and cache.reuse(source, token_ids, match.tokens):
            return source, match.tokens
        slot = cache.take(token_ids, adapter, source=source)
        if slot is not None:
            cache.share(slot, source, match.tokens)
            return slot, match.tokens
        if not retained or not alone:
            return None
        cache.release(source)
        slot = cache.take(token_ids, adapter)
        return None if slot is None else (slot, 0)
