"""Protected files: those of a repository that decide how tests run."""

from __future__ import annotations

import configparser
import fnmatch
import json
import re
import sys
import tomllib
from collections.abc import Collection
from pathlib import PurePosixPath
from typing import Any, Final

_TEST_FOLDERS: Final = frozenset(("tests", "test", "testing", "__tests__", "e2e", "spec", "specs", "__pycache__"))
_TEST_NAMES: Final = (
    "test_*.py",
    "*_test.py",
    "tests.py",
    "*_test.go",
    "*.test.[jt]s",
    "*.test.[jt]sx",
    "*.test.[cm][jt]s",
    "*.spec.[jt]s",
    "*.spec.[jt]sx",
    "*.spec.[cm][jt]s",
    "*.snap",
)
_RUNNER_NAMES: Final = (
    "conftest.py",
    "pytest.ini",
    ".pytest.ini",
    "pytest.toml",
    ".pytest.toml",
    "sitecustomize.*",
    "usercustomize.*",
    "*.pth",
    "*.pyc",
    "*.pyo",
    "jest.config.*",
    "vitest.config.*",
    ".mocharc.*",
    "noxfile.py",
    ".gitattributes",
)
_RUNNER_FOLDERS: Final = ("sitecustomize", "usercustomize", "*.egg-info", "*.dist-info", "*.egg", "*.egg-link")
"""Packages that Python imports at its start, and package metadata, whose entry points pytest loads as plugins."""
SETTINGS: Final = ("setup.cfg", "tox.ini", "pyproject.toml", "package.json")
"""Files that hold a runner's settings among others: only the runner's may not change."""
_TEST_PACKAGES: Final = frozenset(
    (
        "pytest",
        "_pytest",
        "pluggy",
        "py",
        "iniconfig",
        "packaging",
        "exceptiongroup",
        "tomli",
        "toml",
        "attr",
        "attrs",
        "six",
        "colorama",
        "pygments",
        "wcwidth",
        "atomicwrites",
        "more_itertools",
        "importlib_metadata",
        "importlib_resources",
        "typing_extensions",
        "zipp",
        "pathlib2",
        "setuptools",
        "pkg_resources",
        "coverage",
        "execnet",
        "tox",
        "virtualenv",
        "mock",
        "hypothesis",
        "_hypothesis_pytestplugin",
        "anyio",
        "nose",
        "xdist",
        "turnwise",
    )
)


def is_protected(path: str, *, allowed: Collection[str] = (), extra: Collection[str] = ()) -> bool:
    """Return whether a file decides how tests run or report.

    Args:
        path: Relative to the repository.
        allowed: Files of the row's own solution, never protected.
        extra: Further patterns of the row, such as ``bin/test``.
    """
    if path in allowed:
        return False
    parsed = PurePosixPath(path)
    if any(fnmatch.fnmatch(path, pattern) for pattern in extra):
        return True
    parts = [part.lower() for part in parsed.parts]
    if any(part in _TEST_FOLDERS or fnmatch.filter([part], pattern) for part in parts for pattern in _RUNNER_FOLDERS):
        return True
    return any(fnmatch.fnmatch(parsed.name.lower(), pattern) for pattern in (*_TEST_NAMES, *_RUNNER_NAMES))


def shadowed_module(path: str) -> str:
    """Return the module or folder of a new file that would shadow the standard library or the test runner; else "".

    ``python -m pytest`` searches the repository first.
    """
    parts = PurePosixPath(path).parts
    first = parts[1] if parts[0] in ("src", "lib") and len(parts) > 1 else parts[0]
    name = first.partition(".")[0] if first.endswith((".py", ".so")) or len(parts) == 1 else first
    python = len(parts) > 1 or first.endswith((".py", ".so"))
    importable = name in _TEST_PACKAGES or name.startswith("pytest_") or name in sys.stdlib_module_names
    return "/".join(parts[: parts.index(first) + 1]) if python and importable else ""


def settings_differ(name: str, old: bytes | None, new: bytes | None) -> bool:
    """Return whether two versions of a file in :data:`SETTINGS` run tests differently; None is a missing file.

    An unreadable version differs from every other.
    """
    return old != new and _settings(name, old) != _settings(name, new)


def _settings(name: str, text: bytes | None) -> Any:
    if text is None:
        return {}
    try:
        if name.endswith(".toml"):
            tool = tomllib.loads(text.decode()).get("tool")
            return {} if not isinstance(tool, dict) else {key: tool[key] for key in ("pytest", "tox") if key in tool}
        if name.endswith(".json"):
            document = json.loads(text)
            keys = ("scripts", "jest", "mocha", "vitest")
            return {key: document[key] for key in keys if key in document} if isinstance(document, dict) else text
        parser = configparser.RawConfigParser(strict=False)
        parser.read_string(text.decode())
    except (ValueError, TypeError, RecursionError, configparser.Error):
        return text
    runner_sections = re.compile(r"(tool:)?pytest$|nosetests$|unittest$|tox\b|testenv\b")
    return {section: dict(parser[section]) for section in parser.sections() if runner_sections.match(section)}


def touched_files(patch: str) -> frozenset[str]:
    """Return the files that a trusted git diff changes, adds or removes."""
    paths = set()
    for line in patch.splitlines():
        match = re.match(r"(?:---|\+\+\+) [ab]/([^\t]+)|rename (?:from|to) (.+)|diff --git a/(.+) b/\3$", line)
        if match is not None:
            paths.add(next(group for group in match.groups() if group is not None))
    return frozenset(paths)
