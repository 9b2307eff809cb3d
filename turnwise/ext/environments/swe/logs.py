"""Parsers of test logs: one status per test."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from enum import StrEnum
from typing import Any, Final, TypeAlias

from turnwise.errors import ConfigError


class TestStatus(StrEnum):
    """Status of one test."""

    __test__ = False

    PASSED = "PASSED"
    XFAIL = "XFAIL"
    SKIPPED = "SKIPPED"
    FAILED = "FAILED"
    ERROR = "ERROR"

    @property
    def passes(self) -> bool:
        """Whether it counts as passed: passed, or failed as expected."""
        return self in (TestStatus.PASSED, TestStatus.XFAIL)


Statuses: TypeAlias = dict[str, TestStatus]
Parser: TypeAlias = Callable[[str], Statuses]

_ESCAPES: Final = re.compile(r"\x1b\[[0-9;]*[A-Za-z]|[\x00-\x08\x0b-\x1f]")
_WORDS: Final = "PASSED|FAILED|ERROR|SKIPPED|XFAIL"
_STATUS_FIRST: Final = re.compile(rf"({_WORDS})\s+(\S+)")
_TEST_FIRST: Final = re.compile(rf"(\S+::\S.*?)\s+({_WORDS})(?:\s+\(.*?\))?(?:\s+\[\s*\d+%\])?\s*$")
_SUMMARY: Final = re.compile(r"=+ short test summary info =+\s*$")
_ORDER: Final = list(TestStatus)


def _lines(log: str) -> Iterator[str]:
    for line in log.replace("\r\n", "\n").split("\n"):
        yield _ESCAPES.sub("", line)


def _record_worst(statuses: Statuses, name: str, status: TestStatus) -> None:
    """Record a status; of several runs of one name the worst counts."""
    recorded = statuses.get(name)
    if recorded is None or _ORDER.index(status) > _ORDER.index(recorded):
        statuses[name] = status


def pytest_log(log: str) -> Statuses:
    """Parse a log of pytest, ``-rA`` or ``-v``, also through ``tox``.

    A summary at the end that lists passed tests is authoritative: printed text cannot pose as a result.
    """
    lines = list(_lines(log))
    starts = [number for number, line in enumerate(lines) if _SUMMARY.match(line)]
    summary: Statuses = {}
    for line in lines[starts[-1] + 1 :] if starts else ():
        _pytest_line(line, summary)
    if TestStatus.PASSED in summary.values():
        return summary
    statuses: Statuses = {}
    for line in lines:
        _pytest_line(line, statuses)
        by_name = _TEST_FIRST.match(line)
        if by_name is not None:
            statuses[by_name[1].split()[0]] = TestStatus(by_name[2])
    return statuses


def _pytest_line(line: str, statuses: Statuses) -> None:
    match = _STATUS_FIRST.match(line)
    # "SKIPPED [2] tests/test_a.py:7: reason" counts skipped tests, it names none.
    if match is not None and not re.match(r"\[\d+\]", match[2]):
        statuses[match[2]] = TestStatus(match[1])


_UNITTEST_ENDS: Final = {
    "ok": TestStatus.PASSED,
    "OK": TestStatus.PASSED,
    "FAIL": TestStatus.FAILED,
    "ERROR": TestStatus.ERROR,
    "expected failure": TestStatus.XFAIL,
    "unexpected success": TestStatus.FAILED,
}
_TEST_ID: Final = re.compile(r"\w+ \([\w.<>]+\)$")


def unittest_log(log: str) -> Statuses:
    """Parse a verbose log of unittest, Django's runner or nose.

    A test with a docstring has two lines, ``test_a (pkg.Case)`` and ``What it says ... ok``; both are recorded. Output
    of a test stands between its name and its status, which then begins a line.
    """
    statuses: Statuses = {}
    name, previous = "", ""
    for line in _lines(log):
        text = line.strip()
        head = re.match(r"(FAIL|ERROR): (.+)$", text)
        if head is not None:
            statuses[head[2]] = TestStatus.FAILED if head[1] == "FAIL" else TestStatus.ERROR
            continue
        name_text, dots, ending = text.rpartition(" ... ")
        status = _ending(ending if dots else text)
        if dots:
            name = name_text
        if status is not None and (dots or text in _UNITTEST_ENDS) and name:
            statuses[name] = status
            if dots and _TEST_ID.match(previous) and not _TEST_ID.match(name):
                statuses[previous] = status
            name = "" if not dots else name
        previous = text
    return statuses


def _ending(text: str) -> TestStatus | None:
    text = text.strip()
    if text.startswith("skipped"):
        return TestStatus.SKIPPED
    return _UNITTEST_ENDS.get(text)


def sympy_log(log: str) -> Statuses:
    """Parse a log of sympy's own runner, ``bin/test -C --verbose``."""
    statuses: Statuses = {}
    ends = {"ok": TestStatus.PASSED, "F": TestStatus.FAILED, "E": TestStatus.ERROR, "f": TestStatus.XFAIL}
    for line in _lines(log):
        text = line.strip()
        heading = re.match(r"_+ (\S+\.py):(\S+) _+$", text)
        if heading is not None:
            statuses[f"{heading[1]}:{heading[2]}"] = TestStatus.FAILED
            statuses[heading[2]] = TestStatus.FAILED
            continue
        words = text.split()
        if len(words) >= 2 and words[0].startswith("test_") and words[-1] in ends:
            statuses[words[0]] = ends[words[-1]]
        elif len(words) >= 2 and words[0].startswith("test_") and words[1] == "Skipped":
            statuses[words[0]] = TestStatus.SKIPPED
    return statuses


