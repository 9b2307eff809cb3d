"""Replays: recorded completions played against their environments again, and the first difference that shows.

The agent of the run plays each episode from its recorded reset seed, and every request to the model is answered with
what was recorded. Where environment, tools and rewards are deterministic and unchanged, nothing differs but what the
environment says varies (``Env.varies``: the clock, temporary paths), and that is counted.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np

from turnwise.agents.roles import MAIN
from turnwise.envs.registration import env_class
from turnwise.errors import ConfigError, FormatError, SessionError, shown
from turnwise.evaluation.metrics import by_episode
from turnwise.ext.checks.recorded import UNLIMITED, RecordedRun
from turnwise.model.core import LLMClient, ModelInfo, Renderer, ServedPolicy
from turnwise.recorder.branches import is_renumbered
from turnwise.rollout.config import RolloutConfig
from turnwise.rollout.core import EpisodeOutcome, EpisodeSpec
from turnwise.rollout.runner import EpisodeRunner
from turnwise.tasks.core import Task
from turnwise.trajectory import Segment, Trajectory
from turnwise.types import Completion, SamplingParams, StopReason, TokenPrompt

Kind = Literal["observation", "tool answer", "reward", "state", "stop reason", "error", "request"]

_SHOWN = 200


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first difference between a recorded episode and its replay.

    Attributes:
        episode_id: The episode.
        task_id: Its task.
        session: The session that differs.
        turn: Number of model calls of that session before the difference; 0 is what it began with.
        kind: What differs.
        tool: The tool that answered, for a ``tool answer``.
        recorded: What the run has.
        replayed: What the replay has.
    """

    episode_id: str
    task_id: str
    session: str
    turn: int
    kind: Kind
    recorded: str
    replayed: str
    tool: str | None = None

    def __str__(self) -> str:
        where = f"episode {self.episode_id} (task {self.task_id}), session {self.session}, turn {self.turn}"
        what = self.kind if self.tool is None else f"{self.kind} of {self.tool}"
        return f"{where}: {what} was {self.recorded}, is {self.replayed}"

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


@dataclass(slots=True)
class ReplayReport:
    """The result of a replay.

    Attributes:
        episodes: Number of replayed episodes.
        divergences: The first difference of each episode that has one.
        left_out: Number of episodes that cannot be replayed, by the reason.
        varied: Number of messages that differ only in what the environment says varies, by its names for that.
    """

    episodes: int = 0
    divergences: list[Divergence] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    varied: Counter[str] = field(default_factory=Counter)


class Variance:
    """What may differ between two texts of an environment: the parts that its ``varies`` match.

    Args:
        varies: Regular expressions by a name.
        env: Name of the environment, for errors.

    Raises:
        ConfigError: One of them is no regular expression.
    """

    def __init__(self, varies: Mapping[str, str], env: str) -> None:
        for name, pattern in varies.items():
            try:
                re.compile(pattern)
            except (re.error, TypeError) as error:
                raise ConfigError(
                    f"environment {env!r}: varies[{name!r}] is {shown(pattern)}: it must be a regular expression "
                    f"({error})"
                ) from error
        self._patterns = {name: re.compile(pattern) for name, pattern in varies.items()}

    def masked(self, text: str) -> tuple[str, dict[str, list[str]]]:
        """Return the text with names instead of what varies, and the replaced texts by name."""
        matches: dict[str, list[str]] = {}
        for name, pattern in self._patterns.items():
            values = [match.group() for match in pattern.finditer(text)]
            if values:
                matches[name], text = values, pattern.sub(f"<{name}>", text)
        return text, matches

    def differing(self, first: str, second: str) -> list[str] | None:
        """Return the names of what differs between two texts; None where something else does."""
        (one, first_values), (other, second_values) = self.masked(first), self.masked(second)
        if one != other:
            return None
        return [name for name in first_values if first_values[name] != second_values[name]]


_EXACT: Final = Variance({}, "")


