"""Agents as a user writes them, for remote runners and training runs, and tasks that choose among them by name."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
from openai import AsyncOpenAI

from support.agents.endpoint_agents import read_call
from turnwise.agents.core import Agent, Episode
from turnwise.agents.react import ReActAgent
from turnwise.agents.registry import LLM, Rollout, rollout
from turnwise.types import StopReason


@rollout
async def by_address(task, llm):
    """Knows an address and nothing else, and says itself what its answer is worth."""
    body = {"model": llm.model, "messages": [{"role": "user", "content": str(task["prompt"])}]}
    async with aiohttp.ClientSession() as http, http.post(f"{llm.endpoint}/chat/completions", json=body) as answer:
        completion = await answer.json()
    return float(len(completion["choices"][0]["message"]["content"]))


@rollout
async def per_turn(episode):
    """Two turns, and a reward for each."""
    message = await episode.session.chat(episode.observation)
    await episode.session.chat([*episode.observation, message, {"role": "user", "content": "and?"}])
    return [0.25, 0.5]


@rollout
async def per_turn_by_address(task, llm):
    """The same at an address."""
    await by_address(task, llm)
    await by_address({"prompt": "other"}, llm)
    return [0.25, 0.5]


class Malformed(Agent):
    """Sends what is not a message."""

    async def run(self, episode: Episode) -> None:
        await episode.session.chat([{"content": "whose?"}])


class Cancels(Agent):
    """Waits for a task of its own that it cancelled."""

    async def run(self, episode: Episode) -> None:
        task = asyncio.ensure_future(asyncio.Event().wait())
        task.cancel()
        await task


class Notes(Agent):
    """Rewards, metrics and an end of its own."""

    async def run(self, episode: Episode) -> None:
        first = await episode.session.chat(episode.observation)
        critic = await episode.session_for("critic").chat([{"role": "user", "content": "Well?"}])
        episode.note("mine", 0.5, first["turn_id"])
        episode.note("hers", 0.25, critic["turn_id"], agent="critic")
        episode.count({"looked": 2.0}, first["turn_id"])
        episode.finish(StopReason.MAX_TOKENS, final=first)


class Raises(Agent):
    async def run(self, episode: Episode) -> None:
        await episode.session.chat(episode.observation)
        raise LookupError("the index is empty")


class Endless(Agent):
    """Asks for ever: the run's limits end it."""

    async def run(self, episode: Episode) -> None:
        while True:
            await episode.session.chat([*episode.observation, {"role": "user", "content": "again"}])


class Held(Agent):
    """Waits in its first episode until it is cancelled; later ones are played."""

    def __init__(self) -> None:
        self.begun, self.cancelled = asyncio.Event(), asyncio.Event()
        self.episode: Episode | None = None

    async def run(self, episode: Episode) -> None:
        if self.episode is not None:
            await ReActAgent().run(episode)
            return
        self.episode = episode
        self.begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled.set()


class DiesOnce(ReActAgent):
    """Kills its process in the second episode, once: the file ``gate`` says that it was done."""

    def __init__(self, gate: str) -> None:
        super().__init__()
        self.gate, self.played = Path(gate), 0

    async def run(self, episode: Episode) -> None:
        self.played += 1
        if self.played == 2 and not self.gate.exists():
            await episode.session.chat(episode.observation, episode.tools)
            self.gate.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        await super().run(episode)


class Silent(Agent):
    """Never asks the model, and is worth half a point."""

    async def run(self, episode: Episode) -> None:
        episode.reward(0.5)


NAMES = ("loop", "proxied", "silent")
# What stands in a file of agents: verl's spelling and two of ours.
FILE = """
- name: loop
  _target_: {loop}
  max_calls: 3
- {{name: proxied, class: "support.agents.user_agents:proxied", config: {{turns: 3}}}}
- {{name: silent, target: "support.agents.user_agents:Silent"}}
"""


def tasks(n: int = 6) -> Iterator[dict[str, Any]]:
    """Yield tasks of lookup, one kind of agent after the other."""
    for number in range(n):
        yield {"id": f"task-{number}", "prompt": "go", "agent": NAMES[number % len(NAMES)]}


@rollout
async def proxied(task: dict[str, Any], llm: LLM, rollout: Rollout, episode: Episode, *, turns: int) -> float:
    """Talks to its endpoint with the official client; rewards each call, and the answer by itself."""
    assert (task["id"], rollout.mode) in {(f"task-{n}", mode) for n in range(9) for mode in ("train", "val")}
    client = AsyncOpenAI(base_url=llm.endpoint, api_key=llm.api_key)
    messages: list[Any] = list(episode.observation)
    tools = [tool.to_json() for tool in episode.tools]
    async with client:
        for _ in range(turns):
            answer = await client.chat.completions.create(model=llm.model, messages=messages, tools=tools)
            message = answer.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                return 0.1 + 0.01 * len(message.content or "")
            for call in message.tool_calls:
                tool_call = read_call(call.id, call.function.name, call.function.arguments)
                response = await episode.call(tool_call)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": response.text})
    return 0.0
