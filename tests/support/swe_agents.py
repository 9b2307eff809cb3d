"""Agents without a model: one that hands in the row's own solution, and one that does nothing."""

from __future__ import annotations

from turnwise.agents.core import Agent, Episode
from turnwise.types import ToolCall


class Reference(Agent):
    async def run(self, episode: Episode) -> None:
        patch = episode.task.data["patch"].rstrip("\n")
        command = f"git apply --whitespace=nowarn - <<'END_OF_PATCH'\n{patch}\nEND_OF_PATCH"
        for call in (ToolCall("a", "shell", {"command": command}), ToolCall("b", "submit", {})):
            await episode.step({"role": "assistant", "content": "", "tool_calls": [call]})


class Idle(Agent):
    async def run(self, episode: Episode) -> None:
        await episode.step({"role": "assistant", "content": "Done."})
