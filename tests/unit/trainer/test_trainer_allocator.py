"""Freed memory is kept for the next tensors, unless somebody has decided otherwise."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

import pytest

from support.processes.warm import run_command

# How many pages are cleared when a block of 48 MiB is made and freed for the third time.
FAULTS = """
import os, resource, sys
from turnwise.trainer.learn.torch_learner import keep_freed_memory
os.environ.update(word.split("=") for word in sys.argv[1:])
done = keep_freed_memory()
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    bytearray(48 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(done, [faults() for _ in range(3)][-1])
"""


def glibc() -> bool:
    try:
        return bool(ctypes.CDLL(None).mallopt)
    except (AttributeError, OSError, TypeError):
        return False


def output(script: str, *arguments: str) -> list[str]:
    """Return the words that a script prints in a process for which nobody has decided anything."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", script, *arguments]
    return run_command(command, env=environment, capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.skipif(not glibc(), reason="there is no glibc here")
@pytest.mark.parametrize(("decided", "keeps_pages"), [((), True), (("MALLOC_TRIM_THRESHOLD_=131072",), False)])
def test_pages_are_cleared_once(decided: tuple[str, ...], keeps_pages: bool) -> None:
    changed, faults = output(FAULTS, *decided)
    assert changed == str(keeps_pages)
    # Of the block's 12,288 pages.
    assert int(faults) < 100 if keeps_pages else int(faults) > 10_000


RETURNED = """
import torch
from pathlib import Path
from turnwise.placement.usage import return_freed_memory
from turnwise.trainer.learn.torch_learner import keep_freed_memory
def resident():
    return int(Path("/proc/self/status").read_text().partition("VmRSS:")[2].split()[0]) // 1024
keep_freed_memory()
before = resident()
blocks = [torch.ones(10_000_000) for _ in range(10)]
pinned = torch.ones(1000)
del blocks
held = resident() - before
refused = return_freed_memory(above=1 << 30)
kept = resident() - before
returned = return_freed_memory(above=1 << 28)
print(held, kept, resident() - before, int(refused), int(returned))
"""


@pytest.mark.skipif(not glibc() or not Path("/proc/self/status").is_file(), reason="there is no glibc or no /proc here")
def test_freed_memory_is_returned_between_two_trainings() -> None:
    peak, retained, trimmed, refused, returned = map(int, output(RETURNED))
    # Ten blocks of 38 MiB: less than the first limit, more than the second.
    assert peak > 350
    assert retained > 350
    assert trimmed < 100
    assert (refused, returned) == (0, 1)
