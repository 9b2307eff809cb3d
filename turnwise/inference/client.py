"""HTTP client for servers with vLLM's ``/inference/v1/generate``: the built-in server and vLLM itself."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import orjson

from turnwise.errors import InferenceError, RequestRefused, StructuredOutputError, TurnwiseError
from turnwise.inference import wire
from turnwise.inference.connections import ConnectionFailed, Connections, Response
from turnwise.inference.wire import encode_request, encode_scoring
from turnwise.model.core import LLMClient, ModelInfo
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

_REMEMBERED_SESSIONS = 65536


class Balancer:
    """Load balancer: a session's last server, which caches its prefix, else the least busy one."""

    def __init__(self, count: int, *, remembered: int = _REMEMBERED_SESSIONS) -> None:
        self._busy = [0] * count
        self._home: OrderedDict[str, int] = OrderedDict()
        self._remembered = remembered

    def acquire(self, session_id: str, *, avoid: int | None = None) -> int:
        """Choose a server other than ``avoid`` and count a request on it."""
        index = self._home.get(session_id) if session_id else None
        if index is None or (index == avoid and len(self._busy) > 1):
            choices = [place for place in range(len(self._busy)) if place != avoid or len(self._busy) == 1]
            index = min(choices, key=self._busy.__getitem__)
        if session_id:
            self._home[session_id] = index
            self._home.move_to_end(session_id)
            if len(self._home) > self._remembered:
                self._home.popitem(last=False)
        self._busy[index] += 1
        return index

    def release(self, index: int) -> None:
        """Count a request as finished."""
        self._busy[index] -= 1


_EMPTY_ABORTS = 100
_ABORT_WAIT = 0.05
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Progress:
    """A completion so far, over all its parts."""

    params: SamplingParams
    prompt: TokenIds
    token_ids: list[TokenIds] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    sampled: int = 0
    named: int = 0
    empty_aborts: int = 0

    def body(self, *, stream: bool, model: str | None) -> bytes:
        params = self.params
        if self.sampled and params.max_tokens is not None:
            params = replace(params, max_tokens=params.max_tokens - self.sampled)
        token_ids = np.concatenate([self.prompt, *self.token_ids]) if self.sampled else self.prompt
        return encode_request(token_ids, params, stream=stream, continued=self.sampled, model=model)

    def add(self, token_ids: TokenIds, logprobs: Logprobs) -> None:
        self.token_ids.append(token_ids)
        self.logprobs.append(logprobs)
        self.sampled += len(token_ids)

    def drop(self) -> None:
        """Discard what was sampled: a grammar cannot resume in the middle."""
        self.token_ids, self.logprobs, self.spans = [], [], []
        self.sampled = self.named = 0

    def end_part(self, spans: Sequence[VersionSpan] | None, url: str) -> None:
        """Set the version spans of the part that ends here, relative to its start; None means version 0."""
        begin = self.named
        if spans is None:
            spans = ((0, 0, self.sampled - begin),) if self.sampled > begin else ()
        if not wire.covers(spans, self.sampled - begin):
            raise InferenceError(f"{url} answered {self.sampled - begin} ids with weight versions for {spans}")
        for version, start, end in spans:
            goes_on = bool(self.spans) and self.spans[-1][0] == version
            first = self.spans.pop()[1] if goes_on else start + begin
            self.spans.append((version, first, end + begin))
        self.named = self.sampled

    def completion(self, finish_reason: FinishReason) -> Completion:
        return Completion(
            token_ids=self.token_ids[0] if len(self.token_ids) == 1 else np.concatenate(self.token_ids),
            logprobs=self.logprobs[0] if len(self.logprobs) == 1 else np.concatenate(self.logprobs),
            finish_reason=finish_reason,
            weight_versions=tuple(self.spans),
        )


