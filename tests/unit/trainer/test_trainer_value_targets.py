"""From what a critic says of states to the advantages and returns of rows: time over branches, gaps, open ends."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from turnwise.errors import TrainError
from turnwise.trainer.algorithms.config import AlgorithmConfig
from turnwise.trainer.batch.experience import Experience, StepTrajectories, build_experience, collect
from turnwise.trainer.batch.packing import pack
from turnwise.trainer.batch.value_targets import token_rewards
from turnwise.trainer.config.train import BatchConfig
from turnwise.trainer.core import MicroBatch
from turnwise.trainer.learn.critic import critic_values
from turnwise.trainer.observe.metrics import meaning
from turnwise.trajectory import Segment, Trajectory, TrajectoryGroup
from turnwise.types import StopReason


class Reader:
    """A critic that expects of a state a tenth of the id that stands there."""

    shared = False

    def __init__(self, *bootstrap: StopReason) -> None:
        self.bootstrap = bootstrap
        self.learner = self
        self.asked = 0

    def values(self, batches: Sequence[MicroBatch]) -> list[Tensor]:
        self.asked += 1
        return [batch.input_ids[0, batch.predictors] / 10 for batch in batches]


def context(index: int, parent: int, *ids: int) -> Segment:
    return Segment(index, parent, "context", np.array(ids, np.int32))


def sampled(index: int, parent: int, *ids: int) -> Segment:
    count = len(ids)
    return Segment(
        index, parent, "sampled", np.array(ids, np.int32), turn_id=f"t{index}",
        logprobs=-np.ones(count, np.float32), weight_versions=((0, 0, count),), finish_reason="stop",
    )  # fmt: skip


def interleaved(stop: StopReason = StopReason.COMPLETED, group: str = "g") -> Trajectory:
    """Two branches that take turns: A samples 21 22, then B samples 41, then A samples 23 and hears 9 at the end.

    A: 5 6 | 21 22 | 7 | 23 | 9, B: 8 | 41.
    """
    segments = [
        context(0, -1, 5, 6), sampled(1, 0, 21, 22), context(2, -1, 8), sampled(3, 2, 41),
        context(4, 1, 7), sampled(5, 4, 23), context(6, 5, 9),
    ]  # fmt: skip
    rewards = [("t1", "step", 1.0), ("t3", "step", 2.0), (None, "score", 4.0)]
    return Trajectory(f"x-{group}", "e", group, "task", segments=segments, rewards=rewards, stop_reason=stop)


def experience(
    members: list[Trajectory], critic: Reader, *, max_tokens_per_row: int | None = None, **options: object
) -> tuple[StepTrajectories, Experience]:
    config = AlgorithmConfig.model_validate({
        "advantage": "gae", "advantage_options": {"whiten": False, "gamma": 0.5, "lam": 1.0, **options},
    })  # fmt: skip
    collected = collect([TrajectoryGroup("g", "task", members)], max_tokens_per_row=max_tokens_per_row)
    values = critic_values(critic, collected.trajectories, collected.samples, BatchConfig())  # type: ignore[arg-type]
    return collected, build_experience(collected, config, temperature=0.7, values=values)


def by_first_id(built: Experience) -> dict[int, tuple[list[float], list[float], list[float]]]:
    """Advantages, values and returns of each row, by its first id."""
    return {
        int(row.sample.input_ids[0]): tuple(
            np.round(np.broadcast_to(column, row.sample.loss_mask.shape), 5).tolist()
            for column in (row.advantage, row.values, row.returns)
        )
        for row in built.rows
    }  # type: ignore[return-value]


def test_time_runs_over_branches_and_skips_observations() -> None:
    # In time: 21 22 (A), 41 (B), 23 (A). The states before them end in 6, 21, 8 and 7: values 0.6, 2.1, 0.8, 0.7.
    # Rewards: 1 on 22 (the last of its turn), 2 on 41, the score 4 on 23. At lam = 1 and gamma = 1/2 returns are
    #   G(23) = 4, G(41) = 2 + 2 = 4, G(22) = 1 + 2 = 3, G(21) = 1.5, and advantages the returns less the values.
    critic = Reader()
    _, built = experience([interleaved()], critic)
    rows = by_first_id(built)
    assert rows[5][0] == pytest.approx([0, 0, 1.5 - 0.6, 3 - 2.1, 0, 4 - 0.7, 0], abs=1e-5)
    assert rows[5][1] == pytest.approx([0, 0, 0.6, 2.1, 0, 0.7, 0], abs=1e-5)
    assert rows[5][2] == pytest.approx([0, 0, 1.5, 3, 0, 4, 0], abs=1e-5)
    assert rows[8][0] == pytest.approx([0, 4 - 0.8], abs=1e-5)
    assert rows[8][2] == pytest.approx([0, 4], abs=1e-5)
    assert {row.temperature for row in built.rows} == {0.7}
    # Asked of 0.6 2.1 0.8 0.7, came 1.5 3 4 4: means 1.05 and 3.125. What came varies by 4.1875/4 (deviations -1.625
    # -0.125 0.875 0.875), what it missed (0.9 0.9 3.2 3.3, mean 2.075) by (2 1.175^2 + 1.125^2 + 1.225^2)/4.
    assert built.metrics["critic/value"] == pytest.approx(1.05)
    assert built.metrics["critic/return"] == pytest.approx(3.125)
    missed = 2 * 1.175**2 + 1.125**2 + 1.225**2
    assert built.metrics["critic/explained_variance"] == pytest.approx(1 - missed / 4.1875, abs=1e-6)
    assert built.metrics["critic/open_ended"] == 0
    assert all(meaning(name) for name in built.metrics)
    assert critic.asked == 1


def test_truncated_episodes_bootstrap_from_the_last_state() -> None:
    # The state after the end of A's row ends in 9: 0.9. G(23) = 4 + 0.45, G(41) = 2 + 2.225, G(22) = 1 + 2.1125.
    _, built = experience([interleaved(StopReason.MAX_TURNS)], Reader(StopReason.MAX_TURNS))
    rows = by_first_id(built)
    assert rows[5][2] == pytest.approx([0, 0, 1.55625, 3.1125, 0, 4.45, 0], abs=1e-5)
    assert rows[8][2] == pytest.approx([0, 4.225], abs=1e-5)
    assert built.metrics["critic/open_ended"] == 1
    # A turn without ids behind it is no state: the end is as open, and the score is on the last token before it.
    more = interleaved(StopReason.MAX_TURNS)
    more.segments.append(dataclasses.replace(sampled(7, 6), weight_versions=()))
    _, silent = experience([more], Reader(StopReason.MAX_TURNS))
    assert by_first_id(silent)[5][2] == pytest.approx([0, 0, 1.55625, 3.1125, 0, 4.45, 0], abs=1e-5)
    # The last turn is not trained, left out by the agent: the end is as open. G(41) = 2 + 4 + 0.45, G(22) = 1 + 3.225.
    short = interleaved(StopReason.MAX_TURNS)
    short.segments[5] = dataclasses.replace(short.segments[5], left_out=((0, 1),))
    _, untold = experience([short], Reader(StopReason.MAX_TURNS))
    assert by_first_id(untold)[8][2] == pytest.approx([0, 6.45], abs=1e-5)
    assert by_first_id(untold)[5][2] == pytest.approx([0, 0, 2.1125, 4.225, 0, 0, 0], abs=1e-5)
    # The row that is trained is the one that was sampled: what was asked after it is not part of it.
    assert [len(row.sample.input_ids) for row in built.rows] == [2, 7]
    # Where the reason does not leave the end open, or tokens at the end were cut off, nothing is added.
    _, closed = experience([interleaved(StopReason.MAX_TURNS)], Reader(StopReason.MAX_TOKENS))
    assert by_first_id(closed)[5][2][5] == 4
    _, cut = experience([interleaved(StopReason.MAX_TURNS)], Reader(StopReason.MAX_TURNS), max_tokens_per_row=5)
    # The turn of 23 is in no row: its reward comes with the last token before it, 41: G = 2 + 4, G(22) = 1 + 3.
    assert by_first_id(cut)[5][2] == pytest.approx([0, 0, 2, 4, 0], abs=1e-5)
    assert by_first_id(cut)[8][2] == pytest.approx([0, 6], abs=1e-5)


def test_level_turn_gives_returns_to_first_tokens_only() -> None:
    # Turns are steps: G = 4, 2 + 2, 1 + 2 for A's last, B's and A's first; values 0.7, 0.8 and 0.6.
    _, built = experience([interleaved()], Reader(), level="turn")
    advantages, _, returns = by_first_id(built)[5]
    assert advantages == pytest.approx([0, 0, 2.4, 2.4, 0, 3.3, 0], abs=1e-5)
    assert returns[2] == 3
    assert np.isnan(returns[3])
    assert returns[5] == 4
    [batch] = pack(built.rows, 64)
    assert batch.returns is not None
    assert batch.returns.isnan().tolist() == [False, True, False, False]


def test_no_group_is_left_out() -> None:
    """Members whose rewards are all equal, and groups of one, are as good as any."""
    _, built = experience([interleaved(), interleaved(group="other"), interleaved()], Reader())
    assert built.metrics["batch/rows"] == 6
    assert built.metrics["batch/groups"] == 2


def test_penalties_are_subtracted_token_by_token() -> None:
    # 21 pays 1, 41 pays 1/2: G(23) = 4, G(41) = 2 - 1/2 + 2 = 3.5, G(22) = 1 + 1.75, G(21) = -1 + 1.375.
    config = AlgorithmConfig.model_validate({"advantage": "gae", "advantage_options": {"whiten": False, "gamma": 0.5}})
    collected = collect([TrajectoryGroup("g", "task", [interleaved()])])
    pays = {21: 1.0, 41: 0.5}
    penalties = {
        row.key: torch.tensor([pays.get(int(token), 0.0) for token in row.input_ids[row.loss_mask]])
        for row in collected.samples[0]
    }
    values = critic_values(Reader(), collected.trajectories, collected.samples, BatchConfig())  # type: ignore[arg-type]
    charged = dataclasses.replace(collected, penalties=penalties)
    rows = by_first_id(build_experience(charged, config, temperature=1.0, values=values))
    assert rows[5][2] == pytest.approx([0, 0, 0.375, 2.75, 0, 4, 0], abs=1e-5)
    assert rows[8][2] == pytest.approx([0, 3.5], abs=1e-5)


def test_no_trajectories_give_no_rows() -> None:
    _, built = experience([], Reader())
    assert built.rows == []
    assert torch.equal(token_rewards(torch.zeros(0), torch.zeros(0).long()), torch.zeros(0).double())


def test_rows_of_a_micro_batch_have_a_critic_or_have_none() -> None:
    _, built = experience([interleaved()], Reader())
    plain = build_experience(collect([TrajectoryGroup("g", "t", [interleaved()])]), AlgorithmConfig(
        drop_zero_variance=False
    ), temperature=1.0)  # fmt: skip
    with pytest.raises(TrainError, match="others have none"):
        pack([built.rows[0], plain.rows[1]], 64)
