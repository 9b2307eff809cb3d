"""docs/external-agents.md, LangGraph: its keys, its stop reasons, and the code that it shows."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from support.agents.langgraph_episodes import calls, play
from support.doc_pages import blocks, section
from turnwise import LangGraphAgent
from turnwise.types import StopReason

PAGE = section("external-agents.md", "LangGraph")
CODE = blocks(PAGE, "python")


def test_every_key_of_the_agent_is_told() -> None:
    described = set(
        re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`[^|]*)\|", PAGE.split("### An episode")[0], re.M)))
    )
    assert described == set(inspect.signature(LangGraphAgent).parameters)


def test_every_end_of_the_page_is_a_stop_reason() -> None:
    rows = re.findall(
        r"^\| [^|]+\| ([^|]+) \|$",
        section("external-agents.md", "Stop reasons of graphs").split("**Interrupts")[0],
        re.MULTILINE,
    )
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert named <= {str(reason) for reason in StopReason}
    assert {"completed", "max_turns", "interrupted", "invalid_calls", "error"} <= named


async def test_the_first_graph_plays_an_episode(tmp_path: Path) -> None:
    file = tmp_path / "graphs.py"
    file.write_text(CODE[0])
    trajectory, _ = await play(f"{file}:make_graph", [calls(("add", {"a": 1, "b": 2})), "3"])
    assert (trajectory.error, trajectory.reward) == (None, 1.25)


@pytest.mark.parametrize("code", CODE)
def test_all_code_is_python(code: str) -> None:
    compile(code, "external-agents.md", "exec")


def test_the_graph_of_a_module_is_made_at_once() -> None:
    names: dict[str, object] = {}
    exec(next(code for code in CODE if "env_tools" in code), names)
    assert "graph" in names
