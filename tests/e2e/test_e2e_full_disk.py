"""A disk that fills up under a run: one error, and a run that resumes when there is room."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.trainer.lookup_run import DEADLINE_S, Turnwise, silent, train_config
from turnwise.config import dump_config
from turnwise.rollout.journal.state import read_journal
from turnwise.trainer.run.audit import audit_run

MB = 2**20
ROOM = 100 * 1024


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 32 MB, where one may be mounted."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = shutil.which("mount")
    command = [mount or "mount", "-t", "tmpfs", "-o", f"size={32 * MB}", "turnwise-test", str(disk)]
    if mount is None or os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.long
def test_full_disk_is_one_error_and_the_run_resumes(lookup_model: Path, tmp_path: Path, disk: Path) -> None:
    config = train_config(lookup_model, disk, steps=8, checkpoint={"every": 100})
    file = tmp_path / "run.yaml"
    file.write_text(dump_config(config))
    filler = disk / "filler"
    filler.write_bytes(bytes(shutil.disk_usage(disk).free - ROOM))

    with Turnwise(tmp_path / "full.log", "train", file) as process:
        assert process.wait(DEADLINE_S) == 1, process.output()
    output = process.output()
    assert "Traceback" not in output, output
    assert output.count("cannot be written: No space left on device: make room on its file system") == 1, output
    assert output.count("Error: ") == 1, output

    filler.unlink()
    with Turnwise(tmp_path / "again.log", "train", file) as process:
        assert process.wait(DEADLINE_S) == 0, process.output()
    events = [event["event"] for _, event in read_journal(disk / "run" / "journal.jsonl").events]
    assert events.count("start") == 2
    assert events[-1] == "end"
    assert audit_run(disk / "run", at_most=8, console=silent()).contradictions == []
