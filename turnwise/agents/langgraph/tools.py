"""The environment's tools as tools of LangChain, and the environment as a node of a graph.

Owns: :class:`EpisodeTool`, :func:`tools_of`, :func:`env_tools`, :func:`environment_node`. Refuses: running tools; the
environment does that, so rewards, limits, errors and records are those of every other agent.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from langchain_core.messages import AIMessage, AnyMessage, BaseMessage, ToolMessage
from langchain_core.tools import BaseTool
from pydantic import Field

from turnwise.agents.langgraph.run import current_run
from turnwise.envs.core import schemas
from turnwise.envs.registration import make
from turnwise.errors import AgentError, shown
from turnwise.types import ToolSchema


class EpisodeTool(BaseTool):
    """A tool of the environment of whichever episode it is called in.

    Attributes:
        told: What the model is told of it, to the letter what any other agent tells.
    """

    told: ToolSchema = Field(exclude=True, repr=False)

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
        # The environment checks arguments, and says in words that the model knows what is wrong with them.
        if not isinstance(tool_input, Mapping):
            raise AgentError(f"tool {self.name!r} was called with {shown(tool_input)}: its arguments must be a dict")
        return (), {"arguments": dict(tool_input), "call_id": tool_call_id}


def tools_of(told: Sequence[ToolSchema]) -> list[BaseTool]:
    """Return tools as LangChain's; they work inside a graph that an episode runs.

    Args:
        told: What the model is told of them: ``episode.tools``.
    """
    return [
        EpisodeTool(
            name=schema.name,
            description=schema.description,
            args_schema=copy.deepcopy(schema.parameters),
            told=schema,
        )
        for schema in told
    ]


def env_tools(name: str, **config: Any) -> list[BaseTool]:
    """Return the tools of an environment, for graphs that are built when their module is imported.

    Args:
        name: As in a configuration: a registered name, ``pkg.module:Class`` or ``path/to/file.py:Class``.
        **config: Its configuration.

    Raises:
        TurnwiseError: There is no such environment, or it cannot be made.
    """
    return tools_of(schemas(make(name, **config)))


async def environment_node(state: Mapping[str, Any]) -> dict[str, list[AnyMessage]]:
    """Hand the last message of a state to the environment: a node for graphs that play whole episodes.

    Returns:
        What the environment says, as an update of ``messages``. :func:`episode_over` says whether it was the end.

    Raises:
        AgentError: The state has no last message of a model.
    """
    messages: Sequence[BaseMessage] = state.get("messages") or ()
    if not messages or not isinstance(messages[-1], AIMessage):
        kind = messages[-1].type if messages else "none"
        raise AgentError(f"environment_node: the last of the state's messages must be a model's, but it is {kind}")
    return {"messages": await current_run().step(messages[-1])}


def episode_over(state: object = None) -> bool:  # noqa: ARG001 - the signature of conditional edges
    """Return whether the environment has ended the episode: for the edge behind :func:`environment_node`."""
    return current_run().ended
