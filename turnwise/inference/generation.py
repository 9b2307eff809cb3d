"""One request inside the engine, and what comes out of it.

Owns: :class:`Generation` (a request and how far it is), :class:`Output`, and the matching of stop strings while ids
are sampled. Refuses: memory and scheduling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from turnwise.inference.guided import Held
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
