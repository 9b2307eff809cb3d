"""What was sampled and not trained, and why; how often tools failed.

Owns: :func:`dropped_tokens` and :func:`tool_metrics`, pure functions of the trajectories and rows of a step. Refuses:
deciding what is left out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from turnwise.agents.roles import TRAINED
from turnwise.trainer.packing import TrainRow
from turnwise.trajectory import TrainSample, Trajectory, TrajectoryGroup

_CALLS, _FAILURES = "tool_calls/", "tool_failures/"


def dropped_tokens(
    groups: Sequence[TrajectoryGroup],
    members: Sequence[Trajectory],
    samples: Sequence[Sequence[TrainSample]],
    rows: Sequence[TrainRow],
    *,
    policy: str = TRAINED,
) -> dict[str, float]:
    """Return what became of sampled tokens that are in no row of a step, by reason.

    Together with the trained tokens of the rows they are all tokens that the policy sampled in these groups.

    Args:
        groups: What was rolled out.
        members: The trajectories that are compared.
        samples: For each of them its rows.
        rows: What is trained.
        policy: Whose tokens are counted.

    Returns:
        ``dropped/failed_tokens``: of trajectories that an error ended; ``dropped/left_out_tokens``: that the agent's
        own account of its episode leaves out; ``dropped/cut_tokens``: for which a row had no room;
        ``dropped/dead_tokens``: of groups that teach nothing.
    """
    mine = [each for group in groups for each in group.trajectories if each.policy == policy]
    trained = {row.sample.trajectory_id for row in rows}
    failed = sum(each.sampled_tokens for each in mine if each.error is not None)
    left_out = cut = dead = 0
    for member, own in zip(members, samples, strict=True):
        held = sum(sample.trained_tokens for sample in own)
        spared = sum(
            end - start for segment in member.segments if segment.sampled for start, end in segment.left_out or ()
        )
        left_out += spared
        cut += member.sampled_tokens - spared - held
        dead += 0 if member.id in trained else held
    found = {"failed": failed, "left_out": left_out, "cut": cut, "dead": dead}
    return {f"dropped/{reason}_tokens": float(count) for reason, count in found.items()}


def tool_metrics(groups: Sequence[TrajectoryGroup], *, policy: str = TRAINED) -> dict[str, float]:
    """Return how many calls a trajectory made, and which share of them was answered by an error, of all and by tool.

    Args:
        groups: What was rolled out; trajectories that an error ended are left out.
        policy: Whose calls are counted.

    Returns:
        ``tools/calls``, ``tools/error_rate`` and ``tools/error_rate_by/NAME``; nothing where no tool was called.
    """
    mine = [each for group in groups for each in group.trajectories if each.policy == policy and each.error is None]
    counts: defaultdict[str, float] = defaultdict(float)
    for trajectory in mine:
        for name, value in trajectory.metrics.items():
            if name in ("tool_calls", "tool_errors") or name.startswith((_CALLS, _FAILURES)):
                counts[name] += value
    calls = counts["tool_calls"]
    if not calls:
        return {}
    by_tool = {name.removeprefix(_CALLS): made for name, made in counts.items() if name.startswith(_CALLS) and made}
    return {
        "tools/calls": calls / len(mine),
        "tools/error_rate": counts["tool_errors"] / calls,
        # A slash would be a level of the metric's name.
        **{
            f"tools/error_rate_by/{name.replace('/', '_')}": counts.get(f"{_FAILURES}{name}", 0.0) / made
            for name, made in sorted(by_tool.items())
        },
    }
