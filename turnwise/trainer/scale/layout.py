"""The plan of a run on a cluster: memory of each device, speed of rollout and training, and the layout they suggest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Self

from pydantic import BaseModel, ConfigDict

from turnwise.engine.lora import model_under
from turnwise.inference.engines import served_dtype
from turnwise.placement.devices import number_of
from turnwise.trainer.config.train import TrainConfig
from turnwise.trainer.scale.memory import (
    CHECKPOINTING,
    Memory,
    Sharded,
    activation_bytes,
    main_memory,
    server_memory,
    tensor_parallel,
    trainer_memory,
)
from turnwise.trainer.scale.shape import ModelShape
from turnwise.trainer.scale.throughput import (
    ClusterConfig,
    Rollout,
    StepTokens,
    Training,
    WorkloadConfig,
    roll_out,
    train,
)

_GAIN: Final = 1.1
"""A layout is suggested over the configured one, or separate devices over shared ones, if it is so much faster."""


class PlanConfig(BaseModel):
    """What a configuration is planned for.

    Attributes:
        cluster: The devices.
        workload: Expected lengths of an episode.
    """

    model_config = ConfigDict(extra="forbid")

    cluster: ClusterConfig
    workload: WorkloadConfig = WorkloadConfig()


@dataclass(frozen=True, slots=True)
class Placement:
    """Which devices hold what.

    Attributes:
        trainer: Devices of the trainer, in the order of its ranks.
        servers: Devices of each server.
        named: Whether the configuration names them, or the plan placed them by ``mode``.
    """

    trainer: tuple[int, ...]
    servers: tuple[tuple[int, ...], ...]
    named: bool

    @classmethod
    def of(cls, config: TrainConfig, *, after: int = 0) -> Self:
        """Return the placement of a configuration of one policy.

        Where no device is named, servers of ``separate_async`` follow the trainer's devices (and device ``after``), as
        that mode is meant for, and those of other modes share them in turn.
        """
        ranks, inference = Sharded.of(config.policy).ranks, config.inference
        first = _number(config.policy.model.device)
        trainer = tuple(range(ranks)) if ranks > 1 else (first or 0,)
        each, count = tensor_parallel(inference), len(inference.urls) or inference.replicas
        gpus = [] if inference.engine == "builtin" else inference.server.gpus
        if not gpus and (own := _number(inference.device)) is not None:
            gpus = [own] * count
        if gpus:
            servers = tuple(tuple(gpus[number * each : (number + 1) * each]) for number in range(count))
            return cls(trainer, servers, named=True)
        apart = config.mode == "separate_async" or inference.url is not None
        start = max(max(trainer) + 1, after) if apart else 0
        width = count * each if apart else max(ranks, each)
        places = [start + (number % width) for number in range(count * each)]
        return cls(trainer, tuple(tuple(places[n * each : (n + 1) * each]) for n in range(count)), named=False)

    @property
    def serving(self) -> set[int]:
        """Devices of all servers."""
        return {device for server in self.servers for device in server}

    @property
    def devices(self) -> int:
        """Number of devices in use."""
        return len({*self.trainer} | self.serving)

    @property
    def separate(self) -> bool:
        """Whether trainer and servers share no device."""
        return not set(self.trainer) & self.serving


def _number(device: str) -> int | None:
    """Return N of ``cuda:N``."""
    return number_of(device)


@dataclass(frozen=True, slots=True)
class Estimate:
    """Expected time of a step on a number of devices.

    Attributes:
        separate: Whether trainer and servers have separate devices.
        ranks: Devices that train.
        servers: Inference servers.
        rollout: The rollout of a step.
        training: Its update.
    """

    separate: bool
    ranks: int
    servers: int
    rollout: Rollout
    training: Training

    @property
    def seconds(self) -> float:
        """Seconds of a step: on separate devices the longer of work of both, else one after the other."""
        if self.separate:
            return max(self.rollout.busy_s, self.training.seconds)
        return self.rollout.seconds + self.training.seconds

    def __str__(self) -> str:
        kind = "separate" if self.separate else "colocated"
        return f"{kind}, {_many(self.ranks, 'rank')} and {_many(self.servers, 'server')}: {self.seconds:,.0f} s a step"


def by_parts(held: Mapping[int, Memory]) -> list[tuple[str, Memory]]:
    """Return the memory of each group of devices with the same parts, named by their numbers."""
    groups: list[tuple[list[int], Memory]] = []
    for device in sorted(held):
        same = next((each for each in groups if each[1].parts == held[device].parts), None)
        if same is None:
            groups.append(([device], held[device]))
        else:
            same[0].append(device)
    return [(_ranges(devices), memory) for devices, memory in groups]


class Plan:
    """The plan of a configuration of one policy on a cluster.

    Attributes:
        shape: The policy's model.
        placement: Which devices hold what.
        step: Tokens of a step.
    """

    def __init__(
        self, config: TrainConfig, plan: PlanConfig, *, placement: Placement | None = None, played: int = 1
    ) -> None:
        """Read the shapes of the models; nothing else is loaded.

        Args:
            config: The configuration, of one policy.
            plan: What it is planned for.
            placement: Which devices hold what; by default that of the configuration.
            played: Sessions of an episode that the policy samples in.

        Raises:
            ConfigError: A model's directory has no ``config.json``, or its family is not counted.
        """
        self._config = config
        self._cluster = plan.cluster
        self._workload = plan.workload
        self._path = model_under(config.policy.model.path)
        self._key = f"policies.{next(iter(config.policies))}"
        self.shape = ModelShape.load(self._path, f"{self._key}.model.path")
        critic = config.policy.critic
        path = None if critic is None else critic.path
        self._critic = None if path is None else ModelShape.load(path, f"{self._key}.critic.path")
        self.placement = placement or Placement.of(config)
        step = StepTokens.of(config, plan.workload, self.shape.context)
        self.step = replace(step, episodes=played * step.episodes)
        self._dtype = served_dtype(self._path, config.inference.dtype)

    def held(self) -> dict[int, Memory]:
        """Return the memory of each device by its number."""
        trainer = trainer_memory(self._config, self.shape, self._critic)
        server = server_memory(self._config.inference, self._path, self.shape)
        held: dict[int, Memory] = {}
        for device in self.placement.trainer:
            for part, size in trainer.parts.items():
                held.setdefault(device, Memory()).add(part, size)
        for device in (device for each in self.placement.servers for device in each):
            for part, size in server.parts.items():
                held.setdefault(device, Memory()).add(part, size)
        return held

    def memory(self) -> list[tuple[str, Memory]]:
        """Return the memory of each group of devices with the same parts, named by their numbers."""
        return by_parts(self.held())

    def problems(self) -> list[str]:
        """Return what keeps the configuration from running on the cluster, each with a remedy."""
        cluster, found = self._cluster, []
        if (wanted := self.placement.devices) > cluster.count:
            found.append(
                f"cluster.count is {cluster.count}, but the run places its {len(self.placement.trainer)} ranks and "
                f"{len(self.placement.servers)} servers on {wanted} devices: lower {self._key}.engine_options.ranks "
                "or inference.replicas, or plan for a larger cluster"
            )
        found += self.indivisible()
        for devices, memory in self.memory():
            if memory.total > cluster.usable_bytes:
                largest = sorted(memory.parts, key=lambda part: -memory.parts[part])[:3]
                parts = ", ".join(f"{part} {gigabytes(memory.parts[part])}" for part in largest)
                found.append(
                    f"devices {devices} need {gigabytes(memory.total)} of the {gigabytes(cluster.usable_bytes)} that "
                    f"are usable of a {cluster.device} (cluster.usable: {cluster.usable:g}); largest: {parts}: "
                    f"{', '.join(self.remedies(memory))}"
                )
        return found

    def indivisible(self) -> Iterator[str]:
        """Yield what is wrong with the number of devices of a server."""
        each = tensor_parallel(self._config.inference)
        if self.shape.kv_heads % each and each % self.shape.kv_heads:
            yield (
                f"inference.{self._config.inference.engine}.tensor_parallel is {each}, which the model's "
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
        if inference.engine in ("vllm", "sglang") and "served weights" in memory.parts:
            yield f"raise inference.{inference.engine}.tensor_parallel"
        if "reference" in memory.parts and Sharded.of(self._config.policy).ranks == 1:
            yield "set algorithm.kl.offload: true"

    def estimate(self, *, separate: bool, ranks: int, servers: int) -> Estimate:
        """Return the expected time of a step with so many ranks and servers."""
        sharded = Sharded.of(self._config.policy)
        rollout = roll_out(
            self._config,
            self.shape,
            self._cluster,
            self.step,
            self._workload,
            servers=servers,
            devices=tensor_parallel(self._config.inference),
            dtype=self._dtype,
        )
        training = train(
            self._config,
            self.shape,
            self._cluster,
            self.step,
            ranks=ranks,
            sharded=sharded,
            critic=self._critic or self.shape,
        )
        return Estimate(separate, ranks, servers, rollout, training)

    def configured(self) -> Estimate:
        """Return the expected time of a step as configured."""
        placement = self.placement
        return self.estimate(separate=placement.separate, ranks=len(placement.trainer), servers=len(placement.servers))

    def suggested(self) -> tuple[Estimate, str] | None:
        """Return the fastest layout of all devices whose memory suffices, and the reason; None where none fits."""
        count, each = self._cluster.count, tensor_parallel(self._config.inference)
        fitting = [
            self.estimate(separate=False, ranks=count, servers=count // each)
            for _ in range(count >= each)
            if self._fits(count, separate=False)
        ]
        fitting += [
            self.estimate(separate=True, ranks=count - servers * each, servers=servers)
            for servers in range(1, (count - 1) // each + 1)
            if self._fits(count - servers * each, separate=True)
        ]
        if not fitting:
            return None
        best = min(fitting, key=lambda each: each.seconds)
        shared = next((each for each in fitting if not each.separate), None)
        if shared is not None and best.separate and shared.seconds < _GAIN * best.seconds:
            best = shared
        return best, _reason(best, shared, [each for each in fitting if each.separate])

    def _fits(self, ranks: int, *, separate: bool) -> bool:
        policy = self._config.policy
        options = {**policy.engine_options, "ranks": ranks}
        spread = policy.model_copy(update={"engine": "fsdp", "engine_options": options} if ranks > 1 else {})
        config = self._config.model_copy(update={"policies": {next(iter(self._config.policies)): spread}})
        trainer = trainer_memory(config, self.shape, self._critic)
        server = server_memory(config.inference, self._path, self.shape)
        limit = self._cluster.usable_bytes
        if separate:
            return trainer.total <= limit and server.total <= limit
        return trainer.total + server.total <= limit

    def lines(self) -> Iterator[str]:
        """Yield the plan as text."""
        yield from self.about()
        yield ""
        yield from self._memory_table()
        yield ""
        yield from self._speed()

    def about(self, *, alone: bool = True) -> Iterator[str]:
        """Yield model, cluster (where the plan is ``alone``) and step as text."""
        shape, cluster, step = self.shape, self._cluster, self.step
        active = "" if shape.experts is None else f", {shape.active_matrices / 1e9:,.2f} B of matrices for a token"
        keys = shape.kv_elements(1) * {"float32": 4}.get(self._dtype, 2)
        yield (
            f"model: {shape.family}, {shape.parameters / 1e9:,.2f} B parameters{active}; keys and values take {keys:,} "
            f"bytes a token in {self._dtype}"
        )
        if alone:
            yield about_cluster(cluster)
        yield (
            f"a step: {step.episodes:,} episodes of {step.turns:g} turns, {step.sampled:,.0f} sampled tokens and "
            f"{step.length:,.0f} in all; {step.episodes * step.computed / 1e6:,.2f} M tokens are trained"
        )
        if step.bounds:
            names = ", ".join(f"workload.{name}" for name in step.bounds)
            yield f"these lengths are limits of the configuration: give {names} for expected ones"

    def _memory_table(self) -> Iterator[str]:
        groups = self.memory()
        parts = list(dict.fromkeys(part for _, memory in groups for part in memory.parts))
        yield table_row("GB per device", [devices for devices, _ in groups])
        for part in parts:
            yield table_row(part, [f"{memory.parts.get(part, 0) / 1e9:,.2f}" for _, memory in groups])
        yield table_row("total", [f"{memory.total / 1e9:,.2f}" for _, memory in groups])
        yield table_row("usable", [f"{self._cluster.usable_bytes / 1e9:,.2f}"] * len(groups))
        model, tokens = self._config.policy.model, self._config.batch.max_tokens_per_micro_batch
        sizes = (
            f"{str(each).lower()} {gigabytes(activation_bytes(self.shape, model, tokens, each))}"
            for each in CHECKPOINTING
        )
        yield f"activations by gradient_checkpointing: {', '.join(sizes)}"
        for part, size in main_memory(self._config, self.shape):
            yield f"main memory: {gigabytes(size)} for {part}"

    def times(self, estimate: Estimate) -> Iterator[str]:
        """Yield the expected speed of rollout and training as text."""
        rollout, training = estimate.rollout, estimate.training
        yield (
            f"rollout: {_many(rollout.servers, 'server')} with {rollout.sequences:,.0f} episodes each sample "
            f"{rollout.tokens_per_s:,.0f} tokens/s ({1e3 * rollout.decode_s:.1f} ms a step) and prefill "
            f"{rollout.prefill_per_s:,.0f}: {rollout.busy_s:,.0f} s of work, {rollout.seconds:,.0f} s until the "
            "longest episode ends"
        )
        critic = f", {training.critic_s:,.0f} s of the critic" if training.critic_s else ""
        bound = "communication" if training.gathering_s > training.computing_s else "arithmetic"
        yield (
            f"training: {training.tokens_per_s:,.0f} tokens/s on {_many(training.ranks, 'rank')}: "
            f"{training.seconds:,.0f} s, bound by {bound} ({training.computing_s:,.0f} s of arithmetic, "
            f"{training.gathering_s:,.0f} s of weights and gradients between ranks, {training.micro_batches} "
            f"micro-batches{critic})"
        )

    def _speed(self) -> Iterator[str]:
        now = self.configured()
        rollout, training, step = now.rollout, now.training, self.step
        yield from self.times(now)
        share = rollout.busy_s / (rollout.busy_s + training.seconds)
        needed = step.episodes * step.sampled / max(training.seconds, 1e-9)
        if now.separate:
            yield f"balance: for training never to wait, servers have to sample {needed:,.0f} tokens/s"
        else:
            yield f"balance: rollout is {share:.0%} of the work of a step"
        yield f"configured: {now}"
        found = self.suggested()
        if found is None:
            yield "suggested: nothing: no layout of these devices has the memory"
        else:
            yield f"suggested: {found[0]}; {found[1]}"
        if not self.placement.named and now.separate:
            yield (
                "note: no device is named, so the servers were planned on devices of their own; on one machine name "
                "them (inference.server.gpus, or inference.device: cuda:N)"
            )


def _reason(best: Estimate, shared: Estimate | None, apart: Sequence[Estimate]) -> str:
    """Say why a layout is suggested."""
    if not best.separate:
        if not apart:
            return "trainer and servers fit together on each device, and there are too few for separate ones"
        other = min(apart, key=lambda each: each.seconds)
        return (
            f"separate devices would take {other.seconds:,.0f} s ({_many(other.ranks, 'rank')}, "
            f"{_many(other.servers, 'server')}), and shared ones need no balance"
        )
    if shared is None:
        return "trainer and servers do not fit together on one device"
    waits = shared.rollout.seconds - shared.rollout.busy_s
    why = f", of which {waits:,.0f} s wait for the longest episodes" if waits > 0 else ""
    return f"on shared devices a step takes {shared.seconds:,.0f} s{why} (mode: separate_async)"


def about_cluster(cluster: ClusterConfig) -> str:
    """Describe a cluster."""
    sheet = cluster.sheet
    return (
        f"cluster: {cluster.count} x {cluster.device}, {sheet.memory_gb:g} GB ({cluster.usable:.0%} usable), "
        f"{sheet.tflops:g} TFLOP/s ({cluster.mfu:.0%} reached), {sheet.bandwidth_gb_s:,g} GB/s "
        f"({cluster.bandwidth_use:.0%} reached)"
    )


def _ranges(numbers: Sequence[int]) -> str:
    """Write sorted numbers as ranges, such as ``0-3, 6``."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][-1] + 1:
            spans[-1] = [spans[-1][0], number]
        else:
            spans.append([number])
    return ", ".join("-".join(map(str, span)) for span in spans)


def _many(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"


def table_row(name: str, cells: Sequence[str]) -> str:
    """Return a row of a table."""
    return f"{name:<24}" + "".join(f"{cell:>14}" for cell in cells)


def gigabytes(size: float) -> str:
    """Return bytes as text."""
    return f"{size / 1e9:,.1f} GB"
