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
    orders = [_TokenOrder.of(own) for own in samples]
    old_values = [order.in_time(each.values) for order, each in zip(orders, values, strict=True)]
    turns = [torch.from_numpy(order.turns) for order in orders]
    earned = [
        token_rewards(torch.tensor(_single_branch(branches, own).rewards, dtype=torch.float64), of_tokens)
        for branches, own, of_tokens in zip(rewards.branches, samples, turns, strict=True)
    ]
    if penalties:
        paid = [[penalties[sample.key].numpy().astype(np.float32) for sample in own] for own in samples]
        earned = [each - order.in_time(own) for each, order, own in zip(earned, orders, paid, strict=True)]
    advantages: list[TokenAdvantages] = estimator(
        earned, [each.double() for each in old_values], turns, [each.last_value or 0.0 for each in values]
    )
    rows: list[TrainRow] = []
    for own, order, old, each in zip(samples, orders, old_values, advantages, strict=True):
        laid = order.to_rows(own, each.advantages), order.to_rows(own, old)
        returns = order.to_rows(own, each.returns.masked_fill(~each.valued, torch.nan))
        rows += [
            TrainRow(sample, advantage, temperature=temperature, values=value, returns=target)
            for sample, advantage, value, target in zip(own, *laid, returns, strict=True)
        ]
    metrics = {"batch/groups": float(len(set(rewards.groups)))}
    return rows, metrics | _critic_metrics(old_values, advantages, values)


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

    The reward of a turn without a trained token goes to the last token before it, or is dropped where there is none.
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
        turns = np.concatenate([np.zeros(0, np.int64), *(each.turn_ids[each.loss_mask] for each in samples)])
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
    valued = [each.valued for each in advantages]
    said = torch.cat([each[mask] for each, mask in zip(old_values, valued, strict=True)] or [torch.zeros(0)]).double()
    returns = torch.cat([each.returns[each.valued] for each in advantages] or [torch.zeros(0)]).double()
    if not len(said):
        return {}
    metrics = {
        "critic/value": float(said.mean()),
        "critic/return": float(returns.mean()),
        "critic/open_ended": sum(each.last_value is not None for each in values) / len(values),
    }
    spread = float(returns.var(correction=0))
    if spread > 0:
        metrics["critic/explained_variance"] = 1 - float((returns - said).var(correction=0)) / spread
    return metrics
