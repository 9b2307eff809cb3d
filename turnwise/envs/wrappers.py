"""Environment wrappers: the base class, a limit of turns, reward shaping."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from typing import Any, ClassVar, Final, TypeAlias, cast

from turnwise.envs.core import (
    AsyncSolution,
    Env,
    Score,
    ScoreParts,
    Solution,
    StepResult,
    call_env,
    close_env,
    fork_env,
    reset_env,
    run_method,
    score_env,
    step_env,
)
from turnwise.envs.forking import Memo, copy_env
from turnwise.envs.results import check_score
from turnwise.envs.tool_env import ToolEnv
from turnwise.errors import AgentError, ConfigError, EnvError, nearest, shown
from turnwise.plugins import load_object
from turnwise.sandboxes.core import Mount, Sandbox
from turnwise.sandboxes.manager import SandboxManager
from turnwise.tasks.core import Task
from turnwise.tools.core import Tool
from turnwise.tools.response import CountTokens, ToolResponse
from turnwise.tools.secrets import Secret
from turnwise.types import Message, StopReason, ToolCall


class _ForwardedAttribute:
    """An attribute of the wrapped environment; set through the wrapper only if ``writable``."""

    def __init__(self, *, writable: bool = False) -> None:
        self._writable = writable

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, wrapper: Any, owner: type | None = None) -> Any:
        return self if wrapper is None else getattr(wrapper.env, self._name)

    def __set__(self, wrapper: Any, value: Any) -> None:
        if not self._writable:
            raise AttributeError(f"{type(wrapper).__qualname__}.{self._name} must be set on the wrapped environment")
        setattr(wrapper.env, self._name, value)


def _forward(*, writable: bool = False) -> Any:
    return _ForwardedAttribute(writable=writable)


class Wrapper(Env):
    """Base of wrappers: forwards everything to the wrapped environment. Override methods to change them.

    ``super()`` returns validated results; observations are lists of messages.

    Attributes:
        env: The wrapped environment.
    """

    env: Env

    tools: Sequence[Any] = _forward()
    score_range: ClassVar[tuple[float, float] | None] = _forward()
    floor: ClassVar[float | None] = _forward()
    default_tasks: ClassVar[str | None] = _forward()
    secrets: Sequence[Secret] = _forward()
    executor: Executor | None = _forward(writable=True)
    count_tokens: CountTokens | None = _forward(writable=True)
    main_session: Callable[[], Any] | None = _forward(writable=True)
    open_judge: Callable[..., Any] | None = _forward(writable=True)
    sandboxes: SandboxManager | None = _forward(writable=True)
    guest_mounts: tuple[Mount, ...] = _forward(writable=True)
    lost_thread: bool = _forward(writable=True)

    _sandbox: Sandbox | None = None
    _pending: asyncio.Future[ScoreParts] | None = None

    def __new__(cls, env: Env, *_args: Any, **_kwargs: Any) -> Wrapper:
        """Make a wrapper, as a ToolEnv where the wrapped environment is one."""
        wrapper_class: Any = cls
        wrapper_class = _with_tool_interface(wrapper_class) if isinstance(env, ToolEnv) else wrapper_class
        wrapper: Any = super().__new__(wrapper_class)
        return cast("Wrapper", wrapper)

    def __init__(self, env: Env) -> None:
        if not isinstance(env, Env):
            raise ConfigError(f"{type(self).__qualname__} wraps an environment, not {shown(env)}")
        self.env = env

    @property
    def sandbox(self) -> Sandbox | None:
        """The episode's first sandbox: that of the wrapped environment, or the wrapper's own."""
        return self.env.sandbox or self._sandbox

    @sandbox.setter
    def sandbox(self, value: Sandbox | None) -> None:
        self._sandbox = value

    @property
    def pending_score(self) -> asyncio.Future[ScoreParts] | None:
        """A scoring in progress, of the wrapper or inside."""
        return self.env.pending_score if self._pending is None else self._pending

    @pending_score.setter
    def pending_score(self, value: asyncio.Future[ScoreParts] | None) -> None:
        # A call that began here continues inside; with the executor set inside as well, it would deadlock.
        self._pending = value

    @property
    def unwrapped(self) -> Env:
        """The innermost environment."""
        return self.env.unwrapped if isinstance(self.env, Wrapper) else self.env

    async def reset(self, task: Task | None = None, *, seed: int | None = None) -> tuple[list[Message], dict[str, Any]]:
        """Forward to the wrapped environment."""
        return await reset_env(self.env, task, seed=seed)

    async def step(self, action: Message) -> StepResult:
        """Forward to the wrapped environment."""
        return await step_env(self.env, action)

    async def call(self, call: ToolCall) -> ToolResponse:
        """Forward a single call; for wrappers around a ToolEnv."""
        return await call_env(self.env, call)

    async def score(self, final: Message | None) -> Score:
        """Forward to the wrapped environment."""
        return await score_env(self.env, final)

    def solve(self) -> Solution | AsyncSolution | None:
        """Forward to the wrapped environment."""
        return self.env.solve()

    async def check_task(self, task: Task) -> Sequence[str]:
        """Forward to the wrapped environment."""
        return await run_method(self.env, self.env.check_task, task)

    @property
    def supports_fork(self) -> bool:
        """Whether the wrapped environment can fork."""
        return self.env.supports_fork

    async def fork(self) -> Env:
        """Return the wrapper, with a copy of its attributes, around a fork of the wrapped environment."""
        forked_env = await fork_env(self.env)
        try:
            fork: Env = await copy_env(self, self.fork_shares, _carry_nothing, {id(self.env): forked_env})
        except BaseException:  # also a cancellation: what was forked is closed
            await close_env(forked_env)
            raise
        return fork

    async def close(self) -> None:
        """Close the wrapped environment."""
        await close_env(self.env)

    async def release(self) -> None:
        """Do nothing: closing the wrapped environment has released it."""

    async def extra_rewards(self) -> dict[str, float]:
        """Return nothing: the wrapped environment's score holds them."""
        return {}

    def toolset(self) -> dict[str, Tool]:
        """Return the tools of the wrapped environment."""
        return self.env.toolset()

    def add_tools(self, tools: Sequence[Tool]) -> None:
        """Add tools to the wrapped environment."""
        self.env.add_tools(tools)


