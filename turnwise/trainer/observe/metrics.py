"""The names of logged metrics, and how those of a step are computed."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from turnwise.model.core import MemoryUse
from turnwise.trajectory import TrainSample, Trajectory, TrajectoryGroup

if TYPE_CHECKING:
    # They bring torch, without which the metrics of a finished run are read.
    from turnwise.trainer.core import TrainRow

METRICS: dict[str, str] = {
    "reward/mean": "mean reward of the trajectories of the step",
    "reward/std": "standard deviation of their rewards",
    "reward/greedy": "mean reward of the greedy rollouts that are baselines (remax)",
    "reward/informative": "share of trajectories whose group has rewards that differ",
    "reward/by_name/*": "sum of the reward events of one name, per trajectory",
    "reward/by_source/*": "mean reward of the trajectories whose tasks are from one source",
    "reward/by_role/*": "mean reward of one role's trajectories; role@policy where a frozen policy played it",
    "tasks/left_out": "rows of the task sources that were left out so far",
    "curriculum/rate": "mean of the running success rates of the tasks that have one",
    "curriculum/rate/*": "running success rate of the tasks with one value of curriculum.by",
    "curriculum/tasks": "how many tasks, or values of curriculum.by, have one",
    "curriculum/*": "share of these tasks in the pool of this name (share_0.2-0.8)",
    "stop/*": "share of trajectories with this stop reason",
    "rollout/turns": "model calls per trajectory",
    "rollout/turns_by_role/*": "model calls per trajectory of one role",
    "rollout/sampled_tokens": "sampled tokens per trajectory",
    "rollout/forks": "forks per trajectory",
    "context/*": "context management of agents (drops, compactions, sub-agents), per trajectory: docs/agents.md",
    "ignored_*": "requests of which something was ignored (lenient), per trajectory: docs/gateway.md",
    "batch/groups": "groups compared (sessions of different roles count apart, see rollout.compare)",
    "batch/dead_groups": "groups whose rewards are equal, or of one member: they teach nothing",
    "batch/trajectories": "trajectories without an error",
    "batch/silent": "those of them in which nothing was sampled: they are compared with nothing",
    "batch/no_baseline": "trajectories left out because their group's greedy rollout failed (remax)",
    "batch/failed": "members and trajectories that ended with an error",
    "batch/rows": "rows trained",
    "batch/trained_tokens": "sampled tokens trained",
    "batch/tokens": "tokens of the rows, context included",
    "batch/packed_tokens": "tokens that the updates of the step computed, shared ones once; counted once per epoch",
    "batch/cut_tokens": "sampled tokens that batch.max_tokens_per_row cut off",
    "batch/empty_leaves": "leaves that own no sampled token",
    "credit/spread": "largest less smallest advantage among the turns (credit tokens: tokens) of a trajectory, mean",
    "credit/silent_turns": "share of turns (credit tokens: tokens) with advantage 0",
    "credit/first": "mean |advantage| of first turns (tokens)",
    "credit/last": "mean |advantage| of last turns (tokens)",
    "dropped/failed_tokens": "sampled tokens of trajectories that ended with an error",
    "dropped/dead_tokens": "sampled tokens of groups that teach nothing, or have no baseline",
    "dropped/cut_tokens": "sampled tokens for which batch.max_tokens_per_row left no room",
    "dropped/left_out_tokens": "sampled tokens that the agent loop's output leaves out",
    "tools/calls": "tool calls per trajectory",
    "tools/error_rate": "share of tool calls that were answered by an error",
    "tools/error_rate_by/*": "the same per tool; (unknown) are calls of tools that do not exist",
    "replay/wait_s": "seconds that the trainer waited for rollouts",
    "replay/ready": "finished groups that wait and were not yet trained",
    "replay/in_flight": "groups that were requested and are not finished",
    "replay/staleness_mean": "train steps between the oldest weights that sampled a group and the step's, mean",
    "replay/staleness_max": "the same, of the stalest group of the batch",
    "replay/reissued": "episodes and groups that were played again because their worker was lost",
    "replay/reused": "groups of the batch that were trained before (strategy mixed)",
    "replay/short": "groups that the step lacks: max_refills was reached, or a hook left groups out",
    "replay/dropped/*": "finished groups that were dropped and never trained, by reason",
    "replay/failed": "members of the batch's groups that ended with an error",
    "straggler/cut_groups": "groups that the batch lacks because batch.tail did not wait for them",
    "straggler/wait_s": "seconds that the last groups were waited for after batch.tail.share of them was complete",
    "straggler/carried": "groups that the step did not wait for, and that count for the next one",
    "straggler/cancelled": "groups that were cancelled because the step did not wait for them",
    "rollout/cancelled_episodes": "episodes that ended because their group was cancelled",
    "rollout/wasted_tokens": "tokens sampled in groups that were cancelled or dropped",
    "tree/branches": "branches of an episode (rollout.tree), the first one included, mean",
    "tree/over_budget": "branches that did not fit rollout.tree.max_tokens, mean over episodes",
    "tree/failures": "attempts at branches that ended in an error, mean over episodes",
    "tree/refusals": "turns before which the environment could not be forked, mean over episodes",
    "train/loss": "loss, mean over the step's updates weighted by tokens",
    "train/tokens": "trained tokens of rows with an advantage, counted once per epoch",
    "train/ratio": "mean probability ratio, trained over old policy (of sequences in gspo and gmpo)",
    "train/ratio_max": "largest probability ratio",
    "train/approx_kl": "k3 estimate of KL(old || trained), mean over train/tokens",
    "train/clip_fraction": "share of train/tokens whose gradient the clip range cut off (cispo: weight bounded)",
    "train/selected_fraction": "share of tokens that clip_cov or kl_cov selected",
    "train/gate": "mean gate of sapo: the share of a token's gradient that remains, 1 at ratio 1",
    "train/quadratic": "mean of half the squared log-ratio that dro penalises",
    "train/dual_clip_fraction": "share of tokens whose gradient dual_clip cut off",
    "train/entropy": "mean entropy of the distributions that trained tokens were drawn from, in nats",
    "train/nll": "mean negative log-likelihood of the trained tokens, in nats",
    "train/grad_norm": "global gradient norm before clipping, mean over the updates that changed the weights",
    "train/updates": "optimizer steps that changed the weights",
    "train/skipped_updates": "optimizer steps that were skipped (no gradient, or no finite one)",
    "train/non_finite_updates": "those of them whose gradient was not finite",
    "distill/reverse_kl": "mean of log p_student - log p_teacher over sampled tokens: estimates KL(student || teacher)",
    "distill/gap_max": "largest magnitude of the same on a token, bounded to 20",
    "distill/unscored_tokens": "trained tokens beyond the teacher's context, which it does not score",
    "preference/accuracy": "share of pairs whose chosen side gained more (reward model: has the higher reward)",
    "preference/margin": "margin of the chosen side, mean over pairs (dpo: beta times the difference of log-ratios)",
    "preference/chosen": "mean reward of the chosen side (dpo: beta times its log-ratio to the reference)",
    "preference/rejected": "mean reward of the rejected side",
    "preference/nll": "mean negative log-likelihood per token of the chosen side",
    "preference/held_out_accuracy": "share of the held-out pairs that the trained reward model ranks correctly",
    "lr/*": "learning rate of an optimizer in the last update",
    "critic/loss": "loss of the critic, mean over the tokens before which it is evaluated",
    "critic/clip_fraction": "share of these whose gradient value_clip cut off",
    "critic/value": "value predicted by the critic before the update, mean over the same tokens",
    "critic/return": "target of the critic there, mean",
    "critic/explained_variance": "explained share of the variance of the returns: 1 all, 0 none, below 0 worse",
    "critic/open_ended": "share of trajectories whose last value is bootstrapped (critic.bootstrap)",
    "critic/grad_norm": "global gradient norm of the critic's own weights, before clipping, mean over updates",
    "critic/lr": "learning rate of the critic in the last update",
    "gap/mean": "mean |trainer - rollout| of the log-probabilities before the first update of the step",
    "gap/max": "largest |trainer - rollout| of these",
    "gap/kl": "k3 estimate of KL(rollout || trainer) from the same tokens",
    "gap/worst_turn": "largest mean of these by turn number; diagnostics.jsonl has all turns and tokens",
    "kl/value": "estimate of KL(policy || reference) per trained token (algorithm.kl.estimator)",
    "kl/coef": "weight of the KL penalty in this step",
    "kl/penalty": "KL penalty subtracted from a trajectory's reward, mean (algorithm.kl.where: reward)",
    "correction/kl": "mean of log p_rollout - log p_trainer on the tokens of the step, before correction",
    "correction/kl_k3": "k3 estimate of the same divergence",
    "correction/ess": "effective sample size of untruncated importance weights, as a share: 1 where all are equal",
    "correction/chi2": "mean squared importance weight less 1",
    "correction/ppl_gap": "log perplexity of the trainer less that of the server, mean over rows",
    "correction/weight": "mean importance weight after truncation or masking",
    "correction/weight_max": "largest of them",
    "correction/zero_weights": "share of tokens that masking gave weight 0",
    "correction/rejected": "share of tokens that were rejected",
    "lag/mean": "weight versions between the training weights and those that sampled, mean over tokens",
    "lag/max": "largest of these: staleness of the step's oldest token",
    "sync/bytes": "bytes of weights sent to each server after the step, or of an adapter; 0 where none changed",
    "league/oldest/*": "step whose weights the oldest version of a league has (rollout.frozen.NAME.league)",
    "league/newest/*": "step whose weights the newest version has",
    "memory/peak": "largest resident memory so far: of the trainer, and of each server, added up",
    "memory/trainer": "resident memory of the trainer at the end of the step",
    "memory/trainer_peak": "the largest so far, since the process started",
    "memory/trainer_device_peak": "largest memory that the trainer has allocated on its GPU so far",
    "memory/server/*": "resident memory of a server at the end of the step, by its number",
    "memory/server_peak/*": "the largest so far, since the server started",
    "memory/server_device_peak/*": "largest memory that a server has allocated on its GPU so far",
    "loggers/failures": "calls of loggers that failed so far in this process",
    "time/*": "seconds of a part of the step, or tokens per second",
}
"""Name (``*`` stands for any ending) and meaning of what the trainer logs."""

GB = 1e9
"""Bytes of a gigabyte."""


def memory_metrics(trainer: MemoryUse, servers: Sequence[MemoryUse | None]) -> dict[str, float]:
    """Return the metrics ``memory/...`` in GB, of the servers whose memory is known."""
    memory = {"trainer": trainer} | {f"server/{n}": use for n, use in enumerate(servers) if use is not None}
    metrics: dict[str, float] = {"memory/peak": sum(use.peak for use in memory.values()) / GB}
    for name, use in memory.items():
        process, slash, number = name.partition("/")
        metrics[f"memory/{name}"] = use.resident / GB
        metrics[f"memory/{process}_peak{slash}{number}"] = use.peak / GB
        if use.device_peak:
            metrics[f"memory/{process}_device_peak{slash}{number}"] = use.device_peak / GB
    return metrics


def meaning(name: str) -> str | None:
    """Return the meaning of a metric name, or None where it is undocumented."""
    name = split_policy(name)[1]
    exact = METRICS.get(name)
    return METRICS.get(name.rpartition("/")[0] + "/*") if exact is None else exact


def split_policy(name: str) -> tuple[str, str]:
    """Return prefix (``policy/NAME/`` in a run of several policies, else empty) and rest of a metric's name."""
    if not name.startswith("policy/"):
        return "", name
    policy, _, rest = name.removeprefix("policy/").partition("/")
    return f"policy/{policy}/", rest


