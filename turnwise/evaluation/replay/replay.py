"""Replays: recorded completions played against their environments again, and the first difference that shows.

The agent of the run plays each episode from its recorded reset seed, and every request to the model is answered with
what was recorded. Where environment, tools and rewards are deterministic and unchanged, nothing differs.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from turnwise.agents.roles import MAIN
from turnwise.errors import FormatError, SessionError
from turnwise.evaluation.replay.recorded import UNLIMITED, RecordedRun
from turnwise.model.core import LLMClient, ModelInfo, Renderer, ServedPolicy
from turnwise.recorder.branches import is_later_branch
from turnwise.rollout.config import RolloutConfig
from turnwise.rollout.runner import EpisodeOutcome, EpisodeRunner, EpisodeSpec
from turnwise.tasks.core import Task
from turnwise.trajectory import Segment, Trajectory
from turnwise.types import Completion, SamplingParams, StopReason, TokenDelta, TokenPrompt

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
    """

    episodes: int = 0
    divergences: list[Divergence] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)


class RecordedClient(LLMClient):
    """Client that answers each session's requests with its recorded completions.

    A request is answered with the first recorded turn of its session that followed the same prompt, else with the next
    one that was not given yet.

    Args:
        trajectories: The recordings, by session id.
    """

    def __init__(self, trajectories: Iterable[Trajectory]) -> None:
        self._left = {each.id: _turns(each) for each in trajectories}

    @property
    def left(self) -> bool:
        """Whether any completion was not given yet."""
        return any(self._left.values())

    async def generate(self, prompt: TokenPrompt, params: SamplingParams, *, session_id: str) -> Completion:
        """Return the recorded completion. Raises SessionError where the run has no further one."""
        del params
        left = self._left.get(session_id, [])
        if not left:
            raise SessionError(f"session {session_id!r} requests a completion that the run does not have")
        same = (n for n, (before, _) in enumerate(left) if np.array_equal(before, prompt.token_ids))
        _, segment = left.pop(next(same, 0))
        assert segment.logprobs is not None
        return Completion(segment.token_ids, segment.logprobs, segment.finish_reason or "stop", segment.weight_versions)

    async def stream(
        self, prompt: TokenPrompt, params: SamplingParams, *, session_id: str
    ) -> AsyncIterator[TokenDelta]:
        """Yield the recorded completion at once."""
        found = await self.generate(prompt, params, session_id=session_id)
        yield TokenDelta(found.token_ids, found.logprobs, None, found.finish_reason, found.weight_versions)

    async def model_info(self) -> ModelInfo:
        """Return a model without limits: those of the run show in what was recorded."""
        return ModelInfo("recorded", UNLIMITED)

    async def close(self) -> None:
        """Do nothing."""


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
    others: Mapping[str, Renderer] | None = None,
    context_length: int = UNLIMITED,
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
        others: Renderers of its further policies, trained and frozen, by name.
        context_length: Of the recorded model, where ``config`` has no smaller one.

    Raises:
        ConfigError: Environment, agent or tools cannot be made.
        TurnwiseError: Sandboxes that the environment takes are not to be had.
    """
    report = ReplayReport()
    chosen = _playable(trajectories, tasks, report)
    if not chosen:
        return report
    client = RecordedClient(each for members in chosen for each in members)
    info = ModelInfo("recorded", context_length)
    policies = {name: ServedPolicy(client, each, info) for name, each in (others or {}).items()}
    room = asyncio.Semaphore(config.concurrency)
    with ThreadPoolExecutor(max_workers=max(1, min(config.concurrency, 64))) as executor:
        runner = EpisodeRunner(
            config, client, renderer, context_length=context_length, executor=executor, policy=policy, policies=policies
        )

        async def one(members: list[Trajectory]) -> Divergence | None:
            async with room:
                return compare_episodes(members, await runner.run(spec_of(members[0], tasks)))

        try:
            await runner.prepare()
            found = await asyncio.gather(*map(one, chosen))
        finally:
            await runner.close()
    report.episodes = len(chosen)
    report.divergences = [each for each in found if each is not None]
    return report


def _playable(
    trajectories: Iterable[Trajectory], tasks: Mapping[str, Task], report: ReplayReport
) -> list[list[Trajectory]]:
    """Return the sessions of each episode that can be played again; the report counts the others."""
    episodes: defaultdict[tuple[str, int], list[Trajectory]] = defaultdict(list)
    for each in trajectories:
        episodes[each.episode_id, each.attempt].append(each)
    chosen: list[list[Trajectory]] = []
    for members in episodes.values():
        if (why := _unplayable(members, tasks)) is not None:
            report.left_out[why] += 1
        else:
            chosen.append(members)
    return chosen


def _unplayable(members: Sequence[Trajectory], tasks: Mapping[str, Task]) -> str | None:
    first = members[0]
    if first.error is not None or first.stop_reason in (StopReason.ERROR, StopReason.CANCELLED, StopReason.TIMEOUT):
        return "failed, cancelled or timed out"
    if any(each.recorded == "text" for each in members):
        return "recorded as text"
    if any(not segment.messages and len(segment.token_ids) for each in members for segment in each.segments):
        return "recorded without messages"
    return None if first.task_id in tasks else "of an unknown task"


def spec_of(recorded: Trajectory, tasks: Mapping[str, Task]) -> EpisodeSpec:
    """Return what a recorded episode was rolled out by, but for its sampling seed. Raises FormatError."""
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


def compare_episodes(recorded: Sequence[Trajectory], outcome: EpisodeOutcome) -> Divergence | None:
    """Return the first difference between an episode and its replay, or None."""
    again = {each.agent: each for each in outcome.trajectories}
    for each in recorded:
        blank = replace(each, segments=[], rewards=[], states={}, stop_reason=StopReason.ERROR)
        found = _first_difference(each, again.get(each.agent, blank))
        if found is not None:
            turn, kind, before, after, tool = found
            shown = [text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..." for text in (before, after)]
            return Divergence(each.episode_id, each.task_id, each.agent, turn, kind, shown[0], shown[1], tool)
    return None


_Difference = tuple[int, Kind, str, str, str | None]


def _first_difference(before: Trajectory, after: Trajectory) -> _Difference | None:
    turn, calls = 0, dict[str, str]()
    for number, segment in enumerate(before.segments):
        other = after.segments[number] if number < len(after.segments) else None
        if segment.sampled:
            calls |= {call["id"]: call["function"]["name"] for call in _calls(segment)}
            if other is None or not other.sampled:
                return turn, "request", f"a call of the model ({segment.turn_id})", _ended(after), None
            turn += 1
            if (found := _of_turn(before, after, segment.turn_id, turn)) is not None:
                return found
            continue
        if (found := _of_context(segment, other, turn, calls, after)) is not None:
            return found
    if len(after.segments) > len(before.segments):
        return turn, "request", _ended(before), "a further call of the model", None
    return _of_turn(before, after, None, turn) or _of_end(before, after, turn)


def _of_context(
    segment: Segment, other: Segment | None, turn: int, calls: Mapping[str, str], after: Trajectory
) -> _Difference | None:
    if other is None or other.sampled:
        return turn, "request", "a request that goes on", _ended(after), None
    heard = list(other.messages)
    for place, message in enumerate(segment.messages):
        answer = heard[place] if place < len(heard) else None
        if answer == message:
            continue
        tool = calls.get(str(message.get("tool_call_id"))) if message.get("role") == "tool" else None
        kind: Kind = "observation" if message.get("role") != "tool" else "tool answer"
        # Of long texts the part is shown in which they differ.
        first, second = _apart(_text(message), "" if answer is None else _text(answer))
        return turn, kind, first, second, tool
    if len(heard) > len(segment.messages):
        return turn, "observation", "nothing", _text(heard[len(segment.messages)]), None
    # Templates may write the ids of calls, which have other numbers in a branch.
    if not is_later_branch(after.episode_id) and not np.array_equal(segment.token_ids, other.token_ids):
        return turn, "observation", f"{len(segment.token_ids)} ids", "the same messages as other ids", None
    return None


def _of_turn(before: Trajectory, after: Trajectory, turn_id: str | None, turn: int) -> _Difference | None:
    first, second = (_rewards(each, turn_id) for each in (before, after))
    for name in sorted(first.keys() | second.keys()):
        one, other = first.get(name), second.get(name)
        if one is None or other is None or not math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-12):
            return turn, "reward", f"{name} {one}", f"{name} {other}", None
    state, other_state = (each.states.get(turn_id or "") for each in (before, after))
    return None if state == other_state else (turn, "state", repr(state), repr(other_state), None)


def _of_end(before: Trajectory, after: Trajectory, turn: int) -> _Difference | None:
    if before.error != after.error:
        return turn, "error", str(before.error), str(after.error), None
    if before.stop_reason != after.stop_reason:
        return turn, "stop reason", str(before.stop_reason), str(after.stop_reason), None
    return None


def _rewards(trajectory: Trajectory, turn_id: str | None) -> dict[str, float]:
    found: defaultdict[str, float] = defaultdict(float)
    for turn, name, value in trajectory.rewards:
        if turn == turn_id:
            found[name] += value
    return found


def _calls(segment: Segment) -> list[dict[str, Any]]:
    return [call for message in segment.messages for call in message.get("tool_calls") or ()]


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else repr(dict(message))


def _apart(first: str, second: str) -> tuple[str, str]:
    """Return both texts from a little before their first difference on."""
    same = next(
        (n for n, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
    begin = max(0, same - 20)
    mark = "..." if begin else ""
    return repr(mark + first[begin:]), repr(mark + second[begin:])


def _ended(trajectory: Trajectory) -> str:
    why = f": {trajectory.error}" if trajectory.error else ""
    return f"the end ({trajectory.stop_reason}{why})"


def replay_run(source: Path, *, number: int | None = None, task: str | None = None) -> ReplayReport:
    """Play the episodes of a run's or an evaluation's directory again, by its ``config.yaml``.

    Args:
        source: The directory.
        number: Replay the newest so many episodes; None for all.
        task: Only episodes of this task.

    Raises:
        ConfigError: There is no usable configuration, or environment, agent or tasks of it are missing.
        FormatError: There are no such trajectories, or they are damaged.
    """
    run = RecordedRun.load(source)
    recorded = run.episodes(number=number, task=task)

    async def played() -> ReplayReport:
        tasks = await run.tasks()
        return await replay(
            recorded, tasks, run.rollout, run.renderer, policy=run.policy, others=run.others,
            context_length=run.context_length,
        )  # fmt: skip

    return asyncio.run(played())
