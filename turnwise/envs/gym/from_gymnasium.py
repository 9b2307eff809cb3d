"""GymnasiumEnv and GymnasiumToolEnv: Gymnasium environments played by messages or tool calls."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, Final

import gymnasium

from turnwise.envs.core import Env, ResetResult, StepResult
from turnwise.envs.forking import Memo
from turnwise.envs.gym.text import (
    WORLDS,
    Render,
    ansi_text,
    plain_value,
    space_hint,
    space_schema,
    value_from_json,
    value_text,
)
from turnwise.envs.tool_env import ToolEnv
from turnwise.errors import ConfigError, EnvError, ToolError, shown
from turnwise.plugins import load_object
from turnwise.tasks.core import Task
from turnwise.tools.core import FunctionTool
from turnwise.tools.response import refuse_calls
from turnwise.types import Message, StopReason, text_of

Parse = Callable[[str, Any], Any]
"""``parse(text, env)`` returns an action; it raises ValueError or ToolError with what the model reads."""

_TAG: Final = re.compile(r"<(/?)action>", re.IGNORECASE)
_LABEL: Final = re.compile(r"^\W*action\W*[:=]\s*", re.IGNORECASE)
_TOOL_NAME: Final = re.compile(r"[^A-Za-z0-9_-]+")


class _World:
    """A Gymnasium environment, its rendering, and the state of the episode."""

    def __init__(
        self,
        env: str | Callable[[], Any] | Any,
        *,
        kwargs: dict[str, Any] | None,
        render: Render | str | None,
        actions: Sequence[str] | None,
        instructions: str | None,
    ) -> None:
        if isinstance(env, str):
            try:
                self.env = gymnasium.make(env, **(kwargs or {}))
            except (gymnasium.error.Error, ModuleNotFoundError, TypeError) as error:
                raise ConfigError(f"gymnasium.make({env!r}, **{kwargs or {}}) failed: {error}") from error
        elif kwargs:
            raise ConfigError(
                f"kwargs={kwargs} were given beside {shown(env)}: kwargs apply to an environment's id only"
            )
        else:
            self.env = env if isinstance(env, gymnasium.Env) else env()
        if not isinstance(self.env, gymnasium.Env):
            raise ConfigError(f"{shown(self.env)} is not a gymnasium.Env: give one, its id or its factory function")
        world = WORLDS.get(self.env.spec.name) if self.env.spec is not None else None
        self.space = self.env.action_space
        self.names = _names(self.space, world.actions if world is not None and actions is None else actions or ())
        self.rules = instructions if instructions is not None else world.rules if world is not None else ""
        self._render = _renderer(render, None if world is None else world.render)
        self.observation: Any = None
        self.over = False

    @property
    def hint(self) -> str:
        return space_hint(self.space, self.names)

    def reset(self, task: Task | None, seed: int | None, how: str) -> ResetResult:
        options = None if task is None else task.data.get("options")
        self.observation, self.info = self.env.reset(seed=seed, options=options)
        self.over = False
        system = f"{self.rules}\n{how}" if self.rules else how
        return [{"role": "system", "content": system}, {"role": "user", "content": self.text()}], self.seen()

    def invalid(self, answers: list[Message], *, spent: bool) -> StepResult:
        """Return the result of a message without an action; ``spent``: it was the last that is allowed."""
        info: dict[str, Any] = {"metrics": {"invalid_actions": 1.0}, **self.seen()}
        if spent:
            info["stop_reason"] = StopReason.INVALID_CALLS
        return StepResult(answers, 0.0, False, spent, info)

    def step(self, action: Any) -> tuple[str, float, bool, bool]:
        self.observation, reward, terminated, truncated, self.info = self.env.step(action)
        self.over = bool(terminated or truncated)
        return self.text(), float(reward), bool(terminated), bool(truncated)

    def text(self) -> str:
        if self._render is None:
            return value_text(self.env.observation_space, self.observation)
        return str(self._render(self.observation, self.env))

    def seen(self) -> dict[str, Any]:
        return {"observation": plain_value(self.observation)}


class GymnasiumEnv(Env):
    """A Gymnasium environment in which every message is an action.

    The action is between the last ``<action>`` and ``</action>`` of a message, or on its last line, optionally
    after ``Action:``: a name, a number, or JSON. A message without one is answered with a hint and changes nothing;
    after ``max_invalid`` of them in a row the episode is truncated.
    """

    def __init__(
        self,
        env_id: str | Any,
        *,
        kwargs: dict[str, Any] | None = None,
        render: Render | str | None = None,
        parse: Parse | str | None = None,
        actions: Sequence[str] | None = None,
        instructions: str | None = None,
        max_invalid: int = 3,
        blocking: bool = False,
    ) -> None:
        """Wrap an environment.

        Args:
            env_id: Its id in Gymnasium, an object, or a function that makes one.
            kwargs: Arguments of ``gymnasium.make``.
            render: Text of an observation: a function of observation and environment, a reference to one, or ``ansi``
                for ``env.render()``. By default numbers, or known names.
            parse: Action of a text: a function of text and environment, or a reference to one.
            actions: Names of the values of a Discrete action space.
            instructions: Instructions before the description of actions.
            max_invalid: Messages without an action in a row that truncate the episode; 0 is never.
            blocking: Whether steps run in a thread.

        Raises:
            ConfigError: The environment is unknown, or an argument does not fit it.
            EnvError: Its action space has no text form and no ``parse`` is given.
        """
        self.world = _World(env_id, kwargs=kwargs, render=render, actions=actions, instructions=instructions)
        self._parse: Parse | None = load_object(parse, "parse function") if isinstance(parse, str) else parse
        if self._parse is None:
            space_schema(self.world.space)
        self._max_invalid = max_invalid
        self._invalid = 0
        vars(self)["blocking"] = blocking

    def reset(self, task: Task | None = None, *, seed: int | None = None) -> ResetResult:
        """Reset the world with the seed, and with ``task.data["options"]`` if given."""
        self._invalid = 0
        return self.world.reset(task, seed, f"Answer with your action alone, or on the last line: {self._hint}.")

    def step(self, action: Message) -> StepResult:
        """Take the action of a message; a tool call is answered with an error."""
        if self.world.over:
            raise EnvError(f"{type(self).__qualname__}: the episode is over: call reset() first")
        answers = refuse_calls(action)
        try:
            parsed = self._action(text_of(action))
        except (ToolError, ValueError) as error:
            self._invalid += 1
            spent = 0 < self._max_invalid <= self._invalid
            return self.world.invalid(answers or [{"role": "user", "content": str(error)}], spent=spent)
        self._invalid = 0
        text, reward, terminated, truncated = self.world.step(parsed)
        observation: list[Message] = [*answers, {"role": "user", "content": text}]
        return StepResult(observation, reward, terminated, truncated, self.world.seen())

    def close(self) -> None:
        """Close the world."""
        self.world.env.close()

    @property
    def _hint(self) -> str:
        return self.world.hint if self._parse is None else "as described above"

    def _action(self, text: str) -> Any:
        if self._parse is not None:
            action = self._parse(text, self.world.env)
            if not self.world.space.contains(action):
                raise ToolError(f"{shown(action)} is not an action of {self.world.space}")
            return action
        return value_from_json(self.world.space, _action_value(text, self.world.space), self.world.names)


class GymnasiumToolEnv(ToolEnv):
    """A Gymnasium environment played by tool calls.

    A Discrete action space with names has one tool for each name; any other has one tool, ``act(action)``. A message
    without a call is answered with a reminder; after ``max_invalid_calls`` of them, or of invalid calls, in a row the
    episode is truncated.
    """

    uncopied = ToolEnv.uncopied | {"tools"}

    def __init__(
        self,
        env_id: str | Any,
        *,
        kwargs: dict[str, Any] | None = None,
        render: Render | str | None = None,
        actions: Sequence[str] | None = None,
        instructions: str | None = None,
        max_invalid: int = 3,
        blocking: bool = False,
    ) -> None:
        """Wrap an environment; the arguments are those of :class:`GymnasiumEnv`."""
        self.world = _World(env_id, kwargs=kwargs, render=render, actions=actions, instructions=instructions)
        self.max_invalid_calls = max_invalid
        self._blocking = blocking
        self._ended: tuple[bool, bool] | None = None
        self.tools = self._tools()

    def reset(self, task: Task | None = None, *, seed: int | None = None) -> ResetResult:
        """Reset the world with the seed, and with ``task.data["options"]`` if given."""
        self._ended = None
        return self.world.reset(task, seed, "Act by calling a tool.")

    async def step(self, action: Message) -> StepResult:
        """Take the calls of a message as actions, in order."""
        if not action.get("tool_calls"):
            return await self._reminded()
        result = await super().step(action)
        info = {**result.info, **self.world.seen()}
        if self._ended is not None:
            self._over = True
            info.pop("stop_reason", None)
            return result._replace(terminated=self._ended[0], truncated=self._ended[1], info=info)
        return result._replace(info=info)

    def close(self) -> None:  # type: ignore[override]
        """Close the world, then the tools."""
        self.world.env.close()

    async def _fork_state(self, fork: Any, memo: Memo) -> None:
        """Give a fork tools that act on its own world."""
        fork.tools = fork._tools()
        await super()._fork_state(fork, memo)

    async def _reminded(self) -> StepResult:
        await self._open()
        self._count_usable(usable=False)
        self._over = 0 < self.max_invalid_calls <= self.invalid_in_a_row
        return self.world.invalid([{"role": "user", "content": "Call a tool to act."}], spent=self._over)

    def _tools(self) -> list[FunctionTool]:
        space, names = self.world.space, self.world.names
        if not names:
            parameters = {"type": "object", "properties": {"action": space_schema(space)}, "required": ["action"]}

            def act(action: Any) -> Any:
                return self._act(value_from_json(space, action))

            return [self._tool(act, "act", f"Act: {space_hint(space)}.", parameters)]

        def named(number: int) -> Callable[[], Any]:
            return lambda: self._act(number)

        empty = {"type": "object", "properties": {}, "additionalProperties": False}
        start = int(space.start)
        return [
            self._tool(named(start + number), _TOOL_NAME.sub("_", name), f"Act: {name}.", empty)
            for number, name in enumerate(names)
        ]

    def _tool(self, fn: Callable[..., Any], name: str, description: str, parameters: dict[str, Any]) -> FunctionTool:
        schema = {"name": name, "description": description, "parameters": parameters}
        return FunctionTool(fn, schema=schema, concurrent=False, inline=not self._blocking)

    def _act(self, action: Any) -> tuple[str, float]:
        if self._ended is not None:
            raise ToolError("the episode is over: this action was not taken")
        text, reward, terminated, truncated = self.world.step(action)
        if terminated or truncated:
            self._ended = (terminated, truncated)
        return text, reward


def from_gymnasium(
    env: str | Any, *, tools: bool = False, parse: Parse | str | None = None, **options: Any
) -> GymnasiumEnv | GymnasiumToolEnv:
    """Wrap a Gymnasium environment.

    Args:
        env: Its id, an object, or a function that makes one.
        tools: Whether the model acts by tool calls; else by messages.
        parse: Action of a text; not with tools, whose arguments are the action.
        **options: ``kwargs``, ``render``, ``actions``, ``instructions``, ``max_invalid`` and ``blocking``, as of
            :class:`GymnasiumEnv`.

    Raises:
        ConfigError: The environment is unknown, or an argument does not fit it.
        EnvError: Its action space has no form in text or JSON and no ``parse`` is given.
    """
    if tools and parse is not None:
        raise ConfigError("parse= reads messages, but with tools=True the calls are the actions: remove one of them")
    return GymnasiumToolEnv(env, **options) if tools else GymnasiumEnv(env, parse=parse, **options)


def _names(space: Any, names: Sequence[str]) -> tuple[str, ...]:
    if not names:
        return ()
    if not isinstance(space, gymnasium.spaces.Discrete) or len(names) != int(space.n):
        raise ConfigError(f"actions={list(names)} name the values of a Discrete space, but the action space is {space}")
    if len({_TOOL_NAME.sub("_", name.casefold()) for name in names}) < len(names):
        raise ConfigError(f"actions={list(names)}: the names must be unique")
    return tuple(names)


def _renderer(render: Render | str | None, default: Render | None) -> Render | None:
    if render is None:
        return default
    if render == "ansi":
        return ansi_text
    loaded: Render = load_object(render, "render function") if isinstance(render, str) else render
    return loaded


def _action_value(text: str, space: Any) -> Any:
    """Return the action in a message: JSON where it parses and no text is wanted, else the text."""
    answer = _tagged(text)
    if answer is None:
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        answer = _LABEL.sub("", lines[-1]) if lines else ""
    if isinstance(space, gymnasium.spaces.Text):
        return answer
    try:
        return json.loads(answer)
    except (ValueError, RecursionError):
        return answer.rstrip(".!")


def _tagged(text: str) -> str | None:
    # One pass: a text of nothing but opening tags costs no more than another one.
    answer, opened = None, -1
    for tag in _TAG.finditer(text):
        if not tag[1]:
            opened = tag.end()
        elif opened >= 0:
            answer, opened = text[opened : tag.start()].strip(), -1
    return answer
