"""Algorithms as objects: what is learned from rewards, for :meth:`turnwise.trainer.api.Trainer.fit`.

Owns: :class:`Algorithm`, the named ones (:data:`ALGORITHMS`) and :func:`as_algorithm`. An algorithm is a set of keys of
a configuration, and a ``run`` that by default is the configured loop; one of your own overrides it. Refuses: formulas
(``advantages``, ``losses``) and what the keys mean (``algorithm.py``).
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self

from turnwise.errors import ConfigError, shown
from turnwise.trainer.algorithm import AlgorithmConfig

if TYPE_CHECKING:
    from turnwise.trainer.training import Training

FORMULA_KEYS: Final = (
    "advantage", "advantage_options", "norm_by_std", "std_eps", "drop_zero_variance", "loss", "loss_options",
    "clip_low", "clip_high", "dual_clip", "loss_aggregation", "loss_scale",
)  # fmt: skip
"""Keys that belong to a formula: of another algorithm's they would be wrong."""

_GIVEN: Final = ("training", "train_dataset", "val_dataset")


class Algorithm:
    """What is learned from rewards, and how.

    Its keywords are keys of the ``algorithm`` section, laid over those of the configuration:
    ``Algorithm(advantage="rloo", minibatches=4)``. Where a key names a function, the function itself may stand.

    A subclass may override :meth:`run`; that is then the loop, and its keywords are its own affair.

    Attributes:
        settings: Keys of the ``algorithm`` section.
        sections: Keys of other sections that it cannot do without, by their dotted path; what a configuration says of
            them itself stays.
    """

    replaces: ClassVar[tuple[str, ...]] = ()
    """Keys of a configuration's section that are forgotten: those that belong to another formula."""

    settings: dict[str, Any]
    sections: dict[str, Any]

    def __new__(cls, *_: Any, **__: Any) -> Self:
        """Make one without keys: a subclass whose constructor is its own may leave this one out."""
        made = super().__new__(cls)
        made.settings, made.sections = {}, {}
        return made

    def __init__(self, **settings: Any) -> None:
        self.settings = settings

    async def run(self, training: Training) -> None:
        """Train until the budget is spent.

        An override takes what its parameters are called: ``training``
        (:class:`~turnwise.trainer.training.Training`), ``train_dataset`` and ``val_dataset`` (Tasks). When it returns,
        the run ends as others do: with an evaluation and a checkpoint.
        """
        await training.loop()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.settings.items())})"


class _Named(Algorithm):
    """An algorithm that has a name: its formula replaces the configuration's."""

    replaces = FORMULA_KEYS
    preset: ClassVar[dict[str, Any]] = {}

    def __init_subclass__(cls, **preset: Any) -> None:
        super().__init_subclass__()
        # A user's subclass of a named one keeps its formula.
        cls.preset = {**cls.preset, **preset}

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{**self.preset, **settings})


class GRPO(_Named, advantage="grpo", loss="ppo_clip"):
    """Rewards compared within a group, over their spread; PPO's clipping (arXiv:2402.03300, 2503.14476)."""


class DrGRPO(_Named, advantage="dr_grpo", loss="ppo_clip", loss_aggregation="seq_mean_token_sum_norm"):
    """Rewards compared within a group, divided by nothing; ``loss_scale`` divides sums of tokens (arXiv:2503.20783)."""


class RLOO(_Named, advantage="rloo", loss="ppo_clip"):
    """A reward less the mean of the other members' (arXiv:2402.14740)."""


class ReinforcePlusPlus(_Named, advantage="reinforce_plus_plus", loss="ppo_clip", drop_zero_variance=False):
    """Rewards normalised over the batch, no groups (arXiv:2501.03262)."""


class ReinforcePlusPlusBaseline(_Named, advantage="reinforce_plus_plus_baseline", loss="ppo_clip"):
    """A reward less its group's mean, over the batch's spread (arXiv:2501.03262)."""


class OPO(_Named, advantage="opo", loss="ppo_clip"):
    """A reward less its group's mean weighted by length (arXiv:2505.23585)."""


class GPG(_Named, advantage="gpg", loss="gpg", drop_zero_variance=False):
    """Plain policy gradient on rewards compared within a group (arXiv:2504.02546)."""


class PassK(_Named, advantage="passk", loss="ppo_clip"):
    """Only the best member of a group is paid, its lead over the second (arXiv:2503.19595)."""


class GDPO(_Named, advantage="gdpo", loss="ppo_clip"):
    """Each named reward compared apart (arXiv:2601.05242)."""


class PPO(_Named, advantage="gae", loss="ppo_clip", drop_zero_variance=False):
    """A critic foresees rewards, generalised advantages over sampled tokens (arXiv:1506.02438, 1707.06347)."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.sections = {"policies.main.critic": {}}


class ReMax(_Named, advantage="remax", loss="ppo_clip"):
    """A reward less that of a greedy rollout of the same task (arXiv:2310.10505)."""


class GSPO(_Named, advantage="grpo", loss="gspo"):
    """GRPO's advantages, the ratio of whole sequences clipped (arXiv:2507.18071)."""


