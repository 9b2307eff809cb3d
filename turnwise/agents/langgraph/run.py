"""The run of a graph in one episode: what its chat model and tools reach from any node, thread or event loop."""

from __future__ import annotations

import asyncio
import contextlib
import copy
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, TypeVar

from langchain_core.messages import AIMessage, AnyMessage, BaseMessage, ToolMessage
from langchain_core.tools import BaseTool
from pydantic import Field

from turnwise.agents.core import Episode
from turnwise.agents.langgraph.messages import IssuedCall, IssuedTurns, graph_call_id, graph_messages, session_message
from turnwise.envs.core import as_messages, schemas
from turnwise.envs.registration import make
from turnwise.envs.wrappers import call_by_name
from turnwise.errors import AgentError, TurnwiseError, shown
from turnwise.tools.response import ToolResponse, unknown_tool
from turnwise.types import Message, ToolCall, ToolSchema

T = TypeVar("T")
_RUN: ContextVar[GraphRun] = ContextVar("turnwise_graph_run")


class EpisodeOver(TurnwiseError):
    """The graph acted after the end of the episode. Stops the graph; not a failure."""


class GraphRun:
    """The run of a graph in one episode; chat model and tools find it by :func:`current_run`.

    Attributes:
        issued: Turns and calls issued to the graph.
        nodes: Node of each turn, by session and turn id: names from the outermost graph inwards, joined by ``/``.
        loop: Event loop of the episode.
    """

    def __init__(self, episode: Episode) -> None:
        self.episode = episode
        self.issued = IssuedTurns()
        self.nodes: dict[tuple[str, str], str] = {}
        self.failure: Exception | None = None
        self.loop = asyncio.get_running_loop()
        self._working: set[asyncio.Task[Any]] = set()
        self._refusals: dict[tuple[str, str], Message] = {}
        self._closed = False

    @property
    def ended(self) -> bool:
        """Whether the environment has ended the episode."""
        return self.episode.ended

    async def step(self, message: BaseMessage | Message, *, agent: str | None = None) -> list[AnyMessage]:
        """Pass a message to the environment, as the ReAct loop does.

        Args:
            message: The message.
            agent: Its session; by default the one that sampled it.

        Returns:
            The environment's messages; see :attr:`ended` for the end.
        """
        turn = self.issued.turn_of(message) if isinstance(message, BaseMessage) else None
        name = agent or (turn[0] if turn is not None else "main")
        action = session_message(message, self.issued, name) if isinstance(message, BaseMessage) else message
        if action["role"] != "assistant":
            action = {"role": "assistant", "content": action.get("content")}
        if turn is not None and turn[0] == name:
            sampled_message = turn[1]
            action["turn_id"], action["finish_reason"] = sampled_message["turn_id"], sampled_message["finish_reason"]
        if action.get("tool_calls"):
            action = {**action, "tool_calls": [self._mark_unoffered(call, name) for call in action["tool_calls"]]}
        result = await self._run_watched(self.episode.step(action, agent=name))
        return graph_messages(as_messages(result.observation), name)

    async def call(self, call_id: str | None, name: str, arguments: dict[str, Any]) -> ToolResponse:
        """Execute a tool call; its reward is noted on the calling turn.

        Args:
            call_id: The graph's id; None where no message made the call.
            name: The tool.
            arguments: Its arguments.
        """
        issued_call = self.issued.calls.get(call_id or "")
        if issued_call is None:
            return await self._run_watched(self.episode.call(ToolCall(call_id or "", name, arguments)))
        call = issued_call.call
        if (call.name, call.arguments) != (name, arguments):
            call = ToolCall(call.id, name, arguments)
        return await self._run_watched(self.episode.call(call, agent=issued_call.agent))

    async def refusal(self, issued_call: IssuedCall) -> Message:
        """Return the environment's answer to a call of a tool that was not offered, cached."""
        key = (issued_call.agent, issued_call.call.id)
        if key not in self._refusals:
            call = self._mark_unoffered(issued_call.call, issued_call.agent)
            if self.episode.tools:
                response = await self._run_watched(self.episode.call(call, agent=issued_call.agent))
            else:
                response = unknown_tool(call.name)
            self._refusals[key] = {"role": "tool", "name": call.name, "content": response.content()}
        return self._refusals[key]

    def _mark_unoffered(self, call: ToolCall, agent: str) -> ToolCall:
        """Return a session's call for the environment; tools that were not offered are not executed."""
        issued_call = self.issued.calls.get(graph_call_id(call.id, agent))
        if (
            issued_call is None
            or issued_call.agent != agent
            or issued_call.offered
            or call.error is not None
            or call.name != issued_call.call.name
        ):
            return call
        # The environment itself reports unknown tools.
        there = any(tool.name == call.name for tool in self.episode.tools)
        return replace(call, error="this tool was not offered") if there else call

    async def ask(self, method: str, value: Any) -> Any:
        """Answer an interrupt by a method of the environment.

        Raises:
            EnvError: The environment has no such method, or it raised.
        """
        return await self._run_watched(call_by_name(self.episode.env, method, value))

    def reward(self, name: str, value: float, message: BaseMessage | None = None) -> None:
        """Note a reward on the turn of a message, or on the one whose call it answers.

        Args:
            name: Name of the reward.
            value: The reward, finite.
            message: The message; None notes it on the episode.
        """
        if message is None:
            self.episode.note(name, value)
            return
        turn = self.issued.turn_of(message)
        if turn is None:
            raise AgentError(f"reward {name!r}: no turn of this episode has the message {message.id!r}")
        self.episode.note(name, value, turn[1]["turn_id"], agent=turn[0])

    def record_node(self, agent: str, message: Message, node: str, tokens: int) -> None:
        """Record the node of a turn."""
        turn = message["turn_id"]
        self.nodes[agent, turn] = node
        if node:
            self.episode.count({f"node/{node}/turns": 1.0, f"node/{node}/tokens": float(tokens)}, turn, agent=agent)

    def count_rewards(self) -> None:
        """Add the rewards of each node's turns to the metrics."""
        for reward in self.episode.rewards:
            node = self.nodes.get((reward.agent, reward.turn_id)) if reward.turn_id is not None else None
            if node:
                self.episode.count({f"node/{node}/reward": reward.value}, reward.turn_id, agent=reward.agent)

    @contextlib.contextmanager
    def as_current(self) -> Iterator[None]:
        """Make this the current run in the context."""
        token = _RUN.set(self)
        try:
            yield
        finally:
            _RUN.reset(token)

    @property
    def on_own_loop(self) -> bool:
        """Whether the caller is on the episode's event loop."""
        return asyncio.get_running_loop() is self.loop

    async def run_on_loop(self, work: Coroutine[Any, Any, T]) -> T:
        """Await work on the episode's loop, from any loop."""
        if self.on_own_loop:
            return await work
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self.loop))

    def block(self, work: Coroutine[Any, Any, T]) -> T:
        """Run work from a thread, such as a plain node's."""
        return run_blocking(work, self.loop)

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Track work that is cancelled with the graph.

        Raises:
            EpisodeOver: The environment has ended the episode.
            TurnwiseError: An earlier tool failure that the graph ignored.
            AgentError: The run is closed.
        """
        if self._closed:
            raise AgentError("a graph went on after its episode: await what a node starts before it returns")
        if self.failure is not None:
            raise self.failure
        if self.ended:
            raise EpisodeOver("the environment has ended the episode")
        task = asyncio.current_task()
        # A task may hold several pieces of work, one inside the other.
        fresh = task is not None and task not in self._working
        if task is not None:
            self._working.add(task)
        try:
            yield
        finally:
            if task is not None and fresh:
                self._working.discard(task)

    async def close(self) -> None:
        """Cancel what the graph left: siblings of failed branches, threads waiting for the model."""
        self._closed = True
        pending = [task for task in self._working if task is not asyncio.current_task()]
        for task in pending:
            task.cancel()
        if pending:
            await asyncio.wait(pending)

    async def _run_watched(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            return await self.run_on_loop(self._run_tracked(work))
        except EpisodeOver:
            raise
        except TurnwiseError as error:
            # A graph that hands errors to the model must not talk to it past one that ends the episode.
            self.failure = self.failure or error
            raise

    async def _run_tracked(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            with self.working():
                return await work
        finally:
            work.close()


def run_blocking(work: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop | None) -> T:
    """Run work to its end from a thread without an event loop.

    Args:
        work: The coroutine.
        loop: Its loop; None for a new one.
    """
    with contextlib.suppress(RuntimeError):
        asyncio.get_running_loop()
        work.close()
        raise AgentError(
            "invoke() of a model or a tool on the event loop would deadlock: await ainvoke(), or "
            "make the node a plain def, which runs in a thread"
        )
    if loop is None or not loop.is_running():
        return asyncio.run(work)
    return asyncio.run_coroutine_threadsafe(work, loop).result()


def current_run() -> GraphRun:
    """Return the run of the calling graph.

    Raises:
        AgentError: No graph is running here.
    """
    run = _RUN.get(None)
    if run is None:
        raise AgentError(
            "no episode runs here: let turnwise.LangGraphAgent run the graph, or give the model a session "
            "(ChatTurnwise(session=...))"
        )
    return run


class EpisodeTool(BaseTool):
    """A tool of the current episode's environment."""

    tool_schema: ToolSchema = Field(exclude=True, repr=False)

    def _run(self, *, arguments: dict[str, Any], call_id: str | None) -> Any:
        return current_run().block(self._arun(arguments=arguments, call_id=call_id))

    async def _arun(self, *, arguments: dict[str, Any], call_id: str | None) -> Any:
        response = await current_run().call(call_id, self.name, arguments)
        content: Any = response.content()
        if call_id is None:
            return content
        status = "success" if response.error is None else "error"
        # Made here: what LangChain makes of parts that it does not know is their repr.
        return ToolMessage(content, tool_call_id=call_id, name=self.name, artifact=response, status=status)

    def _to_args_and_kwargs(
        self, tool_input: str | dict[str, Any], tool_call_id: str | None
    ) -> tuple[tuple[str, ...], dict[str, Any]]:
        # The environment checks arguments, with the errors that the model was trained on.
        if not isinstance(tool_input, Mapping):
            raise AgentError(f"tool {self.name!r} was called with {shown(tool_input)}: its arguments must be a dict")
        return (), {"arguments": dict(tool_input), "call_id": tool_call_id}