async def _carry_nothing(fork: Any, memo: Memo) -> None:
    """Carry nothing to the fork of a wrapper: tools are the wrapped environment's."""


class _ToolInterface(ToolEnv):
    """ToolEnv interface of a wrapper around one."""

    env: ToolEnv

    @property
    def max_invalid_calls(self) -> int:  # type: ignore[override]
        return self.env.max_invalid_calls

    @property
    def invalid_in_a_row(self) -> int:  # type: ignore[override]
        return self.env.invalid_in_a_row


async def call_by_name(env: Env, method: str, *args: Any) -> Any:
    """Call a public method that an environment's class defines, through all wrappers.

    Args:
        env: The environment.
        method: A public method besides :class:`Env`'s.
        *args: Its arguments.

    Raises:
        AgentError: There is no such method.
        EnvError: It raised.
    """
    base_env = env.unwrapped if isinstance(env, Wrapper) else env
    methods = [name for name in dir(type(base_env)) if not name.startswith("_") and name not in dir(Env)]
    if method not in methods:
        hint = nearest(method, methods) or f": it has {', '.join(methods) or 'no methods'}"
        raise AgentError(f"{type(base_env).__qualname__} has no method {method!r}{hint}")
    function: Callable[..., Any] = getattr(base_env, method)
    return await run_method(base_env, function, *args)


@functools.cache
def _with_tool_interface(cls: Any) -> Any:
    if issubclass(cls, ToolEnv):
        return cls
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (cls, _ToolInterface), names)


Shape: TypeAlias = Callable[[float, dict[str, Any], "Message | None"], Any]
"""``shape(reward, info, action)`` returns the new reward, or named parts of it; plain or async."""


class TurnLimit(Wrapper):
    """Truncates the episode with ``max_turns`` after ``max_turns`` messages. Single calls do not count."""

    def __init__(self, env: Env, max_turns: int) -> None:
        """Set the limit, a positive integer."""
        super().__init__(env)
        if isinstance(max_turns, bool) or not isinstance(max_turns, int) or max_turns < 1:
            raise ConfigError(f"turn_limit: max_turns is {max_turns!r}: it must be an integer of at least 1")
        self._most, self._turns = max_turns, 0

    async def reset(self, task: Task | None = None, *, seed: int | None = None) -> tuple[list[Message], dict[str, Any]]:
        """Start counting."""
        self._turns = 0
        return await super().reset(task, seed=seed)

    async def step(self, action: Message) -> StepResult:
        """Count the message; the last allowed one truncates."""
        result = await super().step(action)
        self._turns += 1
        if self._turns < self._most or result.terminated or result.truncated:
            return result
        return result._replace(truncated=True, info={**result.info, "stop_reason": StopReason.MAX_TURNS})


