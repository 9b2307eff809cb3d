"""Prints the names of the tests that failed in the last run, one a line; exits with 1 for none, or too many.

pytest-xdist notes tests of a group as NAME@GROUP, which pytest alone does not know: the file is written anew without.

Usage: failed.py LASTFAILED MOST
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

# After the parameters, which may hold the sign too.
_GROUP = re.compile(r"@[^\]@]*$")


def main() -> int:
    """Return 0 when there are such tests, and not too many of them."""
    file, limit = Path(sys.argv[1]), int(sys.argv[2])
    noted = json.loads(file.read_text()) if file.is_file() else {}
    failed = sorted({_GROUP.sub("", name) for name in noted})
    # A file that could not be collected has no test to run again.
    if not 0 < len(failed) <= limit or not all("::" in name for name in failed):
        return 1
    file.write_text(json.dumps(dict.fromkeys(failed, True)))
    print("\n".join(failed))  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
