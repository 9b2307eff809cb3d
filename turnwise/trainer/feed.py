"""Which groups have been asked for and not been trained yet.

Owns: :class:`Feed`: between the tasks of a run and its rollout manager, so that a run always knows what is on its way,
and one that goes on asks for that again. Refuses: which finished groups are trained (``rollout/strategies.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from turnwise.rollout.core import ReplayBuffer, RolloutRequest
from turnwise.rollout.managers import Rollouts
from turnwise.rollout.strategies import GroupFacts
from turnwise.trainer.config import TrainConfig
from turnwise.trainer.data import TaskStream
from turnwise.trajectory import TrajectoryGroup


class Feed:
    """Takes tasks, has them rolled out, and remembers them until they are trained.

    Args:
        config: How many members a group has, and whether it has a greedy baseline.
        tasks: What is trained on, in order.
        manager: Who makes groups of tasks.
        buffer: Where they wait.
        version: Returns the weight version of the servers.

    Attributes:
        outstanding: What was asked for and is neither trained nor dropped, in the order in which it was asked for.
    """

    def __init__(
        self,
        config: TrainConfig,
        tasks: TaskStream,
        manager: Rollouts,
        buffer: ReplayBuffer,
        version: Callable[[], int],
    ) -> None:
        self._config = config
        self._tasks = tasks
        self._manager = manager
        self._buffer = buffer
        self._version = version
        self.outstanding: dict[str, RolloutRequest] = {}
        buffer.refill_by(lambda missing: self.issue(self.next(missing)))
        buffer.drops_to(self._dropped)

    def next(self, groups: int) -> list[RolloutRequest]:
        """Return the requests of the next tasks; :meth:`issue` has them rolled out.

        Raises:
            TaskError: A row that was reached cannot be read.
        """
        size, greedy = self._config.rollout.group_size, self._config.algorithm.greedy_baseline
        return self._tasks.take(groups, size, greedy_baseline=greedy)

    def issue(self, requests: Sequence[RolloutRequest]) -> None:
        """Have tasks rolled out; those whose groups an earlier process finished are not asked for again."""
        for request in requests:
            self.outstanding[request.key] = request
        version = self._version()
        asked = [each for each in requests if not self._buffer.expect(each, version)]
        if asked:
            self._manager.generate_sequences(asked)

    def top_up(self, groups: int) -> None:
        """Ask for as many groups as are missing to so many outstanding ones."""
        missing = groups - len(self.outstanding)
        if missing > 0:
            self.issue(self.next(missing))

    def done(self, groups: Iterable[TrajectoryGroup]) -> None:
        """Forget what was asked for: these groups are trained, or will never be."""
        for group in groups:
            found = next((key for key, each in self.outstanding.items() if each.task.id == group.task_id), None)
            if found is not None:
                del self.outstanding[found]

    def _dropped(self, facts: GroupFacts, why: str) -> None:
        del why
        self.outstanding.pop(facts.key, None)
