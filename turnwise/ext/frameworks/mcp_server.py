"""MCP server of an environment: each MCP session plays an episode (extra ``mcp``)."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from turnwise.append_file import AppendFile
from turnwise.envs.core import Env, close_env, reset_env, score_env, step_env
from turnwise.envs.results import ScoreParts, StepResult, as_messages, check_one_agent
from turnwise.envs.single_turn import SingleTurnEnv
from turnwise.envs.tool_env import ToolEnv
from turnwise.errors import ConfigError, EnvError, TurnwiseError, requires_extra
from turnwise.images import readable_text
from turnwise.inference.guard.turnwise_guard import Guard
from turnwise.inference.process import bind
from turnwise.seeding import stable_hash
from turnwise.tasks.core import Task
from turnwise.tools.response import content_block
from turnwise.types import Message, ToolCall, ToolSchema
from turnwise.version import __version__

Content = str | list[dict[str, Any]]


@dataclass(slots=True)
class CallAnswer:
    """Result of a call.

    Attributes:
        content: Text, or parts as in a message.
        error: Whether it is an error.
        result: The end of the episode, where this call ended it.
    """

    content: Content
    error: bool = False
    result: dict[str, Any] | None = None


class ServedEpisode:
    """An episode played from outside.

    Attributes:
        messages: Messages from ``reset``.
        over: How it ended, or None while it runs.
        touched: Whether a tool was called; sessions that only list tools are not recorded.
    """

    TASK: Final = "task"

    def __init__(self, env: Env, task: Task | None, seed: int) -> None:
        """Take over an environment."""
        self.messages: list[Message] = []
        self.over: str | None = None
        self.touched = False
        self.last_used = time.monotonic()
        self._env, self._task, self._seed = env, task, seed
        self._rewards: dict[str, float] = {}
        self._calls = 0
        self._error: str | None = None
        self._lock = asyncio.Lock()
        # One message ends these; in others the conversation continues.
        self._ends = isinstance(env, (ToolEnv, SingleTurnEnv))

    @property
    def finish(self) -> str:
        """Name of the tool that sends the player's message."""
        return "finish" if self._ends else "reply"

    async def begin(self) -> None:
        """Reset the environment. Raises EnvError where it has several agents."""
        self.messages, info = await reset_env(self._env, self._task, seed=self._seed)
        check_one_agent(info, self._env, "an MCP client")
        reserved = [name for name in (self.TASK, self.finish) if name in self._env.toolset()]
        if reserved:
            raise ConfigError(
                f"{type(self._env).__qualname__} has a tool called {reserved[0]!r}, which the MCP server itself "
                "defines: rename it with @function_tool('other_name')"
            )

    def tools(self) -> list[ToolSchema]:
        """Return the environment's tools, ``task``, and ``finish`` or ``reply``."""
        if self._ends:
            words = "Give the final answer. It is scored, and the episode ends.", "answer", "The answer."
        else:
            words = "Say something to the environment; it answers.", "text", "What you say."
        properties = {"type": "object", "properties": {words[1]: {"type": "string", "description": words[2]}}}
        schemas = [tool.schema for tool in self._env.toolset().values()]
        return [
            *schemas,
            ToolSchema(self.TASK, "Show the task: the beginning of the conversation."),
            ToolSchema(self.finish, words[0], {**properties, "required": [words[1]], "additionalProperties": False}),
        ]

    async def call(self, name: str, arguments: dict[str, Any]) -> CallAnswer:
        """Execute a call; calls of an episode are serialised.

        Raises:
            TurnwiseError: The environment failed; the episode is over and not scored.
        """
        async with self._lock:
            self.last_used = time.monotonic()
            self.touched = True
            if name == self.TASK:
                return CallAnswer(self.text())
            if self.over is not None:
                return CallAnswer(f"the episode is over ({self.over}): open another session for another episode", True)
            self._calls += 1
            try:
                return await self._step(name, arguments)
            except TurnwiseError as error:
                self.over, self._error = "error", f"{type(error).__name__}: {error}"
                raise

    def text(self) -> str:
        """Return the head of the conversation as text."""
        if len(self.messages) == 1:
            return readable_text(self.messages[0])
        return "\n\n".join(f"[{message['role']}]\n{readable_text(message)}" for message in self.messages)

    async def close(self) -> None:
        """Close the environment; an unfinished episode is not scored."""
        async with self._lock:
            self.over = self.over or "abandoned"
            await close_env(self._env)

    def record(self) -> dict[str, Any]:
        """Return the episode's record as JSON values."""
        scored = self.over not in (None, "abandoned", "error")
        return {
            "task_id": None if self._task is None else self._task.id,
            "seed": self._seed,
            "over": self.over,
            "reward": sum(self._rewards.values()) if scored else None,
            "rewards": dict(self._rewards),
            "calls": self._calls,
            "error": self._error,
        }

    async def _step(self, name: str, arguments: dict[str, Any]) -> CallAnswer:
        if name == self.finish:
            value = next(iter(arguments.values()), None)
            if len(arguments) != 1 or not isinstance(value, str):
                return CallAnswer(f"{name} takes one string", True)
            message: Message = {"role": "assistant", "content": value}
            call = None
        else:
            call = ToolCall(f"call_{self._calls}", name, arguments, raw=json.dumps(arguments))
            message = {"role": "assistant", "content": "", "tool_calls": [call]}
        result: StepResult = await step_env(self._env, message)
        rewards = result.info.get("rewards") or ({"step": result.reward} if result.reward else {})
        self._add(rewards)
        if self._env.lost_thread:
            raise EnvError("a call exceeded its time-out and cannot be stopped, so the episode ends")
        if result.truncated and not result.terminated:
            parts: ScoreParts = await score_env(self._env, None)
            self._add(parts)
        answers = as_messages(result.observation)
        answer = _call_answer(answers, call)
        if result.terminated or result.truncated:
            self.over = "terminated" if result.terminated else "truncated"
            record = self.record()
            answer.result = {key: record[key] for key in ("over", "reward", "rewards")}
        return answer

    def _add(self, rewards: dict[str, float]) -> None:
        for name, value in rewards.items():
            self._rewards[name] = self._rewards.get(name, 0.0) + float(value)


