"""HTTP and MCP server of the environment's tools, for black-box programs.

Routes, with an unguessable token: ``GET /tools/TOKEN`` lists the tools in OpenAI's format, ``POST /tools/TOKEN/NAME``
with a JSON object of arguments calls one, ``POST /mcp/TOKEN`` speaks MCP (streamable HTTP).
"""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
from typing import Any, Final, Self

from aiohttp import web

from turnwise.agents.core import Episode
from turnwise.envs.core import as_messages
from turnwise.errors import AgentError, BudgetExceeded, TurnwiseError, shown
from turnwise.gateway.local import SessionEndpoint
from turnwise.model.canonical import canonical_messages
from turnwise.tools.response import ToolResponse, content_block
from turnwise.types import Message, ToolCall, ToolSchema, text_of
from turnwise.version import __version__

CALL_ID = "x-tool-call-id"
"""Header with the id of the model's call that a program executes."""
REPLY = "reply"
_REPLY = ToolSchema(
    REPLY,
    "Say something to the environment; it answers.",
    {
        "type": "object",
        "properties": {"text": {"type": "string", "description": "What you say."}},
        "required": ["text"],
        "additionalProperties": False,
    },
)
_MAX_BODY = 4 * 2**20
_MAX_CONNECTIONS = 32
"""Connections of one episode; a further one is closed at once."""


class EpisodeOver(Exception):
    """A call came after the end of its episode; the message states how it ended."""


