"""One HTTP exchange: head, body within limits, and response as JSON or events."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from turnwise.chat.formats.live import LiveTurn, StreamedTurn
from turnwise.errors import GatewayError, TurnwiseError
from turnwise.gateway.config import GatewayLimits
from turnwise.gateway.dialects import sse
from turnwise.gateway.dialects.core import Answer, ChatRequest, Dialect, Reader, StreamWriter, TokenLogprob
from turnwise.gateway.errors import ApiError, api_error, too_deep
from turnwise.inference.process import Receive, Scope, Send
from turnwise.model.canonical import template_arguments
from turnwise.recorder.session import PromptPlacement, Session
from turnwise.types import Completion, Message, SamplingParams, TokenDelta, TokenIds

if TYPE_CHECKING:
    from turnwise.gateway.sessions import GatewaySession
    from turnwise.recorder.token_session import TokenSession

_TAIL = 64
"""Number of last ids in which a stop string is searched."""


def reader_of(reader: Reader, request: ChatRequest) -> Reader:
    """Return the reader for a request's template arguments. Raises RenderError if the template does not take them."""
    if not request.template_args:
        return reader
    other = reader.under(template_arguments(request.template_args))
    assert isinstance(other, Reader)
    return other


async def stream_turn(
    recorder: Session, reader: Reader, request: ChatRequest, params: SamplingParams
) -> AsyncGenerator[PromptPlacement | StreamedTurn | Answer, None]:
    """Record one turn; yield its placement, the certain pieces, and last the answer. Errors are the session's.

    Args:
        recorder: The session.
        reader: Its reader.
        request: The request.
        params: Sampling parameters.
    """
    turn: LiveTurn | None = None
    placement: PromptPlacement | None = None
    pieces: list[TokenDelta] = []
    reader = reader_of(reader, request)
    options: dict[str, Any] = {"template_args": request.template_args, "key": request.key}
    items = recorder.stream(request.messages, request.tools, params, **options)
    async with contextlib.aclosing(items) as stream:  # type: ignore[type-var]
        async for item in stream:
            if isinstance(item, TokenDelta):
                pieces.append(item)
                if turn is not None:
                    for piece in turn.feed(item.token_ids.tolist()):
                        yield piece
            elif isinstance(item, PromptPlacement):
                placement = item
                turn = reader.live(item.tail, params.stop)
                yield item
            elif placement is not None:
                yield _answer(reader, request, params, placement, pieces, _for_agent(recorder, request, item))


async def record_turn(
    recorder: Session, reader: Reader, request: ChatRequest, params: SamplingParams, repeat: str | None = None
) -> Answer:
    """Record one turn, or ``repeat`` a recorded one, and return it; errors are the session's."""
    if request.prompt_ids is not None and repeat is None:
        done = await cast("TokenSession", recorder).generate(request.prompt_ids, params, key=request.key)
    else:
        options: dict[str, Any] = {"template_args": request.template_args, "key": request.key, "repeat": repeat}
        done = await recorder.record(request.messages, request.tools, params, **options)
    message = _for_agent(recorder, request, done.message)
    return _answer(reader, request, params, done.placement, [done.completion], message)


def _for_agent(recorder: Session, request: ChatRequest, message: Message) -> Message:
    """Return a recorded message, without its calls, which are counted, where the request takes none."""
    if request.calls or not message.get("tool_calls"):
        return message
    recorder.count("ignored_calls")
    return cast(Message, {key: value for key, value in message.items() if key != "tool_calls"})


