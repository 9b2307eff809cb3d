"""The trained policies of a run: each has its own model, learner, algorithm, servers and weights."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Self

from turnwise.chat.model_dir import model_settings
from turnwise.chat.renderer import save_format
from turnwise.engine.lora import model_under
from turnwise.engine.numerics.self_check import capability
from turnwise.engine.weights import WeightStream, tensor_entries
from turnwise.errors import ConfigError, EngineDied, InferenceError, RequestRefused
from turnwise.inference.engines import find_engine
from turnwise.inference.replica_set import ReplicaSet
from turnwise.model.core import AdapterInfo, LLMClient, Renderer, Replica, ServedPolicy, WeightManifest
from turnwise.recorder.ledger import LedgerClient, LedgerWriter
from turnwise.trainer.config.train import TrainConfig
from turnwise.trainer.learn.critic import Critic
from turnwise.trainer.learn.distill import Teacher
from turnwise.trainer.learn.learner import Learner, open_learner, send_weights
from turnwise.trainer.learn.reference import KLGuard
from turnwise.trainer.run.checkpoint import policy_folder
from turnwise.trainer.train_thread import TrainThread
from turnwise.trainer.weight_sync import WeightTransport, open_transport, serves_by_name, weight_dtype
from turnwise.types import RouteShape, SamplingParams, TokenPrompt, as_ids

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
        transport: Sends weights to them.
        named: Whether the servers hold its adapter by its name, beside the model's weights or other adapters.
        teacher: The teacher of distillation, if any.
        published: The version that the servers were sent last, and the learner's steps of then.
        publishing: Held while weights are sent.
    """

    fleet: ReplicaSet
    client: LedgerClient
    transport: WeightTransport
    named: bool = False
    teacher: Teacher | None = None
    published: tuple[int, int] = (0, 0)
    publishing: asyncio.Lock = field(default_factory=asyncio.Lock)

    @classmethod
    async def serve(
        cls, loaded: Sequence[LoadedPolicy], logs: Path, book: LedgerWriter, stack: contextlib.AsyncExitStack
    ) -> list[Self]:
        """Start the servers of a loaded policy, or of several whose adapters share them; ``stack`` closes them.

        Raises:
            ConfigError: The engine cannot be used as configured.
            InferenceError: A server fails.
            TrainError: There is no room for weights.
        """
        config = loaded[0].config
        merged = [policy.name for policy in loaded if policy.learner.adapter is None]
        if len(loaded) > 1 and merged:
            raise ConfigError(
                f"policies.{merged[0]}.model.lora.targets names experts, whose adapters are merged before servers get "
                f"them, but {' and '.join(policy.name for policy in loaded)} share servers (served_by): name other "
                "targets, or remove served_by"
            )
        named = len(loaded) > 1 or (serves_by_name(config) and not merged)
        transports = [
            stack.enter_context(contextlib.closing(open_transport(policy.config.policy.weight_transport)))
            for policy in loaded
        ]
        infos = ((policy.name, policy.learner.adapter) for policy in loaded if named)
        ranks = {name: adapter.rank for name, adapter in infos if adapter is not None}
        model, sleeps = Path(config.policy.model.path), config.layout == "colocated"
        fleet = ReplicaSet(config.inference, model, logs=logs, adapters=ranks, sleeps=sleeps)
        stack.push_async_callback(fleet.close)
        announced = [_announced(policy, policy.name if named else None) for policy in loaded]
        await fleet.launch(updates=[manifest for manifest in announced if manifest is not None])
        served = []
        for policy, transport in zip(loaded, transports, strict=True):
            transport.check(policy.config, fleet.replicas)
            client = LedgerClient(fleet.client_of(policy.name if named else None), book)
            stack.push_async_callback(client.close)
            if config.inference.routed_experts:
                model = model_under(policy.config.policy.model.path)
                await check_routes(fleet.client_of(policy.name if named else None), model)
            if config.inference.exact:
                await check_capability(fleet.replicas)
            rollout = config.rollout
            truncation = SamplingParams(top_p=rollout.top_p, top_k=rollout.top_k, min_p=rollout.min_p)
            if rollout.sampling_mask == "keep" and rollout.temperature and truncation.truncates:
                # Its answer is refused where it has no mask.
                probe = replace(truncation, max_tokens=1, sampling_mask=True)
                client_of_policy = fleet.client_of(policy.name if named else None)
                await client_of_policy.generate(TokenPrompt(as_ids([1, 2])), probe, session_id="masks")
            parts = (policy.name, policy.config, policy.renderer, policy.learner, policy.kl, policy.critic)
            served.append(cls(*parts, fleet, client, transport, named))
        return served

    @property
    def launched_elsewhere(self) -> bool:
        """Whether the servers were launched with other weights than the learner begins with, or with unknown ones.

        Servers of adapters by name count as such: an adapter that they cannot hold is refused before the first episode.
        """
        return self.config.policy.model.continues_adapter or bool(self.config.inference.urls) or self.named

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

    async def publish_weights(self, version: int) -> None:
        """Send the learner's weights as a version to the servers that run. Raises InferenceError.

        One that is being restarted is sent them when it is back (:meth:`republish`).
        """
        async with self.publishing:
            running = self.fleet.running
            for replica in set(self.fleet.replicas).difference(running):
                replica.outdated = True
            await self._send_weights(version, running)
            self.published = version, self.learner.steps

    async def _send_weights(self, version: int, replicas: Sequence[Replica]) -> None:
        adapter = _served_adapter(self.learner, self.name if self.named else None)
        send = partial(send_weights, self.learner, dtype=weight_dtype(self.config))
        await self.transport.publish(send, replicas, version, adapter=adapter)

    async def republish(self, replica: Replica, train_thread: TrainThread) -> None:
        """Send the last version to a server that has lost it, unless the learner has changed: then another one comes.

        Raises:
            EngineDied: All servers have lost it in the middle of a step of several parts.
            InferenceError: It does not load them.
        """
        loop = asyncio.get_running_loop()

        async def send_again() -> None:
            async with self.publishing:
                version, steps = self.published
                if replica.outdated and self.learner.steps == steps:
                    await self._send_weights(version, [replica])

        # In this thread the learner is trained: it waits until all is sent.
        await train_thread(lambda: asyncio.run_coroutine_threadsafe(send_again(), loop).result())
        if self.config.overlap.stream > 1 and all(server.outdated for server in self.fleet.replicas):
            raise EngineDied(
                "all servers were restarted in the middle of a step of several parts (overlap.stream), of whose "
                "weights there is no version: the same command resumes from the last checkpoint"
            )

    def save(self, directory: Path) -> None:
        """Write the state of learner and critic, and the renderer's format, to its folder of a checkpoint."""
        directory.mkdir(parents=True, exist_ok=True)
        self.learner.save(directory)
        save_format(self.renderer, directory)
        if self.critic is not None:
            self.critic.learner.save(directory / CRITIC)


