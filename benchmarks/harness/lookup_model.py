"""Small models for ``lookup``, as its example makes them: untrained, from demonstrations alone."""

from __future__ import annotations

import asyncio
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from harness.measure import ROOT

LOOKUP = ROOT / "examples" / "lookup"
_OFFLINE = ROOT / "turnwise" / "trainer" / "offline"
SOURCES = (
    LOOKUP / "teacher.py", ROOT / "turnwise" / "envs" / "demonstrations.py", _OFFLINE / "small_model.py",
    _OFFLINE / "small_model.jinja",
)  # fmt: skip
"""What decides the model: a change of these makes it anew."""


def versions() -> dict[str, str]:
    """Return the packages that decide what a model is, for the ``inputs`` of a cache."""
    return {name: version(name) for name in ("torch", "transformers", "tokenizers")}


def write_model(directory: Path, demonstrations: int, **size: int) -> list[dict[str, Any]]:
    """Write a model with random weights and the tokenizer of some demonstrations, and return those."""
    sys.path.insert(0, str(LOOKUP))
    import teacher

    from turnwise.trainer.offline.small_model import make_model

    rows = list(asyncio.run(teacher.demonstrations(demonstrations, 0)))
    make_model(directory, rows, 0, **size)
    return rows
