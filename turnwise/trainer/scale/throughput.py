"""Throughput of rollout and training on a device: rooflines of its arithmetic and memory, and what a step asks for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Final, Self, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, model_validator

from turnwise.trainer.config.train import TrainConfig
from turnwise.trainer.scale.memory import BYTES, Sharded, kv_room
from turnwise.trainer.scale.shape import ModelShape

Positive: TypeAlias = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share: TypeAlias = Annotated[float, Field(gt=0, le=1)]
Count: TypeAlias = Annotated[int, Field(gt=0)]

DEFAULT_PROMPT: Final = 512
"""Prompt tokens where neither ``workload.prompt_tokens`` nor ``max_prompt_tokens`` says how many."""


@dataclass(frozen=True, slots=True)
class Device:
    """An accelerator by its data sheet.

    Attributes:
        memory_gb: Memory, in 10^9 bytes.
        tflops: Dense bfloat16 products, in 10^12 operations a second.
        tflops_float32: The same in float32, without tensor cores.
        bandwidth_gb_s: Bandwidth of its memory.
        interconnect_gb_s: To other devices of its node, in one direction.
    """

    memory_gb: float
    tflops: float
    tflops_float32: float
    bandwidth_gb_s: float
    interconnect_gb_s: float


DEVICES: Final[Mapping[str, Device]] = {
    "a100-40": Device(40, 312, 19.5, 1555, 300),
    "a100-80": Device(80, 312, 19.5, 2039, 300),
    "h20": Device(96, 148, 44, 4000, 450),
    "h100": Device(80, 989, 67, 3350, 450),
    "h200": Device(141, 989, 67, 4800, 450),
    "b200": Device(180, 2250, 75, 7700, 900),
    "l40s": Device(48, 362, 91.6, 864, 32),
    "rtx4090": Device(24, 165, 82.6, 1008, 32),
    "mi300x": Device(192, 1307, 163, 5300, 448),
}
"""Devices by name, by the data sheets of their makers (NVIDIA: SXM where there is one; AMD: OAM)."""


class ClusterConfig(BaseModel):
    """The devices that a run is planned for.

    Attributes:
        device: A name of ``DEVICES`` (``h100`` ...), or any other with all five figures below.
        count: Devices.
        per_node: Devices of one machine.
        memory_gb: Memory of a device, in 10^9 bytes; by default the named device's, as for the next four.
        tflops: Dense bfloat16 products, in 10^12 operations a second.
        tflops_float32: The same in float32.
        bandwidth_gb_s: Bandwidth of a device's memory.
        interconnect_gb_s: To other devices of a machine, in one direction.
        network_gb_s: To other machines, for each device.
        usable: Share of the memory that a run may fill; the rest is the driver's, the communication library's, and lost
            between blocks.
        mfu: Share of ``tflops`` that training and prefill reach (model FLOP utilisation).
        bandwidth_use: Share of ``bandwidth_gb_s`` that decoding reaches (model bandwidth utilisation).
        step_overhead_ms: Time of a decoding step besides reading and computing: launches, scheduling, communication.
    """

    model_config = ConfigDict(extra="forbid")

    device: str
    count: Count
    per_node: Count = 8
    memory_gb: Positive | None = None
    tflops: Positive | None = None
    tflops_float32: Positive | None = None
    bandwidth_gb_s: Positive | None = None
    interconnect_gb_s: Positive | None = None
    network_gb_s: Positive = 50.0
    usable: Share = 0.9
    mfu: Share = 0.35
    bandwidth_use: Share = 0.6
    step_overhead_ms: Annotated[float, Field(ge=0)] = 3.0

    @model_validator(mode="after")
    def _is_known(self) -> Self:
        figures = Device.__slots__
        missing = [name for name in figures if getattr(self, name) is None]
        if missing and self.device not in DEVICES:
            raise ValueError(
                f"device is {self.device!r}, which is none of {', '.join(DEVICES)}: choose one, or give "
                f"{', '.join(missing)} of its data sheet"
            )
        return self

    @property
    def sheet(self) -> Device:
        """The data sheet of a device, with the figures that the configuration gives."""
        known = DEVICES.get(self.device)

        def figure(given: float | None, name: str) -> float:
            return given if given is not None else float(getattr(known, name))

        return Device(
            figure(self.memory_gb, "memory_gb"),
            figure(self.tflops, "tflops"),
            figure(self.tflops_float32, "tflops_float32"),
            figure(self.bandwidth_gb_s, "bandwidth_gb_s"),
            figure(self.interconnect_gb_s, "interconnect_gb_s"),
        )

    @property
    def usable_bytes(self) -> float:
        """Bytes of a device that a run may fill."""
        return self.usable * self.sheet.memory_gb * 1e9

    def operations(self, dtype: str) -> float:
        """Return the operations a second that products in a type reach on one device."""
        sheet = self.sheet
        return self.mfu * 1e12 * (sheet.tflops_float32 if dtype == "float32" else sheet.tflops)


class WorkloadConfig(BaseModel):
    """Expected lengths of an episode; what is not given is the configuration's limit, an upper bound.

    Attributes:
        prompt_tokens: Tokens of the first prompt, tools included.
        turns: Model calls of an episode.
        completion_tokens: Sampled tokens of a turn.
        observation_tokens: Tokens that an environment adds after a turn.
        tool_seconds: Seconds that an environment takes after a turn.
        tail: How many times the mean the longest episode of a batch takes.
    """

    model_config = ConfigDict(extra="forbid")

    prompt_tokens: Count | None = None
    turns: Annotated[float, Field(ge=1)] | None = None
    completion_tokens: Count | None = None
    observation_tokens: Annotated[int, Field(ge=0)] = 0
    tool_seconds: Annotated[float, Field(ge=0)] = 0.0
    tail: Annotated[float, Field(ge=1)] = 3.0


@dataclass(frozen=True, slots=True)
class StepTokens:
    """The tokens of one train step.

    Attributes:
        episodes: Episodes of a step.
        turns: Model calls of an episode.
        prompt: Tokens of its first prompt.
        completion: Sampled tokens of a turn.
        observation: Tokens added after each turn but the last.
        bounds: The lengths that are limits of the configuration, not expectations.
        shared: Whether rows of a group share the computation of their prompt.
        group_size: Episodes of a group.
    """

    episodes: int
    turns: float
    prompt: int
    completion: float
    observation: float
    bounds: tuple[str, ...]
    shared: bool
    group_size: int

    @classmethod
    def of(cls, config: TrainConfig, workload: WorkloadConfig, context: int) -> Self:
        """Return the tokens of a step of a configuration, within a context of so many tokens (0: unlimited)."""
        rollout, bounds = config.rollout, []
        group = rollout.group_size + config.algorithm.greedy_baseline
        prompt = workload.prompt_tokens or config.max_prompt_tokens or DEFAULT_PROMPT
        turns = workload.turns or float(rollout.max_turns)
        bounds += ["prompt_tokens"] * (workload.prompt_tokens is None) + ["turns"] * (workload.turns is None)
        limits = [each for each in (rollout.context_length, config.inference.max_context, context) if each]
        room = max(1.0, min(limits, default=prompt + 8192) - prompt)
        observation = float(workload.observation_tokens)
        completion = float(workload.completion_tokens or rollout.max_tokens_per_turn or room)
        if workload.completion_tokens is None:
            bounds.append("completion_tokens")
        if (total := turns * completion + (turns - 1) * observation) > room:
            # Episodes end where the context does.
            completion, observation = completion * room / total, observation * room / total
        started = config.batch.groups * group
        return cls(started, turns, prompt, completion, observation, tuple(bounds), config.batch.share_prefixes, group)

    @property
    def sampled(self) -> float:
        """Sampled tokens of an episode."""
        return self.turns * self.completion

    @property
    def length(self) -> float:
        """Tokens of an episode at its end."""
        return self.prompt + self.sampled + (self.turns - 1) * self.observation

    @property
    def read(self) -> float:
        """Tokens of an episode that are prefilled where prefixes are kept: its prompt's share, and observations."""
        return self.prompt / self.group_size + (self.turns - 1) * self.observation

    @property
    def computed(self) -> float:
        """Tokens of an episode that the trainer computes; a shared prompt counts once for its group."""
        prompt = self.prompt / self.group_size if self.shared else self.prompt
        return prompt + self.length - self.prompt