class RecordedClient(LLMClient):
    """Client that answers each session's requests with its recorded completions.

    A request is answered with the first recorded turn of its session that followed the same prompt, else with the next
    one that was not given yet.

    Args:
        trajectories: The recordings, by session id.
        live: Answers once all recorded completions were used; None is an error then.
    """

    def __init__(self, trajectories: Iterable[Trajectory], live: LLMClient | None = None) -> None:
        self._left = {trajectory.id: _turns(trajectory) for trajectory in trajectories}
        self._live = live

    async def generate(self, prompt: TokenPrompt, params: SamplingParams, *, session_id: str) -> Completion:
        """Return the recorded completion. Raises SessionError where the run has no further one."""
        if self._live is not None and not any(self._left.values()):
            return await self._live.generate(prompt, params, session_id=session_id)
        unanswered = self._left.get(session_id, [])
        if not unanswered:
            raise SessionError(f"session {session_id!r} requests a completion that the run does not have")
        same = (n for n, (token_ids, _) in enumerate(unanswered) if np.array_equal(token_ids, prompt.token_ids))
        _, segment = unanswered.pop(next(same, 0))
        assert segment.logprobs is not None
        return Completion(segment.token_ids, segment.logprobs, segment.finish_reason or "stop", segment.weight_versions)

    async def model_info(self) -> ModelInfo:
        """Return the live model, else one without limits: those of the run show in what was recorded."""
        return ModelInfo("recorded", UNLIMITED) if self._live is None else await self._live.model_info()

    async def close(self) -> None:
        """Do nothing: the live model's client is the caller's."""


def _turns(trajectory: Trajectory) -> list[tuple[Any, Segment]]:
    """Return the prompt and the sampled segment of each turn."""
    empty = np.empty(0, np.int32)
    return [
        (np.concatenate([empty, *(trajectory.segments[index].token_ids for index in turn.path)]), turn.sampled)
        for turn in trajectory.turns()
    ]


async def replay(
    trajectories: Iterable[Trajectory],
    tasks: Mapping[str, Task],
    config: RolloutConfig,
    renderer: Renderer,
    *,
    policy: str = MAIN,
    renderers: Mapping[str, Renderer] | None = None,
    context_length: int = UNLIMITED,
    strict: bool = False,
) -> ReplayReport:
    """Play recorded episodes again, and return the first difference of each.

    Episodes that ended in an infrastructure failure, were cancelled or timed out, were recorded as text or without
    messages, or whose task is not known are left out and counted.

    Args:
        trajectories: Those of a run, all sessions of an episode among them.
        tasks: Its tasks by id.
        config: Its environment, agent and limits.
        renderer: Its chat format.
        policy: The policy that ``renderer`` is of.
        renderers: Renderers of its further policies, trained and frozen, by name.
        context_length: Of the recorded model, where ``config`` has no smaller one.
        strict: Whether what the environment says varies is a difference, too.

    Raises:
        ConfigError: Environment, agent or tools cannot be made.
        TurnwiseError: Sandboxes that the environment needs are unavailable.
    """
    report = ReplayReport()
    playable = _playable(trajectories, tasks, report)
    if not playable:
        return report
    client = RecordedClient(member for members in playable for member in members)
    names = {tasks[members[0].task_id].env or config.env.name for members in playable}
    variances = {name: _EXACT if strict else Variance(env_class(name).varies, name) for name in names}
    info = ModelInfo("recorded", context_length)
    policies = {name: ServedPolicy(client, of_policy, info) for name, of_policy in (renderers or {}).items()}
    room = asyncio.Semaphore(config.concurrency)
    with ThreadPoolExecutor(max_workers=max(1, min(config.concurrency, 64))) as executor:
        runner = EpisodeRunner(
            config, client, renderer, context_length=context_length, executor=executor, policy=policy, policies=policies
        )

        async def replay_one(members: list[Trajectory]) -> Divergence | None:
            spec = spec_of(members[0], tasks)
            async with room:
                outcome = await runner.run(spec)
            return compare_episodes(members, outcome, variances[spec.task.env or config.env.name], report.varied)

        try:
            await runner.prepare()
            differences = await asyncio.gather(*map(replay_one, playable))
        finally:
            await runner.close()
    report.episodes = len(playable)
    report.divergences = [difference for difference in differences if difference is not None]
    return report


def _playable(
    trajectories: Iterable[Trajectory], tasks: Mapping[str, Task], report: ReplayReport
) -> list[list[Trajectory]]:
    """Return the sessions of each episode that can be played again; the report counts the others."""
    playable: list[list[Trajectory]] = []
    for members in by_episode(trajectories):
        if (why := _unplayable(members, tasks)) is not None:
            report.left_out[why] += 1
        else:
            playable.append(members)
    return playable


