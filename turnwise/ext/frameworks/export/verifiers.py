"""Folders of exported environments for verifiers: a package with a taskset, and the harness that plays its episodes."""

from __future__ import annotations

from typing import Final

from turnwise.ext.frameworks.export.packages import Subject, filled

_PROJECT: Final = """\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "turnwise-verifiers-@NAME@"
version = "0.1.0"
description = @QUOTED@
requires-python = ">=3.11"
dependencies = ["turnwise-rl>=@VERSION@", "verifiers>=0.4.0"]

[tool.setuptools]
packages = ["@PACKAGE@"]

[tool.setuptools.package-data]
"@PACKAGE@" = ["*"]
"""
_PACKAGE: Final = '''\
"""@TITLE@ for verifiers: each task is an episode of the environment, which the harness of this package plays."""

import json
from pathlib import Path

import httpx
import verifiers.v1 as vf
from anyio.to_thread import run_sync

from turnwise.ext.frameworks.export import load_exported
from turnwise.seeding import stable_hash
from turnwise.types import ToolCall

__all__ = ["@CLASS@Env", "@CLASS@Harness", "@CLASS@Taskset", "load_environment"]

EXPORTED = load_exported(Path(__file__).parent)
SEEDS = 100
"""Episodes of an environment that draws its tasks from seeds."""


class @CLASS@Data(vf.TaskData):
    """A task by its id in ``tasks.jsonl``; None where the seed draws it."""

    task: str | None
    seed: int


class @CLASS@Task(vf.Task[@CLASS@Data]):
    """An episode: its reward is the environment's, and the parts of the last one are metrics."""

    @vf.reward
    async def reward(self, trace: vf.Trace) -> float:
        """The sum of the rewards; 0 where a limit ended the episode before any."""
        return trace.info.get("reward", 0.0)

    @vf.metric
    async def parts(self, trace: vf.Trace) -> dict[str, float]:
        """What the reward of the last step was made of."""
        return {f"reward/{name}": value for name, value in trace.info.get("rewards", {}).items()}


class @CLASS@TasksetConfig(vf.TasksetConfig):
    seed: int | None = None
    """Seed of every episode; by default that of its task, as when Turnwise evaluates."""


class @CLASS@Taskset(vf.Taskset[@CLASS@Task, @CLASS@TasksetConfig]):
    """@TITLE@."""

    def load(self):
        """Yield the tasks of ``tasks.jsonl``, or seeds."""
        for each in EXPORTED.tasks:
            text = each.prompt if isinstance(each.prompt, str) and each.prompt else "@NAME@"
            own = stable_hash("reset", 0, each.id, 0)
            yield self._task(name=each.id, prompt=text, task=each.id, seed=own)
        for number in () if EXPORTED.tasks else range(SEEDS):
            yield self._task(name=f"seed-{number}", prompt="@NAME@", task=None, seed=number)

    def _task(self, seed, **values):
        drawn = seed if self.config.seed is None else self.config.seed
        return @CLASS@Task(@CLASS@Data(seed=drawn, **values), self.config.task)


class @CLASS@HarnessConfig(vf.HarnessConfig):
    """Nothing to set."""


class @CLASS@Harness(vf.Harness[@CLASS@HarnessConfig]):
    """Lets the model act until the environment, which runs in this process, ends the episode."""

    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        """Play an episode; the environment says the prompt."""
        env = await run_sync(EXPORTED.gymnasium)
        options = None if data.task is None else {"task": data.task}
        access = {"headers": {"Authorization": f"Bearer {secret}"}, "timeout": None, "trust_env": False}
        access["verify"] = endpoint.startswith("https:")  # certificates take long to load
        try:
            observed, _ = await run_sync(lambda: env.reset(seed=data.seed, options=options))
            messages, total, over = [_wire(each) for each in observed], 0.0, False
            async with httpx.AsyncClient(**access) as client:
                while not over:
                    tools = [_tool(each) for each in env.action_space.tools]
                    body = {"model": ctx.model, "messages": messages, **({"tools": tools} if tools else {})}
                    answer = await client.post(f"{endpoint}/chat/completions", json=body)
                    if answer.is_error and trace.stop_condition is not None:
                        break
                    answer.raise_for_status()
                    said = answer.json()["choices"][0]["message"]
                    observed, gained, terminated, truncated, info = await run_sync(env.step, _action(said))
                    messages += [said, *(_wire(each) for each in observed)]
                    total, over = total + gained, terminated or truncated
                    trace.info.update(reward=total, rewards=info.get("rewards") or {}, truncated=truncated)
        finally:
            await run_sync(env.close)
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


class @CLASS@EnvConfig(vf.EnvConfig):
    """One seat; the harness runs here, so it needs no sandbox."""

    agent: vf.AgentConfig = vf.AgentConfig(runtime=vf.SubprocessConfig())


class @CLASS@Env(vf.Env[@CLASS@EnvConfig]):
    """@TITLE@."""

    async def run(self, task, agents):
        """Let the model play the task."""
        await agents.agent.run(task)


def load_environment(seed: int | None = None, **config):
    """Return the environment; ``config`` is that of verifiers (``agent``, ``timeout``, ...)."""
    taskset = {"id": "@PACKAGE@", "seed": seed}
    return vf.load_environment(vf.resolve_env_config({"taskset": taskset, **config}))


def _tool(tool):
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}


def _action(said):
    calls = [ToolCall(each["id"], each["function"]["name"], *_parsed(each)) for each in said.get("tool_calls") or ()]
    return {"role": "assistant", "content": said.get("content") or "", **({"tool_calls": calls} if calls else {})}


def _parsed(call):
    """Return the arguments of a call, their text, and why they are none."""
    text = call["function"]["arguments"]
    try:
        arguments = json.loads(text or "{}")
    except ValueError as error:
        return {}, text, f"the arguments are no JSON: {error}"
    return (arguments, text, None) if isinstance(arguments, dict) else ({}, text, "the arguments are no object")


def _wire(message):
    kept = {key: message[key] for key in ("role", "tool_call_id", "name") if message.get(key)}
    return {**kept, "content": message.get("content") or ""}
'''
_README: Final = """\
# @PACKAGE@

@SUMMARY@

```
pip install .
vf-eval @PACKAGE@ -m MODEL
```

```python
import @PACKAGE@

env = @PACKAGE@.load_environment(seed=0)
```

A task of `@PACKAGE@/tasks.jsonl` is an episode: the harness of the package asks the model and steps the environment,
which runs in the same process, until it ends. Other harnesses cannot play it: the tools are the environment's.
"""


def verifiers_files(subject: Subject) -> dict[str, str]:
    """Return a package that verifiers loads by its name."""
    return {
        "pyproject.toml": filled(_PROJECT, subject),
        "README.md": filled(_README, subject),
        f"{subject.package}/__init__.py": filled(_PACKAGE, subject),
    }
