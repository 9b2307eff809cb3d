"""HTTP client for servers with vLLM's ``/inference/v1/generate``: the built-in server and vLLM itself."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import quote

import numpy as np
import orjson

from turnwise.errors import DeadlineExceeded, InferenceError, RequestRefused, StructuredOutputError, TurnwiseError
from turnwise.inference import wire
from turnwise.inference.completion_progress import Choice, CompletionProgress
from turnwise.inference.connections import ConnectionFailed, Connections, Response, settle
from turnwise.inference.routing import HealthChecks, RoutedRequest, Router, RoutingOptions
from turnwise.inference.wire import encode_request, encode_scoring
from turnwise.model.core import LLMClient, ModelInfo, ServedName
from turnwise.model.media import MediaProcessor
from turnwise.model.media_wire import MediaEncoder
from turnwise.types import (
    Completion,
    FinishReason,
    Logprobs,
    SamplingParams,
    TokenDelta,
    TokenIds,
    TokenPrompt,
    VersionSpan,
)

RETRIES = 5
"""Retries of a request after a connection error."""
RETRY_WAIT = 0.1
"""Seconds before the first retry; doubled each time, at most 2."""
_EMPTY_ABORTS = 100
_ABORT_WAIT = 0.05
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Scoring:
    """Ids to score."""

    token_ids: TokenIds


@dataclass(frozen=True, slots=True)
class _Body:
    """A request's body, with the hashes of its images; ``partial``: some are named and not sent."""

    data: bytes
    hashes: frozenset[str] = frozenset()
    partial: bool = False


