"""docs/agents.md, sessions: the code runs as it stands there, and the reasons are those that a session gives."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from support.chat.model_dirs import renderer_for
from support.doc_pages import blocks, section
from turnwise.agents import context
from turnwise.recorder import token_session
from turnwise.recorder import tree as forks
from turnwise.recorder.matching import EchoPolicy, ReasoningPolicy
from turnwise.rollout.config import RolloutConfig

TEXT = section("agents.md", "Sessions")
BLOCKS = blocks(TEXT, "python")


@pytest.fixture(scope="module")
def names() -> dict:
    namespace: dict = {"__name__": "docs_sessions"}
    for block in BLOCKS:
        exec(compile(block, "docs/agents.md", "exec"), namespace)
    return namespace


def test_the_session_that_is_described(names: dict) -> None:
    trajectory, rows = names["show"](renderer_for("qwen3"))
    assert trajectory.forks() == {"rewound": 1}
    assert len(trajectory.leaves()) == len(rows) == 2
    assert sum(row.trained_tokens for row in rows) == trajectory.sampled_tokens
    # The first turn is shared, and trained in the first row alone.
    assert [sorted(set(row.turn_ids[row.loss_mask].tolist())) for row in rows] == [[0, 1], [2]]


def test_the_table_holds_every_reason_and_no_other() -> None:
    table = TEXT.partition("| reason |")[2].partition("\n\n")[0]
    described = {name.partition(":")[0] for name in re.findall(r"^\| `([^`]+)`", table, re.MULTILINE)}
    reasons = {"reasoning_dropped", "bridge_unproven"}
    for module in (forks, token_session):
        lines = re.findall(r"^ +return .*", Path(module.__file__).read_text(encoding="utf-8"), re.MULTILINE)
        reasons |= {name for line in lines for name in re.findall(r'(?:return|else) "(\w+)"', line)}
    assert described == reasons


def test_table_lists_every_fork_name_of_agents() -> None:
    table = TEXT.partition("| what the agent did |")[2].partition("\n\n")[0]
    described = set(re.findall(r"^\| `([^`]+)`", table, re.MULTILINE))
    names_in_code = set()
    for file in Path(context.__file__).parent.glob("*.py"):
        source = file.read_text(encoding="utf-8")
        names_in_code |= set(re.findall(r'fork\b.*?= ?.*?"(\w+)"', source))
    assert described == names_in_code


def test_the_policies_are_those_of_the_configuration() -> None:
    fields = RolloutConfig.model_fields
    for key, policy in (("reasoning", ReasoningPolicy), ("echo", EchoPolicy)):
        assert f"`rollout.{key}`: `{fields[key].default}`" in TEXT
        for value in get_args(policy):
            assert f"`{value}`" in TEXT
