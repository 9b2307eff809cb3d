"""The configuration of searches: how an episode gets branches, and what scores them."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from turnwise.config import ConfigReference, Section, shorthand
from turnwise.rollout.branching.tree import TreeConfig

ENVIRONMENT: Final = "environment"
LIKELIHOOD: Final = "likelihood"

_KEYS: Final = {"best_of_n": ("samples",), "tree": ("branches", "where", "rounds", "max_tokens")}
_NEEDED: Final = {"best_of_n": ("samples",), "tree": ("branches",)}


class ScorerConfig(Section):
    """What scores the branches of an episode. A text is its ``function``.

    Attributes:
        function: ``environment``: the reward itself, an oracle that nothing has outside of an evaluation.
            ``likelihood``: the mean log-probability of the sampled tokens. A shipped reward function (``judge``,
            ``reward_model``, ``regex``, ...), ``pkg.module:function`` or ``path/to/file.py:function``: called as
            functions of a rubric are, and with ``trajectory`` and ``ended`` where it names them.
        arguments: Of the constructor where it names a class, else keyword arguments of every call.
    """

    function: ConfigReference
    arguments: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _takes_arguments(self) -> Self:
        if self.function in (ENVIRONMENT, LIKELIHOOD) and self.arguments:
            raise ValueError(f"no arguments for the scorer {self.function}: it takes none")
        return self


class SearchConfig(Section):
    """A search: each sampled episode gets several branches, and a scorer chooses one.

    Attributes:
        kind: ``best_of_n``: whole episodes. ``tree``: one episode, and forks of it at some of its turns.
        scorer: What scores the branches.
        samples: Of ``best_of_n``: number of episodes.
        branches: Of ``tree``: forks of the episode.
        where: Of ``tree``: the turns that are sampled again, as in ``rollout.tree``.
        rounds: Of ``tree``: rounds in which the tree is expanded.
        max_tokens: Of ``tree``: sampled tokens of the episode with its branches.
    """

    kind: Literal["best_of_n", "tree"]
    scorer: Annotated[ScorerConfig, shorthand("function")] = Field(
        description="what scores branches: environment, likelihood, a shipped reward function, or pkg.module:function"
    )
    samples: PositiveInt | None = None
    branches: PositiveInt | None = None
    where: ConfigReference = "random"
    rounds: PositiveInt = 1
    max_tokens: PositiveInt | None = None

    @model_validator(mode="after")
    def _keys_are_of_its_kind(self) -> Self:
        takes = ", ".join(_KEYS[self.kind])
        keys_set = self.model_fields_set - {"kind", "scorer"}
        if wrong := sorted(keys_set - {*_KEYS[self.kind]}):
            raise ValueError(f"no {', '.join(wrong)} for kind {self.kind}, which takes {takes}")
        if missing := [name for name in _NEEDED[self.kind] if getattr(self, name) is None]:
            raise ValueError(f"{' and '.join(missing)} for kind {self.kind}")
        if self.kind == "best_of_n" and self.samples == 1:
            raise ValueError("samples of at least 2 for best_of_n: one branch leaves nothing to choose")
        if self.kind == "tree":
            self.tree()
        return self

    @property
    def forks(self) -> bool:
        """Whether branches begin in the middle of an episode, so that environment and agent must be forkable."""
        return self.kind != "best_of_n"

    def tree(self) -> TreeConfig:
        """Return the configuration of the forks of kind ``tree``."""
        return TreeConfig.model_validate(
            {"branches": self.branches, "where": self.where, "rounds": self.rounds, "max_tokens": self.max_tokens}
        )
