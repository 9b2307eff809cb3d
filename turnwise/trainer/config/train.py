"""The configuration of ``turnwise train``, and the sections that offline training shares with it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal, Self, TypeAlias

from pydantic import BeforeValidator, Field, model_validator

from turnwise.config import ConfigPath, ConfigReference, Section
from turnwise.evaluation.config import EvalPlan, check_search
from turnwise.inference.config import InferenceConfig, RendererConfig
from turnwise.placement.config import PlacementName, RayConfig
from turnwise.rollout.config import PolicyName, RolloutConfig
from turnwise.rollout.replay.config import ReplayConfig, RunFacts
from turnwise.rollout.replay.strategies import StragglerDeadline
from turnwise.tasks.config import CurriculumConfig, TasksConfig
from turnwise.trainer.algorithms.config import AlgorithmConfig
from turnwise.trainer.algorithms.trees import TREE_CREDITS
from turnwise.trainer.config.budget import UNKNOWN_STEPS, BudgetConfig
from turnwise.trainer.config.policy import (
    LoggersConfig,
    PolicyConfig,
    PositiveInt,
    check_exact,
    check_policies,
    merged_section,
)


class TrainEvalConfig(EvalPlan):
    """Evaluation on held-out tasks before the first step, after the last, and in between.

    Attributes:
        every: Steps between evaluations; None evaluates before and after only.
    """

    every: PositiveInt | None = 10

    @model_validator(mode="after")
    def _held_out(self) -> Self:
        if self.tasks is None:
            raise ValueError("held-out tasks: an environment's default_tasks may be the ones that are trained")
        return self


class BestConfig(Section):
    """Keeping the best checkpoint besides the newest.

    Attributes:
        metric: A metric of evaluations (``eval/sampled``, ``eval/greedy/reward`` ...) or a logged one
            (``reward/mean`` ...).
        mode: Whether higher or lower is better.
    """

    metric: str = "eval/sampled"
    mode: Literal["max", "min"] = "max"


class CheckpointConfig(Section):
    """When checkpoints are written and how many are kept.

    Attributes:
        every: Steps between checkpoints; the last step always has one.
        keep: How many of the newest are kept; None keeps all.
        best: Which other one is kept; None keeps none.
    """

    every: Annotated[int, Field(gt=0)] = 10
    keep: Annotated[int, Field(gt=0)] | None = 2
    best: BestConfig | None = None


MICRO_BATCH: Final = 4096
"""Tokens of a micro-batch by default."""


class BatchConfig(Section):
    """The batch of a train step.

    Groups that a step started and did not wait for are carried into the next step where ``replay`` allows groups of
    older weights, else cancelled.

    Attributes:
        groups: Groups per step (``rollout.group_size`` trajectories each).
        over_sample: ``sync``: start this many times ``groups`` and train the first to finish.
        tail: Wait for the last groups; None waits for all of them.
        max_tokens_per_micro_batch: Tokens of one forward and backward pass; bounds memory. By default as many as a
            GPU has memory for, and 4,096 on a CPU.
        max_tokens_per_row: Truncate longer rows, counting the cut tokens; None truncates nothing.
        share_prefixes: Compute common prefixes of rows in a micro-batch once (the prompt of a group, the history of
            branches). The result is the same.
    """

    groups: PositiveInt = 16
    over_sample: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.0
    tail: StragglerDeadline | None = None
    max_tokens_per_micro_batch: PositiveInt | None = None
    max_tokens_per_row: PositiveInt | None = None
    share_prefixes: bool = True

    @property
    def micro_batch(self) -> int:
        """Tokens of a micro-batch, where no device's memory decided on them."""
        return self.max_tokens_per_micro_batch or MICRO_BATCH

    @property
    def started(self) -> int:
        """Groups that a ``sync`` step starts where none is carried over."""
        return self.starts(self.groups)

    def starts(self, fresh: int) -> int:
        """Return how many groups a ``sync`` step starts to get ``fresh`` ones."""
        # Rounded: 1.1 times 10 is 11.000000000000002, and 11 is meant.
        return math.ceil(round(fresh * self.over_sample, 6))


