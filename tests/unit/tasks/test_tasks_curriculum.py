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
from turnwise.tasks.config import CurriculumConfig, pools_of
from turnwise.tasks.order import CurriculumOrder, LevelOrder, shares_of
from turnwise.trainer.run.task_scheduler import TaskStream

TASKS = [Task(f"t{number}", str(number)) for number in range(12)]
HARD, MIDDLE, EASY = [0.0] * 4, [1.0, 0.0, 1.0, 0.0], [1.0] * 4


def earned(task: Task) -> list[float]:
    """The last two tasks are learnable, of the others half are hopeless and half are learned."""
    number = int(task.id[1:])
    return MIDDLE if number >= 10 else HARD if number < 5 else EASY


def taken(order: TaskOrder, count: int) -> list[tuple[str, int]]:
    found = []
    for _ in range(count):
        task, epoch = order.next()
        order.learn(task.id, earned(task))
        found.append((task.id, epoch))
    return found


def test_unseen_tasks_first_then_the_learnable_ones_and_a_floor_for_every_pool() -> None:
    order = CurriculumOrder(TASKS, CurriculumConfig(weights=(0.0, 1.0, 0.0), floor=0.1), seed=5)
    first, later = taken(order, 12), taken(order, 600)
    assert {name for name, _ in first} == {task.id for task in TASKS}
    counts = Counter(name for name, _ in later)
    middle = counts["t10"] + counts["t11"]
    # Shares are 0.1, 0.8, 0.1.
    assert 430 <= middle <= 530
    # Within a pool tasks take turns.
    assert abs(counts["t10"] - counts["t11"]) <= 1
    hard = [counts[f"t{n}"] for n in range(5)]
    assert min(hard) >= 5
    assert max(hard) - min(hard) <= 1
    # A task and its number name a group: no two are the same.
    assert len({*first, *later}) == 612


@settings(max_examples=examples(25), deadline=None)
@given(st.integers(0, 40), st.integers(0, 3), st.booleans())
def test_it_goes_on_from_its_state(before: int, seed: int, shuffle: bool) -> None:
    config = CurriculumConfig()
    whole = CurriculumOrder(TASKS, config, seed=seed, shuffle=shuffle)
    started = taken(whole, before)
    state = json.loads(json.dumps(whole.state()))
    again = CurriculumOrder(TASKS, config, seed=seed, shuffle=shuffle, state=state)
    assert taken(again, 30) == taken(whole, 30)
    assert again.state() == whole.state()
    assert taken(CurriculumOrder(TASKS, config, seed=seed, shuffle=shuffle), before) == started
    with pytest.raises(TaskError, match="other ids"):
        CurriculumOrder(TASKS[1:], config, state=state)
    with pytest.raises(TaskError, match="without a curriculum"):
        CurriculumOrder(TASKS, config, state={"epoch": 0, "position": 3, "ids": state["ids"]})


def test_rates_forget_exponentially() -> None:
    config = CurriculumConfig(decay=0.75, success_reward=0.5)
    order = CurriculumOrder(TASKS, config)
    for rewards in ([1.0, 0.5], [0.0, 0.25], [0.5, 0.0], []):
        order.learn("t3", rewards)
    # 1; 0.75 * 1 + 0.25 * 0 = 0.75; 0.75 * 0.75 + 0.25 * 0.5 = 0.6875; nobody finished: as it was.
    assert order.rates() == [0.6875]
    order.learn("t4", [1.0, 1.0])
    order.learn("of another source", [1.0])
    assert config.figures(order.rates()) == {
        "curriculum/rate": (0.6875 + 1.0) / 2,
        "curriculum/tasks": 2.0,
        "curriculum/share_0-0.2": 0.0,
        "curriculum/share_0.2-0.8": 0.5,
        "curriculum/share_0.8-1": 0.5,
    }
    assert config.figures([]) == {}


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(st.integers(0, 3), min_size=3, max_size=3).filter(any),
    st.lists(st.floats(0, 5), min_size=3, max_size=3),
    st.floats(0, 1 / 3),
)
def test_shares_are_one_in_all_and_never_below_the_floor(held: list[int], weights: list[float], floor: float) -> None:
    shares = shares_of(held, weights, floor)
    assert sum(shares) == pytest.approx(1)
    assert all(share >= floor - 1e-9 if number else share == 0 for share, number in zip(shares, held, strict=True))