def finite_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return metrics as floats, without non-finite ones, which JSON cannot represent."""
    return {name: float(value) for name, value in metrics.items() if math.isfinite(value)}


def figures(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the figures of a ``metrics.jsonl`` record for loggers, under flat names; may be empty.

    Of a train step they are its metrics; of an evaluation the success rates ``eval/sampled`` and ``eval/greedy``, and
    below them (``eval/sampled/reward``) the others.
    """
    if record["kind"] == "train":
        return {name: float(value) for name, value in record.items() if name not in ("kind", "step")}
    if record["kind"] != "eval":
        return {}
    values = {"eval/seconds": record["seconds"]}
    for mode in ("sampled", "greedy"):
        if mode in record:
            values |= dict(_eval_figures(f"eval/{mode}", record[mode]))
    # JSON holds null where no episode ended.
    return {name: float(value) for name, value in values.items() if value is not None and math.isfinite(value)}


def _eval_figures(name: str, summary: Mapping[str, Any]) -> Iterator[tuple[str, float | None]]:
    yield name, summary["success"]["mean"]
    yield f"{name}/reward", summary["reward"]["mean"]
    yield f"{name}/turns", summary["turns"]
    for mark, kind in (("pass@", "pass_at"), ("pass^", "pass_all"), ("best@", "best_at")):
        for k, estimate in summary.get(kind, {}).items():
            yield f"{name}/{mark}{k}", estimate["mean"]
    for key in ("sampled_tokens", "tool_calls", "failed"):
        if key in summary:
            yield f"{name}/{key}", summary[key]
    for key, value in summary.get("search", {}).items():
        yield f"{name}/search/{key}", value["mean"] if isinstance(value, Mapping) else value
    for key in ("by_source", "by_tag", "by_role"):
        for label, subset in summary.get(key, {}).items():
            yield from _eval_figures(f"{name}/{key}/{label}", subset)


