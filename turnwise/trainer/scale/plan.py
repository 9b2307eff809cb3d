"""The plan of a run on a cluster: the memory of each device by part, and what cannot fit."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Final, Self

from turnwise.engine.accelerator import accelerator, memory_bytes, on_cpu, resolve_device
from turnwise.engine.capacity import gigabytes
from turnwise.engine.lora import model_under
from turnwise.errors import ConfigError
from turnwise.inference.config import InferenceConfig
from turnwise.inference.engines import served_dtype
from turnwise.placement.devices import AUTO, CUDA
from turnwise.trainer.config.train import TrainConfig
from turnwise.trainer.model.policy import takes_images
from turnwise.trainer.scale.cluster import ClusterConfig, Placement
from turnwise.trainer.scale.memory import (
    BYTES,
    CHECKPOINTING,
    activation_bytes,
    adapter_parts,
    bucket_bytes,
    main_memory,
    sent_numbers,
    server_parts,
    tensor_parallel,
    trainer_parts,
)
from turnwise.trainer.scale.shape import ModelShape

_REMEDIES: Final = {
    "activations": "set {key}.model.gradient_checkpointing: true, add offload_activations to "
    "{key}.model.optimizations, lower batch.max_tokens_per_micro_batch",
    "gradients": "add release_gradients to {key}.model.optimizations (engine: torch)",
    "critic": "choose a smaller {key}.critic.path, or critic.kind: shared (engine: torch)",
    "optimizer states": "set {key}.optim.name: adamw_int8, raise {key}.engine_options.ranks (engine: fsdp), "
    "or train adapters (model.lora.rank: 16)",
    "bfloat16 weights": "set {key}.engine_options.mixed_precision: true (engine: fsdp)",
    "keys and values": "lower inference.kv_tokens",
    "served weights": "raise inference.server.tensor_parallel",
    "reference": "set algorithm.kl.offload: true",
}

_MICRO_BATCH_STEP: Final = 1024
_LARGEST_MICRO_BATCH: Final = 1 << 17
"""Larger ones make no product faster, and masks grow with their square."""

# The count of devices is that of a cluster: for this machine it is known by the devices that are named.
_ANY_COUNT: Final = 1 << 20

_SERVED: Final = frozenset(
    {"served weights", "keys and values", "a forward pass", "served adapter", "launch weights under the adapter"}
)
_TRANSFERRED: Final = frozenset({"weights", "adapters", "served weights", "weight bucket"})
_KEPT: Final = frozenset({"weights", "adapters", "optimizer states", "critic"})
"""What an engine that moves nothing leaves on its devices while servers sample."""


@dataclass(frozen=True, slots=True)
class PolicyPlan:
    """One trained policy and the devices of its trainer and its servers.

    Attributes:
        config: The configuration of this policy (``TrainConfig.of_policy``).
        path: The directory of its model, whose sizes are read and nothing else.
        shape: The shape of that model.
        critic: The shape of its critic, if that is another model.
        placement: Its devices.
    """

    config: TrainConfig
    path: Path
    shape: ModelShape
    critic: ModelShape | None
    placement: Placement

    @classmethod
    def load(cls, config: TrainConfig, key: str, placement: Placement) -> Self:
        """Read the shapes of policy and critic; ``key`` is the policy's section. Raises ConfigError."""
        path, critic = model_under(config.policy.model.path), config.policy.critic
        shape, critic_shape = ModelShape.load(path, f"{key}.model.path"), None
        if critic is not None and critic.path is not None:
            critic_shape = ModelShape.load(critic.path, f"{key}.critic.path")
        return cls(config, path, shape, critic_shape, placement)

    def parts(self) -> Iterator[tuple[int, str, float]]:
        """Yield the parts of its memory with the device of each; several may have one name."""
        trainer = list(trainer_parts(self.config, self.shape, self.critic))
        server = [
            *server_parts(self.config.inference, self.path, self.shape),
            ("weight bucket", bucket_bytes(self.config)),
        ]
        devices = [(device, trainer) for device in self.placement.trainer]
        devices += [(device, server) for group in self.placement.servers for device in group]
        yield from ((device, part, size) for device, parts in devices for part, size in parts)

    def problems(self) -> Iterator[str]:
        """Yield what is wrong with the number of devices of a server."""
        width = tensor_parallel(self.config.inference)
        if self.shape.kv_heads % width and width % self.shape.kv_heads:
            yield (
                f"inference.server.tensor_parallel is {width}, which the model's "
                f"{self.shape.kv_heads} heads of keys and values cannot be divided among: choose a divisor of them"
            )

    def lines(self) -> Iterator[str]:
        """Yield the model, what no device holds and an update of its servers, as text."""
        shape, dtype = self.shape, served_dtype(self.path, self.config.inference.dtype)
        yield (
            f"model: {shape.family}, {shape.parameters / 1e9:,.2f} B parameters; keys and values take "
            f"{shape.kv_elements(1) * BYTES[dtype]:,} bytes a token in {dtype}"
        )
        model, tokens = self.config.policy.model, self.config.batch.micro_batch
        sizes = (
            f"{str(choice).lower()} {gigabytes(activation_bytes(shape, model, tokens, choice))}"
            for choice in CHECKPOINTING
        )
        yield f"activations of {tokens:,} tokens by gradient_checkpointing: {', '.join(sizes)}"
        for part, size in main_memory(self.config, shape):
            yield f"main memory: {gigabytes(size)} for {part}"
        count, dtype = sent_numbers(self.config, shape)
        yield f"weight update: {count * BYTES[dtype] / 1e9:,.2f} GB in {dtype} to each server"


