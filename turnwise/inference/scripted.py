"""A scripted model: a client that returns prepared completions, for tests, demonstrations and dry runs."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from turnwise.errors import RequestRefused, SessionError, StructuredOutputError
from turnwise.model.canonical import canonical_arguments, canonical_messages
from turnwise.model.core import LLMClient, ModelInfo, Renderer
from turnwise.recorder.session import Session, SessionLimits
from turnwise.trajectory import Trajectory
from turnwise.types import (
    Completion,
    FinishReason,
    Logprobs,
    Message,
    SamplingParams,
    TokenDelta,
    TokenIds,
    TokenPrompt,
    ToolCall,
    ToolSchema,
)

Line = Message | str | Sequence[int] | TokenIds | Completion | BaseException
"""What a script says next: a message or its text (encoded as the chat format would write it), exact ids, a whole
completion, or an error to raise."""


@dataclass(frozen=True, slots=True)
class ScriptedRequest:
    """A request to a script: ``number`` counts earlier ones of its session, ``renderer.decode`` reads the prompt."""

    session_id: str
    number: int
    prompt: TokenIds
    params: SamplingParams
    renderer: Renderer

    @property
    def text(self) -> str:
        """The prompt as text, special tokens included."""
        return self.renderer.decode(self.prompt)


Script = Callable[[ScriptedRequest], Line | Awaitable[Line]]


class ScriptedClient(LLMClient):
    """Client that answers from a script.

    Log-probabilities are derived from id and position, so that tests detect misalignment.

    Args:
        renderer: Encodes the scripted messages.
        script: A function of the request (plain or async), or a list that each session steps through.
        tools: Tools for the rendering of calls.
        context_length: Reported by :meth:`model_info`, and enforced.
        weight_version: Version of the completions.
        guides: Whether structured output is accepted; the script is trusted to conform.
    """

    def __init__(
        self,
        renderer: Renderer,
        script: Script | Sequence[Line],
        *,
        tools: Sequence[ToolSchema] = (),
        context_length: int = 1_000_000,
        weight_version: int = 0,
        guides: bool = False,
    ) -> None:
        self.requests: list[ScriptedRequest] = []
        self.weight_version = weight_version
        self._renderer = renderer
        self._script = script
        self._tools = tuple(tools)
        self._context_length = context_length
        self._guides = guides
        self._numbers: dict[str, int] = {}

    async def generate(self, prompt: TokenPrompt, params: SamplingParams, *, session_id: str) -> Completion:
        """Return the scripted completion, or raise the scripted error."""
        if len(prompt.token_ids) >= self._context_length:
            raise RequestRefused(f"the prompt has {len(prompt.token_ids)} tokens, the context {self._context_length}")
        if params.guide is not None and not (self._guides and params.guide.tag):
            raise StructuredOutputError("a scripted client does not support structured output: leave params.guide out")
        number = self._numbers.get(session_id, 0)
        self._numbers[session_id] = number + 1
        request = ScriptedRequest(session_id, number, prompt.token_ids, params, self._renderer)
        self.requests.append(request)
        line = await self._next(request)
        if isinstance(line, BaseException):
            raise line
        if isinstance(line, Completion):
            return line
        return self._complete(self._encode(line), params)

    async def stream(
        self, prompt: TokenPrompt, params: SamplingParams, *, session_id: str
    ) -> AsyncIterator[TokenDelta]:
        """Stream the scripted completion, one id at a time."""
        completion = await self.generate(prompt, params, session_id=session_id)
        # Without ids, the end alone.
        last_position = max(len(completion.token_ids) - 1, 0)
        versions = [version for version, start, end in completion.weight_versions for _ in range(start, end)]
        for position in range(last_position + 1):
            piece = slice(position, position + 1)
            token_ids, logprobs = completion.token_ids[piece], completion.logprobs[piece]
            version = versions[position] if versions else None
            if position < last_position:
                yield TokenDelta(token_ids, logprobs, version)
            else:
                ending = (completion.finish_reason, completion.weight_versions, completion.routed_experts)
                yield TokenDelta(token_ids, logprobs, version, *ending)

    async def model_info(self) -> ModelInfo:
        """Return a model of the configured context length."""
        return ModelInfo("scripted", self._context_length, self.weight_version, self._guides)

    async def close(self) -> None:
        """Do nothing."""

    async def _next(self, request: ScriptedRequest) -> Line:
        if callable(self._script):
            line = self._script(request)
            return await line if inspect.isawaitable(line) else line
        if request.number >= len(self._script):
            return SessionError(
                f"the script has {len(self._script)} lines; session {request.session_id!r} requests one more"
            )
        return self._script[request.number]

    def _encode(self, line: Message | str | Sequence[int] | TokenIds) -> TokenIds:
        if isinstance(line, str):
            line = {"role": "assistant", "content": line}
        if isinstance(line, Mapping):
            return self._renderer.completion(line, self._tools)
        return np.asarray(line, np.int32)

    def _complete(self, token_ids: TokenIds, params: SamplingParams) -> Completion:
        stops = frozenset(params.stop_token_ids)
        stop = next((at for at, number in enumerate(token_ids.tolist()) if number in stops), None)
        end = len(token_ids) if stop is None else stop + 1
        finish: FinishReason = "length" if stop is None else "stop"
        for text in params.stop:
            reached = next((n for n in range(1, end + 1) if text in self._renderer.decode(token_ids[:n])), None)
            if reached is not None:
                end, finish = reached, "stop"
        if params.max_tokens is not None and end > params.max_tokens:
            end, finish = params.max_tokens, "length"
        token_ids = np.array(token_ids[:end], np.int32)
        versions = ((self.weight_version, 0, end),) if end else ()
        return Completion(token_ids, scripted_logprobs(token_ids), finish, versions)


def scripted_logprobs(token_ids: TokenIds) -> Logprobs:
    """Return made-up log-probabilities of shape [tokens] in [-1, 0)."""
    mixed = (token_ids.astype(np.int64) * 31 + np.arange(len(token_ids)) * 17) % 97
    return (-(mixed + 1) / 98).astype(np.float32)


async def replay(
    messages: Sequence[Message], tools: Sequence[ToolSchema], renderer: Renderer, *, trajectory_id: str = "replay"
) -> Trajectory:
    """Record a written conversation as if a model had sampled its assistant messages.

    Each assistant message is one turn with ``loss_mask`` 1, stop id included; everything else is context. Raises
    SessionError if the conversation begins with an assistant message or holds none.
    """
    lines = [_to_tool_calls(message) for message in messages if message["role"] == "assistant"]
    if not lines:
        raise SessionError(f"conversation {trajectory_id!r} has no assistant message: nothing to train on")
    client = ScriptedClient(renderer, lines, tools=tools)
    session = Session(client, renderer, id=trajectory_id, limits=SessionLimits(context_length=1_000_000))
    history: list[Message] = []
    ids: dict[str, str] = {}
    for message in messages:
        if message["role"] == "assistant":
            answer = await session.chat(history, tools)
            _check_round_trip(message, answer, trajectory_id, len(history))
            # Later messages name the calls by the ids that the conversation was written with.
            calls = message.get("tool_calls") or ()
            sent_ids = (str(call["id"] if isinstance(call, Mapping) else call.id) for call in calls)
            ids.update(zip(sent_ids, (call.id for call in answer.get("tool_calls", ())), strict=False))
            history.append(answer)
        else:
            call_id = message.get("tool_call_id")
            history.append({**message, "tool_call_id": ids[call_id]} if call_id in ids else message)
    return Trajectory(
        id=trajectory_id,
        episode_id=trajectory_id,
        group_id=trajectory_id,
        task_id=trajectory_id,
        segments=session.segments(messages=False),
        metrics=session.metrics(),
    )


def _check_round_trip(written: Message, parsed: Message, name: str, index: int) -> None:
    want, got = (canonical_messages([message])[0] for message in (written, parsed))
    if (want.text.strip(), want.reasoning.strip(), want.calls) != (got.text.strip(), got.reasoning.strip(), got.calls):
        raise SessionError(
            f"conversation {name!r}: messages[{index}] cannot be expressed in this chat format: written {want}, parsed "
            f"{got}"
        )


def _to_tool_calls(message: Message) -> Message:
    """Return an assistant message with ToolCalls: datasets hold calls in OpenAI's form."""
    calls = [call if isinstance(call, ToolCall) else _to_tool_call(call) for call in message.get("tool_calls") or ()]
    return {**message, "tool_calls": calls} if calls else message


def _to_tool_call(call: Mapping[str, Any]) -> ToolCall:
    function = call.get("function", call)
    _, value = canonical_arguments(function.get("arguments"))
    if value is None or not function.get("name"):
        raise SessionError(f"a call of a written conversation has no name, or no object as arguments: {dict(call)}")
    return ToolCall(str(call.get("id", "")), function["name"], value)
