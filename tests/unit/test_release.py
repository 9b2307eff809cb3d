"""What a release is made by: its workflow, its notes, and the container file."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import turnwise

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / ".ci" / "release_notes.py"


def notes_of(tag: str, root: Path) -> subprocess.CompletedProcess[str]:
    """Run the script on a copy of the files that it reads."""
    (root / ".ci").mkdir(exist_ok=True)
    (root / ".ci" / SCRIPT.name).write_bytes(SCRIPT.read_bytes())
    command = [sys.executable, str(root / ".ci" / SCRIPT.name), tag]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def write_project(root: Path, project: str, package: str, title: str) -> None:
    (root / "turnwise").mkdir()
    (root / "pyproject.toml").write_text(f'[project]\nversion = "{project}"\n')
    (root / "turnwise" / "version.py").write_text(f'"""The version."""\n\n__version__ = "{package}"\n')
    (root / "CHANGELOG.md").write_text(f"# Changelog\n\n## {title}\n\n- New.\n\n## 0.1.0 (2026-01-01)\n\n- First.\n")


def test_notes_of_a_release_are_the_section_of_its_version(tmp_path: Path) -> None:
    write_project(tmp_path, "0.2.0", "0.2.0", "0.2.0 (2026-12-01)")
    done = notes_of("v0.2.0", tmp_path)
    assert (done.returncode, done.stdout) == (0, "- New.\n")


@pytest.mark.parametrize(
    ("tag", "project", "package", "title", "message"),
    [
        ("v0.2.1", "0.2.0", "0.2.0", "0.2.1 (2026-12-01)", "the tag is v0.2.1, pyproject.toml has 0.2.0"),
        ("0.2.0", "0.2.0", "0.2.0", "0.2.0 (2026-12-01)", "the tag is 0.2.0"),
        ("v0.2.0", "0.2.0", "0.1.0", "0.2.0 (2026-12-01)", "turnwise/version.py 0.1.0: make them one version"),
        ("v0.2.0", "0.2.0", "0.2.0", "0.2.0 (unreleased)", "no released section 0.2.0"),
        ("v0.2.0", "0.2.0", "0.2.0", "0.3.0 (2026-12-01)", "no released section 0.2.0"),
    ],
)
def test_a_tag_that_cannot_be_released_is_refused(
    tmp_path: Path, tag: str, project: str, package: str, title: str, message: str
) -> None:
    write_project(tmp_path, project, package, title)
    done = notes_of(tag, tmp_path)
    assert done.returncode == 1
    assert message in done.stderr


def test_changelog_has_a_section_of_this_version() -> None:
    titles = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert turnwise.__version__ in titles


def test_release_is_built_once_and_published_without_a_token() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
    build, publish = workflow["jobs"]["build"], workflow["jobs"]["publish"]
    assert workflow["permissions"] == {}
    assert build["permissions"] == {"contents": "read"}
    assert publish["permissions"] == {"contents": "write", "id-token": "write"}
    assert (publish["needs"], publish["environment"]) == ("build", "release")
    runs = "\n".join(step.get("run", "") for step in build["steps"])
    assert "python -m build" in runs
    assert '.ci/release_notes.py "$GITHUB_REF_NAME"' in runs
    assert "secrets." not in (ROOT / ".github" / "workflows" / "release.yml").read_text()


def test_container_file_installs_the_wheel_and_runs_the_quickstart() -> None:
    text = (ROOT / "Containerfile").read_text()
    arguments = dict(re.findall(r"^ARG (\w+)=(.*)$", text, re.MULTILINE))
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert arguments["EXTRAS"] in extras
    assert arguments["TORCH_INDEX"].endswith("/cpu")
    commands = re.findall(r"python env\.py ([\w-]+)", text)
    assert commands == ["check", "make-model", "train", "eval"]
    copied = re.findall(r"^COPY (\S+) ", text, re.MULTILINE)
    assert copied == ["dist/", "examples/hello/env.py"]
