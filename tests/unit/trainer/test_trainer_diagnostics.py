"""Where trainer and server differ, what was dropped, how often tools failed, and what is said about it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from support.chat.toy_renderer import ToyRenderer
from turnwise.trainer.algorithms.gap import GapWatch, describe_gap, gap_record
from turnwise.trainer.config.train import TrainConfig
from turnwise.trainer.core import TrainRow
from turnwise.trainer.observe.metrics import dropped_tokens, tool_metrics
from turnwise.trainer.observe.warnings import Diagnostics, TrainingWarning, Warner, WarningContext, find_warnings
from turnwise.trajectory import Segment, Trajectory, TrajectoryGroup, to_samples


def segment(index: int, ids: list[int], *, turn: str | None = None, parent: int | None = None, **more) -> Segment:
    sampled = turn is not None
    return Segment(
        index,
        index - 1 if parent is None else parent,
        "sampled" if sampled else "context",
        np.array(ids, np.int32),
        turn_id=turn,
        logprobs=np.full(len(ids), -1.0, np.float32) if sampled else None,
        weight_versions=((0, 0, len(ids)),) if sampled else (),
        **more,
    )


def two_turns(name: str = "a", **more) -> Trajectory:
    """Context of 2 ids, a turn of 2, context of 1, a turn of 3."""
    parts = [
        segment(0, [65, 66]),
        segment(1, [67, 68], turn="t0"),
        segment(2, [69]),
        segment(3, [70, 71, 72], turn="t1"),
    ]
    return Trajectory(name, name, "g", "task", segments=parts, **more)


def rows_of(*trajectories: Trajectory, **more) -> list[TrainRow]:
    return [TrainRow(sample) for trajectory in trajectories for sample in to_samples(trajectory, **more).rows]


# The gap


def watched() -> GapWatch:
    """Two micro-batches: rows 1 and 0 (in this order), each with 5 trained tokens, the server's at -1."""
    watch = GapWatch()
    rows = rows_of(two_turns("a"), two_turns("b"))
    watch.set_rows(rows)
    rollout = torch.full((5,), -1.0)
    watch.record((1,), torch.zeros(5, dtype=torch.int64), torch.tensor([-1.0, -1.5, -1.0, -1.0, -1.25]), rollout)
    watch.record((0,), torch.zeros(5, dtype=torch.int64), torch.tensor([-1.0, -1.0, -1.0, -4.0, -1.0]), rollout)
    return watch


def test_the_gap_by_turn_and_the_tokens_that_differ_most() -> None:
    watch = watched()
    gaps = watch.take_gaps()
    assert not watch.has_tokens
    first, second = gaps.turns
    # Turn 0: tokens 0 and 1 of each row: 0, 0.5, 0, 0. Turn 1: the other three: 0, 0, 0.25, 0, 3, 0.
    assert first == {"turn": 0, "tokens": 4, "mean": 0.125, "max": 0.5}
    assert second == {"turn": 1, "tokens": 6, "mean": pytest.approx(3.25 / 6), "max": 3.0}
    assert gaps.metrics() == {"gap/worst_turn": second["mean"]}
    largest = [tuple(token[key] for key in ("trajectory", "turn", "place", "token", "gap")) for token in gaps.largest]
    # Tokens that do not differ are none of them.
    assert largest == [("a", 1, 1, 71, 3.0), ("b", 0, 1, 68, 0.5), ("b", 1, 2, 72, 0.25)]


def test_largest_gap_names_its_trajectory_turn_and_token() -> None:
    watch = GapWatch()
    watch.set_rows(rows_of(two_turns("a"), two_turns("b")))
    trainer = torch.full((10,), -1.0)
    trainer[8] = -2.0
    # Row 1 stands first: token 8 is the fourth of row 0.
    watch.record((1, 0), torch.tensor([0] * 5 + [1] * 5), trainer, torch.full((10,), -1.0))
    [worst] = watch.take_gaps().largest
    assert (worst["trajectory"], worst["turn"], worst["place"], worst["token"]) == ("a", 1, 1, 71)
    assert GapWatch().take_gaps().metrics() == {}


def test_the_worst_token_is_named_with_its_message() -> None:
    record = gap_record(watched().take_gaps(), {"a": two_turns("a")}, ToyRenderer())
    worst, other, *_ = record["largest"]
    assert (worst["turn_id"], worst["segment"], worst["agent"], worst["tokens"]) == ("t1", 3, "main", 3)
    assert "turn_id" not in other
    words = describe_gap(record)
    assert "number 2 of 3 in turn 2 of trajectory a: server -1, trainer -4" in words
    assert repr(ToyRenderer().decode(np.array([71], np.int32))) in words
    assert describe_gap({"largest": []}) == ""


# What is dropped


