"""An environment for coding agents: a file that prints the wrong number, in a folder in which the program works.

What counts is what the file prints afterwards, not what the program says of it.
"""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from turnwise import Message, Task, ToolEnv


class RepairEnv(ToolEnv):
    # Its methods wait for the disk and for a process: they run in threads.
    blocking = True

    def reset(self, task: Task | None = None, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        left, right = (7, 2) if task is None else (task.data["left"], task.data["right"])
        self.wanted = left + right
        self.folder = Path(tempfile.mkdtemp(prefix="repair-"))
        (self.folder / "calc.py").write_text(f"def add(a, b):\n    return a - b\n\n\nprint(add({left}, {right}))\n")
        return f"Make calc.py print {self.wanted}, then say what it prints.", {"workspace": str(self.folder)}

    def score(self, final: Message | None) -> float:
        command = [sys.executable, "calc.py"]
        try:
            ran = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, timeout=20, check=False)
        except subprocess.TimeoutExpired:
            return 0.0
        return float(ran.stdout.strip() == str(self.wanted))

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def tasks(n: int = 8, seed: int = 0) -> Iterator[Task]:
    """Yield sums."""
    rng = random.Random(seed)
    for index in range(n):
        data = {"left": rng.randint(2, 99), "right": rng.randint(1, 99)}
        yield Task(f"repair-{index}", "Repair calc.py.", data)
