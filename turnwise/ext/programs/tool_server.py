"""HTTP and MCP server of the environment's tools, for black-box programs.

Routes, with an unguessable token: ``GET /tools/TOKEN`` lists the tools in OpenAI's format, ``POST /tools/TOKEN/NAME``
with a JSON object of arguments calls one, ``POST /mcp/TOKEN`` speaks MCP (streamable HTTP).
"""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from aiohttp import web

from turnwise.agents.core import Episode
from turnwise.envs.core import as_messages
from turnwise.errors import AgentError, BudgetExceeded, TurnwiseError, shown
from turnwise.gateway.local import SessionEndpoint
from turnwise.model.canonical import canonical_messages
from turnwise.tools.response import ToolResponse, content_block
from turnwise.types import Message, ToolCall, ToolSchema, text_of
from turnwise.version import __version__

_VERSIONS: Final = ("2025-11-25", "2025-06-18", "2025-03-26")
_UNKNOWN_METHOD, _INVALID_REQUEST, _INVALID_PARAMS, _NOT_JSON = -32601, -32600, -32602, -32700
_CALL_IDS: Final = ("claudecode/toolUseId", "turnwise/toolCallId")
"""Where clients say in ``_meta`` which call of the model they make."""


@dataclass(frozen=True, slots=True)
class AskedCall:
    """A ``tools/call`` request.

    Attributes:
        call_id: Id of the model's tool call; empty where the client does not send it.
    """

    id: Any
    name: str
    arguments: Any
    call_id: str


def read_mcp_call(asked: Any) -> AskedCall | None:
    """Return the tool call in a message, or None for other messages."""
    if not isinstance(asked, dict) or asked.get("method") != "tools/call" or "id" not in asked:
        return None
    params = asked.get("params")
    if not isinstance(params, dict) or not isinstance(params.get("name"), str):
        return None
    meta = params.get("_meta")
    ids = [meta.get(key) for key in _CALL_IDS] if isinstance(meta, dict) else []
    call_id = next((each for each in ids if isinstance(each, str)), "")
    arguments = params.get("arguments")
    return AskedCall(asked["id"], params["name"], {} if arguments is None else arguments, call_id)


def mcp_answer(asked: Any, tools: Sequence[ToolSchema]) -> dict[str, Any] | None:
    """Return the response to a message other than a tool call, or None for notifications."""
    if not isinstance(asked, dict) or not isinstance(asked.get("method"), str):
        # A response of the client's to a request that was never sent needs no answer either.
        is_answer = isinstance(asked, dict) and ("result" in asked or "error" in asked)
        return None if is_answer else _error(None, _INVALID_REQUEST, "a JSON-RPC request needs a 'method'")
    method, number = asked["method"], asked.get("id")
    if number is None:
        return None
    params = asked.get("params")
    match method:
        case "initialize":
            wanted = params.get("protocolVersion") if isinstance(params, dict) else None
            return _result(
                number,
                {
                    "protocolVersion": wanted if wanted in _VERSIONS else _VERSIONS[0],
                    "capabilities": {"tools": {}},
                    "serverInfo": {"name": "turnwise", "version": __version__},
                },
            )
        case "ping":
            return _result(number, {})
        case "tools/list":
            return _result(number, {"tools": [_listed(tool) for tool in tools]})
        case "tools/call":
            return _error(number, _INVALID_PARAMS, "tools/call needs a 'name'")
    return _error(number, _UNKNOWN_METHOD, f"this server offers tools only: there is no method {method!r}")


def mcp_result(call: AskedCall, content: str | Sequence[dict[str, Any]], *, error: bool) -> dict[str, Any]:
    """Return the MCP response of a tool call."""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return _result(call.id, {"content": [_block(part) for part in parts], "isError": error})


def mcp_not_json() -> dict[str, Any]:
    """Return the response to a body that is not JSON."""
    return _error(None, _NOT_JSON, "the body is not JSON")


def _listed(tool: ToolSchema) -> dict[str, Any]:
    return {"name": tool.name, "description": tool.description, "inputSchema": tool.parameters}


def _block(part: dict[str, Any]) -> dict[str, Any]:
    kind, content, mime_type = content_block(part)
    if kind == "text":
        return {"type": "text", "text": content}
    return {"type": kind, "data": content, "mimeType": mime_type}


def _result(number: Any, found: dict[str, Any]) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": number, "result": found}


def _error(number: Any, code: int, message: str) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": number, "error": {"code": code, "message": message}}


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
_MOST_BODY = 4 * 2**20
_MOST_CONNECTIONS = 32
"""Of one episode's own socket; a further one is closed at once."""


class EpisodeOver(Exception):
    """A call came after the end of its episode; the message states how it ended."""


