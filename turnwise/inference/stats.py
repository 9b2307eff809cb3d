"""What an engine says of itself.

Owns: :class:`EngineStats`. Refuses: counting; the engine does that.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(slots=True)
class EngineStats:
    """What an engine has done and is doing.

    Attributes:
        requests: Requests that ended, in any way.
        prefilled_tokens: Tokens of prompts that were run (again, after a weight update or for want of memory).
        reused_tokens: Tokens of prompts whose keys and values were there.
        generated_tokens: Sampled ids.
        steps: Forward passes.
        preemptions: Times that a sequence gave its memory up to an older one.
        running: Sequences that hold memory and run.
        waiting: Requests that wait for memory, a place or a shared prompt.
        retained: Prefixes kept.
        kv_tokens: Tokens that memory is allocated for.
        weight_version: Version in use.
        paused: Whether nothing is sampled.
    """

    requests: int = 0
    prefilled_tokens: int = 0
    reused_tokens: int = 0
    generated_tokens: int = 0
    steps: int = 0
    preemptions: int = 0
    running: int = 0
    waiting: int = 0
    retained: int = 0
    kv_tokens: int = 0
    weight_version: int = 0
    paused: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return all fields by name."""
        return asdict(self)