class HTTPClient(LLMClient):
    """Client of one or several servers over one connection pool, with bounded retries after connection errors.

    A completion interrupted by a weight update (``finish_reason: abort``) is resumed from its ids; structured output is
    sampled again, or fails if it was streamed. With a seed and equal weights, the built-in server then returns the same
    ids as without the interruption; vLLM does not.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        model: str | None = None,
        retries: int = 5,
        retry_wait: float = 0.1,
        headers: dict[str, str] | None = None,
    ) -> None:
        """Create a client; connections are opened on demand.

        Args:
            urls: Base URLs, such as ``http://127.0.0.1:8000``; ValueError if empty.
            model: Sent as ``model`` to servers of several models.
            retries: Retries after a connection error.
            retry_wait: Seconds before the first retry; doubled each time, at most 2.
            headers: Sent with every request (``Authorization``).
        """
        if not urls:
            raise ValueError("urls is empty: name at least one server")
        self._urls = [url.rstrip("/") for url in urls]
        self._model = model
        self._retries = retries
        self._retry_wait = retry_wait
        self._headers = {"Content-Type": "application/json", **(headers or {})}
        self._balancer = Balancer(len(urls))
        self._connections = Connections(self._headers)
        self._closed = False

    @property
    def urls(self) -> tuple[str, ...]:
        """Base URLs of the servers."""
        return tuple(self._urls)

    def replace_url(self, old: str, new: str) -> None:
        """Route requests for ``old`` to ``new``, after a server restarted on another port."""
        self._urls[self._urls.index(old.rstrip("/"))] = new.rstrip("/")

    async def generate(self, prompt: TokenPrompt, params: SamplingParams, *, session_id: str) -> Completion:
        """Sample one completion; see :meth:`LLMClient.generate`."""
        progress = _start(prompt, params)
        while True:
            body = progress.body(stream=False, model=self._model)
            raw, url = await self._post(body, session_id, guided=params.guide is not None)
            choice = wire.decode_response(_parse(raw, url), url)
            progress.add(choice.token_ids, choice.logprobs)
            progress.end_part(choice.spans, url)
            ended = _ended(progress, choice.finish_reason)
            if ended is not None:
                return progress.completion(ended)
            if progress.params.guide is not None:
                progress.drop()
            await _wait_after_abort(progress, url, len(choice.token_ids))

    async def stream(
        self, prompt: TokenPrompt, params: SamplingParams, *, session_id: str
    ) -> AsyncIterator[TokenDelta]:
        """Sample one completion incrementally; see :meth:`LLMClient.stream`."""
        progress = _start(prompt, params)
        failures = 0
        avoid: int | None = None
        while True:
            choice: wire.Choice | None = None
            spans: tuple[VersionSpan, ...] | None = None
            before = progress.sampled
            index = self._balancer.acquire(session_id, avoid=avoid)
            url = self._urls[index]
            try:
                async with self._open_stream(url, progress, session_id) as events:
                    async for choice in events:
                        progress.add(choice.token_ids, choice.logprobs)
                        spans = choice.spans or spans
                        if choice.finish_reason is not None:
                            break
                        yield TokenDelta(choice.token_ids, choice.logprobs, _latest(choice.spans))
            except ConnectionFailed as error:
                failures += 1
                if progress.sampled > before and spans is None:
                    raise InferenceError(
                        f"{url} ended a stream before reporting which weights sampled it: {error}"
                    ) from error
                progress.end_part(spans, url)
                _check_free(progress, url)
                avoid = index
                await self._after_failure(url, error, failures)
                continue
            finally:
                self._balancer.release(index)
            if choice is None or choice.finish_reason is None:
                raise InferenceError(f"{url} ended a stream without a finish reason")
            progress.end_part(spans, url)
            ended = _ended(progress, choice.finish_reason)
            if ended is not None or len(choice.token_ids):
                whole = tuple(progress.spans)
                yield TokenDelta(
                    choice.token_ids, choice.logprobs, _latest(whole), ended, () if ended is None else whole
                )
            if ended is not None:
                return
            _check_free(progress, url)
            await _wait_after_abort(progress, url, progress.sampled - before)

    async def score(self, token_ids: TokenIds, *, session_id: str = "") -> Logprobs:
        """Return log-probabilities of given ids; see :meth:`LLMClient.score`."""
        data = encode_scoring(token_ids, model=self._model)
        for _ in range(_EMPTY_ABORTS):
            raw, url = await self._post(data, session_id)
            found = wire.decode_prompt_logprobs(_parse(raw, url), token_ids, url)
            if found is not None:
                return found
            await asyncio.sleep(_ABORT_WAIT)
        raise InferenceError(f"{url} aborted a request {_EMPTY_ABORTS} times in a row without scoring anything")

    async def model_info(self) -> ModelInfo:
        """Return the first server's model description."""
        url = self._urls[0]
        body = _parse(await self._get(url, "/v1/models"), url)
        try:
            card = body["data"][0]
            name, length = str(card["id"]), int(card["max_model_len"])
            # Ours say so; vLLM always can.
            guides = bool(card.get("guides", card.get("owned_by") == "vllm"))
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise InferenceError(f"{url}/v1/models lists no model with max_model_len: {str(body)[:200]}") from error
        try:
            info = _parse(await self._get(url, "/weight_info"), url)
        except RequestRefused:
            # vLLM has this route in its development mode only.
            return ModelInfo(name, length, guides=guides)
        version = str(info.get("weight_version") or 0)
        return ModelInfo(name, length, int(version) if version.isdecimal() else 0, guides)

    async def close(self) -> None:
        """Close all connections."""
        self._closed = True
        await self._connections.close()

    def _pool(self) -> Connections:
        if self._closed:
            raise InferenceError("this client is closed")
        return self._connections

    async def _post(self, data: bytes, session_id: str, *, guided: bool = False) -> tuple[bytes, str]:
        """Send a request with retries; return the body and the server's URL."""
        failures = 0
        avoid = None
        while True:
            index = self._balancer.acquire(session_id, avoid=avoid)
            url = self._urls[index]
            try:
                status, raw = await self._pool().ask("POST", url + wire.GENERATE, data, _session_header(session_id))
                if status != 200:
                    raise _refusal(status, raw, url, guided=guided)
                return raw, url
            except ConnectionFailed as error:
                failures += 1
                avoid = index
                await self._after_failure(url, error, failures)
            finally:
                self._balancer.release(index)

    @asynccontextmanager
    async def _open_stream(
        self, url: str, progress: _Progress, session_id: str
    ) -> AsyncIterator[AsyncIterator[wire.Choice]]:
        data = progress.body(stream=True, model=self._model)
        async with self._pool().open("POST", url + wire.GENERATE, data, _session_header(session_id)) as answer:
            if answer.status != 200:
                guided = progress.params.guide is not None
                raise _refusal(answer.status, await answer.read(), url, guided=guided)
            yield _events(answer, url)
            await answer.settle()

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