_CALLS_PREFIX, _FAILURES_PREFIX = "tool_calls/", "tool_failures/"


def dropped_tokens(
    groups: Sequence[TrajectoryGroup],
    members: Sequence[Trajectory],
    samples: Sequence[Sequence[TrainSample]],
    rows: Sequence[TrainRow],
    *,
    policy: str,
) -> dict[str, float]:
    """Count the sampled tokens of a policy in ``groups`` that are in no row of a step, by reason.

    Together with the trained tokens of the rows they are all tokens that it sampled in these groups. ``samples`` are
    the rows of the compared trajectories, ``members``.

    Returns:
        ``dropped/failed_tokens``: of trajectories with an error; ``dropped/left_out_tokens``: excluded by the agent's
        account of its episode; ``dropped/cut_tokens``: truncated; ``dropped/dead_tokens``: of dead groups.
    """
    trajectories = [trajectory for group in groups for trajectory in group.trajectories if trajectory.policy == policy]
    trained_ids = {row.sample.trajectory_id for row in rows}
    failed_tokens = sum(trajectory.sampled_tokens for trajectory in trajectories if trajectory.error is not None)
    left_out_tokens = cut_tokens = dead_tokens = 0
    for member, member_samples in zip(members, samples, strict=True):
        trained_tokens = sum(sample.trained_tokens for sample in member_samples)
        excluded_tokens = sum(
            end - start for segment in member.segments if segment.sampled for start, end in segment.left_out or ()
        )
        left_out_tokens += excluded_tokens
        cut_tokens += member.sampled_tokens - excluded_tokens - trained_tokens
        dead_tokens += 0 if member.id in trained_ids else trained_tokens
    counts = {"failed": failed_tokens, "left_out": left_out_tokens, "cut": cut_tokens, "dead": dead_tokens}
    return {f"dropped/{reason}_tokens": float(count) for reason, count in counts.items()}


