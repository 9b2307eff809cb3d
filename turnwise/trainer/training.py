"""Custom algorithms: what a user's training function works with."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Self

from turnwise.errors import ConfigError, TrainError, shown
from turnwise.evaluation.metrics import EvalResult
from turnwise.rollout.core import RolloutRequest
from turnwise.tasks.core import Task
from turnwise.trainer.algorithms.advantages import ADVANTAGES
from turnwise.trainer.algorithms.config import AlgorithmConfig
from turnwise.trainer.algorithms.gae import CRITIC_ADVANTAGES
from turnwise.trainer.algorithms.losses import LOSSES
from turnwise.trainer.algorithms.registry import nearest
from turnwise.trainer.config.train import TrainConfig
from turnwise.trainer.loops.modes import train_as_configured
from turnwise.trainer.loops.steps import Batch, finish_step, roll_out, train_on
from turnwise.trainer.run.budget import Budget
from turnwise.trainer.run.run import TrainRun
from turnwise.trajectory import TrajectoryGroup


class Training:
    """A running training run.

    The configured loop is ``while not training.finished: await training.learn(await training.rollouts())``.

    Attributes:
        run: All parts of the run.
    """

    def __init__(self, run: TrainRun) -> None:
        self.run = run
        self._open: Batch | None = None
        self._asked = 0

    @property
    def config(self) -> TrainConfig:
        """The run's configuration."""
        return self.run.config

    @property
    def step(self) -> int:
        """Train steps done, those before a resume included."""
        return self.run.state.step

    @property
    def budget(self) -> Budget:
        """Limits and amounts spent."""
        return self.run.budget

    @property
    def finished(self) -> bool:
        """Whether the budget is spent."""
        return self.run.ended is not None

    @property
    def train_tasks(self) -> list[Task]:
        """The training tasks; of a streamed source those in memory."""
        return self.run.tasks.ahead()

    @property
    def val_tasks(self) -> list[Task]:
        """The held-out tasks; empty without evaluation."""
        return list(self.run.eval_tasks)

    async def loop(self) -> None:
        """Run the configured loop until the budget is spent."""
        await train_as_configured(self.run)

    async def rollouts(
        self, tasks: Sequence[Task] | None = None, *, group_size: int | None = None
    ) -> list[TrajectoryGroup]:
        """Roll out tasks, and return the finished groups, sorted by id.

        Args:
            tasks: Tasks to roll out, one group each; dropped groups (docs/training.md) are missing from the result. By
                default the next ``batch.groups`` ones of the run, where dropped groups are replaced.
            group_size: Episodes per group; by default ``rollout.group_size``.

        Raises:
            TrainError: There is no task.
            InferenceError: A server died more often than ``inference.max_restarts``.
        """
        size = group_size or self.config.rollout.group_size
        requests = None
        if tasks is not None:
            # The ids contain the number of the call: the same task may be requested again in a step.
            self._asked += 1
            tag = f"step{self.step + 1}.{self._asked}"
            greedy = self.config.greedy_baseline
            epoch = self.run.tasks.epoch
            requests = [RolloutRequest(task, epoch, size, tag=tag, greedy_baseline=greedy) for task in tasks]
            if not requests:
                raise TrainError(f"step {self.step + 1}: rollouts() was given no task")
        earlier, self._open = self._open, await roll_out(self.run, requests, group_size=size)
        groups = list(self._open.groups)
        if earlier is not None:
            # One step learns from both: its rollout began when the first one did.
            self._open = replace(self._open, started=earlier.started)
        return groups

    async def learn(self, groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
        """Train one step on groups: advantages, updates, weight sync, metrics, and evaluation and checkpoint where due.

        Args:
            groups: Results of :meth:`rollouts`, whole, in part or combined. Rewards may be changed
                (``trajectory.rewards``; the files keep the original ones); tokens may not.

        Returns:
            The metrics of the step (docs/metrics.md).

        Raises:
            TrainError: There is no group, or every episode ended in an error.
        """
        if not groups:
            raise TrainError(f"step {self.step + 1}: learn() was given no group: roll out again, or return")
        batch, self._open = self._open, None
        if batch is None:
            raise TrainError("learn() comes after rollouts(): nothing was rolled out since the last step")
        metrics = await train_on(self.run, replace(batch, groups=list(groups)))
        # Counted per step, so that a resumed run requests under the same ids as an uninterrupted one.
        self._asked = 0
        await finish_step(self.run)
        return metrics

    async def evaluate(self, label: str | None = None) -> EvalResult | None:
        """Evaluate on the held-out tasks and log the figures; None where there are none."""
        return await self.run.evaluate(label or f"step-{self.step}-own")

    def save(self) -> None:
        """Write a checkpoint of the last finished step."""
        self.run.save()


FORMULA_KEYS: Final = (
    "advantage", "advantage_options", "norm_by_std", "std_eps", "drop_zero_variance", "loss", "loss_options",
    "clip_low", "clip_high", "dual_clip", "loss_aggregation", "loss_scale",
)  # fmt: skip
"""Keys of ``algorithm`` that a name sets anew: those of another formula would be wrong."""

_PPO: Final = {"advantage": "gae", "drop_zero_variance": False}
_KEYS: Final[dict[str, dict[str, Any]]] = {
    "ppo": _PPO,
    "gae": _PPO,
    "dr_grpo": {"advantage": "dr_grpo", "loss_aggregation": "seq_mean_token_sum_norm"},
    "reinforce_plus_plus": {"advantage": "reinforce_plus_plus", "drop_zero_variance": False},
    "gpg": {"advantage": "gpg", "loss": "gpg", "drop_zero_variance": False},
}
"""The names whose formula is more than one key."""

_ARGUMENTS: Final = ("training", "train_dataset", "val_dataset")


class Algorithm:
    """Keys of a configuration, and a training loop.

    Keywords override keys of the ``algorithm`` section: ``Algorithm(advantage="rloo", minibatches=4)``; values may be
    functions. A subclass may override :meth:`run` and the constructor.

    Attributes:
        settings: Keys of the ``algorithm`` section.
        sections: Default keys of other sections, by dotted path; the configuration overrides them.
        replaces: Keys of the ``algorithm`` section to reset to their defaults first.
    """

    settings: dict[str, Any]
    sections: dict[str, Any]
    replaces: tuple[str, ...]

    def __new__(cls, *_: Any, **__: Any) -> Self:
        """Create an algorithm without keys, so that a subclass constructor need not call ``super().__init__``."""
        made = super().__new__(cls)
        made.settings, made.sections, made.replaces = {}, {}, ()
        return made

    def __init__(self, **settings: Any) -> None:
        self.settings = settings

    async def run(self, training: Training) -> None:
        """Train until the budget is spent.

        An override receives arguments by parameter name: ``training``
        (:class:`~turnwise.trainer.training.Training`), ``train_dataset`` and ``val_dataset`` (Tasks). The final
        evaluation and checkpoint follow when it returns.
        """
        await training.loop()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.settings.items())})"