def _call_answer(answers: Sequence[Message], call: ToolCall | None) -> CallAnswer:
    """Return the environment's answer to a call, with its further messages."""
    results = [message for message in answers if call is not None and message.get("tool_call_id") == call.id]
    new_messages = [message for message in answers if message not in results]
    content = results[0].get("content") if results else None
    error = isinstance(content, str) and _is_error(content)
    if not new_messages:
        return CallAnswer(content or "", error)
    parts: list[dict[str, Any]] = []
    for piece in (content, *(message.get("content") for message in new_messages)):
        parts += [{"type": "text", "text": piece}] if piece and isinstance(piece, str) else piece or []
    return CallAnswer(parts, error)


def _is_error(text: str) -> bool:
    if not text.startswith('{"error": {"type": '):
        return False
    try:
        return set(json.loads(text)) == {"error"}
    except json.JSONDecodeError:
        return False


with requires_extra("mcp", "mcp", "serving an environment over MCP"):
    import mcp_types
    import uvicorn
    from mcp import MCPError
    from mcp.server import Server
    from mcp.server.stdio import stdio_server
    from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS

IDLE_S: Final = 1800.0
"""Seconds without a request after which the session of an HTTP client, and its episode with it, is closed."""
_URI: Final = "turnwise://task"
_SESSION: Final = "mcp-session-id"
_HOW: Final = (
    "This server is one episode of an environment. Read the task (the resource turnwise://task, the prompt 'task', or "
    "the tool 'task'), act with the tools, and end with the tool 'finish' (in environments that answer: 'reply'). "
    "Another session is another episode."
)


async def serve_stdio(server: Server[Any], close: Callable[[], Awaitable[None]]) -> None:
    """Serve one client over standard input and output until EOF, and close what served it."""
    try:
        async with stdio_server() as (read, write):
            try:
                await server.run(read, write, server.create_initialization_options())
            finally:
                # What was printed leads to stderr only as long as the server has stdout.
                sys.stdout.flush()
    finally:
        with redirect_stdout(sys.stderr):
            await close()


