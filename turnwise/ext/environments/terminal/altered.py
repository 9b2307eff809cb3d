"""Altered tests of a terminal task: Python tests with a changed check, which no solution passes with the original."""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from turnwise.ext.environments.swe.checks import Edit, alterations
from turnwise.ext.environments.swe.snapshot import CachedTwins
from turnwise.ext.environments.swe.twins import VERSION, TestFile
from turnwise.ext.environments.terminal.folder import TaskFolder

_RNG: Final = random.SystemRandom()


@dataclass(frozen=True, slots=True)
class AlteredTests:
    """Texts of test files by path below the tests' folder; empty if no test can be altered.

    Attributes:
        plain: The tests, without comments, docstrings and messages like the altered ones.
        altered: Versions of the same files with an altered check in some tests, which must fail: with another expected
            value, which no reader can tell from the original, and, of tests without a value, with a reversed check. Of
            ``live`` tests several, so that a process that sees all of them guesses.
        names: The altered tests.
        floor: Reward of the reference solution with the altered tests.
        served: Whether the tests pass only where they reach services that the solution leaves.
        live: Whether they pass only beside the processes that the solution leaves.
    """

    plain: Mapping[str, str] = field(default_factory=dict)
    altered: tuple[Mapping[str, str], ...] = ()
    names: tuple[str, ...] = ()
    floor: float = 0.0
    served: bool = False
    live: bool = False


NO_TESTS: Final = AlteredTests()
_CACHE: Final = CachedTwins(AlteredTests)


def altered_tests(folder: TaskFolder, count: int = 1) -> AlteredTests:
    """Alter the Python tests of a task, each in a check that every passing run reaches.

    Args:
        folder: The task.
        count: Most versions with other values. Where there are several, none has a reversed check: its values would
            tell which version is the plain one.
    """
    files: dict[str, TestFile] = {}
    values: dict[str, dict[str, list[tuple[Edit, ...]]]] = {}
    reversals: dict[str, dict[str, tuple[Edit, ...]]] = {}
    for path in sorted(folder.tests.rglob("*.py")) if folder.tests.is_dir() else ():
        if not (path.name.startswith("test_") or path.name.endswith("_test.py")):
            continue
        with contextlib.suppress(ValueError, OSError):
            file, where = TestFile(path.name, path.read_text("utf-8")), path.relative_to(folder.tests).as_posix()
            for test, function in file.tests.items():
                options = alterations(function, count, _RNG, makers=file.makers)
                twins = next((option.twins for option in options if option.kind == "value"), [])
                if twins:
                    values.setdefault(where, {})[test] = twins
                elif options and options[0].reversal:
                    reversals.setdefault(where, {})[test] = options[0].reversal
                if options:
                    files[where] = file

    def rewrite(edits: Mapping[str, Mapping[str, tuple[Edit, ...]]]) -> dict[str, str]:
        return {
            where: file.rewrite(
                {test: [(test.rpartition("::")[2], edits.get(where, {}).get(test, ()))] for test in file.tests}
            )
            for where, file in files.items()
        }

    count = min((len(twins) for tests in values.values() for twins in tests.values()), default=0)
    versions = [
        rewrite({where: {test: twins[number] for test, twins in tests.items()} for where, tests in values.items()})
        for number in range(count)
    ]
    if reversals and count < 2:
        versions.append(rewrite(reversals))
    names = tuple(f"{where}::{test}" for edits in (values, reversals) for where in edits for test in edits[where])
    return AlteredTests(rewrite({}), tuple(versions), names)


def cached_tests(folder: TaskFolder) -> AlteredTests | None:
    """Return the cached altered tests of a task, or None."""
    return _CACHE.get(_key(folder))


def cache_tests(folder: TaskFolder, tests: AlteredTests) -> None:
    """Record altered tests; their absence only in memory, since its cause may be this process's sandboxes."""
    _CACHE.put(_key(folder), tests, in_memory=not tests.names)


def _key(folder: TaskFolder) -> str:
    digest = hashlib.sha256(f"4 {VERSION} {folder.image} {folder.workdir}".encode())
    for path in sorted(file for file in folder.path.rglob("*") if file.is_file()):
        name, content = path.relative_to(folder.path).as_posix(), path.read_bytes()
        digest.update(f"\n{name} {len(content)}\n".encode() + content)
    return f"terminal-{digest.hexdigest()[:32]}"
