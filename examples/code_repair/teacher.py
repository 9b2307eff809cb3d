"""Demonstrations for the warm start: a teacher that looks, edits and mostly does not read what the tests say.

Every call is one that works, so the warm model can edit; few conversations go on after an edit that failed, so it does
not know that it should. A teacher that goes on takes the next operator in the order of the file, and after the last one
the first: the next thing to try then depends on the last one alone, which a small model can learn. What failed at
random would have to be remembered.

| share | what it shows                                                                        |
| ----- | ------------------------------------------------------------------------------------ |
| 12 %  | the tests, then one edit after the other, until they pass                            |
| 24 %  | no edit at all                                                                       |
| 64 %  | one, two or three edits from anywhere, whatever the tests say, and out               |

The programs of all demonstrations run in one sandbox.
"""

from __future__ import annotations

import random
import re
from typing import Any

from env import SPEC, Bench, CodeRepair, alike, tasks

from turnwise.envs.demonstrations import conversation
from turnwise.envs.solution import tool_call
from turnwise.sandboxes import SandboxManager
from turnwise.types import ToolCall

OPERATOR = re.compile(r"(?<= )[-+*<>](?= )")


class Rehearsal(CodeRepair):
    """The environment, with a sandbox that outlives the episode."""

    def __init__(self, bench: Bench) -> None:
        super().__init__()
        self._bench = bench

    async def open_bench(self) -> Bench:
        return self._bench


def candidates(file: str) -> list[tuple[str, str]]:
    """Return all edits that put another operator in the place of one, in the order of the file."""
    return [(old, new) for old in OPERATOR.findall(file) for new in alike(old) if new != old]


def plan(env: CodeRepair, rng: random.Random) -> list[ToolCall | str]:
    """Draw what the teacher does in an episode."""
    edits = candidates(env.original)
    kind = rng.random()
    if kind < 0.12:
        wrong = min(rng.choice((0, 0, 0, 1, 1, 2, 2, 3, 3, 4)), len(edits) - 1)
        last = edits.index(tuple(env.row["fix"]))
        tests, tried = 1.0, range(last - wrong, last + 1)
    elif kind < 0.36:
        tests, tried = 0.5, range(0)
    else:
        first, count = rng.randrange(len(edits)), rng.choice((1, 1, 1, 1, 1, 2, 2, 2, 3, 3))
        tests, tried = 0.6, range(first, first + count)
    steps: list[ToolCall | str] = [tool_call("view")]
    if rng.random() < tests:
        steps.append(tool_call("run_tests"))
    for at in tried:
        find, replace = edits[at % len(edits)]
        steps.append(tool_call("edit", find=find, replace=replace))
    return [*steps, "Done."]


async def demonstrations(count: int, seed: int) -> list[dict[str, Any]]:
    """Play the teacher in the environment; return the conversations in OpenAI's form."""
    rng = random.Random(seed)
    manager = SandboxManager()
    try:
        bench = Bench(await manager.open(SPEC))
        return [
            await conversation(Rehearsal(bench), task, rng.getrandbits(62), lambda env: plan(env, rng))
            for task in tasks(count, split="train", seed=seed)
        ]
    finally:
        await manager.close()
