"""The instances of an episode's BaseTools: made once, asked what they are worth, released once.

Owns: :class:`Instances`. Refuses: running calls (``execute.py``).
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from turnwise.errors import EnvError, TurnwiseError
from turnwise.tools.agent_data import AgentData
from turnwise.tools.core import BaseTool, Tool
from turnwise.tools.response import ToolResponse, as_response
from turnwise.tools.secrets import Secrets

ToolsKwargs: TypeAlias = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""By tool name and then ``create_kwargs``, ``execute_kwargs``, ``calc_reward_kwargs`` or ``release_kwargs``."""


class Instances:
    """The instances of one episode.

    Args:
        tools: All tools by name; those that are BaseTools have instances.
        kwargs: Further arguments of their methods.
        data: What they may know of the episode.
        secrets: Finds what errors must not show; asked only when there is an error.
    """

    def __init__(
        self, tools: Mapping[str, Tool], kwargs: ToolsKwargs, data: AgentData, secrets: Callable[[], Secrets]
    ) -> None:
        self._tools = {name: tool for name, tool in tools.items() if isinstance(tool, BaseTool)}
        self._kwargs = kwargs
        self._data = data
        self._secrets = secrets
        self._ids: dict[str, str] = {}
        self._created_rewards: dict[str, float] = {}

    def __bool__(self) -> bool:
        return bool(self._tools)

    def id_of(self, name: str) -> str:
        """Return the instance id of a tool."""
        return self._ids[name]

    def kwargs(self, name: str, which: str) -> dict[str, Any]:
        """Return the further arguments of a method, such as ``execute_kwargs``."""
        given = dict(self._kwargs.get(name, {}).get(which, {}))
        tool = self._tools.get(name)
        if tool is None:
            return given
        named, takes_any = taken_by(tool, which)
        if which == "create_kwargs" and ("create_kwargs" in named or takes_any):
            # As one dict too. Where it is the only way in, the names in it are no arguments.
            whole = dict(given)
            given = given if takes_any else {key: value for key, value in given.items() if key in named}
            given.setdefault("create_kwargs", whole)
        if "agent_data" in named or (which == "execute_kwargs" and takes_any):
            given.setdefault("agent_data", self._data)
        return given

    async def create(self) -> None:
        """Create all instances.

        Raises:
            EnvError: One could not be created. Those created before it are released.
        """
        for name, tool in self._tools.items():
            try:
                made = await self._foreign(name, "create", None)
                if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], str)):
                    raise EnvError(
                        f"{type(tool).__qualname__}.create returned {made!r}: it must return (instance_id, "
                        "ToolResponse)"
                    )
            except BaseException:  # also a cancellation: the instances made before are released
                await self.release()
                raise
            self._ids[name] = made[0]
            response = as_response(name, made[1])
            if response.reward is not None:
                self._created_rewards[name] = response.reward

    async def rewards(self) -> dict[str, float]:
        """Return what the instances are worth now, as ``tool/<name>``; zeros are left out.

        Raises:
            EnvError: A tool raised, or gave a number that is not finite.
        """
        values = dict(self._created_rewards)
        for name, instance in self._ids.items():
            value = await self._foreign(name, "calc_reward", instance)
            # A ToolResponse holds numbers to their contract.
            reward = ToolResponse(reward=value).reward
            values[name] = values.get(name, 0.0) + (reward or 0.0)
        return {f"tool/{name}": value for name, value in values.items() if value}

    async def release(self) -> None:
        """Release every instance exactly once, whatever the others do. A second time is no error.

        Raises:
            EnvError: A release failed. The others were released all the same.
        """
        failed: list[BaseException] = []
        while self._ids:
            name, instance = self._ids.popitem()
            try:
                await self._foreign(name, "release", instance)
            except (TurnwiseError, asyncio.CancelledError) as error:
                failed.append(error)
        cancelled = [error for error in failed if isinstance(error, asyncio.CancelledError)]
        if failed:
            raise (cancelled or failed)[0]

    async def _foreign(self, name: str, method: str, instance: str | None) -> Any:
        tool = self._tools[name]
        methods: dict[str, Callable[..., Any]] = {
            "create": tool.create,
            "calc_reward": tool.calc_reward,
            "release": tool.release,
        }
        try:
            found: Any = methods[method](instance, **self.kwargs(name, f"{method}_kwargs"))
            return await found if inspect.isawaitable(found) else found
        except TurnwiseError as error:
            self._secrets().scrub(error)
            raise
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a tool's code: what it raises is named as its own
            secrets = self._secrets()
            text = f"{type(tool).__qualname__}.{method} of tool {name!r} raised {type(error).__name__}: {error}"
            raise EnvError(secrets.redact(text)) from secrets.cause(error)


def taken_by(tool: BaseTool, which: str) -> tuple[frozenset[str], bool]:
    """Return the parameters of the method that ``which`` (such as ``execute_kwargs``) is for.

    Returns:
        Their names, and whether it takes any others.
    """
    kind = type(tool)
    methods: dict[str, Callable[..., Any]] = {
        "create_kwargs": kind.create,
        "execute_kwargs": kind.execute,
        "calc_reward_kwargs": kind.calc_reward,
        "release_kwargs": kind.release,
    }
    return _takes(methods[which])


@functools.lru_cache(maxsize=1024)
def _takes(method: Callable[..., Any]) -> tuple[frozenset[str], bool]:
    """Return the names of a method's parameters, and whether it takes any others."""
    parameters = inspect.signature(method).parameters.values()
    return frozenset(each.name for each in parameters), any(each.kind is each.VAR_KEYWORD for each in parameters)
