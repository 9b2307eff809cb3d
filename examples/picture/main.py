"""A model that sees: from nothing, it learns to look at a picture that a tool returns and to name what it shows.

The steps are those of every job on a small model (``../small_model/job.py``): demonstrations of a teacher that is
mostly wrong (``teacher.py``), a small vision-language model made in place, a warm start on them (``sft.yaml``), and
reinforcement learning (``train.yaml``), evaluated on boards that training never shows. A CPU is enough.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse

HERE = Path(__file__).parent


def make(arguments: argparse.Namespace) -> Path:
    """Make the model, of Qwen2.5-VL's family, and return its directory."""
    from teacher import demonstrations

    from turnwise.envs.library.picture import COLOURS, PLACES
    from turnwise.trainer.offline.small_vision import make_vision_model

    directory: Path = arguments.runs / (arguments.name or f"picture-seed{arguments.seed}") / "initial"
    words = "|".join([*COLOURS, *(word for place in PLACES for word in place.split())])
    rows = asyncio.run(demonstrations(200, arguments.seed))
    make_vision_model(
        directory, rows, arguments.seed, width=128, layers=2, context=512, most_patches=16, words=rf"\b(?:{words})\b"
    )
    return directory


def main() -> int:
    sys.path[:0] = [str(HERE), str(HERE.parent / "small_model")]
    from job import Job, run
    from teacher import demonstrations

    return run(Job("picture", HERE, demonstrations, count=3000, pretrained=make), __doc__)


if __name__ == "__main__":
    sys.exit(main())
