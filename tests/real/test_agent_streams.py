"""Claude Code and Codex when a stream breaks in the middle of a turn, or nothing comes for a long time.

What they keep of a turn that broke is theirs to say; what was sampled is recorded once, whatever they keep.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.agents.isolated_programs import ProgramRun, caged, call, says
from support.agents.real_programs import claude, codex
from support.gateway.broken_streams import Cut, Stumble
from turnwise.gateway.config import GatewayLimits
from turnwise.types import ToolCall

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]

AT_ONCE = GatewayLimits(first_seconds=0.0)
LS = call("Bash", command="ls")


def sh(command: str) -> ToolCall:
    """A call of Codex's shell."""
    return call("exec_command", cmd=command)


def turn_counts(run: ProgramRun) -> tuple[int, int]:
    """How many turns were recorded, and for how many the model was asked."""
    return int(run.trajectory.metrics["turns"]), len(run.requests)


def assert_ended(run: ProgramRun, text: str) -> None:
    """Hold that a program ended as if nothing had happened."""
    assert run.code == 0, run.stdout + run.stderr
    assert text in run.stdout


@pytest.mark.parametrize("fails", [False, True])
async def test_claude_code_asks_again_without_a_stream(fails: bool, tmp_path: Path) -> None:
    """The connection is cut, or the engine fails, before a block was finished: nothing of that is recorded."""
    script = [says("", LS), Stumble(says("Let me see.", LS), after=7, fails=fails), says("Again.", LS), says("Done.")]
    cuts = [] if fails else [Cut(1, (b"text_delta",))]
    async with caged(tmp_path, script, cuts=cuts, limits=AT_ONCE) as cage:
        run = await claude(cage)
    assert_ended(run, '"result":"Done."')
    assert all(cut.done for cut in cuts)
    assert run.routes == {"/v1/messages stream", "/v1/messages whole"}
    assert (run.shape, turn_counts(run)) == ((1, {}), (3, 4))


@pytest.mark.parametrize("calls", [1, 2])
async def test_claude_code_keeps_the_calls_that_were_whole(calls: int, tmp_path: Path) -> None:
    """It runs them and goes on. Where another call of the turn was lost, that is an edit of it; else it is the turn."""
    commands = [call("Bash", command=f"echo part-{number}") for number in range(calls)]
    cut = Cut(0, (b"input_json_delta", b"content_block_stop", b"\n\n"))
    async with caged(tmp_path, [says("Look.", *commands), says("Done.")], cuts=[cut]) as cage:
        run = await claude(cage)
    assert_ended(run, '"result":"Done."')
    assert cut.done
    assert "\npart-0\n" in run.requests[-1].text
    assert run.shape == ((1, {}) if calls == 1 else (2, {"assistant_edited": 1}))
    assert turn_counts(run) == (2, 2)


@pytest.mark.parametrize("fails", [False, True])
async def test_claude_code_asks_again_where_a_stream_breaks_behind_a_whole_block(fails: bool, tmp_path: Path) -> None:
    """Thoughts that were whole, and no call: it keeps nothing of the turn, and says that it was cut off."""
    broken = Stumble(says("Let me see.", LS, thinks="Hm."), after=10, fails=fails)
    cuts = [] if fails else [Cut(1, (b"text_delta",))]
    async with caged(tmp_path, [says("", LS), broken, says("Done.")], cuts=cuts, limits=AT_ONCE) as cage:
        run = await claude(cage)
    assert_ended(run, '"result":"Done."')
    assert all(cut.done for cut in cuts)
    assert ["Your response above was cut off" in request.text for request in run.requests] == [False, False, True]
    assert (run.shape, turn_counts(run)) == ((1, {}), (2, 3))


async def test_codex_asks_again_where_a_stream_broke(tmp_path: Path) -> None:
    """It sends back what was whole of the turn, here its reasoning; that is asked for anew with the turn."""
    script: list[Any] = [
        says("", sh("ls")),
        Stumble(says("Let me see.", sh("ls"), thinks="Hm."), after=9),
        Stumble(says("Let me see.", sh("ls"), thinks="Well."), after=9, fails=True),
        says("Again.", sh("ls"), thinks="So."),
        says("Done."),
    ]
    cut = Cut(1, (b"event: response.output_text.delta",))
    async with caged(tmp_path, script, cuts=[cut], limits=AT_ONCE) as cage:
        run = await codex(cage)
    assert_ended(run, "Done.")
    assert cut.done
    assert run.routes == {"/v1/responses stream"}
    assert (run.shape, turn_counts(run)) == ((1, {}), (3, 5))


async def test_codex_asks_again_where_a_turn_was_whole_but_for_its_call(tmp_path: Path) -> None:
    """The turn was recorded, and stays as a branch of its own beside the one that was said in its place."""
    cut = Cut(0, (b"event: response.output_item.done", b'"type":"function_call"'))
    async with caged(tmp_path, [says("Look.", sh("ls")), says("See.", sh("ls")), says("Done.")], cuts=[cut]) as cage:
        run = await codex(cage)
    assert_ended(run, "Done.")
    assert cut.done
    assert (run.shape, turn_counts(run)) == ((2, {"resample": 1}), (3, 3))


@pytest.mark.parametrize("calls", [1, 2])
async def test_codex_keeps_the_items_that_were_whole(calls: int, tmp_path: Path) -> None:
    commands = [sh(f"echo part-{number}") for number in range(calls)]
    cut = Cut(0, (b"event: response.function_call_arguments.done", b"event: response.output_item.done", b"\n\n"))
    async with caged(tmp_path, [says("Look.", *commands), says("Done.")], cuts=[cut]) as cage:
        run = await codex(cage)
    assert_ended(run, "Done.")
    assert cut.done
    assert "\npart-0\n" in run.requests[-1].text
    assert run.shape == ((1, {}) if calls == 1 else (2, {"assistant_edited": 1}))
    assert turn_counts(run) == (2, 2)


@pytest.mark.parametrize("alive", [True, False])
async def test_codex_waits_as_long_as_the_stream_lives(alive: bool, tmp_path: Path) -> None:
    """Without a sign of life it gives up after its limit and asks again; what it gave up is not recorded."""
    script = [
        says("", sh("ls")),
        Stumble(says("At last.", sh("ls")), after=7, seconds=4.0),
        says("Done."),
        says("Done."),
    ]
    limits = GatewayLimits(first_seconds=0.0, alive_seconds=0.3 if alive else 60.0)
    async with caged(tmp_path, script, limits=limits) as cage:
        run = await codex(cage, provider="stream_idle_timeout_ms = 2000")
    assert_ended(run, "Done.")
    assert run.shape == (1, {})
    assert turn_counts(run) == ((3, 3) if alive else (2, 3))


async def test_claude_code_takes_the_signs_of_life_of_a_long_turn(tmp_path: Path) -> None:
    """They are empty deltas, some in a block of their own, which comes back with the turn. (Its own limit is 300 s or
    more, whatever it is told, so that nothing shows here that it would have given up without them.)
    """
    slow = Stumble(says("At last.", LS), after=7, seconds=3.0)
    script = [says("", LS), slow, Stumble(says("", LS), after=1, seconds=1.0), says("Done.")]
    async with caged(tmp_path, script, limits=GatewayLimits(first_seconds=0.0, alive_seconds=0.1)) as cage:
        run = await claude(cage)
    assert_ended(run, '"result":"Done."')
    assert run.routes == {"/v1/messages stream"}
    assert (run.shape, turn_counts(run)) == ((1, {}), (4, 4))
