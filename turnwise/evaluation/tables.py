"""Tables of a run: episodes, turns, tool calls and tokens as pandas data frames."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import orjson

from turnwise.errors import ConfigError, FormatError
from turnwise.evaluation.directory import success_rule
from turnwise.evaluation.metrics import by_episode, episode_rows
from turnwise.trajectory import Segment, Trajectory, Turn
from turnwise.trajectory_file import TRAJECTORIES, effective_trajectories

if TYPE_CHECKING:
    import pandas


def read_run(path: Path | str, *, success_reward: float | None = None) -> RunTables:
    """Open the trajectories of a training run, an evaluation or a gateway.

    Args:
        path: A run directory, or a file of trajectories. It may still be written to: what is whole is read.
        success_reward: Minimum reward of a successful episode; by default the run's own.

    Raises:
        FormatError: There is no such file.
        ConfigError: pandas is not installed.
    """
    file = run_file(path)
    _pandas()
    threshold, role = success_rule(file.parent)
    return RunTables(file, threshold if success_reward is None else success_reward, role)


def run_file(path: Path | str) -> Path:
    """Return the trajectories' file of a run directory, or the file itself. Raises FormatError if there is none."""
    path = Path(path)
    file = path / TRAJECTORIES if path.is_dir() else path
    if not file.is_file():
        raise FormatError(f"no such file: {file}: give a run directory that holds {TRAJECTORIES}, or such a file")
    return file