async def check_routes(client: LLMClient, model: Path) -> None:
    """Check by one token that servers report the experts of the model that is trained.

    Raises:
        ConfigError: They report those of another model.
        InferenceError: They report none.
    """
    shape = RouteShape.of(model_settings(model, "model.path"))
    completion = await client.generate(
        TokenPrompt(as_ids([1, 2])), SamplingParams(max_tokens=1, routes_from=0), session_id="routes"
    )
    routes = completion.routed_experts
    assert shape is not None, "engines are checked for models without experts"
    assert routes is not None, "clients of engines that report experts have them"
    if problem := shape.mismatch(routes):
        raise ConfigError(
            f"inference.routed_experts is true, but servers report {problem} as in model.path ({model}): serve that "
            "model (inference.url), or set routed_experts to false"
        )


async def check_capability(replicas: Sequence[Replica]) -> None:
    """Check that servers with exact numerics compute by the same kernels as this process.

    Raises:
        ConfigError: One computes by others.
        InferenceError: One does not respond.
    """
    for replica in replicas:
        reported = (await replica.stats()).get("numerics")
        if reported != capability():
            raise ConfigError(
                f"inference.engine is exact, but the server at {replica.url} computes by "
                f"{reported or 'fast operations'}, and the trainer by {capability()}: start it with engine exact on a "
                "processor with the same instructions and with the same torch, or set inference.engine to builtin"
            )


def _served_adapter(learner: Learner, name: str | None) -> AdapterInfo | None:
    adapter = learner.adapter
    return adapter if adapter is None or name is None else replace(adapter, name=name)


def _announced(policy: LoadedPolicy, name: str | None) -> WeightManifest | None:
    """Return what updates will bring, without a file; None where the learner's engine does not know it before."""
    stream = policy.learner.export_weights(weight_dtype(policy.config))
    if not isinstance(stream, WeightStream):
        return None
    return WeightManifest(0, "", tensor_entries(stream.described), _served_adapter(policy.learner, name))


async def serve_policies(
    config: TrainConfig,
    loaded: Mapping[str, LoadedPolicy],
    logs: Path,
    book: LedgerWriter,
    stack: contextlib.AsyncExitStack,
) -> dict[str, TrainedPolicy]:
    """Start the servers of all trained policies concurrently; logs of several policies are in a folder for each set.

    Raises as :meth:`TrainedPolicy.serve`.
    """
    several = len(loaded) > 1
    try:
        async with asyncio.TaskGroup() as starting:
            tasks = [
                starting.create_task(
                    TrainedPolicy.serve([loaded[name] for name in names], logs / host if several else logs, book, stack)
                )
                for host, names in config.served.items()
            ]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from errors
    policies = {policy.name: policy for task in tasks for policy in task.result()}
    return {name: policies[name] for name in loaded}


