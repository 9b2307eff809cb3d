"""mini-swe-agent as an agent: it repairs small programs, four at a time, and every token it samples is recorded.

    python examples/mini_swe_agent/main.py model=/models/Qwen3-8B            # serve a model and evaluate it
    python examples/mini_swe_agent/main.py model=... url=http://host:8000    # or ask a server

``--smoke`` plays two tasks with a scripted model. Where mini-swe-agent is not installed, a minimal stand-in runs in its
place and prints a note.
"""

from __future__ import annotations

import sys
from pathlib import Path

from turnwise import Message, ToolCall

HERE = Path(__file__).parent


def main() -> int:
    sys.path.insert(0, str(HERE.parent / "black_boxes"))
    from smoke import evaluate_or_smoke

    return evaluate_or_smoke(HERE / "eval.yaml", "mini_swe_agent", "mini", says)


def says(turn: int, _: str) -> Message:
    # It ends with a command that prints a certain line; what follows it is the answer.
    done = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; python3 calc.py"
    lines = ["cat calc.py", "sed -i 's/a - b/a + b/' calc.py", done]
    call = ToolCall("", "bash", {"command": lines[min(turn, 2)]})
    return {"role": "assistant", "content": "", "tool_calls": [call]}


if __name__ == "__main__":
    sys.exit(main())
