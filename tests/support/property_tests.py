"""How many examples a property test draws: a share of them in ``make test``, all of them in ``make test-long``."""

from __future__ import annotations

import os

SHARE = "TURNWISE_TESTS_SHARE"
"""In the environment: the share of all examples that is drawn, above 0; without it all are."""
_LEAST = 5


def examples(limit: int) -> int:
    """Return how many examples a test draws now, of the most that it draws ever."""
    return min(limit, max(_LEAST, round(limit * float(os.environ.get(SHARE) or 1))))
