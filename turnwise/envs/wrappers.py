"""The wrappers that ship: limits of turns and time, shorter observations, shaped rewards, transcripts.

Owns: :class:`TurnLimit`, :class:`TimeLimit`, :class:`TruncateObservations`, :class:`ShapeReward`,
:class:`RecordTranscript`, and :func:`wrap`, which makes wrappers by name. Refuses: what a wrapper is (``wrapper.py``).
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final, TypeAlias, cast

import orjson

from turnwise.append import AppendFile
from turnwise.envs.core import Env, Score, ScoreParts, StepResult, as_messages, invoke
from turnwise.envs.results import check_score
from turnwise.envs.wrapper import Wrapper
from turnwise.errors import ConfigError, EnvError, ToolSchemaError, shown
from turnwise.references import load_object
from turnwise.tasks import Task
from turnwise.tools.limits import Keep, OutputLimit, Unit
from turnwise.tools.registry import nearest
from turnwise.tools.response import ToolResponse
from turnwise.types import Message, StopReason, ToolCall

Shape: TypeAlias = Callable[[float, dict[str, Any], "Message | None"], Any]
"""``shape(reward, info, action)`` returns the new reward, or named parts of it; plain or async."""


class TurnLimit(Wrapper):
    """Truncates the episode with ``max_turns`` when so many messages did not end it. Single calls are not counted."""

    def __init__(self, env: Env, max_turns: int) -> None:
        """Take an environment.

        Raises:
            ConfigError: ``max_turns`` is no positive integer.
        """
        super().__init__(env)
        if isinstance(max_turns, bool) or not isinstance(max_turns, int) or max_turns < 1:
            raise ConfigError(f"turn_limit: max_turns is {max_turns!r}: it must be an integer of at least 1")
        self._most, self._turns = max_turns, 0

    async def reset(self, task: Task | None = None, *, seed: int | None = None) -> tuple[list[Message], dict[str, Any]]:
        """Start counting."""
        self._turns = 0
        return await super().reset(task, seed=seed)

    async def step(self, action: Message) -> StepResult:
        """Count the message; the last one that is allowed truncates."""
        result = await super().step(action)
        self._turns += 1
        if self._turns < self._most or result.terminated or result.truncated:
            return result
        return result._replace(truncated=True, info={**result.info, "stop_reason": StopReason.MAX_TURNS})


class TimeLimit(Wrapper):
    """Truncates the episode with ``timeout`` when so many seconds passed since reset, also in the midst of a step.

    Scoring takes no time: an answer that was given in time is scored. Calls that a step did not answer in time are
    answered by errors, and so are single calls; those do not end the episode. A plain function cannot be interrupted
    where it runs on the event loop.
    """

    def __init__(self, env: Env, seconds: float) -> None:
        """Take an environment.

        Raises:
            ConfigError: ``seconds`` is not more than 0.
        """
        super().__init__(env)
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds > 0:
            raise ConfigError(f"time_limit: seconds is {seconds!r}: it must be a number above 0")
        self._seconds = seconds
        self._deadline = float("inf")

    async def reset(self, task: Task | None = None, *, seed: int | None = None) -> tuple[list[Message], dict[str, Any]]:
        """Reset, and start the clock."""
        begun = await super().reset(task, seed=seed)
        self._deadline = asyncio.get_running_loop().time() + self._seconds
        return begun

    async def step(self, action: Message) -> StepResult:
        """Give a step the time that is left."""
        scope = asyncio.timeout_at(self._deadline)
        try:
            async with scope:
                result = await super().step(action)
        except TimeoutError:
            if not scope.expired():
                raise
            if self.env.pending_score is not None:
                parts: ScoreParts = await invoke(self.env, "score", action)
                return StepResult([], sum(parts.values()), True, False, parts.info())
            answers = [self._unanswered(call) for call in action.get("tool_calls") or ()]
            return StepResult(answers, 0.0, False, True, {"stop_reason": StopReason.TIMEOUT})
        late = asyncio.get_running_loop().time() >= self._deadline
        if not late or result.terminated or result.truncated:
            return result
        return result._replace(truncated=True, info={**result.info, "stop_reason": StopReason.TIMEOUT})

    async def call(self, call: ToolCall) -> ToolResponse:
        """Give a single call the time that is left."""
        if asyncio.get_running_loop().time() >= self._deadline:
            return self._too_late(call)
        scope = asyncio.timeout_at(self._deadline)
        try:
            async with scope:
                return await super().call(call)
        except TimeoutError:
            if not scope.expired():
                raise
            return self._too_late(call)

    def _too_late(self, call: ToolCall) -> ToolResponse:
        return ToolResponse.failure("timeout", f"the episode's {self._seconds:g} s are over", tool=call.name)

    def _unanswered(self, call: ToolCall) -> Message:
        response = self._too_late(call)
        return {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": response.content()}


class TruncateObservations(Wrapper):
    """Cuts each text that answers a message or a call to so many characters or tokens, with a marker."""

    def __init__(self, env: Env, amount: int, unit: Unit = "characters", keep: Keep = "ends") -> None:
        """Take an environment, and the fields of an OutputLimit.

        Raises:
            ConfigError: They make no limit.
        """
        super().__init__(env)
        try:
            self._limit = OutputLimit(amount, unit, keep)
        except ToolSchemaError as error:
            raise ConfigError(f"truncate_observations: {error}") from error

    async def step(self, action: Message) -> StepResult:
        """Cut what answers the message."""
        result = await super().step(action)
        return result._replace(observation=[self._message(each) for each in as_messages(result.observation)])

    async def call(self, call: ToolCall) -> ToolResponse:
        """Cut what answers the call."""
        response = await super().call(call)
        return response if response.text is None else replace(response, text=self._cut(response.text))

    def _message(self, message: Message) -> Message:
        content = message.get("content")
        if isinstance(content, str):
            return {**message, "content": self._cut(content)}
        if content is None:
            return message
        parts = [{**part, "text": self._cut(part["text"])} if "text" in part else part for part in content]
        return {**message, "content": parts}

    def _cut(self, text: str) -> str:
        return self._limit.cut(text, self.count_tokens)


class ShapeReward(Wrapper):
    """Passes every reward through a function: of steps, of single calls, and of the score.

    The function is called ``shape(reward, info, action)``. A number that it returns is the new reward; the difference
    is named ``shaping`` beside the parts that were there. Named parts that it returns stand in their place.
    """

    def __init__(self, env: Env, shape: Shape | str) -> None:
        """Take an environment and a function, plain or async, or in configurations ``pkg.module:function``.

        Raises:
            ConfigError: It cannot be loaded, or is no function.
        """
        super().__init__(env)
        self._shape: Shape = load_object(shape, "reward shaping function") if isinstance(shape, str) else shape
        if not callable(self._shape):
            raise ConfigError(f"shape_reward: shape is {shown(shape)}: it must be a function(reward, info, action)")

    async def step(self, action: Message) -> StepResult:
        """Shape the reward of a step."""
        result = await super().step(action)
        named = result.info.get("rewards")
        parts = dict(named) if named is not None else {"step": result.reward} if result.reward else {}
        parts = await self._shaped(result.reward, result.info, action, parts)
        return result._replace(reward=sum(parts.values()), info={**result.info, "rewards": parts})

    async def call(self, call: ToolCall) -> ToolResponse:
        """Shape the reward of a single call, where it has one."""
        response = await super().call(call)
        if response.reward is None:
            return response
        action: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
        parts = await self._shaped(response.reward, {}, action, {"call": response.reward})
        return replace(response, reward=sum(parts.values()))

    async def score(self, final: Message | None) -> Score:
        """Shape the score of an episode that no step scored."""
        parts: ScoreParts = await invoke(self.env, "score", final)
        shaped = await self._shaped(sum(parts.values()), {"rewards": dict(parts)}, final, dict(parts))
        return ScoreParts(shaped, parts.metrics, parts.agents)

    async def _shaped(
        self, reward: float, info: dict[str, Any], action: Message | None, parts: dict[str, float]
    ) -> dict[str, float]:
        found: Any = self._shape(reward, info, action)
        found = await found if inspect.isawaitable(found) else found
        try:
            checked = check_score(found, self)
        except EnvError as error:
            raise EnvError(f"the reward shaping function returned {shown(found)}: {error}") from error
        if isinstance(found, Mapping):
            return dict(checked)
        difference = checked["score"] - reward
        return {**parts, "shaping": parts.get("shaping", 0.0) + difference} if difference else parts


class RecordTranscript(Wrapper):
    """Appends each episode as one line of JSON to a file, when the next one begins or the environment is closed.

    A line holds ``task_id``, ``seed``, ``messages`` (the prompt, the model's messages and what answered them),
    ``rewards`` (the named ones, summed over the episode), ``reward``, ``terminated``, ``truncated`` and
    ``stop_reason``.
    """

    def __init__(self, env: Env, path: str | Path) -> None:
        super().__init__(env)
        self._path = Path(path)
        self._episode: dict[str, Any] | None = None

    async def reset(self, task: Task | None = None, *, seed: int | None = None) -> tuple[list[Message], dict[str, Any]]:
        """Write the episode before, and begin the next."""
        self._write()
        messages, info = await super().reset(task, seed=seed)
        self._episode = {
            "task_id": None if task is None else task.id,
            "seed": seed,
            "messages": list(messages),
            "rewards": {},
            "reward": 0.0,
            "terminated": False,
            "truncated": False,
            "stop_reason": None,
        }
        return messages, info

    async def step(self, action: Message) -> StepResult:
        """Note a message and what came of it."""
        result = await super().step(action)
        self._note([action, *as_messages(result.observation)], _named(result))
        if self._episode is not None:
            self._episode["terminated"], self._episode["truncated"] = result.terminated, result.truncated
            self._episode["stop_reason"] = result.info.get("stop_reason")
        return result

    async def call(self, call: ToolCall) -> ToolResponse:
        """Note a call and its answer."""
        response = await super().call(call)
        said: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
        answer: Message = {
            "role": "tool",
            "tool_call_id": call.id,
            "name": call.name,
            "content": response.content(),
        }
        self._note([said, answer], {} if response.reward is None else {f"tool/{call.name}": response.reward})
        return response

    async def score(self, final: Message | None) -> Score:
        """Note the score of an episode that no step scored."""
        parts: ScoreParts = await invoke(self.env, "score", final)
        self._note([], parts)
        return parts

    async def close(self) -> None:
        """Write the episode that ran, and close the environment inside."""
        try:
            await super().close()
        finally:
            self._write()

    def _note(self, messages: list[Message], rewards: Mapping[str, float]) -> None:
        if self._episode is None:
            return
        self._episode["messages"] += messages
        for name, value in rewards.items():
            self._episode["rewards"][name] = self._episode["rewards"].get(name, 0.0) + value
            self._episode["reward"] += value

    def _write(self) -> None:
        episode, self._episode = self._episode, None
        if episode is None:
            return
        episode["messages"] = [_plain(message) for message in episode["messages"]]
        try:
            # Opened for the line: many episodes of a run write to one file, and none holds it.
            file = AppendFile(self._path)
            try:
                file.append(_line(episode))
            finally:
                file.close()
        except OSError as error:
            raise EnvError(f"record_transcript: {self._path} cannot be written: {error}") from error


def _line(episode: dict[str, Any]) -> bytes:
    try:
        return orjson.dumps(episode, default=repr)
    except TypeError:
        # Half a surrogate pair or a number of more than 64 bits: a model may write both.
        return json.dumps(episode, default=repr).encode("ascii")


def _named(result: StepResult) -> Mapping[str, float]:
    named: Mapping[str, float] | None = result.info.get("rewards")
    return named if named is not None else {"step": result.reward} if result.reward else {}


def _plain(message: Message) -> dict[str, Any]:
    values = cast("dict[str, Any]", dict(message))
    if message.get("tool_calls"):
        values["tool_calls"] = [asdict(call) for call in message["tool_calls"]]
    return values


_WRAPPERS: Final[dict[str, type[Wrapper]]] = {
    "record_transcript": RecordTranscript,
    "shape_reward": ShapeReward,
    "time_limit": TimeLimit,
    "truncate_observations": TruncateObservations,
    "turn_limit": TurnLimit,
}


def wrap(env: Env, name: str, /, **config: Any) -> Wrapper:
    """Put a wrapper around an environment.

    Args:
        env: The environment.
        name: ``turn_limit``, ``time_limit``, ``truncate_observations``, ``shape_reward``, ``record_transcript``, or
            ``pkg.module:Class``.
        **config: Further arguments of its constructor.

    Raises:
        ConfigError: There is no such wrapper, or it does not take this configuration.
    """
    cls: Any = _WRAPPERS.get(name)
    if cls is None:
        if ":" not in name:
            raise ConfigError(
                f"there is no wrapper {name!r}{nearest(name, _WRAPPERS)}; there are {', '.join(sorted(_WRAPPERS))}, "
                "and pkg.module:Class"
            )
        cls = load_object(name, "wrapper")
    if not (isinstance(cls, type) and issubclass(cls, Wrapper)):
        raise ConfigError(f"wrapper {name!r} is {shown(cls)}: it must be a subclass of turnwise.envs.Wrapper")
    try:
        inspect.signature(cls.__init__).bind(None, env, **config)
    except TypeError as error:
        takes = [each for each in inspect.signature(cls.__init__).parameters if each not in ("self", "env")]
        hints = "".join(nearest(each, takes) for each in config if each not in takes)
        raise ConfigError(f"wrapper {name!r} does not take {config}: {error}{hints}; it takes {takes}") from error
    return cls(env, **config)
