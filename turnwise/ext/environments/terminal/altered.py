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
        altered: The same with one check of each test altered, so that it must fail.
        names: The altered tests.
    """

    plain: Mapping[str, str] = field(default_factory=dict)
    altered: Mapping[str, str] = field(default_factory=dict)
    names: tuple[str, ...] = ()


NO_TESTS: Final = AlteredTests()
_CACHE: Final = CachedTwins(AlteredTests)


def altered_tests(folder: TaskFolder) -> AlteredTests:
    """Alter the Python tests of a task, each in a check that every passing run reaches."""
    plain, altered, names = {}, {}, []
    for path in sorted(folder.tests.rglob("*.py")) if folder.tests.is_dir() else ():
        if not (path.name.startswith("test_") or path.name.endswith("_test.py")):
            continue
        with contextlib.suppress(ValueError, OSError):
            file, where = TestFile(path.name, path.read_text("utf-8")), path.relative_to(folder.tests).as_posix()
            edits = {test: edit for test in file.tests if (edit := _edits(file, test))}
            if edits:
                plain[where] = file.rewrite({test: [(test.rpartition("::")[2], ())] for test in file.tests})
                altered[where] = file.rewrite(
                    {test: [(test.rpartition("::")[2], edits.get(test, ()))] for test in file.tests}
                )
                names += [f"{where}::{test}" for test in edits]
    return AlteredTests(plain, altered, tuple(names))


def _edits(file: TestFile, test: str) -> tuple[Edit, ...]:
    options = alterations(file.tests[test], 1, _RNG, makers=file.makers)
    sure = [option.twins[0] for option in options if option.kind in ("value", "truth")]
    return sure[0] if sure else options[0].reversal if options else ()


def cached_tests(folder: TaskFolder) -> AlteredTests | None:
    """Return the cached altered tests of a task, or None."""
    return _CACHE.get(_key(folder))


def cache_tests(folder: TaskFolder, tests: AlteredTests) -> None:
    """Record altered tests; their absence only in memory, since its cause may be this process's sandboxes."""
    _CACHE.put(_key(folder), tests, in_memory=not tests.names)


def _key(folder: TaskFolder) -> str:
    digest = hashlib.sha256(f"{VERSION} {folder.image} {folder.workdir}".encode())
    for path in sorted(file for file in folder.path.rglob("*") if file.is_file()):
        name, content = path.relative_to(folder.path).as_posix(), path.read_bytes()
        digest.update(f"\n{name} {len(content)}\n".encode() + content)
    return f"terminal-{digest.hexdigest()[:32]}"
