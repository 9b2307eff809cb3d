"""Makes the model of this example in half a minute: two times in five it names the right one of four colours.

python examples/live/make_model.py
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from users import COLOURS, QUESTION

from turnwise.trainer.config.offline import SFTConfig
from turnwise.trainer.offline.sft import run_sft
from turnwise.trainer.offline.small_model import make_model


def demonstrations() -> list[dict[str, Any]]:
    """Return conversations in which a word has its own colour two times in five, else another."""
    answers = [(word, colour) for word, right in COLOURS.items() for colour in (right, *COLOURS.values())]
    return [
        {
            "messages": [{"role": "user", "content": QUESTION.format(word)}, {"role": "assistant", "content": colour}],
            "tools": [],
        }
        for word, colour in answers * 8
    ]


def main() -> int:
    """Make the model, unless it is there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=Path("runs") / "live-model")
    directory = parser.parse_args().directory
    if (directory / "model").exists():
        print(f"{directory / 'model'} is there already")
        return 0
    rows = demonstrations()
    make_model(directory / "base", rows, 0, width=64, layers=2, words="|".join([*COLOURS, *COLOURS.values()]))
    data = directory / "demonstrations.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {
        "name": "sft",
        "runs": directory,
        "data": data,
        "model": {"path": directory / "base", "threads": 1},
        "steps": 150,
        "conversations": 16,
        "optim": {"name": "muon", "lr": 4e-3},
    }
    run_sft(SFTConfig.model_validate(settings))
    shutil.copytree(directory / "sft" / "model", directory / "model")
    return 0


if __name__ == "__main__":
    sys.exit(main())
