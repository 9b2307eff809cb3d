"""docs/metrics.md and training from Python in docs/training.md: every metric and warning is there, the code runs."""

from __future__ import annotations

import inspect
import re

import turnwise
from support.doc_pages import blocks, page, section
from turnwise.agents.registry import RolloutFunction
from turnwise.trainer.api import algorithm_keys
from turnwise.trainer.observe import warnings
from turnwise.trainer.observe.metrics import METRICS

PAGE = page("metrics.md")
API = section("training.md", "Training from Python")


def rows(section: str) -> dict[str, str]:
    text = PAGE.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    return dict(re.findall(r"^\| `([^`]+)` \| (.*) \|$", text, re.MULTILINE))


def test_every_metric_has_its_row() -> None:
    described = {name: text.replace("&#124;", "|") for name, text in rows("Names").items()}
    wrong = {name: text for name, text in METRICS.items() if described.get(name) != text}
    lines = "\n".join(f"| `{name}` | {text.replace('|', '&#124;')} |" for name, text in wrong.items())
    assert not wrong, f"docs/metrics.md, under the heading of its first part, should have these rows:\n{lines}"
    assert described.keys() <= METRICS.keys(), f"nothing logs {described.keys() - METRICS.keys()}: remove the rows"


def test_every_warning_has_its_row() -> None:
    assert rows("Warnings").keys() == set(re.findall(r'yield \(?\s*"(\w+)"', inspect.getsource(warnings)))


def test_the_code_of_the_python_page() -> None:
    first, second = blocks(API, "python")
    assert len([line for line in first.splitlines() if line.strip()]) <= 20
    names: dict = {"__name__": "docs"}
    exec(first, names)
    assert isinstance(names["ask"], RolloutFunction)
    exec(second, names)
    trainer = turnwise.Trainer({"steps": 1}, model="m", env="lookup")
    assert trainer.plan(names["hardest_first"]).loop is names["hardest_first"]
    for name in re.findall(r"`\"(\w+)\"`", API):
        assert algorithm_keys(name)["loss"]
