"""The names of logged metrics, and how those of a step are computed."""

from __future__ import annotations

import math
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from turnwise.errors import FormatError
from turnwise.model.core import MemoryUse
from turnwise.trajectory import TrainSample, Trajectory, TrajectoryGroup

if TYPE_CHECKING:
    # They bring torch, without which the metrics of a finished run are read.
    from turnwise.trainer.core import TrainRow

METRICS: dict[str, str] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
"""Name (``*`` stands for any ending) and meaning of what the trainer logs."""

METRICS_FILE = "metrics.jsonl"

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


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the effective records of a file; a partial last line of a killed process is skipped.

    Records of steps that the next process repeated are dropped, and so are earlier evaluations with the same label and
    step.

    Raises:
        FormatError: Another line is not a JSON object, or does not say where a process resumed.
    """
    records: list[dict[str, Any]] = []
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        if not line.endswith(b"}"):
            continue
        try:
            record = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise FormatError(f"{path}:{number}: not JSON: {error}") from error
        if record.get("kind") == "start":
            if not isinstance(resumed := record.get("step"), int):
                raise FormatError(f"{path}:{number}: a start record has step {resumed!r}, which is no number")
            records = [earlier for earlier in records if earlier.get("step", 0) <= resumed]
            continue
        if record.get("kind") == "eval":
            records = [earlier for earlier in records if _evaluation(earlier) != _evaluation(record)]
        records.append(record)
    return records


def _evaluation(record: Mapping[str, Any]) -> tuple[Any, ...]:
    return record.get("kind"), record.get("step"), record.get("label")


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
