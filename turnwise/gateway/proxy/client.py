"""A hosted endpoint in the place of a model: for evaluations, whose agents ask it through their episodes' sessions.

``session.chat`` asks over Chat Completions, which hosted endpoints have in common. A program that goes through
``episode.address`` is answered in whichever API it speaks, as behind ``turnwise gateway``.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import aiohttp

from turnwise.errors import ConfigError, InferenceError, RequestRefused, SessionError
from turnwise.gateway.errors import ApiError
from turnwise.gateway.proxy.answer import answer_reader, failure_of
from turnwise.gateway.proxy.endpoint import Endpoint
from turnwise.gateway.proxy.session import UNKNOWN_CONTEXT, Answered, TextSession, no_tokens
from turnwise.model.core import LLMClient, ModelInfo
from turnwise.recorder.matching import EchoPolicy
from turnwise.types import Message, SamplingParams, ToolCall, ToolSchema

_JSON = ((b"content-type", b"application/json"),)
_SHOWN = 300
_UNKNOWN = ("top_k", "min_p", "stop_token_ids", "ignore_eos")


class HostedClient(LLMClient):
    """Asks one endpoint for the sessions of this process.

    Args:
        endpoint: The endpoint.
        model: The model that ``session.chat`` asks for; None knows none.
        seconds: How long an answer may take.
    """

    def __init__(self, endpoint: Endpoint, *, model: str | None = None, seconds: float = 3600.0) -> None:
        self.endpoint = endpoint
        self._model = model
        self._seconds = seconds

    def open(
        self,
        *,
        id: str,  # noqa: A002 - the field's name for it
        params: SamplingParams,
        max_turns: int | None = None,
        max_tokens_per_turn: int | None = None,
        max_total_tokens: int | None = None,
        echo: EchoPolicy = "same",
    ) -> TextSession:
        """Return a session that is recorded as text.

        Args:
            id: Names the trajectory.
            params: What ``session.chat`` asks for, as far as it differs from the defaults.
            max_turns: Most requests that are answered.
            max_tokens_per_turn: Most tokens that ``session.chat`` asks for.
            max_total_tokens: Most tokens over all branches, as far as the endpoint reports them.
            echo: What becomes of turns that come back rewritten.
        """

        async def ask(messages: Sequence[Message], tools: Sequence[ToolSchema], params: SamplingParams) -> Answered:
            return await self._ask(id, messages, tools, params, max_tokens_per_turn)

        return TextSession(
            id=id, max_turns=max_turns, max_total_tokens=max_total_tokens, echo=echo, params=params, ask=ask
        )

    async def generate(self, prompt: object, params: object, *, session_id: str) -> NoReturn:  # noqa: ARG002
        """Raise: tokens cannot be asked for."""
        raise no_tokens()

    def stream(self, prompt: object, params: object, *, session_id: str) -> NoReturn:  # noqa: ARG002
        """Raise: tokens cannot be asked for."""
        raise no_tokens()

    async def model_info(self) -> ModelInfo:
        """Return the model's name; what it can take is not known."""
        return ModelInfo(self._model or "hosted", UNKNOWN_CONTEXT)

    async def close(self) -> None:
        """Close all connections."""
        await self.endpoint.close()

    async def _ask(
        self,
        session_id: str,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema],
        params: SamplingParams,
        most: int | None,
    ) -> Answered:
        if self._model is None:
            raise ConfigError("hosted.model is missing: session.chat must name the model that it asks for")
        sampling = _named(params, most)
        body: dict[str, Any] = {"model": self._model, "messages": [_sent(message) for message in messages], **sampling}
        if params.stop:
            body["stop"] = list(params.stop)
        if tools:
            body["tools"] = [tool.to_json() for tool in tools]
        headers = self.endpoint.headers(_JSON, anthropic=False, token=session_id)
        data = json.dumps(body).encode()
        asking = self.endpoint.asked("POST", "chat/completions", b"", headers, data, token=session_id)
        try:
            async with asyncio.timeout(self._seconds), asking as answer:
                status, raw = answer.status, self.endpoint.hidden(await answer.read())
        except ApiError as error:
            raise InferenceError(error.message) from None
        except (TimeoutError, aiohttp.ClientError) as error:
            # The text of such an error may quote headers.
            raise InferenceError(f"the hosted endpoint gave no whole answer ({type(error).__name__})") from None
        if status != 200:
            told = raw.decode("utf-8", "replace")[:_SHOWN]
            raise failure_of(status, raw) or RequestRefused(f"the hosted endpoint answered {status}: {told}")
        reader = answer_reader("openai_chat")
        said = reader.read_whole(raw)
        if not said or not said[0].read:
            raise InferenceError(f"the hosted endpoint answered no message: {raw.decode('utf-8', 'replace')[:_SHOWN]}")
        return Answered(said[0].message, said[0].cut, reader.usage, sampling, reader.model)


def _named(params: SamplingParams, most: int | None) -> dict[str, float]:
    """Return what a request says of its sampling: what is not the default, which some models refuse to be told.

    Raises:
        SessionError: Something is asked for that Chat Completions has no field for.
    """
    named: dict[str, float] = {}
    default = SamplingParams()
    unknown = [name for name in _UNKNOWN if getattr(params, name) != getattr(default, name)]
    if unknown:
        raise SessionError(f"params.{unknown[0]}: session.chat cannot ask a hosted endpoint for it: leave it out")
    if params.temperature != default.temperature:
        named["temperature"] = params.temperature
    if params.top_p != default.top_p:
        named["top_p"] = params.top_p
    if params.seed is not None:
        named["seed"] = params.seed
    limits = [limit for limit in (params.max_tokens, most) if limit is not None]
    return {**named, "max_completion_tokens": min(limits)} if limits else named


def _sent(message: Message) -> dict[str, Any]:
    """Return a message in OpenAI's form."""
    sent: dict[str, Any] = {"role": message["role"], "content": message.get("content")}
    for key in ("name", "tool_call_id"):
        value = message.get(key)
        if value is not None:
            sent[key] = value
    calls: Sequence[ToolCall | Mapping[str, Any]] = message.get("tool_calls") or ()
    if calls:
        sent["tool_calls"] = [_sent_call(call) for call in calls]
    return sent


def _sent_call(call: ToolCall | Mapping[str, Any]) -> Mapping[str, Any]:
    if not isinstance(call, ToolCall):
        return call
    arguments = call.raw if call.error is not None else json.dumps(call.arguments, ensure_ascii=False)
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}
