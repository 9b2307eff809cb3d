"""Codex itself, through the gateway: OpenAI Responses, without stored responses."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.agents.isolated_programs import caged, call, says
from support.agents.real_programs import BUGGY, codex
from turnwise.errors import InferenceError
from turnwise.inference.scripted import ScriptedRequest
from turnwise.types import Message, ToolCall

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]


async def test_a_linear_run_is_one_branch(tmp_path: Path) -> None:
    """With its defaults: it offers web_search, which only its provider runs and which is left out and counted."""
    file = tmp_path / "work" / "calc.py"
    script = [
        says("Let me read it. \n", call("exec_command", cmd="cat calc.py"), thinks="First look.\n"),
        says("", call("exec_command", yield_time_ms=5000, cmd="sed -i 's/a - b/a + b/' calc.py"), thinks="The sign."),
        says("", call("exec_command", cmd="python3 calc.py"), call("exec_command", cmd="ls")),
        says("It prints 5.", thinks="Done."),
    ]
    async with caged(tmp_path, script) as cage:
        file.write_text(BUGGY)
        run = await codex(cage)
    assert run.code == 0, run.stdout + run.stderr
    assert "It prints 5." in run.stdout
    assert "return a + b\n" in file.read_text()
    assert run.routes == {"/v1/responses stream"}
    assert run.shape == (1, {})
    assert run.trajectory.metrics["turns"] == 4
    assert run.trajectory.metrics["ignored_server_tools"] == 4
    assert run.trajectory.metrics["encoded_tokens"] == run.trajectory.metrics["context_tokens"]
    assert all("web_search" not in request.text for request in run.requests)


async def test_failed_calls_and_requests_make_no_fork(tmp_path: Path) -> None:
    """Calls that cannot be used, a tool that does not exist and an engine that fails once: the history only grows."""
    script = [
        says("", ToolCall("", "exec_command", {}, '{"cmd": nope}', "not JSON"), call("exec_command", cmd="echo fine")),
        InferenceError("the engine starts again"),
        says("", call("exec_kommand", command="ls"), thinks="Once more."),
        says("", call("exec_command", cmd=["ls"], command=3)),
        says("Enough."),
    ]
    async with caged(tmp_path, script) as cage:
        run = await codex(cage)
    assert run.code == 0, run.stdout + run.stderr
    assert "Enough." in run.stdout
    assert run.shape == (1, {})
    assert (run.trajectory.metrics["turns"], len(run.requests)) == (4, 5)
    assert "unsupported call: exec_kommand" in run.requests[-1].text


async def test_continued_run_extends_its_branch(tmp_path: Path) -> None:
    lines = [says("", call("exec_command", cmd="ls")), says("Done. ", thinks="So."), says("Again.", thinks="Well.")]
    async with caged(tmp_path, lines) as cage:
        run = await codex(cage, then="And now again.")
    assert run.code == 0, run.stdout + run.stderr
    assert run.shape == (1, {})
    assert run.trajectory.metrics["turns"] == 3


async def test_tools_that_it_searches_stand_in_the_result_and_fork_nothing(tmp_path: Path) -> None:
    """By the name of a model that it knows; its sub-agents are among them."""
    close = call("multi_agent_v1__close_agent", target="none")
    script = [says("", call("tool_search", query="close a sub-agent")), says("", close), says("Done.")]
    async with caged(tmp_path, script) as cage:
        run = await codex(cage, model="gpt-5.5")
    assert run.code == 0, run.stdout + run.stderr
    assert (run.shape, run.trajectory.metrics["turns"]) == ((1, {}), 3)
    first, _, last = (request.text for request in run.requests)
    assert '"name": "multi_agent_v1__close_agent"' not in first
    assert last.count('"function": {"name": "multi_agent_v1__close_agent"') == 1
    assert "unsupported call" not in last


async def test_a_compaction_is_two_forks(tmp_path: Path) -> None:
    """The summary is asked for without tools, and a new history begins with the task and the summary."""

    def script(request: ScriptedRequest) -> Message:
        if "CONTEXT CHECKPOINT COMPACTION" in request.text:
            return says("Numbers were counted.")
        if "Another language model started" in request.text:
            return says("All done.")
        return says("", call("exec_command", cmd=f"seq 1 50{request.number}"))

    async with caged(tmp_path, script) as cage:
        run = await codex(cage, "model_auto_compact_token_limit = 27000")
    assert run.code == 0, run.stdout + run.stderr
    assert "All done." in run.stdout
    assert run.trajectory.metrics["turns"] >= 4
    assert run.shape == (3, {"tools_changed": 1, "assistant_edited": 1})


async def test_a_sub_agent_has_a_root_of_its_own(tmp_path: Path) -> None:
    def script(request: ScriptedRequest) -> Message:
        text = request.text
        if "Make calc.py print 5" not in text:
            return says("I did one.") if "\npart-one\n" in text else says("", call("exec_command", cmd="echo part-one"))
        if "I did one." in text:
            return says("It is done.")
        agent = re.search(r'"agent_id":"([^"]+)"', text)
        if agent:
            return says("", call("multi_agent_v1__wait_agent", targets=[agent[1]], timeout_ms=60000))
        return says("Let others do it.", call("multi_agent_v1__spawn_agent", message="Do part one."))

    async with caged(tmp_path, script) as cage:
        run = await codex(cage)
    assert run.code == 0, run.stdout + run.stderr
    assert "It is done." in run.stdout
    assert "<subagent_notification>" in run.requests[-1].text
    assert run.trajectory.metrics["turns"] == 5
    assert run.shape == (2, {"restart": 1})
