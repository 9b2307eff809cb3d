"""A thousand sandboxes, a hundred at a time, with sandboxes and hosts killed at random: nothing is left of them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from turnwise.sandboxes.local import LocalBackend
from turnwise.sandboxes.local.rungs import find_groups

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]
PROGRAM = Path(__file__).parents[1] / "support" / "sandbox_soak.py"
HOSTS, TOGETHER, COUNT = 5, 20, 1000


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="soak-", dir="/var/tmp", ignore_cleanup_errors=True) as made:
        os.chmod(made, 0o755)
        workspace = Path(made) / "workspace"
        workspace.mkdir()
        (workspace / "file").write_text("seen")
        yield Path(made)


def processes(*words: str) -> list[str]:
    """The command lines on this machine that hold one of some words, ours aside."""
    found = []
    for each in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            line = each.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if int(each.parent.name) != os.getpid() and any(word in line for word in words):
                found.append(line[:200])
    return found


def groups(state: Path) -> set[Path]:
    """The control groups of hosts with a state folder."""
    names = os.listdir(state) if state.is_dir() else []
    return {folder / name for folder in find_groups().folders() for name in names if (folder / name).is_dir()}


async def test_nothing_is_left_of_a_thousand_sandboxes(folder: Path) -> None:
    mark = str(uuid.uuid4().int)[:12]
    state = folder / "state"
    chance = random.Random(0)
    seen_groups: set[Path] = set()
    output = (folder / "output").open("w+")
    begun = 0

    def host() -> subprocess.Popen[str]:
        nonlocal begun
        begun += 1
        argv = [sys.executable, str(PROGRAM), str(folder), mark, str(begun), str(COUNT // HOSTS), str(TOGETHER)]
        return subprocess.Popen(argv, stdout=output, stderr=subprocess.STDOUT, text=True, start_new_session=True)

    running = [host() for _ in range(HOSTS)]
    ends = time.monotonic() + 500
    kills = [signal.SIGKILL, signal.SIGINT, signal.SIGKILL, signal.SIGTERM]
    try:
        while (running or ended(folder) < COUNT) and time.monotonic() < ends:
            seen_groups |= groups(state)
            if kills and ended(folder) > (5 - len(kills)) * COUNT // 6:
                chance.choice(running).send_signal(kills.pop(0))
            running = [each for each in running if each.poll() is None]
            while len(running) < HOSTS and ended(folder) < COUNT:
                running.append(host())
            await asyncio.sleep(0.1)
    finally:
        for each in running:
            each.kill()
            each.wait()
    lines = (folder / "output").read_text().splitlines()
    assert ended(folder) >= COUNT
    assert not kills
    # A victim that was killed while it started did not start, or could not be kept: nothing else may fail.
    failed = [line for line in lines if line.startswith("failed")]
    assert not [line for line in failed if "its first process ended" not in line and "could not be kept" not in line]
    assert len(failed) < COUNT // 5
    # A host that was killed is outlived by its launcher for as long as that needs to end what it started.
    backend = LocalBackend("bubblewrap", directory=state)
    await backend.probe()
    while (left := processes(mark, f"{state}/turnwise-")) and time.monotonic() < ends:
        await asyncio.sleep(0.1)
        left = [line for line in left if f"-{os.getpid()}-" not in line and "boot.launcher" not in line]
        if not left:
            break
    await backend.reap()
    await backend.close()
    assert not processes(mark)
    assert not list(state.iterdir())
    assert str(folder) not in Path("/proc/self/mountinfo").read_text()
    assert not [group for group in seen_groups if group.exists()]


def ended(folder: Path) -> int:
    with (folder / "output").open() as file:
        return sum(1 for _ in file)
