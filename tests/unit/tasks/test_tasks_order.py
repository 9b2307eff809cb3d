"""The order of tasks: shuffles, streams, mixes, and that each goes on from its state as if nothing had happened."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.envs.task_rows import CALLS
from support.property_tests import examples
from turnwise.errors import TaskError
from turnwise.seeding import stable_hash
from turnwise.tasks import InMemoryOrder, SourceConfig, Task, TaskOrder, load_mix, mix, open_order, reader
from turnwise.tasks.mix import Shares

KINDS = ("held", "streamed", "in order", "function", "starting", "parquet", "dataset", "mix")


HERE = "support.envs.task_rows"


def jsonl(path: Path, rows: int, prefix: str = "") -> str:
    path.write_text("".join(json.dumps({"prompt": f"{prefix}{n}"}) + "\n" for n in range(rows)))
    return str(path)


def open_streamed(tasks: Any, buffer: int, **options: Any) -> TaskOrder:
    """Open an order whose streams are shuffled through a buffer of another size."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mix, "SHUFFLE_BUFFER", buffer)
        return open_order(tasks, **options)[0]


def source(kind: str, folder: Path, rows: int) -> Any:
    """Return a source of a kind; its file is written once."""
    file = folder / f"{kind}-{rows}"
    if kind in ("held", "streamed", "in order"):
        path = file.with_suffix(".jsonl")
        text = str(path) if path.exists() else jsonl(path, rows)
        return SourceConfig(source=text, stream=kind != "held")
    if kind in ("function", "starting"):
        name = f"finite?n={rows}" if kind == "starting" else f"finite?n={rows}&start=0"
        return SourceConfig(source=f"{HERE}:{name}", stream=True)
    table = [{"prompt": str(n)} for n in range(rows)]
    if kind == "parquet":
        import pyarrow
        import pyarrow.parquet

        path = file.with_suffix(".parquet")
        if not path.exists():
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(table), path, row_group_size=3)
        return SourceConfig(source=str(path), stream=True)
    if kind == "dataset":
        import datasets

        if not file.exists():
            datasets.Dataset.from_list(table).save_to_disk(str(file))
        return SourceConfig(source=str(file), stream=True)
    parts = [source(part, folder, rows) for part in ("held", "streamed", "parquet")]
    return [part.model_copy(update={"weight": w}) for part, w in zip(parts, (1.0, 0.3, 2.5), strict=True)]


def keys(order: TaskOrder, count: int) -> list[tuple[str, int]]:
    return [(task.id, epoch) for task, epoch in (order.next() for _ in range(count))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sources")


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(20))
@given(data=st.data())
def test_resumed_order_draws_what_the_original_draws_next(kind: str, folder: Path, data: st.DataObject) -> None:
    rows = data.draw(st.sampled_from([1, 7, 12]), "rows")
    buffer = data.draw(st.sampled_from([1, 4, 30]), "buffer")
    count = data.draw(st.integers(1, 3 * rows), "taken")
    seed = data.draw(st.integers(0, 3), "seed")
    tasks, shuffle = source(kind, folder, rows), kind != "in order"
    straight = open_streamed(tasks, buffer, seed=seed, shuffle=shuffle)
    first_keys = keys(straight, count)
    state = json.loads(json.dumps(straight.state()))
    resumed = open_streamed(tasks, buffer, seed=seed, shuffle=shuffle, state=state)
    assert (resumed.epoch, resumed.position) == (straight.epoch, straight.position)
    assert resumed.state() == state
    repeated = open_streamed(tasks, buffer, seed=seed, shuffle=shuffle)
    assert keys(repeated, count) == first_keys
    assert keys(resumed, 2 * rows + 3) == keys(straight, 2 * rows + 3)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "mix"])
@pytest.mark.parametrize("buffer", [1, 5, 100])
def test_every_epoch_takes_every_task_once(kind: str, buffer: int, folder: Path) -> None:
    order = open_streamed(source(kind, folder, 12), buffer, seed=1, shuffle=kind != "in order")
    draws = keys(order, 36)
    by_epoch = [[name for name, epoch in draws if epoch == number] for number in range(3)]
    assert [len(set(names)) for names in by_epoch] == [12, 12, 12]
    ordered = sorted(by_epoch[0], key=lambda name: int(name.lstrip("f").rpartition("-")[2]))
    if kind == "in order" or (buffer == 1 and kind != "held"):
        assert by_epoch == [ordered] * 3
    else:
        assert by_epoch[0] != ordered
        assert by_epoch[0] != by_epoch[1]