class ShapeReward(Wrapper):
    """Passes every reward through a function: of steps, of single calls, and of the score.

    The function is called ``shape(reward, info, action)``. A number is the new reward, with the difference named
    ``shaping`` beside the existing parts; named parts replace them.
    """

    def __init__(self, env: Env, shape: Shape | str) -> None:
        """Set the function, plain or async; in configurations ``pkg.module:function``."""
        super().__init__(env)
        self._shape: Shape = load_object(shape, "reward shaping function") if isinstance(shape, str) else shape
        if not callable(self._shape):
            raise ConfigError(f"shape_reward: shape is {shown(shape)}: it must be a function(reward, info, action)")

    async def step(self, action: Message) -> StepResult:
        """Shape the reward of a step."""
        result = await super().step(action)
        rewards = result.info.get("rewards")
        parts = dict(rewards) if rewards is not None else {"step": result.reward} if result.reward else {}
        parts = await self._shape_parts(result.reward, result.info, action, parts)
        return result._replace(reward=sum(parts.values()), info={**result.info, "rewards": parts})

    async def call(self, call: ToolCall) -> ToolResponse:
        """Shape the reward of a single call, if any."""
        response = await super().call(call)
        if response.reward is None:
            return response
        action: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
        parts = await self._shape_parts(response.reward, {}, action, {"call": response.reward})
        return replace(response, reward=sum(parts.values()))

    async def score(self, final: Message | None) -> Score:
        """Shape the score of an episode that no step scored."""
        parts: ScoreParts = await score_env(self.env, final)
        shaped = await self._shape_parts(sum(parts.values()), {"rewards": dict(parts)}, final, dict(parts))
        return ScoreParts(shaped, parts.metrics, parts.agents, parts.notes)

    async def _shape_parts(
        self, reward: float, info: dict[str, Any], action: Message | None, parts: dict[str, float]
    ) -> dict[str, float]:
        shaped: Any = self._shape(reward, info, action)
        shaped = await shaped if inspect.isawaitable(shaped) else shaped
        try:
            checked = check_score(shaped, self)
        except EnvError as error:
            raise EnvError(f"the reward shaping function returned {shown(shaped)}: {error}") from error
        if isinstance(shaped, Mapping):
            return dict(checked)
        difference = checked["score"] - reward
        return {**parts, "shaping": parts.get("shaping", 0.0) + difference} if difference else parts


_WRAPPERS: Final[dict[str, type[Wrapper]]] = {"shape_reward": ShapeReward, "turn_limit": TurnLimit}


def wrap(env: Env, name: str, /, **config: Any) -> Wrapper:
    """Wrap an environment.

    Args:
        env: The environment.
        name: ``turn_limit``, ``shape_reward``, or ``pkg.module:Class``.
        **config: Further arguments of its constructor.

    Raises:
        ConfigError: The wrapper is unknown, or refuses this configuration.
    """
    cls: Any = _WRAPPERS.get(name)
    if cls is None:
        if ":" not in name:
            raise ConfigError(
                f"there is no wrapper {name!r}{nearest(name, _WRAPPERS)}; known: {', '.join(sorted(_WRAPPERS))}, "
                "or pkg.module:Class"
            )
        cls = load_object(name, "wrapper")
    if not (isinstance(cls, type) and issubclass(cls, Wrapper)):
        raise ConfigError(f"wrapper {name!r} is {shown(cls)}: it must be a subclass of turnwise.envs.Wrapper")
    try:
        inspect.signature(cls.__init__).bind(None, env, **config)
    except TypeError as error:
        takes = [name for name in inspect.signature(cls.__init__).parameters if name not in ("self", "env")]
        hints = "".join(nearest(key, takes) for key in config if key not in takes)
        raise ConfigError(f"wrapper {name!r} does not take {config}: {error}{hints}; it takes {takes}") from error
    return cls(env, **config)
