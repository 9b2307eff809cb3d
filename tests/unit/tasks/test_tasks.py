"""Tasks: rows from every source, and errors that name file, row and field."""

import json
import sys

import pytest

from turnwise.errors import MissingExtraError, TaskError
from turnwise.tasks import Task, load_tasks
from turnwise.types import ToolCall


def write_rows(path, *rows):
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return path


def generated(n=2, prefix="q"):
    for index in range(n):
        yield Task(f"{prefix}{index}", f"question {index}")


ROWS = [{"prompt": "from a list"}, {"id": 7, "prompt": "x", "answer": 3}]


class TestTask:
    def test_is_frozen_and_hashes_by_id(self):
        task = Task("a", "hi", {"k": [1]})
        with pytest.raises(AttributeError):
            task.id = "b"
        assert hash(task) == hash(Task("a", "other"))
        assert task != Task("a", "other")

    def test_a_text_is_one_user_message(self):
        assert Task("a", "hi").messages() == [{"role": "user", "content": "hi"}]

    def test_messages_are_a_new_list(self):
        task = Task("a", [{"role": "user", "content": "hi"}])
        task.messages().append({"role": "user", "content": "more"})
        assert len(task.messages()) == 1

    def test_record_round_trip_with_calls(self):
        call = ToolCall("c1", "f", {"x": 1})
        task = Task(
            "a",
            [
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c1", "content": "2"},
            ],
            {"gold": 2},
            env="lookup",
            agent="react",
        )
        record = json.loads(json.dumps(task.to_record()))
        assert Task.from_record(record) == task

    def test_other_columns_go_to_data(self):
        task = Task.from_record({"id": 3, "prompt": "p", "data": {"a": 1}, "gold": "x"})
        assert task == Task("3", "p", {"a": 1, "gold": "x"})

    @pytest.mark.parametrize(
        ("row", "words"),
        [
            ({"id": "a"}, ["'prompt'", "missing", "'id'"]),
            ({"id": "a", "prompt": 3}, ["'prompt'", "3"]),
            ({"id": "a", "prompt": []}, ["'prompt'"]),
            ({"id": "a", "prompt": [{"role": "robot", "content": ""}]}, ["prompt[0]", "'robot'", "assistant"]),
            ({"id": "a", "prompt": [{"role": "user", "content": 3}]}, ["prompt[0]", "content", "3"]),
            ({"id": "a", "prompt": ["hi"]}, ["prompt[0]", "'hi'"]),
            ({"id": "a", "prompt": "p", "data": [1]}, ["'data'", "[1]"]),
            ({"id": "a", "prompt": "p", "data": {"x": 1}, "x": 2}, ["'x'", "keep one"]),
            ({"id": True, "prompt": "p"}, ["'id'", "True"]),
            ({"id": "a", "prompt": "p", "env": 3}, ["'env'", "3"]),
            ({"prompt": "p"}, ["'id'", "missing"]),
            (["prompt"], ["list"]),
            (
                {
                    "id": "a",
                    "prompt": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}],
                },
                ["tool_calls[0]", "arguments"],
            ),
            ({"id": "a", "prompt": [{"role": "assistant", "tool_calls": 3}]}, ["tool_calls", "3"]),
        ],
    )
    def test_a_bad_row_is_named(self, row, words):
        with pytest.raises(TaskError) as error:
            Task.from_record(row, where="rows.jsonl:4")
        assert str(error.value).startswith("rows.jsonl:4: ")
        for word in words:
            assert word in str(error.value)