class OfferedTools:
    """The tools of one episode, as served to a program.

    Attributes:
        url: Base URL of the plain routes.
        mcp_url: URL of the MCP server.
        over: Set when a call ended the episode or the environment failed.
        listening: The episode's own socket, if any.
    """

    def __init__(
        self, episode: Episode, token: str, address: str, endpoint: SessionEndpoint | None, *, reply: bool
    ) -> None:
        self.schemas = (*episode.tools, _REPLY) if reply else tuple(episode.tools)
        self.url = f"{address}/tools/{token}"
        self.mcp_url = f"{address}/mcp/{token}"
        self.over = asyncio.Event()
        self.failure: TurnwiseError | None = None
        self._episode = episode
        self._endpoint = endpoint
        self._reply = reply
        self._answered: set[str] = set()
        self._running: set[asyncio.Task[Any]] = set()
        self.listening: asyncio.Server | None = None

    async def call(self, name: str, arguments: Any, call_id: str = "") -> ToolResponse:
        """Execute a call.

        Args:
            name: Name of the tool.
            arguments: A JSON object; anything else is an invalid call.
            call_id: Id of the model's tool call, where known.
        """
        if self.over.is_set():
            raise EpisodeOver(self._why())
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        try:
            if self._endpoint is not None:
                # Which turn makes this call is known only then, where the episode is recorded elsewhere.
                await self._endpoint.wait_settled()
            if self._reply and name == REPLY:
                return await self._say(arguments)
            return await self._episode.call(self._made(name, arguments, call_id))
        except BudgetExceeded:
            self.over.set()
            raise EpisodeOver(self._why()) from None
        except TurnwiseError as error:
            self.failure = error
            self.over.set()
            raise EpisodeOver(self._why()) from error
        finally:
            self._running.discard(task)

    async def shut(self) -> None:
        """Refuse further calls and cancel those that run."""
        self.over.set()
        running = [task for task in self._running if task is not asyncio.current_task()]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def _why(self) -> str:
        if self.failure is not None:
            return "the episode ended: the environment failed"
        return "the episode is over: no more calls are answered; finish"

    async def _say(self, arguments: Any) -> ToolResponse:
        if not (isinstance(arguments, dict) and set(arguments) == {"text"} and isinstance(arguments["text"], str)):
            return ToolResponse.failure("invalid_arguments", f"{REPLY} takes one string: {{'text': ...}}")
        message: Message = {"role": "assistant", "content": arguments["text"]}
        last = self._episode.session.last
        if last is not None and "turn_id" in last:
            message["turn_id"] = last["turn_id"]
        result = await self._episode.step(message)
        if result.terminated or result.truncated:
            self.over.set()
        said = as_messages(result.observation)
        text = "\n\n".join(text_of(each) for each in said)
        images = [each.data for message in canonical_messages(said) for each in message.media]
        return ToolResponse(text=text or ("The episode is over." if self.over.is_set() else ""), image=images)

    def _made(self, name: str, arguments: Any, call_id: str) -> ToolCall:
        """Return the call under the id of the model's own, so that its reward is noted on its turn."""
        raw = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        wrong = None if isinstance(arguments, dict) else f"the arguments are not a JSON object: {shown(arguments)}"
        found = self._id_of(name, arguments, call_id)
        self._answered.add(found)
        return ToolCall(found, name, arguments if isinstance(arguments, dict) else {}, raw, wrong)

    def _id_of(self, name: str, arguments: Any, call_id: str) -> str:
        session = self._episode.session
        if call_id and session.turn_of_call(call_id) is not None:
            return call_id
        last = session.last
        calls = [] if last is None else list(last.get("tool_calls") or ())
        # Programs put their own name of the server before a tool's; a tool called from a shell has no call id.
        named = [each for each in calls if each.name == name or each.name.endswith(f"_{name}")]
        fresh = [each for each in named if each.id not in self._answered]
        equal = [each for each in fresh if each.arguments == arguments]
        for candidates in (equal, fresh, named, calls):
            if candidates:
                return candidates[0].id
        return f"call_{len(self._answered)}"