@dataclass(frozen=True, slots=True)
class RunTables:
    """The tables of a run, each read anew from its file when it is asked for.

    All tables share ``trajectory_id``, ``episode_id``, ``task_id`` and ``partition``, by which they join; turns, tool
    calls and tokens also share ``turn_id``.

    Attributes:
        file: The trajectories.
        success_reward: Minimum reward of a successful episode.
        role: Role whose reward counts; None for all sessions of the evaluated policy.
    """

    file: Path
    success_reward: float = 1.0
    role: str | None = None

    def trajectories(self, partition: str | None = None) -> Iterator[Trajectory]:
        """Yield the trajectories, of ``train`` or ``val`` only with ``partition``. Raises FormatError."""
        for _, trajectory in effective_trajectories(self.file):
            if partition in (None, trajectory.partition):
                yield trajectory

    def episodes(self, partition: str | None = None) -> pandas.DataFrame:
        """Return one row per episode (and attempt), over all its sessions.

        Reward and success of one that an infrastructure failure ended, or that was cancelled, are missing: it has none.

        Columns: task_id, group_id, episode_id, trajectory_id (of the main session), partition, attempt, seed, reward,
        success, turns, tool_calls, tool_errors, sampled_tokens, forks, stop_reason, error; ``reward/NAME`` for the sum
        of each named reward, and ``metric/NAME`` for each metric of its trajectories, summed.
        """
        frame = _frame(self._episodes(partition), _EPISODES)
        frame["success"] = frame["success"].astype("boolean")
        return frame

    def turns(self, partition: str | None = None) -> pandas.DataFrame:
        """Return one row per model call.

        Columns: trajectory_id, episode_id, task_id, partition, agent, policy, turn_id, number (in commit order),
        prompt_tokens, sampled_tokens, finish_reason, weight_version (of the first id), logprob (mean over its ids),
        tool_calls, reward (of its events), fork, text; ``metric/NAME`` for what was measured in it.
        """
        return _frame(self._turns(partition), _TURNS)

    def tool_calls(self, partition: str | None = None) -> pandas.DataFrame:
        """Return one row per tool call that the model wrote.

        Columns: trajectory_id, episode_id, task_id, partition, turn_id, call_id, tool, arguments (JSON text), answer
        (text; None where none was given before the session ended).
        """
        return _frame(self._tool_calls(partition), _CALLS)

    def tokens(self, partition: str | None = None) -> pandas.DataFrame:
        """Return one row per token id that a model saw or sampled; ids that branches share are there once.

        Columns: trajectory_id, episode_id, task_id, partition, segment, turn_id (None for context), place (in its
        segment), token_id, sampled, trained (sampled, and not left out of training), logprob and weight_version (NaN
        and -1 where not sampled).
        """
        frames = [_token_frame(trajectory) for trajectory in self.trajectories(partition)]
        if not frames:
            return _frame((), _TOKENS)
        return _pandas().concat(frames, ignore_index=True)

    def _episodes(self, partition: str | None) -> Iterator[dict[str, Any]]:
        for members in by_episode(map(_without_texts, self.trajectories(partition))):
            [row] = episode_rows(members, success_reward=self.success_reward, role=self.role)
            main = next((member for member in members if member.agent == "main"), members[0])
            metrics: defaultdict[str, float] = defaultdict(float)
            for member in members:
                for name, value in member.metrics.items():
                    metrics[f"metric/{name}"] += value
            yield {
                **_ids(main), "group_id": row.group_id, "attempt": main.attempt, "seed": main.seed,
                "reward": row.reward if row.counts else np.nan, "success": row.success if row.counts else None,
                "turns": row.turns, "tool_calls": row.tool_calls, "tool_errors": row.tool_errors["all"],
                "sampled_tokens": row.sampled_tokens, "forks": sum(row.forks.values()),
                "stop_reason": str(row.stop_reason), "error": row.error,
                **{f"reward/{name}": value for name, value in row.rewards.items()}, **metrics,
            }  # fmt: skip

    def _turns(self, partition: str | None) -> Iterator[dict[str, Any]]:
        for trajectory in self.trajectories(partition):
            rewards: defaultdict[str | None, float] = defaultdict(float)
            for turn_id, _, value in trajectory.rewards:
                rewards[turn_id] += value
            for number, turn in enumerate(trajectory.turns()):
                measured = trajectory.turn_metrics.get(turn.turn_id, {})
                begin, end = trajectory.turn_times.get(turn.turn_id, (np.nan, np.nan))
                yield {
                    **_ids(trajectory), "agent": trajectory.agent, "policy": trajectory.policy,
                    **_turn(trajectory, turn), "number": number, "reward": rewards.get(turn.turn_id, 0.0),
                    "seconds": end - begin,
                    **{f"metric/{name}": value for name, value in measured.items()},
                }  # fmt: skip

    def _tool_calls(self, partition: str | None) -> Iterator[dict[str, Any]]:
        for trajectory in self.trajectories(partition):
            children: defaultdict[int, list[Segment]] = defaultdict(list)
            for segment in trajectory.segments:
                children[segment.parent].append(segment)
            for turn in trajectory.turns():
                answers = _answers(children[turn.sampled.index])
                for call in _calls(turn.sampled):
                    function = call.get("function", call)
                    arguments = function.get("arguments")
                    text = arguments if isinstance(arguments, str) else _json(arguments)
                    yield {
                        **_ids(trajectory), "turn_id": turn.turn_id, "call_id": call.get("id"),
                        "tool": function.get("name"), "arguments": text, "answer": answers.get(call.get("id")),
                    }  # fmt: skip


_IDS = ("trajectory_id", "episode_id", "task_id", "partition")
_EPISODES = (
    *_IDS, "group_id", "attempt", "seed", "reward", "success", "turns", "tool_calls", "tool_errors", "sampled_tokens",
    "forks", "stop_reason", "error",
)  # fmt: skip
_TURNS = (
    *_IDS, "agent", "policy", "turn_id", "number", "prompt_tokens", "sampled_tokens", "finish_reason",
    "weight_version", "logprob", "tool_calls", "reward", "seconds", "fork", "text",
)  # fmt: skip
_CALLS = (*_IDS, "turn_id", "call_id", "tool", "arguments", "answer")
_TOKENS = (*_IDS, "segment", "turn_id", "place", "token_id", "sampled", "trained", "logprob", "weight_version")


def _pandas() -> Any:
    try:
        return import_module("pandas")
    except ImportError as error:
        raise ConfigError(f"tables of a run need pandas: pip install 'turnwise-rl[tables]' ({error})") from error


