"""Containers, a hundred at a time, with containers and hosts killed at random: nothing is left of them."""

from __future__ import annotations

import asyncio
import tempfile
import time
import uuid
from pathlib import Path

import pytest

from support.sandboxes.docker_engine import engine
from support.sandboxes.soak import processes, soak

pytestmark = [pytest.mark.real, pytest.mark.alike("soaks"), pytest.mark.timeout(900)]
COUNT = 200
"""A container takes this machine about a tenth of a second of all its cores, so these are fewer than local ones."""


async def test_many_containers_leave_no_resources() -> None:
    mark = str(uuid.uuid4().int)[:12]
    with (
        engine() as running,
        tempfile.TemporaryDirectory(prefix="soak-", dir="/var/tmp", ignore_cleanup_errors=True) as temporary,
    ):
        folder = Path(temporary)
        (folder / "workspace").mkdir()
        (folder / "workspace/file").write_text("seen")
        lines = await soak(folder, mark, COUNT, 100, engine=running.url, seconds=700)
        failed = [line for line in lines if line.startswith("failed")]
        assert len(failed) < COUNT // 4, failed[:20]
        # The reaper of a killed host may still be at work.
        client = running.client()
        filters = {"label": ["turnwise.owner"]}
        ends = time.monotonic() + 120
        while (leftovers := client.containers(all=True, filters=filters)) or (leftovers := processes(mark)):
            assert time.monotonic() < ends, leftovers
            await asyncio.sleep(0.2)
        assert client.images(filters=filters) == []
        client.close()
        # No file system of a container is mounted any more, and no folder of a host's is there.
        assert f"{running.folder}/data/overlay2" not in Path("/proc/self/mountinfo").read_text()
        assert list((folder / "tmp").iterdir()) == []