async def serve_http(
    app: Any, host: str, port: int, on_start: Callable[[str], None], close: Callable[[], Awaitable[None]]
) -> None:
    """Serve clients over streamable HTTP until interrupted.

    Args:
        app: The ASGI application of the SDK's server, or a middleware around it.
        host: Address to bind.
        port: Port to bind; 0 takes a free one.
        on_start: Called with the server's URL once it serves.
        close: Awaited before the shutdown is acknowledged: a signal may end the process right after.

    Raises:
        InferenceError: The port cannot be bound.
    """
    listener = bind(host, port)

    async def closing(scope: Any, receive: Any, send: Any) -> None:
        async def send_closed(message: Any) -> None:
            if message["type"] == "lifespan.shutdown.complete":
                await close()
            await send(message)

        await app(scope, receive, send_closed if scope["type"] == "lifespan" else send)

    config = uvicorn.Config(
        # The SDK looks at names of hosts on loopback addresses only.
        Guard(closing),
        log_level="warning",
        access_log=False,
        lifespan="on",
        ws="none",
        timeout_graceful_shutdown=1,
    )
    listener.listen(128)
    address = f"[{host}]" if ":" in host else host
    on_start(f"http://{address}:{listener.getsockname()[1]}/mcp")
    try:
        await uvicorn.Server(config).serve(sockets=[listener])
    finally:
        await close()


class EnvServer:
    """Plays one episode with each session.

    Args:
        tasks: Tasks of the episodes, in order and cyclically; None where the environment needs none.
        seed: Seed of every reset. By default derived from the task, as in evaluation, or random without one.
        out: JSON lines file of episodes with at least one tool call.
    """

    def __init__(
        self,
        make: Callable[[], Env],
        name: str,
        *,
        tasks: Iterable[Task] | None = None,
        seed: int | None = None,
        out: Path | None = None,
    ) -> None:
        self._make = make
        self._name = name
        self._tasks: Iterator[Task | None] = itertools.cycle((None,) if tasks is None else tasks)
        self._seed = seed
        self._out = None if out is None else AppendFile(out)
        self._episodes: dict[str, ServedEpisode] = {}
        self._beginning: dict[str, asyncio.Lock] = {}

    def server(self) -> Server[Any]:
        """Return the server, for any transport."""
        return Server(
            self._name,
            version=__version__,
            instructions=_HOW,
            on_list_tools=self._list_tools,
            on_call_tool=self._call_tool,
            on_list_resources=self._list_resources,
            on_read_resource=self._read_resource,
            on_list_prompts=self._list_prompts,
            on_get_prompt=self._get_prompt,
        )

    async def serve_stdio(self) -> None:
        """Serve one client over standard input and output until EOF."""
        await serve_stdio(self.server(), self.close)

    async def serve_http(self, host: str, port: int, on_start: Callable[[str], None]) -> None:
        """Serve clients as :func:`serve_http` does."""
        app = self.server().streamable_http_app(host=host, session_idle_timeout=IDLE_S)
        await serve_http(_Sessions(app, self), host, port, on_start, self.close)

    async def end(self, session: str) -> None:
        """Close the episode of a session, if any."""
        self._beginning.pop(session, None)
        episode = self._episodes.pop(session, None)
        if episode is not None:
            with suppress(TurnwiseError):
                await episode.close()
            if self._out is not None and episode.touched:
                self._out.append(json.dumps(episode.record(), ensure_ascii=False).encode())

    async def sweep(self) -> None:
        """Close the episodes of idle sessions."""
        since = time.monotonic() - IDLE_S
        for session in [name for name, episode in self._episodes.items() if episode.last_used < since]:
            await self.end(session)

    async def close(self) -> None:
        """Close all episodes."""
        for session in list(self._episodes):
            await self.end(session)
        if self._out is not None:
            self._out.close()

    async def _episode(self, ctx: Any) -> ServedEpisode:
        """Return the episode of the requesting session, started on first use."""
        session = "" if ctx.request is None else ctx.request.headers.get(_SESSION, "")
        async with self._beginning.setdefault(session, asyncio.Lock()):
            if session not in self._episodes:
                await self.sweep()
                try:
                    task = next(self._tasks, None)
                    seed = self._seed
                    if seed is None:
                        seed = random.getrandbits(32) if task is None else stable_hash("reset", 0, task.id, 0)
                    episode = ServedEpisode(self._make(), task, seed)
                except TurnwiseError as error:
                    raise _failed(error) from error
                try:
                    await episode.begin()
                except BaseException as error:  # also a cancellation: the episode is closed
                    with suppress(TurnwiseError):
                        await episode.close()
                    if isinstance(error, TurnwiseError):
                        raise _failed(error) from error
                    raise
                self._episodes[session] = episode
            return self._episodes[session]

    async def _list_tools(self, ctx: Any, _: Any) -> mcp_types.ListToolsResult:
        episode = await self._episode(ctx)
        tools = [
            mcp_types.Tool(name=schema.name, description=schema.description or None, input_schema=schema.parameters)
            for schema in episode.tools()
        ]
        return mcp_types.ListToolsResult(tools=tools)

    async def _call_tool(self, ctx: Any, params: mcp_types.CallToolRequestParams) -> mcp_types.CallToolResult:
        episode = await self._episode(ctx)
        try:
            outcome = await episode.call(params.name, params.arguments or {})
        except TurnwiseError as error:
            raise _failed(error) from error
        return _result(outcome)

    async def _list_resources(self, ctx: Any, _: Any) -> mcp_types.ListResourcesResult:
        await self._episode(ctx)
        description = "The beginning of the conversation, which states the task."
        return mcp_types.ListResourcesResult(
            resources=[mcp_types.Resource(uri=_URI, name="task", description=description, mime_type="text/plain")]
        )

    async def _read_resource(
        self, ctx: Any, params: mcp_types.ReadResourceRequestParams
    ) -> mcp_types.ReadResourceResult:
        if params.uri != _URI:
            raise MCPError(mcp_types.INVALID_PARAMS, f"there is no resource {params.uri!r}; known: {_URI}")
        episode = await self._episode(ctx)
        text = mcp_types.TextResourceContents(uri=_URI, mime_type="text/plain", text=episode.text())
        return mcp_types.ReadResourceResult(contents=[text])

    async def _list_prompts(self, _ctx: Any, _: Any) -> mcp_types.ListPromptsResult:
        return mcp_types.ListPromptsResult(prompts=[mcp_types.Prompt(name="task", description="The task.")])

    async def _get_prompt(self, ctx: Any, params: mcp_types.GetPromptRequestParams) -> mcp_types.GetPromptResult:
        if params.name != "task":
            raise MCPError(mcp_types.INVALID_PARAMS, f"there is no prompt {params.name!r}; known: 'task'")
        episode = await self._episode(ctx)
        messages = []
        for message in episode.messages:
            role: mcp_types.Role = "assistant" if message["role"] == "assistant" else "user"
            messages += [
                mcp_types.PromptMessage(role=role, content=block) for block in _blocks(message.get("content") or "")
            ]
        return mcp_types.GetPromptResult(messages=messages)


