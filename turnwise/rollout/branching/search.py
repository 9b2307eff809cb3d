"""The configuration of searches: how an episode gets branches, and what scores them."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, Self, TypeAlias

from pydantic import Field, model_validator

from turnwise.config import ConfigReference, Section, shorthand
from turnwise.rollout.branching.tree import TreeConfig

ENVIRONMENT: Final = "environment"
LIKELIHOOD: Final = "likelihood"


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


Scored: TypeAlias = Annotated[ScorerConfig, shorthand("function")]
_WHAT_SCORES: Final = "what scores branches: environment, likelihood, a shipped reward function, or pkg.module:function"


class BestOfNConfig(Section):
    """A search of whole episodes, one of which the scorer chooses.

    Attributes:
        scorer: What scores the episodes.
        samples: Their number.
    """

    kind: Literal["best_of_n"]
    scorer: Scored = Field(description=_WHAT_SCORES)
    samples: Annotated[int, Field(ge=2)]


class TreeSearchConfig(TreeConfig):
    """A search of one episode and of forks of it at some of its turns, one of which the scorer chooses.

    Attributes:
        scorer: What scores the branches.
    """

    kind: Literal["tree"]
    scorer: Scored = Field(description=_WHAT_SCORES)


SearchConfig: TypeAlias = BestOfNConfig | TreeSearchConfig
"""A search: each sampled episode gets several branches."""