Mode: TypeAlias = Literal["sync", "colocate_async", "separate_async"]


class OverlapConfig(Section):
    """Overlap of rollouts and updates in the asynchronous modes.

    Attributes:
        sampling: ``colocate_async``: whether servers ``continue`` to sample during an update, or ``pause`` where both
            do not fit the device. Tools and environments continue in either case.
        stream: ``separate_async``: number of parts of a batch, each trained by one optimizer step as soon as its groups
            have finished.
    """

    sampling: Literal["continue", "pause"] = "continue"
    stream: Annotated[int, Field(ge=1)] = 1


RunName: TypeAlias = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
"""A name that is also a directory's."""


HookNames: TypeAlias = Annotated[
    tuple[ConfigReference, ...], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)
]
"""What ``hooks`` takes in a configuration: one reference, or several."""


def check_algorithm(name: str, config: TrainConfig) -> None:
    """Check that the algorithm of one policy fits the groups, its start model and its critic.

    Args:
        name: The policy.
        config: Its configuration (:meth:`TrainConfig.of_policy`).

    Raises:
        ValueError: A combination is not allowed.
    """
    rollout, algorithm, policy = config.rollout, config.algorithm, config.policy
    credit = algorithm.credit
    if rollout.tree is not None and not (credit.of_trees or credit.custom):
        raise ValueError(
            f"rollout.tree forks episodes, but by algorithm.credit {credit.name!r} all branches of one have the same "
            f"advantage: choose {' or '.join(TREE_CREDITS)}, or leave rollout.tree out"
        )
    if rollout.group_size < 2 and algorithm.compares_groups and rollout.tree is None:
        raise ValueError(
            f"rollout.group_size is 1, and by algorithm.advantage {algorithm.advantage} a group of one has "
            "advantage zero; set at least 2, or an estimator that compares no groups (gae, remax ...)"
        )
    if algorithm.greedy_baseline and rollout.group_reward is not None:
        raise ValueError(
            f"algorithm.advantage {algorithm.advantage} compares trajectories with a greedy rollout, which is "
            "no member of the group that rollout.group_reward compares: its reward would lack that part; choose "
            "one"
        )
    begins = sorted(name for name, frozen in rollout.frozen.items() if frozen.start)
    if begins and policy.model.continues_adapter:
        raise ValueError(
            f"rollout.frozen.{begins[0]}.start is true, but the run begins with the adapter in "
            f"policies.{name}.model.lora.path, and start serves the model without it: name the adapter's folder as "
            f"rollout.frozen.{begins[0]}.model instead"
        )
    members = config.batch.groups * rollout.group_size
    if algorithm.minibatches > members:
        raise ValueError(
            f"algorithm.minibatches is {algorithm.minibatches}, but a step has {members} trajectories "
            "(batch.groups x rollout.group_size)"
        )
    critic = policy.critic
    if algorithm.asks_critic and critic is None:
        raise ValueError(
            f"algorithm.advantage is {algorithm.advantage}, which needs a critic: give policies.{name}.critic, "
            "such as {kind: own}"
        )
    if critic is not None and not algorithm.asks_critic:
        raise ValueError(
            f"policies.{name}.critic is given, but algorithm.advantage {algorithm.advantage} needs none: remove "
            "it, or set algorithm.advantage to gae"
        )
    if critic is not None and config.steps is not None and critic.warmup_steps >= config.steps:
        raise ValueError(
            f"policies.{name}.critic.warmup_steps is {critic.warmup_steps} of {config.steps} steps: the policy would "
            "never learn"
        )


