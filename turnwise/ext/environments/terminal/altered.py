"""Altered tests of a terminal task: Python tests of which nothing passes together with the tests themselves."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from turnwise.ext.environments.swe.checks import Edit, alterations
from turnwise.ext.environments.swe.snapshot import state_folder
from turnwise.ext.environments.swe.twins import VERSION, TestFile
from turnwise.ext.environments.terminal.folder import TaskFolder

_RNG: Final = random.SystemRandom()
_KNOWN: Final[dict[str, AlteredTests]] = {}


@dataclass(frozen=True, slots=True)
class AlteredTests:
    """Texts of test files by path below the tests' folder; nothing where there are none that can be altered.

    Attributes:
        plain: The tests in the form of the altered ones: without comments, docstrings and messages.
        altered: The same with one check of each test altered, as one that must fail.
        names: The altered tests.
    """

    plain: Mapping[str, str] = field(default_factory=dict)
    altered: Mapping[str, str] = field(default_factory=dict)
    names: tuple[str, ...] = ()


NOTHING: Final = AlteredTests()


def altered_tests(folder: TaskFolder) -> AlteredTests:
    """Alter the Python tests of a task, each in a check that every passing run reaches."""
    plain, altered, names = {}, {}, []
    for path in sorted(folder.tests.rglob("*.py")) if folder.tests.is_dir() else ():
        if not (path.name.startswith("test_") or path.name.endswith("_test.py")):
            continue
        with contextlib.suppress(ValueError, OSError):
            file, where = TestFile(path.name, path.read_text("utf-8")), path.relative_to(folder.tests).as_posix()
            edits = {test: each for test in file.tests if (each := _edits(file, test))}
            if edits:
                plain[where] = file.rewrite({test: [(test.rpartition("::")[2], ())] for test in file.tests})
                altered[where] = file.rewrite(
                    {test: [(test.rpartition("::")[2], edits.get(test, ()))] for test in file.tests}
                )
                names += [f"{where}::{test}" for test in edits]
    return AlteredTests(plain, altered, tuple(names))


def _edits(file: TestFile, test: str) -> tuple[Edit, ...]:
    ways = alterations(file.tests[test], 1, _RNG, makers=file.makers)
    sure = [way.twins[0] for way in ways if way.kind in ("value", "truth")]
    return sure[0] if sure else ways[0].reversal if ways else ()


def known_tests(folder: TaskFolder) -> AlteredTests | None:
    """Return the altered tests of a task that were found to hold before, or that there are none."""
    key = _key(folder)
    if key not in _KNOWN:
        with contextlib.suppress(OSError, ValueError, TypeError):
            held = json.loads(_place(key).read_text("utf-8"))
            _KNOWN[key] = AlteredTests(held["plain"], held["altered"], tuple(held["names"]))
    return _KNOWN.get(key)


def keep_tests(folder: TaskFolder, tests: AlteredTests) -> None:
    """Record altered tests; that a task has none for this process alone, since its sandboxes may be why."""
    key = _key(folder)
    _KNOWN[key] = tests
    if not tests.names:
        return
    place = _place(key)
    place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    made = place.with_suffix(f".{secrets.token_hex(4)}")
    with os.fdopen(os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        json.dump(asdict(tests), file)
    made.replace(place)


def _place(key: str) -> Path:
    return state_folder() / "twins" / f"terminal-{key}.json"


def _key(folder: TaskFolder) -> str:
    digest = hashlib.sha256(f"{VERSION} {folder.image} {folder.workdir}".encode())
    for path in sorted(each for each in folder.path.rglob("*") if each.is_file()):
        name, content = path.relative_to(folder.path).as_posix(), path.read_bytes()
        digest.update(f"\n{name} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:32]
