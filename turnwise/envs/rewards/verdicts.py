"""Structured verdicts of a chat model: asked for, read tolerantly, kept.

Owns: :class:`Verdicts` and :class:`AskOptions`. Refuses: what a verdict says (``judge.py``, ``groups.py``).
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import orjson

from turnwise.append import AppendFile
from turnwise.envs.rewards.endpoint import Endpoint, EndpointError
from turnwise.errors import ConfigError, EnvError, shown

Structured: TypeAlias = Literal["auto", "always", "never"]
Verdict: TypeAlias = dict[str, Any]
ReadVerdict: TypeAlias = Callable[[str], Verdict]
"""From the text that a judge wrote to its verdict. Raises ValueError, with the reason, where it is none."""

_REFUSED_FORM = frozenset((400, 415, 422, 501))
_THOUGHT = re.compile(r"<think>.*?</think>|\A\s*<think>.*", re.DOTALL)


class _Said(NamedTuple):
    """What a model wrote, and whether a limit cut it off."""

    text: str
    cut: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AskOptions:
    """How a chat model is asked.

    Attributes:
        api_key_env: Environment variable that holds the key; None sends none.
        attempts: How often a model that writes no verdict is asked.
        temperature: Of the judge.
        max_tokens: Most tokens of its answer.
        structured: Whether ``response_format`` with a JSON schema is sent: ``auto`` (until the server refuses it),
            ``always`` or ``never``. What comes back is read tolerantly in any case.
        extra_body: Further fields of each request.
        cache_size: How many verdicts are kept in memory.
        cache_file: File of verdicts that were given before; new ones are appended. For one process at a time.
        timeout: Seconds that one try may take.
        retries: How often a request is sent again after a broken connection, a time-out, 429 or 5xx.
        retry_wait: Seconds before the first of those; doubled each time. ``Retry-After`` is kept to.
        concurrency: Requests in flight at the same time.
        requests_per_minute: Requests are spaced so that no more are sent; None is no limit.
    """

    api_key_env: str | None = None
    attempts: int = 3
    temperature: float = 0.0
    max_tokens: int = 1024
    structured: Structured = "auto"
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    cache_size: int = 65536
    cache_file: str | None = None
    timeout: float = 120.0
    retries: int = 5
    retry_wait: float = 1.0
    concurrency: int = 16
    requests_per_minute: float | None = None


class Verdicts:
    """Asks a chat model for verdicts of one form. Each question is asked once: equal ones share an answer."""

    def __init__(
        self, base_url: str, model: str, schema: Mapping[str, Any], read: ReadVerdict, options: AskOptions
    ) -> None:
        """Name a model.

        Args:
            base_url: Of an OpenAI-compatible API; ``/chat/completions`` is appended.
            model: Name of the model.
            schema: JSON schema of a verdict; sent as ``response_format`` where the server takes it.
            read: Reads a verdict.
            options: How it is asked.

        Raises:
            ConfigError: An argument cannot be used.
        """
        for name, value, least in (
            ("attempts", options.attempts, 1),
            ("max_tokens", options.max_tokens, 1),
            ("cache_size", options.cache_size, 0),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"judge: {name} is {shown(value)}: it must be an integer of at least {least}")
        if options.structured not in get_args(Structured):
            raise ConfigError(f"judge: structured is {shown(options.structured)}: it must be auto, always or never")
        if not isinstance(model, str) or not model:
            raise ConfigError(f"judge: model is {shown(model)}: it must be the name of a model")
        endpoint = Endpoint(
            base_url,
            what="judge",
            api_key_env=options.api_key_env,
            timeout=options.timeout,
            retries=options.retries,
            retry_wait=options.retry_wait,
            concurrency=options.concurrency,
            requests_per_minute=options.requests_per_minute,
        )
        self._endpoint = endpoint
        self._body: dict[str, Any] = {
            "model": model,
            "temperature": options.temperature,
            "max_tokens": options.max_tokens,
            **options.extra_body,
        }
        self._label = f"{endpoint.name} ({model})"
        self._schema = schema
        self._read = read
        self._attempts = options.attempts
        self._structured = options.structured != "never"
        self._may_drop = options.structured == "auto"
        self._cache_size = options.cache_size
        self._path = None if options.cache_file is None else Path(options.cache_file).expanduser()
        self._file: AppendFile | None = None
        self._cache: OrderedDict[str, Verdict] = OrderedDict()
        self._asking: dict[tuple[int, str], asyncio.Task[Verdict]] = {}
        if self._path is not None:
            self._open_cache(self._path)

    async def ask(self, question: str) -> tuple[Verdict, bool]:
        """Return the verdict on a question, and whether it was known.

        Raises:
            EnvError: The server failed, or the model gave no verdict in all its attempts.
        """
        key = self._key(question)
        if key in self._cache:
            self._cache.move_to_end(key)
            return self._cache[key], True
        running = (id(asyncio.get_running_loop()), key)
        task = self._asking.get(running)
        shared = task is not None
        if task is None:
            task = self._asking[running] = asyncio.create_task(self._ask(question, key))
            task.add_done_callback(lambda done: self._ended(running, done))
        # Shielded: who waits may be cancelled, others wait for the same verdict.
        return await asyncio.shield(task), shared

    async def close(self) -> None:
        """Close the cache's file and the connections of this event loop."""
        if self._file is not None:
            self._file.close()
            self._file = None
        await self._endpoint.close()

    def _ended(self, running: tuple[int, str], task: asyncio.Task[Verdict]) -> None:
        self._asking.pop(running, None)
        # Taken notice of: all who waited may have been cancelled.
        _ = task.cancelled() or task.exception()

    async def _ask(self, question: str, key: str) -> Verdict:
        first = {"role": "user", "content": question}
        messages, said, why = [first], "", ""
        for _ in range(self._attempts):
            said, cut = await self._complete(messages)
            try:
                if cut:
                    # What was quoted or weighed before the end must not pass for the verdict.
                    raise ValueError(f"it was cut off after max_tokens ({self._body['max_tokens']})")
                verdict = self._read(_THOUGHT.sub("", said))
            except ValueError as error:
                why = str(error)
                form = orjson.dumps(self._schema).decode()
                again = (
                    f"That is no verdict: {why}. Answer with one JSON object of this schema, and nothing else: {form}"
                )
                messages = [first, {"role": "assistant", "content": said[-4000:]}, {"role": "user", "content": again}]
                continue
            self._keep(key, verdict)
            return verdict
        tries = "1 try" if self._attempts == 1 else f"{self._attempts} tries"
        last = self._endpoint.redact(f"{why}; the last answer was {shown(said, 200)}")
        raise EnvError(f"{self._label} gave no verdict in {tries}: {last}")

    async def _complete(self, messages: list[dict[str, str]]) -> _Said:
        body = {**self._body, "messages": messages}
        if self._structured:
            form = {"name": "verdict", "schema": self._schema, "strict": True}
            try:
                return self._said(
                    await self._endpoint.post(
                        "/chat/completions", {**body, "response_format": {"type": "json_schema", "json_schema": form}}
                    )
                )
            except EndpointError as error:
                if not self._may_drop or error.status not in _REFUSED_FORM:
                    raise
            answer = await self._endpoint.post("/chat/completions", body)
            # It was the form that the server refused: the same request without it went through.
            self._structured = False
            return self._said(answer)
        return self._said(await self._endpoint.post("/chat/completions", body))

    def _said(self, answer: Any) -> _Said:
        try:
            content = answer["choices"][0]["message"]["content"]
            cut = answer["choices"][0].get("finish_reason") == "length"
        except (AttributeError, KeyError, IndexError, TypeError) as error:
            text = self._endpoint.redact(shown(answer, 200))
            raise EnvError(f"{self._label} answered no choices[0].message.content: {text}") from error
        return _Said(content if isinstance(content, str) else "", cut)

    # -- what was asked before

    def _key(self, question: str) -> str:
        asked = [self._endpoint.name, self._body, self._schema, question]
        text = orjson.dumps(asked, option=orjson.OPT_SORT_KEYS)
        return hashlib.blake2b(text, digest_size=16).hexdigest()

    def _keep(self, key: str, verdict: Verdict) -> None:
        self._remember(key, verdict)
        if self._path is not None:
            if self._file is None:
                self._file = AppendFile(self._path)
            self._file.append(orjson.dumps({"key": key, "verdict": verdict}))

    def _remember(self, key: str, verdict: Verdict) -> None:
        self._cache[key] = verdict
        self._cache.move_to_end(key)
        while len(self._cache) > self._cache_size:
            self._cache.popitem(last=False)

    def _open_cache(self, path: Path) -> None:
        """Read the file where there is one, else see that it can be made: before the first verdict is paid for."""
        if path.exists():
            self._load(path)
        place = path if path.exists() else next(each for each in path.absolute().parents if each.exists())
        if not os.access(place, os.W_OK) or not (place.is_dir() or place == path):
            raise ConfigError(f"judge: cache_file {path} cannot be written: name a file in a folder that can be")

    def _load(self, path: Path) -> None:
        try:
            lines = path.read_bytes().split(b"\n")
        except OSError as error:
            raise ConfigError(f"judge: cache_file {path} cannot be read: {error}") from error
        for number, line in enumerate(lines, 1):
            # A process that was killed may have left half a line.
            if not line.endswith(b"}"):
                continue
            try:
                record = orjson.loads(line)
                self._remember(str(record["key"]), dict(record["verdict"]))
            except (orjson.JSONDecodeError, KeyError, TypeError, ValueError) as error:
                raise ConfigError(f"judge: cache_file {path}:{number} holds no verdict: {error!r}") from error