def _unplayable(members: Sequence[Trajectory], tasks: Mapping[str, Task]) -> str | None:
    first = members[0]
    if first.error is not None or first.stop_reason in (StopReason.ERROR, StopReason.CANCELLED, StopReason.TIMEOUT):
        return "failed, cancelled or timed out"
    if any(member.recorded == "text" for member in members):
        return "recorded as text"
    if any(not segment.messages and len(segment.token_ids) for member in members for segment in member.segments):
        return "recorded without messages"
    return None if first.task_id in tasks else "of an unknown task"


def spec_of(recorded: Trajectory, tasks: Mapping[str, Task]) -> EpisodeSpec:
    """Return the spec of a recorded episode, without its sampling seed. Raises FormatError."""
    prefix, _, rest = recorded.episode_id.rpartition("/")
    member, _, attempt = rest.partition(".")
    try:
        numbers = int(member), int(attempt)
    except ValueError as error:
        raise FormatError(
            f"episode {recorded.episode_id!r} was not rolled out by a run or an evaluation: nothing can be replayed"
        ) from error
    return EpisodeSpec(
        task=tasks[recorded.task_id], group_id=recorded.group_id, member=numbers[0], attempt=numbers[1],
        partition=recorded.partition, env_seed=recorded.seed, temperature=recorded.metrics.get("temperature"),
        baseline=recorded.baseline, episodes=prefix,
    )  # fmt: skip


def compare_episodes(
    recorded: Sequence[Trajectory],
    outcome: EpisodeOutcome,
    variance: Variance = _EXACT,
    varied: Counter[str] | None = None,
) -> Divergence | None:
    """Return the first difference between an episode and its replay, or None.

    Args:
        recorded: The sessions of the episode.
        outcome: Its replay.
        variance: What may differ.
        varied: Counts the messages in which it does, by its name.
    """
    replayed = {trajectory.agent: trajectory for trajectory in outcome.trajectories}
    for session in recorded:
        blank = replace(session, segments=[], rewards=[], states={}, stop_reason=StopReason.ERROR)
        comparison = _Comparison(session, replayed.get(session.agent, blank), variance)
        difference = comparison.first_difference()
        if varied is not None:
            varied.update(comparison.varied)
        if difference is not None:
            turn, kind, recorded_text, replayed_text, tool = difference
            texts = [text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..." for text in (recorded_text, replayed_text)]
            return Divergence(session.episode_id, session.task_id, session.agent, turn, kind, texts[0], texts[1], tool)
    return None


_Difference = tuple[int, Kind, str, str, str | None]


@dataclass(slots=True)
class _Comparison:
    """The comparison of a recorded session with its replay.

    Attributes:
        recorded: The recorded session.
        replayed: Its replay.
        variance: What may differ in messages.
        varied: Number of messages in which it does, by its name.
    """

    recorded: Trajectory
    replayed: Trajectory
    variance: Variance
    varied: Counter[str] = field(default_factory=Counter)

    def first_difference(self) -> _Difference | None:
        recorded, replayed = self.recorded, self.replayed
        turn, calls = 0, dict[str, str]()
        for number, segment in enumerate(recorded.segments):
            other = replayed.segments[number] if number < len(replayed.segments) else None
            if segment.sampled:
                calls |= {call["id"]: call["function"]["name"] for call in _calls(segment)}
                if other is None or not other.sampled:
                    return turn, "request", f"a call of the model ({segment.turn_id})", _end_text(replayed), None
                turn += 1
                if (difference := _turn_difference(recorded, replayed, segment.turn_id, turn)) is not None:
                    return difference
                continue
            if (difference := self._context_difference(segment, other, turn, calls)) is not None:
                return difference
        if len(replayed.segments) > len(recorded.segments):
            return turn, "request", _end_text(recorded), "a further call of the model", None
        return _turn_difference(recorded, replayed, None, turn) or _end_difference(recorded, replayed, turn)

    def _context_difference(
        self, segment: Segment, other: Segment | None, turn: int, calls: Mapping[str, str]
    ) -> _Difference | None:
        if other is None or other.sampled:
            return turn, "request", "a further request", _end_text(self.replayed), None
        heard, varied = list(other.messages), 0
        for index, message in enumerate(segment.messages):
            answer = heard[index] if index < len(heard) else None
            if answer == message:
                continue
            names = None if answer is None else self._varying(message, answer)
            if names:
                self.varied.update(names)
                varied += 1
                continue
            tool = calls.get(str(message.get("tool_call_id"))) if message.get("role") == "tool" else None
            kind: Kind = "observation" if message.get("role") != "tool" else "tool answer"
            # Of long texts the part is shown in which they differ.
            texts = [_text(message), "" if answer is None else _text(answer)]
            first, second = _around_difference(*(self.variance.masked(text)[0] for text in texts))
            return turn, kind, first, second, tool
        if len(heard) > len(segment.messages):
            return turn, "observation", "nothing", _text(heard[len(segment.messages)]), None
        # Templates may write the ids of calls, which have other numbers in a branch.
        free = varied or is_renumbered(self.recorded)
        if not free and not np.array_equal(segment.token_ids, other.token_ids):
            return turn, "observation", f"{len(segment.token_ids)} ids", "the same messages as other ids", None
        return None

    def _varying(self, message: Mapping[str, Any], answer: Mapping[str, Any]) -> list[str] | None:
        """Return what varies between two unequal messages; None where something else differs, too."""
        first, second = message.get("content"), answer.get("content")
        if not isinstance(first, str) or not isinstance(second, str) or {**message, "content": second} != answer:
            return None
        return self.variance.differing(first, second)


def _turn_difference(recorded: Trajectory, replayed: Trajectory, turn_id: str | None, turn: int) -> _Difference | None:
    first, second = (_rewards(trajectory, turn_id) for trajectory in (recorded, replayed))
    for name in sorted(first.keys() | second.keys()):
        one, other = first.get(name), second.get(name)
        if one is None or other is None or not math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-12):
            return turn, "reward", f"{name} {one}", f"{name} {other}", None
    state, other_state = (trajectory.states.get(turn_id or "") for trajectory in (recorded, replayed))
    return None if state == other_state else (turn, "state", repr(state), repr(other_state), None)