def tools_of(schemas: Sequence[ToolSchema]) -> list[BaseTool]:
    """Return tools as LangChain's, for use inside an episode's graph.

    Args:
        schemas: Of the tools: ``episode.tools``.
    """
    return [
        EpisodeTool(
            name=schema.name,
            description=schema.description,
            args_schema=copy.deepcopy(schema.parameters),
            tool_schema=schema,
        )
        for schema in schemas
    ]


def env_tools(name: str, **config: Any) -> list[BaseTool]:
    """Return an environment's tools, for graphs built at import.

    Args:
        name: Registered name, ``pkg.module:Class`` or ``path/to/file.py:Class``.
        **config: Its configuration.

    Raises:
        TurnwiseError: The environment is unknown, or cannot be made.
    """
    return tools_of(schemas(make(name, **config)))


async def environment_node(state: Mapping[str, Any]) -> dict[str, list[AnyMessage]]:
    """Pass a state's last message to the environment: a node for graphs that play whole episodes.

    Returns:
        The environment's messages, as an update of ``messages``. See :func:`episode_over` for the end.
    """
    messages: Sequence[BaseMessage] = state.get("messages") or ()
    if not messages or not isinstance(messages[-1], AIMessage):
        kind = messages[-1].type if messages else "none"
        raise AgentError(f"environment_node: the last of the state's messages must be the model's, but it is {kind}")
    return {"messages": await current_run().step(messages[-1])}


def episode_over(state: object = None) -> bool:  # noqa: ARG001 - the signature of conditional edges
    """Return whether the episode has ended: for the edge behind :func:`environment_node`."""
    return current_run().ended
