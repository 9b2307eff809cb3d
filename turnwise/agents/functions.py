"""Plain functions as agents.

Owns: :func:`rollout`, the decorator, and what a function may be called with: the episode, or what Agent-Lightning's
functions are given. Refuses: prompt templates as resources; weights are trained here.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar, overload

from turnwise.agents.core import Agent, Episode
from turnwise.agents.outcome import acting, settle
from turnwise.agents.registry import register_agent
from turnwise.agents.resources import LLM, llm_of, rollout_of, row_of
from turnwise.errors import AgentError

P = ParamSpec("P")
T = TypeVar("T")
# What a function is given by the names of its parameters.
_GIVEN = frozenset({"episode", "task", "llm", "rollout"})


class RolloutFunction(Generic[P, T]):
    """A function under :func:`rollout`: called, it is what it was; named as an agent, it acts in episodes.

    Raises:
        AgentError: Its signature is none of an agent.
    """

    def __init__(self, function: Callable[P, T]) -> None:
        self._function = function
        self._llm, self._given = _read(function)
        functools.update_wrapper(self, function)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call the function itself."""
        return self._function(*args, **kwargs)

    def make_agent(self, **config: Any) -> Agent:
        """Return the agent; its configuration becomes keyword arguments of the function.

        Raises:
            AgentError: The function takes no such arguments, or lacks one.
        """
        given = dict.fromkeys(self._given)
        name = self._function.__qualname__
        if clash := sorted(self._given & config.keys()):
            raise AgentError(
                f"agent function {name}: config sets {', '.join(clash)}, which every episode brings itself"
            )
        try:
            inspect.signature(self._function).bind(**given, **config)
        except TypeError as error:
            raise AgentError(f"agent function {name} does not take its configuration {config}: {error}") from error
        return FunctionAgent(self._function, self._given, self._llm, config)


class FunctionAgent(Agent):
    """Calls a function in each episode. One that is not async runs in a thread.

    Args:
        function: The function.
        given: Which of its parameters an episode fills.
        llm: The parameter that takes the LLM, if there is one.
        config: Its other arguments.
    """

    def __init__(
        self, function: Callable[..., Any], given: frozenset[str], llm: str | None, config: dict[str, Any]
    ) -> None:
        self._function = function
        self._given = given
        self._llm = llm
        self._config = config

    async def run(self, episode: Episode) -> None:
        """Run one episode."""
        arguments: dict[str, Any] = {"episode": episode, "task": row_of(episode), "rollout": rollout_of(episode)}
        if self._llm is not None:
            arguments[self._llm] = await llm_of(episode)
        arguments = {name: value for name, value in arguments.items() if name in self._given}
        with acting(episode):
            await settle(episode, await called(episode, self._function, **arguments, **self._config))


async def called(episode: Episode, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call an agent's function or method: on the loop where it is async, else in a thread."""
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
    """Make an agent of a function: ``@rollout``, or ``@rollout("name")`` to register it under a name.

    The function is given what its parameters are called: ``episode`` (see :class:`Episode`), or ``task`` (the row as a
    dict), ``llm`` (where the model answers) and ``rollout`` (ids and mode). Other parameters are its configuration. It
    returns None or its own reward: a number, named numbers, or a list with a number for each turn.

    Raises:
        AgentError: The signature is none of these.
        RegistryError: The name is taken.
    """
    if callable(target):
        return RolloutFunction(target)

    def decorate(function: Callable[P, T]) -> RolloutFunction[P, T]:
        made = RolloutFunction(function)
        return made if target is None else register_agent(target)(made)

    return decorate


def _read(function: Callable[..., Any]) -> tuple[str | None, frozenset[str]]:
    """Return the parameter that takes the LLM, and all that an episode fills."""
    where = f"@rollout on {function.__qualname__ if inspect.isroutine(function) else repr(function)}"
    parameters = inspect.signature(function).parameters
    for name, parameter in parameters.items():
        if parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
            raise AgentError(f"{where}: parameter {name!r} is positional only: arguments are given by name")
    if "prompt_template" in parameters:
        raise AgentError(
            f"{where}: it wants a prompt_template: prompts are not tuned here. Give the prompt as config of the agent "
            "under another name, and take 'llm' or 'episode'"
        )
    typed = [name for name, each in parameters.items() if _is_llm(each.annotation)]
    llm = "llm" if "llm" in parameters else typed[0] if typed else None
    if "episode" not in parameters and not ("task" in parameters and llm is not None):
        raise AgentError(
            f"{where}: its parameters are ({', '.join(parameters)}): an agent takes 'episode', or 'task' and 'llm' "
            "(and 'rollout')"
        )
    if "episode" in parameters and not inspect.iscoroutinefunction(function):
        raise AgentError(f"{where}: it takes an episode, whose methods are awaited: write 'async def'")
    return llm, frozenset(name for name in parameters if name in _GIVEN or name == llm)


def _is_llm(annotation: object) -> bool:
    return annotation is LLM or (isinstance(annotation, str) and annotation.rpartition(".")[2].strip("'\"") == "LLM")