class TestJsonl:
    def test_rows_and_ids_by_line(self, tmp_path):
        path = write_rows(
            tmp_path / "train.jsonl", {"prompt": "a"}, "\n", {"prompt": "b", "gold": 1}, {"id": "z", "prompt": "c"}
        )
        tasks = load_tasks(path)
        assert [task.id for task in tasks] == ["train-0", "train-2", "z"]
        assert tasks[1].data == {"gold": 1}
        assert load_tasks(str(path)) == tasks

    def test_ids_do_not_depend_on_the_limit(self, tmp_path):
        path = write_rows(tmp_path / "t.jsonl", *({"prompt": str(n)} for n in range(5)))
        assert load_tasks(path, limit=2) == load_tasks(path)[:2]
        assert load_tasks(path, limit=0) == []

    def test_rows_beyond_the_limit_are_not_read(self, tmp_path):
        path = write_rows(tmp_path / "t.jsonl", {"prompt": "a"}, "not json\n")
        assert len(load_tasks(path, limit=1)) == 1

    def test_bad_json_names_file_and_line(self, tmp_path):
        path = write_rows(tmp_path / "t.jsonl", {"prompt": "a"}, "{nope\n")
        with pytest.raises(TaskError, match=r"t\.jsonl:2: this line is not JSON"):
            load_tasks(path)

    def test_a_byte_order_mark_is_passed_over_and_other_encodings_are_refused(self, tmp_path):
        path = tmp_path / "t.jsonl"
        path.write_bytes("\ufeff".encode() + b'{"prompt": "a"}\r\n\r\n{"prompt": "b"}')
        assert [task.prompt for task in load_tasks(path)] == ["a", "b"]
        for encoding in ("utf-16", "latin-1"):
            path.write_text('{"prompt": "café"}\n', encoding=encoding)
            with pytest.raises(TaskError, match=r"t\.jsonl:1: .*write one JSON object per line, in UTF-8"):
                load_tasks(path)

    def test_duplicate_ids_name_both_places(self, tmp_path):
        path = write_rows(tmp_path / "t.jsonl", {"id": "a", "prompt": "a"}, {"id": "a", "prompt": "b"})
        with pytest.raises(TaskError, match=r"t\.jsonl:2: the id 'a' .*t\.jsonl:1"):
            load_tasks(path)

    def test_missing_file_and_unknown_type(self, tmp_path):
        with pytest.raises(TaskError, match="no such file"):
            load_tasks(tmp_path / "none.jsonl")
        other = tmp_path / "rows.csv"
        other.write_text("a,b")
        with pytest.raises(TaskError, match=r"'\.csv' are not supported: use \.jsonl"):
            load_tasks(other)

    def test_negative_limit(self):
        with pytest.raises(TaskError, match="limit is -1"):
            load_tasks([], limit=-1)

    def test_arguments_are_refused(self, tmp_path):
        path = write_rows(tmp_path / "t.jsonl", {"prompt": "a"})
        with pytest.raises(TaskError, match="arguments \\(n\\) are for functions"):
            load_tasks(path, n=3)


class TestParquet:
    def test_rows(self, tmp_path):
        pyarrow = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        path = tmp_path / "rows.parquet"
        rows = [
            {"prompt": [{"role": "user", "content": "hi", "name": None}], "gold": 1},
            {"prompt": [{"role": "user", "content": "yo", "name": "bo"}], "gold": 2},
        ]
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        tasks = load_tasks(path)
        assert tasks[0] == Task("rows-0", [{"role": "user", "content": "hi"}], {"gold": 1})
        assert tasks[1].prompt == [{"role": "user", "content": "yo", "name": "bo"}]
        assert load_tasks(path, limit=1) == tasks[:1]

    def test_bad_field_names_the_row(self, tmp_path):
        pyarrow = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        path = tmp_path / "rows.parquet"
        parquet.write_table(pyarrow.Table.from_pylist([{"question": "hi"}]), path)
        with pytest.raises(TaskError, match=r"rows\.parquet: row 0: field 'prompt' is missing .*'question'"):
            load_tasks(path)

    def test_not_a_parquet_file(self, tmp_path):
        pytest.importorskip("pyarrow")
        path = tmp_path / "rows.parquet"
        path.write_text("nope")
        with pytest.raises(TaskError, match="cannot be read as a parquet file"):
            load_tasks(path)

    def test_missing_extra_is_named(self, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, "pyarrow", None)
        path = tmp_path / "rows.parquet"
        path.write_text("")
        with pytest.raises(MissingExtraError, match=r"turnwise-rl\[parquet\]"):
            load_tasks(path)


