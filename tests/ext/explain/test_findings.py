"""What rules find in the records of a run, and what the command prints."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from support.report_pages import played, write_metrics, write_run
from turnwise.cli.app import app
from turnwise.errors import ConfigError, FormatError
from turnwise.ext.explain.evidence import Curves, RunEvidence, TurnGap
from turnwise.ext.explain.explain import RULES, explain_run
from turnwise.ext.explain.findings import KINDS, STAGES, THRESHOLDS, Finding, Level, in_order
from turnwise.ext.explain.members import Member

STEPS = 9


def member(number: int, **changes: Any) -> Member:
    """Return a member of a group of four, two of which earn 1."""
    values: dict[str, Any] = {
        "id": f"m{number}", "task": f"task-{number // 4}", "group": f"g{number // 4}", "step": 1 + number // 8,
        "lag": 0, "reward": float(number % 2), "tokens": 10, "turns": 2, "calls": 1, "errors": 0, "refused": 0,
        "cut": "", "answer": f"answer {number}", "last_result": "", "answer_tokens": 3, "longest_turn": 6, "nll": 5.0,
        "digest": number, "temperature": 1.0,
    }  # fmt: skip
    return Member(**{**values, **changes})


def evidence_of(members: list[Member] | None = None, config: Any = None, **series: float | list[float]) -> RunEvidence:
    """Return the evidence of a run: its members, and the values of metrics by their names with ``__`` for a slash."""
    records = [
        {"kind": "train", "step": step + 1, "reward/mean": 0.5}
        | {
            name.replace("__", "/"): values if isinstance(values, float) else values[step]
            for name, values in series.items()
        }
        for step in range(STEPS)
    ]
    evidence = RunEvidence(Path("run"), {"mode": "sync", **(config or {})}, Curves(records))
    evidence.members += [member(number) for number in range(8 * STEPS)] if members is None else members
    return evidence


def findings_of(evidence: RunEvidence) -> dict[str, Finding]:
    return {finding.name: finding for rule in RULES for finding in rule(evidence)}


def varied(**changes: Any) -> list[Member]:
    return [member(number, **changes) for number in range(8 * STEPS)]


def test_run_that_learns_has_no_findings() -> None:
    assert findings_of(evidence_of(train__update_ratio=1e-4, train__grad_norm=1.0, gap__mean=1e-6)) == {}


@pytest.mark.parametrize(
    ("name", "level", "members", "series"),
    [
        ("step_too_small", Level.PROBLEM, None, {"train__update_ratio": 1e-9, "train__grad_norm": 1.0}),
        ("step_too_large", Level.PROBLEM, None, {"train__update_ratio": 0.4, "train__grad_norm": 1.0}),
        ("stale", Level.PROBLEM, varied(lag=3), {"lag__max": 3.0}),
        ("stale", Level.PROBLEM, None, {"gap__mean": [1e-6] + [0.1 * step for step in range(1, STEPS)]}),
        ("temperature", Level.PROBLEM, varied(temperature=0.6), {}),
        ("temperature", Level.PROBLEM, varied(nll=2.0), {"train__entropy": 0.9, "train__tokens": 100.0}),
        ("gap", Level.PROBLEM, None, {"gap__mean": 0.2}),
        ("truncated_sampling", Level.WARNING, None, {"sampling__truncated": 0.9, "sampling__cut_mass": 0.2}),
        ("repeated_seeds", Level.PROBLEM, [member(n, nll=40.0, digest=n // 4) for n in range(72)], {}),
        ("reward_sign", Level.PROBLEM, [member(n, errors=n % 2) for n in range(72)], {}),
        ("all_solved", Level.PROBLEM, varied(reward=1.0), {"reward__mean": 1.0}),
        ("never_rewarded", Level.PROBLEM, varied(reward=0.0), {}),
        ("equal_rewards", Level.PROBLEM, varied(reward=0.4), {}),
        ("limits", Level.PROBLEM, varied(cut="max_turns", reward=0.0), {}),
        ("entropy_collapse", Level.WARNING, None, {"train__entropy": [1.0] * 3 + [0.02] * 6}),
    ],
)
def test_rule_finds_what_it_is_for(name: str, level: Level, members: list[Member] | None, series: Any) -> None:
    findings = findings_of(evidence_of(members, **series))
    assert name in findings
    assert findings[name].level == level


def test_tool_of_which_no_call_succeeds_is_named_with_its_messages() -> None:
    evidence = evidence_of(varied(errors=1))
    evidence.counts.calls.update({"search": 80, "look": 80})
    evidence.counts.failures.update({"search": 80, "look": 10})
    evidence.counts.messages["search"] = Counter({"no index": 80})
    finding = findings_of(evidence)["broken_tool"]
    assert "search always fails" in finding.text
    assert finding.evidence == ("search: 80 of 80 calls failed", "80 x no index")


def test_limit_is_a_note_where_what_ends_itself_stays_far_below_it() -> None:
    cut = [member(n, cut="max_tokens_per_turn" if n % 3 == 0 else "", reward=float(n % 3 > 0)) for n in range(72)]
    for largest, level in ((8, Level.WARNING), (100, Level.NOTE)):
        config = {"rollout": {"max_tokens_per_turn": largest}}
        assert findings_of(evidence_of(cut, config))["limits"].level == level


def test_answer_that_is_paid_in_another_case_is_unread() -> None:
    answers = [member(n, answer="Paris" if n % 2 else "paris.", calls=0) for n in range(72)]
    finding = findings_of(evidence_of(answers))["unread_answers"]
    assert finding.text.startswith("the reward misses right answers: 36 of 36")


def test_right_answers_that_earn_less_than_wrong_ones_are_an_inverted_reward() -> None:
    evidence = evidence_of([member(n, answer="7" if n % 2 == 0 else "8", reward=-float(n % 2 == 0)) for n in range(72)])
    evidence.task_data = {f"task-{number}": {"answer": "7"} for number in range(18)}
    assert "wrong answers earn more" in findings_of(evidence)["reward_sign"].text


def test_one_answer_that_spreads_over_tasks_while_the_reward_rises_is_a_hack() -> None:
    late = 8 * (STEPS - 3)
    answers = [member(n, calls=0, answer="all of them" if n >= late else f"answer {n}") for n in range(72)]
    evidence = evidence_of(answers, reward__mean=[0.1] * 3 + [0.6] * 3 + [0.9] * 3)
    finding = findings_of(evidence)["reward_hack"]
    assert finding.level == Level.PROBLEM
    assert "half of it by step 4" in finding.evidence[0]


def test_surprise_of_few_informative_groups_shows_no_temperature() -> None:
    members = [member(n, **({"nll": 9.0} if n < 12 else {"reward": 1.0})) for n in range(8 * STEPS)]
    findings = findings_of(evidence_of(members, train__entropy=0.4, train__tokens=100.0))
    assert "temperature" not in findings
    assert "all_solved" in findings


def test_a_temperature_shows_in_the_tokens_that_differ_most() -> None:
    evidence = evidence_of(gap__mean=0.3)
    evidence.largest_gaps = [
        {"trainer": -0.1 * n, "rollout": -0.2 * n, "gap": 0.1 * n, "turn": 0, "token": n, "trajectory": "m0"}
        for n in range(20)
    ]
    assert "the server's temperature is 0.5 of the trainer's" in findings_of(evidence)["temperature"].evidence[0]


def test_gap_names_turn_token_and_line_of_the_template() -> None:
    evidence = evidence_of(gap__mean=0.2)
    evidence.prompts.template = ["{{ bos }}", "<|assistant|>{{ content }}"]
    evidence.gaps = {0: TurnGap(100, 1.0), 1: TurnGap(50, 20.0)}
    token = {"gap": 2.0, "token": 5, "text": "Yes", "before": "\n<|assistant|>", "turn": 1, "trajectory": "m1"}
    evidence.largest_gaps = [{**token, "trainer": -1.0, "rollout": -3.0}]
    turns, token_text, line = findings_of(evidence)["gap"].evidence
    assert turns.startswith("turn 2: 0.4 nats, 50 tokens")
    assert "'Yes' after" in token_text
    assert line == "line 2 of the chat template writes the text there: <|assistant|>{{ content }}"


def test_what_the_run_warned_of_is_a_finding_unless_it_was_once_and_early() -> None:
    evidence = evidence_of(dropped__cut_tokens=50.0, batch__trained_tokens=50.0)
    evidence.warnings = {"cut": {1: "cut off", 9: "half was cut off"}, "failed": {2: "some failed"}, "gap": {9: "far"}}
    finding = findings_of(evidence)["warned"]
    assert (finding.text, finding.share) == ("cut: half was cut off", 0.5)


def test_findings_come_by_level_then_cause_then_share() -> None:
    findings = [
        Finding.of("never_rewarded", Level.PROBLEM, 1.0, ""), Finding.of("limits", Level.PROBLEM, 0.6, ""),
        Finding.of("step_too_large", Level.WARNING, 1.0, ""), Finding.of("hidden_tools", Level.PROBLEM, 1.0, ""),
    ]  # fmt: skip
    names = [finding.name for finding in in_order(findings)]
    assert names == ["hidden_tools", "limits", "never_rewarded", "step_too_large"]


def write_short_run(folder: Path, steps: int) -> Path:
    members = [
        played(f"e{n}", task=f"t{n // 4}", rewards=[("t0", "score", 0.0)], group_id=f"g{n // 4}") for n in range(40)
    ]
    run = write_run(folder, members)
    records = [{"kind": "train", "step": step, "reward/mean": 0.0} for step in range(1, steps + 1)]
    return write_metrics(run, {"kind": "start", "part": 0, "step": 0}, *records)


def test_command_prints_findings_and_json(tmp_path: Path) -> None:
    run = write_short_run(tmp_path / "run", 6)
    text = CliRunner().invoke(app, ["explain", str(run)]).output
    assert "problem never_rewarded" in text
    assert "change: mix in easier tasks" in text
    explanation = json.loads(CliRunner().invoke(app, ["explain", str(run), "--json"]).stdout)
    assert (explanation["steps"], explanation["trajectories"]) == (6, 40)
    [finding] = explanation["findings"]
    assert (finding["name"], finding["level"], finding["stage"]) == ("never_rewarded", "problem", "groups")
    assert finding["remedy"] == KINDS["never_rewarded"].remedy


def test_short_run_and_other_folders_are_refused_with_what_is_needed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has 3 train steps: explain needs at least 6"):
        explain_run(write_short_run(tmp_path / "short", 3))
    with pytest.raises(FormatError, match=r"holds no metrics\.jsonl"):
        explain_run(tmp_path)


def test_every_kind_has_a_stage_and_every_threshold_a_reason() -> None:
    assert {kind.stage for kind in KINDS.values()} <= set(STAGES)
    assert [name for name, bound in THRESHOLDS.items() if not bound.reason] == []
