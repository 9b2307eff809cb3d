"""The trained policies of a run: each has its own model, learner, algorithm, servers and weights."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from turnwise.chat.renderer import save_format
from turnwise.errors import InferenceError
from turnwise.inference.replica_set import ReplicaSet
from turnwise.model.core import Renderer, ServedPolicy
from turnwise.recorder.ledger import LedgerClient, LedgerWriter
from turnwise.trainer.config.train import TrainConfig
from turnwise.trainer.learn.distill import Teacher
from turnwise.trainer.learn.learner import Learner, open_learner
from turnwise.trainer.model.critic import Critic
from turnwise.trainer.model.reference import KLGuard
from turnwise.trainer.run.checkpoint import policy_folder
from turnwise.trainer.weight_sync import WeightWriter, open_transport

CRITIC = "critic"
"""Where a checkpoint of a policy holds its critic."""


@dataclass(slots=True)
class LoadedPolicy:
    """A trained policy before its servers are started.

    Attributes:
        name: Its key in ``policies``.
        config: The run's configuration with this policy alone (``TrainConfig.of_policy``).
        renderer: The renderer of messages.
        learner: Its model and optimizer.
        kl: The KL penalty, if any.
        critic: The critic, if the estimator reads one.
    """

    name: str
    config: TrainConfig
    renderer: Renderer
    learner: Learner
    kl: KLGuard | None
    critic: Critic | None

    @classmethod
    def load(
        cls, name: str, config: TrainConfig, renderer: Renderer, checkpoint: Path | None, kl_coef: float | None
    ) -> Self:
        """Load the start model, or the state of a checkpoint.

        Args:
            name: Its key in ``policies``.
            config: The run's configuration.
            renderer: Its renderer.
            checkpoint: The run's checkpoint to resume from, or None.
            kl_coef: Weight of the KL penalty in that checkpoint, if any.

        Raises:
            CheckpointError: The checkpoint cannot be read.
            ConfigError: A part of it has another tokenizer.
            TrainError: A model cannot be loaded or trained.
        """
        alone = config.of_policy(name)
        folder = checkpoint and policy_folder(checkpoint, name, config.policies)
        learner = open_learner(alone.policy, alone.optimizer_steps, model_path=folder)
        guard = KLGuard.open(alone, learner, kl_coef)
        critic = Critic.create(alone.policy, learner, alone.critic_steps, directory=folder and folder / CRITIC)
        if folder is not None:
            learner.load(folder)
        return cls(name, alone, renderer, learner, guard, critic)


@dataclass(slots=True)
class TrainedPolicy(LoadedPolicy):
    """A trained policy with its servers.

    Attributes:
        fleet: Its inference servers.
        client: Their client, which records every request in the run's ledger.
        writer: Sends weights to them.
        teacher: The teacher of distillation, if any.
    """

    fleet: ReplicaSet
    client: LedgerClient
    writer: WeightWriter
    teacher: Teacher | None = None

    @classmethod
    async def serve(
        cls, loaded: LoadedPolicy, logs: Path, book: LedgerWriter, stack: contextlib.AsyncExitStack
    ) -> Self:
        """Start the servers of a loaded policy; ``stack`` closes them.

        Raises:
            ConfigError: The engine cannot be used as configured.
            InferenceError: A server fails.
            TrainError: There is no room for weights.
        """
        writer = stack.enter_context(contextlib.closing(open_transport(loaded.config.policy.weight_transport)))
        fleet = ReplicaSet(loaded.config.inference, Path(loaded.config.policy.model.path), logs=logs)
        stack.push_async_callback(fleet.close)
        await fleet.launch(updates=True)
        client = LedgerClient(fleet.client, book)
        stack.push_async_callback(client.close)
        parts = (loaded.name, loaded.config, loaded.renderer, loaded.learner, loaded.kl, loaded.critic)
        return cls(*parts, fleet, client, writer)

    @property
    def launched_elsewhere(self) -> bool:
        """Whether the servers were launched with other weights than the learner begins with, or with unknown ones."""
        return self.config.policy.model.continues_adapter or bool(self.config.inference.urls)

    async def served(self) -> ServedPolicy:
        """Return what episodes sample from. Raises InferenceError if no server responds."""
        info = await self.fleet.with_recovery(self.client.model_info)
        return ServedPolicy(self.client, self.renderer, info)

    async def pause(self) -> None:
        """Pause the servers until the next weight sync; a restarted server is not paused.

        Raises:
            InferenceError: A server died more often than ``inference.max_restarts``.
        """
        try:
            await self.fleet.pause()
        except InferenceError as error:
            await self.fleet.recover(error)

    async def sync_weights(self, version: int, *, still: bool = False) -> int:
        """Send the learner's weights to the servers as a version; return the bytes written.

        A server that dies meanwhile is restarted and then updated. Unchanged weights are only renumbered.
        ``still`` makes servers abort running requests and pause meanwhile.

        Raises:
            InferenceError: A server rejects them, or died too often.
        """
        before = self.writer.written_bytes
        await self.fleet.with_recovery(lambda: self._write_weights(version, still))
        return self.writer.written_bytes - before

    async def _write_weights(self, version: int, still: bool) -> None:
        learner, fleet = self.learner, self.fleet
        if still:
            await fleet.pause()
        await self.writer.sync(learner.export_weights(), fleet.replicas, version, adapter=learner.adapter)
        if still:
            await fleet.resume()

    def save(self, directory: Path) -> None:
        """Write the state of learner and critic, and the renderer's format, to its folder of a checkpoint."""
        directory.mkdir(parents=True, exist_ok=True)
        self.learner.save(directory, extra=lambda model: save_format(self.renderer, model))
        if self.critic is not None:
            self.critic.save(directory / CRITIC)


async def serve_policies(
    loaded: Mapping[str, LoadedPolicy], logs: Path, book: LedgerWriter, stack: contextlib.AsyncExitStack
) -> dict[str, TrainedPolicy]:
    """Start the servers of all trained policies concurrently; logs of several are in one folder each.

    Raises as :meth:`TrainedPolicy.serve`.
    """
    several = len(loaded) > 1
    try:
        async with asyncio.TaskGroup() as starting:
            tasks = {
                name: starting.create_task(TrainedPolicy.serve(policy, logs / name if several else logs, book, stack))
                for name, policy in loaded.items()
            }
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from errors
    return {name: task.result() for name, task in tasks.items()}