def test_every_sampled_token_is_trained_or_has_its_reason() -> None:
    spared = two_turns("spared")
    spared.segments[3] = segment(3, [70, 71, 72], turn="t1", left_out=((1, 2),))
    failed = two_turns("failed", error="EnvError: gone")
    theirs = two_turns("theirs", policy="frozen")
    members = [two_turns("whole"), spared, two_turns("dead")]
    # Rows of 7 ids lack the last of the 8: one token each.
    samples = [to_samples(member, max_tokens=7).rows for member in members]
    rows = [TrainRow(sample) for member_samples in samples[:2] for sample in member_samples]
    group = TrajectoryGroup("g", "task", [*members, failed, theirs])
    metrics = dropped_tokens([group], members, samples, rows, policy="main")
    assert metrics == {
        "dropped/failed_tokens": 5.0,
        "dropped/left_out_tokens": 1.0,
        "dropped/cut_tokens": 3.0,
        "dropped/dead_tokens": 4.0,
    }
    trained = sum(row.sample.trained_tokens for row in rows)
    # 4 trajectories of 5 sampled tokens; whole trains 4, spared 3.
    assert (trained, trained + sum(metrics.values())) == (7, 20)


def test_tool_errors_of_all_and_by_tool() -> None:
    first = two_turns(metrics={"tool_calls": 3.0, "tool_errors": 1.0, "tool_calls/a/b": 1.0, "tool_calls/up": 2.0})
    first.metrics["tool_failures/up"] = 1.0
    second = two_turns(metrics={"tool_calls": 1.0, "tool_errors": 1.0, "tool_calls/(unknown)": 1.0})
    second.metrics["tool_failures/(unknown)"] = 1.0
    failed = two_turns(error="E: x", metrics={"tool_calls": 50.0})
    metrics = tool_metrics([TrajectoryGroup("g", "task", [first, second, failed])], policy="main")
    assert metrics == {
        "tools/calls": 2.0,
        "tools/error_rate": 0.5,
        "tools/error_rate_by/(unknown)": 1.0,
        "tools/error_rate_by/a_b": 0.0,
        "tools/error_rate_by/up": 0.5,
    }
    assert tool_metrics([TrajectoryGroup("g", "task", [two_turns()])], policy="main") == {}


# Warnings

AMISS = {
    "dead_groups": ({"batch/groups": 25.0, "batch/dead_groups": 23.0, "reward/mean": 0.5}, "92% of groups have equal"),
    "nothing_trained": ({"train/tokens": 0.0, "batch/rows": 3.0}, "no token of this step was trained"),
    "short": ({"replay/short": 2.0}, "the step lacks 2 groups"),
    "gap": ({"gap/mean": 0.2, "gap/max": 3.0}, "by 0.2 nats on average, 3 at most. With equal weights"),
    "truncation": (
        {"sampling/truncated": 0.25, "sampling/cut_mass": 0.08},
        "(sampling parameters of requests, grammars or forced calls), while servers report, and the loss uses, their "
        "probabilities under the whole one; 25% of the tokens lost 0.08 of the probability, on average",
    ),
    "entropy": ({"train/entropy": 0.001}, "entropy is 0.001 nats"),
    "clipped": ({"train/clip_fraction": 0.45}, "45% of tokens are clipped"),
    "divergence": ({"train/approx_kl": 0.5}, "moved by 0.5 nats"),
    "truncated": (
        {"stop/max_tokens": 0.2, "stop/max_turns": 0.3, "stop/completed": 0.5},
        "50% of trajectories ended at a limit, most of them (30%) at max_turns: raise rollout.max_turns",
    ),
    "tool_errors": (
        {"tools/error_rate": 0.4, "tools/calls": 3.0, "batch/trajectories": 8.0, "tools/error_rate_by/up": 0.9},
        "40% of tool calls were answered by an error (the worst is up: 90%)",
    ),
    "failed": ({"batch/failed": 3.0, "batch/trajectories": 5.0}, "38% of trajectories ended in an error"),
    "empty": ({"rollout/turns": 1.5, "rollout/sampled_tokens": 1.5}, "every turn is a single token"),
    "unforked": ({"tree/branches": 1.0, "tree/refusals": 3.5}, "rollout.tree forked no episode"),
    "cut": ({"dropped/cut_tokens": 10.0, "batch/trained_tokens": 90.0}, "10% of the tokens to train were cut off"),
    "correction": ({"correction/rejected": 0.5, "correction/ess": 0.1}, "rejects 50% of tokens"),
    "not_finite": ({"train/non_finite_updates": 2.0}, "2 optimizer steps were skipped"),
}


