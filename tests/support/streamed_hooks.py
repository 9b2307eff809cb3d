"""A hook that fails once, between two parts of a streamed step.

Named ``support.streamed_hooks:FailsOnce`` in configurations of runs in this process.
"""

from __future__ import annotations

import turnwise

FAILURES: list[int] = []
"""At which samplings of the runs of this process it fails; each counts down to one of them."""
GIVEN: list[tuple[int, tuple[str, ...]]] = []
"""What steps were given: the step, and its tasks' groups."""


class FailsOnce(turnwise.Hooks):
    """Notes what it is given, and raises where ``FAILURES`` says so."""

    def on_sample_end(self):
        GIVEN.append((self.global_steps, tuple(group.id.partition("-")[2] for group in self.batch)))
        if len(GIVEN) in FAILURES:
            raise RuntimeError("not this time")
