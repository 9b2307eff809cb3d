"""What a wrapper is: an environment around an environment, after Gymnasium's habit.

Owns: :class:`Wrapper`, and :func:`ask`, which reaches through all of them. Refuses: tools of its own; a wrapper offers
exactly what the environment in it offers, and one around a ToolEnv is a ToolEnv. Those that ship stand in
``wrappers.py``.
"""

from __future__ import annotations

import asyncio
import difflib
import functools
from collections.abc import Sequence
from concurrent.futures import Executor
from typing import Any, cast

from turnwise.envs.core import AsyncSolution, Env, Score, ScoreParts, Solution, StepResult, invoke
from turnwise.envs.tool_env import ToolEnv
from turnwise.errors import AgentError, ConfigError, shown
from turnwise.sandboxes.core import Mount, Sandbox
from turnwise.sandboxes.manager import SandboxManager
from turnwise.tasks import Task
from turnwise.tools.core import Tool
from turnwise.tools.limits import CountTokens
from turnwise.tools.response import ToolResponse
from turnwise.tools.secrets import Secret
from turnwise.types import Message, ToolCall


class _Inside(Env):
    """What others read of an environment, or set on it, is that of the environment inside."""

    env: Env

    @property
    def tools(self) -> Sequence[Any]:  # type: ignore[override]
        """The tools of the environment inside, as its author lists them."""
        return self.env.tools

    @property
    def score_range(self) -> tuple[float, float] | None:  # type: ignore[override]
        """That of the environment inside."""
        return self.env.score_range

    @property
    def floor(self) -> float | None:  # type: ignore[override]
        """That of the environment inside."""
        return self.env.floor

    @property
    def default_tasks(self) -> str | None:  # type: ignore[override]
        """Those of the environment inside."""
        return self.env.default_tasks

    @property
    def secrets(self) -> Sequence[Secret]:  # type: ignore[override]
        """Those of the environment inside."""
        return self.env.secrets

    @property
    def executor(self) -> Executor | None:
        """Where threads come from; set, it is set inside."""
        return self.env.executor

    @executor.setter
    def executor(self, value: Executor | None) -> None:
        self.env.executor = value

    @property
    def count_tokens(self) -> CountTokens | None:
        """Counts tokens of the model in use; set, it is set inside."""
        return self.env.count_tokens

    @count_tokens.setter
    def count_tokens(self, value: CountTokens | None) -> None:
        self.env.count_tokens = value

    @property
    def sandboxes(self) -> SandboxManager | None:
        """Where the sandboxes inside come from; set, it is set inside."""
        return self.env.sandboxes

    @sandboxes.setter
    def sandboxes(self, value: SandboxManager | None) -> None:
        self.env.sandboxes = value

    @property
    def guest_mounts(self) -> tuple[Mount, ...]:
        """What the first sandbox inside shows for an agent; set, it is set inside."""
        return self.env.guest_mounts

    @guest_mounts.setter
    def guest_mounts(self, value: tuple[Mount, ...]) -> None:
        self.env.guest_mounts = value

    @property
    def sandbox(self) -> Sandbox | None:
        """The first that was opened inside, or here."""
        return self.env.sandbox or self._sandbox

    @sandbox.setter
    def sandbox(self, value: Sandbox | None) -> None:
        self._sandbox = value

    _sandbox: Sandbox | None = None

    @property
    def lost_thread(self) -> bool:
        """Whether something inside was given up and still runs."""
        return self.env.lost_thread

    @lost_thread.setter
    def lost_thread(self, value: bool) -> None:
        self.env.lost_thread = value

    _pending: asyncio.Future[ScoreParts] | None = None

    @property
    def pending_score(self) -> asyncio.Future[ScoreParts] | None:
        """A scoring that began and whose result nobody has taken, here or inside."""
        return self.env.pending_score if self._pending is None else self._pending

    @pending_score.setter
    def pending_score(self, value: asyncio.Future[ScoreParts] | None) -> None:
        # One that began here goes on inside by itself; set inside as well, it would wait for itself.
        self._pending = value