class ToolServer:
    """Serves the tools of one episode to a program, from :meth:`start` until :meth:`close`.

    Attributes:
        url: Base URL of the plain routes.
        mcp_url: URL of the MCP server.
        ended: Set when a call ended the episode or the environment failed.
    """

    def __init__(
        self, episode: Episode, endpoint: SessionEndpoint | None, listener: socket.socket, *, with_reply: bool
    ) -> None:
        host, port = listener.getsockname()[:2]
        self._token = secrets.token_urlsafe(32)
        self.schemas = (*episode.tools, _REPLY) if with_reply else tuple(episode.tools)
        self.url = f"http://{host}:{port}/tools/{self._token}"
        self.mcp_url = f"http://{host}:{port}/mcp/{self._token}"
        self.ended = asyncio.Event()
        self.failure: TurnwiseError | None = None
        self._episode = episode
        self._endpoint = endpoint
        self._with_reply = with_reply
        self._answered: set[str] = set()
        self._running: set[asyncio.Task[Any]] = set()
        self._replying = asyncio.Lock()
        self._server = web.Server(self._answer, access_log=None)
        self._listening: asyncio.Server | None = None

    @classmethod
    async def start(
        cls,
        episode: Episode,
        endpoint: SessionEndpoint | None = None,
        *,
        with_reply: bool = False,
        listener: socket.socket | None = None,
    ) -> Self:
        """Serve the tools of an episode.

        Args:
            episode: The episode.
            endpoint: Its recorded endpoint, if another process records it.
            with_reply: Whether to add the tool ``reply``.
            listener: A listening socket, such as one inside of a sandbox; by default a free port of the loopback.
        """
        if listener is None:
            try:
                listener = socket.create_server(("127.0.0.1", 0))
            except OSError as error:
                raise AgentError(f"the tools of an environment cannot be served at 127.0.0.1: {error}") from error
        listener.setblocking(False)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        tools = cls(episode, endpoint, listener, with_reply=with_reply)
        tools._listening = await asyncio.get_running_loop().create_server(tools._connect, sock=listener)
        return tools

    async def call(self, name: str, arguments: Any, call_id: str = "") -> ToolResponse:
        """Execute a call.

        Args:
            name: Name of the tool.
            arguments: A JSON object; anything else is an invalid call.
            call_id: Id of the model's tool call, where known.
        """
        if self.ended.is_set():
            raise EpisodeOver(self._end_message())
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        try:
            if self._endpoint is not None:
                # If another process records the episode, the turn of this call is known only then.
                await self._endpoint.wait_settled()
            if self._with_reply and name == REPLY:
                async with self._replying:
                    # One after the other: a message sent twice at the same time would be scored twice.
                    return await self._say(arguments)
            return await self._episode.call(self._tool_call(name, arguments, call_id))
        except BudgetExceeded:
            self.ended.set()
            raise EpisodeOver(self._end_message()) from None
        except TurnwiseError as error:
            self.failure = error
            self.ended.set()
            raise EpisodeOver(self._end_message()) from error
        finally:
            self._running.discard(task)

    async def shut(self) -> None:
        """Refuse further calls and cancel those that run."""
        self.ended.set()
        running = [task for task in self._running if task is not asyncio.current_task()]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def _end_message(self) -> str:
        if self.failure is not None:
            return "the episode ended: the environment failed"
        return "the episode is over: no more calls are answered; finish"

    async def _say(self, arguments: Any) -> ToolResponse:
        if self.ended.is_set():
            raise EpisodeOver(self._end_message())
        if not (isinstance(arguments, dict) and set(arguments) == {"text"} and isinstance(arguments["text"], str)):
            return ToolResponse.failure("invalid_arguments", f"{REPLY} takes one string: {{'text': ...}}")
        message: Message = {"role": "assistant", "content": arguments["text"]}
        turn = self._episode.session.last
        if turn is not None and "turn_id" in turn:
            message["turn_id"] = turn["turn_id"]
        result = await self._episode.step(message)
        if result.terminated or result.truncated:
            self.ended.set()
        messages = as_messages(result.observation)
        text = "\n\n".join(text_of(message) for message in messages)
        images = [image.data for message in canonical_messages(messages) for image in message.media]
        return ToolResponse(text=text or ("The episode is over." if self.ended.is_set() else ""), image=images)

    def _tool_call(self, name: str, arguments: Any, call_id: str) -> ToolCall:
        """Return the call under the id of the model's call, so that its reward is noted on the model's turn."""
        raw = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        problem = None if isinstance(arguments, dict) else f"the arguments are not a JSON object: {shown(arguments)}"
        id_of_call = self._model_call_id(name, arguments, call_id)
        self._answered.add(id_of_call)
        return ToolCall(id_of_call, name, arguments if isinstance(arguments, dict) else {}, raw, problem)

    def _model_call_id(self, name: str, arguments: Any, call_id: str) -> str:
        session = self._episode.session
        if call_id and session.turn_of_call(call_id) is not None:
            return call_id
        turn = session.last
        calls = [] if turn is None else list(turn.get("tool_calls") or ())
        # Programs prefix a tool's name with the server's; a tool called from a shell has no call id.
        same_name = [call for call in calls if call.name == name or call.name.endswith(f"_{name}")]
        unanswered = [call for call in same_name if call.id not in self._answered]
        same_arguments = [call for call in unanswered if call.arguments == arguments]
        for candidates in (same_arguments, unanswered, same_name, calls):
            if candidates:
                return candidates[0].id
        return f"call_{len(self._answered)}"

    async def close(self) -> None:
        """Refuse further calls, cancel those that run, and stop listening."""
        await self.shut()
        if self._listening is not None:
            self._listening.close()
            await self._server.shutdown(1.0)

    def _connect(self) -> asyncio.Protocol:
        full = len(self._server.connections) >= _MAX_CONNECTIONS
        return _RefusedConnection() if full else self._server()

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        kind, _, rest = request.path.removeprefix("/").partition("/")
        token, _, name = rest.partition("/")
        if token != self._token or kind not in ("tools", "mcp"):
            return _error_response(404, "no open episode has this address: it may have ended")
        if request.content_length is not None and request.content_length > _MAX_BODY:
            return _error_response(413, f"the body has more than {_MAX_BODY} bytes")
        if kind == "mcp":
            return await self._mcp(request)
        if request.method == "GET" and not name:
            return web.json_response({"tools": [schema.to_json() for schema in self.schemas]})
        if request.method != "POST" or not name:
            return _error_response(405, "GET lists the tools; POST to a tool's own address calls it")
        body = await request.text() if request.can_read_body else ""
        try:
            arguments = json.loads(body) if body.strip() else {}
        except (ValueError, RecursionError):
            arguments = body
        try:
            response = await self.call(name, arguments, request.headers.get(CALL_ID, ""))
        except EpisodeOver as error:
            return _error_response(409, str(error))
        return web.json_response({"content": response.content(), "error": response.error})

    async def _mcp(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.method == "DELETE":
            return web.Response(status=200)
        if request.method != "POST":
            # The server sends no messages without a request.
            return web.Response(status=405, headers={"allow": "POST, DELETE"})
        try:
            body = json.loads(await request.text())
        except (ValueError, RecursionError):
            return web.json_response(_mcp_error(None, _NOT_JSON, "the body is not JSON"), status=400)
        answers = [
            answer
            for message in (body if isinstance(body, list) else [body])
            if (answer := await _mcp_answer(self, message)) is not None
        ]
        if not answers:
            return web.Response(status=202)
        return web.json_response(answers if isinstance(body, list) else answers[0])


class _RefusedConnection(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.abort()


# MCP's tools are answered without the SDK of the extra ``mcp``: a program needs no extra for its tools.
_MCP_VERSIONS: Final = ("2025-11-25", "2025-06-18", "2025-03-26")
_UNKNOWN_METHOD, _INVALID_REQUEST, _INVALID_PARAMS, _NOT_JSON = -32601, -32600, -32602, -32700
_CALL_IDS: Final = ("claudecode/toolUseId", "turnwise/toolCallId")
"""Keys of ``_meta`` in which clients name the model's call that they execute."""


async def _mcp_answer(server: ToolServer, message: Any) -> dict[str, Any] | None:
    """Return the response to a JSON-RPC message of MCP, or None for one that needs none."""
    if not isinstance(message, dict) or not isinstance(message.get("method"), str):
        # A client's response to a request that was never sent needs no answer either.
        is_response = isinstance(message, dict) and ("result" in message or "error" in message)
        return None if is_response else _mcp_error(None, _INVALID_REQUEST, "a JSON-RPC request needs a 'method'")
    number, params = message.get("id"), message.get("params")
    params = params if isinstance(params, dict) else {}
    if number is None:
        return None
    result: dict[str, Any] = {}
    match message["method"]:
        case "initialize":
            version = params.get("protocolVersion")
            result = {
                "protocolVersion": version if version in _MCP_VERSIONS else _MCP_VERSIONS[0],
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "turnwise", "version": __version__},
            }
        case "ping":
            pass
        case "tools/list":
            result = {
                "tools": [
                    {"name": tool.name, "description": tool.description, "inputSchema": tool.parameters}
                    for tool in server.schemas
                ]
            }
        case "tools/call" if isinstance(params.get("name"), str):
            result = await _mcp_result(server, params)
        case "tools/call":
            return _mcp_error(number, _INVALID_PARAMS, "tools/call needs a 'name'")
        case method:
            return _mcp_error(number, _UNKNOWN_METHOD, f"this server offers tools only: there is no method {method!r}")
    return {"jsonrpc": "2.0", "id": number, "result": result}


async def _mcp_result(server: ToolServer, params: dict[str, Any]) -> dict[str, Any]:
    """Return the result of a tool call."""
    meta, arguments = params.get("_meta"), params.get("arguments")
    ids = [meta.get(key) for key in _CALL_IDS] if isinstance(meta, dict) else []
    call_id = next((call_id for call_id in ids if isinstance(call_id, str)), "")
    try:
        response = await server.call(params["name"], {} if arguments is None else arguments, call_id)
    except EpisodeOver as error:
        return {"content": [{"type": "text", "text": str(error)}], "isError": True}
    content = response.content()
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return {"content": [_mcp_block(part) for part in parts], "isError": response.error is not None}


def _mcp_block(part: dict[str, Any]) -> dict[str, Any]:
    kind, content, mime_type = content_block(part)
    if kind == "text":
        return {"type": "text", "text": content}
    return {"type": kind, "data": content, "mimeType": mime_type}


def _mcp_error(number: Any, code: int, message: str) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": number, "error": {"code": code, "message": message}}


def _error_response(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message}}, status=status)
