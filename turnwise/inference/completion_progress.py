"""A completion so far: what servers reported of it, part by part, until it ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from turnwise.errors import InferenceError
from turnwise.types import (
    Completion,
    FinishReason,
    Logprobs,
    Media,
    Routes,
    SamplingMask,
    SamplingParams,
    TokenIds,
    VersionSpan,
    join_masks,
)


@dataclass(slots=True)
class Choice:
    """A validated choice of a response.

    Attributes:
        token_ids: int32 of shape [tokens].
        logprobs: float32 of shape [tokens].
        finish_reason: None while a stream is open.
        spans: Over the whole completion; None if the server reports none.
        routes: Of the tokens that were computed since the last choice; None if the server reports none.
        mask: Sampling masks of the ids; None if the server reports none.
        digests: As in :class:`~turnwise.types.Completion`.
    """

    token_ids: TokenIds
    logprobs: Logprobs
    finish_reason: FinishReason | None
    spans: tuple[VersionSpan, ...] | None
    routes: Routes | None = None
    mask: SamplingMask | None = None
    digests: str | None = None


def decode_spans(listed: Any) -> tuple[VersionSpan, ...] | None:
    """Return version spans; versions may be integers or strings, vLLM's unnamed ``default`` is 0."""
    if not listed:
        return None
    return tuple(
        (0 if span["version"] == "default" else int(span["version"]), int(span["start"]), int(span["end"]))
        for span in listed
    )


def covers(spans: Sequence[VersionSpan], tokens: int) -> bool:
    """Return whether spans cover [0, ``tokens``) without gaps."""
    position = 0
    for _, start, end in spans:
        if start != position or end <= start:
            return False
        position = end
    return position == tokens


@dataclass(slots=True)
class CompletionProgress:
    """A completion so far, over all its parts; ``version``: of the weights that its last request named."""

    params: SamplingParams
    prompt: TokenIds
    media: tuple[Media, ...] = ()
    token_ids: list[TokenIds] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    sampled: int = 0
    named: int = 0
    part_spans: tuple[VersionSpan, ...] | None = None
    version: int | None = None
    empty_aborts: int = 0
    routes: list[Routes] = field(default_factory=list)
    masks: list[SamplingMask | None] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)

    def add(self, choice: Choice) -> None:
        """Add what an answer reports."""
        self.token_ids.append(choice.token_ids)
        self.logprobs.append(choice.logprobs)
        self.masks.append(choice.mask)
        self.sampled += len(choice.token_ids)
        if choice.routes is not None and len(choice.token_ids):
            self.routes.append(choice.routes)
        if choice.digests is not None:
            self.digests.append(choice.digests)
        spans = choice.spans
        if self.version is not None:
            # The name that was asked for has one version, whatever the server says of its model's.
            spans = ((self.version, 0, self.sampled - self.named),) if self.sampled > self.named else ()
        self.part_spans = spans or self.part_spans

    def drop(self) -> None:
        """Discard what was sampled: a grammar cannot resume in the middle."""
        self.token_ids, self.logprobs, self.spans, self.routes, self.masks = [], [], [], [], []
        self.digests = []
        self.sampled = self.named = 0

    def drop_part(self) -> None:
        """Discard what was sampled since the last part ended: nothing says by which weights."""
        while self.sampled > self.named:
            self.sampled -= len(self.token_ids.pop())
            self.logprobs.pop()
            self.masks.pop()

    def end_part(self, url: str) -> None:
        """Take over the version spans of the part that ends here, relative to its start; None means version 0."""
        begin, spans = self.named, self.part_spans
        if spans is None:
            spans = ((0, 0, self.sampled - begin),) if self.sampled > begin else ()
        if not covers(spans, self.sampled - begin):
            raise InferenceError(f"{url} answered {self.sampled - begin} ids with weight versions for {spans}")
        for version, start, end in spans:
            goes_on = bool(self.spans) and self.spans[-1][0] == version
            first = self.spans.pop()[1] if goes_on else start + begin
            self.spans.append((version, first, end + begin))
        self.named, self.part_spans = self.sampled, None
        if self.sampled and self.params.routes_from is not None:
            self._check_routes(url, max(1, self.params.routes_from))
        if self.params.sampling_mask and self.params.truncates:
            self._check_masks(url)

    def _check_masks(self, url: str) -> None:
        if any(mask is None and len(ids) for mask, ids in zip(self.masks, self.token_ids, strict=True)):
            cause = "top_p, top_k or min_p" if self.params.guide is None else "a grammar (tool_choice or a schema)"
            raise InferenceError(
                f"{url} reports log-probabilities of the whole distribution, and no sampling masks, where {cause} "
                "truncate: serve the model by inference.engine builtin, or set rollout.sampling_mask to full"
            )

    def _check_routes(self, url: str, first: int) -> None:
        missing = len(self.prompt) + self.sampled - first - sum(map(len, self.routes))
        if missing or len({part.shape[1:] for part in self.routes}) > 1:
            raise InferenceError(
                f"{url} answered {self.sampled} ids without the routed experts of {missing} tokens: launch its servers "
                "with inference.routed_experts (vLLM: --enable-return-routed-experts), or set it to false"
            )

    def completion(self, finish_reason: FinishReason) -> Completion:
        """Return the completion, which ended like this."""
        return Completion(
            token_ids=self.token_ids[0] if len(self.token_ids) == 1 else np.concatenate(self.token_ids),
            logprobs=self.logprobs[0] if len(self.logprobs) == 1 else np.concatenate(self.logprobs),
            finish_reason=finish_reason,
            weight_versions=tuple(self.spans),
            routed_experts=self.all_routes(),
            mask=self.mask(),
            digests=self.all_digests(),
        )

    def mask(self) -> SamplingMask | None:
        """Return the sampling masks of all ids, if any were reported."""
        mask = join_masks(list(zip(self.logprobs, self.masks, strict=True)))
        guide = self.params.guide
        if mask is None or guide is None or not mask.by_grammar.any():
            return mask
        return replace(mask, grammar=(guide.tag, self.params.stop_token_ids))

    def all_routes(self) -> Routes | None:
        """Return the routed experts of all tokens, if any were reported."""
        return np.concatenate(self.routes) if self.routes else None

    def all_digests(self) -> str | None:
        """Return the digests of logits over all parts, if any were reported."""
        return " ".join(self.digests) or None
