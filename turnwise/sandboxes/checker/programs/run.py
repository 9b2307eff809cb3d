"""Runs one attack: ``python3 run.py NAME``, told the rest as JSON on its input. Its last line is what it got, as JSON.

Owns: the dispatch. Refuses: judging; ``got`` says what the attack itself could see, and the host looks at its own side.
"""

import importlib
import json
import sys
from collections.abc import Callable


def main() -> None:
    """Run the attack that the command line names."""
    attacks: dict[str, Callable[[dict[str, object]], list[str]]] = {}
    for name in ("reach", "bounds", "kernel"):  # which stand beside this file, wherever that is
        attacks.update(importlib.import_module(name).ATTACKS)
    _say("begun")
    got = attacks[sys.argv[1]](json.load(sys.stdin))
    _say(json.dumps({"got": got}))


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
