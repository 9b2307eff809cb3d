"""From what a configuration calls a graph to the graph of an episode.

Owns: :class:`GraphFactory`. Refuses: running graphs.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Final

from langchain_core.runnables import Runnable
from langgraph.graph import StateGraph

from turnwise.agents.core import Episode
from turnwise.agents.langgraph.chat_model import ChatTurnwise
from turnwise.agents.langgraph.tools import tools_of
from turnwise.errors import AgentError, shown
from turnwise.inference.canonical import canonical_tools
from turnwise.references import load_object

_GIVEN: Final = ("model", "tools")


class GraphFactory:
    """Makes the graph of an episode, once for each set of tools.

    Args:
        graph: A reference, a graph, or a function that makes one.
        options: Arguments of that function.

    Raises:
        ConfigError: The reference cannot be loaded.
        AgentError: It is no graph, or its function does not take the options.
    """

    def __init__(self, graph: Any, options: Mapping[str, Any]) -> None:
        self._name = graph if isinstance(graph, str) else shown(graph)
        self._made = load_object(graph, "graph") if isinstance(graph, str) else graph
        self._options = dict(options)
        self._graphs: dict[Any, Runnable[Any, Any]] = {}
        if isinstance(self._made, StateGraph):
            self._made = self._made.compile()
        if isinstance(self._made, Runnable):
            if self._options:
                raise AgentError(
                    f"graph {self._name}: options {sorted(self._options)} are for a function that makes one"
                )
            return
        if not callable(self._made):
            raise AgentError(
                f"graph {self._name} is a {type(self._made).__name__}: it must be a graph of LangGraph, or a function "
                "that makes one of model and tools"
            )
        self._given = self._check(self._made)

    async def graph_for(self, episode: Episode) -> Runnable[Any, Any]:
        """Return the graph for the tools of an episode.

        Raises:
            AgentError: The function made something else.
        """
        if isinstance(self._made, Runnable):
            return self._made
        key = canonical_tools(episode.tools)
        if key not in self._graphs:
            given = {"model": ChatTurnwise(), "tools": tools_of(episode.tools)}
            made = self._made(**{name: given[name] for name in self._given}, **self._options)
            if inspect.isawaitable(made):
                made = await made
            if isinstance(made, StateGraph):
                made = made.compile()
            if not isinstance(made, Runnable):
                raise AgentError(f"graph {self._name} made a {type(made).__name__}: it must return a compiled graph")
            self._graphs[key] = made
        return self._graphs[key]

    def _check(self, function: Any) -> list[str]:
        """Return which of model and tools a function takes."""
        parameters = inspect.signature(function).parameters.values()
        named = {each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}
        takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters)
        given = [name for name in _GIVEN if (name in named or takes_all) and name not in self._options]
        unknown = sorted(self._options.keys() - named) if not takes_all else []
        if unknown:
            raise AgentError(f"graph {self._name} takes no option {unknown[0]!r}; it takes {', '.join(sorted(named))}")
        needed = {each.name for each in parameters if each.default is each.empty and each.name in named}
        missing = sorted(needed - {*given, *self._options})
        if missing:
            raise AgentError(f"graph {self._name} needs {missing[0]!r}: give it under options")
        return given