class TestDatasets:
    def test_missing_extra_is_named(self, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, "datasets", None)
        with pytest.raises(MissingExtraError, match=r"turnwise-rl\[datasets\]"):
            load_tasks(tmp_path)

    def test_saved_dataset_with_splits(self, tmp_path):
        datasets = pytest.importorskip("datasets")
        path = tmp_path / "saved"
        rows = datasets.Dataset.from_list([{"prompt": "a", "gold": 1}, {"prompt": "b", "gold": 2}])
        datasets.DatasetDict({"train": rows, "test": rows.select([1])}).save_to_disk(str(path))
        assert [task.id for task in load_tasks(f"{path}:train")] == ["saved-train-0", "saved-train-1"]
        assert load_tasks(f"{path}:test") == [Task("saved-test-0", "b", {"gold": 2})]
        with pytest.raises(TaskError, match="several splits \\(test, train\\)"):
            load_tasks(path)
        with pytest.raises(TaskError, match="no split 'dev': the splits are test, train"):
            load_tasks(f"{path}:dev")

    def test_saved_dataset_without_splits(self, tmp_path):
        datasets = pytest.importorskip("datasets")
        path = tmp_path / "plain"
        datasets.Dataset.from_list([{"prompt": "a"}]).save_to_disk(str(path))
        assert load_tasks(path) == [Task("plain-0", "a")]
        with pytest.raises(TaskError, match="no splits"):
            load_tasks(f"{path}:train")

    def test_an_empty_directory(self, tmp_path):
        pytest.importorskip("datasets")
        with pytest.raises(TaskError, match="cannot be read as a Hugging Face dataset"):
            load_tasks(tmp_path)


class TestPython:
    def test_a_generator_function_with_arguments(self):
        assert [task.id for task in load_tasks(generated, n=3)] == ["q0", "q1", "q2"]

    def test_an_iterable_of_rows_and_tasks(self):
        tasks = load_tasks([*ROWS, Task("own", "y")])
        assert [task.id for task in tasks] == ["task-0", "7", "own"]

    def test_an_endless_generator_is_cut(self):
        def endless():
            number = 0
            while True:
                yield {"prompt": str(number)}
                number += 1

        assert [task.id for task in load_tasks(endless, limit=3)] == [
            f"{endless.__qualname__.rpartition('.')[2]}-{n}" for n in range(3)
        ]

    def test_a_reference_with_a_query(self, tmp_path):
        path = tmp_path / "mine.py"
        path.write_text(
            "def rows(n, split='train'):\n    for i in range(n):\n        yield {'prompt': f'{split} {i}'}\n"
            "LIST = [{'prompt': 'x'}]\n"
        )
        assert [task.prompt for task in load_tasks(f"{path}:rows?n=2&split=test")] == ["test 0", "test 1"]
        assert [task.id for task in load_tasks(f"{path}:rows", n=1)] == ["rows-0"]
        assert load_tasks(f"{path}:LIST") == [Task("LIST-0", "x")]
        with pytest.raises(TaskError, match=r"cannot be called with \(m=1\).*n, split='train'"):
            load_tasks(f"{path}:rows?m=1")
        with pytest.raises(TaskError, match="takes no arguments"):
            load_tasks(f"{path}:LIST?n=1")
        with pytest.raises(TaskError, match="no 'row'"):
            load_tasks(f"{path}:row")

    def test_a_module_that_does_not_exist(self):
        with pytest.raises(TaskError, match="no module"):
            load_tasks("no_such_module_of_mine:rows")

    def test_a_function_that_returns_no_rows(self):
        with pytest.raises(TaskError, match="it must return or yield tasks"):
            load_tasks(lambda: 3)
