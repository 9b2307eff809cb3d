"""Driver of verifiers: an environment's own loop, whose model is asked at an endpoint that a player's steps answer.

An episode is one of ``Env.run_episode``: its hooks, tool servers, stop conditions and rewards are the framework's. The
framework asks its model at an OpenAI-compatible endpoint. The endpoint is here: each request is what the player
observes, and the player's message is the completion.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import pkgutil
import sys
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from .core import Failure, framework

PACKAGE = "verifiers"
_SESSION = "X-Session-ID"
"""The header by which requests of a trace are known."""
_HARNESS = "turnwise_chat"
"""Id of the harness in ``verifiers_chat.py``: the name of a module without dots, under which it is registered."""
_MOST_DRAWN = 1000
"""Tasks among which a seed chooses, where none is named."""
_LINGER_SECONDS = 60.0
_MOST_BODY = 2**28
_STACK = 1500


def names() -> list[str]:
    """Return nothing: environments are packages, which are known by their names alone."""
    framework("verifiers.v1")
    return []


def load(name: str, kwargs: dict[str, Any], system_prompt: str | None) -> Environment:
    """Return an environment: ``TASKSET``, ``ENV+TASKSET``, or the path of a module; ``kwargs`` is its ``EnvConfig``."""
    vf = framework("verifiers.v1")
    kind, _, taskset_name = name.rpartition("+")
    if os.sep in kind:
        kind, taskset_name = "", name
    taskset = kwargs.get("taskset") or {}
    if not isinstance(taskset, dict) or "id" in taskset or "id" in kwargs:
        raise Failure("config", "kwargs.taskset is a mapping, and no id stands in kwargs: the name has them")
    _register_harness()
    raw = {**kwargs, "id": kind, "taskset": {**taskset, "id": _importable(taskset_name)}}
    try:
        config = vf.resolve_env_config(raw)
        seat, config = _seated(config)
        return Environment(vf.load_environment(config), seat, system_prompt)
    except ModuleNotFoundError as error:
        if not str(error).startswith(("taskset", "environment")):
            raise Failure("config", str(error)) from error
        cause = error.__cause__
        if isinstance(cause, ModuleNotFoundError) and f"{cause.name}" not in f"{error}":
            raise Failure("config", f"its package imports {cause.name}, which is not installed there") from error
        shipped = sorted(module.name for module in pkgutil.iter_modules(framework("verifiers.v1.tasksets").__path__))
        hint = "; others are packages: install one there, or name a file"
        raise Failure("unknown", f"there is no {name!r}", known=shipped, hint=hint) from error
    except AttributeError as error:
        old = "; a load_environment without a Taskset is of verifiers before 0.2, which is not taken"
        raise Failure("config", f"{error}".rstrip(".") + old) from error
    except ImportError as error:
        raise Failure("config", f"its package cannot be imported: {error}") from error


def _register_harness() -> None:
    from . import verifiers_chat

    sys.modules.setdefault(_HARNESS, verifiers_chat)


def _importable(taskset_name: str) -> str:
    """Return the id of a taskset; the folder of one that is named by a path becomes importable, also to its tools."""
    path = Path(taskset_name).expanduser()
    if path.suffix != ".py" and os.sep not in taskset_name:
        return taskset_name
    if not path.exists():
        raise Failure("config", f"there is no file {taskset_name}")
    folder = str(path.absolute().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
    return path.stem


def _seated(config: Any) -> tuple[str, Any]:
    """Return the seat that the player takes, and the configuration with a harness and a runtime for it."""
    vf = framework("verifiers.v1")
    seats = framework("verifiers.v1.configs.agent").agent_config_fields(config)
    free = [name for name, seat in seats.items() if seat.client is None]
    if len(free) != 1:
        which = ", ".join(seats)
        raise Failure(
            "config",
            f"{len(free)} of its seats ({which}) have no client: the player takes one, and each other needs an "
            f"endpoint: kwargs.SEAT.model and kwargs.SEAT.client",
        )
    changes = {}
    for name, seat in seats.items():
        # The default is a sandbox in a cloud, which has to be asked for here.
        update = {} if "runtime" in seat.model_fields_set else {"runtime": vf.SubprocessConfig()}
        if seat.harness is None and vf.default_harness_id(config.taskset.id) == "bash":
            update["harness"] = vf.harness_config_type(_HARNESS).model_validate({"id": _HARNESS})
        changes[name] = seat.model_copy(update=update)
    return free[0], config.model_copy(update=changes)


class Environment:
    """An environment, the endpoint that its model is asked at, and its tasks.

    Attributes:
        endless: Whether its tasks have no end.
    """

    def __init__(self, env: Any, seat: str, system_prompt: str | None) -> None:
        self._env = env
        self._seat = seat
        self._system_prompt = system_prompt
        self._task_class = type(env.taskset).task_type()
        self._data_class = self._task_class.data_type()
        hidden = [name for name, field in self._data_class.model_fields.items() if field.exclude]
        if hidden:
            raise Failure("config", f"{self._data_class.__name__} leaves {', '.join(hidden)} out of its rows")
        self._drawn: list[Any] | None = None
        self._playing: dict[str, Play] = {}
        self._users = 0
        self._lock, self._stop = asyncio.Lock(), asyncio.Event()
        self._serving: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.endless = not env.taskset.bounded

    def tasks(self, split: str, start: int, count: int) -> list[dict[str, Any]]:
        """Return rows of a split: a field of the taskset's configuration, where it has one."""
        taskset = self._env.taskset
        if "split" in type(taskset.config).model_fields:
            vf = framework("verifiers.v1")
            settings = {**taskset.config.model_dump(), "split": split}
            try:
                taskset = vf.load_taskset(type(taskset.config).model_validate(settings))
            except ValueError as error:
                raise Failure("config", f"the split {split!r}: {error}") from error
        elif split != "train":
            raise Failure("config", f"its taskset has no splits, so there is no {split!r}: all tasks are of 'train'")
        rows = itertools.islice(taskset, start, start + count)
        return [
            {"prompt": row.prompt_text, "data": {"task": row.model_dump(mode="json", exclude_none=True)}}
            for row in (task.data for task in rows)
        ]

    def task(self, data: Mapping[str, Any] | None, seed: int | None) -> Any:
        """Return the task of a row, or one of the first that the seed chooses."""
        if data is None:
            if self._drawn is None:
                self._drawn = list(itertools.islice(self._env.taskset, _MOST_DRAWN))
            if not self._drawn:
                raise Failure("raised", "its taskset has no tasks")
            task = self._drawn[(seed or 0) % len(self._drawn)]
        elif "task" in data:
            row = self._data_class.model_validate(data["task"])
            task = self._task_class(row, self._env.config.taskset.task)
        else:
            raise Failure("raised", "the task has no row of this environment (task in its data)")
        return task if self._system_prompt is None else task.with_system_prompt(self._system_prompt)

    def episode(self) -> Play:
        """Return an episode."""
        return Play(self)

    async def run(self, task: Any, play: Play) -> Any:
        """Return the framework's episode of a task."""
        vf = framework("verifiers.v1")

        def minted(trace: Any) -> None:
            if trace.agent.name == self._seat:
                play.joined(trace, self._seat)
                self._playing[trace.id] = play

        async with self._served() as url:
            # The key is a placeholder: no variable of this name is set.
            client = vf.EvalClientConfig(base_url=url, api_key_var="TURNWISE_UNSET_KEY")
            try:
                episode = await self._env.run_episode(
                    task, vf.ModelContext(model="policy", client=client), on_trace=minted
                )
                if not episode.ok and not await _all_answer(self._env):
                    # A dead tool server would fail all later episodes: they begin with others.
                    self._stop.set()
                return episode
            finally:
                for trace in play.traces:
                    self._playing.pop(trace.id, None)

    @contextlib.asynccontextmanager
    async def _served(self) -> AsyncIterator[str]:
        """Hold what all episodes share (the endpoint, tool servers, interception) while any of them runs."""
        async with self._lock:
            if self._timer is not None:
                self._timer.cancel()
            if self._stop.is_set() or self._serving is None or self._serving.done():
                if self._serving is not None:
                    await asyncio.wait({self._serving})
                self._stop, self._ready = asyncio.Event(), asyncio.get_running_loop().create_future()
                # An asyncio task for it: what is opened in one has to be closed in it.
                self._serving = asyncio.ensure_future(self._serve())
                await asyncio.wait({self._serving, self._ready}, return_when=asyncio.FIRST_COMPLETED)
                if self._serving.done():
                    await self._serving
            self._users += 1
        try:
            yield self._ready.result()
        finally:
            self._users -= 1
            if self._users == 0:
                # Tool servers take seconds to start: the next episodes mostly come soon.
                self._timer = asyncio.get_running_loop().call_later(_LINGER_SECONDS, self._stop.set)

    async def _serve(self) -> None:
        web = framework("aiohttp.web")
        app = web.Application(client_max_size=_MOST_BODY)
        app.router.add_post("/v1/chat/completions", self._completions)
        runner = web.AppRunner(app)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            async with self._env.serving():
                self._ready.set_result(f"http://127.0.0.1:{runner.addresses[0][1]}/v1")
                await self._stop.wait()
        finally:
            await runner.cleanup()

    async def _completions(self, request: Any) -> Any:
        web = framework("aiohttp.web")
        play, body = self._playing.get(request.headers.get(_SESSION, "")), await request.json()
        message = None if play is None else await play.ask(body)
        if message is None:
            return web.json_response({"error": {"message": "the episode is over"}}, status=400)
        completion = _completion(message, body)
        if not body.get("stream"):
            return web.json_response(completion)
        return web.Response(body=_streamed(completion), content_type="text/event-stream")


