"""The plan of a run on a cluster: the memory of each device by part, and what cannot fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from turnwise.engine.capacity import gigabytes
from turnwise.engine.lora import model_under
from turnwise.errors import ConfigError
from turnwise.inference.engines import served_dtype
from turnwise.trainer.config.train import TrainConfig
from turnwise.trainer.scale.cluster import ClusterConfig, Placement
from turnwise.trainer.scale.memory import (
    CHECKPOINTING,
    Memory,
    ModelSharding,
    activation_bytes,
    adapter_memory,
    main_memory,
    server_memory,
    tensor_parallel,
    trainer_memory,
)
from turnwise.trainer.scale.shape import ModelShape


class PolicyMemory:
    """The memory that one policy takes on the devices of its trainer and its servers.

    Attributes:
        shape: The policy's model.
        placement: Its devices.
    """

    def __init__(self, config: TrainConfig, placement: Placement) -> None:
        """Read the shapes of policy and critic; nothing else is loaded.

        Raises:
            ConfigError: A model's directory has no ``config.json``, or its family is not counted.
        """
        self._config = config
        self._path = model_under(config.policy.model.path)
        self._key = f"policies.{next(iter(config.policies))}"
        self.shape = ModelShape.load(self._path, f"{self._key}.model.path")
        critic = config.policy.critic
        path = None if critic is None else critic.path
        self._critic = None if path is None else ModelShape.load(path, f"{self._key}.critic.path")
        self.placement = placement

    def by_device(self) -> dict[int, Memory]:
        """Return the memory of each device by its number."""
        trainer = trainer_memory(self._config, self.shape, self._critic)
        server = server_memory(self._config.inference, self._path, self.shape)
        devices = [(device, trainer) for device in self.placement.trainer]
        devices += [(device, server) for group in self.placement.servers for device in group]
        memory_by_device: dict[int, Memory] = {}
        for device, memory in devices:
            for part, size in memory.parts.items():
                memory_by_device.setdefault(device, Memory()).add(part, size)
        return memory_by_device

    def indivisible(self) -> Iterator[str]:
        """Yield what is wrong with the number of devices of a server."""
        width = tensor_parallel(self._config.inference)
        if self.shape.kv_heads % width and width % self.shape.kv_heads:
            yield (
                f"inference.server.tensor_parallel is {width}, which the model's "
                f"{self.shape.kv_heads} heads of keys and values cannot be divided among: choose a divisor of them"
            )

    def remedies(self, memory: Memory) -> Iterator[str]:
        """Yield what to change where a device has too little memory for these parts."""
        model, inference = self._config.policy.model, self._config.inference
        if memory.parts.get("activations", 0) > 0.1 * memory.total:
            if model.gradient_checkpointing is not True:
                yield f"set {self._key}.model.gradient_checkpointing: true"
            yield "lower batch.max_tokens_per_micro_batch"
        if memory.parts.get("critic", 0) > 0.1 * memory.total:
            yield f"choose a smaller {self._key}.critic.path, or critic.kind: shared (engine: torch)"
        if "optimizer states" in memory.parts:
            yield f"raise {self._key}.engine_options.ranks (engine: fsdp), or train adapters (model.lora.rank: 16)"
        if "bfloat16 weights" in memory.parts and self._config.policy.engine == "fsdp":
            yield f"set {self._key}.engine_options.mixed_precision: true"
        if "keys and values" in memory.parts:
            yield "lower inference.kv_tokens"
        if inference.engine != "builtin" and "served weights" in memory.parts:
            yield "raise inference.server.tensor_parallel"
        if "reference" in memory.parts and ModelSharding.of(self._config.policy).ranks == 1:
            yield "set algorithm.kl.offload: true"

    def lines(self) -> Iterator[str]:
        """Yield the model, and what no device holds, as text."""
        shape, dtype = self.shape, served_dtype(self._path, self._config.inference.dtype)
        keys = shape.kv_elements(1) * {"float32": 4}.get(dtype, 2)
        yield (
            f"model: {shape.family}, {shape.parameters / 1e9:,.2f} B parameters; keys and values take {keys:,} bytes a "
            f"token in {dtype}"
        )
        model, tokens = self._config.policy.model, self._config.batch.max_tokens_per_micro_batch
        sizes = (
            f"{str(choice).lower()} {gigabytes(activation_bytes(shape, model, tokens, choice))}"
            for choice in CHECKPOINTING
        )
        yield f"activations by gradient_checkpointing: {', '.join(sizes)}"
        for part, size in main_memory(self._config, shape):
            yield f"main memory: {gigabytes(size)} for {part}"


class Plan:
    """The plan of a run: its trained policies, which share the devices of a cluster.

    Servers that no device is named for follow one another where they share none with the trainer. Trainers begin at the
    first device each: policies are trained one after the other.

    Attributes:
        policies: The memory of each policy.
    """

    def __init__(self, config: TrainConfig, cluster: ClusterConfig) -> None:
        """Read the shapes of the models; nothing else is loaded.

        Raises:
            ConfigError: A model's directory has no ``config.json``, or its family is not counted.
        """
        self._config = config
        self._cluster = cluster
        self.policies: dict[str, PolicyMemory] = {}
        configs = {name: config.of_policy(name) for name in config.policies}
        first_free = 1 + max(device for policy in configs.values() for device in Placement.of(policy).trainer)
        for name, policy in configs.items():
            placement = Placement.of(policy, first_free=first_free)
            if config.policies[name].served_by is not None:
                placement = replace(placement, servers=())
            elif not placement.named:
                first_free = max(first_free, 1 + max(placement.serving))
            self.policies[name] = PolicyMemory(policy, placement)

    @property
    def devices(self) -> set[int]:
        """Devices in use."""
        return {device for policy in self.policies.values() for device in policy.placement.devices}

    def memory(self) -> list[tuple[str, Memory]]:
        """Return the memory by part of each group of devices with the same parts, named by their numbers.

        Of several policies each part begins with the policy's name.
        """
        return _group_devices(self._by_device())

    def problems(self) -> list[str]:
        """Return what keeps the run from fitting on the cluster, each with a remedy."""
        cluster, problems = self._cluster, list[str]()
        if (used := len(self.devices)) > cluster.count:
            problems.append(
                f"cluster.count is {cluster.count}, but {self._processes()} occupy {used} devices: lower "
                "engine_options.ranks or inference.replicas, or plan for a larger cluster"
            )
        for policy in self.policies.values():
            problems += policy.indivisible()
        for devices, memory in self.memory():
            if memory.total > cluster.usable_bytes:
                largest = sorted(memory.parts, key=lambda part: -memory.parts[part])[:3]
                parts = ", ".join(f"{part} {gigabytes(memory.parts[part])}" for part in largest)
                problems.append(
                    f"devices {devices} need {gigabytes(memory.total)} of the {gigabytes(cluster.usable_bytes)} that "
                    f"are usable of a {cluster.device} (cluster.usable: {cluster.usable:g}); largest: {parts}: "
                    f"{', '.join(self._remedies(memory, largest[0]))}"
                )
        return problems

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
        yield from self._memory_table()

    def _by_device(self) -> dict[int, Memory]:
        """Return the memory of each device by policy and part."""
        memory_by_device: dict[int, Memory] = {}
        for name, policy in self.policies.items():
            for device, memory in policy.by_device().items():
                for part, size in memory.parts.items():
                    memory_by_device.setdefault(device, Memory()).add(self._label(name, part), size)
        for host, names in self._config.served.items():
            for device in self.policies[host].placement.serving if len(names) > 1 else ():
                for name in names:
                    size = adapter_memory(self._config.of_policy(name), self.policies[name].shape)
                    memory_by_device[device].add(self._label(name, "served adapter"), size)
        return memory_by_device

    def _label(self, policy: str, part: str) -> str:
        return f"{policy}: {part}" if len(self.policies) > 1 else part

    def _processes(self) -> str:
        """Describe ranks and servers."""
        names = f" of the policies {', '.join(self.policies)}" if len(self.policies) > 1 else ""
        ranks = sum(len(policy.placement.trainer) for policy in self.policies.values())
        servers = sum(len(policy.placement.servers) for policy in self.policies.values())
        return f"{ranks} ranks and {servers} servers{names}"

    def _remedies(self, memory: Memory, largest: str) -> Iterator[str]:
        """Yield what to change where a device has too little memory, ``largest`` of its parts first."""
        if len(self.policies) == 1:
            (policy,) = self.policies.values()
            yield from policy.remedies(memory)
            return
        name, parts = largest.partition(": ")[0], Memory()
        for part, size in memory.parts.items():
            if part.startswith(f"{name}: "):
                parts.add(part.removeprefix(f"{name}: "), size)
        yield from self.policies[name].remedies(parts)
        yield "or give policies other devices"

    def _memory_table(self) -> Iterator[str]:
        groups = self.memory()
        parts = list(dict.fromkeys(part for _, memory in groups for part in memory.parts))
        width = max(24, *(len(part) + 2 for part in parts))
        yield _table_row("GB per device", [devices for devices, _ in groups], width)
        for part in parts:
            yield _table_row(part, [f"{memory.parts.get(part, 0) / 1e9:,.2f}" for _, memory in groups], width)
        yield _table_row("total", [f"{memory.total / 1e9:,.2f}" for _, memory in groups], width)
        yield _table_row("usable", [f"{self._cluster.usable_bytes / 1e9:,.2f}"] * len(groups), width)


def check_plan(config: TrainConfig, cluster: ClusterConfig) -> Plan:
    """Return the plan of a configuration that fits on a cluster.

    Raises:
        ConfigError: It does not fit: memory, or the number of devices.
    """
    plan = Plan(config, cluster)
    if problems := plan.problems():
        raise ConfigError("; ".join(problems))
    return plan


def _group_devices(memory_by_device: Mapping[int, Memory]) -> list[tuple[str, Memory]]:
    """Return the memory of each group of devices with the same parts, named by their numbers."""
    groups: list[tuple[list[int], Memory]] = []
    for device, memory in sorted(memory_by_device.items()):
        for devices, parts in groups:
            if parts == memory:
                devices.append(device)
                break
        else:
            groups.append(([device], memory))
    return [(_ranges(devices), memory) for devices, memory in groups]


def _ranges(numbers: Sequence[int]) -> str:
    """Write sorted numbers as ranges, such as ``0-3, 6``."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][-1] + 1:
            spans[-1] = [spans[-1][0], number]
        else:
            spans.append([number])
    return ", ".join("-".join(map(str, span)) for span in spans)


def _table_row(name: str, cells: Sequence[str], width: int) -> str:
    return f"{name:<{width}}" + "".join(f"{cell:>14}" for cell in cells)