def test_held_tasks_are_shuffled_as_a_whole_by_seed_and_epoch() -> None:
    """The order of a run is part of what it is: these are the draws that every earlier version made."""
    tasks = [Task(str(n), "p") for n in range(20)]
    order = InMemoryOrder(tasks, seed=5)
    expected = [
        (str(index), epoch)
        for epoch in range(2)
        for index in np.random.default_rng(stable_hash("order", 5, epoch)).permutation(20)
    ]
    assert keys(order, 40) == expected
    assert {key: order.state()[key] for key in ("epoch", "position")} == {"epoch": 1, "position": 20}


def test_an_endless_source_is_streamed_with_no_more_than_the_buffer_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mix, "SHUFFLE_BUFFER", 50)
    order, [report] = open_order(SourceConfig(source=f"{HERE}:endless"), held_at_most=200)
    assert report.tasks is None
    numbers = []
    for _ in range(2000):
        task, epoch = order.next()
        assert epoch == 0
        numbers.append(task.data["number"])
        assert len(list(order.ahead())) == 50
    assert len(set(numbers)) == 2000
    # A task comes at most as much too early as the buffer is long.
    assert all(number < position + 50 for position, number in enumerate(numbers))
    assert max(position - number for position, number in enumerate(numbers)) > 50
    assert len(json.dumps(order.state())) < 1000


@pytest.mark.parametrize(("rows", "tasks"), [(200, 200), (201, None)])
def test_source_larger_than_held_at_most_is_streamed(rows: int, tasks: int | None, folder: Path) -> None:
    text = jsonl(folder / f"rows-{rows}.jsonl", rows)
    order, [report] = open_order(text, held_at_most=200)
    assert report.tasks == tasks
    assert {name for name, _ in keys(order, rows)} == {f"rows-{rows}-{n}" for n in range(rows)}
    _, [source_in_memory] = open_order(SourceConfig(source=text, stream=False), held_at_most=200)
    assert source_in_memory.tasks == rows


def test_function_with_start_parameter_is_called_with_the_first_missing_row() -> None:
    tasks = SourceConfig(source=f"{HERE}:finite?n=100", stream=True)
    order = open_streamed(tasks, 4, shuffle=False)
    read_keys = keys(order, 60)
    CALLS.clear()
    resumed = open_streamed(tasks, 4, shuffle=False, state=order.state())
    assert keys(resumed, 40) == keys(order, 40)
    assert [name for name, _ in read_keys[-2:]] == ["f58", "f59"]
    # One reading to draw from, one from the oldest row that was held.
    assert CALLS == [60]


def test_streamed_source_raises_when_a_malformed_row_is_reached() -> None:
    def tasks(row: int) -> SourceConfig:
        return SourceConfig(source=f"{HERE}:refuses?n=500&broken_row={row}", stream=True)

    with pytest.raises(TaskError, match="refuses: row 5: field 'prompt' is missing"):
        open_streamed(tasks(5), 10)
    with pytest.raises(TaskError, match="refuses: row 99: field 'prompt' is missing"):
        open_streamed(tasks(99), 1000, shuffle=False)
    order = open_streamed(tasks(300), 10)
    assert len(keys(order, 290)) == 290
    with pytest.raises(TaskError, match="refuses: row 300: field 'prompt' is missing"):
        order.next()


def test_streamed_tasks_near_each_other_have_different_ids(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"id": n % 7, "prompt": "p"}) + "\n" for n in range(20)))
    with pytest.raises(TaskError, match=r"rows\.jsonl:8: the id '0' is already used \(.*rows\.jsonl:1\)"):
        open_order(SourceConfig(source=str(path), stream=True))