_MARKS: Final = {
    **dict.fromkeys("✓✔√", TestStatus.PASSED),
    **dict.fromkeys("✕✗✖×", TestStatus.FAILED),
    **dict.fromkeys("○↓-", TestStatus.SKIPPED),
}
_TIME: Final = re.compile(r"\s+\(?\d+(?:\.\d+)?\s*m?s\)?$")


def jest_log(log: str) -> Statuses:
    """Parse a verbose log of Jest, Vitest or Mocha: a mark, and the test's name."""
    statuses: Statuses = {}
    for line in _lines(log):
        text = line.strip()
        failed = re.match(r"\d+\) (.+)$", text)
        if failed is not None and line.startswith("  "):
            _record_worst(statuses, _TIME.sub("", failed[1]), TestStatus.FAILED)
        elif text[:1] in _MARKS and text[1:2] == " " and line[:1] == " ":
            name = re.sub(r"^skipped\s+", "", text[2:].strip()) if text[0] == "○" else text[2:].strip()
            _record_worst(statuses, _TIME.sub("", name), _MARKS[text[0]])
    return statuses


_GO: Final = {"PASS": TestStatus.PASSED, "FAIL": TestStatus.FAILED, "SKIP": TestStatus.SKIPPED}


def go_log(log: str) -> Statuses:
    """Parse a log of ``go test -v`` or ``go test -json``; sub-tests are ``TestA/case``."""
    statuses: Statuses = {}
    for line in _lines(log):
        text = line.strip()
        if text.startswith('{"'):
            event = _event(text)
            action = str(event.get("Action", "")).upper()
            if isinstance(event.get("Test"), str) and action in _GO:
                _record_worst(statuses, event["Test"], _GO[action])
            continue
        match = re.match(r"--- (PASS|FAIL|SKIP): (.+?) \([\d.]+s\)$", text)
        if match is not None:
            _record_worst(statuses, match[2], _GO[match[1]])
    return statuses


def _event(text: str) -> dict[str, Any]:
    try:
        event = json.loads(text)
    except ValueError:
        return {}
    return event if isinstance(event, dict) else {}


def cargo_log(log: str) -> Statuses:
    """Parse a log of ``cargo test``."""
    statuses: Statuses = {}
    ends = {"ok": TestStatus.PASSED, "FAILED": TestStatus.FAILED, "ignored": TestStatus.SKIPPED}
    for line in _lines(log):
        match = re.match(r"test (.+?)(?: - should panic)? \.\.\. (ok|FAILED|ignored)\b", line.strip())
        if match is not None:
            _record_worst(statuses, match[1], ends[match[2]])
    return statuses


PARSERS: Final[dict[str, Parser]] = {
    "pytest": pytest_log,
    "tox": pytest_log,
    "seaborn": pytest_log,
    "unittest": unittest_log,
    "django": unittest_log,
    "nose": unittest_log,
    "sympy": sympy_log,
    "jest": jest_log,
    "vitest": jest_log,
    "mocha": jest_log,
    "go": go_log,
    "cargo": cargo_log,
}
"""Parsers by the name of their framework."""


def parser_of(framework: str) -> Parser:
    """Return the parser of a framework."""
    if framework not in PARSERS:
        raise ConfigError(f"framework is {framework!r}: supported are {', '.join(PARSERS)}")
    return PARSERS[framework]
