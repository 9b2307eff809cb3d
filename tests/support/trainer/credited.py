"""Trajectories of a few turns with rewards, and the advantages that a credit assignment gives their turns."""

from __future__ import annotations

import numpy as np

from turnwise.config import load_config
from turnwise.trainer.algorithms.config import AlgorithmConfig
from turnwise.trainer.batch.experience import Experience, build_experience, collect
from turnwise.trajectory import Segment, Trajectory, TrajectoryGroup

TOKENS = 3


def trajectory(
    name: str, turns: int, rewards: list[tuple[int | None, float]], *, group: str = "g", fork: bool = False
) -> Trajectory:
    """Contexts and turns in one branch; with ``fork`` the last turn stands beside the one before it."""
    segments: list[Segment] = []
    for number in range(turns):
        parent = len(segments) - 1
        if fork and number == turns - 1 and number:
            parent = segments[parent - 1].parent
        segments.append(Segment(len(segments), parent, "context", np.arange(2, dtype=np.int32)))
        segments.append(
            Segment(
                len(segments), len(segments) - 1, "sampled", np.arange(10, 10 + TOKENS, dtype=np.int32),
                turn_id=f"{name}{number}", logprobs=-np.ones(TOKENS, np.float32), weight_versions=((0, 0, TOKENS),),
                finish_reason="stop",
            )
        )  # fmt: skip
    events = [(None if turn is None else f"{name}{turn}", "r", value) for turn, value in rewards]
    return Trajectory(name, name, group, "task", segments=segments, rewards=events)


def build(
    members: list[Trajectory], credit: object = "same", *, norm_by_std: bool = False, **config: object
) -> Experience:
    options = {} if norm_by_std else {"advantage_options": {"norm_by_std": False}}
    algorithm = load_config(AlgorithmConfig, defaults={"credit": credit, **options, **config})
    return build_experience(collect([TrajectoryGroup("g", "task", members)]), algorithm, temperature=1.0)


def turn_advantages(result: Experience) -> dict[str, list[float]]:
    """The advantage of each trained turn, by trajectory; every trained token of a turn has the same."""
    credit: dict[str, dict[int, float]] = {}
    for row in result.rows:
        values = np.broadcast_to(row.advantage, row.sample.input_ids.shape)
        assert not isinstance(row.advantage, np.ndarray) or not values[row.sample.turn_ids < 0].any()
        for turn in set(row.sample.turn_ids[row.sample.loss_mask].tolist()):
            of_turn = set(values[row.sample.turn_ids == turn].tolist())
            assert len(of_turn) == 1
            credit.setdefault(row.sample.trajectory_id, {})[turn] = of_turn.pop()
    return {name: [of[turn] for turn in sorted(of)] for name, of in credit.items()}
