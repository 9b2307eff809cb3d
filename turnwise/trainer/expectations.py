"""From what a critic expects to rows with advantages and returns.

Owns: :func:`expect` (the critic's values of the tokens of each trajectory, in the order of time) and
:func:`critic_rows`. Refuses: the formulas (``advantages/critic.py``) and the critic (``critic.py``).

Time, for a critic, is the tokens that are trained, in the order in which their turns were sampled, over all branches
of a trajectory: each once, valued in the row that owns it. What was not sampled takes no time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from turnwise.trainer.advantages import TokenAdvantages, token_rewards
from turnwise.trainer.algorithm import AlgorithmConfig
from turnwise.trainer.batch_config import BatchConfig
from turnwise.trainer.credit import turn_rewards
from turnwise.trainer.critic import Critic
from turnwise.trainer.kl import RowKey
from turnwise.trainer.packing import TrainRow, pack
from turnwise.trajectory import TrainSample, Trajectory

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Expectation:
    """What the critic expects of one trajectory.

    Attributes:
        values: For each row of it float32 of shape [trained tokens].
        last: What is to come after its end; None where the episode ended: nothing.
    """

    values: list[Floats]
    last: float | None = None


def expect(
    critic: Critic | None,
    members: Sequence[Trajectory],
    samples: Sequence[Sequence[TrainSample]],
    batch: BatchConfig,
) -> list[Expectation] | None:
    """Ask the critic about the rows of trajectories, before anything is updated; None where there is none.

    Args:
        critic: Whom to ask.
        members: The trajectories.
        samples: For each its rows.
        batch: The token budget of a micro-batch, and whether rows share prefixes in it.
    """
    if critic is None:
        return None
    ends = [
        _open_end(member, mine) if member.stop_reason in critic.bootstrap else -1
        for member, mine in zip(members, samples, strict=True)
    ]
    rows = [
        TrainRow(_one_longer(each) if number == end else each)
        for mine, end in zip(samples, ends, strict=True)
        for number, each in enumerate(mine)
    ]
    batches = pack(rows, batch.max_tokens_per_micro_batch, share_prefixes=batch.share_prefixes)
    found: dict[int, Floats] = {}
    for micro, values in zip(batches, critic.values(batches), strict=True):
        parts = torch.split(values.float().cpu(), [rows[index].sample.trained_tokens for index in micro.rows])
        found |= {index: part.numpy() for index, part in zip(micro.rows, parts, strict=True)}
    numbers = iter(range(len(rows)))
    expected: list[Expectation] = []
    for mine, end in zip(samples, ends, strict=True):
        own = [found[next(numbers)] for _ in mine]
        if end < 0:
            expected.append(Expectation(own))
            continue
        last = float(own[end][-1])
        own[end] = own[end][:-1]
        expected.append(Expectation(own, last))
    return expected


def critic_rows(
    members: Sequence[Trajectory],
    samples: Sequence[Sequence[TrainSample]],
    expected: Sequence[Expectation],
    config: AlgorithmConfig,
    *,
    temperature: float,
    penalties: Mapping[RowKey, Tensor],
) -> tuple[list[TrainRow], dict[str, float]]:
    """Return the rows of trajectories with advantages, old values and returns, and what the critic was worth.

    Args:
        members: The trajectories.
        samples: For each its rows.
        expected: For each what the critic expects.
        config: The estimator with its options.
        temperature: What the rollouts were sampled with.
        penalties: By row, what each of its trained tokens pays in the reward; empty where nothing is paid.

    Raises:
        TrainError: A number is not finite.
    """
    orders = [_Order.of(mine) for mine in samples]
    values = [order.in_time(each.values) for order, each in zip(orders, expected, strict=True)]
    turns = [torch.from_numpy(order.turns) for order in orders]
    rewards = [
        token_rewards(torch.tensor(turn_rewards(member), dtype=torch.float64), mine)
        for member, mine in zip(members, turns, strict=True)
    ]
    if penalties:
        paid = [[penalties[each.key].numpy().astype(np.float32) for each in mine] for mine in samples]
        rewards = [reward - order.in_time(mine) for reward, order, mine in zip(rewards, orders, paid, strict=True)]
    estimate = config.chosen_advantage()
    found: list[TokenAdvantages] = estimate(
        rewards, [each.double() for each in values], turns, [each.last or 0.0 for each in expected]
    )
    rows: list[TrainRow] = []
    for mine, order, value, each in zip(samples, orders, values, found, strict=True):
        told, said = order.to_rows(mine, each.advantages), order.to_rows(mine, value)
        came = order.to_rows(mine, each.returns.masked_fill(~each.valued, torch.nan))
        rows += [
            TrainRow(sample, told[number], temperature=temperature, values=said[number], returns=came[number])
            for number, sample in enumerate(mine)
        ]
    return rows, _metrics(values, found, expected)


@dataclass(frozen=True, slots=True)
class _Order:
    """Where the trained tokens of a trajectory's rows, laid end to end, stand in time.

    Attributes:
        order: int64 of shape [n]: the k-th token in time is number order[k] of those.
        turns: int64 of shape [n], in time.
    """

    order: npt.NDArray[np.int64]
    turns: npt.NDArray[np.int64]

    @classmethod
    def of(cls, samples: Sequence[TrainSample]) -> _Order:
        turns = np.concatenate([np.zeros(0, np.int64), *(each.turn_ids[each.loss_mask] for each in samples)])
        # Stable: the tokens of a turn stand in one row, and keep their order.
        order = np.argsort(turns, kind="stable")
        return cls(order, turns[order])

    def in_time(self, laid: Sequence[Floats]) -> Tensor:
        """Return what is known of each row's trained tokens in the order of time, shape [n]."""
        return torch.from_numpy(np.concatenate([np.zeros(0, np.float32), *laid])[self.order])

    def to_rows(self, samples: Sequence[TrainSample], in_time: Tensor) -> list[Floats]:
        """Return for each row float32 of shape [tokens] of what is known in time, 0 where nothing is trained."""
        laid = np.empty(len(in_time), np.float32)
        laid[self.order] = in_time.numpy()
        rows: list[Floats] = []
        start = 0
        for sample in samples:
            row = np.zeros(len(sample.input_ids), np.float32)
            row[sample.loss_mask] = laid[start : (start := start + sample.trained_tokens)]
            rows.append(row)
        return rows


