"""Runs one attack inside a sandbox: ``python3 run.py NAME``, options as JSON on its input, the outcome as JSON."""

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
