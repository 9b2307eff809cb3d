"""The figures of an evaluation, against numbers worked out by hand and against simulation."""

from __future__ import annotations

import io
import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from scipy import stats

from turnwise.errors import ConfigError
from turnwise.evaluation.estimates import Estimate, best_at_k, clustered_mean, maj_at_k, pass_all_k, pass_at_k
from turnwise.evaluation.metrics import (
    EvalResult,
    episode_rows,
    print_table,
    rates_below,
    result_table,
    summarize,
    task_tags,
)
from turnwise.evaluation.suite import SuiteRow, suite_table
from turnwise.tasks import Task
from turnwise.trajectory import Segment, Trajectory, TrajectoryGroup
from turnwise.types import StopReason, as_ids


def trajectory(task: str, member: int, reward: float, **changes: object) -> Trajectory:
    ids = as_ids([1, 2, 3])
    segments = [
        Segment(0, -1, "context", ids),
        Segment(1, 0, "sampled", ids, turn_id="t0", logprobs=np.zeros(3, np.float32), weight_versions=((0, 0, 3),)),
    ]
    recorded = Trajectory(f"{task}/{member}.0", f"{task}/{member}.0", task, task, segments=segments)
    recorded.rewards = [("t0", "score", reward)]
    for name, value in changes.items():
        setattr(recorded, name, value)
    return recorded


@pytest.mark.parametrize("stop_reason", [StopReason.CANCELLED, StopReason.ERROR])
def test_episodes_that_did_not_end_by_themselves_do_not_count(stop_reason: StopReason) -> None:
    members = [trajectory("a", 0, 1.0), trajectory("a", 1, 0.0, stop_reason=stop_reason)]
    summary = summarize([TrajectoryGroup("a", "a", members)])
    assert (summary.success.mean, summary.success.episodes) == (1.0, 1)


def test_the_standard_error_of_a_worked_example() -> None:
    # Two tasks, values (1, 1) and (0, 1): mean 3/4; sums of deviations 1/2 and -1/2; squares sum to 1/2.
    # SE^2 = 2/1 * (1/2) / 4^2 = 1/16.
    estimate = clustered_mean([[1.0, 1.0], [0.0, 1.0]])
    assert estimate.mean == 0.75
    assert estimate.stderr == pytest.approx(0.25)
    assert (estimate.episodes, estimate.tasks) == (4, 2)
    assert str(estimate) == "0.750 ± 0.250"


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=30))
def test_one_value_per_task_gives_the_ordinary_standard_error(values: list[float]) -> None:
    estimate = clustered_mean([[value] for value in values])
    assert estimate.stderr == pytest.approx(np.std(values, ddof=1) / math.sqrt(len(values)), abs=1e-9)


def test_repeating_each_value_does_not_shrink_the_standard_error() -> None:
    once = clustered_mean([[0.0], [1.0], [1.0]])
    often = clustered_mean([[0.0] * 50, [1.0] * 50, [1.0] * 50])
    assert often.stderr == pytest.approx(once.stderr)


def test_one_task_has_no_standard_error_and_no_task_no_mean() -> None:
    assert clustered_mean([[1.0, 0.0]]).stderr is None
    assert math.isnan(clustered_mean([]).mean)


@pytest.mark.parametrize("n", [1, 2, 5, 6])
def test_pass_all_k_is_the_share_of_subsets_of_successes(n: int) -> None:
    for c, k in itertools.product(range(n + 1), range(1, n + 1)):
        subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
        assert pass_all_k(n, c, k) == pytest.approx(sum(all(subset) for subset in subsets) / len(subsets))


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=7), st.data())
def test_best_at_k_is_the_mean_of_the_largest_of_all_subsets(rewards: list[float], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(rewards)))
    largest = [max(subset) for subset in itertools.combinations(rewards, k)]
    assert best_at_k(rewards, k) == pytest.approx(np.mean(largest), abs=1e-9)


