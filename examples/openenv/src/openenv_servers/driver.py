"""Driver of OpenEnv: environments behind its server, at a URL or as an application that is served here.

OpenEnv has no form for what a model reads and writes, but schemas of actions and observations. An environment whose
action has one required text is played by messages, one of MCP tools by them, and any other by the tool ``act``.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import socket
import urllib.parse
import urllib.request
from collections.abc import Mapping
from typing import Any

from turnwise_foreign.core import Failure, check_installed, framework, opening, refusals, text_of

PACKAGE = "openenv-core"
_SECONDS = 30.0
_SCHEMES = ("http", "https", "ws", "wss")


def names() -> list[str]:
    """Return nothing: what there is, only its place says."""
    # Not imported: that takes seconds, for its server brings a user interface; an episode's reset is soon enough.
    check_installed("openenv")
    return []


def load(name: str, kwargs: dict[str, Any], system_prompt: str | None) -> EnvironmentServer:
    """Return the environment at a URL, or of a module (``pkg.server.app``, ``pkg.server.app:app``)."""
    options = ("action_field", "observation_field", "reset")
    unknown = [key for key in kwargs if key not in options]
    if unknown:
        raise Failure("config", f"kwargs has {', '.join(unknown)}; it may have {', '.join(options)}")
    environment = EnvironmentServer(name, kwargs, system_prompt)
    if not environment.is_url:
        environment.application()
    return environment


class EnvironmentServer:
    """Where an environment is served."""

    def __init__(self, name: str, kwargs: dict[str, Any], system_prompt: str | None) -> None:
        self._name = name
        self.system_prompt = system_prompt
        self.action_field: str | None = kwargs.get("action_field")
        self.observation_field: str | None = kwargs.get("observation_field")
        self.reset: dict[str, Any] = dict(kwargs.get("reset") or {})
        self.is_url = urllib.parse.urlsplit(name).scheme in _SCHEMES
        self._served: tuple[Any, asyncio.Task[Any], str] | None = None
        self._schema: dict[str, Any] | None = None

    def application(self) -> Any:
        """Return the application of a module. Raises Failure."""
        module, _, attribute = self._name.partition(":")
        try:
            return getattr(importlib.import_module(module), attribute or "app")
        except ImportError as error:
            raise Failure("config", f"{type(error).__name__}: {error}: name a URL, or a module with an app") from error
        except AttributeError as error:
            raise Failure("config", f"{error}: name its application, as in {module}:app") from error

    async def address(self) -> str:
        """Return the URL; an application is served on a port of this machine, in this event loop."""
        if self.is_url:
            return self._name
        loop = asyncio.get_running_loop()
        if self._served is None or self._served[0] is not loop or self._served[1].done():
            uvicorn = framework("uvicorn")
            bound = socket.create_server(("127.0.0.1", 0))
            application = guard_host(self.application(), bound.getsockname()[1])
            server = uvicorn.Server(uvicorn.Config(application, log_level="warning", lifespan="on"))
            server.install_signal_handlers = lambda: None
            task = asyncio.ensure_future(server.serve(sockets=[bound]))
            self._served = (loop, task, f"http://127.0.0.1:{bound.getsockname()[1]}")
        return self._served[2]

    async def action_schema(self) -> dict[str, Any]:
        """Return the schema of its actions, without what OpenEnv adds to all of them."""
        if self._schema is None:
            address = (await self.address()).rstrip("/")
            if address.startswith("ws"):
                address = "http" + address[2:]
            schema = (await asyncio.to_thread(_fetch_json, f"{address}/schema"))["action"]
            properties = {key: value for key, value in schema.get("properties", {}).items() if key != "metadata"}
            required = [key for key in schema.get("required", ()) if key in properties]
            definitions = {"$defs": schema["$defs"]} if "$defs" in schema else {}
            self._schema = {"type": "object", "properties": properties, "required": required, **definitions}
        return self._schema

    def episode(self) -> Session:
        """Return an episode."""
        return Session(self)


def guard_host(application: Any, port: int) -> Any:
    """Return an application that refuses pages of other sites, also those whose name resolves to this machine."""
    host = f"127.0.0.1:{port}".encode()

    async def guarded(scope: dict[str, Any], receive: Any, send: Any) -> None:
        headers = dict(scope.get("headers") or ())
        is_own = headers.get(b"host") == host and headers.get(b"origin", b"http://" + host) == b"http://" + host
        if is_own or scope["type"] == "lifespan":
            await application(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await send({"type": "http.response.start", "status": 403, "headers": []})
            await send({"type": "http.response.body", "body": b"only this process is answered"})

    return guarded


class Session:
    """One session of a server."""

    def __init__(self, server: EnvironmentServer) -> None:
        self._server = server
        self._client: Any = None
        self._field: str | None = None
        self._tools: list[dict[str, Any]] = []
        self._mcp = False
        self._rewarded = False

    async def reset(self, data: Mapping[str, Any] | None, seed: int | None) -> dict[str, Any]:
        """Open a session, and reset it with the seed, ``kwargs.reset`` and the ``reset`` of the task's data."""
        schema = await self._server.action_schema()
        address = await self._server.address()
        client = framework("openenv.core.generic_client").GenericEnvClient
        self._client = client(base_url=address, message_timeout_s=3600.0)
        arguments = {**self._server.reset, **((data or {}).get("reset") or {})}
        result = await self._client.reset(**({} if seed is None else {"seed": seed}), **arguments)
        self._mcp = not schema["properties"] or {"tool_name", "arguments"} <= set(schema["properties"])
        if self._mcp:
            listed = (await self._client.step({"type": "list_tools"})).observation["tools"]
            self._tools = [
                {"name": tool["name"], "description": tool["description"], "parameters": tool["input_schema"]}
                for tool in listed
            ]
        else:
            self._field = self._server.action_field or _text_field(schema)
            if self._field is None:
                self._tools = [{"name": "act", "description": "Act in the environment.", "parameters": schema}]
        text = self._text(result.observation) or "Begin."
        return {"messages": opening(self._server.system_prompt, text), "tools": self._tools}

    async def step(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Take the text of a message, or its calls in order, as actions."""
        if self._field is not None:
            result = await self._client.step({self._field: text_of(message)})
            observed = {"role": "user", "content": self._text(result.observation)}
            return self._answer([*refusals(message), observed], self._reward(result), result.done)
        calls = message.get("tool_calls") or ()
        if not calls:
            # Who has tools and calls none is done; nothing is left to take as an action, and nothing was earned.
            return {"messages": [], "reward": 0.0, "terminated": True, "truncated": False}
        answers, reward, done = [], 0.0, False
        for call in calls:
            text = "the episode is over: this action was not taken"
            if not done:
                text, gained, done = await self._call_tool(call)
                reward += gained
            answers.append({"role": "tool", "tool_call_id": call["id"], "name": call["name"], "content": text})
        return self._answer(answers, reward, done)

    async def close(self) -> None:
        """Close the session."""
        if self._client is not None:
            await self._client.close()

    async def _call_tool(self, call: Mapping[str, Any]) -> tuple[str, float, bool]:
        names = [tool["name"] for tool in self._tools]
        if call.get("error") or call["name"] not in names:
            why = call.get("error") or f"there is no tool {call['name']!r}; there are {', '.join(names)}"
            return json.dumps({"error": {"type": "invalid_call", "message": why}}), 0.0, False
        if self._mcp:
            action = {"type": "call_tool", "tool_name": call["name"], "arguments": call["arguments"]}
        else:
            action = dict(call["arguments"])
        try:
            result = await self._client.step(action)
        except RuntimeError as error:
            # What the server refuses (an action that does not fit its schema) the model may correct.
            if "VALIDATION_ERROR" not in str(error):
                raise
            return json.dumps({"error": {"type": "invalid_arguments", "message": str(error)}}), 0.0, False
        return self._text(result.observation), self._reward(result), bool(result.done)

    def _reward(self, result: Any) -> Any:
        self._rewarded = self._rewarded or result.reward is not None
        return 0.0 if result.reward is None else result.reward

    def _answer(self, messages: list[dict[str, Any]], reward: Any, done: Any) -> dict[str, Any]:
        if done and not self._rewarded:
            raise Failure("raised", "the episode ended, and the server gave no reward in all of it")
        return {"messages": messages, "reward": reward, "terminated": bool(done), "truncated": False}

    def _text(self, observation: Mapping[str, Any]) -> str:
        """Return what the model reads: the field that was named, the only text, or all as JSON."""
        if self._mcp and "result" in observation:
            error = observation.get("error")
            value = {"error": error} if error else observation["result"]
            if isinstance(value, Mapping) and "data" in value and "content" in value:
                value = value["data"]
            return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        field = self._server.observation_field
        if field is not None:
            if field not in observation:
                raise Failure("raised", f"the observation has no {field!r}; it has {', '.join(observation)}")
            return str(observation[field])
        if len(observation) == 1 and isinstance(next(iter(observation.values())), str):
            return str(next(iter(observation.values())))
        return json.dumps(dict(observation), ensure_ascii=False) if observation else ""


def _text_field(schema: Mapping[str, Any]) -> str | None:
    """Return the only required field of a schema where it is a text."""
    required = schema["required"]
    if len(required) == 1 and schema["properties"][required[0]].get("type") == "string":
        return str(required[0])
    return None


def _fetch_json(url: str) -> Any:
    local = urllib.parse.urlsplit(url).hostname in ("127.0.0.1", "localhost", "::1")
    handlers = [urllib.request.ProxyHandler({})] if local else []
    try:
        with urllib.request.build_opener(*handlers).open(url, timeout=_SECONDS) as answer:
            return json.load(answer)
    except (OSError, ValueError) as error:
        raise Failure("raised", f"{url} does not answer as an OpenEnv server: {error}") from error
