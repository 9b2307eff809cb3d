"""A curriculum: every task once, then by difficulty, with a floor, and on from its state as if nothing had happened."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.property_tests import examples
from turnwise.errors import TaskError
from turnwise.tasks import SourceConfig, Task, TaskOrder, open_order
from turnwise.tasks.config import POOL_FLOOR, CurriculumConfig, pools_of
from turnwise.tasks.order import CurriculumOrder, LevelOrder, shares_of
from turnwise.trainer.run.task_scheduler import task_metrics

TASKS = [Task(f"t{number}", str(number)) for number in range(12)]
HARD, MIDDLE, EASY = [0.0] * 4, [1.0, 0.0, 1.0, 0.0], [1.0] * 4


def earned(task: Task) -> list[float]:
    """The last two tasks are learnable, of the others half are hopeless and half are learned."""
    number = int(task.id[1:])
    return MIDDLE if number >= 10 else HARD if number < 5 else EASY


def taken(order: TaskOrder, count: int) -> list[tuple[str, int]]:
    draws = []
    for _ in range(count):
        task, epoch = order.next()
        order.learn(task.id, earned(task))
        draws.append((task.id, epoch))
    return draws


def test_unseen_tasks_come_first_then_learnable_tasks_with_a_floor_for_every_pool() -> None:
    order = CurriculumOrder(TASKS, CurriculumConfig(weights=(0.0, 1.0, 0.0)), seed=5)
    first, later = taken(order, 12), taken(order, 600)
    assert {name for name, _ in first} == {task.id for task in TASKS}
    counts = Counter(name for name, _ in later)
    middle = counts["t10"] + counts["t11"]
    # Shares are 0.05, 0.9, 0.05.
    assert 500 <= middle <= 570
    # Within a pool tasks take turns.
    assert abs(counts["t10"] - counts["t11"]) <= 1
    hard = [counts[f"t{n}"] for n in range(5)]
    assert min(hard) >= 3
    assert max(hard) - min(hard) <= 1
    # A task and its number name a group: no two are the same.
    assert len({*first, *later}) == 612


@settings(max_examples=examples(25), deadline=None)
@given(st.integers(0, 40), st.integers(0, 3), st.booleans())
def test_curriculum_resumes_from_its_state(draws: int, seed: int, shuffle: bool) -> None:
    config = CurriculumConfig()
    original = CurriculumOrder(TASKS, config, seed=seed, shuffle=shuffle)
    started = taken(original, draws)
    state = json.loads(json.dumps(original.state()))
    resumed = CurriculumOrder(TASKS, config, seed=seed, shuffle=shuffle, state=state)
    assert taken(resumed, 30) == taken(original, 30)
    assert resumed.state() == original.state()
    assert taken(CurriculumOrder(TASKS, config, seed=seed, shuffle=shuffle), draws) == started
    with pytest.raises(TaskError, match="other ids"):
        CurriculumOrder(TASKS[1:], config, state=state)
    with pytest.raises(TaskError, match="without a curriculum"):
        CurriculumOrder(TASKS, config, state={"epoch": 0, "position": 3, "ids": state["ids"]})


def test_rates_forget_exponentially() -> None:
    config = CurriculumConfig(success_reward=0.5)
    order = CurriculumOrder(TASKS, config)
    for rewards in ([1.0, 0.5], [0.0, 0.25], [0.5, 0.5], []):
        order.learn("t3", rewards)
    # 1; 0.5 * 1 + 0.5 * 0 = 0.5; 0.5 * 0.5 + 0.5 * 1 = 0.75; no member finished: unchanged.
    assert order.rates() == [0.75]
    order.learn("t4", [1.0, 1.0])
    order.learn("of another source", [1.0])
    assert config.figures(order.rates()) == {
        "curriculum/rate": (0.75 + 1.0) / 2,
        "curriculum/tasks": 2.0,
        "curriculum/share_0-0.2": 0.0,
        "curriculum/share_0.2-0.8": 0.5,
        "curriculum/share_0.8-1": 0.5,
    }
    assert config.figures([]) == {}


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(st.integers(0, 3), min_size=3, max_size=3).filter(any), st.lists(st.floats(0, 5), min_size=3, max_size=3)
)
def test_shares_sum_to_one_and_are_never_below_the_floor(sizes: list[int], weights: list[float]) -> None:
    shares = shares_of(sizes, weights)
    assert sum(shares) == pytest.approx(1)
    for share, size in zip(shares, sizes, strict=True):
        assert share >= POOL_FLOOR - 1e-9 if size else share == 0


def test_a_bound_belongs_to_the_pool_above() -> None:
    rates = np.array([0.0, 0.19, 0.2, 0.8, 1.0, np.nan])
    assert pools_of(rates).tolist() == [0, 0, 1, 2, 2, 1]


def test_sources_of_a_mix_have_separate_curricula_and_streams_are_refused(tmp_path: Path) -> None:
    files = [tmp_path / f"{name}.jsonl" for name in "ab"]
    for file in files:
        file.write_text("".join(json.dumps({"id": f"{file.stem}{n}", "prompt": "x"}) + "\n" for n in range(3)))
    order, _ = open_order([str(file) for file in files], curriculum=CurriculumConfig(), seed=1)
    counts = Counter(order.next()[0].id[0] for _ in range(20))
    assert counts == {"a": 10, "b": 10}
    order.learn("b1", [1.0])
    assert order.rates() == [1.0]
    state = json.loads(json.dumps(order.state()))
    resumed, _ = open_order([str(file) for file in files], curriculum=CurriculumConfig(), seed=1, state=state)
    assert [resumed.next() for _ in range(20)] == [order.next() for _ in range(20)]
    with pytest.raises(TaskError, match="is streamed, and a curriculum draws among all of its tasks"):
        open_order(SourceConfig(source=str(files[0]), stream=True), curriculum=CurriculumConfig())


@pytest.mark.parametrize("weights", [[1.0], [0, 0, 0]])
def test_weights_are_three_and_not_all_zero(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="each of 3 pools, not all 0"):
        CurriculumConfig.model_validate({"weights": weights})


LEVELLED = [Task(f"t{number}", "", {"level": number % 3}) for number in range(12)]
BY_LEVEL = CurriculumConfig(by="level", weights=(0.0, 1.0, 0.0))


def of_levels(order: TaskOrder, count: int) -> list[tuple[str, int]]:
    """Level 0 is learned, level 1 learnable, level 2 hopeless."""
    draws = []
    for _ in range(count):
        task, epoch = order.next()
        order.learn(task.id, (EASY, MIDDLE, HARD)[task.data["level"]])
        draws.append((task.id, epoch))
    return draws


def test_the_tasks_of_a_level_have_one_rate() -> None:
    order = LevelOrder(LEVELLED, BY_LEVEL, seed=3)
    first, later = of_levels(order, 3), of_levels(order, 600)
    assert {int(name[1:]) % 3 for name, _ in first} == {0, 1, 2}
    counts = Counter(int(name[1:]) % 3 for name, _ in later)
    # Shares are 0.05, 0.9, 0.05.
    assert 500 <= counts[1] <= 570
    assert min(counts.values()) >= 15
    # Within a level tasks take turns, and a task and its epoch name a group.
    assert max(Counter(name for name, _ in later if int(name[1:]) % 3 == 1).values()) <= counts[1] / 4 + 1
    assert len({*first, *later}) == 603
    assert order.rates_by_value() == {"0": 1.0, "1": 0.5, "2": 0.0}
    assert sorted(order.rates()) == [0.0, 0.5, 1.0]


@settings(max_examples=examples(15), deadline=None)
@given(st.integers(0, 40), st.integers(0, 3), st.booleans())
def test_levels_resume_from_their_state(draws: int, seed: int, shuffle: bool) -> None:
    original = LevelOrder(LEVELLED, BY_LEVEL, seed=seed, shuffle=shuffle)
    of_levels(original, draws)
    state = json.loads(json.dumps(original.state()))
    resumed = LevelOrder(LEVELLED, BY_LEVEL, seed=seed, shuffle=shuffle, state=state)
    assert of_levels(resumed, 30) == of_levels(original, 30)
    with pytest.raises(TaskError, match="other ids"):
        LevelOrder([*LEVELLED, Task("more", "", {"level": 1})], BY_LEVEL, state=state)
    with pytest.raises(TaskError, match=r"without curriculum\.by"):
        LevelOrder(LEVELLED, BY_LEVEL, state=CurriculumOrder(LEVELLED, CurriculumConfig()).state())


def test_a_task_without_the_field_is_named() -> None:
    with pytest.raises(TaskError, match="task 'odd' has no number or text 'level' in its data, by which"):
        LevelOrder([*LEVELLED, Task("odd", "")], BY_LEVEL)


def test_rates_of_levels_are_metrics(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"id": task.id, "prompt": "x", "data": task.data}) + "\n" for task in LEVELLED))
    order, _ = open_order(str(file), curriculum=BY_LEVEL, seed=1)
    of_levels(order, 3)
    figures = task_metrics(order, BY_LEVEL)
    assert {name: value for name, value in figures.items() if name.startswith("curriculum/rate/")} == {
        "curriculum/rate/0": 1.0,
        "curriculum/rate/1": 0.5,
        "curriculum/rate/2": 0.0,
    }
    assert figures["curriculum/tasks"] == 3
