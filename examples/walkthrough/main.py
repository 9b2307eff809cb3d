"""Prints the values that ``docs/walkthrough.md`` quotes, and writes them into it.

python examples/walkthrough/main.py            print every block
python examples/walkthrough/main.py --check    say how the page differs from what is printed
python examples/walkthrough/main.py --write    bring the page's blocks up to date
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from blocks import differences, written
from quotes import printed

PAGE = Path(__file__).parents[2] / "docs" / "walkthrough.md"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--check", action="store_true")
    choice.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    blocks = printed()
    if arguments.write:
        PAGE.write_text(written(PAGE.read_text(), blocks))
    if arguments.check or arguments.write:
        problems = differences(PAGE.read_text(), blocks)
        print("\n\n".join(problems) or f"{PAGE.name} matches the output: {len(blocks)} blocks", file=sys.stderr)
        return int(bool(problems))
    print("\n\n".join(block.markdown() for block in blocks))
    return 0


if __name__ == "__main__":
    sys.exit(main())