def _open_end(trajectory: Trajectory, samples: Sequence[TrainSample]) -> int:
    """Return the row that the last turn stands in, or -1 where it was cut: what came after its end is then known."""
    last = sum(segment.sampled for segment in trajectory.segments) - 1
    for number, sample in enumerate(samples):
        whole = sum(len(segment.ids) for segment in trajectory.path(sample.leaf))
        # Whether any of it is trained says nothing: an agent's account may leave the last turn out.
        if len(sample.input_ids) == whole and bool((sample.turn_ids == last).any()):
            return number
    return -1


def _one_longer(sample: TrainSample) -> TrainSample:
    """Return a row with one more token, whose value is that of the state after the row: what it is changes nothing."""
    return replace(
        sample,
        input_ids=np.append(sample.input_ids, sample.input_ids[-1:]),
        loss_mask=np.append(sample.loss_mask, True),
        rollout_logprobs=np.append(sample.rollout_logprobs, np.float32(0)),
        weight_versions=np.append(sample.weight_versions, np.int32(-1)),
        turn_ids=np.append(sample.turn_ids, np.int32(-1)),
    )


def _metrics(
    values: Sequence[Tensor], found: Sequence[TokenAdvantages], expected: Sequence[Expectation]
) -> dict[str, float]:
    """Return what the critic expected where it was asked, what came, and how much of that it foresaw."""
    asked = [each.valued for each in found]
    said = torch.cat([value[mask] for value, mask in zip(values, asked, strict=True)] or [torch.zeros(0)]).double()
    came = torch.cat([each.returns[each.valued] for each in found] or [torch.zeros(0)]).double()
    if not len(said):
        return {}
    metrics = {
        "critic/value": float(said.mean()),
        "critic/return": float(came.mean()),
        "critic/open_ended": sum(each.last is not None for each in expected) / len(expected),
    }
    spread = float(came.var(correction=0))
    if spread > 0:
        metrics["critic/explained_variance"] = 1 - float((came - said).var(correction=0)) / spread
    return metrics
