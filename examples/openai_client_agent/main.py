"""Train a loop on the ``openai`` package that knows nothing of Turnwise: it learns as our own ReAct loop does.

The model, the warm start and the tasks are those of ``../lookup``; only the agent is another one: the program
``loop.py``, in its own processes. ``--smoke`` plays four tasks with a model from a script and trains nothing.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

HERE = Path(__file__).parent
LOOKUP = HERE.parent / "lookup"
AGENT = {
    "name": "blackbox",
    "config": {
        "command": ["{python}", str(HERE / "loop.py")],
        "dialect": "openai",
        # The programs stay: to start one for each of 6,600 episodes would take longer than all the training.
        "workers": 12,
    },
}


def main() -> int:
    if "--smoke" in sys.argv:
        return smoke()
    sys.path[:0] = [str(LOOKUP), str(HERE.parent / "small_model")]
    from job import Job, run
    from teacher import demonstrations

    ours = (f"rollout.agent={json.dumps(AGENT)}", "rollout.concurrency=24")
    return run(Job("lookup", LOOKUP, demonstrations, count=4480, overrides=ours), __doc__)


def smoke() -> int:
    sys.path.insert(0, str(HERE.parent / "black_boxes"))
    from smoke import play

    from turnwise import Message, ToolCall
    from turnwise.envs.basic.lookup import table, tasks

    seed = 7
    questions = list(tasks(4))

    def says(turn: int, prompt: str) -> Message:
        person = next(
            question.data["person"] for question in questions if f"Who manages {question.data['person']}?" in prompt
        )
        people = table(seed, person=person)
        team = people.teams[person]
        calls = [ToolCall("", "team_of", {"person": person}), ToolCall("", "manager_of", {"team": team})]
        if turn == 2:
            return {"role": "assistant", "content": people.answer}
        return {"role": "assistant", "content": "", "tool_calls": [calls[turn]]}

    return asyncio.run(play(AGENT, "lookup", says, questions, seed))


if __name__ == "__main__":
    sys.exit(main())