class _Sessions:
    """ASGI middleware that ties episodes to sessions."""

    def __init__(self, app: Any, server: EnvServer) -> None:
        self._app = app
        self._server = server

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {key.decode("latin-1").lower(): value.decode("latin-1") for key, value in scope["headers"]}
        version = headers.get("mcp-protocol-version")
        if version is not None and version not in HANDSHAKE_PROTOCOL_VERSIONS:
            await _refuse(send, version)
            return
        await self._app(scope, receive, send)
        if scope["method"] == "DELETE" and _SESSION in headers:
            await self._server.end(headers[_SESSION])


async def _refuse(send: Any, version: str) -> None:
    """Refuse a protocol version without sessions; clients then fall back."""
    error = {
        "code": mcp_types.UNSUPPORTED_PROTOCOL_VERSION,
        "message": "an episode needs a session: use a protocol version with the initialize handshake",
        "data": {"supported": list(HANDSHAKE_PROTOCOL_VERSIONS), "requested": version},
    }
    body = json.dumps({"jsonrpc": "2.0", "id": None, "error": error}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 400, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _result(outcome: CallAnswer) -> mcp_types.CallToolResult:
    blocks = _blocks(outcome.content)
    if outcome.result is not None:
        # The reward is in the result, and in the text for clients that read text alone.
        blocks.append(mcp_types.TextContent(text=f"The episode is over. {json.dumps(outcome.result)}"))
    return mcp_types.CallToolResult(content=blocks, structured_content=outcome.result, is_error=outcome.error)


def _blocks(content: Content) -> list[mcp_types.ContentBlock]:
    if isinstance(content, str):
        return [mcp_types.TextContent(text=content)] if content else []
    return [_block(part) for part in content]


def _block(part: dict[str, Any]) -> mcp_types.ContentBlock:
    kind, content, mime_type = content_block(part)
    if kind == "text":
        return mcp_types.TextContent(text=content)
    if kind == "image":
        return mcp_types.ImageContent(data=content, mime_type=mime_type)
    return mcp_types.AudioContent(data=content, mime_type=mime_type)


def _failed(error: TurnwiseError) -> MCPError:
    return MCPError(mcp_types.INTERNAL_ERROR, f"the episode ended with an error: {type(error).__name__}: {error}")
