"""The contracts between rollouts and training: RolloutManager and ReplayBuffer."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, TypeAlias
from urllib.parse import quote

from pydantic import BaseModel

from turnwise.agents.roles import MAIN
from turnwise.errors import InferenceError
from turnwise.model.core import LLMClient, Renderer, ServedPolicy
from turnwise.tasks.core import Task
from turnwise.trajectory import Trajectory, TrajectoryGroup

if TYPE_CHECKING:
    from turnwise.rollout.branching.search import SearchConfig
    from turnwise.rollout.config import RolloutConfig

# Ids travel in HTTP headers, which take no line breaks; "~" separates the tag from the rest.
_ESCAPED = re.compile(r"[\x00-\x1f\x7f-\x9f%~]")


CLOSE_TIMEOUT_S = 30.0
"""Seconds for closing an environment."""
REISSUES = 16
"""Retries of an episode after the loss of its worker or runner, before that counts as a failure."""
MAX_FAILED_GROUPS = 16
"""Groups in a row without any member left that end a run."""
MAX_LOST_THREADS = 16
"""Threads of tools and environments lost to time-outs that a run bears."""


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """A task to roll out, with everything that determines its seeds.

    Attributes:
        task: The dataset row.
        epoch: Earlier passes over the dataset; part of the reset seed.
        group_size: Members of the group.
        partition: ``train`` or ``val``.
        temperature: Overrides the configured one (evaluation: 0 is greedy).
        tag: Distinguishes groups of the same task and epoch (``greedy``, ``sampled``).
        greedy_baseline: Whether to add an episode at temperature 0 from the same reset; its trajectories are the
            group's ``baselines``, not members.
    """

    task: Task
    epoch: int = 0
    group_size: int = 1
    partition: str = "train"
    temperature: float | None = None
    tag: str = ""
    greedy_baseline: bool = False

    @property
    def key(self) -> str:
        """Key of the request in all processes of a run: partition, task, epoch and tag."""
        task_id, tag = (
            _ESCAPED.sub(lambda match: quote(match.group(), safe="").replace("~", "%7E"), text)
            for text in (self.task.id, self.tag)
        )
        name = f"{self.partition}-{task_id}-e{self.epoch}"
        return f"{name}~{tag}" if tag else name


@dataclass(frozen=True, slots=True)
class EpisodeSpec:
    """An episode to run.

    Attributes:
        group_id: The group that the trajectories are compared within.
        partition: ``train`` or ``val``.
        env_seed: Seed of the reset, equal for all members of a group.
        sampling_seed: Seed of the sampling, different for each member.
        baseline: Whether it is the group's greedy baseline, not a member.
        episodes: Prefix of episode ids, where not the group's id (an earlier process began the group).
    """

    task: Task
    group_id: str
    member: int = 0
    attempt: int = 0
    partition: str = "train"
    env_seed: int = 0
    sampling_seed: int = 0
    temperature: float | None = None
    baseline: bool = False
    episodes: str = ""

    @property
    def episode_id(self) -> str:
        """Unique in the run: process, group, member and attempt."""
        return f"{self.episodes or self.group_id}/{self.member}.{self.attempt}"


@dataclass(slots=True)
class EpisodeOutcome:
    """Result of an episode."""

    trajectories: list[Trajectory]
    error: Exception | None = None


class EpisodePlayer(Protocol):
    """Plays episodes, in this process or on the workers of a cluster."""

    @property
    def lost_threads(self) -> int:
        """Threads elsewhere that tools have blocked for good."""

    async def run(self, spec: EpisodeSpec) -> EpisodeOutcome:
        """Run one episode; its trajectories are written, also where it is cancelled."""

    async def close(self) -> None:
        """Release everything."""


class Workers(Protocol):
    """The rollout workers of a run, on other nodes."""

    async def open(self, config: RolloutConfig, write: Callable[[Trajectory], None] | None) -> EpisodePlayer:
        """Start them; ``write`` is called with every trajectory. Raises TurnwiseError."""


@dataclass(frozen=True, slots=True)
class RestoredGroup:
    """Finished parts of a group from earlier processes.

    Attributes:
        group_id: The group; its other members join it.
        members: Trajectories of the finished members, by number.
        complete: Whether all of its members finished.
    """

    group_id: str
    members: dict[int, list[Trajectory]]
    complete: bool


class MemberJournal(Protocol):
    """Records finished members of groups, and restores those of earlier processes."""

    def restore(self, key: str) -> RestoredGroup | None:
        """Return what earlier processes finished of a requested group."""

    def member(
        self, key: str, group_id: str, member: int, trajectories: Sequence[Trajectory], *, pending: bool = False
    ) -> None:
        """Record a member that finished without an error; ``pending``: its trajectories wait for a group reward."""


class TrainJournal(MemberJournal, Protocol):
    """The journal of groups to train.

    Attributes:
        unclaimed: Ids of trajectories that a custom manager wrote and put into no group in time.
    """

    unclaimed: set[str]


@dataclass(frozen=True, slots=True)
class RolloutParts:
    """Further parts that a run gives its rollout manager.

    Attributes:
        renderer: Messages to ids and back.
        run_seed: Part of all seeds of training rollouts; evaluation uses 0.
        run_part: Part of all ids: a resumed run may roll out the same task again.
        write: Called with every trajectory, failed and cancelled ones included.
        rolling: Returns a context manager entered around each group's rollout, by its id, for the timeline.
        journal: Journal of finished members of groups to train.
        finished: Journal of finished members of held-out groups, for an evaluation that can be resumed.
        recover: Awaited after an inference failure, before the retry. Raises to end the run.
        custom: The raw ``custom`` section of the configuration.
        policy: Name of the policy that client and renderer belong to.
        policies: Further policies by name; those of ``rollout.frozen`` are never trained.
        notify: Called with messages for the user (runners that come and go).
        workers: Starts the rollout workers that play the episodes; None plays them in this process.
        settings: The ``custom`` section as the manager's ``custom_model``, if it has one.
        search: How sampled episodes of evaluations are searched; None: none is searched.
        slots: Held by every episode that runs; None: ``rollout.concurrency`` of them.
    """

    renderer: Renderer
    run_seed: int = 0
    run_part: str = "0"
    write: Callable[[Trajectory], None] | None = None
    rolling: Callable[[str], AbstractContextManager[None]] | None = None
    journal: TrainJournal | None = None
    finished: MemberJournal | None = None
    recover: Callable[[InferenceError], Awaitable[None]] | None = None
    custom: Mapping[str, Any] = field(default_factory=dict)
    policy: str = MAIN
    policies: Mapping[str, ServedPolicy] = field(default_factory=dict)
    settings: BaseModel | None = None
    notify: Callable[[str], None] | None = None
    workers: Workers | None = None
    search: SearchConfig | None = None
    slots: AbstractAsyncContextManager[None] | None = None


@dataclass(frozen=True, slots=True)
class BatchRef:
    """Reference to a batch that a buffer handed out.

    Attributes:
        id: Id for ``fetch`` and ``release``.
        group_ids: The groups in it, in order.
        keys: Their request keys (:attr:`RolloutRequest.key`), in the same order; the group's id where there was no
            request. Empty where the buffer does not know them: groups are then matched by task.
    """

    id: int
    group_ids: tuple[str, ...]
    keys: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """Facts of a finished group without its tokens.

    Attributes:
        id: The group's id.
        key: Its request key (:attr:`RolloutRequest.key`), or its id without a request.
        task_id: Its task.
        partition: ``train`` or ``val``.
        arrived: Index in the order of arrival, from 0.
        oldest_version: The oldest weights that sampled a token of it, else those of the servers at the request; None
            without a request.
        rewards: Of its members, failed ones left out.
        failed: Members that ended in an error.
        sampled_tokens: Of all its members.
        spread: Range of the compared members' values by reward; ``reward`` is their sum.
    """

    id: str
    key: str
    task_id: str
    partition: str
    arrived: int
    oldest_version: int | None
    rewards: tuple[float, ...]
    failed: int = 0
    sampled_tokens: int = 0
    spread: Mapping[str, float] = field(default_factory=dict)

    def staleness(self, step: int) -> int:
        """Return the train steps between the oldest sampling weights and those of ``step``.

        Versions lost in a crash and not reached again count as current.
        """
        return 0 if self.oldest_version is None else max(0, step - 1 - self.oldest_version)


class ReplayBuffer(ABC):
    """Holds finished groups until they are trained."""

    @abstractmethod
    async def put(self, group: TrajectoryGroup) -> None:
        """Store a finished group and wake waiting :meth:`sample` calls."""

    @abstractmethod
    async def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[BatchRef, dict[str, float]]:
        """Wait for ``batch_size`` groups of a partition and hand them out.

        Args:
            global_steps: The requesting train step.
            partition_id: ``train`` or ``val``.
            batch_size: Number of groups.

        Raises:
            TurnwiseError: The error of :meth:`fail`: no further group will come.
        """

    async def next_batch(
        self, global_steps: int, partition_id: str, batch_size: int
    ) -> tuple[BatchRef, dict[str, float]]:
        """Return the batch of :meth:`sample`, which users may override."""
        return await self.sample(global_steps, partition_id, batch_size)

    @abstractmethod
    async def fetch(self, ref: BatchRef, fields: Sequence[str] | None = None) -> list[TrajectoryGroup]:
        """Return the groups of a batch. ``fields`` may leave out parts that are not read (``messages``)."""

    @abstractmethod
    async def release(self, ref: BatchRef) -> None:
        """Forget a batch after training."""

    @abstractmethod
    def fail(self, error: BaseException) -> None:
        """Make every waiting and later ``sample`` raise this error of the producer."""

    async def __aenter__(self) -> Self:
        """Start what the buffer needs outside of this process. Raises TrainError where it cannot be had."""
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """End it."""
        return

    def expect(self, request: RolloutRequest, version: int) -> bool:
        """Note a request as in flight until its group is put; ``version`` is the servers' weight version.

        Returns:
            Whether an earlier process finished the group already, so that no rollout is needed.
        """
        del request, version
        return False

    def refill_by(self, refill: Callable[[int], bool]) -> None:
        """Set the callback that requests further groups to train, where drops left a waiting :meth:`sample` short.

        It gets the number lacking and returns whether it requested them; otherwise the batch is smaller.
        """
        del refill

    def drops_to(self, callback: Callable[[GroupFacts, str], None]) -> None:
        """Set the callback for finished groups that will never be trained, and why."""
        del callback

    def reissued(self) -> None:
        """Count a group or an episode that is rolled out again after a loss."""
        return

    def discard(self, keys: Collection[str], why: str) -> None:
        """Forget requests in flight; finished groups are dropped, or by default stay for a later batch."""
        del keys, why


class RolloutManager(ABC):
    """Turns tasks into groups of trajectories in a buffer.

    A custom one is named by ``rollout.agent_loop_manager_class``. It puts one group for each request, with the
    request's task id and partition, in any order; ``buffer.fail`` ends the production.

    Attributes:
        custom_model: Pydantic model of the configuration's ``custom`` section, or None. Validated before the start and
            passed as ``parts.settings``.
    """

    custom_model: ClassVar[type[BaseModel] | None] = None

    @classmethod
    @abstractmethod
    async def create(
        cls, config: RolloutConfig, client: LLMClient, buffer: ReplayBuffer | None, parts: RolloutParts
    ) -> Self:
        """Make a manager. Without a buffer ``generate_sequences`` is unavailable."""

    @abstractmethod
    def generate_sequences(self, requests: Sequence[RolloutRequest]) -> None:
        """Start rolling out and return at once. Finished groups arrive in the buffer."""

    async def cancel(self, keys: Collection[str]) -> frozenset[str]:
        """Cancel unfinished groups: their episodes end with ``StopReason.CANCELLED``, are written, and never reach the
        buffer.

        Args:
            keys: Request keys (:attr:`RolloutRequest.key`); finished or unknown ones are ignored.

        Returns:
            The keys of the cancelled groups. By default none: all groups arrive and wait in the buffer.
        """
        del keys
        return frozenset()

    @abstractmethod
    async def close(self) -> None:
        """Cancel running episodes and release everything."""


OnGroup: TypeAlias = Callable[[TrajectoryGroup], None]
