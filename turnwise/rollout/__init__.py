"""Rollouts: from tasks to groups of trajectories."""

from turnwise.rollout.config import RolloutConfig, SpecConfig
from turnwise.rollout.core import (
    BatchRef,
    EpisodeOutcome,
    EpisodeSpec,
    ReplayBuffer,
    RolloutManager,
    RolloutParts,
    RolloutRequest,
)
from turnwise.rollout.managers import current_rollout
from turnwise.rollout.producer import RolloutProducer
from turnwise.rollout.replay.buffer import LocalReplayBuffer
from turnwise.rollout.runner import EpisodeRunner

__all__ = [
    "BatchRef",
    "EpisodeOutcome",
    "EpisodeRunner",
    "EpisodeSpec",
    "LocalReplayBuffer",
    "ReplayBuffer",
    "RolloutConfig",
    "RolloutManager",
    "RolloutParts",
    "RolloutProducer",
    "RolloutRequest",
    "SpecConfig",
    "current_rollout",
]
