"""Folders of exported environments for Inspect: a task whose samples are episodes."""

from __future__ import annotations

from typing import Final

from turnwise.ext.frameworks.export.packages import Subject, filled

_TASK: Final = '''\
"""@TITLE@ as an Inspect task: each sample is an episode, and its reward the score."""

from pathlib import Path

from anyio.to_thread import run_sync
from inspect_ai import Task, task
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.model import (
    ChatMessageAssistant,
    ChatMessageSystem,
    ChatMessageTool,
    ChatMessageUser,
    ContentImage,
    ContentText,
    get_model,
)
from inspect_ai.scorer import Score, mean, scorer, stderr
from inspect_ai.solver import solver
from inspect_ai.tool import ToolInfo, ToolParams

from turnwise.ext.frameworks.export import load_exported
from turnwise.seeding import stable_hash
from turnwise.types import ToolCall

EXPORTED = load_exported(Path(__file__).parent)
SEEDS = 100
"""Episodes of an environment that draws its tasks from seeds."""


@task
def @NAME@(seed: int | None = None):
    """@TITLE@.

    Args:
        seed: Seed of every episode; by default that of its task, as when Turnwise evaluates.
    """
    samples = [_sample(each.id, each.prompt, seed) for each in EXPORTED.tasks]
    samples = samples or [_sample(f"seed-{number}", "", seed, number) for number in range(SEEDS)]
    return Task(dataset=MemoryDataset(samples, name="@NAME@"), solver=play(), scorer=reward())


def _sample(name, prompt, seed, drawn=None):
    text = prompt if isinstance(prompt, str) and prompt else "@NAME@"
    own = stable_hash("reset", 0, name, 0) if drawn is None else drawn
    return Sample(input=text, id=name, metadata={"seed": own if seed is None else seed, "drawn": drawn is not None})


@solver
def play():
    """Let the model act until the episode ends."""

    async def solve(state, generate):
        env = await run_sync(EXPORTED.gymnasium)
        options = None if state.metadata["drawn"] else {"task": state.sample_id}
        try:
            messages, _ = await run_sync(lambda: env.reset(seed=state.metadata["seed"], options=options))
            state.messages = [_message(each) for each in messages]
            total, over = 0.0, False
            while not over:
                state.output = await get_model().generate(state.messages, tools=_tools(env))
                state.messages.append(state.output.message)
                messages, gained, terminated, truncated, info = await run_sync(env.step, _action(state.output.message))
                state.messages += [_message(each) for each in messages]
                total, over = total + gained, terminated or truncated
                state.store.set("reward", total)
                state.store.set("rewards", info.get("rewards") or {})
        finally:
            await run_sync(env.close)
        state.completed = True
        return state

    return solve


@scorer(metrics=[mean(), stderr()])
def reward():
    """The reward of the episode; 0 where a limit ended it before any."""

    async def score(state, target):
        parts = state.store.get("rewards", {})
        return Score(value=state.store.get("reward", 0.0), answer=state.output.completion, metadata={"rewards": parts})

    return score


def _tools(env):
    return [
        ToolInfo(name=each.name, description=each.description, parameters=ToolParams(**_known(each.parameters)))
        for each in env.action_space.tools
    ]


def _known(schema):
    return {key: schema[key] for key in ("properties", "required") if key in schema}


def _action(message):
    calls = [
        ToolCall(each.id, each.function, each.arguments, error=each.parse_error) for each in message.tool_calls or ()
    ]
    return {"role": "assistant", "content": message.text, **({"tool_calls": calls} if calls else {})}


def _message(message):
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = [_part(each) for each in content]
    role = message["role"]
    if role == "tool":
        return ChatMessageTool(content=content, tool_call_id=message["tool_call_id"], function=message.get("name"))
    kinds = {"system": ChatMessageSystem, "developer": ChatMessageSystem, "assistant": ChatMessageAssistant}
    return kinds.get(role, ChatMessageUser)(content=content)


def _part(part):
    if part.get("type") == "image_url":
        return ContentImage(image=part["image_url"]["url"])
    if part.get("type") == "image":
        return ContentImage(image=part["image"])
    return ContentText(text=str(part.get("text", "")))
'''
_README: Final = """\
# @NAME@

@SUMMARY@

```
pip install turnwise-rl inspect-ai
inspect eval task.py --model openai/gpt-4o -T seed=0
```

Each sample is an episode of a task in `tasks.jsonl`: the model acts until the environment ends it, and the score is its
reward. `--solver` is of no use here: the environment answers every message itself.
"""


def inspect_files(subject: Subject) -> dict[str, str]:
    """Return a file with a task that ``inspect eval`` loads."""
    return {"task.py": filled(_TASK, subject), "README.md": filled(_README, subject)}
