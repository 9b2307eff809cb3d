"""Notes tests that failed and then passed alone; exits with 1 where one has been noted three times.

The file is committed, so that a test which fails now and then is mended and not forgotten.

Usage: flaky.py FILE DATE < names, one a line
"""

from __future__ import annotations

import sys
from pathlib import Path

LIMIT = 3
HEADING = """# Tests that failed and then passed alone

`.ci/run` adds a line for each; commit them. It fails at the third of one test. Whoever mends a test removes its lines.

| test | date |
| --- | --- |
"""


def main() -> int:
    """Return 1 where a test that is noted now has been noted too often."""
    file, date = Path(sys.argv[1]), sys.argv[2]
    names = [name for line in sys.stdin if (name := line.strip())]
    text = file.read_text(encoding="utf-8") if file.is_file() else HEADING
    text += "".join(f"| `{name}` | {date} |\n" for name in names)
    file.write_text(text, encoding="utf-8")
    counts = {name: text.count(f"| `{name}` |") for name in names}
    for name, count in counts.items():
        print(f"FLAKY, for the {count}. time of {LIMIT}: {name}", file=sys.stderr)  # noqa: T201
    return int(any(count >= LIMIT for count in counts.values()))


if __name__ == "__main__":
    sys.exit(main())