def test_state_of_another_source_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    text = jsonl(path, 20)
    in_memory, _ = open_order(text)
    lazy = open_streamed(SourceConfig(source=text, stream=True), 4)
    mixed, _ = open_order([text, SourceConfig(source=text, name="b", id_prefix="b/")])
    keys(in_memory, 15), keys(lazy, 15), keys(mixed, 3)
    jsonl(path, 10)
    with pytest.raises(TaskError, match=r"is at task 15 of its epoch, but .*rows\.jsonl holds 10: resume with"):
        open_order(text, state=in_memory.state())
    with pytest.raises(TaskError, match=r"held row \d+ of rows, which no longer has such a task"):
        open_streamed(SourceConfig(source=text, stream=True), 4, state=lazy.state())
    with pytest.raises(TaskError, match=r"made while .* was streamed, and now it is held"):
        open_order(text, state=lazy.state())
    with pytest.raises(TaskError, match="made while rows was held in memory, and now it is streamed"):
        open_order(SourceConfig(source=text, stream=True), state=in_memory.state())
    with pytest.raises(TaskError, match=r"made with the task sources b, rows, and now they are c, rows"):
        open_order([text, SourceConfig(source=text, name="c", id_prefix="c/")], state=mixed.state())
    with pytest.raises(TaskError, match=r"made with the task sources \(one\), and now they are c, rows"):
        open_order([text, SourceConfig(source=text, name="c", id_prefix="c/")], state=in_memory.state())
    with pytest.raises(TaskError, match=r"made with the task sources b, rows, and now they are rows"):
        open_order(text, state=mixed.state())


@pytest.mark.parametrize("stream", [False, True])
def test_a_state_of_as_many_tasks_with_other_ids_is_refused(tmp_path: Path, stream: bool) -> None:
    path = tmp_path / "rows.jsonl"

    def write(ids: list[str]) -> SourceConfig:
        path.write_text("".join(json.dumps({"id": task_id, "prompt": "p"}) + "\n" for task_id in ids))
        return SourceConfig(source=str(path), stream=stream)

    ids = list("abcdefghijkl")
    order = open_streamed(write(ids), 8)
    keys(order, 3)
    state = json.loads(json.dumps(order.state()))
    resumed = open_streamed(write(ids), 8, state=state)
    assert keys(resumed, 20) == keys(order, 20)
    for other_ids in (["new", *ids], ids[::-1]):
        with pytest.raises(TaskError, match="tasks of other ids, or in another order: resume with the same tasks"):
            open_streamed(write(other_ids), 8, state=state)


# Mixes.


@given(weights=st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=6), seed=st.integers(0, 5))
@settings(max_examples=examples(60))
def test_shares_hold_to_within_one_task_at_any_time(weights: list[float], seed: int) -> None:
    named = {f"s{n}": weight for n, weight in enumerate(weights)}
    shares, counts = Shares(named, seed=seed), dict.fromkeys(named, 0)
    total = sum(weights)
    for turn in range(1, 120):
        counts[shares.next(counts)] += 1
        for name, weight in named.items():
            assert abs(counts[name] - turn * weight / total) < 1


def test_mix_draws_by_weight_and_counts_epochs_by_source(tmp_path: Path) -> None:
    large, small = jsonl(tmp_path / "large.jsonl", 100), jsonl(tmp_path / "small.jsonl", 5)
    sources = [SourceConfig(source=large, weight=0.75), SourceConfig(source=small, weight=0.25)]
    order, reports = open_order(sources, seed=3)
    assert [str(report) for report in reports] == ["large: 100 tasks", "small: 5 tasks"]
    draws = [order.next() for _ in range(80)]
    assert Counter(task.source for task, _ in draws) == {"large": 60, "small": 20}
    # Every batch of eight has six of one and two of the other.
    for start in range(0, 80, 8):
        assert Counter(task.source for task, _ in draws[start : start + 8]) == {"large": 6, "small": 2}
    assert Counter(epoch for task, epoch in draws if task.source == "small") == {0: 5, 1: 5, 2: 5, 3: 5}
    assert len({(task.id, epoch) for task, epoch in draws}) == 80
    assert (order.epoch, order.position) == (0, 80)


def test_sources_of_equal_length_are_shuffled_differently(tmp_path: Path) -> None:
    texts = [jsonl(tmp_path / f"{name}.jsonl", 30) for name in "ab"]
    order, _ = open_order(texts, seed=3)
    ids = [order.next()[0].id for _ in range(60)]
    first, second = ([name.rpartition("-")[2] for name in ids if name.startswith(stem)] for stem in "ab")
    assert sorted(first) == sorted(second)
    assert first != second


