"""A thousand sandboxes, a hundred at a time, with sandboxes and hosts killed at random: nothing is left of them."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.sandboxes.soak import processes, soak
from turnwise.sandboxes.local import LocalBackend
from turnwise.sandboxes.local.control_groups import find_groups

pytestmark = [pytest.mark.real, pytest.mark.alike("soaks"), pytest.mark.timeout(600)]


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="soak-", dir="/var/tmp", ignore_cleanup_errors=True) as path:
        os.chmod(path, 0o755)
        workspace = Path(path) / "workspace"
        workspace.mkdir()
        (workspace / "file").write_text("seen")
        yield Path(path)


def groups(state: Path) -> set[Path]:
    """The control groups of hosts with a state folder."""
    names = os.listdir(state) if state.is_dir() else []
    return {folder / name for folder in find_groups().folders() for name in names if (folder / name).is_dir()}


async def test_a_thousand_sandboxes_leave_no_resources(folder: Path) -> None:
    mark = str(uuid.uuid4().int)[:12]
    state = folder / "state"
    seen_groups: set[Path] = set()
    lines = await soak(folder, mark, 1000, 100, look=lambda: seen_groups.update(groups(state)))
    # A victim that was killed while it started did not start, or could not be copied: nothing else may fail.
    failed = [line for line in lines if line.startswith("failed")]
    assert not [line for line in failed if "its first process ended" not in line and "could not be copied" not in line]
    assert len(failed) < 200
    # A host that was killed is outlived by its launcher for as long as that needs to end what it started.
    backend = LocalBackend("bubblewrap", directory=state)
    await backend.probe()
    ends = time.monotonic() + 60
    while (leftovers := processes(mark, f"{state}/turnwise-")) and time.monotonic() < ends:
        await asyncio.sleep(0.1)
        leftovers = [line for line in leftovers if f"-{os.getpid()}-" not in line and "boot.launcher" not in line]
        if not leftovers:
            break
    await backend.reap()
    await backend.close()
    assert not processes(mark)
    assert not list(state.iterdir())
    assert str(folder) not in Path("/proc/self/mountinfo").read_text()
    assert not [group for group in seen_groups if group.exists()]
