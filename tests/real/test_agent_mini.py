"""mini-swe-agent itself, through the gateway: OpenAI Chat Completions by way of litellm, not streamed."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.agents.isolated_programs import caged, call, says
from support.agents.real_programs import BUGGY, mini
from turnwise.errors import InferenceError

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]

SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


@pytest.mark.alike("clients")
@pytest.mark.parametrize("route", ["chat", "responses", "messages"])
async def test_a_linear_run_is_one_branch(route: str, tmp_path: Path) -> None:
    file = tmp_path / "work" / "calc.py"
    script = [
        says("Let me read it. \n", call("bash", command="cat calc.py"), thinks="First look.\n"),
        says("", call("bash", command="sed -i 's/a - b/a + b/' calc.py"), thinks="The sign."),
        says("Both.", call("bash", command="python3 calc.py"), call("bash", command="ls")),
        says("It prints 5.", call("bash", command=SUBMIT), thinks="Done."),
    ]
    async with caged(tmp_path, script) as cage:
        file.write_text(BUGGY)
        run = await mini(cage, route=route)
    assert run.code == 0, run.stdout + run.stderr
    assert "return a + b\n" in file.read_text()
    assert run.routes == {f"/v1/{'chat/completions' if route == 'chat' else route} whole"}
    assert run.shape == (1, {})
    assert run.trajectory.metrics["turns"] == 4
    assert run.trajectory.metrics["encoded_tokens"] == run.trajectory.metrics["context_tokens"]


async def test_a_rejected_turn_is_a_dead_end(tmp_path: Path) -> None:
    script = [
        says("", call("bash", command="ls")),
        says("I shall think about it."),
        says("", call("bsh", command="ls")),
        says("", call("bash", command=SUBMIT)),
    ]
    async with caged(tmp_path, script) as cage:
        run = await mini(cage)
    assert run.code == 0, run.stdout + run.stderr
    assert run.shape == (3, {"assistant_edited": 2})
    # The dead ends are trained as well: the sum over all rows is what was sampled.
    assert run.trajectory.metrics["turns"] == 4


async def test_an_engine_that_fails_leaves_no_trace(tmp_path: Path) -> None:
    script = [
        says("", call("bash", command="ls")),
        InferenceError("the engine starts again"),
        says("", call("bash", command=SUBMIT)),
    ]
    async with caged(tmp_path, script) as cage:
        run = await mini(cage)
    assert run.code == 0, run.stdout + run.stderr
    assert run.shape == (1, {})
    assert (run.trajectory.metrics["turns"], len(run.requests)) == (2, 3)