def _frame(rows: Iterable[Mapping[str, Any]], columns: tuple[str, ...]) -> pandas.DataFrame:
    """Return a frame with these columns first and the others, sorted, behind them."""
    frame_rows = list(rows)
    more = sorted({name for row in frame_rows for name in row} - set(columns))
    frame: pandas.DataFrame = _pandas().DataFrame.from_records(frame_rows, columns=[*columns, *more])
    return frame


def _ids(trajectory: Trajectory) -> dict[str, str]:
    return {
        "trajectory_id": trajectory.id,
        "episode_id": trajectory.episode_id,
        "task_id": trajectory.task_id,
        "partition": trajectory.partition,
    }


def _without_texts(trajectory: Trajectory) -> Trajectory:
    """Return a trajectory without what is large and no figure needs."""
    segments = [replace(segment, messages=(), tools=None) for segment in trajectory.segments]
    return replace(trajectory, segments=segments)


def _turn(trajectory: Trajectory, turn: Turn) -> dict[str, Any]:
    sampled = turn.sampled
    return {
        "turn_id": turn.turn_id,
        "prompt_tokens": sum(len(trajectory.segments[index].token_ids) for index in turn.path),
        "sampled_tokens": len(sampled.token_ids),
        "finish_reason": sampled.finish_reason,
        "weight_version": sampled.weight_versions[0][0] if sampled.weight_versions else -1,
        "logprob": float(sampled.logprobs.mean()) if sampled.logprobs is not None and len(sampled.logprobs) else np.nan,
        "tool_calls": len(_calls(sampled)),
        "fork": sampled.fork or next((trajectory.segments[index].fork for index in turn.path[-1:]), None),
        "text": "".join(_text(message.get("content")) for message in sampled.messages),
    }


def _calls(segment: Segment) -> list[dict[str, Any]]:
    return [call for message in segment.messages for call in message.get("tool_calls") or ()]


def _json(value: Any) -> str:
    try:
        return orjson.dumps(value).decode()
    except TypeError:
        # A model may write numbers of more than 64 bits.
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _answers(contexts: Iterable[Segment]) -> dict[str | None, str]:
    """Return the answers in the segments behind a turn, by call id; of several branches the first."""
    answers: dict[str | None, str] = {}
    for segment in contexts:
        for message in segment.messages:
            if message.get("role") == "tool":
                answers.setdefault(message.get("tool_call_id"), _text(message.get("content")))
    return answers


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.get("text", f"[{part.get('type')}]") for part in content)


def _token_frame(trajectory: Trajectory) -> pandas.DataFrame:
    segments = [segment for segment in trajectory.segments if len(segment.token_ids)]
    sizes = [len(segment.token_ids) for segment in segments]
    logprobs = [np.full(size, np.nan, np.float32) for size in sizes]
    versions = [np.full(size, -1, np.int32) for size in sizes]
    for segment, segment_logprobs, version in zip(segments, logprobs, versions, strict=True):
        if segment.logprobs is not None:
            segment_logprobs[:] = segment.logprobs
        for number, start, end in segment.weight_versions:
            version[start:end] = number
    columns = {
        "segment": np.repeat(np.array([segment.index for segment in segments], np.int64), sizes),
        "turn_id": np.repeat(np.array([segment.turn_id for segment in segments], object), sizes),
        "place": _joined([np.arange(size) for size in sizes], np.int64),
        "token_id": _joined([segment.token_ids for segment in segments], np.int32),
        "sampled": np.repeat(np.array([segment.sampled for segment in segments], np.bool_), sizes),
        "trained": _joined([segment.trained for segment in segments], np.bool_),
        "logprob": _joined(logprobs, np.float32),
        "weight_version": _joined(versions, np.int32),
    }
    frame: pandas.DataFrame = _pandas().DataFrame({**_ids(trajectory), **columns}, columns=list(_TOKENS))
    return frame


def _joined(parts: list[Any], dtype: Any) -> npt.NDArray[Any]:
    return np.concatenate([np.zeros(0, dtype), *parts]).astype(dtype, copy=False)
