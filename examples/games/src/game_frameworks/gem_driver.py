"""Driver of gem (gem-llm): environments with Gymnasium's methods, whose observations and actions are texts."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from turnwise_foreign.core import framework, opening, refusals, text_of

PACKAGE = "gem-llm"


def names() -> list[str]:
    """Return the ids of the environments."""
    framework("gem.envs")
    return sorted(framework("gem.envs.registration").ENV_REGISTRY)


def load(name: str, kwargs: dict[str, Any], system_prompt: str | None) -> Environment:
    """Return an environment, made once to check its arguments."""
    environment = Environment(name, kwargs, system_prompt)
    environment.make()
    return environment


class Environment:
    """An environment by its id."""

    def __init__(self, name: str, kwargs: dict[str, Any], system_prompt: str | None) -> None:
        self._name = name
        self._kwargs = kwargs
        self.system_prompt = system_prompt

    def make(self) -> Any:
        """Make it."""
        return framework("gem").make(self._name, **self._kwargs)

    def episode(self) -> Game:
        """Return an episode."""
        return Game(self.make(), self.system_prompt)


class Game:
    """One episode."""

    def __init__(self, env: Any, system_prompt: str | None) -> None:
        self._env = env
        self._system_prompt = system_prompt

    def reset(self, data: Mapping[str, Any] | None, seed: int | None) -> dict[str, Any]:
        """Reset the environment with the seed."""
        observation, info = self._env.reset(seed=seed)
        return {"messages": opening(self._system_prompt, _text(observation, info))}

    def step(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Take the text of a message as the action."""
        observation, reward, terminated, truncated, info = self._env.step(text_of(message))
        observed = {"role": "user", "content": _text(observation, info)}
        outcome = {"reward": reward, "terminated": bool(terminated), "truncated": bool(truncated)}
        return {"messages": [*refusals(message), observed], **outcome}

    def fork(self) -> Game:
        """Return a copy in the same state."""
        return Game(copy.deepcopy(self._env), self._system_prompt)


def _text(observation: Any, info: Mapping[str, Any]) -> str:
    """Return an observation between the prefix and the suffix that gem's own wrappers add."""
    text = str(observation)
    suffix = info.get("suffix")
    if suffix:
        text = text if not text or text.endswith("\n") else text + "\n"
    return f"{info.get('prefix') or ''}{text}{suffix or ''}"