def decode_step(
    shape: ModelShape, cluster: ClusterConfig, dtype: str, devices: int, sequences: float, context: float
) -> float:
    """Return the seconds of one decoding step of a server, which samples a token of each sequence.

    The larger of reading (weights, and keys and values of every sequence) over the bandwidth and of operations over the
    arithmetic, both of all devices of the server, and the step's overhead. Sources: the roofline of Williams et al.
    2009 (doi:10.1145/1498765.1498785); for decoding, Pope et al. 2022, "Efficiently Scaling Transformer Inference"
    (arXiv:2211.05102), section 2.
    """
    number = BYTES[dtype]
    read = number * (shape.weights_read(sequences) + sequences * shape.kv_elements(round(context)))
    reading = read / (devices * cluster.bandwidth_use * 1e9 * cluster.sheet.bandwidth_gb_s)
    computing = shape.forward_operations(sequences, context) / (devices * cluster.operations(dtype))
    return max(reading, computing) + cluster.step_overhead_ms / 1e3


def prefill_speed(shape: ModelShape, cluster: ClusterConfig, dtype: str, devices: int, context: float) -> float:
    """Return the tokens a second that a server prefills, bound by arithmetic (Pope et al. 2022, section 2.1)."""
    return devices * cluster.operations(dtype) / shape.forward_operations(1, context)