class GMPO(_Named, advantage="grpo", loss="gmpo"):
    """GRPO's advantages, the geometric mean of clipped token ratios (arXiv:2507.20673)."""


class CISPO(_Named, advantage="grpo", loss="cispo"):
    """GRPO's advantages, clipped importance weights that keep every token's gradient (arXiv:2506.13585)."""


class SAPO(_Named, advantage="grpo", loss="sapo"):
    """GRPO's advantages, a soft gate in the place of clipping (arXiv:2511.20347)."""


class ClipCov(_Named, advantage="grpo", loss="clip_cov"):
    """GRPO's advantages; tokens of high covariance lose their gradient (arXiv:2505.22617)."""


class KLCov(_Named, advantage="grpo", loss="kl_cov"):
    """GRPO's advantages; tokens of high covariance pay a KL penalty (arXiv:2505.22617)."""


class DPPO(_Named, advantage="grpo", loss="dppo_tv"):
    """GRPO's advantages; tokens whose distribution moved too far are masked (arXiv:2602.04879)."""


class DRO(_Named, advantage="grpo", loss="dro"):
    """GRPO's advantages; the squared log-ratio is penalised (arXiv:2405.19107)."""


ALGORITHMS: Final[dict[str, type[_Named]]] = {
    each.__name__: each
    for each in (
        GRPO, DrGRPO, RLOO, ReinforcePlusPlus, ReinforcePlusPlusBaseline, OPO, GPG, PassK, GDPO, PPO, ReMax, GSPO, GMPO,
        CISPO, SAPO, ClipCov, KLCov, DPPO, DRO,
    )
}  # fmt: skip
"""The named algorithms."""


class _Foreign(Algorithm):
    """Something of the user's that is run in the place of the loop."""

    def __init__(self, run: Callable[..., Awaitable[None]], name: str) -> None:
        super().__init__()
        self._run, self._name = run, name

    async def run(self, training: Training) -> None:
        """Call it with what its parameters are called."""
        await call_run(self._run, self._name, training)

    def __repr__(self) -> str:
        return self._name


def as_algorithm(given: Any) -> Algorithm:
    """Return what :meth:`turnwise.trainer.api.Trainer.fit` takes as an algorithm as one.

    Args:
        given: An :class:`Algorithm` or a class of them, its name, an ``AlgorithmConfig`` or a mapping of its keys, an
            object with an async ``run``, or an async function.

    Raises:
        ConfigError: It is none of these, or its ``run`` is not async or takes what nobody gives.
    """
    if isinstance(given, type) and issubclass(given, Algorithm):
        given = given()
    if isinstance(given, Algorithm):
        check_run(given.run, type(given).__name__)
        return given
    if isinstance(given, str):
        known = {name.lower(): each for name, each in ALGORITHMS.items()}
        if given.lower() not in known:
            raise ConfigError(f"algorithm {given!r} is none of {', '.join(ALGORITHMS)}: name one, or give an object")
        return known[given.lower()]()
    if isinstance(given, AlgorithmConfig):
        return Algorithm(**given.model_dump(exclude_unset=True))
    if isinstance(given, Mapping):
        return Algorithm(**given)
    run = given if inspect.iscoroutinefunction(given) else inspect.getattr_static(given, "run", None)
    if run is None or isinstance(given, type):
        raise ConfigError(
            f"the algorithm is {shown(given)}: give turnwise.GRPO() or another one, an object with async def run(self, "
            "training), or an async function"
        )
    name = given.__qualname__ if inspect.isroutine(given) else type(given).__qualname__
    bound = given if run is given else given.run
    check_run(bound, name)
    return _Foreign(bound, name)


def check_run(run: Callable[..., Any], name: str) -> None:
    """Refuse a ``run`` that cannot be called as one.

    Raises:
        ConfigError: It is not async, or takes what nobody gives.
    """
    if not inspect.iscoroutinefunction(run):
        raise ConfigError(f"algorithm {name}: its run is not async: write async def, and await what it calls")
    parameters = inspect.signature(run).parameters.values()
    asked = [
        each.name
        for each in parameters
        if each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    ]
    unknown = [each for each in asked if each not in _GIVEN]
    if unknown:
        raise ConfigError(f"algorithm {name}: its run wants {', '.join(unknown)}; it may name {', '.join(_GIVEN)}")


async def call_run(run: Callable[..., Awaitable[None]], name: str, training: Training) -> None:
    """Call a ``run`` with what its parameters are called.

    Raises:
        ConfigError: It takes what nobody gives.
    """
    check_run(run, name)
    offered = {
        "training": training,
        "train_dataset": training.train_tasks,
        "val_dataset": training.val_tasks,
    }
    parameters = inspect.signature(run).parameters.values()
    free = any(each.kind is each.VAR_KEYWORD for each in parameters)
    named = {each.name for each in parameters}
    await run(**{key: value for key, value in offered.items() if free or key in named})