def _end_difference(recorded: Trajectory, replayed: Trajectory, turn: int) -> _Difference | None:
    if recorded.error != replayed.error:
        return turn, "error", str(recorded.error), str(replayed.error), None
    if recorded.stop_reason != replayed.stop_reason:
        return turn, "stop reason", str(recorded.stop_reason), str(replayed.stop_reason), None
    return None


def _rewards(trajectory: Trajectory, turn_id: str | None) -> dict[str, float]:
    rewards: defaultdict[str, float] = defaultdict(float)
    for turn, name, value in trajectory.rewards:
        if turn == turn_id:
            rewards[name] += value
    return rewards


def _calls(segment: Segment) -> list[dict[str, Any]]:
    return [call for message in segment.messages for call in message.get("tool_calls") or ()]


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else repr(dict(message))


def _around_difference(first: str, second: str) -> tuple[str, str]:
    """Return both texts from a little before their first difference on."""
    same = next(
        (n for n, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
    begin = max(0, same - 20)
    mark = "..." if begin else ""
    return repr(mark + first[begin:]), repr(mark + second[begin:])


def _end_text(trajectory: Trajectory) -> str:
    why = f": {trajectory.error}" if trajectory.error else ""
    return f"the end ({trajectory.stop_reason}{why})"


def replay_run(
    source: Path, *, number: int | None = None, task: str | None = None, strict: bool = False
) -> ReplayReport:
    """Play the episodes of a run's or an evaluation's directory again, by its ``config.yaml``.

    Args:
        source: The directory.
        number: Replay the newest so many episodes; None for all.
        task: Only episodes of this task.
        strict: Whether what the environment says varies is a difference, too.

    Raises:
        ConfigError: There is no usable configuration, or environment, agent or tasks of it are missing.
        FormatError: There are no such trajectories, or they are damaged.
    """
    run = RecordedRun.load(source)
    recorded = run.episodes(number=number, task=task)

    async def run_replay() -> ReplayReport:
        tasks = await run.tasks()
        return await replay(
            recorded, tasks, run.rollout, run.renderer, policy=run.policy, renderers=run.renderers,
            context_length=run.context_length, strict=strict,
        )  # fmt: skip

    return asyncio.run(run_replay())