class HTTPClient(LLMClient):
    """Client of one or several servers over one connection pool, with bounded retries after connection errors.

    A completion interrupted by a weight update (``finish_reason: abort``) is resumed from its ids; structured output is
    sampled again, or fails if it was streamed. With a seed and equal weights, the built-in server then returns the same
    ids as without the interruption; vLLM does not. With several servers, a completion whose server dies is resumed on
    another one from the ids that were reported by then, if they were reported with their weight versions.

    Attributes:
        router: Chooses the server of each request.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        model: str | None = None,
        names: Callable[[str], ServedName] | None = None,
        retries: int | None = None,
        retry_wait: float = RETRY_WAIT,
        headers: dict[str, str] | None = None,
        routing: RoutingOptions | None = None,
        processor: MediaProcessor | None = None,
    ) -> None:
        """Create a client; connections are opened on demand.

        Args:
            urls: Base URLs, such as ``http://127.0.0.1:8000``; ValueError if empty.
            model: Sent as ``model`` to servers of several models.
            names: Returns what is sent to a server instead of ``model``, by its URL.
            retries: Retries after a connection error; None for :data:`RETRIES`.
            retry_wait: Seconds before the first retry; doubled each time, at most 2.
            headers: Sent with every request (``Authorization``).
            routing: How requests are divided among the servers.
            processor: Of the served model's media; None refuses prompts with media.
        """
        if not urls:
            raise ValueError("urls is empty: name at least one server")
        self._urls = [url.rstrip("/") for url in urls]
        self._names = names or (lambda _: ServedName(model))
        self._retries = RETRIES if retries is None else retries
        self._retry_wait = retry_wait
        self._headers = {"Content-Type": "application/json", **(headers or {})}
        self._routing = routing or RoutingOptions()
        self._media = MediaEncoder(processor)
        # Hashes of the images that each server keeps; None for one without a store.
        self._stored_media: dict[str, set[str] | None] = {}
        self.router = Router(len(urls), self._routing)
        self._connections = Connections(self._headers)
        self._health = HealthChecks(self.router, self._healthy, self._abandon)
        # Whether events of a stream name the versions of their ids; vLLM's last event alone does.
        self._versions_in_events = True
        # URLs of servers that do not report their load.
        self._without_load: set[str] = set()
        self._closed = False

    @property
    def urls(self) -> tuple[str, ...]:
        """Base URLs of the servers."""
        return tuple(self._urls)

    def replace_url(self, old: str, new: str) -> None:
        """Route requests for ``old`` to ``new``, after a server restarted on another port."""
        self._urls[self._urls.index(old.rstrip("/"))] = new.rstrip("/")

    def eject(self, url: str) -> None:
        """Send a server no requests until :meth:`admit`, unless it is the only one."""
        self.router.eject(self._urls.index(url.rstrip("/")), hold=True)

    def admit(self, url: str) -> None:
        """Send a server requests again."""
        self.router.admit(self._urls.index(url.rstrip("/")))

    async def generate(self, prompt: TokenPrompt, params: SamplingParams, *, session_id: str) -> Completion:
        """Sample one completion; see :meth:`LLMClient.generate`."""
        progress = _start(prompt, params, routed=self._routing.routed_experts)
        request = RoutedRequest(session_id, prompt.token_ids, params.max_tokens)
        interval = self._report_interval(params)
        async with self._deadline(progress, request):
            if interval:
                async for delta in self._deltas(progress, request, interval=interval, streamed=False):
                    if delta.finish_reason is not None:
                        return progress.completion(delta.finish_reason)
            while True:
                raw, number, url = await self._post(progress, request, guided=params.guide is not None)
                choice = wire.decode_response(_parse(raw, url), url)
                progress.add(choice)
                finish_reason = self._end_part(progress, choice.finish_reason, number, url)
                if finish_reason is not None:
                    return progress.completion(finish_reason)
                if params.guide is not None:
                    progress.drop()
                await _wait_after_abort(progress, url, len(choice.token_ids))

    async def stream(
        self, prompt: TokenPrompt, params: SamplingParams, *, session_id: str
    ) -> AsyncIterator[TokenDelta]:
        """Sample one completion incrementally; see :meth:`LLMClient.stream`."""
        progress = _start(prompt, params, routed=self._routing.routed_experts)
        request = RoutedRequest(session_id, prompt.token_ids, params.max_tokens)
        started_at = asyncio.get_running_loop().time()
        async with aclosing(self._deltas(progress, request, interval=1, streamed=True)) as deltas:
            while True:
                # Only while this waits for servers: between two deltas the reader's code runs.
                async with self._deadline(progress, request, started_at=started_at):
                    delta = await anext(deltas, None)
                if delta is None:
                    return
                yield delta

    async def _deltas(
        self, progress: CompletionProgress, request: RoutedRequest, *, interval: int, streamed: bool
    ) -> AsyncGenerator[TokenDelta]:
        """Sample a completion over streams; what was not ``streamed`` to the caller may be sampled again."""
        failures = 0
        while True:
            sampled_before = request.sampled = progress.sampled
            choice: Choice | None = None
            try:
                async with (
                    self._server(request) as (number, url),
                    self._open_stream(url, progress, request.session_id, interval) as events,
                ):
                    async for choice in events:
                        progress.add(choice)
                        if choice.finish_reason is not None:
                            break
                        self._versions_in_events = self._versions_in_events and progress.part_spans is not None
                        yield TokenDelta(choice.token_ids, choice.logprobs, _latest(progress.part_spans))
            except ConnectionFailed as error:
                failures += 1
                self._end_broken_part(progress, request, error, streamed=streamed)
                await self._after_failure(self._where(request), error, failures)
                continue
            if choice is None or choice.finish_reason is None:
                raise InferenceError(f"{url} ended a stream without a finish reason")
            finish_reason = self._end_part(progress, choice.finish_reason, number, url)
            if finish_reason is not None or len(choice.token_ids):
                all_spans = tuple(progress.spans)
                yield TokenDelta(
                    choice.token_ids,
                    choice.logprobs,
                    _latest(all_spans),
                    finish_reason,
                    () if finish_reason is None else all_spans,
                    None if finish_reason is None else progress.all_routes(),
                    None if finish_reason is None else progress.mask(),
                    None if finish_reason is None else progress.all_digests(),
                )
            if finish_reason is not None:
                return
            _check_free(progress, url)
            await _wait_after_abort(progress, url, progress.sampled - sampled_before)

    def _report_interval(self, params: SamplingParams) -> int:
        """Return after how many tokens a completion is reported, to be resumed elsewhere; 0 for its end alone."""
        interval = self._routing.resume_tokens
        short = params.max_tokens is not None and params.max_tokens <= interval
        # A grammar cannot resume in the middle, and routes are reported at the end.
        useless = short or params.guide is not None or self._routing.routed_experts or not self._versions_in_events
        return 0 if len(self._urls) == 1 or useless else interval

    def _end_part(
        self, progress: CompletionProgress, reason: FinishReason | None, number: int, url: str
    ) -> FinishReason | None:
        """End a part that a server answered whole; return the completion's finish reason if it ends here."""
        progress.end_part(url)
        finish_reason = _finish_reason(progress, reason)
        self.router.completed(number, _latest(progress.spans), progress.sampled if finish_reason else None)
        return finish_reason

    def _end_broken_part(
        self, progress: CompletionProgress, request: RoutedRequest, error: ConnectionFailed, *, streamed: bool
    ) -> None:
        """End a part whose server failed. Raises InferenceError if what was shown cannot be resumed."""
        where = self._where(request)
        reported = progress.part_spans is not None and progress.params.routes_from is None
        if progress.sampled > progress.named and not reported:
            if streamed:
                raise InferenceError(
                    f"{where} ended a stream before reporting which weights sampled it: {error}"
                ) from error
            progress.drop_part()
        progress.end_part(where)
        _check_free(progress, where)

    async def score(self, token_ids: TokenIds, *, session_id: str = "") -> Logprobs:
        """Return log-probabilities of given ids; see :meth:`LLMClient.score`."""
        sent = _Scoring(token_ids)
        request = RoutedRequest(session_id, token_ids, 1)
        for _ in range(_EMPTY_ABORTS):
            raw, _, url = await self._post(sent, request)
            logprobs = wire.decode_prompt_logprobs(_parse(raw, url), token_ids, url)
            if logprobs is not None:
                return logprobs
            await asyncio.sleep(_ABORT_WAIT)
        raise InferenceError(f"{url} aborted a request {_EMPTY_ABORTS} times in a row without scoring anything")

    async def model_info(self) -> ModelInfo:
        """Return the first server's model description."""
        url = self._urls[0]
        served = self._names(url)
        body = _parse(await self._get(url, "/v1/models"), url)
        try:
            cards = body["data"]
            card = next((entry for entry in cards if entry["id"] == served.model), cards[0])
            # vLLM's cards of adapters do not repeat it.
            name, length = str(card["id"]), int(card.get("max_model_len") or cards[0]["max_model_len"])
            # Ours say so; vLLM always can.
            guides = bool(card.get("guides", card.get("owned_by") == "vllm"))
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise InferenceError(f"{url}/v1/models lists no model with max_model_len: {str(body)[:200]}") from error
        if served.version is not None:
            return ModelInfo(name, length, served.version, guides)
        try:
            query = "" if served.model is None else f"?model={quote(served.model, safe='')}"
            info = _parse(await self._get(url, "/weight_info" + query), url)
        except RequestRefused:
            # vLLM has this route in its development mode only.
            return ModelInfo(name, length, guides=guides)
        version = str(info.get("weight_version") or 0)
        return ModelInfo(name, length, int(version) if version.isdecimal() else 0, guides)

    async def close(self) -> None:
        """Close all connections."""
        self._closed = True
        await self._health.stop()
        await self._connections.close()

    def _pool(self) -> Connections:
        if self._closed:
            raise InferenceError("this client is closed")
        return self._connections

    @asynccontextmanager
    async def _server(self, request: RoutedRequest) -> AsyncIterator[tuple[int, str]]:
        """Yield number and URL of the server chosen for a request, which counts as in flight there until the end."""
        self._pool()
        self._health.start()
        assignment = await self.router.acquire(request)
        number = assignment.server
        try:
            yield number, self._urls[number]
        except ConnectionFailed:
            request.avoid = number
            self.router.failed(number)
            raise
        finally:
            self.router.release(assignment)

    async def _body(
        self, sent: CompletionProgress | _Scoring, url: str, stream: int = 0, *, resend: bool = False
    ) -> _Body:
        """Return the body for a server; images that it keeps are named and, unless ``resend``, not sent again."""
        name = self._names(url)
        if isinstance(sent, _Scoring):
            return _Body(encode_scoring(sent.token_ids, model=name.model))
        sent.version = name.version
        if not sent.media:
            return _Body(_encode(sent, stream, name.model))
        if url not in self._stored_media:
            cards = _parse(await self._get(url, "/v1/models"), url).get("data") or [{}]
            self._stored_media[url] = set() if cards[0].get("keeps_media") else None
        stored = frozenset() if resend else frozenset(self._stored_media.get(url) or ())
        # Images that no renderer of this process has placed are decoded here.
        features = await asyncio.to_thread(self._media.encode, sent.media, stored) or {}
        hashes = frozenset(digest for digests in features["mm_hashes"].values() for digest in digests)
        data = _encode(sent, stream, name.model, features)
        return _Body(data, hashes, partial=bool(hashes & stored))

    def _lacks_media(self, url: str, body: _Body, status: int, raw: bytes) -> bool:
        """Return whether a server lacks images that a body only named; all are then sent to it again."""
        if not (body.partial and status == 400 and wire.error_field(raw) == "features.mm_hashes"):
            return False
        self._stored_media[url] = set()
        return True

    def _note_stored_media(self, url: str, body: _Body) -> None:
        """Note the images that a server has accepted."""
        stored = self._stored_media.get(url)
        if stored is not None:
            stored |= body.hashes

    async def _post(
        self, sent: CompletionProgress | _Scoring, request: RoutedRequest, *, guided: bool = False
    ) -> tuple[bytes, int, str]:
        """Send a request with retries; return the body, and the server's number and URL."""
        failures = 0
        resend = False
        while True:
            try:
                async with self._server(request) as (number, url):
                    headers = _session_header(request.session_id)
                    body = await self._body(sent, url, resend=resend)
                    status, raw = await self._connections.ask("POST", url + wire.GENERATE, body.data, headers)
                    if resend := self._lacks_media(url, body, status, raw):
                        continue
                    if status != 200:
                        raise _refusal(status, raw, url, guided=guided)
                    self._note_stored_media(url, body)
                    return raw, number, url
            except ConnectionFailed as error:
                failures += 1
                await self._after_failure(self._where(request), error, failures)

    @asynccontextmanager
    async def _open_stream(
        self, url: str, progress: CompletionProgress, session_id: str, interval: int
    ) -> AsyncIterator[AsyncIterator[Choice]]:
        resend = False
        while True:
            body = await self._body(progress, url, interval, resend=resend)
            headers = _session_header(session_id)
            async with self._connections.open("POST", url + wire.GENERATE, body.data, headers) as answer:
                if answer.status == 200:
                    self._note_stored_media(url, body)
                    yield _events(answer, url)
                    await settle(answer)
                    return
                raw = await answer.read_body()
            resend = self._lacks_media(url, body, answer.status, raw)
            if not resend:
                raise _refusal(answer.status, raw, url, guided=progress.params.guide is not None)

    @asynccontextmanager
    async def _deadline(
        self, progress: CompletionProgress, request: RoutedRequest, *, started_at: float | None = None
    ) -> AsyncIterator[None]:
        """Bound the time of a completion that began at ``started_at`` (now). Raises DeadlineExceeded."""
        seconds = self._routing.deadline
        if seconds is None:
            yield
            return
        started_at = asyncio.get_running_loop().time() if started_at is None else started_at
        timeout = asyncio.timeout_at(started_at + seconds)
        try:
            async with timeout:
                yield
        except TimeoutError as error:
            if not timeout.expired():
                raise
            session = f" of session {request.session_id}" if request.session_id else ""
            raise DeadlineExceeded(
                f"a completion{session} took more than {seconds:g} s (inference.routing.deadline), with "
                f"{progress.sampled} tokens sampled and {self.router.waiting} other requests waiting for a server: "
                "raise it, or use more servers"
            ) from error

    def _where(self, request: RoutedRequest) -> str:
        return "the servers" if request.avoid is None else self._urls[request.avoid]

    async def _healthy(self, number: int) -> bool:
        """Return whether a server answers, and note the load that it reports, if it does."""
        url = self._urls[number]
        status, _ = await self._pool().ask("GET", url + "/health")
        if status == 200 and url not in self._without_load:
            _, raw = await self._pool().ask("GET", url + wire.LOAD)
            load = wire.decode_load(raw)
            if load is None:
                self._without_load.add(url)
            else:
                self.router.note_load(number, load)
        return status == 200

    def _abandon(self, number: int) -> None:
        self._connections.abandon(self._urls[number], "the server does not answer")

    async def _after_failure(self, url: str, error: ConnectionFailed, failures: int) -> None:
        if failures > self._retries:
            raise InferenceError(f"{url} cannot be reached after {failures} tries: {error}") from error
        _log.debug("%s: %s; retrying (attempt %d of %d)", url, error, failures + 1, self._retries + 1)
        await asyncio.sleep(min(2.0, self._retry_wait * 2 ** (failures - 1)))

    async def _get(self, url: str, path: str) -> bytes:
        failures = 0
        while True:
            try:
                status, raw = await self._pool().ask("GET", url + path)
                if status != 200:
                    raise _refusal(status, raw, url + path)
                return raw
            except ConnectionFailed as error:
                failures += 1
                await self._after_failure(url + path, error, failures)


