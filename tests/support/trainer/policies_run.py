"""A run of seconds in which solver and critic are two trained policies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from turnwise.trainer.config.train import TrainConfig

# Every mode of a run, as changes of its configuration.
MODES: dict[str, dict[str, Any]] = {
    "sync": {},
    "colocate": {"mode": "colocate_async"},
    "separate": {"mode": "separate_async", "overlap": {"stream": 2}},
}
ROLES = {"solver": "solver", "critic": "critic_agent"}


def solver_and_critic(runs: Path, policies: dict[str, dict[str, Any]], **changes: Any) -> TrainConfig:
    """Return the configuration of two steps over ``lookup``, whose roles are the policies of these names.

    Args:
        runs: Where the run's folder ``run`` is made.
        policies: Of ``solver`` and ``critic_agent``, the configurations.
        changes: Top-level keys over it.
    """
    plain: dict[str, Any] = {
        "name": "run",
        "runs": runs,
        "steps": 2,
        "seed": 3,
        "tasks": "turnwise.envs.basic.lookup:tasks?n=7&split=train",
        "policies": policies,
        "rollout": {
            "env": {"name": "lookup"},
            "agent": {"name": "support.agents.solver_critic:SolverAndCritic"},
            "roles": ROLES,
            "group_size": 4,
            "max_tokens_per_turn": 24,
        },
        "batch": {"groups": 2, "max_tokens_per_micro_batch": 256},
        "checkpoint": {"every": 1, "keep": None},
    }
    return TrainConfig.model_validate(plain | changes)
