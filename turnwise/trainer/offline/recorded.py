"""Recorded trajectories as data to train on: reading them, and choosing among them."""

from __future__ import annotations

from collections.abc import Sequence

import orjson

from turnwise.errors import FormatError, TaskError
from turnwise.evaluation.export import Choice
from turnwise.images import texts_of
from turnwise.model.core import Renderer
from turnwise.recorder.branches import branch_trajectories
from turnwise.trainer.config.offline import RecordedConfig
from turnwise.trajectory import Trajectory
from turnwise.trajectory_file import TRAJECTORIES, effective_trajectories


def read_recorded(config: RecordedConfig, renderer: Renderer) -> list[Trajectory]:
    """Return the recorded trajectories without errors and with known tokens; of forked ones each branch.

    Raises:
        TaskError: There is no such file, a line cannot be read, nothing is left, or they were recorded with another
            tokenizer than the renderer's.
    """
    file = config.path / TRAJECTORIES if config.path.is_dir() else config.path
    if not file.is_file():
        raise TaskError(
            f"trajectories.path is {config.path}: no such file: {file}: give the directory of a run or an "
            f"evaluation, which holds {TRAJECTORIES}, or such a file"
        )
    try:
        recorded = [trajectory for _, trajectory in effective_trajectories(file)]
    except FormatError as error:
        raise TaskError(f"trajectories.path: {error}") from error
    usable = [
        trajectory
        for trajectory in recorded
        if (trajectory.policy == config.policy and config.partition in (None, trajectory.partition))
        and (trajectory.error is None and trajectory.recorded == "tokens" and trajectory.sampled_tokens)
    ]
    if not usable:
        partition = f" and partition {config.partition}" if config.partition else ""
        policies = ", ".join(sorted({trajectory.policy for trajectory in recorded})) or "none"
        raise TaskError(
            f"{file} holds {len(recorded)} trajectories (policies: {policies}), but none of policy "
            f"{config.policy}{partition} that ended without an error and was recorded with token ids"
        )
    for trajectory in usable:
        _check_tokenizer(trajectory, renderer, file)
    return [branch for trajectory in usable for branch in branch_trajectories(trajectory)]


def filter_trajectories(trajectories: Sequence[Trajectory], config: RecordedConfig) -> list[Trajectory]:
    """Filter trajectories, keeping their order.

    Raises:
        TaskError: None passes.
    """
    seen: set[tuple[str, bytes]] = set()
    unique: list[Trajectory] = []
    for trajectory in Choice(min_reward=config.min_reward).of(trajectories):
        tokens = trajectory.task_id, _tokens(trajectory)
        if not (config.dedupe and tokens in seen):
            unique.append(trajectory)
        seen.add(tokens)
    if not unique:
        best = max(trajectory.reward for trajectory in trajectories)
        raise TaskError(
            f"trajectories.min_reward is {config.min_reward}, but the best of {len(trajectories)} has reward {best:g}"
        )
    return list(Choice(best_per_task=config.best_per_task).of(unique))


def _tokens(trajectory: Trajectory) -> bytes:
    return orjson.dumps(
        [[segment.token_ids.tolist(), [media.digest for media in segment.media]] for segment in trajectory.segments]
    )


def _check_tokenizer(trajectory: Trajectory, renderer: Renderer, file: object) -> None:
    """Check that the ids were recorded with this tokenizer."""
    for segment in trajectory.segments:
        if segment.parent >= 0 or segment.sampled:
            continue
        texts = [text.strip() for message in segment.messages for text in texts_of(message) if text.strip()]
        if not texts:
            continue
        try:
            text = renderer.decode(segment.token_ids)
        except (IndexError, KeyError, OverflowError, ValueError):
            text = ""
        if not any(quote in text for quote in texts):
            raise TaskError(
                f"{file}: trajectory {trajectory.id}: its ids do not encode its messages with the tokenizer of "
                "model.path: it was recorded with another tokenizer; train a model that has that one"
            )