def _start(prompt: TokenPrompt, params: SamplingParams, *, routed: bool) -> CompletionProgress:
    if params.seed is not None and not -(2**63) <= params.seed < 2**63:
        raise RequestRefused(f"the seed {params.seed} has more than 64 bits: take it modulo 2**63")
    if params.guide is not None and not params.guide.tag:
        raise StructuredOutputError("params.guide has no tag: make the request through a Session, which sets it")
    return CompletionProgress(params if routed else replace(params, routes_from=None), prompt.token_ids, prompt.media)


def _encode(
    progress: CompletionProgress, stream: int, model: str | None, features: dict[str, Any] | None = None
) -> bytes:
    params, sampled, ids = progress.params, progress.sampled, progress.prompt
    if sampled and params.max_tokens is not None:
        params = replace(params, max_tokens=params.max_tokens - sampled)
    if sampled and params.routes_from is not None:
        params = replace(params, routes_from=len(ids) + sampled)
    ids = np.concatenate([ids, *progress.token_ids]) if sampled else ids
    return encode_request(
        ids, params, stream=stream, continued=params.continued + sampled, model=model, features=features
    )


def _check_free(progress: CompletionProgress, url: str) -> None:
    """Raise if an interrupted stream cannot be resumed."""
    if progress.params.guide is not None and progress.sampled:
        raise InferenceError(f"{url} interrupted a completion constrained by a grammar: repeat the request")


