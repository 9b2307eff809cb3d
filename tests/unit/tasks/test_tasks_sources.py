"""What becomes of the rows of foreign datasets: columns, functions, verl's format, splits, folders, errors."""

from __future__ import annotations

import json
import tracemalloc
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict

from turnwise.config import dump_config, load_config
from turnwise.errors import ConfigError, MissingExtraError, TaskError
from turnwise.tasks import SourceConfig, Task, TasksConfig, iter_tasks, load_mix, load_tasks, open_order

# As verl's preprocessing scripts write them: nested columns, and of different shape in each row.
VERL_ROWS: list[dict[str, Any]] = [
    {
        "data_source": "openai/gsm8k",
        "agent_name": "tool_agent",
        "prompt": [{"role": "system", "content": "Think."}, {"role": "user", "content": "1 + 1?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "2"},
        "extra_info": {
            "split": "train",
            "index": 0,
            "need_tools_kwargs": True,
            "tools_kwargs": {"calc": {"create_kwargs": {"ground_truth": "2"}}},
            "tool_selection": ["calc"],
        },
    },
    {
        "data_source": "search",
        "agent_name": "single_turn_agent",
        "prompt": [{"role": "user", "content": "Who?"}],
        "ability": "qa",
        "reward_model": {"style": "rule", "ground_truth": "ana"},
        "extra_info": {
            "split": "train",
            "index": 0,
            "need_tools_kwargs": True,
            "tools_kwargs": {"search": {"create_kwargs": {"top": 3}}},
            "tool_selection": None,
        },
    },
]


def write(path: Path, *rows: Any) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def gsm(tmp_path: Path) -> str:
    rows = ({"question": f"q{n}", "answer": f"a{n}", "meta": {"n": n}} for n in range(3))
    return write(tmp_path / "gsm.jsonl", *rows)


class TestColumns:
    def test_columns_become_fields_and_the_rest_stays_data(self, gsm: str) -> None:
        tasks = load_tasks(SourceConfig(source=gsm, columns={"prompt": "question", "data.gold": "answer"}))
        assert tasks[1] == Task("gsm-1", "q1", {"gold": "a1", "meta": {"n": 1}})

    def test_dots_reach_into_columns_and_into_data(self, gsm: str) -> None:
        columns = {"prompt": "question", "id": "meta.n", "data.scoring.gold": "answer"}
        [first, *_] = load_tasks(SourceConfig(source=gsm, columns=columns))
        assert first == Task("0", "q0", {"meta": {"n": 0}, "scoring": {"gold": "a0"}})

    def test_fields_that_no_column_is_named_for_keep_their_columns(self, tmp_path: Path) -> None:
        row = {"id": "x", "env": "lookup", "prompt": "not this", "q": "this", "data": {"k": 1}, "more": 2}
        [task] = load_tasks(SourceConfig(source=write(tmp_path / "r.jsonl", row), columns={"prompt": "q"}))
        assert task == Task("x", "this", {"k": 1, "more": 2}, env="lookup")

    def test_a_whole_column_becomes_data(self, gsm: str) -> None:
        [first, *_] = load_tasks(SourceConfig(source=gsm, columns={"prompt": "question", "data": "meta"}))
        assert first.data == {"answer": "a0", "n": 0}

    @pytest.mark.parametrize(
        ("columns", "words"),
        [
            ({"prompt": "qestion"}, ["gsm.jsonl:1", "no column 'qestion'", "'question', 'answer', 'meta'"]),
            ({"prompt": "question", "data.x": "meta.m"}, ["no column 'meta.m'", "names where 'm' is looked up: 'n'"]),
            ({"prompt": "question", "data": "answer"}, ["column 'answer' is 'a0'", "an object"]),
            ({"prompt": "meta"}, ["gsm.jsonl:1", "'prompt' is {'n': 0}"]),
            ({"prompt": "question", "data.a": "answer", "data.a.b": "answer"}, ["data.a", "not an object"]),
        ],
    )
    def test_columns_that_do_not_fit_are_named(self, gsm: str, columns: dict[str, str], words: list[str]) -> None:
        with pytest.raises(TaskError) as error:
            load_tasks(SourceConfig(source=gsm, columns=columns))
        for word in words:
            assert word in str(error.value)


class TestMap:
    FILE = """
def task(row):
    if row["n"] == 1:
        return None
    if row["n"] == 3:
        return row["missing"]
    if row["n"] == 4:
        return 7
    return {"id": row["n"], "prompt": row["q"].upper()}
LIST = []
"""

    def source(self, folder: Path, *numbers: int, function: str = "task") -> SourceConfig:
        (folder / "mine.py").write_text(self.FILE)
        rows = write(folder / "r.jsonl", *({"n": n, "q": f"q{n}"} for n in numbers))
        return SourceConfig(source=rows, map=f"{folder}/mine.py:{function}")

    def test_a_function_makes_tasks_of_rows_and_leaves_some_out(self, tmp_path: Path) -> None:
        loaded = load_mix(self.source(tmp_path, 0, 1, 2))
        assert loaded.tasks == [Task("0", "Q0"), Task("2", "Q2")]
        assert loaded.reports[0].to_json() == {"name": "r", "tasks": 2, "dropped": {"map returned None": 1}}

    def test_errors_of_a_map_name_the_row(self, tmp_path: Path) -> None:
        with pytest.raises(TaskError, match=r"r\.jsonl:2: map .*mine\.py:task raised KeyError: 'missing'"):
            load_tasks(self.source(tmp_path, 0, 3))
        with pytest.raises(TaskError, match=r"r\.jsonl:1: map .* returned a value of type int: return a task"):
            load_tasks(self.source(tmp_path, 4))
        with pytest.raises(TaskError, match=r"map .*no 'taks'; did you mean 'task'"):
            load_tasks(self.source(tmp_path, 0, function="taks"))
        with pytest.raises(TaskError, match="it must be a function of a row"):
            load_tasks(self.source(tmp_path, 0, function="LIST"))


class TestVerl:
    @pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
    def test_rows_load_unchanged(self, tmp_path: Path, suffix: str) -> None:
        path = tmp_path / f"train{suffix}"
        if suffix == ".parquet":
            pyarrow = pytest.importorskip("pyarrow")
            pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist(VERL_ROWS), path)
        else:
            write(path, *VERL_ROWS)
        first, second = load_tasks(SourceConfig(source=str(path), format="verl"))
        assert first.id == "train-0"
        assert first.messages()[0] == {"role": "system", "content": "Think."}
        assert (first.agent, second.agent) == ("react", "single_turn")
        assert (first.source, second.source) == ("openai/gsm8k", "search")
        assert first.data["data_source"] == "openai/gsm8k"
        assert first.data["ground_truth"] == "2"
        assert first.data["reward_model"] == {"style": "rule", "ground_truth": "2"}
        assert first.data["extra_info"] == {"split": "train", "index": 0, "need_tools_kwargs": True}
        # A parquet file says null for the tools and arguments of the other row; they are not there.
        assert first.data["tools_kwargs"] == {"calc": {"create_kwargs": {"ground_truth": "2"}}}
        assert second.data["tools_kwargs"] == {"search": {"create_kwargs": {"top": 3}}}
        assert first.data["tool_selection"] == ["calc"]
        assert "tool_selection" not in second.data

    def test_empty_tool_selection_stays_empty(self, tmp_path: Path) -> None:
        row = {"prompt": "p", "extra_info": {"tool_selection": []}}
        [task] = load_tasks(SourceConfig(source=write(tmp_path / "r.jsonl", row), format="verl"))
        assert task.data["tool_selection"] == []

    def test_other_shapes_are_named(self, tmp_path: Path) -> None:
        path = write(tmp_path / "r.jsonl", {"prompt": "p", "reward_model": "rule"})
        with pytest.raises(TaskError, match=r"r\.jsonl:1: column 'reward_model' is 'rule': verl's rows have an object"):
            load_tasks(SourceConfig(source=path, format="verl"))
        path = write(tmp_path / "r.jsonl", {"question": "p"})
        with pytest.raises(TaskError, match="field 'prompt' is missing"):
            load_tasks(SourceConfig(source=path, format="verl"))


class TestSource:
    def test_rows_may_name_environment_and_agent_with_their_configuration(self) -> None:
        rows: list[Any] = [
            {"id": "a", "prompt": "p", "env": {"name": "sql", "config": {"db": "x"}}, "agent": "mine"},
            {"id": "b", "prompt": "p", "env": {"config": {"size": 3}}, "agent": {"name": "react", "config": None}},
        ]
        first, second = load_tasks(rows)
        assert (first.env, first.env_config, first.agent, first.agent_config) == ("sql", {"db": "x"}, "mine", {})
        assert (second.env, second.env_config, second.agent, second.agent_config) == (None, {"size": 3}, "react", {})
        for task in (first, second):
            assert Task.from_record(json.loads(json.dumps(task.to_record()))) == task
        for wrong in (3, {"nam": "x"}, {"name": 3}, {"config": 3}, ["x"]):
            with pytest.raises(TaskError, match=r"row 0: field 'env' is .*it must be a registered name"):
                load_tasks([{"prompt": "p", "env": wrong}])

    def test_source_sets_env_and_agent_of_rows_without_them(self, tmp_path: Path) -> None:
        rows = write(tmp_path / "r.jsonl", {"prompt": "a"}, {"prompt": "b", "env": "own", "agent": "own"})
        config = SourceConfig.model_validate({
            "source": rows, "env": "sql", "agent": {"name": "react", "config": {"k": 1}}, "id_prefix": "x/",
        })  # fmt: skip
        first, second = load_tasks(config)
        assert (first.id, first.env, first.agent, first.agent_config) == ("x/r-0", "sql", "react", {"k": 1})
        assert (second.id, second.env, second.agent, second.agent_config) == ("x/r-1", "own", "own", {})

    def test_limit_counts_tasks_after_filtering(self, tmp_path: Path) -> None:
        rows = write(tmp_path / "r.jsonl", *({"prompt": str(n)} for n in range(10)))
        config = SourceConfig(source=rows, limit=3)
        assert len(load_tasks(config)) == len(list(iter_tasks(config))) == 3
        loaded = load_mix(config, keep=lambda task: None if int(str(task.prompt)) % 2 else "even")
        assert [task.prompt for task in loaded.tasks] == ["1", "3", "5"]

    @given(st.lists(st.text(min_size=1), unique=True, min_size=1, max_size=30), st.floats(0.01, 0.98))
    def test_split_of_a_row_depends_on_its_id_alone(self, ids: list[str], fraction: float) -> None:
        def part(split: str, rows: list[str], share: float = fraction) -> set[str]:
            order = SourceConfig(source="unused:x", split=split, test_fraction=share)
            return {name for name in rows if _split_of(name, order)}

        train, test = part("train", ids), part("test", ids)
        assert train | test == set(ids)
        assert not train & test
        assert part("test", ids[::2]) == test & set(ids[::2])
        assert part("test", ids, min(fraction * 1.5, 0.99)) >= test

    def test_parts_of_a_file_have_their_share(self, tmp_path: Path) -> None:
        rows = write(tmp_path / "r.jsonl", *({"prompt": str(n)} for n in range(2000)))
        train, test = (load_tasks(SourceConfig(source=rows, split=s, test_fraction=0.1)) for s in ("train", "test"))
        assert len(train) + len(test) == 2000
        assert 150 < len(test) < 250
        assert [report.dropped for report in load_mix(SourceConfig(source=rows, split="test", test_fraction=0.1)).reports] == [{}]  # fmt: skip  # noqa: E501
        prefixed = SourceConfig(source=rows, split="test", test_fraction=0.1, id_prefix="x/")
        assert [task.id for task in load_tasks(prefixed)] == [f"x/{task.id}" for task in test]


def _split_of(name: str, config: SourceConfig) -> bool:
    from turnwise.tasks.reader import TaskReader
    from turnwise.tasks.sources import Row

    # A reader of one row in memory, without a file for each example.
    reader = TaskReader(config.model_copy(update={"source": "support.envs.task_rows:endless"}))
    return reader._read_row(Row(0, "row", "row", {"id": name, "prompt": "p"})).task is not None


class TestFolders:
    def test_files_called_after_splits_are_splits(self, tmp_path: Path) -> None:
        folder = tmp_path / "gsm8k"
        folder.mkdir()
        write(folder / "train.jsonl", {"prompt": "a"}, {"prompt": "b"})
        write(folder / "test.jsonl", {"prompt": "c"})
        (folder / "LICENSE").write_text("MIT")
        assert [task.id for task in load_tasks(f"{folder}:train")] == ["gsm8k-train-0", "gsm8k-train-1"]
        assert load_tasks(f"{folder}:test") == [Task("gsm8k-test-0", "c")]
        with pytest.raises(TaskError, match=r"several splits \(test, train\): write .*gsm8k:test"):
            load_tasks(folder)
        with pytest.raises(TaskError, match="no split 'dev': the splits are test, train"):
            load_tasks(f"{folder}:dev")

    def test_shards_form_a_split_with_consecutive_numbers(self, tmp_path: Path) -> None:
        for number in range(2):
            rows = [{"prompt": f"{number}{n}"} for n in range(3)]
            write(tmp_path / f"train-0000{number}-of-00002.jsonl", *rows)
        tasks = load_tasks(tmp_path)
        assert [task.prompt for task in tasks] == ["00", "01", "02", "10", "11", "12"]
        assert [task.id for task in tasks] == [f"{tmp_path.name}-{n}" for n in range(6)]

    def test_folder_with_a_dataset_card_is_read_by_its_card(self, tmp_path: Path) -> None:
        pytest.importorskip("datasets")
        folder = tmp_path / "carded"
        (folder / "one").mkdir(parents=True)
        write(folder / "one" / "a.jsonl", {"prompt": "a"})
        write(folder / "loose.jsonl", {"prompt": "not this"})
        card = {"configs": [{"config_name": "default", "data_files": [{"split": "dev", "path": "one/a.jsonl"}]}]}
        (folder / "README.md").write_text(f"---\n{json.dumps(card)}\n---\n")
        assert load_tasks(f"{folder}:dev") == [Task("carded-dev-0", "a")]
        with pytest.raises(TaskError, match="no split 'train': the splits are dev"):
            load_tasks(f"{folder}:train")

    def test_hub_source_passes_its_arguments_to_load_dataset(self, tmp_path: Path) -> None:
        """The package takes a folder instead of a repository, with the same arguments."""
        pytest.importorskip("datasets")
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
            write(tmp_path / name / "dev.jsonl", {"prompt": f"{name} a"}, {"prompt": f"{name} b"})
        files = [{"config_name": n, "data_files": [{"split": "dev", "path": f"{n}/dev.jsonl"}]} for n in ("one", "two")]
        (tmp_path / "README.md").write_text(f"---\n{json.dumps({'configs': files})}\n---\n")
        tasks = load_tasks(f"hf://{tmp_path}:dev?name=two")
        assert [(task.id.removeprefix(tmp_path.name), task.prompt) for task in tasks] == [
            ("-dev-0", "two a"), ("-dev-1", "two b"),
        ]  # fmt: skip
        with pytest.raises(TaskError, match="no split 'test': the splits are dev"):
            load_tasks(f"hf://{tmp_path}:test?name=two")
        with pytest.raises(TaskError, match=r"cannot be read as a Hugging Face dataset.*three"):
            load_tasks(f"hf://{tmp_path}:dev?name=three")

    def test_a_dataset_of_the_hub_that_cannot_be_reached_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        datasets = pytest.importorskip("datasets")
        monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        with pytest.raises(TaskError, match="hf://nobody/nothing: cannot be read as a Hugging Face dataset"):
            load_tasks("hf://nobody/nothing:train")
        with pytest.raises(TaskError, match="the dataset's name is missing: write hf://owner/name:split"):
            load_tasks("hf://:train")

    def test_a_missing_package_is_named(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        import sys

        monkeypatch.setitem(sys.modules, "datasets", None)
        with pytest.raises(MissingExtraError, match=r"hf://a/b needs the package 'datasets': .*-rl\[datasets\]"):
            load_tasks("hf://a/b")


class TestErrors:
    def test_malformed_line_17(self, tmp_path: Path) -> None:
        path = tmp_path / "rows.jsonl"
        path.write_text('{"prompt": "p"}\n' * 16 + '{"prompt": "p"\n' + '{"prompt": "p"}\n' * 3)
        for read in (load_tasks, open_order, load_mix):
            with pytest.raises(TaskError, match=r"rows\.jsonl:17: this line is not JSON .*: write one JSON object per"):
                read(str(path))

    def test_a_function_that_raises_is_named_with_its_row(self) -> None:
        def rows() -> Any:
            yield {"prompt": "p"}
            raise ConnectionError("gone")

        with pytest.raises(TaskError, match=r"rows: row 1: it raised ConnectionError: gone"):
            load_tasks(rows)
        with pytest.raises(TaskError, match=r"it raised ZeroDivisionError"):
            load_tasks(lambda: [1 // 0])

    def test_a_parquet_file_that_was_cut_off(self, tmp_path: Path) -> None:
        pyarrow = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        path = tmp_path / "rows.parquet"
        parquet.write_table(pyarrow.Table.from_pylist([{"prompt": "p" * 50}] * 1000), path)
        path.write_bytes(path.read_bytes()[:-20])
        with pytest.raises(TaskError, match=r"rows\.parquet: cannot be read as a parquet file"):
            load_tasks(path)

    def test_an_iterator_is_read_once(self) -> None:
        from turnwise.tasks.sources import IterableRows

        rows = IterableRows(iter([{"prompt": "p"}]))
        assert len(list(rows.read())) == 1
        with pytest.raises(TaskError, match="can be read only once: give the function that makes it"):
            list(rows.read())

    def test_a_file_has_no_splits(self, tmp_path: Path) -> None:
        (tmp_path / "rows.jsonl").write_text('{"prompt": "p"}\n')
        with pytest.raises(TaskError, match=r"rows\.jsonl is a file, which has no splits: remove ':train'"):
            load_tasks(f"{tmp_path / 'rows.jsonl'}:train")

    def test_a_file_that_may_not_be_read(self, tmp_path: Path) -> None:
        path = tmp_path / "rows.jsonl"
        path.mkdir()
        with pytest.raises(TaskError, match="rows"):
            load_tasks(path)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_reading_holds_a_batch_of_rows_and_not_the_file(tmp_path: Path, suffix: str) -> None:
    path, count, text = tmp_path / f"big{suffix}", 10_000, "x" * 2000
    if suffix == ".jsonl":
        with path.open("w") as file:
            file.writelines(json.dumps({"prompt": f"{n} {text}"}) + "\n" for n in range(count))
    else:
        pyarrow = pytest.importorskip("pyarrow")
        rows = pyarrow.table({"prompt": [f"{n} {text}" for n in range(count)]})
        pytest.importorskip("pyarrow.parquet").write_table(rows, path, row_group_size=1000)
        del rows
    for _ in islice(iter_tasks(path), 10):  # what is imported at the first row is no row
        pass
    tracemalloc.start()
    try:
        seen = sum(1 for _ in iter_tasks(path))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert seen == count
    assert peak < 6e6, f"{peak / 1e6:.1f} MB at the most, of {count / 500:.0f} MB"


# In configurations.


class Holder(BaseModel):
    model_config = ConfigDict(extra="forbid")
    tasks: TasksConfig | None = None


def test_a_configuration_takes_a_text_a_section_or_a_list(tmp_path: Path) -> None:
    write(tmp_path / "rows.jsonl", {"prompt": "p"})
    (tmp_path / "mine.py").write_text("def row(row): return row\n")
    file = tmp_path / "config.yaml"
    file.write_text(
        "tasks:\n  - rows.jsonl\n  - {source: rows.jsonl, weight: 2, map: mine.py:row, env: lookup}\n"
        "  - {source: 'pkg.mod:rows?n=3', agent: {name: mine.py:Agent, config: {k: 1}}}\n"
    )
    config = load_config(Holder, file)
    first, second, third = config.tasks
    assert first == str(tmp_path / "rows.jsonl")
    assert (second.source, second.map) == (first, f"{tmp_path}/mine.py:row")
    assert (second.env.name, second.weight) == ("lookup", 2.0)
    assert (third.agent.name, third.agent.config) == (f"{tmp_path}/mine.py:Agent", {"k": 1})
    written = tmp_path / "elsewhere" / "config.yaml"
    written.parent.mkdir()
    written.write_text(dump_config(config))
    assert load_config(Holder, written) == config
    assert load_config(Holder, file, ["tasks.1.weight=3"]).tasks[1].weight == 3.0
    assert load_config(Holder, None, ["tasks=a:b?n=3"]).tasks == "a:b?n=3"
    assert load_config(Holder, None, ["tasks={source: a:b}"]).tasks.source == "a:b"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("tasks=3", ["tasks", "3 is not allowed", "text"]),
        ("tasks=''", ["tasks", "'' is not allowed; allowed: a file of tasks"]),
        ("tasks=[]", ["tasks", "at least 1 items"]),
        ("tasks={source: a, lmit: 2}", ["tasks.lmit", "unknown key", "did you mean tasks.limit?"]),
        ("tasks=[{source: a, weigth: 2}]", ["tasks.0.weigth", "unknown key", "did you mean tasks.0.weight?"]),
        ("tasks=[{source: a, weight: 0}]", ["tasks.0.weight", "more than 0"]),
        ("tasks={weight: 2}", ["tasks.source: missing"]),
        ("tasks={source: a, columns: {promt: x}}", ["tasks.columns", "fields of a task: id, prompt", "not promt"]),
        ("tasks={source: a, columns: {data.: x}}", ["fields of a task", "not data."]),
        ("tasks={source: a, map: b, format: verl}", ["one mapping of rows (here: format: verl, map)"]),
        ("tasks={source: a, split: train}", ["split and test_fraction together", "folder:train"]),
        ("tasks={source: a, test_fraction: 1.0, split: test}", ["tasks.test_fraction", "less than 1"]),
        ("tasks={source: a, env: 3}", ["tasks.env", "3"]),
        ("tasks={source: a, name: 'a b'}", ["tasks.name"]),
    ],
)
def test_wrong_source_configuration_is_reported_as_one_problem(override: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(Holder, None, [override])
    assert "problems" not in str(error.value)
    for word in words:
        assert word in str(error.value)
