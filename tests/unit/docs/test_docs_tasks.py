"""docs/tasks-and-rewards.md, tasks: the Python runs, the keys are those that there are, numbers are the defaults."""

from __future__ import annotations

import json
import re
from typing import Any

import yaml

from support.doc_pages import blocks as blocks_of
from support.doc_pages import page, section
from turnwise.tasks import SourceConfig, Task, load_tasks, open_order, sources_of
from turnwise.tasks.mix import HELD_AT_MOST, SHUFFLE_BUFFER

NAME = "tasks-and-rewards.md"
PAGE = page(NAME).partition("\n## Curriculum")[0]


def blocks(language: str) -> list[str]:
    return blocks_of(PAGE, language)


def test_the_python_on_the_page_runs() -> None:
    names: dict[str, Any] = {}
    for block in blocks("python"):
        exec(compile(block, "docs/tasks-and-rewards.md", "exec"), names)
    rows = names["rows"]
    assert load_tasks(rows, limit=2)[1] == Task("rows-1", "What is 1 + 1?", {"gold": 2})
    assert next(rows(7)) == {"prompt": "What is 7 + 1?", "gold": 8}


def test_the_rows_on_the_page_are_tasks() -> None:
    [block] = blocks("jsonl")
    tasks = load_tasks([json.loads(line) for line in block.splitlines()])
    assert [task.id for task in tasks] == ["q1", "q2", "q3"]
    assert (tasks[2].env, tasks[2].env_config) == ("sql", {"size": 3})


def test_the_keys_on_the_page_are_those_that_there_are() -> None:
    [block] = blocks("yaml")
    sources = sources_of([SourceConfig.model_validate(row) for row in yaml.safe_load(block)["tasks"]])
    assert [source.weight for source in sources] == [3, 1]
    table = section(NAME, "Keys of a source")
    named = {name for row in re.findall(r"^\| (`.*?`) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    assert named == set(SourceConfig.model_fields)


def test_the_numbers_on_the_page_are_the_defaults() -> None:
    assert f"at most {HELD_AT_MOST:,} tasks is held" in " ".join(PAGE.split())
    assert f"drawn from the {SHUFFLE_BUFFER:,} tasks that were read last" in " ".join(PAGE.split())
    order, [report] = open_order(SourceConfig(source="turnwise.envs.basic.lookup:tasks?n=5"))
    assert (report.tasks, order.epoch) == (5, 0)
