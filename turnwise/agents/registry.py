"""The registry of agents: classes, ``@rollout`` functions and other factories, by name or reference."""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, ParamSpec, Protocol, TypeAlias, TypeVar, overload, runtime_checkable

from turnwise.agents.core import Agent, Episode
from turnwise.agents.outcome import apply_result, use_episode
from turnwise.errors import AgentError, RegistryError, nearest, user_code
from turnwise.plugins import load_object, references, register_entry


@runtime_checkable
class AgentMaker(Protocol):
    """A factory usable as an agent: a ``@rollout`` function, a class of agent loops."""

    def make_agent(self, **config: Any) -> Agent:
        """Return an agent with this configuration."""


Registered: TypeAlias = "type[Agent] | AgentMaker"
R = TypeVar("R", bound=Registered)
_AGENTS: dict[str, Registered | str] = {
    "langgraph": "turnwise.agents.langgraph:LangGraphAgent",
    "react": "turnwise.agents.react:ReActAgent",
    "single_turn": "turnwise.agents.react:SingleTurnAgent",
    "turns": "turnwise.agents.react:TurnsAgent",
    **references("agents"),
}


def register_agent(name: str) -> Callable[[R], R]:
    """Register a class or a ``@rollout`` function under a name, as a decorator.

    Raises:
        RegistryError: The name is taken, or holds one of ``:./``, as references do.
    """

    def register(agent: R) -> R:
        register_entry(name, agent, _AGENTS, "agent", of=inspect.unwrap)
        return agent

    return register


def find_agent(name: str) -> Registered:
    """Return the factory of a name or reference."""
    registered = _AGENTS.get(name)
    if registered is None and not any(mark in name for mark in ":./"):
        raise unknown_agent(name, ())
    agent = registered
    if agent is None or isinstance(agent, str):
        agent = load_object(agent or name, "agent")
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
        AgentError: It is not an agent, or refuses the configuration.
    """
    agent = find_agent(name)
    if not isinstance(agent, type) or not issubclass(agent, Agent):
        return agent.make_agent(**config)
    with user_code(AgentError, f"agent {name!r} cannot be made:"):
        try:
            return agent(**config)
        except TypeError as error:
            raise AgentError(f"agent {name!r} rejects its configuration {config}: {error}") from error


def unknown_agent(name: str, further_names: Collection[str]) -> RegistryError:
    """Return the error for an unknown agent."""
    names = sorted({*_AGENTS, *further_names})
    return RegistryError(
        f"no agent is called {name!r}{nearest(name, names)} Known: {', '.join(names)}. One that is not registered is "
        "named by a reference: pkg.mod:Class, pkg.mod:function or path/to/file.py:Class"
    )


def is_registered(name: str) -> bool:
    """Return whether an agent has that name."""
    return name in _AGENTS


RolloutMode: TypeAlias = Literal["train", "val"]


@dataclass(frozen=True, slots=True)
class LLM:
    """Model endpoint of a rollout.

    Attributes:
        endpoint: ``base_url`` for OpenAI clients. Requests are recorded for this rollout; valid only while its agent
            runs.
        model: Model name; others are accepted as well.
        api_key: Any key; the URL authorises.
        sampling_parameters: The run's sampling parameters in API names; requests cannot change them.
        anthropic_endpoint: ``base_url`` for Anthropic clients.
    """

    endpoint: str
    model: str = "turnwise"
    api_key: str = "unused"
    sampling_parameters: dict[str, Any] = field(default_factory=dict)
    anthropic_endpoint: str = ""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt at a rollout.

    Attributes:
        rollout_id: The rollout.
        attempt_id: Unique in the run.
        sequence_id: 1 for the first attempt.
    """

    rollout_id: str
    attempt_id: str
    sequence_id: int


@dataclass(frozen=True, slots=True)
class Rollout:
    """Identity of a rollout.

    Attributes:
        rollout_id: The same for all its attempts.
        input: The dataset row.
        mode: ``train`` or ``val``.
        attempt: The attempt.
        start_time: Seconds since 1970.
    """

    rollout_id: str
    input: dict[str, Any]
    mode: RolloutMode
    attempt: Attempt
    start_time: float


async def llm_of(episode: Episode) -> LLM:
    """Return the model endpoint of an episode's main session."""
    address = await episode.address()
    params = episode.session.params
    sampling: dict[str, Any] = {"temperature": params.temperature, "top_p": params.top_p}
    if episode.limits.max_tokens_per_turn is not None:
        sampling["max_tokens"] = episode.limits.max_tokens_per_turn
    return LLM(f"{address}/v1", sampling_parameters=sampling, anthropic_endpoint=address)


def rollout_of(episode: Episode) -> Rollout:
    """Return the rollout of an episode."""
    name = episode.id.rpartition(".")[0] or episode.id
    attempt = Attempt(name, episode.id, episode.attempt + 1)
    mode: RolloutMode = "train" if episode.partition == "train" else "val"
    return Rollout(name, row_of(episode), mode, attempt, time.time())


