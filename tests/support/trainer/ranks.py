"""Rank processes of the engine fsdp, forked from the warm process."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from support.processes.warm import WarmPopen
from turnwise.trainer.algorithms.losses import LossSums, ppo_clip_loss
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


DEATHS: Final = ("forward_backward", "optim_step", "send", "save_state")
"""The calls in which the second rank of a run dies, one in each life of the run."""


class _RankDeath:
    """Kills this rank in the call of :data:`DEATHS` whose turn it is, once it has made some updates.

    They are one more than a checkpoint has, so that what they learned is lost with the rank.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        deaths = file.read_text().split() if file.exists() else []
        self.call = DEATHS[len(deaths)] if len(deaths) < len(DEATHS) else None
        self._left = 1 if deaths else 3
        self._gathers = 0
        self.armed = False
        register_optimizer_step_post_hook(self._updated)

    def _updated(self, *_: object) -> None:
        self._left -= 1
        if self._left or self.call is None:
            return
        self.armed = True
        if self.call == "optim_step":
            register_optimizer_step_pre_hook(self.end)
        elif self.call == "send":
            gather = DTensor.full_tensor

            def third(tensor: DTensor) -> Tensor:
                self._gathers += 1
                if self._gathers == 3:
                    self.end()
                return gather(tensor)

            DTensor.full_tensor = third
        elif self.call == "save_state":
            state_dict_saver.save = self.end

    def end(self, *_: object, **__: object) -> None:
        """Die, and leave a note of it."""
        with self._file.open("a") as file:
            file.write(f"{self.call}\n")
        os.kill(os.getpid(), signal.SIGKILL)


_deaths: list[_RankDeath] = []


def fatal(logprobs, old_logprobs, advantages, weights, *, deaths: str) -> LossSums:
    """A loss whose second rank dies, in each life of a run in another call; the file ``deaths`` has those that were."""
    if dist.get_rank() == 1:
        if not _deaths:
            _deaths.append(_RankDeath(Path(deaths)))
        if _deaths[0].armed and _deaths[0].call == "forward_backward":
            _deaths[0].end()
    return ppo_clip_loss(logprobs, old_logprobs, advantages, weights)