class ToolServer:
    """Serves the tools of all episodes; listens from the first offer on."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self._host = host
        self._offered: dict[str, OfferedTools] = {}
        self._own: dict[str, web.Server] = {}
        self._server: web.Server | None = None
        self._listening: asyncio.Server | None = None
        self._starting = asyncio.Lock()

    async def offer(
        self,
        episode: Episode,
        endpoint: SessionEndpoint | None = None,
        *,
        reply: bool = False,
        listener: socket.socket | None = None,
    ) -> OfferedTools:
        """Serve the tools of an episode until :meth:`withdraw`.

        Args:
            episode: The episode.
            endpoint: The program's model endpoint, if it has one here.
            reply: Whether to add the tool ``reply``.
            listener: Socket to serve them on alone, instead of this server's; closed with them.
        """
        if listener is not None:
            return await self._offer_at(listener, episode, endpoint, reply=reply)
        async with self._starting:
            if self._listening is None:
                await self._start()
        assert self._listening is not None
        token = secrets.token_urlsafe(32)
        address = f"http://{self._host}:{self._listening.sockets[0].getsockname()[1]}"
        offered = self._offered[token] = OfferedTools(episode, token, address, endpoint, reply=reply)
        return offered

    async def _offer_at(
        self, listener: socket.socket, episode: Episode, endpoint: SessionEndpoint | None, *, reply: bool
    ) -> OfferedTools:
        token = secrets.token_urlsafe(32)
        host, port = listener.getsockname()[:2]
        offered = OfferedTools(episode, token, f"http://{host}:{port}", endpoint, reply=reply)

        async def answer(request: web.BaseRequest) -> web.StreamResponse:
            return await self._answer(request, {token: offered})

        listener.setblocking(False)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        server = web.Server(answer, access_log=None)

        def connected() -> asyncio.Protocol:
            return server() if len(server.connections) < _MOST_CONNECTIONS else _Refusing()

        offered.listening = await asyncio.get_running_loop().create_server(connected, sock=listener)
        self._own[token] = server
        return offered

    async def withdraw(self, offered: OfferedTools) -> None:
        """Stop serving an episode."""
        token = offered.url.rpartition("/")[2]
        self._offered.pop(token, None)
        await offered.shut()
        if offered.listening is not None:
            offered.listening.close()
            await self._own.pop(token).shutdown(1.0)

    async def close(self) -> None:
        """Stop listening. Idempotent."""
        listening, self._listening = self._listening, None
        if listening is not None and self._server is not None:
            listening.close()
            await self._server.shutdown(1.0)

    async def _start(self) -> None:
        self._server = web.Server(self._answer, access_log=None)
        try:
            self._listening = await asyncio.get_running_loop().create_server(self._server, self._host, 0)
        except OSError as error:
            raise AgentError(f"the tools of an environment cannot be served at {self._host}: {error}") from error

    async def _answer(
        self, request: web.BaseRequest, known: Mapping[str, OfferedTools] | None = None
    ) -> web.StreamResponse:
        kind, _, rest = request.path.removeprefix("/").partition("/")
        token, _, name = rest.partition("/")
        offered = (self._offered if known is None else known).get(token)
        if offered is None or kind not in ("tools", "mcp"):
            return _error_response(404, "no open episode has this address: it may have ended")
        if request.content_length is not None and request.content_length > _MOST_BODY:
            return _error_response(413, f"the body has more than {_MOST_BODY} bytes")
        if kind == "mcp":
            return await self._mcp(offered, request)
        if request.method == "GET" and not name:
            return web.json_response({"tools": [each.to_json() for each in offered.schemas]})
        if request.method != "POST" or not name:
            return _error_response(405, "GET lists the tools; POST to a tool's own address calls it")
        body = await request.text() if request.can_read_body else ""
        try:
            arguments = json.loads(body) if body.strip() else {}
        except (ValueError, RecursionError):
            arguments = body
        try:
            response = await offered.call(name, arguments, request.headers.get(CALL_ID, ""))
        except EpisodeOver as over:
            return _error_response(409, str(over))
        return web.json_response({"content": response.content(), "error": response.error})

    async def _mcp(self, offered: OfferedTools, request: web.BaseRequest) -> web.StreamResponse:
        if request.method == "DELETE":
            return web.Response(status=200)
        if request.method != "POST":
            # The server sends no messages without a request.
            return web.Response(status=405, headers={"allow": "POST, DELETE"})
        try:
            asked = json.loads(await request.text())
        except (ValueError, RecursionError):
            return web.json_response(mcp_not_json(), status=400)
        answers = [
            answer
            for each in (asked if isinstance(asked, list) else [asked])
            if (answer := await _mcp_answer(offered, each)) is not None
        ]
        if not answers:
            return web.Response(status=202)
        return web.json_response(answers if isinstance(asked, list) else answers[0])


class _Refusing(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.abort()


async def _mcp_answer(offered: OfferedTools, asked: Any) -> Mapping[str, Any] | None:
    call = read_mcp_call(asked)
    if call is None:
        return mcp_answer(asked, offered.schemas)
    try:
        response = await offered.call(call.name, call.arguments, call.call_id)
    except EpisodeOver as over:
        return mcp_result(call, str(over), error=True)
    return mcp_result(call, response.content(), error=response.error is not None)


def _error_response(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message}}, status=status)
