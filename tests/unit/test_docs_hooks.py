"""docs/hooks.md and docs/curriculum.md: every hook is there, the code runs, numbers are the defaults."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

import turnwise
from turnwise.rollout.replay_config import ReplayConfig
from turnwise.tasks.curriculum import CurriculumConfig
from turnwise.trainer.hooks import CALLS

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "hooks.md").read_text(encoding="utf-8")


def test_every_hook_and_attribute_is_on_the_page_and_its_code_runs() -> None:
    rows = re.findall(r"^\| `(?:self\.)?(\w+)[`(]", PAGE, re.MULTILINE)
    attributes = set(turnwise.Hooks.__annotations__) - {"verbs"}
    assert set(rows) == {*CALLS, *attributes, "request", "drop", "stop"}
    for block in re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL):
        assert len(block.splitlines()) <= 20
        names: dict = {}
        exec(block, names)
        assert any(isinstance(each, type) and issubclass(each, turnwise.Hooks) for each in names.values())


def test_the_sections_on_the_page_are_the_defaults() -> None:
    text = (DOCS / "curriculum.md").read_text(encoding="utf-8")
    filtering, curriculum = map(yaml.safe_load, re.findall(r"^```yaml\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    said = ReplayConfig.model_validate(filtering["replay"])
    assert said == ReplayConfig.model_validate({"filter_groups": {}})
    assert CurriculumConfig.model_validate(curriculum["curriculum"]) == CurriculumConfig()
