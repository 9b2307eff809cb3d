"""Station: the episodes of one framework in this process, addressed by JSON requests.

A driver is a module with ``PACKAGE`` (the distribution's name), ``names()`` (the known environments) and
``load(name, kwargs, system_prompt)``, which returns a source. A source has ``episode()`` and optionally
``tasks(split, start, count)`` and ``endless``. An episode has ``reset(data, seed)``, ``step(message)``, and optionally
``score(message)``, ``fork()`` and ``close()``. Those of an episode may be ``async def``.

``reset`` returns a dict with ``messages``, and optionally ``tools`` (schemas), ``agents``, ``turn`` and ``info``.
``step`` returns one with ``messages``, ``reward``, ``terminated`` and ``truncated``, and optionally ``rewards``,
``metrics``, ``notes``, ``turn``, ``agent_rewards`` and ``info``. ``score`` returns a number or named parts.
"""

from __future__ import annotations

import asyncio
import copy
import importlib
import importlib.util
import inspect
import json
import math
import random
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from typing import Any

_STACK = 1500
_MOST_SOURCES = 64
_MOST_LETTERS = 2**22
"""Most characters of the rows of one answer."""
_MOST_ITEMS = 4096
"""Most items of an array that is written out."""
_RESET = ("messages",)
_STEP = ("messages", "reward", "terminated", "truncated")


class Failure(Exception):
    """A request that failed.

    Attributes:
        kind: ``missing`` (a package), ``unknown`` (an environment), ``config`` (arguments), ``raised`` (the framework's
            code raised) or ``protocol``.
        message: What happened.
        details: Further values: ``known`` names, the ``stack``.
    """

    def __init__(self, kind: str, message: str, **details: Any) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.details = details

    def to_json(self) -> dict[str, Any]:
        """Return the failure as JSON values."""
        return {"kind": self.kind, "message": self.message, **self.details}


def framework(name: str) -> Any:
    """Import a framework. Raises Failure of kind ``missing``."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise Failure("missing", f"{type(error).__name__}: {error}", module=name) from error


def check_installed(name: str) -> None:
    """Check that a framework is there, without the seconds of its import. Raises Failure of kind ``missing``."""
    if importlib.util.find_spec(name) is None:
        raise Failure("missing", f"No module named {name!r}", module=name)


def text_of(message: Mapping[str, Any]) -> str:
    """Return the text of a message."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "".join(str(part.get("text", "")) for part in parts if isinstance(part, Mapping))


def opening(system_prompt: str | None, text: str) -> list[dict[str, Any]]:
    """Return a system message, if any, and a user message."""
    head = [{"role": "system", "content": system_prompt}] if system_prompt else []
    return [*head, {"role": "user", "content": text}]