def check_teacher_named(config: TrainConfig) -> None:
    """Check that the teacher of ``algorithm.distill`` can score ids at the temperature of the rollouts.

    Raises:
        ValueError: It is missing or hosted, or the temperature is not 1.
    """
    distill, frozen = config.algorithm.distill, config.rollout.frozen
    if distill is None:
        return
    if distill.teacher not in frozen:
        raise ValueError(
            f"algorithm.distill.teacher is {distill.teacher!r}, but rollout.frozen holds "
            f"{', '.join(frozen) or 'nothing'}: add rollout.frozen.{distill.teacher} with model, or url and model"
        )
    if frozen[distill.teacher].hosted is not None:
        raise ValueError(
            f"algorithm.distill.teacher is {distill.teacher!r}, a hosted endpoint: it cannot score given ids; name "
            "a model, or a server of token ids"
        )
    if config.rollout.temperature != 1.0:
        raise ValueError(
            f"rollout.temperature is {config.rollout.temperature:g}, but servers score given ids at temperature 1, "
            "and algorithm.distill compares both: set it to 1"
        )


# Of verl and TRL.
_FOREIGN_KEYS: Final = {
    "actor_rollout_ref": "policies.main or rollout", "adv_estimator": "algorithm.advantage",
    "clip_ratio_high": "algorithm.loss_options", "clip_ratio_low": "algorithm.loss_options",
    "kl_loss_coef": "algorithm.kl.coef", "loss_mode": "algorithm.loss", "max_assistant_turns": "rollout.max_turns",
    "ppo_epochs": "algorithm.epochs", "ppo_mini_batch_size": "algorithm.minibatches",
    "train_batch_size": "batch.groups", "use_kl_loss": "algorithm.kl",
    "beta": "algorithm.kl.coef", "learning_rate": "policies.main.optim.lr",
    "max_completion_length": "rollout.max_tokens_per_turn", "max_steps": "steps",
    "num_generations": "rollout.group_size",
}  # fmt: skip