def policy_passes(config: TrainConfig) -> float:
    """Return how many forward passes of the policy a token costs in a train step.

    A backward pass is two (Chowdhery et al. 2022, arXiv:2204.02311, appendix B); checkpointing recomputes one, with
    ``matmuls`` almost none. Each epoch has them all. On top one for recomputed old log-probabilities and one for the
    reference.
    """
    algorithm = config.algorithm
    return trained_passes(config) + (algorithm.old_logprobs == "recompute") + (algorithm.kl is not None)


def trained_passes(config: TrainConfig) -> float:
    """Return the forward passes that the epochs of a step are worth."""
    again = {True: 1.0, "matmuls": 0.1, False: 0.0}[config.policy.model.gradient_checkpointing]
    return config.algorithm.epochs * (3.0 + again)


def gathered_seconds(shape: ModelShape, cluster: ClusterConfig, ranks: int, *, half: bool, passes: float) -> float:
    """Return the seconds that a rank waits for weights and gradients in so many passes over micro-batches.

    In each pass a rank receives ``(R - 1) / R`` of the weights for the forward pass, once more for the backward pass,
    and sends as much of the gradients, in float32 (Rajbhandari et al. 2020, arXiv:1910.02054, section 7). Between
    machines the network's bandwidth counts.
    """
    if ranks == 1:
        return 0.0
    speed = cluster.network_gb_s if ranks > cluster.per_node else cluster.sheet.interconnect_gb_s
    sent = (ranks - 1) / ranks * shape.parameters * (2 * (2 if half else 4) + 4)
    return passes * sent / (1e9 * speed)


@dataclass(frozen=True, slots=True)
class Rollout:
    """Rollout of one step's episodes on some servers.

    Attributes:
        servers: Servers.
        sequences: Episodes that a server runs at the same time.
        decode_s: Seconds of a decoding step with so many.
        tokens_per_s: Sampled tokens a second of all servers, while all are busy.
        prefill_per_s: Prefilled tokens a second of all servers.
        seconds: Seconds until the last episode has ended.
        busy_s: Seconds that the work takes where servers never wait for a longest episode.
        longest_s: Seconds of the longest episode.
    """

    servers: int
    sequences: float
    decode_s: float
    tokens_per_s: float
    prefill_per_s: float
    seconds: float
    busy_s: float
    longest_s: float