def named_algorithm(name: str) -> Algorithm:
    """Return an algorithm by name: an estimator (with loss ``ppo_clip``), a loss (with GRPO advantages), or ``ppo``.

    Its formula replaces the configured one; other keys (epochs, credit, kl) stay.

    Raises:
        ConfigError: No such estimator or loss.
    """
    known = {*ADVANTAGES, *CRITIC_ADVANTAGES, *LOSSES, "ppo"}
    if name not in known:
        close = nearest(name, known)
        hint = f"did you mean {close!r}? " if close else ""
        raise ConfigError(
            f"algorithm {name!r} is unknown; {hint}known: {', '.join(sorted(known))}; or give an AlgorithmConfig, a "
            "mapping of its keys, an object with async def run(self, training), or an async function"
        )
    keys = {"advantage": name} if name in ADVANTAGES else {"advantage": "grpo", "loss": name}
    made = Algorithm(**{"loss": "ppo_clip", **_KEYS.get(name, keys)})
    # Dr. GRPO divides by a constant that only the configuration can know.
    made.replaces = tuple(key for key in FORMULA_KEYS if (name, key) != ("dr_grpo", "loss_scale"))
    if made.settings["advantage"] in CRITIC_ADVANTAGES:
        made.sections = {"policies.main.critic": {}}
    return made


class _CustomLoop(Algorithm):
    """A custom training loop: an async function, or an object with an async ``run``."""

    def __init__(self, run: Callable[..., Awaitable[None]], name: str) -> None:
        super().__init__()
        self._run, self._name = run, name

    async def run(self, training: Training) -> None:
        """Call the loop with the arguments that it names."""
        await call_run(self._run, self._name, training)

    def __repr__(self) -> str:
        return self._name


def as_algorithm(given: Any) -> Algorithm:
    """Convert the ``algorithm`` argument of :meth:`turnwise.trainer.api.Trainer.fit`.

    It is the name of an estimator or a loss, ``AlgorithmConfig`` or a mapping of its keys, :class:`Algorithm` instance
    or class, object with an async ``run``, or async function.

    Raises:
        ConfigError: It is none of these, or its ``run`` is not async or takes an unknown argument.
    """
    if isinstance(given, type) and issubclass(given, Algorithm):
        given = given()
    if isinstance(given, Algorithm):
        check_run(given.run, type(given).__name__)
        return given
    if isinstance(given, str):
        return named_algorithm(given)
    if isinstance(given, AlgorithmConfig):
        return Algorithm(**given.model_dump(exclude_unset=True))
    if isinstance(given, Mapping):
        return Algorithm(**given)
    run = given if inspect.iscoroutinefunction(given) else inspect.getattr_static(given, "run", None)
    if run is None or isinstance(given, type):
        raise ConfigError(
            f"the algorithm is {shown(given)}: give a name such as 'grpo', an AlgorithmConfig, an object with async "
            "def run(self, training), or an async function"
        )
    name = given.__qualname__ if inspect.isroutine(given) else type(given).__qualname__
    bound = given if run is given else given.run
    check_run(bound, name)
    return _CustomLoop(bound, name)


def check_run(run: Callable[..., Any], name: str) -> None:
    """Validate a custom ``run``.

    Raises:
        ConfigError: It is not async, or takes an unknown argument.
    """
    if not inspect.iscoroutinefunction(run):
        raise ConfigError(f"algorithm {name}: its run is not async: write async def, and await what it calls")
    parameters = inspect.signature(run).parameters.values()
    asked = [
        each.name
        for each in parameters
        if each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    ]
    unknown = [each for each in asked if each not in _ARGUMENTS]
    if unknown:
        raise ConfigError(
            f"algorithm {name}: its run has the unknown parameters {', '.join(unknown)}; allowed are "
            f"{', '.join(_ARGUMENTS)}"
        )


async def call_run(run: Callable[..., Awaitable[None]], name: str, training: Training) -> None:
    """Call a custom ``run`` with the arguments that it names.

    Raises:
        ConfigError: It takes an unknown argument.
    """
    check_run(run, name)
    offered = {"training": training, "train_dataset": training.train_tasks, "val_dataset": training.val_tasks}
    parameters = inspect.signature(run).parameters.values()
    free = any(each.kind is each.VAR_KEYWORD for each in parameters)
    named = {each.name for each in parameters}
    await run(**{key: value for key, value in offered.items() if free or key in named})
