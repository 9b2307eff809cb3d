"""Paired comparison of evaluations, against scipy's computation of the same."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from typer.testing import CliRunner

from support.property_tests import examples
from turnwise.cli.app import app
from turnwise.errors import FormatError
from turnwise.evaluation.comparison import TaskScores, bootstrap_interval, compare, read_scores, sign_flip_test


def scores(means: dict[str, float], name: str = "run", **changes: str) -> TaskScores:
    facts = {"part": "sampled", "metric": "success", **changes}
    return TaskScores(name, means=means, episodes=4 * len(means), **facts)


def folder(path: Path, rows: list[tuple[str, str, float]]) -> Path:
    path.mkdir()
    lines = [
        json.dumps({"part": part, "task_id": task, "success": reward >= 1, "reward": reward})
        for part, task, reward in rows
    ]
    (path / "episodes.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return path


@given(st.lists(st.sampled_from([-1.0, -0.5, -0.25, 0.0, 0.25, 0.75]), min_size=2, max_size=9))
def test_the_exact_p_value_is_scipys(values: list[float]) -> None:
    differences = np.array(values)
    theirs = stats.permutation_test(
        (differences,), np.mean, permutation_type="samples", vectorized=True, n_resamples=np.inf
    )
    assert sign_flip_test(differences) == pytest.approx(theirs.pvalue, abs=1e-9)


@given(st.lists(st.sampled_from([-1.0, 0.0, 1.0]), min_size=1, max_size=14))
def test_binary_outcomes_give_mcnemars_exact_test(values: list[float]) -> None:
    gained, lost = values.count(1.0), values.count(-1.0)
    theirs = stats.binomtest(gained, gained + lost).pvalue if gained + lost else 1.0
    assert sign_flip_test(np.array(values)) == pytest.approx(theirs)


def test_many_tasks_are_permuted_at_random_and_alike_each_time() -> None:
    differences = np.random.default_rng(3).normal(0.15, 1.0, 200)
    ours = sign_flip_test(differences)
    # With this many tasks the distribution is close to Student's.
    assert ours == pytest.approx(stats.ttest_1samp(differences, 0.0).pvalue, abs=0.01)
    assert ours == sign_flip_test(differences)


def test_the_interval_is_scipys_percentile_bootstrap() -> None:
    differences = np.random.default_rng(5).choice([-0.5, 0.0, 0.25, 1.0], 60)
    theirs = stats.bootstrap((differences,), np.mean, method="percentile", n_resamples=10_000, rng=1)
    low, high = bootstrap_interval(differences)
    assert low == pytest.approx(theirs.confidence_interval.low, abs=0.02)
    assert high == pytest.approx(theirs.confidence_interval.high, abs=0.02)


def test_interval_covers_the_true_difference_at_its_level() -> None:
    rng = np.random.default_rng(0)
    rounds = examples(300)
    covered = 0
    for _ in range(rounds):
        low, high = bootstrap_interval(rng.choice([-0.5, 0.0, 0.5, 1.0], 50, p=[0.2, 0.4, 0.2, 0.2]))
        covered += low <= 0.2 <= high
    assert covered / rounds >= 0.88


def test_comparison_weighs_common_tasks_equally() -> None:
    first = scores({"a": 0.0, "b": 0.5, "c": 1.0, "d": 0.25, "x": 1.0})
    second = scores({"a": 1.0, "b": 0.25, "c": 1.0, "d": 0.5, "y": 0.0, "z": 0.0})
    result = compare(first, second)
    assert (result.tasks, result.only_before, result.only_after) == (4, 1, 2)
    assert (result.before, result.after) == (pytest.approx(0.4375), pytest.approx(0.6875))
    assert result.difference == pytest.approx(0.25)
    assert (result.better, result.worse) == (2, 1)
    gained = [(change.task, change.before, change.after) for change in result.gained]
    assert gained == [("a", 0.0, 1.0), ("d", 0.25, 0.5)]
    assert [(change.task, change.before, change.after) for change in result.lost] == [("b", 0.5, 0.25)]


def test_equal_evaluations_differ_by_nothing() -> None:
    result = compare(scores({"a": 1.0, "b": 0.0}), scores({"a": 1.0, "b": 0.0}))
    assert (result.difference, result.interval, result.p_value) == (0.0, (0.0, 0.0), 1.0)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (scores({"z": 1.0}, "other"), "run and other have no common tasks .*'a' and 'z'.*--tasks"),
        (scores({"a": 1.0}, "other", part="greedy"), "run has part 'sampled', other 'greedy': choose one with --part"),
        (scores({"a": 1.0}, "other", metric="reward"), "metric 'success', other 'reward'"),
    ],
)
def test_evaluations_without_common_tasks_are_refused(other: TaskScores, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        compare(scores({"a": 1.0}), other)


def test_the_command_reads_directories_of_evaluations(tmp_path: Path) -> None:
    rows = [("sampled", f"t{number}", float(number % 2)) for number in range(40)]
    one = folder(tmp_path / "one", [*rows, ("greedy", "t0", 0.0)])
    two = folder(tmp_path / "two", [(part, task, 1.0) for part, task, _ in rows])
    outcome = CliRunner().invoke(app, ["compare", str(one), str(two), "-n", "2"], env={"COLUMNS": "140"})
    assert outcome.exit_code == 0, outcome.output
    assert all(part in outcome.output for part in ("40 common tasks", "+0.500", "solved now: t0", "18 more")), (
        outcome.output
    )
    assert outcome.output.count("40 common tasks") == outcome.output.count("success and reward, sampled") == 1
    raw = CliRunner().invoke(app, ["compare", str(one), str(two), "--json", "--metric", "reward"])
    record = json.loads(raw.stdout)
    assert (record["metric"], record["difference"], record["p_value"]) == ("reward", 0.5, pytest.approx(1e-5, abs=1e-4))
    assert record["gained"] == []


def test_comparison_of_successes_shows_the_reward_and_tasks_in_natural_order(tmp_path: Path) -> None:
    folders = []
    for name, reward in (("one", 0.25), ("two", 0.5)):
        (tmp_path / name).mkdir()
        rows = [
            {"part": "sampled", "task_id": f"rows-{number}", "reward": reward, "success": name == "two", "error": None}
            for number in (10, 9, 1)
        ]
        (tmp_path / name / "episodes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        folders.append(str(tmp_path / name))
    output = CliRunner().invoke(app, ["compare", *folders], env={"COLUMNS": "140"}).output
    assert re.findall(r"rows-\d+", output) == ["rows-1", "rows-9", "rows-10"]
    rewards = output[output.index("reward, sampled") :]
    assert [line.split()[-3:] for line in rewards.splitlines() if "3 common tasks" in line] == [
        ["0.250", "0.500", "+0.250"]
    ]


def test_failed_and_unfinished_episodes_are_counted(tmp_path: Path) -> None:
    one = folder(tmp_path / "one", [("sampled", "a", 1.0), ("sampled", "b", 0.0)])
    two = folder(tmp_path / "two", [("sampled", "a", 1.0)])
    (two / "summary.json").write_text('{"sampled": {"failed": 3}, "greedy": {"failed": 8}, "unfinished": 5}')
    record = compare(read_scores(one), read_scores(two)).to_json()
    assert {name: record[name] for name in ("episodes", "failed", "unfinished")} == {
        "episodes": [2, 1],
        "failed": [0, 3],
        "unfinished": [0, 5],
    }
    output = CliRunner().invoke(app, ["compare", str(one), str(two)], env={"COLUMNS": "140"}).output
    assert "3 of 4" in next(line for line in output.splitlines() if "failed, not counted" in line)
    assert "not finished" in output
    (two / "summary.json").write_text("[]")
    with pytest.raises(FormatError, match=r"summary\.json: no summary of an evaluation"):
        read_scores(two)


def test_successes_of_another_minimum_reward_are_not_compared(tmp_path: Path) -> None:
    folders = [folder(tmp_path / name, [("sampled", "a", 0.5), ("sampled", "b", 1.0)]) for name in ("one", "other")]
    (folders[0] / "config.yaml").write_text("success_reward: 0.5\n")
    with pytest.raises(FormatError, match=r"at least 0\.5, one of .*other 1 \(success_reward\): .* --metric reward"):
        compare(*map(read_scores, folders))
    assert compare(*(read_scores(folder_path, metric="reward") for folder_path in folders)).difference == 0
    (folders[1] / "config.yaml").write_text("success_reward: 0.5\n")
    assert compare(*map(read_scores, folders)).tasks == 2


def test_directory_without_evaluation_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"no such file: .*episodes\.jsonl: give the directory of an evaluation"):
        read_scores(tmp_path)
    run = folder(tmp_path / "run", [("greedy", "a", 1.0)])
    assert read_scores(run).part == "greedy"
    with pytest.raises(FormatError, match="has no sampled episodes; it has greedy"):
        read_scores(run, part="sampled")
    (run / "episodes.jsonl").write_text('{"part": "greedy"}\n')
    with pytest.raises(FormatError, match=r"episodes\.jsonl:1: no episode with part, task_id and success: .*task_id"):
        read_scores(run)