@pytest.mark.parametrize(
    ("answers", "k", "expected"),
    [
        # One of three is drawn; both "a" are right.
        ("aab", 1, 2 / 3),
        # Pairs aa, ab, ab: right, and twice a tie that counts half.
        ("aab", 2, 2 / 3),
        ("aab", 3, 1.0),
        # Pairs a-, a-, --: no answer does not vote, and two without one are wrong.
        ("a--", 2, 2 / 3),
        ("---", 2, 0.0),
    ],
)
def test_maj_at_k_is_the_share_of_subsets_whose_majority_is_right(answers: str, k: int, expected: float) -> None:
    answers_or_none = [None if letter == "-" else letter for letter in answers]
    assert maj_at_k(answers_or_none, [letter == "a" for letter in answers], k) == pytest.approx(expected)


def test_maj_at_k_agrees_with_the_hypergeometric_distribution() -> None:
    for n, right, k in ((12, 7, 5), (40, 22, 11)):
        answers = ["a"] * right + ["b"] * (n - right)
        exact = stats.hypergeom(n, right, k).sf(k // 2)
        # Of 40 over 11 subsets 10,000 are drawn: a standard error of .005.
        estimate = maj_at_k(answers, [answer == "a" for answer in answers], k)
        assert estimate == pytest.approx(exact, abs=1e-12 if n == 12 else 0.02)


def test_an_answer_is_the_last_match_of_the_last_message() -> None:
    def said(member: int, text: str) -> Trajectory:
        recorded = trajectory("t", member, float("4" in text))
        sampled = replace(recorded.segments[1], messages=({"role": "assistant", "content": text},))
        return replace(recorded, segments=[recorded.segments[0], sampled])

    members = [said(0, "Is it <3>? No, <4>."), said(1, "< 4>"), said(2, "<5>"), said(3, "I do not know.")]
    group = TrajectoryGroup("t", "t", members)
    rows = episode_rows(members, answer="<(.*?)>")
    assert [row.answer for row in rows] == ["4", "4", "5", None]
    summary = summarize([group], pass_k=(1, 4), answer="<(.*?)>")
    assert {k: estimate.mean for k, estimate in summary.maj_at.items()} == {1: pytest.approx(0.5), 4: 1.0}
    assert set(summary.to_json()["maj_at"]) == {"1", "4"}
    assert "maj_at" not in summarize([group], pass_k=(1,)).to_json()


@pytest.mark.parametrize(("n", "k"), [(2, 3), (2, 0), (0, 1)])
def test_more_episodes_than_there_are_have_no_estimate(n: int, k: int) -> None:
    for estimate in (
        lambda: pass_all_k(n, 0, k), lambda: best_at_k([0.0] * n, k), lambda: maj_at_k([None] * n, [False] * n, k),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"{k} needs at least .* episodes per task; there are {n}"):
            estimate()


@pytest.mark.parametrize("n", [1, 2, 5, 6])
def test_pass_at_k_is_the_share_of_subsets_with_a_success(n: int) -> None:
    for c, k in itertools.product(range(n + 1), range(1, n + 1)):
        subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
        assert pass_at_k(n, c, k) == pytest.approx(sum(any(subset) for subset in subsets) / len(subsets))


@pytest.mark.parametrize(("n", "c", "k"), [(3, 1, 4), (3, 1, 0), (3, 4, 1), (3, -1, 1)])
def test_pass_at_k_refuses_meaningless_arguments(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError):
        pass_at_k(n, c, k)


def test_a_failed_episode_is_counted_and_never_a_zero() -> None:
    groups = [
        TrajectoryGroup("a", "a", [trajectory("a", 0, 1.0), trajectory("a", 1, 0.0)], failed=1),
        TrajectoryGroup("b", "b", [trajectory("b", 0, 1.0), trajectory("b", 1, 0.0, error="InferenceError: gone")]),
    ]
    summary = summarize(groups, pass_k=[1, 2])
    assert summary.success.mean == pytest.approx(2 / 3)
    assert (summary.failed, summary.tasks, summary.success.episodes) == (2, 2, 3)
    # pass@2 is that of the task with two episodes, and says so.
    assert summary.pass_at[2] == Estimate(1.0, None, 1, 1)
    assert summary.pass_all[2].tasks == summary.best_at[2].tasks == 1
    console = Console(file=io.StringIO(), width=120)
    console.print(result_table(EvalResult(summary, None, 1.0, spent={"cost": 0.0042})))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    printed = {line.split("  ")[0].strip(): line for line in lines}
    assert "1.000 (1 of 2 tasks)" in printed["pass@2"]
    assert "tasks" not in printed["pass@1"]
    assert "0.0042" in printed["cost of all episodes"]


def test_figures_by_a_field_of_the_tasks() -> None:
    tasks = [
        Task("a", "?", {"level": 1, "tags": ["sum", "long"]}),
        Task("b", "?", {"level": 2, "tags": ["sum"]}),
        Task("c", "?", {"level": 2}),
    ]
    tags = task_tags(tasks, ["level", "tags"])
    assert tags == {
        "a": ["level 1", "tags sum", "tags long"],
        "b": ["level 2", "tags sum"],
        "c": ["level 2", "tags none"],
    }
    groups = [
        TrajectoryGroup("a", "a", [trajectory("a", 0, 1.0), trajectory("a", 1, 0.0)]),
        TrajectoryGroup("b", "b", [trajectory("b", 0, 1.0)], failed=1),
        TrajectoryGroup("c", "c", [trajectory("c", 0, 1.0), trajectory("c", 1, 1.0, error="EnvError: gone")]),
    ]
    summary = summarize(groups, tags=tags, pass_k=[2])
    figures = {name: (one.success.mean, one.success.episodes, one.failed) for name, one in summary.by_tag.items()}
    assert figures == {
        "level 1": (0.5, 2, 0),
        "level 2": (1.0, 2, 2),
        "tags long": (0.5, 2, 0),
        "tags none": (1.0, 1, 1),
        "tags sum": (pytest.approx(2 / 3), 3, 1),
    }
    assert summary.to_json()["by_tag"]["level 1"]["pass_at"]["2"]["mean"] == 1.0
    assert summarize(groups).by_tag == {}
    with pytest.raises(ConfigError, match="by is 'levl', which is in no task's data; fields there are level, tags"):
        task_tags(tasks, ["levl"])


def test_sums_over_the_sessions_of_an_episode() -> None:
    main = trajectory("a", 0, 0.75, metrics={"tool_calls": 3.0, "tool_errors": 1.0, "tool_errors/timeout": 1.0})
    critic = trajectory("a", 0, 0.25, agent="critic", id="a/0.0/critic", stop_reason=StopReason.MAX_TURNS)
    (row,) = episode_rows([critic, main])
    assert (row.reward, row.success, row.turns, row.sampled_tokens) == (1.0, True, 2, 6)
    assert row.rewards == {"score": 1.0}
    assert row.tool_calls == 3
    assert row.tool_errors == {"all": 1, "timeout": 1}
    assert row.stop_reason is StopReason.COMPLETED


@pytest.mark.parametrize(("reward", "success"), [(0.999, False), (1.0 - 1e-9, True), (1.5, True)])
def test_a_success_reaches_the_threshold_up_to_rounding(reward: float, success: bool) -> None:
    assert episode_rows([trajectory("a", 0, reward)])[0].success is success


def test_attempts_of_an_episode_are_different_episodes() -> None:
    rows = episode_rows([trajectory("a", 0, 0.0), trajectory("a", 0, 1.0, attempt=1)])
    assert [row.success for row in rows] == [False, True]


def test_stop_reasons_and_forks_are_counted() -> None:
    forked = trajectory("a", 0, 0.0, stop_reason=StopReason.MAX_TOKENS)
    forked.segments.append(Segment(2, -1, "context", as_ids([1]), fork="restart"))
    summary = summarize([TrajectoryGroup("a", "a", [forked, trajectory("a", 1, 1.0)])])
    assert summary.stop_reasons == {"max_tokens": 1, "completed": 1}
    assert summary.forks == {"restart": 1}
    assert summary.turns == 1.0


def test_no_episodes_at_all() -> None:
    summary = summarize([TrajectoryGroup("a", "a", [], failed=4)])
    assert math.isnan(summary.success.mean)
    assert (summary.failed, summary.tasks) == (4, 0)


def test_roles_have_figures_of_their_own() -> None:
    members = [
        trajectory("a", 0, 1.0, agent="solver/0"),
        trajectory("a", 0, 0.0, agent="solver/1"),
        trajectory("a", 0, 0.5, agent="proposer"),
        trajectory("b", 0, 1.0, agent="solver/0"),
        trajectory("b", 0, 1.0, agent="judge", policy="old", frozen=True),
    ]
    groups = [TrajectoryGroup("g", "a", members)]
    summary = summarize(groups)
    assert {name: (role.success.mean, role.reward.mean, role.turns) for name, role in summary.by_role.items()} == {
        "judge@old": (1.0, 1.0, 1.0), "proposer": (0.0, 0.5, 1.0), "solver": (pytest.approx(2 / 3), 2 / 3, 1.0),
    }  # fmt: skip
    # What a frozen policy got is none of the evaluated one's: 1 + 0 + 0.5 and 1.
    assert [row.reward for row in summary.rows] == [1.5, 1.0]
    # Of one role it is the mean over its sessions, so that 1 of 2 is half a success.
    solver_summary = summarize(groups, role="solver")
    assert [(row.reward, row.success) for row in solver_summary.rows] == [(0.5, False), (1.0, True)]
    assert summarize([TrajectoryGroup("g", "a", [trajectory("a", 0, 1.0)])]).by_role == {}


def test_parts_below_a_threshold_are_named() -> None:
    half = summarize([TrajectoryGroup("g", "a", [trajectory("a", 0, 1.0), trajectory("a", 1, 0.0)])])
    none = summarize([TrajectoryGroup("g", "a", [], failed=2)])
    result = EvalResult(half, none, 1.0)
    assert rates_below(0.5, result.to_json()) == {"greedy": 0.0}
    assert rates_below(0.6, result.to_json()) == {"sampled": 0.5, "greedy": 0.0}
    assert rates_below(0.0, result.to_json()) == {}


def test_success_over_a_part_is_shown_with_the_share_that_failed_and_held_to_a_threshold_with_it() -> None:
    group = TrajectoryGroup("g", "a", [trajectory("a", 0, 1.0)], source="shop", failed=3)
    result = EvalResult(None, summarize([group], tags={"a": ["level 3"]}), 1.0)
    console = Console(file=io.StringIO(), width=120)
    console.print(result_table(result))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    rates = [line for line in lines if line.startswith(" success")]
    assert len(rates) == 3
    assert all(line.rstrip().endswith("1.000 (3 of 4 failed)") for line in rates)
    assert rates_below(0.5, result.to_json()) == {"greedy": 0.25}
    console.print(suite_table([SuiteRow("shop", "small", result.to_json())]))
    assert "3 of 4" in console.file.getvalue().splitlines()[-2]  # type: ignore[attr-defined]


def test_a_table_in_a_file_is_as_wide_as_its_longest_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    source = f"a-source-{'of-many-words-' * 9}"
    rows = [TrajectoryGroup("g", "a", [trajectory("a", 0, 0.25)], source=source)]
    console = Console(file=io.StringIO())
    title = f"env.py:Shop: {'model-of-a-long-name/' * 9}"
    print_table(console, result_table(EvalResult(summarize(rows), None, 1.0), title))
    assert console.file.getvalue().startswith(f"{title}\n")
    lines = [line.split() for line in console.file.getvalue().splitlines()]
    # Beside each success stands the reward, which graded tasks are judged by.
    assert ["success", "0.000"] in lines
    assert ["reward", "0.250"] in lines
    assert ["success,", source, "0.000"] in lines
    assert ["reward,", source, "0.250"] in lines
    assert console.width == 80
