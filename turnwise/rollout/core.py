"""The contracts between rollouts and training: who makes trajectories, and where they wait."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, TypeAlias
from urllib.parse import quote

from pydantic import BaseModel

from turnwise.errors import InferenceError
from turnwise.model.core import FrozenPolicy, LLMClient, Renderer
from turnwise.rollout.journal.journal import Journal
from turnwise.rollout.replay.strategies import GroupFacts
from turnwise.tasks.core import Task
from turnwise.trajectory import Trajectory, TrajectoryGroup

if TYPE_CHECKING:
    from turnwise.rollout.config import RolloutConfig

# Ids travel in HTTP headers, which take no line breaks; "~" separates the tag from the rest.
_ESCAPED = re.compile(r"[\x00-\x1f\x7f-\x9f%~]")


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """A task to roll out, with what decides its seeds.

    Attributes:
        task: The dataset row.
        epoch: How often the dataset was seen before; part of the reset seed.
        group_size: Members of the group.
        partition: ``train`` or ``val``.
        temperature: Overrides the configured one (evaluation: 0 is greedy).
        tag: Distinguishes groups of the same task and epoch (``greedy``, ``sampled``).
        greedy_baseline: Whether one more episode is rolled out at temperature 0, from the same reset. What it leaves
            are the group's ``baselines``, and no members.
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
        """Names what is asked for, the same in every process that works on a run: partition, task, epoch and tag."""
        task_id, tag = (
            _ESCAPED.sub(lambda found: quote(found.group(), safe="").replace("~", "%7E"), text)
            for text in (self.task.id, self.tag)
        )
        name = f"{self.partition}-{task_id}-e{self.epoch}"
        return f"{name}~{tag}" if tag else name


@dataclass(frozen=True, slots=True)
class RolloutParts:
    """What a run hands to its rollout manager, besides configuration, client and buffer.

    Attributes:
        renderer: Messages to ids and back.
        run_seed: Part of all seeds of training rollouts; evaluation uses 0.
        run_part: Part of all ids: a resumed run may roll out the same task again.
        write: Called with every trajectory, failed and cancelled ones included.
        rolling: Gives what is entered around the rollout of a group, by its id: for whoever notes what ran when.
        journal: Where finished members of groups to train are noted, and found again by a later process.
        recover: Awaited after an inference failure, before the episode is tried again. Raises when there is
            nothing left to wait for, which ends the run.
        custom: The free section of the configuration, untouched.
        frozen: Policies by name that sample and are not trained.
        notify: Told what a person should know while episodes run (runners that come and go).
        settings: The same section as the manager's ``custom_model``, where it names one.
    """

    renderer: Renderer
    run_seed: int = 0
    run_part: str = "0"
    write: Callable[[Trajectory], None] | None = None
    rolling: Callable[[str], AbstractContextManager[None]] | None = None
    journal: Journal | None = None
    recover: Callable[[InferenceError], Awaitable[None]] | None = None
    custom: Mapping[str, Any] = field(default_factory=dict)
    frozen: Mapping[str, FrozenPolicy] = field(default_factory=dict)
    settings: BaseModel | None = None
    notify: Callable[[str], None] | None = None


@dataclass(frozen=True, slots=True)
class BatchRef:
    """Names a batch that a buffer handed out.

    Attributes:
        id: Names it in ``fetch`` and ``release``.
        group_ids: The groups in it, in order.
        keys: What was asked for with each of them (:attr:`RolloutRequest.key`), in the same order; the group's id where
            nobody asked. A buffer that does not know them leaves this empty: groups are then told by their task.
    """

    id: int
    group_ids: tuple[str, ...]
    keys: tuple[str, ...] = ()


