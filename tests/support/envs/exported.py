"""Episodes to be played in exported environments: right and wrong actions, and what they are rewarded with here."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnwise.envs.core import close_env, reset_env, step_env
from turnwise.envs.registration import EnvSpec
from turnwise.envs.solution import play_solution
from turnwise.ext.frameworks.export import export_env, load_exported
from turnwise.tasks.core import message_record
from turnwise.types import Message

NAMES = ("guess_number", "calculator", "lookup")
SEED = 7
WRONG: Message = {"role": "assistant", "content": "0"}


@dataclass
class Play:
    """An episode of a task: assistant messages as JSON, and the reward of each."""

    task: str
    actions: list[dict[str, Any]]
    rewards: list[float]


async def plays_of(name: str, folder: Path, form: str) -> list[Play]:
    """Export an environment, and return the reference solution of its second task and a failure of its third."""
    await export_env(EnvSpec(name), form, folder, limit=4)
    exported = load_exported(next(folder.rglob("env.json")).parent)
    assert len(exported.tasks) == 4
    right, wrong = exported.tasks[1:3]
    env = exported.make()
    await reset_env(env, right, seed=SEED)
    solved = [(message_record(message), result.reward) for message, result in await play_solution(env)]
    await reset_env(env, wrong, seed=SEED)
    failed = []
    while True:
        result = await step_env(env, copy.deepcopy(WRONG))
        failed.append((message_record(WRONG), result.reward))
        if result.terminated or result.truncated:
            break
    await close_env(env)
    assert sum(reward for _, reward in solved) > sum(reward for _, reward in failed)
    return [
        Play(task.id, [message for message, _ in played], [reward for _, reward in played])
        for task, played in ((right, solved), (wrong, failed))
    ]
