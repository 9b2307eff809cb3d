"""The arms of a live policy's traffic: the last approved weights, and newer ones; and their state in checkpoints."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Self

from pydantic import Field

from turnwise.config import Section
from turnwise.errors import ConfigError
from turnwise.ext.live.sequential_test import ArmRewards
from turnwise.seeding import stable_hash
from turnwise.trainer.config.train import TrainConfig
from turnwise.trajectory import Trajectory
from turnwise.trajectory_file import TrajectoryEntry

APPROVED: Final = "approved"
"""Policy of the sessions that the approved weights serve, and the folder of a run that has them."""
CANDIDATE: Final = "candidate"
STATE: Final = "live"
"""Key of ``tasks`` in a checkpoint's state: ``sessions``, the step that learned from each by its id; ``undone``, the
step that went back behind it; ``baselines``; ``canary``, a :class:`CanaryState`."""


def is_session(trajectory: Trajectory | TrajectoryEntry) -> bool:
    """Return whether a user's session was recorded, not an episode that was sampled from the task of one."""
    return trajectory.group_id == trajectory.id


class CanaryConfig(Section):
    """The rails of a live policy: ``custom.live.canary``.

    Attributes:
        share: Share of sessions that the approved weights serve.
        tolerance: By how much the mean reward of newer weights may be lower.
        kl_budget: Most nats per sampled token by which newer weights may differ; None for no limit.
    """

    share: Annotated[float, Field(gt=0, lt=1)] = 0.25
    tolerance: Annotated[float, Field(ge=0)] = 0.0
    kl_budget: Annotated[float, Field(gt=0)] | None = 0.5

    def check(self, config: TrainConfig) -> None:
        """Check that a run can decide. Raises ConfigError."""
        policy = config.of_policy(next(iter(config.policies)))
        transport, temperature = policy.policy.weight_transport.name, config.rollout.temperature
        if config.eval is None:
            problem = "nothing is promoted without an evaluation: add eval with held-out tasks"
        elif config.layout == "colocated":
            problem = "layout is colocated, but approved weights are served during updates: set separate"
        elif policy.inference.urls:
            problem = "inference.url names servers of one version, but two are served: remove it"
        elif transport != "shared_memory":
            problem = f"weight_transport is {transport}, which writes no file for servers that die: set shared_memory"
        elif self.kl_budget is not None and temperature != 1:
            problem = f"rollout.temperature is {temperature:g}, but servers score at 1: set 1, or kl_budget to null"
        else:
            return
        raise ConfigError(f"custom.live.canary: {problem}")

    def serves_approved(self, seed: int, session_id: str) -> bool:
        """Return whether a session, ``PART-DIGEST`` or ``DIGEST``, is one of the approved weights."""
        return stable_hash("arm", seed, session_id.rpartition("-")[2]) < self.share * 2**63


@dataclass(slots=True)
class CanaryState:
    """What has been decided, and the test since then.

    Attributes:
        approved: The step whose weights are approved.
        since: The weight version of the last decision: both arms had these weights then.
        held_out: Mean reward of the approved weights on held-out tasks, and its standard error.
        baselines: Running baselines at the approval.
        arms: Rewards of the sessions of each arm since the last decision.
        evaluate_at: Sessions of the candidate before it is evaluated again.
    """

    approved: int
    since: int
    held_out: tuple[float, float]
    baselines: dict[str, Any]
    arms: dict[str, ArmRewards] = field(default_factory=lambda: {CANDIDATE: ArmRewards(), APPROVED: ArmRewards()})
    evaluate_at: int = 0
    promotions: int = 0
    rollbacks: int = 0

    @classmethod
    def of(cls, record: dict[str, Any]) -> Self:
        """Return the state of a checkpoint."""
        return cls(**{**record, "arms": {name: ArmRewards(**arm) for name, arm in record["arms"].items()}})

    def restart(self, version: int) -> None:
        """Begin the test anew after a decision."""
        self.since, self.evaluate_at = version, 0
        self.arms = {CANDIDATE: ArmRewards(), APPROVED: ArmRewards()}

    def count(self, trajectories: Sequence[Trajectory]) -> None:
        """Add the sessions that one arm's weights since the last decision sampled; their rewards are feedback alone."""
        for trajectory in (trajectory for trajectory in trajectories if trajectory.rewards and is_session(trajectory)):
            reward = math.fsum(value for _, name, value in trajectory.rewards if name != "baseline")
            versions = {version for segment in trajectory.segments for version, _, _ in segment.weight_versions}
            if trajectory.frozen and versions == {self.since}:
                self.arms[APPROVED].add(reward)
            elif not trajectory.frozen and min(versions, default=0) > self.since:
                self.arms[CANDIDATE].add(reward)