def tool_metrics(groups: Sequence[TrajectoryGroup], *, policy: str) -> dict[str, float]:
    """Return tool calls per trajectory and error rates, in total and by tool; failed trajectories are skipped.

    Returns:
        ``tools/calls``, ``tools/error_rate`` and ``tools/error_rate_by/NAME``; empty where no tool was called.
    """
    members = (trajectory for group in groups for trajectory in group.trajectories if trajectory.policy == policy)
    trajectories = [trajectory for trajectory in members if trajectory.error is None]
    counts: defaultdict[str, float] = defaultdict(float)
    for trajectory in trajectories:
        for name, value in trajectory.metrics.items():
            if name in ("tool_calls", "tool_errors") or name.startswith((_CALLS_PREFIX, _FAILURES_PREFIX)):
                counts[name] += value
    calls = counts["tool_calls"]
    if not calls:
        return {}
    by_tool = {
        name.removeprefix(_CALLS_PREFIX): count
        for name, count in counts.items()
        if name.startswith(_CALLS_PREFIX) and count
    }
    return {
        "tools/calls": calls / len(trajectories),
        "tools/error_rate": counts["tool_errors"] / calls,
        # A slash would be a level of the metric's name.
        **{
            f"tools/error_rate_by/{name.replace('/', '_')}": counts.get(f"{_FAILURES_PREFIX}{name}", 0.0) / count
            for name, count in sorted(by_tool.items())
        },
    }