class TrainConfig(Section):
    """``turnwise train``.

    Attributes:
        name: Name of the run; its directory is ``runs/name``.
        runs: Parent of run directories.
        seed: Seed of resets, sampling and the order of tasks.
        steps: Train steps; None where only a budget limits the run.
        budget: Limits of tokens and wall time.
        tasks: The tasks (``tasks.load_tasks``): a source, a section with its keys, or a list of either, which is a mix;
            by default those that the environment names.
        max_prompt_tokens: Drop tasks with longer prompts; their number is printed and logged. Counted are the task's
            own prompt and the environment's tools, not what the environment adds when it resets.
        shuffle: Whether tasks are reshuffled in each epoch.
        curriculum: Preferred difficulty of tasks (``tasks/order.py``); None takes all equally often.
        policies: The trained policies by name: ``main``, or several, each with its own model, optimizer and servers;
            ``rollout.roles`` maps roles to them.
        rollout: How episodes are rolled out.
        replay: The replay buffer: which finished groups a step trains.
        renderer: The renderer of messages.
        inference: The inference servers.
        placement: Where processes run: ``local``, on this machine; ``ray``, on the nodes of a cluster.
        ray: The cluster and the resources of ``placement: ray``.
        layout: ``separate``: trainer and servers keep what they hold. ``colocated``: they use the same devices in turn,
            and hold nothing while the other computes; by ``placement: ray`` rank and server of a number share a bundle,
            which needs as many of either.
        algorithm: From rewards to a loss.
        batch: The batch of a step.
        mode: Training mode (docs/training.md): ``sync`` alternates rollouts and updates; ``colocate_async`` overlaps
            them on one device, ``separate_async`` on separate devices.
        overlap: Options of the asynchronous modes.
        eval: Evaluation on held-out tasks; None evaluates nothing.
        checkpoint: When checkpoints are written.
        hooks: Classes with callbacks (``trainer/run/hooks.py``) as ``path/to/file.py:Class``, or registered names; one,
            or several in calling order.
        loggers: Loggers beside the console and ``metrics.jsonl`` (docs/metrics.md).
        custom: Passed to extensions unread.
    """

    foreign_keys: ClassVar = _FOREIGN_KEYS

    name: RunName
    runs: ConfigPath = Field(default=Path("runs"), validate_default=True)
    seed: Annotated[int, Field(ge=0)] = 0
    steps: PositiveInt | None = None
    budget: BudgetConfig = BudgetConfig()
    tasks: TasksConfig | None = None
    max_prompt_tokens: PositiveInt | None = None
    shuffle: bool = True
    curriculum: CurriculumConfig | None = None
    policies: dict[PolicyName, PolicyConfig] = Field(examples=["main"])
    rollout: RolloutConfig
    replay: ReplayConfig = ReplayConfig()
    renderer: RendererConfig = RendererConfig()
    inference: InferenceConfig = InferenceConfig()
    placement: PlacementName = "local"
    ray: RayConfig = RayConfig()
    layout: Literal["separate", "colocated"] = "separate"
    algorithm: AlgorithmConfig = AlgorithmConfig()
    batch: BatchConfig = BatchConfig()
    mode: Mode = "sync"
    overlap: OverlapConfig = OverlapConfig()
    eval: TrainEvalConfig | None = None
    checkpoint: CheckpointConfig = CheckpointConfig()
    hooks: HookNames = ()
    loggers: LoggersConfig = Field(default_factory=list)
    custom: dict[str, Any] = Field(default_factory=dict)

    @property
    def replay_facts(self) -> RunFacts:
        """The facts outside its section that the replay buffer depends on."""
        sync, least = self.mode == "sync", self.rollout.min_members
        return RunFacts(self.batch.groups, sync=sync, min_members=least, tail=self.batch.tail)

    @model_validator(mode="after")
    def _whole_sections(self) -> Self:
        """Add the run's keys to the sections of policies: a dumped configuration holds whole sections."""
        if not self.policies:
            raise ValueError("policies holds nothing: give the policy to train, such as main, with its model.path")
        for name, policy in self.policies.items():
            if policy.algorithm is not None:
                policy.algorithm = merged_section(self.algorithm, policy.algorithm, f"policies.{name}.algorithm")
            if policy.inference is not None:
                policy.inference = merged_section(self.inference, policy.inference, f"policies.{name}.inference")
        return self

    @model_validator(mode="after")
    def _ends(self) -> Self:
        if self.steps is None and not self.budget.limits:
            raise ValueError(
                "neither steps nor a budget is given: give steps, or budget.trained_tokens, budget.sampled_tokens or "
                "budget.wall_time (such as 2h30m)"
            )
        best = self.checkpoint.best
        if best is not None and best.metric.startswith("eval/") and self.eval is None:
            raise ValueError(
                f"checkpoint.best.metric is {best.metric}, but nothing is evaluated: give eval, or name a logged "
                "metric such as reward/mean"
            )
        return self

    @model_validator(mode="after")
    def _overlaps_by_its_mode(self) -> Self:
        mode, overlap, batch = self.mode, self.overlap, self.batch
        if mode != "sync" and batch.over_sample > 1:
            raise ValueError(
                f"batch.over_sample is {batch.over_sample:g}, but an asynchronous mode always has further groups on "
                "their way, and carries them: remove it (replay.ahead says how many)"
            )
        if mode == "sync" and overlap != OverlapConfig():
            raise ValueError(
                "overlap is given, but mode is sync, where nothing overlaps: remove it, or set mode to colocate_async "
                "or separate_async"
            )
        if self.layout == "colocated" and mode != "sync" and overlap.sampling != "pause":
            remedy = "overlap.sampling to pause" if mode == "colocate_async" else "mode to sync"
            raise ValueError(
                f"layout is colocated, whose trainer and servers use their devices in turn, but mode is {mode} with "
                f"overlap.sampling {overlap.sampling}, where both compute at the same time: set {remedy}, or layout to "
                "separate"
            )
        if overlap.sampling == "pause" and mode != "colocate_async":
            raise ValueError(
                f"overlap.sampling is pause, but mode is {mode}, whose servers are never paused: remove it, or set "
                "mode to colocate_async"
            )
        if overlap.stream == 1:
            return self
        if mode != "separate_async":
            raise ValueError(f"overlap.stream is {overlap.stream}, but mode is {mode}: only separate_async streams")
        if overlap.stream > batch.groups:
            raise ValueError(
                f"overlap.stream is {overlap.stream}, but a batch has {batch.groups} groups (batch.groups)"
            )
        if any(algorithm.epochs * algorithm.minibatches > 1 for algorithm in self.algorithms.values()):
            raise ValueError(
                f"overlap.stream is {overlap.stream}, and each part is trained by exactly one optimizer step: set "
                "algorithm.epochs and algorithm.minibatches to 1"
            )
        return self

    @model_validator(mode="after")
    def _places(self) -> Self:
        search = None if self.eval is None else self.eval.search
        check_search(search, self.rollout)
        if self.placement == "local":
            if self.ray != RayConfig():
                raise ValueError(
                    "ray is given, but placement is local, where all runs on this machine: set placement to ray"
                )
            return self
        by_workers = {
            "rollout.remote": self.rollout.remote,
            "rollout.agent_loop_manager_class": self.rollout.agent_loop_manager_class,
            "eval.search": search,
        }
        for key, value in by_workers.items():
            if value is not None:
                raise ValueError(
                    f"{key} is given, but by placement ray workers of the cluster play the episodes: remove it, or "
                    "set placement to local"
                )
        return self

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        check_policies(self.policies, self.rollout)
        self._check_servers()
        for name in self.policies:
            alone = self.of_policy(name)
            check_algorithm(name, alone)
            if alone.policy.exact:
                check_exact(name, alone.policy)
            check_teacher_named(alone)
        return self

    def _check_servers(self) -> None:
        policy_by_url: dict[str, str] = {}
        for name in self.served:
            inference = self.of_policy(name).inference
            for url in inference.urls:
                if (other := policy_by_url.setdefault(url, name)) != name:
                    raise ValueError(
                        f"inference.url {url} would serve the policies {other} and {name}, whose weights differ: give "
                        f"each its own policies.{name}.inference.url"
                    )

    @property
    def policy(self) -> PolicyConfig:
        """The first trained policy; of the configuration of one policy, that one."""
        return next(iter(self.policies.values()))

    @property
    def algorithms(self) -> dict[str, AlgorithmConfig]:
        """The algorithm of each policy."""
        return {name: policy.algorithm or self.algorithm for name, policy in self.policies.items()}

    @property
    def served(self) -> dict[str, tuple[str, ...]]:
        """The policies that have servers, each with all policies that those sample for, itself first."""
        hosts = [name for name, policy in self.policies.items() if policy.served_by is None]
        return {
            host: (host, *(name for name, policy in self.policies.items() if policy.served_by == host))
            for host in hosts
        }

    @property
    def greedy_baseline(self) -> bool:
        """Whether a policy's algorithm reads the reward of a greedy rollout."""
        return any(algorithm.greedy_baseline for algorithm in self.algorithms.values())

    def of_policy(self, name: str) -> TrainConfig:
        """Return the configuration of one policy: ``policies`` holds it alone, and its sections are the run's."""
        policy = self.policies[name]
        serving = policy if policy.served_by is None else self.policies[policy.served_by]
        inference = serving.inference or self.inference
        sections = {
            "algorithm": policy.algorithm or self.algorithm,
            "inference": inference,
            "renderer": policy.renderer or self.renderer,
        }
        if inference.exact:
            # Its learner computes as its servers do.
            policy = policy.model_copy(update={"inference": inference})
        return self.model_copy(update={"policies": {name: policy}, **sections})

    @property
    def optimizer_steps(self) -> int:
        """Maximum optimizer steps of the run, for the learning-rate schedule."""
        return (self.steps - self.critic_alone if self.steps else UNKNOWN_STEPS) * self.updates_per_step

    @property
    def critic_alone(self) -> int:
        """Train steps in which only the critic learns."""
        return self.policy.critic.warmup_steps if self.policy.critic else 0

    @property
    def critic_steps(self) -> int:
        """Maximum optimizer steps of the critic, warm-up included."""
        return (self.steps or UNKNOWN_STEPS) * self.updates_per_step

    @property
    def updates_per_step(self) -> int:
        """Maximum optimizer steps of a train step."""
        return self.algorithm.epochs * self.algorithm.minibatches * self.overlap.stream