def _start(prompt: TokenPrompt, params: SamplingParams) -> _Progress:
    if prompt.media:
        raise RequestRefused(
            f"the prompt holds {len(prompt.media)} media, but this client sends token ids only: remove them"
        )
    if params.seed is not None and not -(2**63) <= params.seed < 2**63:
        raise RequestRefused(f"the seed {params.seed} has more than 64 bits: take it modulo 2**63")
    if params.guide is not None and not params.guide.tag:
        raise StructuredOutputError("params.guide has no tag: make the request through a Session, which sets it")
    return _Progress(params, prompt.token_ids)


def _check_free(progress: _Progress, url: str) -> None:
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


async def _wait_after_abort(progress: _Progress, url: str, sampled: int) -> None:
    """Resume at once if something was sampled; a server that only ever aborts counts as failed."""
    progress.empty_aborts = 0 if sampled else progress.empty_aborts + 1
    if progress.empty_aborts >= _EMPTY_ABORTS:
        raise InferenceError(f"{url} aborted a request {_EMPTY_ABORTS} times in a row without sampling anything")
    if progress.empty_aborts > 1:
        await asyncio.sleep(_ABORT_WAIT)


async def _events(answer: Response, url: str) -> AsyncIterator[wire.Choice]:
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


def _ended(progress: _Progress, finish_reason: FinishReason | None) -> FinishReason | None:
    """Return the finish reason, or None if the completion was interrupted and has room left."""
    if finish_reason is not None and finish_reason != "abort":
        return finish_reason
    return "length" if progress.sampled and progress.sampled == progress.params.max_tokens else None


def _latest(spans: Sequence[VersionSpan] | None) -> int | None:
    return spans[-1][0] if spans else None
