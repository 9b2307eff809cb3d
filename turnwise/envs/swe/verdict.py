"""What the tests say of a solution.

Owns: :class:`Verdict` and :func:`decide`, which holds the statuses of a run against what a row expects. Refuses:
running tests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from turnwise.envs.swe.logs import Statuses, TestStatus
from turnwise.envs.swe.rows import Instance


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a solution.

    Attributes:
        resolved: Whether every test that must pass does.
        reason: Why not, in a few words; "" where it is resolved.
        fail_to_pass: The status of each test that failed at first; ``ERROR`` where none was reported.
        pass_to_pass: The same of those that passed at first.
        dropped: Files that the solution changed and that were put back, since they decide how tests run.
        log: The end of what the run wrote.
        seconds: What applying the solution and running the tests took.
    """

    resolved: bool
    reason: str = ""
    fail_to_pass: Mapping[str, TestStatus] = field(default_factory=dict)
    pass_to_pass: Mapping[str, TestStatus] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()
    log: str = ""
    seconds: float = 0.0

    @property
    def fixed(self) -> float:
        """Share of the tests that failed at first and pass now."""
        return _share(self.fail_to_pass)

    @property
    def kept(self) -> float:
        """Share of the tests that passed at first and still do."""
        return _share(self.pass_to_pass)

    @property
    def partial(self) -> float:
        """Partial credit: the share of fixed tests, 0 where one that passed at first does not any more."""
        return self.fixed if self.kept == 1.0 else 0.0

    def tests(self) -> dict[str, dict[str, str]]:
        """Return the status of every test as JSON values."""
        return {
            "FAIL_TO_PASS": {name: str(status) for name, status in self.fail_to_pass.items()},
            "PASS_TO_PASS": {name: str(status) for name, status in self.pass_to_pass.items()},
        }


def _share(tests: Mapping[str, TestStatus]) -> float:
    return sum(status.good for status in tests.values()) / len(tests) if tests else 1.0


def decide(
    instance: Instance, statuses: Statuses, *, dropped: Sequence[str] = (), log: str = "", reason: str = ""
) -> Verdict:
    """Hold the statuses of a run against what a row expects.

    Args:
        instance: The row.
        statuses: What the run reported, by test.
        dropped: Files that were put back.
        log: The end of its output.
        reason: What went wrong with the run as a whole: then nothing that it reported counts. "": nothing did.
    """
    if reason:
        statuses = {}
    if instance.expected:
        return _as_expected(instance, statuses, dropped, log, reason)
    by_name: Statuses = {}
    for name, status in statuses.items():
        # Published names end at the first blank, since they were read from logs.
        by_name[name.split()[0] if "::" in name else name] = status
    by_name.update(statuses)
    found = [
        {name: by_name.get(name, TestStatus.ERROR) for name in names}
        for names in (instance.fail_to_pass, instance.pass_to_pass)
    ]
    bad = [[name for name, status in each.items() if not status.good] for each in found]
    if not reason and bad[0]:
        reason = f"{len(bad[0])} of {len(found[0])} tests still fail: {bad[0][0]}"
    elif not reason and bad[1]:
        reason = f"{len(bad[1])} of {len(found[1])} tests that passed do not any more: {bad[1][0]}"
    return Verdict(not reason, reason, found[0], found[1], tuple(dropped), log)


def _as_expected(instance: Instance, statuses: Statuses, dropped: Sequence[str], log: str, reason: str) -> Verdict:
    """Hold a run against the status of every test: rows of R2E-Gym name tests without their files."""
    run = {_r2e_name(name): status for name, status in statuses.items()}
    found = {}
    for name, wanted in instance.expected.items():
        status = run.get(_r2e_name(name), TestStatus.ERROR)
        found[name] = TestStatus.PASSED if str(status) == wanted else TestStatus.FAILED
    bad = [name for name, status in found.items() if not status.good]
    if not reason and bad:
        reason = f"{len(bad)} of {len(found)} tests end otherwise than they should: {bad[0]}"
    return Verdict(not reason, reason, found, {}, tuple(dropped), log)


def _r2e_name(name: str) -> str:
    name = name.split(" - ")[0]
    return ".".join(name.split("::")[1:]) if "::" in name else name
