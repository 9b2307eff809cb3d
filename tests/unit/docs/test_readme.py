"""The README's code runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.chat.toy_renderer import ToyRenderer
from turnwise.ext.checks.environment import check_env
from turnwise.inference.scripted import ScriptedClient
from turnwise.rollout.config import RolloutConfig, SpecConfig
from turnwise.rollout.core import RolloutParts, RolloutRequest
from turnwise.rollout.producer import RolloutProducer
from turnwise.tasks import Task
from turnwise.types import ToolCall

README = Path(__file__).parents[3] / "README.md"
HELLO = README.parent / "examples" / "hello" / "env.py"
DICE = f"{HELLO}:Dice"


@pytest.fixture(scope="module")
def code() -> str:
    [block] = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    return block


def test_an_environment_with_a_tool_has_twenty_lines_at_most(code: str) -> None:
    assert len([line for line in code.splitlines() if line.strip()]) <= 20
    assert "@turnwise.function_tool" in code
    assert code == HELLO.read_text()


async def test_environment_of_the_readme_passes_the_checker() -> None:
    report = await check_env(DICE)
    assert report.ok, report.findings


async def test_an_agent_that_looks_at_both_dice_is_right() -> None:
    renderer = ToyRenderer()

    def script(request):
        if request.number < 2:
            call = ToolCall("", "look", {"die": request.number + 1})
            return {"role": "assistant", "content": "", "tool_calls": [call]}
        # The toy renderer writes an answer as <tool>id=look:TEXT<end>.
        seen = [int(number) for number in re.findall(r"=look:(\d)", request.text)]
        return str(sum(seen))

    config = RolloutConfig(env=SpecConfig(name=DICE))
    producer = await RolloutProducer.create(config, ScriptedClient(renderer, script), None, RolloutParts(renderer))
    groups = await producer.gather([RolloutRequest(Task(str(n), "dice")) for n in range(5)])
    await producer.close()
    assert [group.trajectories[0].reward for group in groups] == [1.0] * 5
    assert len({group.trajectories[0].seed for group in groups}) == 5
