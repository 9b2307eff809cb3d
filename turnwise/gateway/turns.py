"""From a request of a dialect to a recorded turn, whole or while it is sampled."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from typing import Any, Protocol

from turnwise.chat.formats.live import LiveTurn, StreamedTurn
from turnwise.gateway.dialects.core import Answer, ChatRequest, Reader, TokenLogprob
from turnwise.model.canonical import template_arguments
from turnwise.recorder.session import PromptPlacement, RecordedTurn
from turnwise.types import Completion, Message, SamplingParams, TokenDelta, TokenIds, ToolSchema

_TAIL = 64
"""In how many last ids a stop string is looked for."""


class Recorder(Protocol):
    """What is used of a :class:`~turnwise.recorder.session.Session`."""

    params: SamplingParams

    async def record(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema] | None = None,
        params: SamplingParams | None = None,
        *,
        fork: str | None = None,
        template_args: Mapping[str, Any] | None = None,
    ) -> RecordedTurn:
        """Record a turn."""

    def stream(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema] | None = None,
        params: SamplingParams | None = None,
        *,
        fork: str | None = None,
        template_args: Mapping[str, Any] | None = None,
    ) -> AsyncIterator[PromptPlacement | TokenDelta | Message]:
        """Record a turn and show it meanwhile."""


def reader_of(reader: Reader, request: ChatRequest) -> Reader:
    """Return what reads the answer to a request: with other arguments the template opens it in another way.

    Raises:
        RenderError: The template cannot be given these.
    """
    if not request.template_args:
        return reader
    other = reader.under(template_arguments(request.template_args))
    assert isinstance(other, Reader)
    return other


async def follow(
    recorder: Recorder, reader: Reader, request: ChatRequest, params: SamplingParams
) -> AsyncGenerator[PromptPlacement | StreamedTurn | Answer, None]:
    """Record one turn and yield how it was placed, what it says as far as that is certain, and last the whole.

    Args:
        recorder: Records it.
        reader: Reads it.
        request: What is asked.
        params: How it is sampled.

    Raises:
        TurnwiseError: As the session's.
    """
    turn: LiveTurn | None = None
    opened: PromptPlacement | None = None
    pieces: list[TokenDelta] = []
    reader = reader_of(reader, request)
    items = recorder.stream(request.messages, request.tools, params, template_args=request.template_args)
    async with contextlib.aclosing(items) as stream:  # type: ignore[type-var]
        async for item in stream:
            if isinstance(item, TokenDelta):
                pieces.append(item)
                if turn is not None:
                    for said in turn.feed(item.token_ids.tolist()):
                        yield said
            elif isinstance(item, PromptPlacement):
                opened = item
                turn = reader.live(item.tail, params.stop)
                yield item
            elif opened is not None:
                yield _answer(reader, request, params, opened, pieces, item)


async def ask(recorder: Recorder, reader: Reader, request: ChatRequest, params: SamplingParams) -> Answer:
    """Record one turn and return it.

    Raises:
        TurnwiseError: As the session's.
    """
    done = await recorder.record(request.messages, request.tools, params, template_args=request.template_args)
    return _answer(reader, request, params, done.opened, [done.completion], done.message)


def _answer(
    reader: Reader,
    request: ChatRequest,
    params: SamplingParams,
    opened: PromptPlacement,
    pieces: Sequence[TokenDelta | Completion],
    message: Message,
) -> Answer:
    logprobs: tuple[TokenLogprob, ...] = ()
    if request.logprobs:
        logprobs = tuple(
            TokenLogprob(reader.decode(piece.token_ids[at : at + 1]), float(piece.logprobs[at]))
            for piece in pieces
            for at in range(len(piece.token_ids))
        )
    return Answer(
        message,
        prompt_tokens=opened.prompt_tokens,
        completion_tokens=sum(len(piece.token_ids) for piece in pieces),
        cached_tokens=opened.known_tokens,
        logprobs=logprobs,
        stop=_stop_string(reader, params, pieces, message),
    )


def _stop_string(
    reader: Reader, params: SamplingParams, pieces: Sequence[TokenDelta | Completion], message: Message
) -> str | None:
    """Return the stop string that ended a turn, or None."""
    if not params.stop or message.get("finish_reason") != "stop":
        return None
    last = next(piece.token_ids for piece in reversed(pieces) if len(piece.token_ids))
    if int(last[-1]) in reader.stop_ids:
        return None
    ends: list[TokenIds] = []
    for piece in reversed(pieces):
        ends.append(piece.token_ids)
        if sum(map(len, ends)) >= _TAIL:
            break
    text = "".join(reader.decode(ids) for ids in reversed(ends))
    return max(params.stop, key=text.rfind) if any(stop in text for stop in params.stop) else params.stop[0]
