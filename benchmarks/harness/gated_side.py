"""A side of a step benchmark, seen from outside: a process that stops at a gate (``trl_gate.py``) before every step."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from harness.measure import OFFLINE, ONE_THREAD


class Side:
    """One training run in a process of its own, a step at a time."""

    def __init__(
        self, script: str, side: str, model: Path, directory: Path, steps: int, settings: dict[str, Any]
    ) -> None:
        self.name = side
        self.samples: list[dict[str, Any]] = []
        self._log = directory / "log.txt"
        directory.mkdir(parents=True)
        command = [sys.executable, script, "--side", side, str(model), str(directory), str(steps)]
        environment = {**os.environ, **OFFLINE, **ONE_THREAD, "TRL_EXPERIMENTAL_SILENCE": "1"}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, json.dumps(settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
            )

    def read(self) -> dict[str, Any]:
        """Wait for the next report."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            status = self._process.wait()
            raise RuntimeError(f"{self.name} ended with status {status}:\n{self._log.read_text()[-4000:]}")
        step: dict[str, Any] = json.loads(line)
        return step

    def go(self) -> None:
        """Open the gate."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()

    def step(self) -> None:
        """Let one step run, and keep what it reports."""
        self.go()
        self.keep()

    def keep(self) -> None:
        """Wait for what the step that runs reports, and keep it."""
        self.samples.append(self.read())

    def end(self) -> dict[str, Any]:
        """Wait for the end of a run whose last gate is open; return what it was."""
        done = self.read()
        if self._process.wait(timeout=60) != 0:
            raise RuntimeError(f"{self.name} did not end in order:\n{self._log.read_text()[-4000:]}")
        return done

    def stop(self) -> None:
        """End the process, whatever it does: its gate closes, and its server with it."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