def serving_together(policies: Mapping[str, TrainedPolicy]) -> list[list[TrainedPolicy]]:
    """Return the policies by the servers that sample for them."""
    policies_by_fleet: dict[int, list[TrainedPolicy]] = {}
    for policy in policies.values():
        policies_by_fleet.setdefault(id(policy.fleet), []).append(policy)
    return list(policies_by_fleet.values())


async def sync_weights(
    policies: Sequence[TrainedPolicy],
    version: int,
    *,
    pause: bool = False,
    transfer: Callable[[], AbstractAsyncContextManager[None]] = contextlib.nullcontext,
) -> dict[str, float]:
    """Send the weights of policies of the same servers to them as a version; return metrics of it.

    A server that dies meanwhile is restarted and then updated: the others wait for it only where policies share them,
    or where they sleep. Unchanged weights are only renumbered. ``pause`` makes
    servers abort running requests and pause meanwhile. ``transfer`` is entered while the weights are sent.

    Raises:
        InferenceError: A server rejects them, or died too often.
    """
    fleet = policies[0].fleet

    async def write() -> None:
        if pause:
            await fleet.pause()
        async with transfer():
            for policy in policies:
                try:
                    await policy.publish_weights(version)
                except RequestRefused as error:
                    raise _refused_weights(policy, error) from error
        if pause:
            await fleet.resume()

    began, sent_before = time.monotonic(), sum(policy.transport.sent_bytes for policy in policies)
    paused_before = [replica.paused_s for replica in fleet.replicas]
    partly = len(policies) == 1 and policies[0].config.layout != "colocated"
    await fleet.with_recovery(write, partly=partly)
    seconds = time.monotonic() - began
    paused = [replica.paused_s - before for replica, before in zip(fleet.replicas, paused_before, strict=True)]
    sent = sum(policy.transport.sent_bytes for policy in policies) - sent_before
    return {"sync/bytes": sent, "time/weights_s": seconds, "servers/paused_s": seconds if pause else max(paused)}


def _refused_weights(policy: TrainedPolicy, error: RequestRefused) -> RequestRefused:
    """Return the error of servers that refuse a policy's weights, naming what chose either."""
    model, inference, adapter = policy.config.policy.model, policy.config.inference, policy.learner.adapter
    if inference.urls:
        return RequestRefused(
            f"inference.url is {', '.join(inference.urls)}, but what is served there does not fit model.path "
            f"({model.path}): {error}: serve that model, or name its servers"
        )
    if adapter is not None:
        return RequestRefused(
            f"policies.{policy.name}.model.lora: the servers (inference.engine: {inference.engine}) refuse an adapter "
            f"of rank {adapter.rank} on {', '.join(adapter.targets[:3])}, ...: {error}: choose other targets, a lower "
            "rank or another engine"
        )
    return error


def check_layout(config: TrainConfig, host: str) -> None:
    """Check that the servers of a policy can sleep where the layout has them do so. Raises ConfigError."""
    engine = config.of_policy(host).inference.engine
    if config.layout == "colocated" and not find_engine(engine).can_sleep:
        raise ConfigError(
            f"layout is colocated, whose servers give their memory back while the trainer learns, but "
            f"inference.engine is {engine}, which cannot: set it to builtin or vllm, or layout to separate"
        )


def check_shared_servers(config: TrainConfig, host: str, names: Sequence[str]) -> None:
    """Check that the engine of a policy's servers can serve the adapters of all its policies.

    Raises:
        ConfigError: It serves one policy only, or the servers are not launched here.
    """
    if len(names) == 1:
        return
    serving, key = config.of_policy(host), f"policies.{names[1]}.served_by is {host!r}"
    engine = serving.inference.engine
    if not find_engine(engine).serves_adapters:
        raise ConfigError(
            f"{key}, whose servers' inference.engine is {engine}, which serves one policy: set it to builtin or "
            "vllm, or remove served_by"
        )
    if serving.inference.urls:
        raise ConfigError(
            f"{key}, whose inference.url is {serving.inference.url}: servers of several policies are launched by the "
            "run; remove url, or served_by"
        )
    if engine == "vllm" and config.placement == "ray":
        raise ConfigError(
            f"{key}, whose servers are vLLM's, which name each version anew, and by placement ray workers sample by "
            "one name: set inference.engine to builtin, or placement to local, or remove served_by"
        )
    if engine == "vllm" and "vision_config" in model_settings(model_under(serving.policy.model.path), "model.path"):
        raise ConfigError(
            f"{key}, whose servers are vLLM's with a vision-language model, whose adapters vLLM may apply in part: set "
            "inference.engine to builtin, or remove served_by"
        )
