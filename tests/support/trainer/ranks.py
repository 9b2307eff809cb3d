"""Rank processes of the engine fsdp, forked from the warm process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from support.processes.warm import WarmPopen
from turnwise.trainer.learn.rank_processes import RankProcesses


class WarmRanks(RankProcesses):
    """Ranks that start without importing torch."""

    launcher = WarmPopen


@contextmanager
def pair_of_ranks(ranks: int = 2) -> Iterator[WarmRanks]:
    """Yield running ranks on the CPU, with one thread each."""
    processes = WarmRanks(ranks, "cpu", 1)
    try:
        yield processes
    finally:
        processes.close()
