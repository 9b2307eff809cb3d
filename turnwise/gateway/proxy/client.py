"""A hosted endpoint as the policy of an evaluation.

``session.chat`` uses Chat Completions, which hosted endpoints have in common; programs on ``episode.address`` may use
any API, as behind ``turnwise gateway``.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp

from turnwise.errors import EndpointUnusable, InferenceError, RequestRefused, SessionError
from turnwise.gateway.errors import ApiError
from turnwise.gateway.proxy.answer import answer_reader
from turnwise.gateway.proxy.endpoint import OVERLOADED, Endpoint
from turnwise.gateway.proxy.session import UNKNOWN_CONTEXT, EndpointAnswer, NoTokens, TextSession
from turnwise.inference.connections import retry_after
from turnwise.model.core import ModelInfo
from turnwise.recorder.matching import EchoPolicy
from turnwise.types import Message, SamplingParams, ToolCall, ToolSchema

_JSON = ((b"content-type", b"application/json"),)
_QUOTED = 300
_MOST_RETRIES, _FAULT_RETRIES = 20, 3
"""Retries after rejections for overload, and after other failures of an endpoint."""
_BACKOFF_S, _LONGEST_BACKOFF_S = 0.1, 30.0
"""Minimum wait before a retry, doubled each time, and its maximum; the endpoint may ask for more."""
_UNKNOWN = ("top_k", "min_p", "stop_token_ids", "ignore_eos")


class HostedClient(NoTokens):
    """Client of one endpoint for the sessions of this process.

    Args:
        endpoint: The endpoint.
        model: Model of ``session.chat``, or None.
        seconds: Timeout of a response.
    """

    def __init__(self, endpoint: Endpoint, *, model: str | None = None, seconds: float = 3600.0) -> None:
        self.endpoint = endpoint
        self._model = model
        self._seconds = seconds
        self._answered = False

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
        """Return a session recorded as text.

        Args:
            id: Names the trajectory.
            params: Sampling parameters of ``session.chat``; only non-defaults are sent.
            max_turns: Maximum number of requests.
            max_tokens_per_turn: Maximum tokens of a ``session.chat`` completion.
            max_total_tokens: Maximum tokens over all branches, as reported by the endpoint.
            echo: Policy for turns that come back rewritten.
        """

        async def ask(
            messages: Sequence[Message], tools: Sequence[ToolSchema], params: SamplingParams
        ) -> EndpointAnswer:
            return await self._ask(id, messages, tools, params, max_tokens_per_turn)

        return TextSession(
            id=id, max_turns=max_turns, max_total_tokens=max_total_tokens, echo=echo, params=params, ask=ask
        )

    async def model_info(self) -> ModelInfo:
        """Return the model's name, its context length unknown. Raises EndpointUnusable: nothing answers, or no key."""
        await self.endpoint.check()
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
        max_tokens: int | None,
    ) -> EndpointAnswer:
        if self._model is None:
            raise EndpointUnusable("hosted.model is missing: session.chat must name the model to request")
        sampling = _sampling_fields(params, max_tokens)
        body: dict[str, Any] = {"model": self._model, "messages": [_sent(message) for message in messages], **sampling}
        if params.stop:
            body["stop"] = list(params.stop)
        if tools:
            body["tools"] = [tool.to_json() for tool in tools]
        headers = self.endpoint.request_headers(_JSON, anthropic=False, token=session_id)
        data = json.dumps(body).encode()
        try:
            async with asyncio.timeout(self._seconds):
                status, raw = await self._answer(headers, data, session_id)
        except ApiError as error:
            raise InferenceError(error.message) from None
        except (TimeoutError, aiohttp.ClientError) as error:
            # The text of such an error may quote headers.
            message = f"the response of {self.endpoint.title} was incomplete ({type(error).__name__})"
            raise InferenceError(message) from None
        if status != 200:
            text = f"{self.endpoint.title} answered {status}: {raw.decode('utf-8', 'replace')[:_QUOTED]}"
            if status == 404 and not self._answered:
                raise EndpointUnusable(f"{text}; correct url or hosted.model ({self._model})")
            raise self.endpoint.failure(status, raw) or RequestRefused(text)
        self._answered = True
        reader = answer_reader("openai_chat")
        answers = reader.read_response(raw)
        if not answers or not answers[0].parsed:
            raise InferenceError(
                f"the response of {self.endpoint.title} has no message: {raw.decode('utf-8', 'replace')[:_QUOTED]}"
            )
        return EndpointAnswer(answers[0].message, answers[0].cut, reader.usage, sampling, reader.model)

    async def _answer(self, headers: Mapping[str, str], data: bytes, session_id: str) -> tuple[int, bytes]:
        """Send a request; with a limit, a rejected one is sent again after the wait that the endpoint names."""
        for number in itertools.count():
            sending = self.endpoint.request("POST", "chat/completions", b"", headers, data, token=session_id)
            async with sending as answer:
                status, raw = answer.status, self.endpoint.without_key(await answer.read())
                wait = retry_after(answer.headers)
            max_retries = _MOST_RETRIES if status in OVERLOADED else _FAULT_RETRIES if status >= 500 else 0
            if number >= max_retries or self.endpoint.limit is None:
                break
            backoff = min(_LONGEST_BACKOFF_S, _BACKOFF_S * 2**number)
            await asyncio.sleep(max(wait or 0.0, backoff) * random.uniform(1.0, 1.25))
        return status, raw


def _sampling_fields(params: SamplingParams, max_tokens: int | None) -> dict[str, float]:
    """Return the non-default sampling parameters (some models reject explicit defaults). Raises SessionError."""
    default = SamplingParams()
    unknown = [name for name in _UNKNOWN if getattr(params, name) != getattr(default, name)]
    if unknown:
        raise SessionError(f"params.{unknown[0]}: session.chat cannot pass it to a hosted endpoint: remove it")
    names = ("temperature", "top_p", "seed")
    fields = {name: getattr(params, name) for name in names if getattr(params, name) != getattr(default, name)}
    limits = [limit for limit in (params.max_tokens, max_tokens) if limit is not None]
    return {**fields, "max_completion_tokens": min(limits)} if limits else fields


def _sent(message: Message) -> dict[str, Any]:
    entry: dict[str, Any] = {"role": message["role"], "content": message.get("content")}
    for key in ("name", "tool_call_id"):
        value = message.get(key)
        if value is not None:
            entry[key] = value
    calls: Sequence[ToolCall | Mapping[str, Any]] = message.get("tool_calls") or ()
    if calls:
        entry["tool_calls"] = [_sent_call(call) for call in calls]
    return entry


def _sent_call(call: ToolCall | Mapping[str, Any]) -> Mapping[str, Any]:
    if not isinstance(call, ToolCall):
        return call
    arguments = call.raw if call.error is not None else json.dumps(call.arguments, ensure_ascii=False)
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}