@pytest.mark.parametrize("name", AMISS)
def test_warning_of_each_rule_has_finding_and_remedy(name: str) -> None:
    metrics, text = AMISS[name]
    [warned] = find_warnings(metrics, WarningContext())
    assert warned.name == name
    assert text in warned.text
    # A healthy step, and one of which nothing is known.
    healthy = {
        "batch/groups": 25.0, "batch/dead_groups": 5.0, "train/tokens": 99.0, "batch/rows": 9.0, "gap/mean": 1e-5,
        "gap/max": 1e-4, "train/entropy": 0.5, "train/clip_fraction": 0.1, "train/approx_kl": 0.01, "stop/timeout": 0.1,
        "tools/error_rate": 0.1, "tools/calls": 9.0, "batch/trajectories": 99.0, "batch/failed": 1.0,
        "dropped/cut_tokens": 1.0, "batch/trained_tokens": 99.0, "correction/ess": 0.9, "train/non_finite_updates": 0.0,
    }  # fmt: skip
    assert find_warnings(healthy, WarningContext(exact=True)) == find_warnings({}, WarningContext(exact=True)) == []


def test_rules_depend_on_their_context() -> None:
    small = {"gap/mean": 0.001, "gap/max": 0.05}
    assert find_warnings(small, WarningContext()) == []
    [warned] = find_warnings(small, WarningContext(exact=True, worst_gap="the largest is at token 5"))
    assert "0.05 at most; the largest is at token 5. With equal weights" in warned.text
    [warned] = find_warnings(AMISS["unforked"][0], WarningContext(unforked="Env cannot fork: it holds a lock"))
    assert warned.text.endswith("(tree/branches is 1): Env cannot fork: it holds a lock")
    [warned] = find_warnings({}, WarningContext(truncations=("rollout.top_p 0.9", "rollout.top_k 20")))
    assert "truncated distribution (rollout.top_p 0.9, rollout.top_k 20), while" in warned.text
    context = WarningContext(truncations=("rollout.top_k 20",), keeps_masks=True)
    assert find_warnings({"sampling/truncated": 1.0, "sampling/cut_mass": 0.1}, context) == []
    dead, _ = AMISS["dead_groups"]
    assert find_warnings(dead, WarningContext(compares=False)) == []
    assert find_warnings({**dead, "batch/groups": 2.0, "batch/dead_groups": 2.0}, WarningContext()) == []


@pytest.mark.parametrize(
    ("metrics", "reason"),
    [
        ({"dropped/cut_tokens": 4.0, "dropped/dead_tokens": 0.0}, "dropped/* in metrics.jsonl has the counts"),
        ({"dropped/cut_tokens": 0.0, "correction/rejected": 1.0}, "the rollout correction rejected all"),
        ({"dropped/cut_tokens": 0.0}, "rewards are equal within each group"),
    ],
)
def test_step_without_trained_tokens_is_warned_about_with_its_reason(metrics: dict[str, float], reason: str) -> None:
    nothing, _ = AMISS["nothing_trained"]
    warnings = find_warnings(nothing | metrics, WarningContext())
    warned = [warning for warning in warnings if warning.name == "nothing_trained"]
    assert [reason in warning.text for warning in warned] == [True]


def test_step_of_the_critic_alone_is_not_warned_about() -> None:
    nothing, _ = AMISS["nothing_trained"]
    assert find_warnings({**nothing, "critic/loss": 0.3}, WarningContext()) == []


def test_a_warning_is_repeated_at_growing_distances() -> None:
    warner, same, other = Warner(quiet=4), TrainingWarning("a", "text"), TrainingWarning("b", "text")
    steps = [step for step in range(1, 30) if warner.due(step, [same])]
    # 1, then 4 steps later, then 8, then 16.
    assert steps == [1, 5, 13, 29]
    assert warner.due(29, [same, other]) == [other]


def test_diagnostics_records_gaps_and_returns_due_warnings(tmp_path: Path) -> None:
    config = TrainConfig.model_validate(
        {
            "name": "r",
            "steps": 1,
            "policies": {"main": {"model": {"path": "m"}}},
            "rollout": {"env": {"name": "lookup"}},
        }
    )
    diagnostics = Diagnostics(tmp_path, {"main": (config, ToyRenderer())})
    groups = [TrajectoryGroup("g", "task", [two_turns("a"), two_turns("b")])]
    metrics = {"gap/mean": 0.3, "gap/max": 3.0}
    [warned] = diagnostics.step(1, metrics, {"main": watched().take_gaps()}, groups)
    assert "in turn 2 of trajectory a" in warned.text
    assert diagnostics.step(2, metrics, {"main": GapWatch().take_gaps()}, groups) == []
    diagnostics.close()
    [record] = [json.loads(line) for line in (tmp_path / "diagnostics.jsonl").read_text().splitlines()]
    assert (record["kind"], record["step"], len(record["turns"]), len(record["largest"])) == ("gap", 1, 2, 3)
