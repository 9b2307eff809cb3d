"""Agents written for Agent-Lightning: ``import turnwise.ext.frameworks.compat.lightning as agl``."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from turnwise.agents.core import Agent, Episode
from turnwise.agents.outcome import apply_result, emit_reward, use_episode
from turnwise.agents.registry import (
    LLM,
    Attempt,
    NamedResources,
    Rollout,
    RolloutFunction,
    RolloutMode,
    call_function,
    llm_of,
    rollout,
    rollout_of,
    row_of,
)
from turnwise.errors import AgentError

__all__ = [
    "LLM",
    "Attempt",
    "LitAgent",
    "NamedResources",
    "Rollout",
    "RolloutFunction",
    "RolloutMode",
    "emit_exception",
    "emit_message",
    "emit_object",
    "emit_reward",
    "rollout",
]

RowT = TypeVar("RowT")
_log = logging.getLogger(__name__)


class LitAgent(Agent, Generic[RowT]):
    """An agent class with one method for each kind of rollout.

    Write ``rollout(task, resources, rollout)``, or ``training_rollout`` and ``validation_rollout``, or any of them with
    suffix ``_async``; each of the latter two stands in for the other. A plain method runs in a thread. The older form
    ``(task, rollout_id, resources)`` is accepted. ``resources["main_llm"]`` is the :class:`LLM`. The return value is
    that of a ``@rollout`` function.

    Raises:
        AgentError: None of the methods is defined.
    """

    def __init__(self, *, trained_agents: str | None = None) -> None:
        """Accept the arguments of Agent-Lightning's class; a subclass may have its own.

        Args:
            trained_agents: Ignored: the trained policy's sessions are trained.
        """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._methods = {kind: _method(cls, kind) for kind in ("training", "validation")}

    _methods: dict[str, str | None]

    async def run(self, episode: Episode) -> None:
        """Run one episode."""
        name = self._methods["training" if episode.partition == "train" else "validation"]
        if name is None:
            raise AgentError(
                f"{type(self).__qualname__} defines no rollout, training_rollout or validation_rollout, nor any "
                "of these with the suffix _async"
            )
        method: Callable[..., Any] = getattr(self, name)
        rollout = rollout_of(episode)
        resources: NamedResources = {"main_llm": await llm_of(episode)}
        older = "rollout_id" in inspect.signature(method).parameters
        arguments = (rollout.rollout_id, resources) if older else (resources, rollout)
        with use_episode(episode):
            await apply_result(episode, await call_function(episode, method, row_of(episode), *arguments))


def _method(cls: type[LitAgent[Any]], kind: str) -> str | None:
    """Return the method for a kind of rollout: its own, the common one, or that of the other kind."""
    other = "validation" if kind == "training" else "training"
    for name in (f"{kind}_rollout", "rollout", f"{other}_rollout"):
        for candidate in (f"{name}_async", name):
            if callable(getattr(cls, candidate, None)):
                return candidate
    return None


def emit_message(message: str, *args: object, **kwargs: object) -> None:  # noqa: ARG001 - of the other signature
    """Log a message."""
    _log.info("%s", message)


def emit_object(obj: object, *args: object, **kwargs: object) -> None:  # noqa: ARG001 - of the other signature
    """Log an object."""
    _log.info("%r", obj)


def emit_exception(exception: BaseException, *args: object, **kwargs: object) -> None:  # noqa: ARG001 - the same
    """Log an exception. Only a raised one ends the episode."""
    _log.warning("%s: %s", type(exception).__name__, exception, exc_info=exception)