def row_of(episode: Episode) -> dict[str, Any]:
    """Return the dataset row of an episode: id, prompt and the other columns."""
    task = episode.task
    return {"id": task.id, "prompt": task.prompt, **task.data}


P = ParamSpec("P")
T = TypeVar("T")
# Parameters that an episode fills, by name.
_FILLED = frozenset({"episode", "task", "llm", "rollout"})


class RolloutFunction(Generic[P, T]):
    """A function decorated by :func:`rollout`: callable as before, and usable as an agent.

    Raises:
        AgentError: Its signature is not an agent's.
    """

    def __init__(self, function: Callable[P, T]) -> None:
        self._function = function
        self._llm, self._filled = _read_signature(function)
        functools.update_wrapper(self, function)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call the function itself."""
        return self._function(*args, **kwargs)

    def make_agent(self, **config: Any) -> Agent:
        """Return the agent; its configuration becomes keyword arguments of the function."""
        arguments = dict.fromkeys(self._filled)
        name = self._function.__qualname__
        if clash := sorted(self._filled & config.keys()):
            raise AgentError(f"agent function {name}: config sets {', '.join(clash)}, which each episode passes itself")
        try:
            inspect.signature(self._function).bind(**arguments, **config)
        except TypeError as error:
            raise AgentError(f"agent function {name} does not take its configuration {config}: {error}") from error
        return FunctionAgent(self._function, self._filled, self._llm, config)


class FunctionAgent(Agent):
    """Calls a function in each episode; a plain one runs in a thread.

    Args:
        llm: The parameter that takes the LLM, if any.
    """

    def __init__(
        self, function: Callable[..., Any], filled: frozenset[str], llm: str | None, config: dict[str, Any]
    ) -> None:
        self._function = function
        self._filled = filled
        self._llm = llm
        self._config = config

    async def run(self, episode: Episode) -> None:
        """Run one episode."""
        arguments: dict[str, Any] = {"episode": episode, "task": row_of(episode), "rollout": rollout_of(episode)}
        if self._llm is not None:
            arguments[self._llm] = await llm_of(episode)
        arguments = {name: value for name, value in arguments.items() if name in self._filled}
        with use_episode(episode):
            await apply_result(episode, await call_function(episode, self._function, **arguments, **self._config))


async def call_function(episode: Episode, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call an agent's function: on the event loop if async, else in a thread."""
    if inspect.iscoroutinefunction(function):
        return await function(*args, **kwargs)
    result = await episode.in_thread(function, *args, **kwargs)
    return await result if inspect.isawaitable(result) else result


@overload
def rollout(function: Callable[P, T], /) -> RolloutFunction[P, T]: ...
@overload
def rollout(name: str, /) -> Callable[[Callable[P, T]], RolloutFunction[P, T]]: ...
@overload
def rollout() -> Callable[[Callable[P, T]], RolloutFunction[P, T]]: ...
def rollout(target: Any = None, /) -> Any:
    """Make an agent of a function: ``@rollout``, or ``@rollout("name")`` to register it.

    Parameters are filled by name: ``episode`` (see :class:`Episode`), or ``task`` (the row as a dict), ``llm`` (the
    model endpoint) and ``rollout`` (ids and mode). Others are configuration. It returns None or its own reward: a
    number, named numbers, or a list with a number for each turn.

    Raises:
        AgentError: The signature is none of these.
        RegistryError: The name is taken.
    """
    if callable(target):
        return RolloutFunction(target)

    def decorate(function: Callable[P, T]) -> RolloutFunction[P, T]:
        agent_function = RolloutFunction(function)
        return agent_function if target is None else register_agent(target)(agent_function)

    return decorate


def _read_signature(function: Callable[..., Any]) -> tuple[str | None, frozenset[str]]:
    """Return the parameter that takes the LLM, and all that an episode fills."""
    where = f"@rollout on {function.__qualname__ if inspect.isroutine(function) else repr(function)}"
    parameters = inspect.signature(function).parameters
    for name, parameter in parameters.items():
        if parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
            raise AgentError(f"{where}: parameter {name!r} is positional only: arguments are given by name")
    typed = [name for name, parameter in parameters.items() if _is_llm(parameter.annotation)]
    llm = "llm" if "llm" in parameters else typed[0] if typed else None
    if "episode" not in parameters and not ("task" in parameters and llm is not None):
        raise AgentError(
            f"{where}: its parameters are ({', '.join(parameters)}): an agent takes 'episode', or 'task' and 'llm' "
            "(and 'rollout')"
        )
    if "episode" in parameters and not inspect.iscoroutinefunction(function):
        raise AgentError(f"{where}: it takes an episode, whose methods are awaited: write 'async def'")
    return llm, frozenset(name for name in parameters if name in _FILLED or name == llm)


def _is_llm(annotation: object) -> bool:
    return annotation is LLM or (isinstance(annotation, str) and annotation.rpartition(".")[2].strip("'\"") == "LLM")
