"""``format: NAME``: rows as datasets publish them load into tasks of an environment that plays them, or say why not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.envs.published_rows import GSM8K, MATH, NEMOTRON_SWE, ONE_ROW, R2E_GYM, SWE_BENCH, SWE_GYM
from support.envs.rewarded_rows import reward_of, says
from turnwise.errors import TaskError
from turnwise.ext.environments.swe.rows import instance_of
from turnwise.tasks import SourceConfig, Task, load_tasks
from turnwise.tasks.formats import find_row_format


def write(path: Path, *rows: Any) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def load(tmp_path: Path, name: str, *rows: Any, **keys: Any) -> list[Task]:
    return load_tasks(SourceConfig(source=write(tmp_path / "rows.jsonl", *rows), format=name, **keys))


@pytest.mark.parametrize("name", sorted(ONE_ROW))
def test_rows_as_published_load_into_tasks_of_their_environment(name, tmp_path) -> None:
    tasks = load(tmp_path, name, *ONE_ROW[name][:1])
    assert [task.env for task in tasks] == [find_row_format(name).env]
    for record in ONE_ROW[name]:
        [task] = load(tmp_path, name, record)
        assert task.prompt
        copy = Task.from_record(task.to_record())
        assert (copy.env, copy.data) == (task.env, json.loads(json.dumps(task.data)))


def test_rows_of_a_published_dataset_without_a_format_are_answered_with_it(tmp_path) -> None:
    rows = write(tmp_path / "rows.jsonl", {"question": "1 + 1?", "answer": "#### 2"})
    with pytest.raises(TaskError, match=r"'prompt' is missing.* format gsm8k, as in 'tasks=.source: FILE, format: gsm"):
        load_tasks(rows)
    rows = write(tmp_path / "rows.jsonl", {"question": "1 + 1?"})
    with pytest.raises(TaskError, match=r"'prompt' is missing .*a list of messages$"):
        load_tasks(rows)


@pytest.mark.parametrize("name", sorted(ONE_ROW))
def test_a_missing_column_is_named_with_the_row(name, tmp_path) -> None:
    for column in find_row_format(name).columns:
        names = column.split("|")
        row = {key: value for key, value in ONE_ROW[name][0].items() if key not in names}
        with pytest.raises(TaskError, match=rf"rows\.jsonl:1: column '{names[0]}'.* is missing, which rows of format"):
            load(tmp_path, name, row)


@pytest.mark.parametrize(
    ("name", "row", "match"),
    [
        ("swe-bench", {**SWE_BENCH, "FAIL_TO_PASS": "[]"}, "FAIL_TO_PASS is empty"),
        ("swe-bench", {**SWE_BENCH, "repo": "me/mine"}, "give the row image_name"),
        ("r2e-gym", {**R2E_GYM, "expected_output_json": "[]"}, "expected_output_json, an object"),
        ("nemotron-swe", {"responses_create_params": {"metadata": {}}}, "metadata.instance_dict' is None"),
        ("nemotron-swe", {"uuid": "a", "messages": [], "tools": []}, "'responses_create_params' is missing"),
        ("gsm8k", {**GSM8K, "answer": "two\nlines"}, "column 'answer' .* has no result"),
        ("math", {**MATH, "solution": "It is 3/4."}, "no .*boxed.* no column 'answer'"),
        ("gsm8k", ["a list"], "has columns, but this is a value of type list"),
    ],
)
def test_rows_that_cannot_be_played_say_why(name, row, match, tmp_path) -> None:
    with pytest.raises(TaskError, match=match):
        load(tmp_path, name, row)


def test_rows_of_swe_datasets_are_graded_as_theirs(tmp_path) -> None:
    [bench] = load(tmp_path, "swe-bench", SWE_BENCH)
    assert bench.id == "pallets__flask-4045"
    assert instance_of(bench).image == "swebench/sweb.eval.x86_64.pallets_1776_flask-4045:latest"
    [gym] = load(tmp_path, "swe-gym", SWE_GYM)
    [nemotron] = load(tmp_path, "nemotron-swe", NEMOTRON_SWE)
    assert instance_of(nemotron) == instance_of(gym)
    [r2e] = load(tmp_path, "r2e-gym", R2E_GYM)
    assert (r2e.prompt, instance_of(r2e).expected) == ("Cookies are lost", {"TestHelpers.test_cookies": "PASSED"})
    inner = {**R2E_GYM, "instance_id": "aio-libs__aiohttp-f0d7"}
    metadata = {"instance_id": inner["instance_id"], "instance_dict": json.dumps(inner)}
    [wrapped] = load(tmp_path, "nemotron-swe", {"responses_create_params": {"input": [], "metadata": metadata}})
    assert instance_of(wrapped).image == R2E_GYM["docker_image"]


@pytest.mark.parametrize("name", ["gsm8k", "math"])
async def test_problems_of_mathematics_are_played(name, tmp_path) -> None:
    for record in ONE_ROW[name]:
        [task] = load(tmp_path, name, record)
        assert await reward_of(task) == 1.0
        assert await reward_of(task, says("\\boxed{11}")) == 0.0
    right = "#### 10" if name == "gsm8k" else "\\boxed{0.75}"
    assert await reward_of(task, says(right)) == 1.0


def test_a_source_names_another_environment_for_its_rows(tmp_path) -> None:
    [task] = load(tmp_path, "humaneval", *ONE_ROW["humaneval"], env={"config": {"partial": True}})
    assert (task.env, task.env_config) == ("code", {"partial": True})
    [task] = load(tmp_path, "gsm8k", GSM8K, env="my_math:Env")
    assert task.env == "my_math:Env"
