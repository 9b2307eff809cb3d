"""Trainer and servers that use the same devices in turn: who holds memory in which phase of a step.

By ``layout: colocated`` nothing is held twice. A step is in this order: servers sleep; weights, gradients and optimizer
states of the trainer come to the device; it trains; optimizer states go to main memory; servers wake for weights and
get the new ones; the trainer's weights go too; servers wake for keys and values, and sample.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from functools import partial

from turnwise.engine.accelerator import used_bytes
from turnwise.placement.usage import process_memory
from turnwise.trainer.config.train import TrainConfig
from turnwise.trainer.learn.learner import Learner
from turnwise.trainer.run.policies import LoadedPolicy, TrainedPolicy, serving_together
from turnwise.trainer.train_thread import TrainThread

_MB = 1e6


def learners_of(policies: Mapping[str, LoadedPolicy]) -> Iterator[Learner]:
    """Yield the learners of policies and their critics."""
    for policy in policies.values():
        yield policy.learner
        if policy.critic is not None:
            yield policy.critic.learner


class DevicePhases:
    """The phases of a run's steps; by ``layout: separate`` there are none, and nothing is moved.

    Attributes:
        asleep: Whether the servers sleep, until :meth:`transfer` of all weights.
        figures: Memory at the borders of the last phases, as metrics.
    """

    def __init__(self, config: TrainConfig, policies: Mapping[str, TrainedPolicy], thread: TrainThread) -> None:
        self.asleep = False
        self.figures: dict[str, float] = {}
        self._policies = policies
        self._thread = thread
        self._colocated = config.layout == "colocated"

    async def begin_training(self) -> None:
        """Put the servers to sleep, which keep requests waiting, and bring the learners to their devices. Idempotent.

        Raises:
            InferenceError: A server died more often than ``inference.max_restarts``.
        """
        if not self._colocated:
            return
        awake = not self.asleep
        if awake:
            await self._measure("rollout_end")
            self.asleep = True
            for together in serving_together(self._policies):
                await together[0].fleet.with_recovery(partial(_sleep, together))
        # Also where a transfer failed after it had sent them away.
        await self._thread(lambda: [learner.onload() for learner in learners_of(self._policies)])
        if awake:
            await self._measure("train_begin")

    @contextlib.asynccontextmanager
    async def transfer(self, policies: Sequence[TrainedPolicy]) -> AsyncIterator[None]:
        """Wrap an update of the weights of policies with the same servers, which sample after it."""
        if not self._colocated:
            yield
            return
        if self.asleep:
            await self._measure("train_end")
        fleet, learners = policies[0].fleet, list(learners_of({policy.name: policy for policy in policies}))
        await self._thread(lambda: [learner.offload(keep_weights=True) for learner in learners])
        if self.asleep:
            await fleet.wake("weights")
        yield
        await self._thread(lambda: [learner.offload() for learner in learners])
        if self.asleep:
            await fleet.wake("kv_cache")

    async def end_training(self) -> None:
        """Note that all servers sample again, after the last :meth:`transfer`."""
        if self.asleep:
            self.asleep = False
            await self._measure("rollout_begin")

    async def _measure(self, moment: str) -> None:
        servers = [use for first, *_ in serving_together(self._policies) for use in await first.fleet.memory()]
        sizes = {
            "trainer": process_memory().resident,
            "servers": sum(use.resident for use in servers if use is not None),
            "device": used_bytes(),
        }
        self.figures |= {f"memory/{moment}/{part}_mb": size / _MB for part, size in sizes.items() if size}


async def _sleep(policies: Sequence[TrainedPolicy]) -> None:
    """Put the servers of policies to sleep; what they loaded is dropped with its files, except under adapters."""
    keep_weights = any(policy.learner.adapter is not None for policy in policies)
    await policies[0].fleet.sleep(keep_weights=keep_weights)
    if not keep_weights:
        for policy in policies:
            policy.transport.forget()
