"""Which turn of a trajectory is given how much of what it earned.

Owns: :func:`assign`, which applies the configured way to the trajectories of a step, and what it returns. Refuses: who
is compared with whom (``Trajectory.group_id``), the estimator without turns (``advantages``), and the weights of tokens
in a loss, which no credit changes. The formulas stand in ``formulas.py``, what a state is in ``states.py``, and
functions of the user's in ``own.py``.

Turns are counted in commit order, over all branches of a trajectory: the number that ``TrainSample.turn_ids`` holds.

Three families, which differ in what comes first. ``same``, ``last`` and ``discounted`` compare whole trajectories, and
then share a trajectory's advantage out among its turns. ``turns``, ``tokens`` and a function of the user's say first
what each turn (token) is worth, and compare those. ``gigpo`` does both and adds them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from turnwise.errors import TrainError, shown
from turnwise.trainer.advantages import Advantages, gigpo
from turnwise.trainer.algorithm import COMPARISONS, AlgorithmConfig
from turnwise.trainer.credit.formulas import Values, compared, returns, shares, token_returns
from turnwise.trainer.credit.own import OwnCredit, load_credit
from turnwise.trainer.credit.states import anchors
from turnwise.trainer.registry import Chosen
from turnwise.trajectory import TrainSample, Trajectory


@dataclass(frozen=True, slots=True)
class TurnAdvantages:
    """What the trajectories of a step are told.

    Attributes:
        values: For each trajectory one number for all its turns, or one for each, or one for each sampled token.
        dead: Whether its group teaches nothing.
        groups: How many groups there were.
        dead_groups: How many of them teach nothing.
        starts: Where each turn of a trajectory begins in ``values``, where those are of tokens; else None.
    """

    values: list[float | Values]
    dead: list[bool]
    groups: int
    dead_groups: int
    starts: list[npt.NDArray[np.int64]] | None = None

    def of_row(self, number: int, sample: TrainSample) -> float | npt.NDArray[np.float32]:
        """Return the advantage of the tokens of a row of trajectory ``number``, 0 where nothing was sampled."""
        value = self.values[number]
        if isinstance(value, float):
            return value
        if self.starts is None:
            # One more at the end, for what no turn sampled: its number is -1.
            return np.append(value, 0.0).astype(np.float32)[sample.turn_ids]
        found = np.zeros(len(sample.turn_ids), np.float32)
        sampled = sample.turn_ids >= 0
        turns = sample.turn_ids[sampled]
        _, first, inverse = np.unique(turns, return_index=True, return_inverse=True)
        # A turn stands in a row in one piece, from its first token on.
        found[sampled] = value[self.starts[number][turns] + np.arange(len(turns)) - first[inverse]]
        return found


def turn_rewards(trajectory: Trajectory) -> list[float]:
    """Return the rewards of each turn; those of the episode, and of turns that are not here, come with the last one."""
    numbers = {segment.turn_id: number for number, segment in enumerate(s for s in trajectory.segments if s.sampled)}
    last = len(numbers) - 1
    found = [0.0] * len(numbers)
    for turn_id, _, value in trajectory.rewards:
        found[last if turn_id is None else numbers.get(turn_id, last)] += value
    return found


def assign(
    members: Sequence[Trajectory], config: AlgorithmConfig, baselines: Mapping[str, float] | None = None
) -> TurnAdvantages:
    """Return the advantages of the turns of trajectories, by the configured estimator and credit.

    Args:
        members: Trajectories in which something was sampled.
        config: The estimator, its options and the credit.
        baselines: What the greedy rollout of each group earned, for an estimator that reads it.

    Raises:
        RegistryError: No such estimator.
        ConfigError: The credit's function cannot be loaded.
        TrainError: A reward, or what a turn is worth, is not finite.
    """
    credit = config.credit
    numbers: dict[str, int] = {}
    groups = [numbers.setdefault(each.group_id, len(numbers)) for each in members]
    own = load_credit(credit)
    if own is not None and own.of_group:
        return _counted(_of_groups(members, groups, own), groups)
    if credit.name == "gigpo":
        return _counted(_from_same_states(members, groups, config), groups)
    if credit.compares:
        return _from_worth(members, groups, config, own)
    result = estimated(members, groups, config.chosen_advantage(), baselines or {})
    values: list[float | Values] = [float(value) for value in result.values]
    if credit.name != "same":
        values = [
            value * shares(credit.name, _turns(each), credit.discount)
            for value, each in zip(values, members, strict=True)
        ]
    return TurnAdvantages(values, [bool(flag) for flag in result.dead], result.groups, result.dead_groups)


def _from_worth(
    members: Sequence[Trajectory], groups: Sequence[int], config: AlgorithmConfig, own: OwnCredit | None
) -> TurnAdvantages:
    """Say what turns or tokens are worth, and compare them as the estimator compares trajectories."""
    gamma = config.credit.discount
    starts: list[npt.NDArray[np.int64]] | None = None
    if own is not None:
        worth = [own.worth(each) for each in members]
    elif config.credit.name == "tokens":
        lengths = [[len(segment.ids) for segment in each.segments if segment.sampled] for each in members]
        worth = [token_returns(turn_rewards(each), of, gamma) for each, of in zip(members, lengths, strict=True)]
        starts = [np.cumsum([0, *of], dtype=np.int64)[:-1] for of in lengths]
    else:
        worth = [returns(turn_rewards(each), gamma) for each in members]
    within, fixed = COMPARISONS[config.advantage]
    scope = groups if within else [0] * len(groups)
    options = _spread(config)
    norm = options["norm_by_std"] if fixed is None else fixed
    found, dead = compared(worth, scope, norm_by_std=norm, eps=options["eps"])
    gone = len({group for group, is_dead in zip(groups, dead, strict=True) if is_dead})
    return TurnAdvantages([*found], dead, len(set(groups)), gone, starts)


def _from_same_states(members: Sequence[Trajectory], groups: Sequence[int], config: AlgorithmConfig) -> list[Values]:
    """Compare trajectories, and turns with those of the group that began in the same state, and add both."""
    credit = config.credit
    fixed, options = COMPARISONS[config.advantage][1], _spread(config)
    found = gigpo(
        torch.tensor([each.reward for each in members], dtype=torch.float64),
        torch.tensor(groups, dtype=torch.int64),
        [torch.from_numpy(returns(turn_rewards(each), credit.discount)) for each in members],
        [anchors(each, credit.state) for each in members],
        omega=1.0 if credit.omega is None else credit.omega,
        norm_by_std=options["norm_by_std"] if fixed is None else fixed,
        eps=options["eps"],
    )
    return [each.double().numpy() for each in found]


def _spread(config: AlgorithmConfig) -> dict[str, Any]:
    """Return ``norm_by_std`` and ``eps``, wherever the configuration gives them."""
    return {"norm_by_std": config.norm_by_std, "eps": config.std_eps} | config.chosen_advantage().options


def _of_groups(members: Sequence[Trajectory], groups: Sequence[int], own: OwnCredit) -> list[Values]:
    """Ask the user's function for each group; a group of one has nobody to be compared with, and advantage 0."""
    found: list[Values] = [np.zeros(_turns(each)) for each in members]
    for group in sorted(set(groups)):
        numbers = [number for number, mine in enumerate(groups) if mine == group]
        if len(numbers) > 1:
            for number, values in zip(numbers, own.advantages([members[each] for each in numbers]), strict=True):
                found[number] = values
    return found