class Wrapper(_Inside):
    """An environment that passes everything on to another one. Subclass it and write what is to be otherwise.

    Inside, call ``super()``: what it returns is held to the contract already, observations are lists of messages.

    Attributes:
        env: The environment inside.
    """

    env: Env

    def __new__(cls, env: Env, *_args: Any, **_kwargs: Any) -> Wrapper:
        """Make a wrapper that is a ToolEnv where the environment inside is one."""
        made: Any = cls
        made = super().__new__(_around_tools(made) if isinstance(env, ToolEnv) else cls)
        return cast("Wrapper", made)

    def __init__(self, env: Env) -> None:
        if not isinstance(env, Env):
            raise ConfigError(f"{type(self).__qualname__} wraps an environment, not {shown(env)}")
        self.env = env

    @property
    def unwrapped(self) -> Env:
        """The environment inside of all wrappers."""
        return self.env.unwrapped if isinstance(self.env, Wrapper) else self.env

    async def reset(self, task: Task | None = None, *, seed: int | None = None) -> tuple[list[Message], dict[str, Any]]:
        """Start an episode inside."""
        messages, info = await invoke(self.env, "reset", task, seed=seed)
        return messages, info

    async def step(self, action: Message) -> StepResult:
        """Hand a message on."""
        result: StepResult = await invoke(self.env, "step", action)
        return result

    async def call(self, call: ToolCall) -> ToolResponse:
        """Hand a call on; for wrappers around a ToolEnv."""
        response: ToolResponse = await invoke(self.env, "call", call)
        return response

    async def score(self, final: Message | None) -> Score:
        """Return what the environment inside says."""
        parts: ScoreParts = await invoke(self.env, "score", final)
        return parts

    def solve(self) -> Solution | AsyncSolution | None:
        """Return the solution of the environment inside."""
        return self.env.solve()

    async def check_task(self, task: Task) -> Sequence[str]:
        """Return what the environment inside says of a task."""
        found: Sequence[str] = await invoke(self.env, "check_task", task)
        return found

    async def close(self) -> None:
        """Close the environment inside."""
        await invoke(self.env, "close")

    async def release(self) -> None:
        """Do nothing: closing the environment inside has released it."""

    async def extra_rewards(self) -> dict[str, float]:
        """Return nothing: the score of the environment inside holds them."""
        return {}

    def toolset(self) -> dict[str, Tool]:
        """Return the tools of the environment inside."""
        return self.env.toolset()

    def add_tools(self, tools: Sequence[Tool]) -> None:
        """Offer further tools inside."""
        self.env.add_tools(tools)


class _ToolFace(ToolEnv):
    """What a wrapper around a ToolEnv has of one."""

    env: ToolEnv

    @property
    def max_invalid_calls(self) -> int:  # type: ignore[override]
        return self.env.max_invalid_calls

    @property
    def invalid_in_a_row(self) -> int:  # type: ignore[override]
        return self.env.invalid_in_a_row


async def ask(env: Env, method: str, *args: Any, executor: Executor | None = None) -> Any:
    """Call a method that the author of an environment gave it, whatever is wrapped around it.

    Args:
        env: The environment.
        method: A public method that is none of :class:`Env`'s.
        *args: Its arguments.
        executor: As for :func:`invoke`.

    Raises:
        AgentError: There is no such method.
        EnvError: It raised.
    """
    inner = env.unwrapped if isinstance(env, Wrapper) else env
    own = [name for name in dir(type(inner)) if not name.startswith("_") and name not in dir(Env)]
    if method not in own:
        close = difflib.get_close_matches(method, own, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else f": it has {', '.join(own) or 'none of its own'}"
        raise AgentError(f"{type(inner).__qualname__} has no method {method!r}{hint}")
    return await invoke(inner, method, *args, executor=executor)


@functools.cache
def _around_tools(cls: Any) -> Any:
    """Return the subclass of a wrapper that is a ToolEnv as well."""
    if issubclass(cls, ToolEnv):
        return cls
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (cls, _ToolFace), names)
