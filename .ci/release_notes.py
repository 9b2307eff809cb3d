"""Prints the notes of a release, the changelog's section of its version. Usage: release_notes.py vX.Y.Z

A tag that is not the version of pyproject.toml and of the package, or whose section is missing or says that it is
unreleased, ends with 1.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def release_notes(tag: str, root: Path = ROOT) -> str:
    """Return the notes of a tag's version. Raises SystemExit where it cannot be released."""
    version = tag.removeprefix("v")
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    [package] = re.findall(r'^__version__ = "(.*)"$', (root / "turnwise/version.py").read_text(encoding="utf-8"), re.M)
    if not tag.startswith("v") or {version} != {project, package}:
        sys.exit(
            f"the tag is {tag}, pyproject.toml has {project}, turnwise/version.py {package}: make them one version"
        )
    sections = re.split(r"^## ", (root / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.M)[1:]
    title, notes = next((text.split("\n", 1) for text in sections if text.split()[0] == version), ("", ""))
    if "unreleased" in title or not notes.strip():
        sys.exit(f"CHANGELOG.md has no released section {version}: replace (unreleased) in its title by the date")
    return notes.strip()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: release_notes.py vX.Y.Z")
    sys.stdout.write(release_notes(sys.argv[1]) + "\n")
