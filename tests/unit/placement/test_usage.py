"""Memory of processes: the figures of ``/proc``, and what a fork inherits."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys

import psutil
import pytest

from turnwise.model.core import MemoryUse
from turnwise.placement.usage import process_memory
from turnwise.trainer.observe.metrics import memory_metrics

MB = 2**20

CHILD = """
import sys, subprocess
held = bytearray(64 * 2**20)
del held
child = subprocess.Popen([sys.executable, "-c", "held = bytearray(32 * 2**20); print(1, flush=True); input()"],
                         stdin=subprocess.PIPE)
sys.stdin.readline()
child.communicate(b"\\n")
"""


def test_this_process() -> None:
    use = process_memory()
    assert abs(use.resident - psutil.Process().memory_info().rss) < 16 * MB
    assert use.peak >= use.resident
    # From the system: a block of the heap may be one that an earlier test freed, and is resident already.
    with mmap.mmap(-1, 64 * MB) as mapping:
        mapping.write(bytes(64 * MB))
        assert process_memory().resident >= use.resident + 48 * MB
        assert process_memory().peak >= use.resident + 48 * MB


@pytest.mark.skipif(sys.platform != "linux", reason="only /proc knows other processes")
def test_a_process_with_its_descendants() -> None:
    with subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"1\n"
        use = process_memory(process.pid, device_peak=7)
        alone = psutil.Process(process.pid).memory_info().rss
        assert use.peak >= 96 * MB
        # What the parent freed is in the peak only; what the child holds, in both.
        assert alone + 32 * MB <= use.resident <= use.peak - 48 * MB
        assert use.device_peak == 7
        process.communicate(b"\n")
    assert process_memory(process.pid) == MemoryUse(0, 0)
    assert os.getpid() != process.pid


def test_metrics_hold_known_memory_only() -> None:
    assert memory_metrics(MemoryUse(1 * 10**9, 2 * 10**9, 10**9), [MemoryUse(10**9, 3 * 10**9), None]) == {
        "memory/peak": 5.0,
        "memory/trainer": 1.0,
        "memory/trainer_peak": 2.0,
        "memory/trainer_device_peak": 1.0,
        "memory/server/0": 1.0,
        "memory/server_peak/0": 3.0,
    }
