"""Hooks: user callbacks at named points of a training run."""

from __future__ import annotations

import contextlib
import inspect
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol, TypeAlias, TypeVar

from turnwise.errors import ConfigError, TrainError, nearest, shown
from turnwise.evaluation.metrics import EvalResult
from turnwise.plugins import find_class, registering
from turnwise.trajectory import TrajectoryGroup

if TYPE_CHECKING:
    from turnwise.rollout.core import ReplayBuffer
    from turnwise.trainer.config.train import TrainConfig
    from turnwise.trainer.observe.run_log import LiveDisplay
    from turnwise.trainer.run.checkpoint import TrainerState
    from turnwise.trainer.run.task_scheduler import TaskScheduler


Done: TypeAlias = Awaitable[None] | None


class Hooks:
    """Base class of user hooks: ``hooks: my_hooks.py:MyHooks``.

    Override the hooks that you need (``def`` or ``async def``, without arguments). Constructed without arguments when
    the run starts; the attributes are set from ``on_init_end`` on (docs/extending.md).

    Attributes:
        global_steps: The current step; between steps the last one. 0 before the first.
        config: The run's configuration; ``config.custom`` is free for extensions.
        replay_buffer: The buffer of finished groups.
        timing_raw: Seconds by phase of this step so far.
        metrics: Metrics of this step; added ones are logged.
        batch: The groups of the step, from ``on_sample_end`` on, where changes to it take effect.
        partition: ``train``, or ``val`` from ``on_validate_begin`` to ``on_validate_end``.
        evaluation: The last evaluation.
        error: In ``on_train_end``: the error that ended the run, or None.
        max_refills: How often per step a batch is refilled after :meth:`drop`.
    """

    max_refills: ClassVar[int] = 10

    global_steps: int
    config: TrainConfig
    replay_buffer: ReplayBuffer
    timing_raw: dict[str, float]
    metrics: dict[str, float]
    batch: list[TrajectoryGroup]
    partition: str
    evaluation: EvalResult | None
    error: BaseException | None
    verbs: HookCalls

    def on_init_end(self) -> Done:
        """Called when the run is assembled and its servers have the weights, also on resume."""

    def on_train_begin(self) -> Done:
        """Called after the first evaluation, before the first step."""

    def on_train_end(self) -> Done:
        """Called last, after the final evaluation or an error (``self.error``)."""

    def on_validate_begin(self) -> Done:
        """Called before an evaluation."""

    def on_validate_end(self) -> Done:
        """Called after an evaluation (``self.evaluation``)."""

    def on_step_begin(self) -> Done:
        """Called before a train step."""

    def on_step_end(self) -> Done:
        """Called when the step's weights are on the servers, before ``self.metrics`` is logged."""

    def on_sample_begin(self) -> Done:
        """Called before the step waits for groups."""

    def on_sample_end(self) -> Done:
        """Called when the groups have finished (``self.batch``)."""

    def request(self, groups: int) -> None:
        """Request additional groups (over-sampling), when the run next waits for groups after ``on_sample_begin``."""
        self.verbs.request(groups)

    def drop(self, group: TrajectoryGroup, why: str) -> None:
        """Drop a group of ``self.batch`` in ``on_sample_end``; counted as ``replay/dropped/WHY`` and replaced."""
        self.verbs.drop(group, why)

    def stop(self, why: str) -> None:
        """End the run in order after this step."""
        self.verbs.stop(self, why)


CALLS: Final = tuple(name for name in vars(Hooks) if name.startswith("on_"))
"""The hooks by name."""

HOOKS: dict[str, type[Hooks]] = {}
"""Classes of hooks by the name that ``hooks`` uses."""

H = TypeVar("H", bound=type[Hooks])


def register_hooks(name: str) -> Callable[[H], H]:
    """Register a class of hooks for ``hooks``.

    Raises:
        RegistryError: The name is taken.
        ConfigError: As :func:`load_hooks`.
    """
    return registering(name, HOOKS, "hooks", partial(_check_class, reference=name))


def load_hooks(references: Sequence[str]) -> list[type[Hooks]]:
    """Load the configured hook classes, in order.

    Raises:
        ConfigError: One cannot be found, is no subclass of :class:`Hooks`, cannot be constructed without arguments, or
            has a hook with arguments or a misspelt one.
    """
    return [_check_class(find_class(reference, HOOKS, "hooks"), reference) for reference in references]


