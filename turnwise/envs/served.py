"""One episode that somebody outside plays, call by call.

Owns: :class:`ServedEpisode`: reset, calls as steps, the tools by which an outsider sees the task and says that it is
finished, the score, and what is written down of it. Refuses: any protocol; see ``mcp_server.py``.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from turnwise.envs.core import Env, invoke
from turnwise.envs.results import ScoreParts, StepResult, as_messages
from turnwise.envs.single_turn import SingleTurnEnv
from turnwise.envs.tool_env import ToolEnv
from turnwise.errors import ConfigError, EnvError, TurnwiseError
from turnwise.tasks import Task
from turnwise.types import Message, ToolCall, ToolSchema, text_of

Content = str | list[dict[str, Any]]


@dataclass(slots=True)
class Reply:
    """What a call is answered.

    Attributes:
        content: Text, or parts as in a message.
        error: Whether it is an error.
        result: The end of the episode, where this call ended it.
    """

    content: Content
    error: bool = False
    result: dict[str, Any] | None = None


class ServedEpisode:
    """An episode that is played from outside.

    Attributes:
        messages: What ``reset`` returned.
        over: How it ended, or None while it runs.
        touched: Whether a tool was called; a client that only lists the tools leaves none.
    """

    TASK: Final = "task"

    def __init__(self, env: Env, task: Task | None, seed: int) -> None:
        """Take an environment that nobody else uses."""
        self.messages: list[Message] = []
        self.over: str | None = None
        self.touched = False
        self.last_used = time.monotonic()
        self._env, self._task, self._seed = env, task, seed
        self._rewards: dict[str, float] = {}
        self._calls = 0
        self._error: str | None = None
        self._lock = asyncio.Lock()
        # One message ends these; in others the conversation goes on.
        self._ends = isinstance(env, (ToolEnv, SingleTurnEnv))

    @property
    def finish(self) -> str:
        """The name of the tool by which the player speaks."""
        return "finish" if self._ends else "reply"

    async def begin(self) -> None:
        """Reset the environment.

        Raises:
            EnvError: It raised or broke its contract.
            ConfigError: A tool of its own has the name of one that is added here.
        """
        self.messages, _ = await invoke(self._env, "reset", self._task, seed=self._seed)
        taken = [name for name in (self.TASK, self.finish) if name in self._env.toolset()]
        if taken:
            raise ConfigError(
                f"{type(self._env).__qualname__} has a tool called {taken[0]!r}, by which a player sees the task or "
                "answers: rename it with @function_tool('other_name')"
            )

    def tools(self) -> list[ToolSchema]:
        """Return what the player may call: the environment's tools, ``task``, and ``finish`` or ``reply``."""
        if self._ends:
            words = "Give the final answer. It is scored, and the episode ends.", "answer", "The answer."
        else:
            words = "Say something to the environment; it answers.", "text", "What you say."
        said = {"type": "object", "properties": {words[1]: {"type": "string", "description": words[2]}}}
        own = [tool.schema for tool in self._env.toolset().values()]
        return [
            *own,
            ToolSchema(self.TASK, "Show the task: the beginning of the conversation."),
            ToolSchema(self.finish, words[0], {**said, "required": [words[1]], "additionalProperties": False}),
        ]

    async def call(self, name: str, arguments: dict[str, Any]) -> Reply:
        """Answer a call. Calls of an episode are answered one at a time.

        Raises:
            TurnwiseError: The environment failed; the episode is over, and is not scored.
        """
        async with self._lock:
            self.last_used = time.monotonic()
            self.touched = True
            if name == self.TASK:
                return Reply(self.text())
            if self.over is not None:
                return Reply(f"the episode is over ({self.over}): open another session for another episode", True)
            self._calls += 1
            try:
                return await self._step(name, arguments)
            except TurnwiseError as error:
                self.over, self._error = "error", f"{type(error).__name__}: {error}"
                raise

    def text(self) -> str:
        """Return the beginning of the conversation as text."""
        if len(self.messages) == 1:
            return text_of(self.messages[0])
        return "\n\n".join(f"[{message['role']}]\n{text_of(message)}" for message in self.messages)

    async def close(self) -> None:
        """Close the environment. What was not ended is left unscored."""
        async with self._lock:
            self.over = self.over or "abandoned"
            await invoke(self._env, "close")

    def record(self) -> dict[str, Any]:
        """Return what is written down of the episode: JSON values."""
        scored = self.over not in (None, "abandoned", "error")
        return {
            "task_id": None if self._task is None else self._task.id,
            "seed": self._seed,
            "over": self.over,
            "reward": sum(self._rewards.values()) if scored else None,
            "rewards": dict(self._rewards),
            "calls": self._calls,
            "error": self._error,
        }

    async def _step(self, name: str, arguments: dict[str, Any]) -> Reply:
        if name == self.finish:
            value = next(iter(arguments.values()), None)
            if len(arguments) != 1 or not isinstance(value, str):
                return Reply(f"{name} takes one text", True)
            message: Message = {"role": "assistant", "content": value}
            call = None
        else:
            call = ToolCall(f"call_{self._calls}", name, arguments, raw=json.dumps(arguments))
            message = {"role": "assistant", "content": "", "tool_calls": [call]}
        result: StepResult = await invoke(self._env, "step", message)
        named = result.info.get("rewards") or ({"step": result.reward} if result.reward else {})
        self._add(named)
        if self._env.lost_thread:
            raise EnvError("a call outran its time-out and cannot be stopped, so the episode ends")
        if result.truncated and not result.terminated:
            parts: ScoreParts = await invoke(self._env, "score", None)
            self._add(parts)
        answers = as_messages(result.observation)
        reply = _reply(answers, call)
        if result.terminated or result.truncated:
            self.over = "terminated" if result.terminated else "truncated"
            record = self.record()
            reply.result = {key: record[key] for key in ("over", "reward", "rewards")}
        return reply

    def _add(self, rewards: dict[str, float]) -> None:
        for name, value in rewards.items():
            self._rewards[name] = self._rewards.get(name, 0.0) + float(value)


def _reply(answers: Sequence[Message], call: ToolCall | None) -> Reply:
    """Return what the environment said to one message: the answer to its call, and whatever else it said."""
    own = [each for each in answers if call is not None and each.get("tool_call_id") == call.id]
    rest = [each for each in answers if each not in own]
    content = own[0].get("content") if own else None
    error = isinstance(content, str) and _is_error(content)
    if not rest:
        return Reply(content or "", error)
    parts: list[dict[str, Any]] = []
    for each in (content, *(message.get("content") for message in rest)):
        parts += [{"type": "text", "text": each}] if isinstance(each, str) and each else each or []
    return Reply(parts, error)


def _is_error(text: str) -> bool:
    """Whether an answer is an error as tools write them."""
    if not text.startswith('{"error": {"type": '):
        return False
    try:
        return set(json.loads(text)) == {"error"}
    except json.JSONDecodeError:
        return False