def test_a_bound_belongs_to_the_pool_above() -> None:

    rates = np.array([0.0, 0.19, 0.2, 0.8, 1.0, np.nan])
    assert pools_of(rates, (0.0, 0.2, 0.8, 1.0)).tolist() == [0, 0, 1, 2, 2, 1]


def test_each_source_of_a_mix_has_its_own_and_a_stream_has_none(tmp_path: Path) -> None:
    files = [tmp_path / f"{name}.jsonl" for name in "ab"]
    for file in files:
        file.write_text("".join(json.dumps({"id": f"{file.stem}{n}", "prompt": "x"}) + "\n" for n in range(3)))
    order, _ = open_order([str(file) for file in files], curriculum=CurriculumConfig(), seed=1)
    found = Counter(order.next()[0].id[0] for _ in range(20))
    assert found == {"a": 10, "b": 10}
    order.learn("b1", [1.0])
    assert order.rates() == [1.0]
    state = json.loads(json.dumps(order.state()))
    again, _ = open_order([str(file) for file in files], curriculum=CurriculumConfig(), seed=1, state=state)
    assert [again.next() for _ in range(20)] == [order.next() for _ in range(20)]
    with pytest.raises(TaskError, match="is streamed, and a curriculum draws among all of its tasks"):
        open_order(SourceConfig(source=str(files[0]), stream=True), curriculum=CurriculumConfig())


@pytest.mark.parametrize(("changes", "said"), [
    ({"buckets": [0.0, 0.5]}, "bounds must rise from 0 to 1"),
    ({"buckets": [0.0, 0.8, 0.2, 1.0]}, "bounds must rise"),
    ({"weights": [1.0]}, "each of 3 pools"),
    ({"weights": [0, 0, 0]}, "not all 0"),
    ({"floor": 0.5}, "more than 1"),
])  # fmt: skip
def test_what_is_no_curriculum(changes: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        CurriculumConfig.model_validate(changes)


LEVELLED = [Task(f"t{number}", "", {"level": number % 3}) for number in range(12)]
BY_LEVEL = CurriculumConfig(by="level", weights=(0.0, 1.0, 0.0), floor=0.1, decay=0.0)


def of_levels(order: TaskOrder, count: int) -> list[tuple[str, int]]:
    """Level 0 is learned, level 1 learnable, level 2 hopeless."""
    found = []
    for _ in range(count):
        task, epoch = order.next()
        order.learn(task.id, (EASY, MIDDLE, HARD)[task.data["level"]])
        found.append((task.id, epoch))
    return found


def test_the_tasks_of_a_level_have_one_rate() -> None:
    order = LevelOrder(LEVELLED, BY_LEVEL, seed=3)
    first, later = of_levels(order, 3), of_levels(order, 600)
    assert {int(name[1:]) % 3 for name, _ in first} == {0, 1, 2}
    counts = Counter(int(name[1:]) % 3 for name, _ in later)
    # Shares are 0.1, 0.8, 0.1.
    assert 430 <= counts[1] <= 530
    assert min(counts.values()) >= 30
    # Within a level tasks take turns, and a task and its epoch name a group.
    assert max(Counter(name for name, _ in later if int(name[1:]) % 3 == 1).values()) <= counts[1] / 4 + 1
    assert len({*first, *later}) == 603
    assert order.rates_by_value() == {"0": 1.0, "1": 0.5, "2": 0.0}
    assert sorted(order.rates()) == [0.0, 0.5, 1.0]


@settings(max_examples=examples(15), deadline=None)
@given(st.integers(0, 40), st.integers(0, 3), st.booleans())
def test_levels_go_on_from_their_state(before: int, seed: int, shuffle: bool) -> None:
    whole = LevelOrder(LEVELLED, BY_LEVEL, seed=seed, shuffle=shuffle)
    of_levels(whole, before)
    state = json.loads(json.dumps(whole.state()))
    again = LevelOrder(LEVELLED, BY_LEVEL, seed=seed, shuffle=shuffle, state=state)
    assert of_levels(again, 30) == of_levels(whole, 30)
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
    stream = TaskStream(order, BY_LEVEL)
    of_levels(order, 3)
    figures = stream.metrics()
    assert {name: value for name, value in figures.items() if name.startswith("curriculum/rate/")} == {
        "curriculum/rate/0": 1.0,
        "curriculum/rate/1": 0.5,
        "curriculum/rate/2": 0.0,
    }
    assert figures["curriculum/tasks"] == 3