def _check_class(cls: type[Any], reference: str) -> type[Hooks]:
    if not issubclass(cls, Hooks):
        raise ConfigError(f"hooks {reference!r} is not a subclass of turnwise.Hooks: write class {cls.__name__}(Hooks)")
    methods = {name: method for name, method in inspect.getmembers(cls, inspect.isroutine) if name.startswith("on_")}
    for name, method in methods.items():
        if name not in CALLS:
            hint = nearest(name, CALLS) or f"; hooks are {', '.join(CALLS)}"
            raise ConfigError(f"hooks {reference!r} has {name}, which is no hook{hint}")
        _check_callable(method, (None,), f"hooks {reference!r}: {name} must be callable as {name}(self)")
    _check_callable(cls, (), f"hooks {reference!r}: the class must be callable without arguments (use config.custom)")
    return cls


def _check_callable(function: Callable[..., Any], arguments: tuple[None, ...], what: str) -> None:
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        raise ConfigError(f"{what}: {error}") from error


STOPPED: Final = "hook"
"""What ended a run that a hook stopped."""


class HookedRun(Protocol):
    """What is used of a :class:`~turnwise.trainer.run.run.TrainRun` to call its hooks."""

    config: TrainConfig
    buffer: ReplayBuffer
    scheduler: TaskScheduler
    state: TrainerState
    display: LiveDisplay


