"""The job of ``examples/lookup`` with a warm start that also shows what a text at a prompt's end is for.

In every third conversation one prompt ends with a continuation, as self-distillation's ``sibling`` writes it, and the
conversation continues so. Continuations are right as rarely as those of the other conversations: what is learned is to
read them, which a pretrained model can and one from nothing cannot. Arguments are those of ``examples/lookup/main.py``.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

from harness.measure import ROOT
from turnwise.trainer.algorithms.teacher_contexts import describe_continuation

LOOKUP = ROOT / "examples" / "lookup"
EVERY = 3


def main() -> int:
    sys.path[:0] = [str(LOOKUP), str(LOOKUP.parent / "small_model")]
    import teacher
    from job import Job, run

    async def demonstrations(count: int, seed: int) -> list[dict[str, Any]]:
        rng = random.Random(seed)
        rows = await teacher.demonstrations(count, seed)
        return [with_continuation(row, rng) if number % EVERY == 0 else row for number, row in enumerate(rows)]

    return run(Job("lookup", LOOKUP, demonstrations, count=4480), __doc__)


def with_continuation(row: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Return a conversation, one of whose prompts tells how it continues."""
    messages = [dict(message) for message in row["messages"]]
    turn = rng.choice([number for number, message in enumerate(messages) if message["role"] == "assistant"])
    context = describe_continuation([decoded(message) for message in messages[turn:]])
    messages[turn - 1]["content"] = f"{messages[turn - 1]['content']}\n\n{context}"
    return row | {"messages": messages}


def decoded(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose arguments are objects, as they are recorded."""
    calls = [
        call | {"function": call["function"] | {"arguments": _object(call["function"]["arguments"])}}
        for call in message.get("tool_calls") or ()
    ]
    return message | ({"tool_calls": calls} if calls else {})


def _object(arguments: str | dict[str, Any]) -> Any:
    return json.loads(arguments) if isinstance(arguments, str) else arguments


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    sys.exit(main())
