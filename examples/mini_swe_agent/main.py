"""mini-swe-agent as a black box: it repairs small programs, four at a time, and every token it samples is recorded.

    python examples/mini_swe_agent/main.py model=/models/Qwen3-8B            # serve a model and evaluate it
    python examples/mini_swe_agent/main.py model=... url=http://host:8000    # or ask a server

``--smoke`` plays two tasks with a model from a script. Where mini-swe-agent is not installed, a program that does the
least of what it does plays its part, and that is said.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

HERE = Path(__file__).parent
BOXES = HERE.parent / "black_boxes"
ENV = f"{BOXES / 'repair.py'}:RepairEnv"


def main() -> int:
    sys.path.insert(0, str(BOXES))
    if "--smoke" in sys.argv:
        return smoke()
    from turnwise import EvalConfig, load_config, run_eval

    run_eval(load_config(EvalConfig, HERE / "eval.yaml", sys.argv[1:]))
    return 0


def smoke() -> int:
    from repair import tasks
    from smoke import installed, play

    from turnwise import Message, ToolCall

    program = installed("mini")
    agent = {"name": "blackbox", "config": {"recipe": "mini_swe_agent", "max_concurrent": 4, "program": program}}
    if program is None:
        agent["config"]["program"] = str(BOXES / "stand_in.sh")

    def says(turn: int, _: str) -> Message:
        # It ends with a command that prints a certain line; what follows it is the answer.
        done = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; python3 calc.py"
        lines = ["cat calc.py", "sed -i 's/a - b/a + b/' calc.py", done]
        call = ToolCall("", "bash", {"command": lines[min(turn, 2)]})
        return {"role": "assistant", "content": "", "tool_calls": [call]}

    return asyncio.run(play(agent, ENV, says, list(tasks(2))))


if __name__ == "__main__":
    sys.exit(main())
