"""The order of tasks, and the groups that were requested and not yet trained."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from turnwise.errors import CheckpointError, TaskError
from turnwise.model.core import Renderer
from turnwise.rollout.core import BatchRef, GroupFacts, ReplayBuffer, RolloutRequest
from turnwise.rollout.preflight import PromptLimit, check_env_and_agent, check_specs, check_tools_shown, task_source
from turnwise.rollout.replay.config import allowed_staleness
from turnwise.tasks.config import CurriculumConfig
from turnwise.tasks.core import Task
from turnwise.tasks.mix import open_order
from turnwise.tasks.order import TaskOrder
from turnwise.tasks.reader import SourceReport
from turnwise.trainer.config.train import TrainConfig
from turnwise.trainer.run.checkpoint import TrainerState
from turnwise.trajectory import Trajectory, TrajectoryGroup
from turnwise.types import StopReason

if TYPE_CHECKING:
    from turnwise.rollout.managers import Rollouts


def task_metrics(order: TaskOrder, curriculum: CurriculumConfig | None) -> dict[str, float]:
    """Return the number of skipped rows, if any, and the metrics of a curriculum."""
    left_out = sum(order.dropped().values())
    figures = {} if curriculum is None else curriculum.figures(order.rates())
    if curriculum is not None and curriculum.by is not None:
        rates = order.rates_by_value()
        figures |= {f"curriculum/rate/{value.replace('/', '_')}": rate for value, rate in rates.items()}
    return {"tasks/left_out": float(left_out), **figures} if left_out else figures


async def open_tasks(
    config: TrainConfig, renderer: Renderer, state: TrainerState
) -> tuple[TaskOrder, list[SourceReport]]:
    """Open the tasks of a run at its state; also return reports on their sources.

    Raises:
        ConfigError: No tasks are configured, or the chat template does not render their environment's tools.
        RegistryError: No such environment or agent.
        TaskError: They cannot be loaded, there are none, the state does not match them, or they name an environment or
            agent that cannot be created.
    """
    check_env_and_agent(config.rollout)
    order, reports = open_order(
        task_source(config.tasks, config.rollout, "tasks"),
        seed=config.seed,
        shuffle=config.shuffle,
        keep=await PromptLimit.create(config.max_prompt_tokens, renderer, config.rollout),
        state=(state.tasks or {"epoch": state.epoch, "position": state.position}) if state.step else None,
        curriculum=config.curriculum,
    )
    await check_specs(order.ahead(), config.rollout)
    await check_tools_shown(order.ahead(), renderer, config.rollout)
    return order, reports


def next_requests(
    order: TaskOrder, groups: int, group_size: int, *, greedy_baseline: bool = False
) -> list[RolloutRequest]:
    """Return the requests of the next tasks. Raises TaskError where a row cannot be read."""
    rows = [order.next() for _ in range(groups)]
    return [RolloutRequest(task, epoch, group_size, greedy_baseline=greedy_baseline) for task, epoch in rows]


SURPLUS = "surplus"
"""Why a finished group is dropped that its step did not take and a later one could not train."""


@dataclass(frozen=True, slots=True)
class RequestedGroup:
    """A requested group.

    Attributes:
        request: The request.
        version: Weight version of the servers at that time, a lower bound of its tokens' versions. Decisions by it are
            conservative: a group waiting for ``rollout.concurrency`` counts as stale as if it had been sampled.
        by_caller: Whether the caller chose the task, so that it is not requested again.
    """

    request: RolloutRequest
    version: int
    by_caller: bool = False


class TaskScheduler:
    """Requests rollouts of tasks, and tracks them until they are trained.

    Attributes:
        outstanding: Groups that are neither trained nor dropped, in request order.
    """

    def __init__(
        self, config: TrainConfig, tasks: TaskOrder, manager: Rollouts, buffer: ReplayBuffer, version: Callable[[], int]
    ) -> None:
        self._config = config
        self._tasks = tasks
        self._manager = manager
        self._buffer = buffer
        self._version = version
        self._restored: deque[RolloutRequest] = deque()
        self._by_caller = False
        self._refilled = 0
        self._group_size = config.rollout.group_size
        # Of the groups that are outstanding: tokens of the episodes that ended.
        self._sampled: Counter[str] = Counter()
        self._wasted: Counter[str] = Counter()
        # Groups passed to steps since the last call of :meth:`mark_trained`.
        self._in_training: dict[str, RequestedGroup] = {}
        # Requeued groups: a curriculum has learned from them.
        self._learned: set[str] = set()
        self.outstanding: dict[str, RequestedGroup] = {}
        buffer.refill_by(self._refill)
        buffer.drops_to(self._dropped)

    def next(self, groups: int, *, group_size: int | None = None) -> list[RolloutRequest]:
        """Return the requests of the next tasks, outstanding ones of an earlier process first; see :meth:`issue`.

        Raises:
            TaskError: A row cannot be read.
        """
        size, greedy = group_size or self._config.rollout.group_size, self._config.greedy_baseline
        restored = [self._restored.popleft() for _ in range(min(groups, len(self._restored)))]
        return [*restored, *next_requests(self._tasks, groups - len(restored), size, greedy_baseline=greedy)]

    def issue(self, requests: Sequence[RolloutRequest], *, by_caller: bool = False) -> None:
        """Request rollouts, except of groups that an earlier process finished.

        If the caller chose the tasks (``by_caller``), dropped groups are not replaced, and not checkpointed.
        """
        version = self._version()
        self._by_caller = by_caller
        for request in requests:
            self.outstanding[request.key] = RequestedGroup(request, version, by_caller)
            self._group_size = request.group_size
        missing = [request for request in requests if not self._buffer.expect(request, version)]
        if missing:
            self._manager.generate_sequences(missing)

    def top_up(self, groups: int, *, group_size: int | None = None) -> None:
        """Request groups until ``groups`` are outstanding."""
        self._by_caller = False
        missing = groups - len(self.outstanding)
        if missing > 0:
            self.issue(self.next(missing, group_size=group_size))

    def request_step(self, *, group_size: int | None = None) -> None:
        """Request the groups of a ``sync`` step, less those in flight."""
        self.top_up(self._config.batch.starts(self._config.batch.groups), group_size=group_size)

    async def next_batch(self, step: int, groups: int) -> tuple[BatchRef, dict[str, float]]:
        """Return the next groups of a train step; see :meth:`~turnwise.rollout.core.ReplayBuffer.next_batch`."""
        return await self._buffer.next_batch(step, "train", groups)

    async def settle_leftovers(self, step: int) -> dict[str, float]:
        """Carry or cancel the groups that a step did not wait for; return metrics.

        They are carried where ``replay`` allows groups of older weights. Groups of the caller's tasks, and those too
        stale for the next step, are cancelled in either case. Metrics are
        ``straggler/carried`` and ``straggler/cancelled`` (groups), and since the last call
        ``rollout/cancelled_episodes`` and ``rollout/wasted_tokens`` (of cancelled or dropped groups), without zeros.

        Raises:
            TurnwiseError: The rollout manager failed to cancel.
        """
        sync, batch = self._config.mode == "sync", self._config.batch
        # The limit of refills holds for a step, however many parts it has.
        self._refilled = 0
        metrics: dict[str, float] = {}
        if self.outstanding and (sync or batch.tail is not None):
            bound = allowed_staleness(self._config.replay, sync=sync)
            late = {
                key
                for key, group in self.outstanding.items()
                if group.by_caller or (bound is not None and step - group.version > bound)
            }
            cancelled = await self._manager.cancel(set(self.outstanding) if bound == 0 else late)
            # In an asynchronous mode a finished group may have started late: the strategy decides.
            gone = cancelled | late if sync else cancelled
            self._buffer.discard(gone, SURPLUS)
            for key in gone:
                self._wasted["rollout/wasted_tokens"] += self._sampled.pop(key, 0)
                self.outstanding.pop(key, None)
            metrics = {"straggler/carried": float(len(self.outstanding)), "straggler/cancelled": float(len(cancelled))}
        metrics |= {name: float(value) for name, value in self._wasted.items()}
        self._wasted.clear()
        return {name: value for name, value in metrics.items() if value}

    def count_episode(self, trajectory: Trajectory) -> None:
        """Count the sampled tokens of an episode, wasted if its group is never trained."""
        if trajectory.partition != "train":
            return
        if trajectory.stop_reason is StopReason.CANCELLED:
            self._wasted["rollout/cancelled_episodes"] += trajectory.id == trajectory.episode_id
            self._wasted["rollout/wasted_tokens"] += trajectory.sampled_tokens
        elif (key := _key_of(trajectory)) in self.outstanding:
            self._sampled[key] += trajectory.sampled_tokens

    def hand_out(self, ref: BatchRef, groups: Sequence[TrajectoryGroup]) -> None:
        """Remove the requests of a batch; a run resumed from an earlier checkpoint issues them again."""
        for number, group in enumerate(groups):
            # A group that is trained again carries no new information about its task.
            if not ref.keys or ref.keys[number] in self.outstanding.keys() - self._learned:
                self._tasks.learn(
                    group.task_id, [trajectory.reward for trajectory in group.trajectories if trajectory.error is None]
                )
        if ref.keys:
            for key in ref.keys:
                self._move_to_training(key)
            return
        for group in groups:
            tasks = ((key, requested.request.task.id) for key, requested in self.outstanding.items())
            match = next((key for key, task_id in tasks if task_id == group.task_id), None)
            if match is not None:
                self._move_to_training(match)

    def mark_trained(self) -> None:
        """Mark all groups passed to steps as trained."""
        self._in_training.clear()

    def requeue(self, keys: Collection[str]) -> None:
        """Requeue groups that a step received and did not train.

        A resumed run requests them first, and finds them finished. The curriculum does not see them again.
        """
        requeued = {key: group for key, group in self._in_training.items() if key in keys}
        self.outstanding = requeued | self.outstanding
        self._learned |= requeued.keys()

    def _move_to_training(self, key: str) -> None:
        if (group := self.outstanding.pop(key, None)) is not None:
            self._in_training[key] = group
        self._sampled.pop(key, None)
        self._learned.discard(key)

    def state(self) -> list[dict[str, Any]]:
        """Return the groups in flight, as JSON values.

        Must be saved with the task order's state of the same moment: otherwise groups are lost or requested twice.
        """
        requests = [group.request for group in self.outstanding.values() if not group.by_caller]
        return [
            {**_record(request), "learned": request.key in self._learned} for request in (*requests, *self._restored)
        ]

    def restore(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Restore a state: :meth:`next` returns its groups before further tasks.

        Raises:
            CheckpointError: The state is malformed.
        """
        self._restored = deque(_request(record) for record in state)
        self._learned = {
            request.key for request, record in zip(self._restored, state, strict=True) if record.get("learned")
        }

    def _dropped(self, facts: GroupFacts, why: str) -> None:
        if facts.key not in self._learned:
            self._tasks.learn(facts.task_id, facts.rewards)
        self._learned.discard(facts.key)
        # What settles the rest of a step has counted those that it discards.
        if why != SURPLUS:
            self._wasted["rollout/wasted_tokens"] += facts.sampled_tokens
            self._sampled.pop(facts.key, None)
        self.outstanding.pop(facts.key, None)

    def _refill(self, missing: int) -> bool:
        filtering = self._config.replay.filter_groups
        if filtering is not None:
            self._refilled += missing
            if self._refilled > filtering.max_refills * self._config.batch.groups:
                return False
        if not self._by_caller:
            self.issue(self.next(missing, group_size=self._group_size))
        return not self._by_caller


def _key_of(trajectory: Trajectory) -> str:
    """Return the request key of an episode of the built-in rollout manager: ``PART-KEY/MEMBER.ATTEMPT``."""
    return trajectory.episode_id.rpartition("/")[0].partition("-")[2]


def _record(request: RolloutRequest) -> dict[str, Any]:
    fields = {name: value for name, value in asdict(replace(request, task=_NO_TASK)).items() if name != "task"}
    return {"task": request.task.to_record(), "source": request.task.source, **fields}


def _request(record: Mapping[str, Any]) -> RolloutRequest:
    try:
        fields = {name: value for name, value in record.items() if name not in ("task", "source", "learned")}
        task = replace(Task.from_record(record["task"]), source=record["source"])
        return RolloutRequest(task, **fields)
    except (KeyError, TypeError, AttributeError, TaskError) as error:
        raise CheckpointError(f"a group in flight is malformed in the checkpoint: {error!r}") from error


_NO_TASK = Task("", "")
