"""The loop in which agent frameworks are written, as verl's roadmap shows it.

What changes for Turnwise is the line of the import, and the id of the environment.
"""

from __future__ import annotations

# verl: import env_lib
import turnwise.ext.frameworks.compat.env_loop as env_lib


def rollout(llm, extract_action, env_id: str) -> float:
    env = env_lib.make(env_id)
    total = 0.0
    obs, done = env.reset()  # prompt
    while not done:
        response = llm.call(obs)
        action = extract_action(response)
        next_obs, reward, done, _ = env.step(action)  # tool call or env interaction
        obs = next_obs
        total += reward
    env.close()
    return total


# What follows runs it, with a model that follows a script and whose tokens are recorded.

import asyncio  # noqa: E402
import re  # noqa: E402

import pytest  # noqa: E402

from support.chat.toy_renderer import ToyRenderer  # noqa: E402
from turnwise.envs.registration import register  # noqa: E402
from turnwise.envs.tool_env import ToolEnv  # noqa: E402
from turnwise.inference.scripted import ScriptedClient  # noqa: E402
from turnwise.recorder.session import Session, SessionLimits  # noqa: E402
from turnwise.tools import function_tool  # noqa: E402
from turnwise.types import ToolCall, text_of  # noqa: E402


class Safe(ToolEnv):
    """A safe whose number has to be asked for."""

    def reset(self, task=None, *, seed=None):
        return "What is the number?", {}

    @function_tool(inline=True)
    def look(self) -> tuple[str, float]:
        """Look at the number."""
        return "the number is 42", 0.5

    def score(self, final):
        return float(final is not None and text_of(final) == "42")


register("test-compat-safe", Safe)


class LLM:
    """``call`` goes through a session, so what is sampled is recorded."""

    def __init__(self, renderer: ToyRenderer, script) -> None:
        self._loop = asyncio.new_event_loop()
        limits = SessionLimits(context_length=10_000)
        self.session = Session(ScriptedClient(renderer, script), renderer, id="loop", limits=limits)
        self._messages: list = []

    def call(self, obs):
        self._messages += obs
        message = self._loop.run_until_complete(self.session.chat(self._messages))
        self._messages.append(message)
        return message

    def close(self) -> None:
        self._loop.close()


def answer(request):
    if request.number == 0:
        return {"role": "assistant", "content": "", "tool_calls": [ToolCall("", "look", {})]}
    return re.search(r"the number is (\d+)", request.text)[1]


def test_the_loop_of_the_roadmap() -> None:
    renderer = ToyRenderer()
    llm = LLM(renderer, answer)
    assert rollout(llm, lambda response: response, "test-compat-safe") == 1.5
    segments = llm.session.segments(messages=True)
    llm.close()
    assert [segment.kind for segment in segments] == ["context", "sampled"] * 2
    assert renderer.decode(segments[3].token_ids).startswith("42")
    assert "the number is 42" in renderer.decode(segments[2].token_ids)


@pytest.mark.parametrize("in_loop", [False, True])
async def test_sync_env_works_inside_a_running_loop(in_loop: bool) -> None:
    class Model:
        def call(self, obs):
            return "guess: 42" if in_loop else {"role": "assistant", "content": "42"}

    extract = (lambda response: response.removeprefix("guess: ")) if in_loop else (lambda response: response)
    assert rollout(Model(), extract, "test-compat-safe") == 1.0


def test_tools_and_tasks() -> None:
    env = env_lib.make("lookup")
    obs, done = env.reset(task=0, seed=3)
    repeated, _ = env.reset(task=0, seed=3)
    assert (obs, done) == (repeated, False)
    assert [tool["function"]["name"] for tool in env.tools] == ["team_of", "manager_of"]
    *_, reward, done, info = env.step("nobody")
    assert (reward, done, info["truncated"]) == (0.0, True, False)
    env.close()
    env.close()