class Plan:
    """The plan of a run: its trained policies, which share the devices of a cluster.

    Servers that no device is named for follow one another where they share none with the trainer. Trainers begin at the
    first device each: policies are trained one after the other.

    Where the configuration has no ``batch.max_tokens_per_micro_batch``, it is what all devices have memory for.

    Attributes:
        policies: The plan of each policy.
        micro_batch: Tokens of a micro-batch.
    """

    def __init__(self, config: TrainConfig, cluster: ClusterConfig) -> None:
        """Read the shapes of the models; nothing else is loaded.

        Raises:
            ConfigError: A model's directory has no ``config.json``, or its memory cannot be counted.
        """
        self._config = config
        self._cluster = cluster
        self.policies: dict[str, PolicyPlan] = {}
        configs = {name: config.of_policy(name) for name in config.policies}
        first_free = 1 + max(device for policy in configs.values() for device in Placement.of(policy).trainer)
        for name, policy in configs.items():
            placement = Placement.of(policy, first_free=first_free)
            if config.policies[name].served_by is not None:
                placement = replace(placement, servers=())
            elif not placement.named:
                first_free = max(first_free, 1 + max(placement.serving))
            self.policies[name] = PolicyPlan.load(policy, f"policies.{name}", placement)
        self.micro_batch = config.batch.micro_batch
        if config.batch.max_tokens_per_micro_batch is None:
            self._choose_micro_batch()

    def _choose_micro_batch(self) -> None:
        sizes = range(_MICRO_BATCH_STEP, _LARGEST_MICRO_BATCH + 1, _MICRO_BATCH_STEP)
        fitting = bisect_left(sizes, True, key=lambda tokens: not self._fits(tokens))
        self._fits(sizes[max(0, fitting - 1)])

    def _fits(self, tokens: int) -> bool:
        """Set the tokens of a micro-batch; return whether all devices have memory for them."""
        self.micro_batch = tokens
        for name, policy in self.policies.items():
            config = with_micro_batch(policy.config, tokens)
            self.policies[name] = replace(policy, config=config)
        totals = (max(self.phases(parts).values()) for _, parts in self.memory())
        return max(totals) <= self._cluster.usable_bytes

    @property
    def devices(self) -> set[int]:
        """Devices in use."""
        return {device for policy in self.policies.values() for device in policy.placement.devices}

    def memory(self) -> list[tuple[str, dict[str, float]]]:
        """Return the bytes by part of each group of devices with the same parts, named by their numbers.

        Of several policies each part begins with the policy's name.
        """
        memory_by_device: defaultdict[int, dict[str, float]] = defaultdict(dict)
        for device, part, size in self._parts():
            if size:
                parts = memory_by_device[device]
                parts[part] = parts.get(part, 0.0) + size
        devices_by_parts: defaultdict[tuple[tuple[str, float], ...], list[int]] = defaultdict(list)
        for device, parts in sorted(memory_by_device.items()):
            devices_by_parts[tuple(parts.items())].append(device)
        return [(_ranges(devices), dict(parts)) for parts, devices in devices_by_parts.items()]

    def phases(self, parts: Mapping[str, float]) -> dict[str, float]:
        """Return what a device with these parts holds in each phase of a step; by ``layout: separate`` all the time.

        While servers get new weights, they and the trainer have them both.
        """
        if self._config.layout == "separate":
            return {"total": sum(parts.values())}
        phases = dict.fromkeys(("train", "transfer", "rollout"), 0.0)
        for part, size in parts.items():
            policy, _, name = part.rpartition(": ")
            moves = self.policies[policy or next(iter(self.policies))].config.policy.engine == "torch"
            stays = name in _KEPT and not moves
            phases["train"] += size * (name not in _SERVED and name != "weight bucket")
            phases["transfer"] += size * (name in _TRANSFERRED or stays)
            phases["rollout"] += size * (name in _SERVED or stays)
        return phases

    def _parts(self) -> Iterator[tuple[int, str, float]]:
        """Yield the parts of all policies with the device of each."""
        heads = {name: f"{name}: " if len(self.policies) > 1 else "" for name in self.policies}
        for name, policy in self.policies.items():
            yield from ((device, heads[name] + part, size) for device, part, size in policy.parts())
        for host, names in self._config.served.items():
            for name in names:
                policy = self.policies[name]
                parts = adapter_parts(policy.config, policy.path, policy.shape, shared=len(names) > 1)
                for (part, size), device in product(parts, self.policies[host].placement.serving):
                    yield device, heads[name] + part, size

    def problems(self) -> list[str]:
        """Return what keeps the run from fitting on the cluster, each with a remedy."""
        cluster, problems = self._cluster, list[str]()
        if (occupied := len(self.devices)) > cluster.count:
            names = f" of the policies {', '.join(self.policies)}" if len(self.policies) > 1 else ""
            ranks = sum(len(policy.placement.trainer) for policy in self.policies.values())
            servers = sum(len(policy.placement.servers) for policy in self.policies.values())
            problems.append(
                f"cluster.count is {cluster.count}, but {ranks} ranks and {servers} servers{names} occupy {occupied} "
                "devices: lower engine_options.ranks or inference.replicas, or plan for a larger cluster"
            )
        for policy in self.policies.values():
            problems += policy.problems()
        return problems + list(self.memory_problems())

    def memory_problems(self) -> Iterator[str]:
        """Yield what does not fit into the memory of devices, with remedies."""
        cluster = self._cluster
        for devices, parts in self.memory():
            if (total := max(self.phases(parts).values())) > cluster.usable_bytes:
                by_size = sorted(parts, key=lambda part: -parts[part])
                largest = ", ".join(f"{part} {gigabytes(parts[part])}" for part in by_size[:3])
                yield (
                    f"devices {devices} need {gigabytes(total)} of the {gigabytes(cluster.usable_bytes)} that are "
                    f"usable of a {cluster.device} (cluster.usable: {cluster.usable:g}); largest: {largest}: "
                    f"{', '.join(self._remedies(by_size))}"
                )

    def _remedies(self, parts: Sequence[str]) -> Iterator[str]:
        """Yield what to change for parts of a device with too little memory, for the largest first."""
        for part in parts:
            policy, _, name = part.rpartition(": ")
            if name in _REMEDIES:
                yield _REMEDIES[name].format(key=f"policies.{policy or next(iter(self.policies))}")
        if len(self.policies) > 1:
            yield "or give policies other devices"

    def lines(self) -> Iterator[str]:
        """Yield the plan as text."""
        cluster = self._cluster
        yield f"cluster: {cluster.count} x {cluster.device}, {cluster.gigabytes:g} GB ({cluster.usable:.0%} usable)"
        for name, policy in self.policies.items():
            if len(self.policies) > 1:
                host = self._config.policies[name].served_by
                yield ""
                yield f"policy {name}" + ("" if host is None else f", by the servers of {host}")
            yield from policy.lines()
        yield ""
        groups = self.memory()
        names = list(dict.fromkeys(part for _, parts in groups for part in parts))
        rows: dict[str, list[float]] = {name: [parts.get(name, 0.0) for _, parts in groups] for name in names}
        phases = [self.phases(parts) for _, parts in groups]
        rows |= {phase: [sizes[phase] for sizes in phases] for phase in phases[0]}
        rows["usable"] = [cluster.usable_bytes] * len(groups)
        width = max(24, *(len(name) + 2 for name in names))
        yield f"{'GB per device':<{width}}" + "".join(f"{devices:>14}" for devices, _ in groups)
        for name, sizes in rows.items():
            yield f"{name:<{width}}" + "".join(f"{size / 1e9:>14,.2f}" for size in sizes)
        yield "by formula; drivers, communication, CUDA graphs and lost blocks are not counted"


