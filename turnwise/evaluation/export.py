"""Exports of a run's trajectories: conversations for other programs."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, TypeAlias

import orjson

from turnwise.errors import ConfigError, FormatError
from turnwise.evaluation.tables import run_file
from turnwise.recorder.branches import branch_trajectories, selected_branch
from turnwise.trajectory import Trajectory, messages_of
from turnwise.trajectory_file import effective_trajectories

Format: TypeAlias = Literal["jsonl", "sft", "preference"]


@dataclass(frozen=True, slots=True)
class Choice:
    """Which trajectories are exported.

    Attributes:
        partition: Only ``train`` or only ``val``; None for both.
        policy: Only trajectories of this policy; None for all.
        min_reward: Minimum reward; None for any. Trajectories that ended in an error have none.
        best_per_task: Most trajectories of a task, best first; ties prefer fewer sampled tokens. None for all.
    """

    partition: str | None = None
    policy: str | None = None
    min_reward: float | None = None
    best_per_task: int | None = None

    def describe(self) -> str:
        """Describe the choice."""
        criteria = {name: getattr(self, name) for name in self.__slots__}
        return ", ".join(f"{name} {value}" for name, value in criteria.items() if value is not None) or "any kind"

    def of(self, trajectories: Iterable[Trajectory]) -> Iterator[Trajectory]:
        """Yield the chosen ones, in order; with ``best_per_task`` all are read first, and then the best only kept."""
        matches = (trajectory for trajectory in trajectories if self._fits(trajectory))
        if self.best_per_task is None:
            yield from matches
            return
        tasks: defaultdict[str, list[tuple[float, int, int, Trajectory]]] = defaultdict(list)
        for number, trajectory in enumerate(matches):
            ranked = tasks[trajectory.task_id]
            ranked.append((-trajectory.reward, trajectory.sampled_tokens, number, trajectory))
            ranked.sort(key=lambda entry: entry[:3])
            del ranked[self.best_per_task :]
        best = (entry for ranked in tasks.values() for entry in ranked)
        for *_, trajectory in sorted(best, key=lambda entry: entry[2]):
            yield trajectory

    def _fits(self, trajectory: Trajectory) -> bool:
        if self.partition not in (None, trajectory.partition) or self.policy not in (None, trajectory.policy):
            return False
        return self.min_reward is None or (trajectory.error is None and trajectory.reward >= self.min_reward)


def export_run(source: Path, target: Path, form: Format, choice: Choice | None = None) -> int:
    """Write a run's trajectories in another form; the target appears whole or not at all.

    ``jsonl`` has a conversation a line, one for each branch: ids of task, group, episode and trajectory, partition,
    agent, policy, branch (its place among the trajectory's), reward, rewards by name, stop_reason, error, tools and
    messages, both in OpenAI's form. ``sft`` has messages and tools alone, of trajectories without an error: what
    ``turnwise sft`` and other trainers read. ``preference`` has prompt, chosen, rejected and tools, of two such
    trajectories: see :func:`preference_pairs`. ``datasets.load_dataset("json")`` reads all three; tables come from
    :func:`turnwise.evaluation.tables.read_run`.

    Args:
        source: A run directory, or a file of trajectories.
        target: File or folder to write; must be missing.
        form: The format.
        choice: Which trajectories; all without one.

    Returns:
        The number of conversations.

    Raises:
        ConfigError: The target exists or cannot be written, or nothing is chosen.
        FormatError: There is no such file, or it is damaged.
    """
    choice = choice or Choice()
    file = run_file(source)
    if target.exists():
        raise ConfigError(f"{target} exists: name a file or folder that does not")
    writers: dict[str, Callable[[], int]] = {
        "jsonl": lambda: _write_lines(conversations(choice.of(branches(file))), part),
        "sft": lambda: _write_lines(_sft_rows(choice.of(branches(file, selected_only=True))), part),
        "preference": lambda: _write_lines(preference_pairs(branches(file, selected_only=True), choice), part),
    }
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as scratch:
            part = Path(scratch) / target.name
            count = writers[form]()
            if not count:
                raise ConfigError(f"{file} holds nothing to export of {choice.describe()}: choose others")
            os.rename(part, target)
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error.strerror or error}: name another path") from error
    return count


def branches(file: Path, *, selected_only: bool = False) -> Iterator[Trajectory]:
    """Yield the trajectories of a file, of forked ones each branch. Raises FormatError.

    Args:
        file: The trajectories.
        selected_only: Whether to yield the selected branch alone of searched ones.
    """
    for _, trajectory in effective_trajectories(file):
        if selected_only and trajectory.search is not None:
            yield selected_branch(trajectory)
        else:
            yield from branch_trajectories(trajectory)


def conversations(trajectories: Iterable[Trajectory]) -> Iterator[dict[str, Any]]:
    """Yield the branches of trajectories as rows; see :func:`export_run`. Raises FormatError without messages."""
    for trajectory in trajectories:
        rewards: defaultdict[str, float] = defaultdict(float)
        for _, name, value in trajectory.rewards:
            rewards[name] += value
        for number, leaf in enumerate(trajectory.leaves()):
            path = trajectory.path(leaf)
            messages = [_openai_message(message) for segment in path for message in messages_of(segment)]
            if not messages:
                raise FormatError(f"trajectory {trajectory.id} was recorded without its messages")
            yield {
                "task_id": trajectory.task_id, "group_id": trajectory.group_id, "episode_id": trajectory.episode_id,
                "trajectory_id": trajectory.id, "partition": trajectory.partition, "agent": trajectory.agent,
                "policy": trajectory.policy, "branch": number, "reward": trajectory.reward, "rewards": dict(rewards),
                "stop_reason": str(trajectory.stop_reason), "error": trajectory.error,
                "tools": [dict(tool) for tool in path[0].tools or ()], "messages": messages,
            }  # fmt: skip


def preference_pairs(trajectories: Iterable[Trajectory], choice: Choice) -> Iterator[dict[str, Any]]:
    """Yield preference pairs in TRL's conversational form: prompt, chosen and rejected messages, and tools as JSON.

    The conversations of an agent in a group are paired, best with worst, then inwards; equal rewards are no pair. The
    prompt is what both begin with, up to a message that the model answers. ``choice`` chooses the chosen ones.

    Args:
        trajectories: The trajectories; those that ended in an error are left out.
        choice: Which ones; ``min_reward`` is that of the chosen one, ``best_per_task`` the most pairs of a group.
    """
    groups: defaultdict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in _answered_rows(replace(choice, min_reward=None, best_per_task=None).of(trajectories)):
        groups[row["group_id"], row["agent"]].append(row)
    for rows in groups.values():
        ranked = sorted(rows, key=lambda row: -row["reward"])
        pairs = list(zip(ranked[: len(ranked) // 2], reversed(ranked), strict=False))
        for better, worse in pairs[: choice.best_per_task]:
            reaches_minimum = choice.min_reward is None or better["reward"] >= choice.min_reward
            chosen, rejected = better["messages"], worse["messages"]
            length = _prompt_length(chosen, rejected)
            if better["reward"] > worse["reward"] and reaches_minimum and length and chosen != rejected:
                sides = {"chosen": chosen[length:], "rejected": rejected[length:]}
                yield {"prompt": chosen[:length], **sides, "tools": _text(better["tools"])}


def _prompt_length(chosen: list[dict[str, Any]], rejected: list[dict[str, Any]]) -> int:
    """Return the number of first messages that two conversations share, less the assistant's at their end."""
    pairs = zip(chosen, rejected, strict=False)
    shared = sum(1 for _ in takewhile(lambda messages: messages[0] == messages[1], pairs))
    while shared and chosen[shared - 1]["role"] == "assistant":
        shared -= 1
    return shared


def _sft_rows(trajectories: Iterable[Trajectory]) -> Iterator[dict[str, Any]]:
    for row in _answered_rows(trajectories):
        yield {"messages": row["messages"], "tools": row["tools"]}


def _answered_rows(trajectories: Iterable[Trajectory]) -> Iterator[dict[str, Any]]:
    """Yield the conversations without an error, up to their last message of the assistant's."""
    completed = (trajectory for trajectory in trajectories if trajectory.error is None)
    for row in conversations(completed):
        # A conversation that ends with a tool's answer teaches nothing at its end; trainers refuse it.
        messages = row["messages"]
        while messages and messages[-1]["role"] != "assistant":
            messages = messages[:-1]
        if messages:
            yield row | {"messages": messages}


def _openai_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message with the arguments of its calls as JSON text."""
    converted = dict(message)
    if calls := message.get("tool_calls"):
        converted["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _text(call["function"].get("arguments"))}}
            for call in calls
        ]
    return converted


def _text(value: Any) -> str:
    # orjson refuses numbers of more than 64 bits, which a model may write.
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _write_lines(rows: Iterable[dict[str, Any]], file: Path) -> int:
    count = 0
    with file.open("wb") as out:
        for row in rows:
            out.write(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE))
            count += 1
    return count