def refusals(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Answer the tool calls of a message by errors, where an environment has no tools."""
    answers = []
    for call in message.get("tool_calls") or ():
        refusal = {"error": {"type": "unknown_tool", "message": f"there is no tool {call['name']!r}", "available": []}}
        content = json.dumps(refusal, ensure_ascii=False)
        answers.append({"role": "tool", "tool_call_id": call["id"], "name": call["name"], "content": content})
    return answers


def plain(value: Any) -> Any:
    """Return a value as JSON values: arrays as lists, numbers that are not finite and all else as text.

    Half a surrogate pair is no text in any encoding: it becomes ``?``, here as in another process.
    """
    kind = type(value)
    # Most values are of exactly these types, and comparing types is faster than isinstance.
    if kind is str:
        return value if value.isascii() else value.encode("utf-8", "replace").decode()
    if kind is bool or kind is int or value is None:
        return value
    if kind is dict:
        return {key if type(key) is str else str(key): plain(member) for key, member in value.items()}
    if isinstance(value, int):
        return value
    if isinstance(value, str):
        return plain(str(value))
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if isinstance(value, Mapping):
        return {str(key): plain(member) for key, member in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(member) for member in value]
    listed = getattr(value, "tolist", None)
    size = getattr(value, "size", 1)
    # A tensor's size is a method: only of an array it says how long the list is.
    if callable(listed) and (not isinstance(size, int) or size <= _MOST_ITEMS):
        return plain(listed())
    return repr(value)[:200]


def raised(error: BaseException) -> Failure:
    """Return the failure that an exception of a framework's code is, also of one that has no text."""
    try:
        message = f"{type(error).__name__}: {error}"
        stack = "".join(traceback.format_exception(type(error), error, error.__traceback__))[-_STACK:]
    except Exception as other:  # noqa: BLE001 - its __str__ is the framework's code, too
        message, stack = f"{type(error).__name__}, whose text cannot be had ({type(other).__name__})", ""
    return Failure("raised", message, stack=stack)


@contextmanager
def _no_loop() -> Iterator[None]:
    """Let plain functions call ``asyncio.run``, as they may outside of an event loop."""
    loop = asyncio._get_running_loop()
    task = None if loop is None else asyncio.current_task(loop)
    if loop is None or task is None:
        yield
        return
    asyncio.tasks._leave_task(loop, task)
    asyncio._set_running_loop(None)
    try:
        yield
    finally:
        asyncio._set_running_loop(loop)
        asyncio.tasks._enter_task(loop, task)


class RandomState:
    """The state of ``random`` and ``numpy.random`` that one episode sees; frameworks draw from these generators."""

    def __init__(self) -> None:
        self._states: tuple[Any, Any] | None = None

    @contextmanager
    def used(self, seed: int | None = None) -> Iterator[None]:
        """Use it in a block, and restore what was there before; with a seed it begins anew."""
        outside = _random_states()
        if seed is not None:
            random.seed(seed)
            if "numpy" in sys.modules:
                sys.modules["numpy"].random.seed(seed % 2**32)
        elif self._states is not None:
            _restore_random(self._states)
        try:
            yield
        finally:
            self._states = _random_states()
            _restore_random(outside)


def _random_states() -> tuple[Any, Any]:
    numpy = sys.modules.get("numpy")
    return random.getstate(), None if numpy is None else numpy.random.get_state()


def _restore_random(states: tuple[Any, Any]) -> None:
    random.setstate(states[0])
    if states[1] is not None:
        sys.modules["numpy"].random.set_state(states[1])


class _Playing:
    """An episode with its random state."""

    def __init__(self, episode: Any) -> None:
        self.episode = episode
        self.random = RandomState()


class Station:
    """The episodes of one driver in this process.

    Args:
        driver: The driver's module.
    """

    def __init__(self, driver: Any) -> None:
        self._driver = driver
        self._sources: dict[str, Any] = {}
        self._playing: dict[int, _Playing] = {}

    async def handle(self, request: Mapping[str, Any]) -> Any:
        """Answer a request. Raises Failure."""
        operations = {
            "names": self._names,
            "open": self._open,
            "tasks": self._tasks,
            "reset": self._reset,
            "step": self._step,
            "score": self._score,
            "fork": self._fork,
            "close": self._close,
        }
        operation = operations.get(request.get("op", ""))
        if operation is None:
            raise Failure("protocol", f"there is no operation {request.get('op')!r}")
        try:
            answer = plain(await operation(request))
        except Failure:
            raise
        except (Exception, SystemExit) as error:  # a framework's code may raise anything: it becomes data
            raise raised(error) from error
        return answer

    def at_once(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Answer a request that awaits nothing (``names``, ``open``, ``tasks``), without a loop. Raises Failure."""
        answering = self.handle(request)
        try:
            answering.send(None)
        except StopIteration as done:
            answer: dict[str, Any] = done.value
            return answer
        answering.close()
        raise Failure("protocol", f"{request.get('op')} awaits something")

    async def _names(self, request: Mapping[str, Any]) -> Any:  # noqa: ARG002
        return {"names": list(self._driver.names()), "version": self._version()}

    async def _open(self, request: Mapping[str, Any]) -> Any:
        self._load_source(request)
        return {"version": self._version()}

    def _version(self) -> str:
        try:
            return metadata.version(self._driver.PACKAGE)
        except metadata.PackageNotFoundError:
            return ""

    def _load_source(self, request: Mapping[str, Any]) -> Any:
        key = json.dumps([request["name"], request["kwargs"], request["system_prompt"]], sort_keys=True)
        if key not in self._sources:
            name = request["name"]
            names = list(self._driver.names())
            if names and name not in names:
                raise Failure("unknown", f"there is no {name!r}", known=names)
            try:
                source = self._driver.load(name, dict(request["kwargs"]), request["system_prompt"])
            except Failure:
                raise
            except (TypeError, ValueError, AssertionError, KeyError) as error:
                raise Failure("config", f"{type(error).__name__}: {error}") from error
            if len(self._sources) >= _MOST_SOURCES:
                self._sources.clear()
            self._sources[key] = source
        return self._sources[key]

    async def _tasks(self, request: Mapping[str, Any]) -> Any:
        source, count = self._load_source(request), request["count"]
        rows = source.tasks(request["split"], request["start"], count)
        chunk: list[Any] = []
        letters = 0
        for row in rows:
            letters += len(json.dumps(plain(row)))
            if chunk and letters > _MOST_LETTERS:
                break
            chunk.append(row)
        more = len(chunk) < len(rows) or len(rows) == count
        return {"rows": chunk, "more": more, "endless": getattr(source, "endless", False)}

    async def _reset(self, request: Mapping[str, Any]) -> Any:
        await self._close(request)
        source, seed = self._load_source(request), request.get("seed")
        playing = _Playing(None)
        # Seeded for both: what is drawn in making an environment is not left over for its reset.
        playing.episode = await _call_driver(playing, source.episode, seed=seed)
        answer = await _call_driver(playing, playing.episode.reset, request.get("data"), seed, seed=seed)
        self._playing[request["episode"]] = playing
        return _whole(answer, "reset", _RESET)

    async def _step(self, request: Mapping[str, Any]) -> Any:
        playing = self._playing_of(request)
        return _whole(await _call_driver(playing, playing.episode.step, request["message"]), "step", _STEP)

    async def _score(self, request: Mapping[str, Any]) -> Any:
        playing = self._playing_of(request)
        score = getattr(playing.episode, "score", None)
        return {"score": 0.0 if score is None else await _call_driver(playing, score, request.get("message"))}

    async def _fork(self, request: Mapping[str, Any]) -> Any:
        playing = self._playing_of(request)
        fork = getattr(playing.episode, "fork", None)
        copied = copy.deepcopy(playing) if fork is None else _Playing(await _result(fork()))
        self._playing[request["to"]] = copied
        return {}

    async def _close(self, request: Mapping[str, Any]) -> Any:
        playing = self._playing.pop(request["episode"], None)
        close = None if playing is None else getattr(playing.episode, "close", None)
        if playing is not None and close is not None:
            await _call_driver(playing, close)
        return {}

    def _playing_of(self, request: Mapping[str, Any]) -> _Playing:
        try:
            return self._playing[request["episode"]]
        except KeyError:
            raise Failure("protocol", "no episode runs: call reset() first") from None


async def _result(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def _whole(answer: Any, method: str, fields: tuple[str, ...]) -> Any:
    """Check that a driver's answer has what it must have. Raises Failure."""
    messages = answer.get("messages") if isinstance(answer, dict) else None
    missing = fields if not isinstance(answer, dict) else [field for field in fields if field not in answer]
    if missing:
        raise Failure("raised", f"the driver's {method}() gave no {', '.join(missing)}: it returns a dict with them")
    if not isinstance(messages, (list, tuple)) or not all(isinstance(message, Mapping) for message in messages):
        raise Failure("raised", f"the driver's {method}() gave messages that are no list of dicts")
    return answer


async def _call_driver(playing: _Playing, function: Any, *args: Any, seed: int | None = None) -> Any:
    # Coroutines are not held to a random state: others run between their steps.
    with playing.random.used(seed), _no_loop():
        outcome = function(*args)
    return await _result(outcome)
