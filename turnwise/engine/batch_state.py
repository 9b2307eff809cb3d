"""What the engine knows of each slot beside its tokens: how it samples, where it ends, what it sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from turnwise.engine.kv_cache import ACTIVE, RETAINED, KVCache, widen
from turnwise.engine.sampling import RowParams, seed_key, uniforms
from turnwise.engine.structured_output import Held
from turnwise.types import FinishReason, Logprobs, SamplingParams, TokenIds, VersionSpan


class StopStrings:
    """Finds the first stop string in what ids decode to, id by id.

    The text is that of the ids with special tokens spelled out; a character whose bytes come with several ids is
    looked at when it is complete.
    """

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
        found = [(text.find(stop), stop) for stop in self._stops if stop in text]
        # Any match lies partly in the new piece: what could begin one is all that is kept.
        self._text = text[-(self._longest - 1) :] if self._longest > 1 else ""
        return min(found)[1] if found else None


@dataclass(slots=True)
class Generation:
    """A request and its progress.

    Attributes:
        id: Unique among the requests in flight.
        prompt: int32 of shape [tokens].
        params: How to sample; ``seed`` is set.
        session_id: Requests of one session prefer the prefix that the session left.
        continued: How many last ids of the prompt are a completion that goes on (stop strings may begin in them).
        stream: Whether each step's ids are delivered.
        scored: Whether the log-probabilities of the prompt are wanted: no part of it is then taken over from others.
        tokens: Prompt and what was sampled so far; current while the request holds no memory.
        logprobs: Of what was sampled so far; likewise.
        marks: (weight version, how many ids were sampled when it came into use).
        stops: Its stop strings, if any.
        delivered: Ids that were streamed.
        cached: Prompt tokens whose keys and values were there when it was first admitted; -1 before.
        order: Its place in the order of arrival.
        held: What holds it to a grammar, if anything.
        leader: Slot, request id and tokens of a prompt being read that this one waits for.
        scores: Log-probabilities of the prompt's ids but the first, where they are wanted and read.
    """

    id: str
    prompt: TokenIds
    params: SamplingParams
    session_id: str = ""
    continued: int = 0
    stream: bool = False
    scored: bool = False
    tokens: TokenIds = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    logprobs: Logprobs = field(default_factory=lambda: np.zeros(0, dtype=np.float32))
    marks: list[tuple[int, int]] = field(default_factory=list)
    stops: StopStrings | None = None
    delivered: int = 0
    cached: int = -1
    order: int = 0
    held: Held | None = None
    leader: tuple[int, str, int] | None = None
    scores: Logprobs | None = None

    def spans(self, sampled: int) -> tuple[VersionSpan, ...]:
        """Return which version sampled which of the first ``sampled`` ids."""
        ends = [start for _, start in self.marks[1:]] + [sampled]
        return tuple(
            (version, start, end) for (version, start), end in zip(self.marks, ends, strict=True) if end > start
        )

    def output(self, reason: FinishReason | None, stop_reason: int | str | None) -> Output:
        """Return what there is to say now; of a streamed request, what has not been said yet."""
        start = len(self.prompt)
        sampled = len(self.tokens) - start
        first = self.delivered if self.stream else 0
        self.delivered = sampled
        return Output(
            id=self.id,
            token_ids=self.tokens[start + first :],
            logprobs=self.logprobs[first:],
            finish_reason=reason,
            stop_reason=stop_reason,
            weight_versions=self.spans(sampled),
            prompt_tokens=start,
            cached_tokens=max(0, self.cached),
            # What was interrupted may have been read under several weights, or in part.
            prompt_logprobs=self.scores if reason in ("stop", "length") else None,
        )


@dataclass(frozen=True, slots=True)
class Output:
    """What the engine says of a request: its end, or the ids of one step.

    Attributes:
        id: The request.
        token_ids: The completion; of a streamed request, the ids since the last output.
        logprobs: Theirs.
        finish_reason: None while it goes on.
        stop_reason: The stop id (other than the model's own end) or stop string that ended it.
        weight_versions: Spans over the whole completion so far.
        prompt_tokens: Length of the prompt.
        cached_tokens: How much of the prompt was not read again.
        prompt_logprobs: float32 of shape [prompt_tokens - 1], of the prompt's ids but the first, before any
            temperature; None where they are not wanted.
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


WORTH_SHARING = 8
"""A shared prefix of fewer tokens is read again rather than copied."""

Slots = npt.NDArray[np.int64]


class BatchState:
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
