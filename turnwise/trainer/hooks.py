"""Code of the user's that runs at named moments of a training run.

Owns: :class:`Hooks`, the class to subclass, and finding and checking the subclasses that ``hooks`` names. Refuses: when
they are called (``hook_calls.py``).
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Protocol, TypeAlias

from pydantic import BeforeValidator

from turnwise.config import ConfigReference
from turnwise.errors import ConfigError
from turnwise.references import load_class_from_fqn
from turnwise.trajectory import TrajectoryGroup

if TYPE_CHECKING:
    from turnwise.evaluation.result import EvalResult
    from turnwise.rollout.core import ReplayBuffer
    from turnwise.trainer.config import TrainConfig


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


HookNames: TypeAlias = Annotated[tuple[ConfigReference, ...], BeforeValidator(_listed)]
"""What ``hooks`` takes in a configuration: one reference, or several."""

Done: TypeAlias = Awaitable[None] | None


class Verbs(Protocol):
    """What hooks may ask of the run."""

    def request(self, groups: int) -> None:
        """Have further groups rolled out."""

    def drop(self, group: TrajectoryGroup, why: str) -> None:
        """Leave a group of the batch out."""

    def stop(self, hook: Hooks, why: str) -> None:
        """End the run after this step."""


class Hooks:
    """Subclass it, define the hooks that you need (``def`` or ``async def``, without arguments), and name the class:
    ``hooks: my_hooks.py:MyHooks``. It is made without arguments when the run starts.

    What stands below is on ``self`` from ``on_init_end`` on (docs/extending.md).

    Attributes:
        global_steps: The step that is under way; between steps the one that is done. 0 before the first.
        config: What the run was asked for; ``config.custom`` is free.
        replay_buffer: Where finished groups wait.
        timing_raw: Seconds by part of this step, as far as it has come.
        metrics: Figures of this step. What is added is logged with them.
        batch: The groups of the step, from ``on_sample_end`` on. There it may be changed; what is trained is what it
            holds then.
        partition: ``train``, or ``val`` from ``on_validate_begin`` to ``on_validate_end``.
        evaluation: What the last evaluation found.
        error: In ``on_train_end``: what ended the run; None where it ended in order.
        max_refills: How often a batch of which :meth:`drop` took groups is filled again in one step.
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
    verbs: Verbs

    def on_init_end(self) -> Done:
        """The run is put together and its servers have the weights; also in a run that goes on."""

    def on_train_begin(self) -> Done:
        """The first evaluation is done, the first step comes."""

    def on_train_end(self) -> Done:
        """Nothing follows: after the last evaluation, and after whatever else ended the run (``self.error``)."""

    def on_validate_begin(self) -> Done:
        """An evaluation begins."""

    def on_validate_end(self) -> Done:
        """It is done: ``self.evaluation``."""

    def on_step_begin(self) -> Done:
        """A train step begins."""

    def on_step_end(self) -> Done:
        """Its weights are on the servers; ``self.metrics`` is logged after this."""

    def on_sample_begin(self) -> Done:
        """The step waits for groups from here on."""

    def on_sample_end(self) -> Done:
        """The groups are there: ``self.batch``."""

    def request(self, groups: int) -> None:
        """Have so many more groups rolled out than the run asks for by itself: over-sampling. They are asked for when
        the run next waits for groups, after ``on_sample_begin``.
        """
        self.verbs.request(groups)

    def drop(self, group: TrajectoryGroup, why: str) -> None:
        """Leave a group of ``self.batch`` out, in ``on_sample_end``. It is counted under ``replay/dropped/WHY``, and
        another one is rolled out in its place.
        """
        self.verbs.drop(group, why)

    def stop(self, why: str) -> None:
        """End the run in order after this step."""
        self.verbs.stop(self, why)


Call: TypeAlias = Callable[[Hooks], Any]

CALLS: Final[dict[str, Call]] = {
    "on_init_end": lambda hooks: hooks.on_init_end(),
    "on_train_begin": lambda hooks: hooks.on_train_begin(),
    "on_train_end": lambda hooks: hooks.on_train_end(),
    "on_validate_begin": lambda hooks: hooks.on_validate_begin(),
    "on_validate_end": lambda hooks: hooks.on_validate_end(),
    "on_step_begin": lambda hooks: hooks.on_step_begin(),
    "on_step_end": lambda hooks: hooks.on_step_end(),
    "on_sample_begin": lambda hooks: hooks.on_sample_begin(),
    "on_sample_end": lambda hooks: hooks.on_sample_end(),
}
"""How each hook is called, by its name."""


def load_hooks(references: Sequence[str]) -> list[type[Hooks]]:
    """Return the classes that a configuration names, in its order.

    Raises:
        ConfigError: One cannot be found, is no subclass of :class:`Hooks`, cannot be made without arguments, has a hook
            that takes arguments, or a method that is called like a hook and is none.
    """
    return [_checked(load_class_from_fqn(each, "hooks"), each) for each in references]


def _checked(cls: type[Any], reference: str) -> type[Hooks]:
    if not issubclass(cls, Hooks):
        raise ConfigError(f"hooks {reference!r} is no subclass of turnwise.Hooks: write class {cls.__name__}(Hooks)")
    methods = {name: each for name, each in inspect.getmembers(cls, inspect.isroutine) if name.startswith("on_")}
    for name, method in methods.items():
        if name not in CALLS:
            close = difflib.get_close_matches(name, CALLS, n=1)
            hint = f"did you mean {close[0]}?" if close else f"hooks are {', '.join(CALLS)}"
            raise ConfigError(f"hooks {reference!r} has {name}, which is no hook; {hint}")
        _check_callable(method, (None,), f"hooks {reference!r}: {name} must be callable as {name}(self)")
    _check_callable(cls, (), f"hooks {reference!r}: the class must be callable without arguments (use config.custom)")
    return cls


def _check_callable(function: Callable[..., Any], arguments: tuple[None, ...], what: str) -> None:
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        raise ConfigError(f"{what}: {error}") from error