class ReplayBuffer(ABC):
    """Where finished groups wait until they are trained."""

    @abstractmethod
    async def put(self, group: TrajectoryGroup) -> None:
        """Take a finished group. Wakes those who wait in :meth:`sample`."""

    @abstractmethod
    async def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[BatchRef, dict[str, float]]:
        """Wait for and hand out ``batch_size`` groups of a partition.

        Args:
            global_steps: The train step that asks.
            partition_id: ``train`` or ``val``.
            batch_size: How many groups.

        Raises:
            TurnwiseError: What :meth:`fail` was given: no further group will come.
        """

    @abstractmethod
    async def fetch(self, ref: BatchRef, fields: Sequence[str] | None = None) -> list[TrajectoryGroup]:
        """Return the groups of a batch. ``fields`` may leave out parts that the caller does not read
        (``messages``).
        """

    @abstractmethod
    async def release(self, ref: BatchRef) -> None:
        """Forget a batch: it was trained."""

    @abstractmethod
    def fail(self, error: BaseException) -> None:
        """Make every waiting and later ``sample`` raise: the producer ended with this error."""

    def expect(self, request: RolloutRequest, version: int) -> bool:
        """Learn that a group was asked for, when the servers had this weight version: it is in flight until it is put.

        Returns:
            Whether it is here already (a process before this one finished it): then nobody need be asked for it.
        """
        del request, version
        return False

    def refill_by(self, refill: Callable[[int], bool]) -> None:
        """Set who asks for further groups to train. It is called with how many a waiting :meth:`sample` lacks that are
        neither here nor in flight (some were dropped), and returns whether it asked for them: else the batch is so much
        smaller.
        """
        del refill

    def drops_to(self, told: Callable[[GroupFacts, str], None]) -> None:
        """Set who is told of finished groups that will never be trained, and why. It is called in :meth:`sample`."""
        del told

    def reissued(self) -> None:
        """Learn that a group or an episode is played anew because whoever had it was lost. It is counted."""
        return

    def discard(self, keys: Collection[str], why: str) -> None:
        """Forget groups that were asked for: nobody waits for those in flight any more, and those that are here are
        dropped. A buffer that does not override this keeps what is here, for a later batch.
        """
        del keys, why


class RolloutManager(ABC):
    """Turns tasks into groups of trajectories in a buffer.

    One written elsewhere is named by ``rollout.agent_loop_manager_class``. It puts one group into the buffer for each
    request, with the request's task id and partition, in any order; ``buffer.fail`` says that no more will come.

    Attributes:
        custom_model: The pydantic model of the configuration's ``custom`` section, or None: it is checked by it before
            anything starts, and handed over as ``parts.settings``.
    """

    custom_model: ClassVar[type[BaseModel] | None] = None

    @classmethod
    @abstractmethod
    async def create(
        cls, config: RolloutConfig, client: LLMClient, buffer: ReplayBuffer | None, parts: RolloutParts
    ) -> Self:
        """Make a manager. Without a buffer nothing can be generated into one."""

    @abstractmethod
    def generate_sequences(self, requests: Sequence[RolloutRequest]) -> None:
        """Start rolling out and return at once. Finished groups arrive in the buffer."""

    async def cancel(self, keys: Collection[str]) -> frozenset[str]:
        """End groups before they are finished: their episodes end with ``StopReason.CANCELLED``, are written, and never
        arrive in the buffer.

        Args:
            keys: What they were asked for by (:attr:`RolloutRequest.key`). Those that are finished or unknown are left
                alone.

        Returns:
            The keys of the groups that were ended. A manager that does not override this ends none: all of them arrive
            sooner or later, and wait in the buffer for a batch that may take them.
        """
        del keys
        return frozenset()

    @abstractmethod
    async def close(self) -> None:
        """Cancel what runs and release everything."""


OnGroup: TypeAlias = Callable[[TrajectoryGroup], None]


class Rollouts(Protocol):
    """What training and evaluation ask of a rollout manager: the contract, and the groups of an evaluation."""

    @property
    def config(self) -> RolloutConfig:
        """What is rolled out, and how."""

    @property
    def renderer(self) -> Renderer:
        """Messages to ids and back."""

    def generate_sequences(self, requests: Sequence[RolloutRequest]) -> None:
        """Start rolling out; finished groups arrive in the buffer."""

    async def gather(
        self, requests: Sequence[RolloutRequest], on_group: OnGroup | None = None
    ) -> list[TrajectoryGroup]:
        """Roll out and return the groups in the order of the requests."""

    async def cancel(self, keys: Collection[str]) -> frozenset[str]:
        """End groups before they are finished; return which were."""

    async def close(self) -> None:
        """Cancel what runs and release everything."""