def test_names_and_ids_of_a_mix_must_differ(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rows.jsonl").write_text('{"id": "same", "prompt": "p"}\n')
    first, second = str(tmp_path / "a/rows.jsonl"), str(tmp_path / "b/rows.jsonl")
    with pytest.raises(TaskError, match="2 sources are called 'rows': give each a unique 'name'"):
        open_order([first, second])
    other = SourceConfig(source=second, name="other")
    for opened in (open_order, load_mix):
        message = r"b/rows\.jsonl:1: the id 'same' is also the id of .*a/rows\.jsonl:1.*id_prefix"
        with pytest.raises(TaskError, match=message):
            opened([first, other])
    order, _ = open_order([first, other.model_copy(update={"id_prefix": "o/"})])
    assert {name for name, _ in keys(order, 2)} == {"same", "o/same"}


def test_an_empty_source_is_an_error_also_within_a_mix(tmp_path: Path) -> None:
    empty, full = jsonl(tmp_path / "empty.jsonl", 0), jsonl(tmp_path / "full.jsonl", 2)
    streamed = SourceConfig(source=empty, stream=True)
    for tasks in (empty, streamed, [full, empty], [full, streamed]):
        with pytest.raises(TaskError, match=r"empty(\.jsonl)? holds no task$"):
            open_order(tasks)
    with pytest.raises(TaskError, match="holds no task"):
        load_mix([full, empty])


def test_evaluation_takes_every_task_once_and_a_limit_by_weight(tmp_path: Path) -> None:
    large, small = jsonl(tmp_path / "large.jsonl", 30), jsonl(tmp_path / "small.jsonl", 5)
    sources = [SourceConfig(source=large, weight=1), SourceConfig(source=small, weight=1)]
    assert len(load_mix(sources).tasks) == 35
    assert [report.tasks for report in load_mix(sources, limit=8).reports] == [4, 4]
    # A source that has no more gives its turns away.
    few = load_mix(sources, limit=20)
    assert [task.id for task in few.tasks] == [f"large-{n}" for n in range(15)] + [f"small-{n}" for n in range(5)]
    assert len(load_mix(sources, limit=99).tasks) == 35
    assert [task.id for task in load_mix(large, limit=2).tasks] == ["large-0", "large-1"]
    assert {task.source for task in load_mix(large).tasks} == {None}
    assert {task.source for task in load_mix(sources).tasks} == {"large", "small"}


def test_filtered_rows_are_counted_and_a_source_without_rows_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def keep(task: Task) -> str | None:
        return "more than 5 tokens" if int(task.prompt) % 3 == 0 else None

    monkeypatch.setattr(mix, "SHUFFLE_BUFFER", 50)
    for stream in (None, True):
        tasks = SourceConfig(source=f"{HERE}:finite?n=30", stream=stream)
        order, [report] = open_order(tasks, keep=keep)
        assert report.dropped == {"more than 5 tokens": 10}
        assert "10 left out: more than 5 tokens" in str(report)
        assert len({name for name, epoch in keys(order, 20) if epoch == 0}) == 20
        assert order.dropped() == {"more than 5 tokens": 10}
        with pytest.raises(TaskError, match=r"holds no task: all of its rows were left out: 30 \(too long\)"):
            open_order(tasks, keep=lambda task: "too long")
    resumed, _ = open_order(tasks, keep=keep, state=order.state())
    assert resumed.dropped() == {"more than 5 tokens": 10}
    with pytest.raises(TaskError, match=r"endless: 100,001 consecutive rows were left out .*too long"):
        open_order(SourceConfig(source=f"{HERE}:endless", stream=True), keep=lambda task: "too long")


def test_a_file_may_leave_out_more_rows_in_a_row_than_an_endless_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "_DROPPED_IN_A_ROW", 20)
    text = jsonl(tmp_path / "rows.jsonl", 50)

    def keep(task: Task) -> str | None:
        return None if task.prompt == "49" else "not the last"

    for stream in (None, True):
        order, _ = open_order(SourceConfig(source=text, stream=stream), keep=keep)
        assert keys(order, 2) == [("rows-49", 0), ("rows-49", 1)]


def test_an_evaluation_of_an_endless_source_needs_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mix, "EVALUATED_AT_MOST", 30)
    with pytest.raises(TaskError, match=r"endless holds more than 30 tasks, or has no end.*set limit to the number"):
        load_mix(f"{HERE}:endless")
    assert len(load_mix(f"{HERE}:endless", limit=40).tasks) == 40
    assert len(load_mix(f"{HERE}:finite?n=30").tasks) == 30