class Play:
    """One episode: the framework's run of it, and the request that waits for the player's message.

    Attributes:
        traces: The framework's records of the player's seat: one, as soon as it plays.
    """

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self.traces: list[Any] = []
        self._requests: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._waiting: asyncio.Future[Mapping[str, Any] | None] | None = None
        self._run: asyncio.Task[Any] | None = None
        self._refusal: str | None = None
        self._seen: list[dict[str, Any]] = []
        self._tools: list[dict[str, Any]] = []

    def joined(self, trace: Any, seat: str) -> None:
        """Take the trace of the player's seat."""
        if self.traces:
            # Kept, too: the framework may show it in a group of errors only.
            self._refusal = f"the seat {seat!r} plays a second time in one episode, which has no form here"
            raise RuntimeError(self._refusal)
        self.traces.append(trace)

    async def ask(self, body: dict[str, Any]) -> Mapping[str, Any] | None:
        """Return the player's message to a request; None where the episode ended."""
        if self._waiting is not None and not self._waiting.done():
            raise RuntimeError("a request came while another waits for the player")
        self._waiting = asyncio.get_running_loop().create_future()
        self._requests.put_nowait(body)
        return await self._waiting

    async def reset(self, data: Mapping[str, Any] | None, seed: int | None) -> dict[str, Any]:
        """Begin an episode; the observation is the first request to the model."""
        self._run = asyncio.ensure_future(self._environment.run(self._environment.task(data, seed), self))
        try:
            body = await self._next()
            if body is None:
                self._outcome()
                raise Failure("raised", "the episode ended before its model was asked")
            self._tools = [_schema(schema) for schema in body.get("tools") or ()]
            return {"messages": self._new_messages(body), "tools": self._tools}
        except BaseException:  # also a cancellation: no run is left
            await self.close()
            raise

    async def step(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Give the message as the completion, and return what the next request adds, or the end."""
        self._send_message(message)
        body = await self._next()
        if body is not None:
            if [_schema(schema) for schema in body.get("tools") or ()] != self._tools:
                raise Failure("raised", "its tools changed in an episode, which has no form here")
            messages = self._new_messages(body)
            return {"messages": messages, "reward": 0.0, "terminated": False, "truncated": False}
        return {"messages": self._last_results(message), **self._outcome()}

    async def score(self, message: Mapping[str, Any] | None) -> dict[str, Any]:
        """Stop the episode, as one of the framework's limits would, and return the rewards of what there is."""
        run = self._running()
        if message is not None and not run.done():
            self._send_message(message)
            await self._next()
        if not run.done():
            self.traces[0].stop("player_limit")
            self._send_message(None)
            await asyncio.wait({run})
        rewards: dict[str, Any] = self._outcome()["rewards"]
        return rewards

    async def close(self) -> None:
        """End the framework's run."""
        if self._run is not None:
            self._run.cancel()
            if self._waiting is not None and not self._waiting.done():
                self._waiting.set_result(None)
            await asyncio.gather(self._run, return_exceptions=True)
        for trace in self.traces:
            _conversations().pop(trace.id, None)

    def _running(self) -> asyncio.Task[Any]:
        if self._run is None:
            raise Failure("protocol", "no episode runs: call reset() first")
        return self._run

    def _send_message(self, message: Mapping[str, Any] | None) -> None:
        if self._waiting is None or self._waiting.done():
            raise Failure("raised", "the episode is over")
        self._seen.append({"role": "assistant"})
        self._waiting.set_result(message)

    async def _next(self) -> dict[str, Any] | None:
        """Return the next request, or None where the run ends without one."""
        request = asyncio.ensure_future(self._requests.get())
        await asyncio.wait({request, self._running()}, return_when=asyncio.FIRST_COMPLETED)
        if request.done():
            return request.result()
        request.cancel()
        return None

    def _new_messages(self, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return what a request adds to the conversation so far."""
        messages, count = body["messages"], len(self._seen)
        if len(messages) <= count or not all(map(_equal_messages, messages, self._seen)):
            raise Failure("raised", "its harness rewrote the conversation (to shorten it?), which has no form here")
        self._seen = list(messages)
        return [_message(message) for message in messages[count:]]

    def _last_results(self, message: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the results of the last calls, which no request carried."""
        results = _conversations().get(self.traces[0].id, [])[len(self._seen) :]
        answered = {message.get("tool_call_id") for message in results}
        for call in message.get("tool_calls") or ():
            if call["id"] not in answered:
                result = {"role": "tool", "tool_call_id": call["id"], "name": call["name"]}
                results = [*results, {**result, "content": "the episode is over"}]
        return [_message(message) for message in results if message["role"] == "tool"]

    def _outcome(self) -> dict[str, Any]:
        """Return the framework's rewards and the end, or raise the error that it recorded."""
        episode = self._running().result()
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if not episode.ok:
            last_error = errors[-1] if errors else None
            why = f"{last_error.type}: {last_error.message}" if last_error else "the framework calls the episode not ok"
            raise Failure("raised", self._refusal or why, stack=((last_error and last_error.traceback) or "")[-_STACK:])
        trace = self.traces[0]
        rewards = {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
        if not rewards:
            raise Failure("raised", "the episode ended, and no reward was recorded: its task has no reward function")
        truncated = bool(trace.is_truncated or trace.is_timeout)
        return {
            "reward": trace.reward,
            "rewards": rewards,
            "metrics": {name: value for name, value in trace.metrics.items() if value is not None},
            "notes": {} if trace.stop_condition is None else {"stop": trace.stop_condition},
            "terminated": not truncated,
            "truncated": truncated,
        }


async def _all_answer(env: Any) -> bool:
    """Return whether the tool servers that all episodes share take connections."""
    for url in (urlsplit(server.url) for server in env._shared_tools.values() if server.local):
        try:
            _, writer = await asyncio.open_connection(url.hostname, url.port)
        except OSError:
            return False
        writer.close()
    return True


def _conversations() -> dict[str, list[dict[str, Any]]]:
    module = sys.modules.get(_HARNESS)
    return {} if module is None else module.conversations


def _equal_messages(now: Mapping[str, Any], then: Mapping[str, Any]) -> bool:
    """Return whether a message stands for one of an earlier request; what the player said may be written anew."""
    return now["role"] == then["role"] and (now["role"] == "assistant" or now.get("content") == then.get("content"))


def _schema(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, Mapping):
        raise Failure("raised", f"a tool of type {tool.get('type')!r} has no schema: {json.dumps(tool)[:200]}")
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    return {"name": function["name"], "description": function.get("description") or "", "parameters": parameters}


def _message(wire: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message of a request; calls in examples have their arguments parsed."""
    message = {key: value for key, value in wire.items() if key in ("role", "content", "tool_call_id", "name")}
    message["content"] = message.get("content") or ""
    if wire.get("tool_calls"):
        calls = [(call["id"], call["function"]) for call in wire["tool_calls"]]
        message["tool_calls"] = [
            {"id": key, "name": call["name"], "arguments": json.loads(call["arguments"]), "raw": call["arguments"]}
            for key, call in calls
        ]
    return message


def _completion(message: Mapping[str, Any], body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the player's message as a chat completion."""
    completion: dict[str, Any] = {"role": "assistant", "content": message.get("content") or ""}
    if message.get("reasoning_content"):
        completion["reasoning_content"] = message["reasoning_content"]
    calls = [
        {
            "id": call["id"],
            "type": "function",
            # What could not be parsed the framework shall see as it was said.
            "function": {
                "name": call["name"],
                "arguments": call["raw"] if call.get("error") else json.dumps(call["arguments"], ensure_ascii=False),
            },
        }
        for call in message.get("tool_calls") or ()
    ]
    if calls:
        completion["tool_calls"] = calls
    return {
        "id": f"chatcmpl-{time.time_ns()}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": body.get("model", ""),
        "choices": [{"index": 0, "message": completion, "finish_reason": "tool_calls" if calls else "stop"}],
    }


def _streamed(completion: Mapping[str, Any]) -> bytes:
    """Return a completion as one event of a stream, for programs that read streams only."""
    [choice] = completion["choices"]
    delta = dict(choice["message"])
    if "tool_calls" in delta:
        delta["tool_calls"] = [{"index": at, **call} for at, call in enumerate(delta["tool_calls"])]
    part = {**completion, "object": "chat.completion.chunk"}
    part["choices"] = [{"index": 0, "delta": delta, "finish_reason": choice["finish_reason"]}]
    return f"data: {json.dumps(part)}\n\ndata: [DONE]\n\n".encode()
