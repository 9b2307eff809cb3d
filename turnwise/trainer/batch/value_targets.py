"""Value targets: the critic's values of sampled tokens, and the advantages and returns computed from them.

For a critic, time is the trained tokens in the order in which their turns were sampled, over all branches of a
trajectory; each is valued in the row that owns it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from turnwise.errors import TrainError
from turnwise.trainer.algorithms.gae import TokenAdvantages
from turnwise.trainer.algorithms.registry import ConfiguredFunction
from turnwise.trainer.algorithms.rewards import BranchRewards, StepRewards
from turnwise.trainer.core import RowKey, TrainRow
from turnwise.trajectory import TrainSample

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class TrajectoryValues:
    """The critic's values of one trajectory.

    Attributes:
        values: Per row float32 of shape [trained tokens].
        last_value: Bootstrap value where it was truncated; None where the episode terminated.
    """

    values: list[Floats]
    last_value: float | None = None


def value_rows(
    rewards: StepRewards,
    samples: Sequence[Sequence[TrainSample]],
    penalties: Mapping[RowKey, Tensor],
    values: Sequence[TrajectoryValues],
    estimator: ConfiguredFunction,
    *,
    temperature: float,
) -> tuple[list[TrainRow], dict[str, float]]:
    """Return rows with advantages, old values and returns, and metrics of the critic.

    ``samples`` and ``values`` are per trajectory; ``penalties`` has, by row, the KL penalty of each trained token.

    Raises:
        TrainError: A number is not finite.
    """
    orders = [_TokenOrder.of(branches) for branches in samples]
    old_values = [order.in_time(critic.values) for order, critic in zip(orders, values, strict=True)]
    turns = [torch.from_numpy(order.turns) for order in orders]
    earned = [
        token_rewards(torch.tensor(_single_branch(branches, rows).rewards, dtype=torch.float64), of_tokens)
        for branches, rows, of_tokens in zip(rewards.branches, samples, turns, strict=True)
    ]
    if penalties:
        paid = [[penalties[sample.key].numpy().astype(np.float32) for sample in branches] for branches in samples]
        earned = [gain - order.in_time(price) for gain, order, price in zip(earned, orders, paid, strict=True)]
    advantages: list[TokenAdvantages] = estimator(
        earned, [old.double() for old in old_values], turns, [critic.last_value or 0.0 for critic in values]
    )
    train_rows: list[TrainRow] = []
    for branches, order, old, estimate in zip(samples, orders, old_values, advantages, strict=True):
        by_row = order.to_rows(branches, estimate.advantages), order.to_rows(branches, old)
        returns = order.to_rows(branches, estimate.returns.masked_fill(~estimate.valued, torch.nan))
        train_rows += [
            TrainRow(sample, advantage, temperature=temperature, values=value, returns=target)
            for sample, advantage, value, target in zip(branches, *by_row, returns, strict=True)
        ]
    metrics = {"batch/groups": float(len(set(rewards.groups)))}
    return train_rows, metrics | _critic_metrics(old_values, advantages, values)


def _single_branch(branches: Sequence[BranchRewards], samples: Sequence[TrainSample]) -> BranchRewards:
    """Return the rewards of an episode that was not forked. Raises TrainError for one with several branches."""
    if len(branches) > 1:
        raise TrainError(
            f"trajectory {samples[0].trajectory_id} was forked by its agent (episode.fork) into {len(branches)} "
            "branches, but a critic values one sequence of tokens: set algorithm.advantage to grpo and "
            "algorithm.credit to tree_value, or let the agent not fork"
        )
    return branches[0]


def token_rewards(rewards: Tensor, turns: Tensor) -> Tensor:
    """Place each turn's reward on its last token. Shapes [turns], [n] -> [n]; turns must be non-decreasing.

    The reward of a turn without a trained token goes to the last token before it, or is dropped if none.
    """
    laid = torch.zeros(len(turns), dtype=torch.float64)
    # How many tokens there are up to the end of each turn; the last of them is one before that.
    ends = torch.searchsorted(turns.contiguous(), torch.arange(len(rewards)), right=True) - 1
    reached = ends >= 0
    return laid.index_add(0, ends[reached], rewards.double()[reached])


@dataclass(frozen=True, slots=True)
class _TokenOrder:
    """The temporal order of the trained tokens of a trajectory's rows.

    Attributes:
        order: int64 of shape [n]: index of the k-th token in time, among the rows' tokens end to end.
        turns: int64 of shape [n], in temporal order.
    """

    order: npt.NDArray[np.int64]
    turns: npt.NDArray[np.int64]

    @classmethod
    def of(cls, samples: Sequence[TrainSample]) -> _TokenOrder:
        turns = np.concatenate([np.zeros(0, np.int64), *(sample.turn_ids[sample.loss_mask] for sample in samples)])
        # Stable: the tokens of a turn stand in one row, and keep their order.
        order = np.argsort(turns, kind="stable")
        return cls(order, turns[order])

    def in_time(self, laid: Sequence[Floats]) -> Tensor:
        """Reorder data of each row's trained tokens by time, shape [n]."""
        return torch.from_numpy(np.concatenate([np.zeros(0, np.float32), *laid])[self.order])

    def to_rows(self, samples: Sequence[TrainSample], in_time: Tensor) -> list[Floats]:
        """Scatter data in temporal order to rows, float32 of shape [tokens], 0 on untrained tokens."""
        laid = np.empty(len(in_time), np.float32)
        laid[self.order] = in_time.numpy()
        rows: list[Floats] = []
        start = 0
        for sample in samples:
            row = np.zeros(len(sample.input_ids), np.float32)
            row[sample.loss_mask] = laid[start : (start := start + sample.trained_tokens)]
            rows.append(row)
        return rows


def _critic_metrics(
    old_values: Sequence[Tensor], advantages: Sequence[TokenAdvantages], values: Sequence[TrajectoryValues]
) -> dict[str, float]:
    """Return mean value, mean return and explained variance."""
    empty = [torch.zeros(0)]
    expected = [old[estimate.valued] for old, estimate in zip(old_values, advantages, strict=True)]
    targets = [estimate.returns[estimate.valued] for estimate in advantages]
    expectation, returns = torch.cat(expected or empty).double(), torch.cat(targets or empty).double()
    if not len(expectation):
        return {}
    metrics = {
        "critic/value": float(expectation.mean()),
        "critic/return": float(returns.mean()),
        "critic/open_ended": sum(critic.last_value is not None for critic in values) / len(values),
    }
    spread = float(returns.var(correction=0))
    if spread > 0:
        metrics["critic/explained_variance"] = 1 - float((returns - expectation).var(correction=0)) / spread
    return metrics
