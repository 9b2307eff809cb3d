"""Several host processes that open sandboxes at once and are killed at random.

The program of each host is ``soak_host.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

PROGRAM = Path(__file__).with_name("soak_host.py")
HOSTS = 5


def processes(*words: str) -> list[str]:
    """The command lines on this machine that hold one of some words, ours aside."""
    command_lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if int(path.parent.name) != os.getpid() and any(word in line for word in words):
                command_lines.append(line[:200])
    return command_lines


async def soak(
    folder: Path,
    mark: str,
    count: int,
    together: int,
    *,
    engine: str = "",
    seconds: float = 500,
    look: Callable[[], None] = lambda: None,
) -> list[str]:
    """Let hosts open sandboxes until so many have ended, killing four of the hosts meanwhile; return what they said.

    Args:
        folder: Where they find ``workspace``, and keep what they keep.
        mark: A word in the command lines of what runs inside.
        count: How many sandboxes in all.
        together: How many at the same time.
        engine: The docker engine's address; without, they are local.
        seconds: How long it may take.
        look: Called now and then meanwhile.
    """
    chance = random.Random(0)
    started = 0
    temporary = folder / "tmp"
    temporary.mkdir()

    def ended() -> int:
        return (folder / "output").read_bytes().count(b"\n")

    with (folder / "output").open("w") as output:

        def host() -> subprocess.Popen[bytes]:
            nonlocal started
            started += 1
            numbers = map(str, (started, count // HOSTS, together // HOSTS))
            argv = [sys.executable, str(PROGRAM), str(folder), mark, *numbers, engine]
            environment = {**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": str(PROGRAM.parents[2])}
            return subprocess.Popen(argv, stdout=output, stderr=output, env=environment, start_new_session=True)

        running = [host() for _ in range(HOSTS)]
        ends = time.monotonic() + seconds
        kills = [signal.SIGKILL, signal.SIGINT, signal.SIGKILL, signal.SIGTERM]
        try:
            while (running or ended() < count) and time.monotonic() < ends:
                look()
                if kills and ended() > (5 - len(kills)) * count // 6:
                    chance.choice(running).send_signal(kills.pop(0))
                running = [host_process for host_process in running if host_process.poll() is None]
                while len(running) < HOSTS and ended() < count:
                    running.append(host())
                await asyncio.sleep(0.1)
        finally:
            for host_process in running:
                host_process.kill()
                host_process.wait()
    assert ended() >= count
    assert not kills
    return (folder / "output").read_text().splitlines()
