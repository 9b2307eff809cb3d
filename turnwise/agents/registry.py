"""Agents by name: classes, functions and whatever else makes agents."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Collection
from typing import Any, Protocol, TypeAlias, TypeVar, runtime_checkable

from turnwise.agents.core import Agent
from turnwise.errors import AgentError, RegistryError, TurnwiseError
from turnwise.plugins import load_object


@runtime_checkable
class AgentMaker(Protocol):
    """What is no agent class and can still be named as an agent: a ``@rollout`` function, a class of agent loops."""

    def make_agent(self, **config: Any) -> Agent:
        """Return an agent with this configuration.

        Raises:
            AgentError: It does not take the configuration.
        """


Registered: TypeAlias = "type[Agent] | AgentMaker"
R = TypeVar("R", bound=Registered)
_AGENTS: dict[str, Registered | str] = {
    "blackbox": "turnwise.agents.blackbox:BlackBoxAgent",
    "langgraph": "turnwise.agents.langgraph:LangGraphAgent",
    "react": "turnwise.agents.react:ReActAgent",
    "single_turn": "turnwise.agents.react:SingleTurnAgent",
    "turns": "turnwise.agents.react:TurnsAgent",
}


def register_agent(name: str) -> Callable[[R], R]:
    """Register an agent under a name, as a decorator of a class or of a ``@rollout`` function.

    Raises:
        RegistryError: The name is taken by another agent, or is none: it holds one of ``:./``, as references do.
    """

    def register(agent: R) -> R:
        reference = _reference(agent)
        if not name or any(mark in name for mark in ":./"):
            raise RegistryError(f"{name!r} cannot be the name of {reference}: ':', '.' and '/' stand in references")
        taken = _AGENTS.get(name)
        known = taken if taken is None or isinstance(taken, str) else _reference(taken)
        if known is not None and known != reference:
            raise RegistryError(f"agent name {name!r} is taken by {known}; {reference} needs another name")
        _AGENTS[name] = agent
        return agent

    return register


def find_agent(name: str) -> Registered:
    """Return what makes the agent of that name or reference; nothing is made yet.

    Raises:
        RegistryError: No agent has that name.
        ConfigError: The reference cannot be loaded.
        AgentError: It is no agent.
    """
    found = _AGENTS.get(name)
    if found is None and not any(mark in name for mark in ":./"):
        raise unknown_agent(name, ())
    agent = load_object(found or name, "agent") if found is None or isinstance(found, str) else found
    if isinstance(agent, AgentMaker) or (isinstance(agent, type) and issubclass(agent, Agent)):
        return agent
    remedy = " (put @rollout of turnwise.agents above it)" if inspect.isroutine(agent) else ""
    raise AgentError(
        f"agent {name!r} is {agent!r}: it must be a subclass of turnwise.Agent, a function under @rollout{remedy}, or "
        "an AgentLoopBase"
    )


def make_agent(name: str, **config: Any) -> Agent:
    """Make an agent by its registered name or a reference such as ``pkg.mod:Class`` or ``pkg.mod:function``.

    Raises:
        RegistryError: No agent has that name.
        ConfigError: The reference cannot be loaded.
        AgentError: It is no agent, or refuses the configuration.
    """
    agent = find_agent(name)
    if not isinstance(agent, type) or not issubclass(agent, Agent):
        return agent.make_agent(**config)
    try:
        return agent(**config)
    except TypeError as error:
        raise AgentError(f"agent {name!r} refuses its configuration {config}: {error}") from error
    except TurnwiseError:
        raise
    except Exception as error:  # an agent's code: what it raises is named as its own
        raise AgentError(f"agent {name!r} cannot be made: {type(error).__name__}: {error}") from error


def unknown_agent(name: str, others: Collection[str]) -> RegistryError:
    """Return the error that no agent has a name.

    Args:
        name: The name.
        others: Names that are known besides the registered ones.
    """
    known = sorted({*_AGENTS, *others})
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return RegistryError(
        f"no agent is called {name!r}{hint} Known: {', '.join(known)}. One that is not registered is named by a "
        "reference: pkg.mod:Class, pkg.mod:function or path/to/file.py:Class"
    )


def is_registered(name: str) -> bool:
    """Return whether an agent is registered under a name."""
    return name in _AGENTS


def _reference(agent: Registered) -> str:
    owner: Any = agent if isinstance(agent, type) else inspect.unwrap(agent)  # type: ignore[arg-type]
    return f"{owner.__module__}:{owner.__qualname__}"
