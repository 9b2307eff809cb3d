"""Print what a distribution of vLLM requires besides torch, for a pip that must leave the installed torch as it is.

Run with the Python of the environment that it was installed into with ``--no-deps``: its own requirements would bring
CUDA wheels along on a machine without a GPU, and the companions of torch that serve images and sound. The torch that
is installed is printed too, pinned, so that nothing replaces it.
"""

from __future__ import annotations

import importlib.metadata
import re
import sys

LEFT_OUT = frozenset({"torch", "torchvision", "torchaudio", "torchcodec"})


def main(distribution: str) -> int:
    """Print one requirement a line."""
    required = importlib.metadata.requires(distribution)
    if not required:
        print(f"{distribution} names no requirements: is it a distribution of vLLM?", file=sys.stderr)  # noqa: T201
        return 1
    for requirement in required:
        name = re.match(r"[\w.-]+", requirement)
        # Extras were not asked for.
        if name is not None and name.group().lower() not in LEFT_OUT and "extra ==" not in requirement:
            print(requirement)  # noqa: T201
    print(f"torch=={importlib.metadata.version('torch')}")  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
