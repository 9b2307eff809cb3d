"""The plain environment loop of agent programs: two values from ``reset``, four from ``step``."""

from __future__ import annotations

from typing import Any, cast

from turnwise.envs.gym.to_gymnasium import GymnasiumAdapter
from turnwise.tasks.core import Task
from turnwise.types import Message


class LoopEnv:
    """A synchronous environment, for programs without an event loop.

    Attributes:
        tools: Tools in OpenAI's format; those of the episode once it began.
    """

    def __init__(self, env_id: str, **config: Any) -> None:
        self._env = GymnasiumAdapter(env_id, **config)

    @property
    def tools(self) -> list[dict[str, Any]]:
        """Tools in OpenAI's format; those of the episode once it began."""
        return [schema.to_json() for schema in self._env.action_space.tools]

    def reset(self, *, task: Task | int | str | None = None, seed: int | None = None) -> tuple[list[Message], bool]:
        """Begin an episode and return (messages, False).

        Args:
            task: A Task, or the id or index of one of the environment's own; by default one is drawn.
            seed: Seed of all randomness.
        """
        messages, _ = self._env.reset(seed=seed, options={"task": task})
        return _messages(messages), False

    def step(self, action: str | Message) -> tuple[list[Message], float, bool, dict[str, Any]]:
        """Act and return (messages, reward, done, info).

        The reward includes the final score. ``info["truncated"]`` tells a limit from the environment's own end.

        Args:
            action: A text, or an assistant message (with ``tool_calls``).
        """
        messages, reward, terminated, truncated, info = self._env.step(action)
        return _messages(messages), reward, terminated or truncated, {**info, "truncated": truncated}

    def close(self) -> None:
        """Close the environment. Idempotent."""
        self._env.close()


def make(env_id: str, **config: Any) -> LoopEnv:
    """Make an environment.

    Args:
        env_id: A registered name, ``pkg.module:Class`` or ``path/to/file.py:Class``.
        **config: Keyword arguments of its constructor.

    Raises:
        RegistryError: The environment is unknown, or refuses the configuration.
    """
    return LoopEnv(env_id, **config)


def _messages(observed: tuple[dict[str, Any], ...]) -> list[Message]:
    return cast("list[Message]", list(observed))
