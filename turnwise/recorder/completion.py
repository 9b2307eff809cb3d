"""Checks and parsing of completions, and the limits of a session."""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace

from turnwise.errors import BudgetExceeded, InferenceError, SessionError
from turnwise.model.canonical import Canonical, canonical_arguments, canonical_messages
from turnwise.model.core import Renderer
from turnwise.types import Completion, Message, SamplingParams, StopReason, TokenIds, ToolCall, ToolSchema, text_of


def check_completion(completion: Completion, params: SamplingParams, session_id: str) -> None:
    """Validate a completion, perhaps an empty one. Raises InferenceError (abnormal end) or SessionError (malformed)."""
    token_ids, finish = completion.token_ids, completion.finish_reason
    if finish not in ("stop", "length"):
        raise InferenceError(f"session {session_id}: a completion ended with {finish!r}; nothing was recorded")
    # A sum is finite only if everything in it is.
    if not math.isfinite(sum(completion.logprobs.tolist())):
        raise SessionError(f"session {session_id}: a completion came with a logprob that is not finite")
    if len(completion.logprobs) != len(token_ids):
        raise SessionError(
            f"session {session_id}: a completion of {len(token_ids)} ids came with {len(completion.logprobs)} logprobs"
        )
    if len(token_ids) and finish == "stop" and not params.stop and int(token_ids[-1]) not in params.stop_token_ids:
        raise SessionError(
            f"session {session_id}: the client reports 'stop', but the last id {int(token_ids[-1])} is no stop id "
            f"{params.stop_token_ids} and no stop string was given, which breaks the contract of LLMClient"
        )
    if completion.mask is not None and len(completion.mask) != len(token_ids):
        raise SessionError(
            f"session {session_id}: a completion of {len(token_ids)} ids has {len(completion.mask)} sampling masks"
        )
    covered = 0
    for _, start, end in completion.weight_versions:
        if start != covered or end <= start:
            covered = -1
            break
        covered = end
    if covered != len(token_ids):
        raise SessionError(
            f"session {session_id}: weight version spans {completion.weight_versions} do not cover {len(token_ids)} ids"
        )


def read_completion(
    renderer: Renderer, completion: Completion, prompt: TokenIds, tools: Sequence[ToolSchema], params: SamplingParams
) -> tuple[Message, bool]:
    """Parse a completion; also return whether a length limit cut the turn (no stop id at its end)."""
    token_ids = completion.token_ids
    message = renderer.parse(token_ids, prompt, tools)
    cut = not len(token_ids) or int(token_ids[-1]) not in renderer.stop_ids
    if cut and params.stop:
        # The agent receives the text before the stop string; the ids up to it stay recorded.
        text = text_of(message)
        ends = [position for position in (text.find(stop) for stop in params.stop) if position >= 0]
        if ends:
            message["content"] = text[: min(ends)]
    return message, cut and completion.finish_reason == "length"


def parse_completion(message: Message, turn: int, issued: Container[str], *, cut: bool) -> tuple[Message, Canonical]:
    """Return the message for the agent, with turn id and unique call ids, and its canonical form.

    Calls whose arguments cannot be represented get an error.

    Args:
        message: The parsed completion.
        turn: Number of earlier turns of the session.
        issued: Call ids already taken.
        cut: Whether a length limit cut the turn.
    """
    calls: list[ToolCall] = []
    for position, call in enumerate(message.get("tool_calls") or ()):
        if call.error is not None:
            # Such a call is compared and rendered by its raw text: nothing else would check its arguments.
            call = _mark_unusable(call)
        calls.append(replace(call, id=_unique_id(call.id, turn, position, issued, calls)))
    returned: Message = {
        "role": "assistant",
        "content": text_of(message),
        "turn_id": f"t{turn}",
        "finish_reason": "length" if cut else "stop",
    }
    if calls:
        returned["tool_calls"] = calls
    reasoning = message.get("reasoning_content")
    if reasoning:
        returned["reasoning_content"] = reasoning
    try:
        canonical = canonical_messages([returned])[0]
    except SessionError:
        returned["tool_calls"] = [_mark_unusable(call) for call in calls]
        canonical = canonical_messages([returned])[0]
    # Call ids prove which turn a message is; without calls only its content can.
    return returned, replace(canonical, turn=returned["turn_id"]) if canonical.calls else canonical


def _unique_id(call_id: str, turn: int, position: int, issued: Container[str], earlier: Sequence[ToolCall]) -> str:
    """Return the call id that the model wrote, or a new one if it is empty or taken."""
    while not call_id or call_id in issued or any(call.id == call_id for call in earlier):
        # Nine letters and digits: what the strictest chat template (Mistral's) accepts. A model may have written
        # such an id itself.
        call_id = f"c{turn:05d}{position:03d}"
        position += 1
    return call_id


def _mark_unusable(call: ToolCall) -> ToolCall:
    try:
        canonical_arguments(call.arguments)
    except SessionError as error:
        return replace(call, arguments={}, error=call.error or str(error))
    return call


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """Token and turn limits of a session.

    Attributes:
        context_length: Maximum tokens of prompt plus completion.
        max_tokens_per_turn: Maximum tokens of one completion.
        max_total_tokens: Maximum committed tokens over all branches, prompts included. Concurrent requests reserve
            nothing and may exceed it together.
        max_turns: Maximum number of model calls.
    """

    context_length: int
    max_tokens_per_turn: int | None = None
    max_total_tokens: int | None = None
    max_turns: int | None = None


def token_budget(
    limits: SessionLimits,
    session_id: str,
    *,
    prompt: int,
    committed: int,
    requests: int,
    requested: int | None,
    images: Sequence[int] = (),
) -> int:
    """Return the number of tokens that a request may sample.

    Args:
        limits: Limits of the session.
        session_id: For error messages.
        prompt: Prompt tokens.
        committed: Tokens of the session so far, over all branches.
        requests: Number of earlier requests.
        requested: The request's own limit.
        images: Prompt tokens of each image.

    Raises:
        BudgetExceeded: No tokens or turns are left.
    """

    def exceeded(reason: StopReason, why: str, used: int, limit: int) -> BudgetExceeded:
        return BudgetExceeded(reason, f"session {session_id}: {why}", used=used, limit=limit)

    if limits.max_turns is not None and requests >= limits.max_turns:
        raise exceeded(StopReason.MAX_TURNS, f"all {limits.max_turns} turns are used", requests, limits.max_turns)
    context, total = limits.context_length, limits.max_total_tokens
    if prompt >= context:
        hint = f" ({sum(images)} of them of {len(images)} images: send fewer or smaller ones)" if images else ""
        why = f"the prompt has {prompt} tokens{hint}, the context {context}"
        raise exceeded(StopReason.CONTEXT_OVERFLOW, why, prompt, context)
    if total is not None and committed >= total:
        raise exceeded(StopReason.MAX_TOKENS, f"all {total} tokens are used", committed, total)
    remaining = None if total is None else total - committed
    return min(n for n in (context - prompt, remaining, limits.max_tokens_per_turn, requested) if n is not None)


def context_overflow(limits: SessionLimits, session_id: str, tokens: int) -> BudgetExceeded:
    """Return the error of a prompt that has at least so many tokens, more than the context."""
    limit = limits.context_length
    return BudgetExceeded(
        StopReason.CONTEXT_OVERFLOW,
        f"session {session_id}: the prompt has at least {tokens} tokens, the context {limit}",
        used=tokens,
        limit=limit,
        exact=False,
    )
