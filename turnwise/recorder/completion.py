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
            f"session {session_id}: the client says 'stop', but the last id {int(token_ids[-1])} is no stop id "
            f"{params.stop_token_ids} and no stop string was given, which breaks the contract of LLMClient"
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
        # The agent is given the text before the stop string; the ids up to it stay recorded.
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
            # Compared and rendered by its raw text, so nothing else would look at its arguments.
            call = _usable(call)
        calls.append(replace(call, id=_new_id(call.id, turn, position, issued, calls)))
    given: Message = {
        "role": "assistant",
        "content": text_of(message),
        "turn_id": f"t{turn}",
        "finish_reason": "length" if cut else "stop",
    }
    if calls:
        given["tool_calls"] = calls
    reasoning = message.get("reasoning_content")
    if reasoning:
        given["reasoning_content"] = reasoning
    try:
        meant = canonical_messages([given])[0]
    except SessionError:
        given["tool_calls"] = [_usable(call) for call in calls]
        meant = canonical_messages([given])[0]
    # Ids prove which turn a message is; where there are none, only what it says can tell.
    return given, replace(meant, turn=given["turn_id"]) if meant.calls else meant


def _new_id(own: str, turn: int, position: int, issued: Container[str], before: Sequence[ToolCall]) -> str:
    """Return the model's own call id, or a new one where it is empty or taken."""
    while not own or own in issued or any(call.id == own for call in before):
        # Nine letters and digits: what the strictest chat template (Mistral's) accepts. A model may have written
        # such an id itself.
        own = f"c{turn:05d}{position:03d}"
        position += 1
    return own


def _usable(call: ToolCall) -> ToolCall:
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
    wanted: int | None,
    images: Sequence[int] = (),
) -> int:
    """Return the number of tokens that a request may sample.

    Args:
        limits: Limits of the session.
        session_id: For error messages.
        prompt: Prompt tokens.
        committed: Tokens of the session so far, over all branches.
        requests: Number of earlier requests.
        wanted: The request's own limit.
        images: Prompt tokens of each image.

    Raises:
        BudgetExceeded: No tokens or turns are left.
    """
    if limits.max_turns is not None and requests >= limits.max_turns:
        raise BudgetExceeded(
            StopReason.MAX_TURNS,
            f"session {session_id}: all {limits.max_turns} turns are used",
            used=requests,
            limit=limits.max_turns,
        )
    room = limits.context_length - prompt
    if room <= 0:
        raise BudgetExceeded(
            StopReason.CONTEXT_OVERFLOW,
            f"session {session_id}: the prompt has {prompt} tokens{_of_images(images)}, the context "
            f"{limits.context_length}",
            used=prompt,
            limit=limits.context_length,
        )
    allowed = [room]
    if limits.max_total_tokens is not None:
        left = limits.max_total_tokens - committed
        if left <= 0:
            raise BudgetExceeded(
                StopReason.MAX_TOKENS,
                f"session {session_id}: all {limits.max_total_tokens} tokens are used",
                used=committed,
                limit=limits.max_total_tokens,
            )
        allowed.append(left)
    return min(allowed + [n for n in (limits.max_tokens_per_turn, wanted) if n is not None])


def context_overflow(limits: SessionLimits, session_id: str, tokens: int) -> BudgetExceeded:
    """Return the error of a prompt that has at least so many tokens, more than the context."""
    most = limits.context_length
    return BudgetExceeded(
        StopReason.CONTEXT_OVERFLOW,
        f"session {session_id}: the prompt has at least {tokens} tokens, the context {most}",
        used=tokens,
        limit=most,
        exact=False,
    )


def _of_images(images: Sequence[int]) -> str:
    return f" ({sum(images)} of them of {len(images)} images: send fewer or smaller ones)" if images else ""
