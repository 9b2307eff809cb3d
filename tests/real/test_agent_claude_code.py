"""Claude Code itself, through the gateway: Anthropic Messages."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from support.agents.isolated_programs import caged, call, says
from support.agents.real_programs import BUGGY, claude
from turnwise.errors import InferenceError
from turnwise.inference.scripted import ScriptedRequest
from turnwise.types import Message, ToolCall

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]


async def test_a_linear_run_is_one_branch(tmp_path: Path) -> None:
    file = tmp_path / "work" / "calc.py"
    script = [
        says("Let me read it.", call("Read", file_path=str(file)), thinks="First look.\n"),
        says(
            "\n\nI see. ",
            # Keys in an order of its own, and a default left out: it sends them back otherwise.
            call("Edit", new_string="a + b  ", old_string="a - b", file_path=str(file)),
            thinks="The sign.",
        ),
        says("", call("Bash", command="python3 calc.py", timeout=5000.0), call("Bash", command="ls", description="x")),
        says("It prints 5.", thinks="Done."),
    ]
    async with caged(tmp_path, script) as cage:
        file.write_text(BUGGY)
        run = await claude(cage)
    assert run.code == 0, run.stdout + run.stderr
    result = json.loads(run.stdout)
    assert (result["subtype"], result["is_error"], result["result"]) == ("success", False, "It prints 5.")
    assert "return a + b\n" in file.read_text()
    assert run.routes == {"/v1/messages stream"}
    assert run.shape == (1, {})
    metrics = run.trajectory.metrics
    assert (metrics["turns"], metrics["rewritten_echoes"]) == (4, 1)
    assert metrics["encoded_tokens"] == metrics["context_tokens"]
    assert "\n5\n" in run.requests[-1].text


async def test_failed_calls_and_requests_make_no_fork(tmp_path: Path) -> None:
    """Calls that cannot be used, a tool that does not exist and an engine that fails once: the history only grows."""
    script = [
        says("", ToolCall("", "Bash", {}, '{"command": nope}', "not JSON"), call("Bash", command="echo fine")),
        InferenceError("the engine starts again"),
        says("", call("Bsh", command="ls"), thinks="Once more."),
        says("", call("Bash", cmd=["ls"], command=3)),
        says("Enough."),
    ]
    async with caged(tmp_path, script) as cage:
        run = await claude(cage)
    assert run.code == 0, run.stdout + run.stderr
    assert json.loads(run.stdout)["result"] == "Enough."
    assert run.shape == (1, {})
    assert (run.trajectory.metrics["turns"], len(run.requests)) == (4, 5)
    assert "\nfine\n" in run.requests[-1].text


async def test_it_asks_for_its_turns_only(tmp_path: Path) -> None:
    """No title, whatever else it may ask for."""
    async with caged(tmp_path, [says("", call("Bash", command="ls")), says("Done.")]) as cage:
        run = await claude(cage, CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="")
    assert run.code == 0, run.stdout + run.stderr
    assert json.loads(run.stdout)["result"] == "Done."
    assert run.routes == {"/v1/messages stream"}
    assert (run.shape, run.trajectory.metrics["turns"]) == ((1, {}), 2)


async def test_tools_that_it_searches_stand_in_the_result_and_fork_nothing(tmp_path: Path) -> None:
    """It offers a tool with the request after the one that found it."""
    script = [
        says("", call("ToolSearch", query="select:NotebookEdit", max_results=1)),
        says("", call("NotebookEdit", notebook_path=str(tmp_path / "none.ipynb"), new_source="1")),
        says("Done."),
    ]
    async with caged(tmp_path, script) as cage:
        run = await claude(cage)
    assert run.code == 0, run.stdout + run.stderr
    assert (run.shape, run.trajectory.metrics["turns"]) == ((1, {}), 3)
    first, *later = (request.text for request in run.requests)
    assert '"name": "NotebookEdit"' not in first
    assert all(text.count('"function": {"name": "NotebookEdit"') == 1 for text in later)


async def test_continued_run_extends_its_branch(tmp_path: Path) -> None:
    lines = [
        says("", call("Bash", command="ls")),
        says("Done. "),
        says("", call("Bash", command="pwd")),
        says("Again."),
    ]
    async with caged(tmp_path, lines) as cage:
        run = await claude(cage, then="And now again.")
    assert run.code == 0, run.stdout + run.stderr
    assert run.shape == (1, {})
    assert run.trajectory.metrics["turns"] == 4


async def test_turns_without_anything_to_see(tmp_path: Path) -> None:
    """It leaves them out and adds to what the user said last: an edit of the task, but not of a tool's result."""
    nothing = says("", thinks="Nothing to say.")
    async with caged(tmp_path, [nothing, says("", call("Bash", command="ls")), nothing, says("Done.")]) as cage:
        run = await claude(cage)
    assert run.code == 0, run.stdout + run.stderr
    assert run.trajectory.metrics["turns"] == 4
    assert run.shape == (2, {"restart": 1})


async def test_sub_agents_have_roots_of_their_own(tmp_path: Path) -> None:
    """They run behind it: their ends are told by messages of the user, together or one after the other."""
    barrier = asyncio.Barrier(2)

    async def script(request: ScriptedRequest) -> Message:
        text = request.text
        if "Make calc.py print 5" not in text:
            name = "one" if "Do part one." in text else "two"
            if f"\npart-{name}\n" in text:
                return says(f"I did {name}.")
            # Both are asked before either is answered.
            await barrier.wait()
            return says("", call("Bash", command=f"echo part-{name}"))
        if "I did one." in text and "I did two." in text:
            return says("Both are done.")
        if "Let others do it." in text:
            return says("I wait.")
        parts = [
            call("Agent", description=name, prompt=f"Do part {name}.", subagent_type="general-purpose")
            for name in ("one", "two")
        ]
        return says("Let others do it.", *parts, thinks="Two parts.")

    async with caged(tmp_path, script) as cage:
        run = await claude(cage)
    assert run.code == 0, run.stdout + run.stderr
    assert json.loads(run.stdout)["result"] == "Both are done."
    assert run.trajectory.metrics["turns"] in (7, 8)
    assert run.shape == (3, {"system_changed": 1, "concurrent": 1})


async def test_a_compaction_is_two_forks(tmp_path: Path) -> None:
    """The summary is asked for behind an earlier turn, and a new history begins with it."""

    def script(request: ScriptedRequest) -> Message:
        if "Respond with TEXT ONLY" in request.text:
            return says("<summary>Numbers were counted.</summary>")
        if "This session is being continued" in request.text:
            return says("All done.")
        return says("", call("Bash", command=f"seq 1 150{request.number}"))

    async with caged(tmp_path, script) as cage:
        run = await claude(cage, "--tools", "Bash,Read", CLAUDE_CODE_AUTO_COMPACT_WINDOW="40000")
    assert run.code == 0, run.stdout + run.stderr
    assert json.loads(run.stdout)["result"] == "All done."
    assert run.shape == (3, {"assistant_edited": 1, "restart": 1})
