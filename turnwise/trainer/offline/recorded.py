"""Recorded trajectories as data: which are read, which are good, which make pairs.

Owns: :func:`read_recorded`, :func:`keep_good`, :func:`make_pairs` and :func:`spoken`. Refuses: encoding anything: what
was recorded is trained as it was sampled, and only with the tokenizer that it was recorded with.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import orjson

from turnwise.errors import FormatError, TaskError
from turnwise.inference.core import Renderer
from turnwise.rollout.audit import TRAJECTORIES
from turnwise.rollout.writer import read_trajectories
from turnwise.trainer.offline.config import FilterConfig, PairingConfig, RecordedConfig
from turnwise.trajectory import Trajectory
from turnwise.types import text_of


def read_recorded(config: RecordedConfig, renderer: Renderer) -> list[Trajectory]:
    """Return the trajectories that can be learned from: no error ended them, and their tokens are known.

    Raises:
        TaskError: There is no such file, a line cannot be read, nothing is left, or they were recorded with another
            tokenizer than the renderer's.
    """
    file = config.path / TRAJECTORIES if config.path.is_dir() else config.path
    if not file.is_file():
        raise TaskError(
            f"trajectories.path is {config.path}: there is no file {file}: give the directory of a run or an "
            f"evaluation, which holds {TRAJECTORIES}, or such a file"
        )
    try:
        every = list(read_trajectories(file))
    except FormatError as error:
        raise TaskError(f"trajectories.path: {error}") from error
    mine = [each for each in every if each.policy == config.policy and config.partition in (None, each.partition)]
    found = [each for each in mine if each.error is None and each.recorded == "tokens" and each.sampled_tokens]
    if not found:
        partition = f" and partition {config.partition}" if config.partition else ""
        policies = ", ".join(sorted({each.policy for each in every})) or "none"
        raise TaskError(
            f"{file} holds {len(every)} trajectories (policies: {policies}), but none of policy "
            f"{config.policy}{partition} that ended without an error and was recorded with token ids"
        )
    for trajectory in found:
        _check_tokenizer(trajectory, renderer, file)
    return found


def keep_good(trajectories: Sequence[Trajectory], config: FilterConfig) -> list[Trajectory]:
    """Return those that a model should learn to repeat, in their order.

    Raises:
        TaskError: None is good enough.
    """
    tasks: dict[str, list[tuple[int, Trajectory]]] = defaultdict(list)
    for index, trajectory in enumerate(trajectories):
        if config.min_reward is None or trajectory.reward >= config.min_reward:
            tasks[trajectory.task_id].append((index, trajectory))
    kept: list[tuple[int, Trajectory]] = []
    for members in tasks.values():
        seen: set[bytes] = set()
        mine: list[tuple[int, Trajectory]] = []
        for index, each in members:
            tokens = _tokens(each)
            if not (config.dedupe and tokens in seen):
                mine.append((index, each))
            seen.add(tokens)
        if config.best_per_task is not None:
            mine = sorted(mine, key=lambda item: (-item[1].reward, item[1].sampled_tokens, item[0]))
        kept += mine[: config.best_per_task]
    if not kept:
        best = max(each.reward for each in trajectories)
        raise TaskError(
            f"trajectories.min_reward is {config.min_reward}, but the best of {len(trajectories)} has reward {best:g}"
        )
    return [each for _, each in sorted(kept, key=lambda item: item[0])]


def make_pairs(trajectories: Sequence[Trajectory], config: PairingConfig) -> list[tuple[Trajectory, Trajectory]]:
    """Return (better, worse) trajectories of the same group: best and worst first, then what lies between them.

    Raises:
        TaskError: No group holds two that differ enough.
    """
    groups: dict[str, list[Trajectory]] = defaultdict(list)
    for trajectory in trajectories:
        groups[trajectory.group_id].append(trajectory)
    pairs: list[tuple[Trajectory, Trajectory]] = []
    for members in groups.values():
        ranked = sorted(members, key=lambda each: -each.reward)
        for place in range(min(config.pairs_per_group, len(ranked) // 2)):
            better, worse = ranked[place], ranked[-1 - place]
            gap = better.reward - worse.reward
            if gap > 0 and gap >= config.min_gap:
                pairs.append((better, worse))
    if not pairs:
        raise TaskError(
            f"the {len(groups)} groups of trajectories.path hold no two of which one has a reward larger by "
            f"trajectories.min_gap ({config.min_gap:g}): sample more than one episode of each task, or lower it"
        )
    return pairs


def spoken(trajectory: Trajectory) -> list[dict[str, Any]]:
    """Return the messages of a trajectory's last branch, in OpenAI's form.

    Raises:
        TaskError: They were not recorded.
    """
    path = trajectory.path(trajectory.leaves()[-1])
    messages = [message for segment in path for message in segment.messages]
    if not messages or not path[-1].messages:
        raise TaskError(f"trajectory {trajectory.id} was recorded without its messages: nothing can be judged")
    return messages


def _tokens(trajectory: Trajectory) -> bytes:
    return orjson.dumps([segment.ids.tolist() for segment in trajectory.segments])


def _check_tokenizer(trajectory: Trajectory, renderer: Renderer, file: object) -> None:
    """See that the recorded ids mean to this tokenizer what they meant when they were recorded."""
    for segment in trajectory.segments:
        if segment.parent >= 0 or segment.sampled:
            continue
        said = [text for message in segment.messages if (text := text_of(message).strip())]
        if not said:
            continue
        try:
            text = renderer.decode(segment.ids)
        except (IndexError, KeyError, OverflowError, ValueError):
            text = ""
        if not any(each in text for each in said):
            raise TaskError(
                f"{file}: trajectory {trajectory.id}: its ids do not mean its messages to the tokenizer of "
                "model.path: it was recorded with another model's; train a model with the tokenizer of that one"
            )
