"""Fail when a test of a JUnit report was skipped, when the report tells of failures, or when it holds no test.

Usage: no_skips.py REPORT [KIND ...], where KIND is skipped, failure or error; by default all three.
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree


def main(path: str, *kinds: str) -> int:
    """Return 0 when there are tests in the report, and none of them is of these kinds."""
    cases = list(ElementTree.parse(path).getroot().iter("testcase"))
    wrong = 0
    for case in cases:
        for kind in kinds or ("skipped", "failure", "error"):
            for outcome in case.iter(kind):
                wrong += 1
                name = f"{case.get('classname')}::{case.get('name')}"
                print(f"{kind}: {name}: {outcome.get('message', '')}", file=sys.stderr)  # noqa: T201
    print(f"{path}: {len(cases)} tests, {wrong} {' or '.join(kinds) or 'skipped or failed'}")  # noqa: T201
    return 0 if cases and not wrong else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