def _counted(values: Sequence[Values], groups: Sequence[int]) -> TurnAdvantages:
    """Return advantages of turns; a group all of whose turns have 0 teaches nothing."""
    alive = {group for group, mine in zip(groups, values, strict=True) if mine.any()}
    every = set(groups)
    return TurnAdvantages([*values], [group not in alive for group in groups], len(every), len(every - alive))


def estimated(
    members: Sequence[Trajectory], groups: Sequence[int], estimate: Chosen, baselines: Mapping[str, float]
) -> Advantages:
    """Return the advantages of whole trajectories.

    Args:
        members: Trajectories in which something was sampled.
        groups: For each its group.
        estimate: The estimator with its options.
        baselines: What the greedy rollout earned, by group id; read where the estimator asks for it.

    Raises:
        TrainError: A reward is not finite, or an estimator of the user's returned something else than advantages.
    """
    rewards = torch.tensor([each.reward for each in members], dtype=torch.float64)
    names = sorted({name for each in members for _, name, _ in each.rewards})
    sums = [[sum(value for _, said, value in each.rewards if said == name) for each in members] for name in names]
    data: dict[str, Any] = {
        "lengths": torch.tensor([each.sampled_tokens for each in members], dtype=torch.int64),
        "components": {name: torch.tensor(each, dtype=torch.float64) for name, each in zip(names, sums, strict=True)},
    }
    if "baselines" in estimate.reads:
        data["baselines"] = torch.tensor([baselines[each.group_id] for each in members], dtype=torch.float64)
    result = estimate(rewards, torch.tensor(groups, dtype=torch.int64), **data)
    if not isinstance(result, Advantages) or result.values.shape != rewards.shape:
        raise TrainError(
            f"algorithm.advantage {estimate.name!r} returned {shown(result)}; it must return "
            "turnwise.trainer.advantages.Advantages with one value for each reward"
        )
    return result


def credit_metrics(found: TurnAdvantages) -> dict[str, float]:
    """Return how unevenly turns (or tokens) are told, where they are told apart."""
    apart = [each for each in found.values if not isinstance(each, float)]
    if not apart:
        return {}
    turns = np.concatenate(apart)
    return {
        "credit/spread": float(np.mean([np.ptp(each) for each in apart])),
        "credit/silent_turns": float(np.mean(turns == 0)),
        "credit/first": float(np.mean([abs(each[0]) for each in apart])),
        "credit/last": float(np.mean([abs(each[-1]) for each in apart])),
    }


def _turns(trajectory: Trajectory) -> int:
    return sum(segment.sampled for segment in trajectory.segments)


__all__ = [
    "OwnCredit", "TurnAdvantages", "anchors", "assign", "compared", "credit_metrics", "estimated", "load_credit",
    "returns", "shares", "token_returns", "turn_rewards",
]  # fmt: skip
