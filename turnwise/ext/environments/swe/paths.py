"""Protected files: those of a repository that decide how tests run."""

from __future__ import annotations

import configparser
import fnmatch
import json
import re
import sys
import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Final

_PROTECTED: Final[Mapping[str, list[str]]] = tomllib.loads(
    Path(__file__).with_name("shipped").joinpath("protected.toml").read_text("utf-8")
)
"""Patterns of folders and files, and names of modules, that decide how tests run."""
SETTINGS: Final = ("setup.cfg", "tox.ini", "pyproject.toml", "package.json")
"""Files that hold a runner's settings among others: only the runner's may not change."""


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
    if any(fnmatch.fnmatch(part, pattern) for part in parts for pattern in _PROTECTED["folders"]):
        return True
    return any(fnmatch.fnmatch(parsed.name.lower(), pattern) for pattern in _PROTECTED["files"])


def shadowed_module(path: str) -> str:
    """Return the module or folder of a new file that would shadow the standard library or the test runner; else "".

    ``python -m pytest`` searches the repository first.
    """
    parts = PurePosixPath(path).parts
    first = parts[1] if parts[0] in ("src", "lib") and len(parts) > 1 else parts[0]
    name = first.partition(".")[0] if first.endswith((".py", ".so")) or len(parts) == 1 else first
    python = len(parts) > 1 or first.endswith((".py", ".so"))
    importable = name in _PROTECTED["modules"] or name.startswith("pytest_") or name in sys.stdlib_module_names
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