def _session_header(session_id: str) -> dict[str, str] | None:
    return {wire.SESSION_HEADER: session_id} if session_id else None


def _refusal(status: int, raw: bytes, url: str, *, guided: bool = False) -> TurnwiseError:
    message = f"{url} answered {status}: {wire.error_message(raw)}"
    if guided and status == 400:
        return StructuredOutputError(message)
    # Too many requests, and time-outs, pass; other refusals stay what they are.
    return RequestRefused(message) if 400 <= status < 500 and status not in (408, 429) else InferenceError(message)


def _parse(raw: bytes, url: str) -> Any:
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise InferenceError(f"{url} returned a body that is not JSON: {raw[:200]!r}") from error


async def _wait_after_abort(progress: CompletionProgress, url: str, sampled: int) -> None:
    """Resume at once if something was sampled; a server that only ever aborts counts as failed."""
    progress.empty_aborts = 0 if sampled else progress.empty_aborts + 1
    if progress.empty_aborts >= _EMPTY_ABORTS:
        raise InferenceError(f"{url} aborted a request {_EMPTY_ABORTS} times in a row without sampling anything")
    if progress.empty_aborts > 1:
        await asyncio.sleep(_ABORT_WAIT)


async def _events(answer: Response, url: str) -> AsyncIterator[Choice]:
    """Read server-sent events: ``data:`` lines only."""
    async for line in answer.lines():
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        body = _parse(data, url)
        if isinstance(body, dict) and body.get("error"):
            raise InferenceError(f"{url} aborted a stream: {wire.error_message(data)}")
        choice = wire.decode_event(body, url)
        if choice is not None:
            yield choice


def _finish_reason(progress: CompletionProgress, finish_reason: FinishReason | None) -> FinishReason | None:
    """Return the finish reason, or None if the completion was interrupted and has room left."""
    if finish_reason is not None and finish_reason != "abort":
        return finish_reason
    return "length" if progress.sampled and progress.sampled == progress.params.max_tokens else None


def _latest(spans: Sequence[VersionSpan] | None) -> int | None:
    return spans[-1][0] if spans else None