def _answer(
    reader: Reader,
    request: ChatRequest,
    params: SamplingParams,
    placement: PromptPlacement,
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
    sampled = np.concatenate([piece.token_ids for piece in pieces])
    stop = _stop_string(reader, params, sampled, message)
    return Answer(
        message,
        prompt_tokens=placement.prompt_tokens,
        completion_tokens=len(sampled),
        cached_tokens=placement.known_tokens,
        reasoning_tokens=reader.live(placement.tail).reasoning_tokens(sampled)
        if message.get("reasoning_content")
        else 0,
        logprobs=logprobs,
        token_ids=sampled.tolist() if request.token_ids else (),
        written="" if request.prompt_ids is None else _written(reader, sampled, stop),
        stop=stop,
    )


def _written(reader: Reader, sampled: TokenIds, stop: str | None) -> str:
    """Return the text of sampled ids up to what ended them."""
    ended = len(sampled) > 0 and int(sampled[-1]) in reader.stop_ids
    text = reader.decode(sampled[:-1] if ended else sampled)
    return text[: text.rfind(stop)] if stop and stop in text else text


def _stop_string(reader: Reader, params: SamplingParams, sampled: TokenIds, message: Message) -> str | None:
    """Return the stop string that ended a turn, or None."""
    if not params.stop or message.get("finish_reason") != "stop":
        return None
    if len(sampled) and int(sampled[-1]) in reader.stop_ids:
        return None
    text = reader.decode(sampled[-_TAIL:])
    return max(params.stop, key=text.rfind) if any(stop in text for stop in params.stop) else params.stop[0]


_log = logging.getLogger(__name__)
_RETRY_COUNT = b"x-stainless-retry-count"
"""Header in which the SDKs of OpenAI and Anthropic count how often a request was sent before."""
_WATCH_AFTER = 0.02
"""Seconds into an answer after which its client is watched for a disconnect."""
_Event = tuple[int, StreamedTurn | Answer | ApiError | None]
"""Index of an answer and its event; None if it was placed and nothing was sampled yet."""


class Exchange:
    """A request and its response (ASGI), within the limits for clients.

    ``task`` handles the request; ``size`` is how many bytes of its body were received.
    """

    __slots__ = (
        "_digest", "_headers", "_limits", "_receive", "_scope", "_send", "_started", "_writer",
        "method", "size", "task",
    )  # fmt: skip

    def __init__(self, scope: Scope, receive: Receive, send: Send, limits: GatewayLimits) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.task: asyncio.Task[Any] = task
        self.method: str = scope["method"]
        self._scope = scope
        self._headers: dict[bytes, bytes] = dict(scope["headers"])
        self._receive = receive
        self._send = send
        self._limits = limits
        self._started = False
        self.size = 0
        self._digest = ""
        # The writer of an open stream.
        self._writer: StreamWriter | None = None

    @property
    def speaks_anthropic(self) -> bool:
        """Whether the client names a version of Anthropic's API."""
        return b"anthropic-version" in self._headers

    @property
    def is_codex(self) -> bool:
        """Whether the client is Codex, which gives up on incomplete responses."""
        return self._headers.get(b"originator", b"").startswith(b"codex") or self._headers.get(
            b"user-agent", b""
        ).startswith(b"codex")

    @property
    def all_headers(self) -> Sequence[tuple[bytes, bytes]]:
        """Request headers as received."""
        return cast("Sequence[tuple[bytes, bytes]]", self._scope["headers"])

    @property
    def query(self) -> bytes:
        """Query string."""
        return bytes(self._scope.get("query_string", b""))

    def key(self) -> str:
        """Return the client's key, or ``""``."""
        key = self._headers.get(b"x-api-key")
        if key is None:
            key = self._headers.get(b"authorization", b"").removeprefix(b"Bearer ")
        return key.decode("latin-1").strip()

    async def body(self) -> bytes:
        """Return the body. Raises ApiError if it is too large, too slow or truncated."""
        maximum = self._limits.body_bytes
        declared = self._headers.get(b"content-length", b"")
        if declared.isdigit() and int(declared) > maximum:
            raise _too_large(maximum)
        try:
            async with asyncio.timeout(self._limits.body_seconds):
                raw = await self._read_body(maximum)
        except TimeoutError:
            raise ApiError(408, f"the body did not arrive within {self._limits.body_seconds:g} s") from None
        if _RETRY_COUNT in self._headers:
            self._digest = hashlib.blake2b(raw, digest_size=16).hexdigest()
        return raw

    async def _read_body(self, maximum: int) -> bytes:
        parts: list[bytes] = []
        size = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ApiError(499, "the client disconnected before the end of its body")
            part = message.get("body", b"")
            size += len(part)
            self.size = size
            if size > maximum:
                raise _too_large(maximum)
            parts.append(part)
            if not message.get("more_body"):
                return part if len(parts) == 1 else b"".join(parts)

    async def answer(self, status: int, body: dict[str, Any], retry_after: int | None = None) -> None:
        """Send a JSON response."""
        encoded = sse.encode(body)
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(encoded)).encode())]
        if retry_after is not None:
            headers.append((b"retry-after", str(retry_after).encode()))
        await self.begin(status, headers)
        await self.send(encoded, final=True)

    async def begin(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        """Send the head of a response."""
        self._started = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def send(self, data: bytes, *, final: bool = False) -> None:
        """Send a piece of a response."""
        if final:
            self._writer = None
        if data or final:
            await self._send({"type": "http.response.body", "body": data, "more_body": not final})

    async def disconnected(self) -> None:
        """Wait until the client disconnects; the request body must have been received."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def refuse(self, dialect: Dialect, error: ApiError) -> None:
        """Send an error; an open stream ends with it."""
        if self._writer is not None:
            await self.send(self._writer.fail(error), final=True)
        elif not self._started and error.status != 499:
            status = dialect.statuses.get(error.status, error.status)
            await self.answer(status, dialect.error(error), error.retry_after)

    async def converse(
        self, entry: GatewaySession, dialect: Dialect, request: ChatRequest, params: SamplingParams
    ) -> None:
        """Record a request and answer it; a client that disconnects cancels it, and nothing is recorded.

        Raises ApiError or the session's TurnwiseError if nothing was answered.
        """
        request.key = f"{dialect.name} {self._digest}" if self._digest else ""
        is_retry = self._headers.get(_RETRY_COUNT, b"0") != b"0"
        attempt = entry.retries.attempt(entry.session, self.task, request.key, is_retry=is_retry, count=request.n)
        async with self.while_connected(), attempt as turn_ids:
            answers = [await record_turn(entry.session, entry.reader, request, params, turn_id) for turn_id in turn_ids]
            send = self._stream if request.stream else self._answer_at_once
            await send(entry, dialect, request, params, answers)

    @contextlib.asynccontextmanager
    async def while_connected(self) -> AsyncIterator[None]:
        """Cancel the block, and nothing after it, if the client disconnects."""
        watch = _DisconnectWatch(self)
        try:
            yield
        except asyncio.CancelledError:
            # The task may also have been cancelled from outside.
            if not watch.seen or self.task.uncancel():
                raise
        finally:
            watch.close()

    async def _answer_at_once(
        self,
        entry: GatewaySession,
        dialect: Dialect,
        request: ChatRequest,
        params: SamplingParams,
        answers: list[Answer],
    ) -> None:
        session, reader = entry.session, entry.reader
        if not answers and request.n == 1:
            answers = [await record_turn(session, reader, request, params)]
        elif not answers:
            async with _TaskGroup() as group:
                tasks = [
                    group.start(record_turn(session, reader, request, seeded))
                    for seeded in _seed_answers(params, request.n)
                ]
                answers = list(await asyncio.gather(*tasks))
        entry.note_outcome(None)
        await self.answer(200, dialect.respond(request, answers))

    async def _stream(
        self,
        entry: GatewaySession,
        dialect: Dialect,
        request: ChatRequest,
        params: SamplingParams,
        answers: list[Answer],
    ) -> None:
        writer = dialect.writer(request)
        queue: asyncio.Queue[_Event] = asyncio.Queue()
        async with _TaskGroup() as group:
            for event in enumerate(answers):
                queue.put_nowait(event)
            for index, seeded in enumerate(_seed_answers(params, request.n) if not answers else ()):
                group.start(_produce(queue, index, entry, request, seeded))
            waiting = await self._first(queue)
            await self.begin(200, sse.HEADERS)
            self._writer = writer
            await self.send(writer.begin())
            async for events in self._batches(queue, waiting, request.n):
                written = [_encode_event(writer, index, event) for index, event in events]
                failed = any(isinstance(event, ApiError) for _, event in events)
                await self.send(b"".join(written) if events else writer.alive(), final=failed)
                if failed:
                    return
        await self.send(writer.end(), final=True)

    async def _first(self, queue: asyncio.Queue[_Event]) -> list[_Event]:
        """Wait briefly for the first event, so that an early error gets its own status. Raises ApiError."""
        waiting: list[_Event] = []
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._limits.first_seconds):
                while not waiting or waiting[-1][1] is None:
                    waiting.append(await queue.get())
        for _, event in waiting:
            if isinstance(event, ApiError):
                raise event
        return waiting

    async def _batches(
        self, queue: asyncio.Queue[_Event], waiting: list[_Event], count: int
    ) -> AsyncIterator[list[_Event]]:
        """Yield all events available at a time; an empty list after a silence."""
        open_answers = count
        while True:
            events = waiting
            if not events:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._limits.alive_seconds):
                        events = [await queue.get()]
            while events and not queue.empty():
                events.append(queue.get_nowait())
            open_answers -= sum(isinstance(event, Answer) for _, event in events)
            yield events
            if open_answers <= 0:
                return
            waiting = []


def _too_large(maximum: int) -> ApiError:
    return ApiError(413, f"the body has more than {maximum} bytes", code="request_too_large")


def _encode_event(writer: StreamWriter, index: int, event: StreamedTurn | Answer | ApiError | None) -> bytes:
    if isinstance(event, StreamedTurn):
        say = writer.text if event.kind == "text" else writer.thoughts
        return say(index, event.text)
    if isinstance(event, Answer):
        return writer.finish(index, event)
    return writer.fail(event) if event is not None else b""


async def _produce(
    queue: asyncio.Queue[_Event], index: int, entry: GatewaySession, request: ChatRequest, params: SamplingParams
) -> None:
    try:
        async with contextlib.aclosing(stream_turn(entry.session, entry.reader, request, params)) as items:
            async for item in items:
                queue.put_nowait((index, item if isinstance(item, (StreamedTurn, Answer)) else None))
        entry.note_outcome(None)
    except TurnwiseError as error:
        entry.note_outcome(error)
        queue.put_nowait((index, api_error(error, request.guide_field)))
    except RecursionError:
        queue.put_nowait((index, too_deep()))
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # the boundary of a request: the reader of the stream must see its end
        _log.exception("a request of session %s failed", entry.id)
        failure = GatewayError(f"{type(error).__name__}: {error}")
        entry.note_outcome(failure)
        queue.put_nowait((index, api_error(failure)))
        if not isinstance(error, Exception):
            raise


def _seed_answers(params: SamplingParams, count: int) -> list[SamplingParams]:
    """Return the parameters of each answer: equal seeds would give equal answers."""
    if params.seed is None or count == 1:
        return [params] * count
    return [replace(params, seed=params.seed + index) for index in range(count)]


class _DisconnectWatch:
    """Cancels the task of an exchange when its client disconnects (``seen``)."""

    __slots__ = ("_exchange", "_timer", "_watch", "seen")

    def __init__(self, exchange: Exchange) -> None:
        self.seen = False
        self._exchange = exchange
        self._watch: asyncio.Task[None] | None = None
        # Most cheap answers are ready before a client could disconnect.
        self._timer = exchange.task.get_loop().call_later(_WATCH_AFTER, self._begin)

    def close(self) -> None:
        self._timer.cancel()
        # A cancelled task keeps its frames, and those this object: without this it would be a cycle.
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.cancel()

    def _begin(self) -> None:
        self._watch = asyncio.ensure_future(self._wait())

    async def _wait(self) -> None:
        await self._exchange.disconnected()
        self.seen = True
        self._exchange.task.cancel()


class _TaskGroup:
    """Tasks that end with the block that started them."""

    def __init__(self) -> None:
        self._tasks: list[asyncio.Task[Any]] = []

    async def __aenter__(self) -> _TaskGroup:
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.ensure_future(work)
        self._tasks.append(task)
        return task