def with_micro_batch(config: TrainConfig, tokens: int) -> TrainConfig:
    """Return a configuration with so many tokens of a micro-batch."""
    batch = config.batch.model_copy(update={"max_tokens_per_micro_batch": tokens})
    return config.model_copy(update={"batch": batch})


def check_plan(config: TrainConfig, cluster: ClusterConfig) -> Plan:
    """Return the plan of a configuration that fits on a cluster.

    Raises:
        ConfigError: It does not fit: memory, or the number of devices.
    """
    plan = Plan(config, cluster)
    if problems := plan.problems():
        raise ConfigError("; ".join(problems))
    return plan


def fit_micro_batch(config: TrainConfig, gpu_bytes: int | None = None) -> tuple[TrainConfig, str | None]:
    """Return a configuration whose micro-batches fit into the memory of this machine's GPUs, by the plan.

    They have as many tokens as fit, or those that are configured, if these do. Nothing changes on a CPU, on a Ray
    cluster, and for models whose memory cannot be counted.

    Args:
        config: A run's configuration.
        gpu_bytes: Memory of a GPU; by default what torch reports of the first one.

    Returns:
        The configuration, and what to tell of it.

    Raises:
        ConfigError: No micro-batch fits.
    """
    devices = [resolve_device(policy.model.device) for policy in config.policies.values()]
    if gpu_bytes is None and accelerator() is not None and not any(map(on_cpu, devices)):
        gpu_bytes = memory_bytes(resolve_device(AUTO))
    if gpu_bytes is None or config.placement == "ray":
        return config, None
    if any(takes_images(policy.model.path) for policy in config.policies.values()):
        return config, None
    # A server that runs elsewhere is not counted, one without a named device is where the trainer is.
    named = config.model_copy(update={"inference": _on_first(config.inference)})
    named = named.model_copy(update={"batch": config.batch.model_copy(update={"max_tokens_per_micro_batch": None})})
    try:
        cluster = ClusterConfig(device="GPU of this machine", count=_ANY_COUNT, memory_gb=gpu_bytes / 1e9)
        plan = Plan(named, cluster)
    except ConfigError:
        return config, None
    if problems := list(plan.memory_problems()):
        raise ConfigError(
            f"no micro-batch fits, not even one of {plan.micro_batch:,} tokens: {'; '.join(problems)}; "
            "turnwise plan shows what takes the memory"
        )
    key, configured = "batch.max_tokens_per_micro_batch", config.batch.max_tokens_per_micro_batch
    if configured is not None and configured <= plan.micro_batch:
        return config, None
    line = f"micro-batches of up to {plan.micro_batch:,} tokens, which fit into the GPU by the plan"
    if configured is not None:
        line = f"{key} is {configured:,}, which does not fit into the GPU: {line}, instead"
    return with_micro_batch(config, plan.micro_batch), line


def _on_first(inference: InferenceConfig) -> InferenceConfig:
    if inference.device != AUTO or inference.urls or inference.server.gpus:
        return inference
    return inference.model_copy(update={"device": f"{CUDA}:0"})


def _ranges(numbers: Sequence[int]) -> str:
    """Write sorted numbers as ranges, such as ``0-3, 6``."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][-1] + 1:
            spans[-1] = [spans[-1][0], number]
        else:
            spans.append([number])
    return ", ".join("-".join(map(str, span)) for span in spans)