def roll_out(
    config: TrainConfig,
    shape: ModelShape,
    cluster: ClusterConfig,
    step: StepTokens,
    workload: WorkloadConfig,
    *,
    servers: int,
    devices: int,
    dtype: str,
) -> Rollout:
    """Return how long the episodes of a step take on servers of so many devices each.

    The work is sampled tokens over the decoding speed at the batch that runs, and prefilled tokens over theirs. It ends
    with the longest episode, which samples ``tail`` times the mean and waits for its tools: the critical path.
    """
    inference = config.inference
    running = min(step.episodes, config.rollout.concurrency) / servers
    room = kv_room(inference, shape) / step.length
    sequences = max(1.0, min(running, inference.max_seqs, room))
    # Of an episode that waits for a tool nothing is sampled.
    context = step.prompt + (step.length - step.prompt) / 2
    decode = decode_step(shape, cluster, dtype, devices, sequences, context)
    sampling = step.sampled * decode
    share = sampling / (sampling + step.turns * workload.tool_seconds)
    if share < 1:
        decode = decode_step(shape, cluster, dtype, devices, max(1.0, sequences * share), context)
    speed = servers * max(1.0, sequences * share) / decode
    prefill = servers * prefill_speed(shape, cluster, dtype, devices, context)
    busy = step.episodes * (step.sampled / speed + step.read / prefill)
    alone = decode_step(shape, cluster, dtype, devices, 1, context)
    longest = workload.tail * (step.sampled * (alone + decode) / 2 + step.turns * workload.tool_seconds)
    return Rollout(servers, sequences, decode, speed, prefill, max(busy, longest), busy, longest)


@dataclass(frozen=True, slots=True)
class Training:
    """Training on one step's episodes.

    Attributes:
        ranks: Devices that train.
        tokens: Tokens that are computed in a pass over the step.
        computing_s: Seconds of the policy's arithmetic.
        gathering_s: Seconds of communication between ranks, which overlaps with arithmetic.
        critic_s: Seconds of a critic of its own, which is trained after the policy.
        micro_batches: Micro-batches of the step.
    """

    ranks: int
    tokens: float
    computing_s: float
    gathering_s: float
    critic_s: float
    micro_batches: int

    @property
    def seconds(self) -> float:
        """Seconds of the step's update."""
        return max(self.computing_s, self.gathering_s) + self.critic_s

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second of all ranks, all passes included."""
        return self.tokens / self.seconds


def train(
    config: TrainConfig,
    shape: ModelShape,
    cluster: ClusterConfig,
    step: StepTokens,
    *,
    ranks: int,
    sharded: Sharded,
    critic: ModelShape,
) -> Training:
    """Return how long the update of a step takes on so many ranks: the larger of arithmetic and communication.

    Ranks compute in passes of a micro-batch each, so the last pass is as long as the others (``deal`` in
    ``turnwise/trainer/learn/fsdp_learner.py``). A critic of its own computes values and is trained on the same ranks.
    """
    tokens = step.episodes * step.computed
    budget = max(float(config.batch.max_tokens_per_micro_batch), step.length)
    batches = max(1, round(tokens / budget))
    # Ranks that share the sequences of a micro-batch compute one together.
    passes = -(-batches // max(1, ranks // sharded.together))
    speed = cluster.operations(config.policy.model.compute_dtype)
    work = policy_passes(config) * shape.forward_operations(tokens, step.length / 2)
    computing = work / (batches / passes) / min(sharded.together, ranks) / speed
    gathering = gathered_seconds(shape, cluster, ranks, half=sharded.half, passes=passes * config.algorithm.epochs)
    own = config.policy.critic is not None and config.policy.critic.kind == "own"
    valued = own * (1.0 + trained_passes(config)) * critic.forward_operations(tokens, step.length / 2)
    return Training(ranks, tokens, computing, gathering, valued / speed / ranks, batches)
