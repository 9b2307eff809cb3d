"""Hooks, dynamic filtering and the curriculum: every hook is on its page, the code runs, numbers are the defaults."""

from __future__ import annotations

import re

import yaml

import turnwise
from support.doc_pages import blocks, section
from turnwise.rollout.replay.config import ReplayConfig
from turnwise.tasks.config import CurriculumConfig
from turnwise.trainer.run.hooks import CALLS

PAGE = section("extending.md", "Hooks")


def test_every_hook_and_attribute_is_on_the_page_and_its_code_runs() -> None:
    rows = re.findall(r"^\| `(?:self\.)?(\w+)[`(]", PAGE, re.MULTILINE)
    attributes = set(turnwise.Hooks.__annotations__) - {"verbs"}
    assert set(rows) == {*CALLS, *attributes, "request", "drop", "stop"}
    for block in blocks(PAGE, "python"):
        assert len(block.splitlines()) <= 20
        names: dict = {}
        exec(block, names)
        assert any(isinstance(value, type) and issubclass(value, turnwise.Hooks) for value in names.values())


def test_the_sections_on_the_page_are_the_defaults() -> None:
    [filtering] = map(yaml.safe_load, blocks(section("replay-and-durability.md", "Dynamic filtering"), "yaml"))
    [curriculum] = map(yaml.safe_load, blocks(section("tasks-and-rewards.md", "Curriculum"), "yaml"))
    described = ReplayConfig.model_validate(filtering["replay"])
    assert described == ReplayConfig.model_validate({"filter_groups": {}})
    assert CurriculumConfig.model_validate(curriculum["curriculum"]) == CurriculumConfig()
