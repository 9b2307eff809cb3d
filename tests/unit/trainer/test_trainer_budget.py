"""Budgets: durations and counts as text, the limit that ends a run, and the length that a schedule assumes."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from turnwise.config import load_config
from turnwise.errors import ConfigError
from turnwise.trainer.config.budget import UNKNOWN_STEPS, BudgetConfig, read_count, read_duration
from turnwise.trainer.config.train import TrainConfig
from turnwise.trainer.observe.run_log import LiveDisplay
from turnwise.trainer.run.budget import Budget, show_duration

LEAST = {"policies": {"main": {"model": {"path": "m"}}}, "rollout": {"env": {"name": "lookup"}}, "name": "r"}


@pytest.mark.parametrize(
    ("text", "seconds"),
    # 2 h 30 m = 2 * 3600 + 30 * 60; 1.5 d = 36 h
    [("2h30m", 9000.0), ("90s", 90.0), ("1.5d", 129_600.0), ("1h 1m 1s", 3661.0), ("45", 45.0), (60, 60)],
)
def test_durations_are_read(text, seconds) -> None:
    assert read_duration(text) == seconds


@pytest.mark.parametrize(
    ("text", "count"), [("500k", 500_000), ("1.5M", 1_500_000), ("2B", 2 * 10**9), ("1_000", 1000), (7, 7)]
)
def test_counts_are_read(text, count) -> None:
    assert read_count(text) == count


@pytest.mark.parametrize(
    ("seconds", "text"), [(9000, "2h30m"), (59.6, "1m"), (0.2, "0s"), (90_061, "1d1h"), (3600, "1h")]
)
def test_durations_are_shown(seconds, text) -> None:
    assert show_duration(seconds) == text


def test_limits_are_read_from_the_configuration() -> None:
    overrides = ["budget.wall_time=2h30m", "budget.trained_tokens=2M", "budget.sampled_tokens=1e6"]
    config = load_config(TrainConfig, None, overrides, LEAST)
    assert config.steps is None
    assert config.budget.limits == {"trained_tokens": 2e6, "sampled_tokens": 1e6, "wall_time": 9000.0}
    assert config.optimizer_steps == UNKNOWN_STEPS


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("max_prompt_tokens=5", r"neither steps nor a budget is given: give steps, or budget\.trained_tokens"),
        ("budget.wall_time=soon", r"budget\.wall_time.*'soon'.*2h30m"),
        ("budget.trained_tokens=2 million", r"budget\.trained_tokens.*500k, 2M"),
        ("budget.trained_tokens=0", r"budget\.trained_tokens"),
        ("budget.token=5", r"budget\.token.*unknown key"),
    ],
)
def test_invalid_budget_is_refused(override, message) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config(TrainConfig, None, [override], LEAST)
    assert re.search(message, " ".join(str(raised.value).split()))


def test_the_first_limit_that_is_spent_ends_a_run() -> None:
    budget = Budget.of(10, BudgetConfig(trained_tokens=1000), {})
    assert budget.nearest == ("steps", 0.0)
    budget.spend(steps=1, trained_tokens=400.0, sampled_tokens=900.0)
    # 400 of 1000 tokens are more than 1 of 10 steps; the sampled tokens have no limit.
    assert (budget.nearest, budget.ended) == (("trained_tokens", 0.4), None)
    budget.spend(steps=1, trained_tokens=700.0)
    assert budget.ended == "trained_tokens"
    assert budget.why(budget.ended) == "1,000 trained tokens are spent"
    resumed = Budget.of(2, BudgetConfig(), budget.spent)
    assert resumed.ended == "steps"


def test_the_length_of_a_run_is_extrapolated_from_the_nearest_limit() -> None:
    # Only steps: their number, whatever was done.
    plain = Budget.of(40, BudgetConfig(), {"steps": 3.0})
    assert plain.expected_steps() == 40
    # No step is done, and no number of steps is given.
    budget = Budget.of(None, BudgetConfig(trained_tokens=1000), {})
    assert budget.expected_steps() == UNKNOWN_STEPS
    # 4 steps took a quarter: 16 in all; with at most 10 steps those are the limit.
    budget.spend(steps=4, trained_tokens=250.0)
    assert budget.expected_steps() == 16
    assert Budget.of(10, BudgetConfig(trained_tokens=1000), budget.spent).expected_steps() == 10
    # 3 steps took 30 %: exactly 10, and not 11 by rounding up what a float is off by.
    assert (
        Budget.of(None, BudgetConfig(trained_tokens=10), {"steps": 3.0, "trained_tokens": 3.0}).expected_steps() == 10
    )
    # Almost spent: one more step is to come.
    assert Budget.of(None, BudgetConfig(trained_tokens=10), {"steps": 2.0, "trained_tokens": 9.9}).expected_steps() == 3
    # In its fourth step a run has sampled 4 x 10 of 100 tokens: ten steps, and not 3 / 0.4.
    sampling = Budget.of(None, BudgetConfig(sampled_tokens=100), {"steps": 3.0, "sampled_tokens": 40.0})
    assert sampling.expected_steps(under_way={"sampled_tokens": 1.0}) == 10
    # In the first half of a streamed one it has sampled half of what it will.
    streamed = Budget.of(None, BudgetConfig(sampled_tokens=100), {"steps": 3.0, "sampled_tokens": 35.0})
    assert streamed.expected_steps(under_way={"sampled_tokens": 0.5}) == 10
    # In its last one it has sampled all of them: the tenth is still to be counted.
    sampling.spend(steps=6, sampled_tokens=60)
    assert sampling.expected_steps(under_way={"sampled_tokens": 1.0}) == 10
    # What the step under way has not spent yet is shared among those that are done: 3 took 30 %, exactly 10.
    limits = BudgetConfig(sampled_tokens=1000, trained_tokens=10)
    assert (
        Budget.of(None, limits, {"steps": 3.0, "sampled_tokens": 4.0, "trained_tokens": 3.0}).expected_steps(
            under_way={"sampled_tokens": 1.0}
        )
        == 10
    )


def test_the_display_of_a_run_without_a_number_of_steps() -> None:
    out = io.StringIO()
    with LiveDisplay("x", None, {"reward": "r"}, console=Console(file=out, width=99), share_at_start=0.25) as display:
        display.step(4, {"r": 0.5}, share=0.5)
        display.step(5, {}, share=1.2)
    first, second = out.getvalue().splitlines()
    assert re.fullmatch(r"x 4 \(50%\)  reward 0.500  \d+:\d\d left", first)
    assert second.startswith("x 5 (100%)")
    assert second.endswith("0:00 left")