class HookCalls:
    """Calls the hooks of a run, in configured order.

    Attributes:
        stopped: The hook that stopped the run and its reason, or None.
        timing_raw: Seconds by phase of the step.
        refills: Groups that hooks dropped from the batch, since :meth:`sample_begin`.
        dropped: Number of groups that they dropped in this step, by reason.
    """

    def __init__(self, hooks: Sequence[Hooks] = (), run: HookedRun | None = None) -> None:
        self._hooks = list(hooks)
        self._run = run
        self._step: int | None = None
        self._may_drop = False
        self._metrics: dict[str, float] = {}
        self._batch: list[TrajectoryGroup] = []
        self._dropped_groups: list[TrajectoryGroup] = []
        self._evaluation: EvalResult | None = None
        self._error: BaseException | None = None
        self.timing_raw: dict[str, float] = {}
        self.stopped: str | None = None
        self.refills = 0
        self._requested = 0
        self.dropped: Counter[str] = Counter()

    @classmethod
    def open(cls, classes: Sequence[type[Hooks]], run: HookedRun) -> HookCalls:
        """Instantiate the hooks of a run.

        Raises:
            TrainError: A constructor raised.
        """
        hooks: list[Hooks] = []
        for hook_class in classes:
            try:
                hooks.append(hook_class())
            except Exception as error:  # a user's hook: the error names the hook
                raise TrainError(_describe_error(hook_class, "__init__", error)) from error
        return cls(hooks, run)

    def add(self, hooks: Hooks) -> None:
        """Call further hooks, after the others."""
        self._hooks.append(hooks)

    @property
    def max_refills(self) -> int:
        """How often a step refills its batch."""
        return max((hook.max_refills for hook in self._hooks), default=0)

    @contextlib.asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        """Call ``on_train_begin`` before, and ``on_train_end`` after training, however it ended."""
        try:
            await self.call("on_train_begin")
            yield
        except BaseException as error:  # whatever ends the run is shown to the hooks first
            self._error = error
            for text in await self._end():
                # The caller must get the error that ended the run; failures of these hooks are only printed.
                self._of_run().display.say(f"warning: {text}")
            raise
        errors = await self._end()
        for text in errors[1:]:
            self._of_run().display.say(f"warning: {text}")
        if errors:
            raise TrainError(errors[0])

    async def validate_end(self, result: EvalResult) -> None:
        """Call ``on_validate_end``."""
        self._evaluation = result
        await self.call("on_validate_end", partition="val")

    async def step_begin(self) -> None:
        """Call ``on_step_begin``, once per step."""
        if self._hooks and self._step is None:
            self._step = self._of_run().state.step + 1
            self.timing_raw = {}
            self.dropped.clear()
            await self.call("on_step_begin")

    async def step_end(self, metrics: Mapping[str, float], groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
        """Call ``on_step_end`` and return the metrics to log, given those of the step and its trained groups.

        Raises:
            TrainError: A hook raised, or added a non-number; the metrics of the step are logged all the same.
        """
        if not self._hooks:
            return dict(metrics)
        self._batch = list(groups)
        self._metrics.update({name: value for name, value in metrics.items() if name not in self._metrics})
        times = {name: value for name, value in metrics.items() if name.startswith("time/") and name.endswith("_s")}
        self.timing_raw.update({name.removeprefix("time/"): value for name, value in times.items()})
        await self.call("on_step_end")
        self._step = None
        logged, self._metrics, self._batch = self._metrics, {}, []
        for name, value in logged.items():
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TrainError(f"a hook set metrics[{name!r}] to {shown(value)}: a number can be logged")
        return logged

    async def sample_begin(self) -> None:
        """Call ``on_sample_begin``, and issue the requests of hooks."""
        self.refills = 0
        await self.call("on_sample_begin")
        # Issued last: the step's own requests account for the groups in flight.
        if self._requested:
            scheduler, groups = self._of_run().scheduler, self._requested
            self._requested = 0
            scheduler.issue(scheduler.next(groups))

    async def sample_end(self, batch: list[TrajectoryGroup]) -> list[TrajectoryGroup]:
        """Call ``on_sample_end`` and return the remaining batch."""
        if not self._hooks:
            return batch
        self._batch, self._may_drop = batch, True
        try:
            await self.call("on_sample_end")
        finally:
            self._may_drop = False
        return self._batch

    def request(self, groups: int) -> None:
        """Request further groups."""
        if groups < 1:
            raise TrainError(f"request({groups}): at least 1 group must be requested")
        self._requested += groups

    def drop(self, group: TrajectoryGroup, why: str) -> None:
        """Drop a group of the batch, and have it replaced."""
        if not self._may_drop:
            raise TrainError(f"drop({group.id!r}) was called outside of on_sample_end: a batch may change only there")
        if not any(member is group for member in self._batch) or any(
            member is group for member in self._dropped_groups
        ):
            raise TrainError(f"drop({group.id!r}): self.batch holds no such group, or no more")
        # It leaves the list when the hook has returned, which may be going through it.
        self._dropped_groups.append(group)
        self.refills += 1
        self.dropped[why] += 1

    def stop(self, hook: Hooks, why: str) -> None:
        """End the run after this step."""
        self.stopped = self.stopped or f"{type(hook).__name__} stopped the run: {why}"

    async def _end(self) -> list[str]:
        errors: list[str] = []
        for hook in self._hooks:
            try:
                await self._call_hook(hook, "on_train_end", "train")
            except TrainError as error:
                errors.append(str(error))
        return errors

    async def call(self, name: str, *, partition: str = "train") -> None:
        """Call a hook of all classes. Raises TrainError where one raises."""
        for hook in self._hooks:
            await self._call_hook(hook, name, partition)

    async def _call_hook(self, hook: Hooks, name: str, partition: str) -> None:
        run = self._of_run()
        hook.verbs = self
        hook.global_steps = run.state.step if self._step is None else self._step
        hook.config, hook.replay_buffer, hook.partition = run.config, run.buffer, partition
        hook.timing_raw, hook.metrics, hook.batch = self.timing_raw, self._metrics, self._batch
        hook.evaluation, hook.error = self._evaluation, self._error
        try:
            outcome = getattr(hook, name)()
            if inspect.isawaitable(outcome):
                await outcome
        except Exception as error:  # a user's hook: the error names the hook
            raise TrainError(_describe_error(type(hook), name, error)) from error
        # A hook may have put others in their place.
        self._metrics = hook.metrics
        if self._may_drop:
            self._batch = [
                group for group in _groups(hook) if not any(group is dropped for dropped in self._dropped_groups)
            ]
            self._dropped_groups = []

    def _of_run(self) -> HookedRun:
        assert self._run is not None, "hooks belong to a run"
        return self._run


def _groups(hook: Hooks) -> list[TrajectoryGroup]:
    batch = hook.batch
    if not isinstance(batch, list) or not all(isinstance(group, TrajectoryGroup) for group in batch):
        what = f"hook {type(hook).__name__}.on_sample_end left {shown(batch)} in self.batch"
        raise TrainError(f"{what}: it must be a list of TrajectoryGroup")
    return batch


def _describe_error(cls: type[Hooks], name: str, error: Exception) -> str:
    """Describe an error of a hook, with its line."""
    frames = traceback.extract_tb(error.__traceback__)
    try:
        own_frames = [frame for frame in frames if Path(frame.filename) == Path(inspect.getfile(cls))] or frames[-1:]
    except (OSError, TypeError):
        own_frames = frames[-1:]
    location = f" at {own_frames[-1].filename}:{own_frames[-1].lineno}" if own_frames else ""
    return f"hook {cls.__name__}.{name} raised {type(error).__name__}{location}: {error}"
