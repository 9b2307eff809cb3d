"""The distribution: a copy of what its build reads, and the environment in which nothing but it is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
WHEELHOUSE = ROOT / ".cache" / "wheelhouse"
"""Wheels of torch and of all that ``constraints.txt`` names (``make real-installs``)."""


def copy_sources(target: Path) -> None:
    """Copy what a build reads, so that it writes nothing into this checkout."""
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, target / name)
    shutil.copytree(ROOT / "turnwise", target / "turnwise", ignore=shutil.ignore_patterns("__pycache__"))


@dataclass(frozen=True)
class EmptyEnvironment:
    """A virtual environment that can install from the wheelhouse and from nowhere else.

    Attributes:
        folder: Where it is.
        home: The folder in which its programs run.
    """

    folder: Path
    home: Path

    @classmethod
    def create(cls, folder: Path) -> EmptyEnvironment:
        """Create it, with a folder for its programs beside it."""
        home = folder.with_name(f"{folder.name}-home")
        home.mkdir()
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=120)
        return cls(folder, home)

    def run(self, *arguments: str, timeout: float = 500, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a program of it: of the machine's environment it sees PATH alone."""
        settings = {
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            "HOME": str(self.home),
            "LANG": "C.UTF-8",
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "140",
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "PIP_FIND_LINKS": str(WHEELHOUSE),
            "PIP_NO_INDEX": "1",
            **variables,
        }
        command = [str(self.folder / "bin" / arguments[0]), *arguments[1:]]
        return subprocess.run(
            command, cwd=self.home, env=settings, capture_output=True, text=True, check=False, timeout=timeout
        )

    def succeed(self, *arguments: str, **variables: str) -> str:
        """Run a program that has to succeed, and return what it printed."""
        done = self.run(*arguments, **variables)
        assert done.returncode == 0, f"{arguments}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout

    def install(self, requirement: str) -> None:
        """Install from the wheelhouse; modules are compiled as they are imported."""
        self.succeed("python", "-m", "pip", "install", "--quiet", "--no-compile", requirement)
