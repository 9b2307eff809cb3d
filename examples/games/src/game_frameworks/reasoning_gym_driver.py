"""Driver of reasoning-gym: a family of questions, each with one answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from turnwise_foreign.core import Failure, framework, opening, refusals, text_of

PACKAGE = "reasoning-gym"
_MOST_DATASETS = 16


def names() -> list[str]:
    """Return the families."""
    framework("reasoning_gym")
    return sorted(framework("reasoning_gym.factory").DATASETS)


def load(name: str, kwargs: dict[str, Any], system_prompt: str | None) -> Family:
    """Return a family, whose questions are drawn with the arguments of its configuration."""
    family = Family(name, kwargs, system_prompt)
    family.dataset(0, 1)
    return family


class Family:
    """Datasets of one family, by seed and size."""

    def __init__(self, name: str, kwargs: dict[str, Any], system_prompt: str | None) -> None:
        reserved = sorted({"seed", "size"} & set(kwargs))
        if reserved:
            raise ValueError(f"kwargs has {' and '.join(reserved)}, which the tasks set")
        self._make = framework("reasoning_gym").create_dataset
        self._name = name
        self._kwargs = kwargs
        prompts = framework("reasoning_gym.utils").SYSTEM_PROMPTS
        self.system_prompt = None if system_prompt is None else prompts.get(system_prompt, system_prompt)
        self._datasets: dict[Any, Any] = {}

    def dataset(self, seed: int, size: int, level: int | None = None) -> Any:
        """Return the dataset of a seed and a size, and of a level of the family's curriculum where one is given."""
        key = (seed, size, level)
        if key not in self._datasets:
            if len(self._datasets) >= _MOST_DATASETS:
                self._datasets.clear()
            settings = {} if level is None else self._settings(level)
            self._datasets[key] = self._make(self._name, **{**settings, **self._kwargs, "seed": seed, "size": size})
        return self._datasets[key]

    def _settings(self, level: int) -> dict[str, Any]:
        """Return what the family's curriculum sets at a level: of ranges their highest segment."""
        factory = framework("reasoning_gym.factory")
        if not factory.has_curriculum(self._name):
            raise Failure("raised", f"{self._name} has no levels (no curriculum)")
        curriculum = factory.create_curriculum(self._name)
        levels = max(len(attribute.levels) for attribute in curriculum.attributes.values())
        if not 0 <= level < levels:
            raise Failure("raised", f"{self._name} has no level {level}; it has 0 to {levels - 1}")
        curriculum.set_global_level(level)
        base = framework("reasoning_gym.coaching.base_curriculum")
        context = base.DefaultCurriculumContext(mode=base.RangeAttributeMode.UPPER_BOUND)
        configuration = curriculum.generate_configuration({}, context)
        ranges = framework("reasoning_gym.coaching.attributes").RangeAttributeDefinition
        names = set()
        for attribute in curriculum.attributes.values():
            ranged = isinstance(attribute, ranges)
            names |= {attribute.lower_field_name, attribute.upper_field_name} if ranged else {attribute.field_name}
        return {name: getattr(configuration, name) for name in names}

    def episode(self) -> Question:
        """Return an episode."""
        return Question(self)


class Question:
    """One question of a dataset."""

    def __init__(self, family: Family) -> None:
        self._family = family
        self._extract = framework("reasoning_gym.utils").extract_answer

    def reset(self, data: Mapping[str, Any] | None, seed: int | None) -> dict[str, Any]:
        """Ask the question of a task (``seed``, ``size``, ``index``, ``level`` of a dataset), or one of the seed."""
        row = data or {}
        self._dataset = self._family.dataset(row.get("seed", seed or 0), row.get("size", 1), row.get("level"))
        self._entry = self._dataset[row.get("index", 0)]
        return {"messages": opening(self._family.system_prompt, self._entry["question"])}

    def step(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Score the answer."""
        score = self.score(message)
        outcome = {"reward": score, "rewards": {"score": score}, "terminated": True, "truncated": False}
        return {"messages": refusals(message), **outcome}

    def score(self, message: Mapping[str, Any] | None) -> Any:
        """Return the dataset's score of what stands between ``<answer>`` and ``</answer>``."""
        answer = None if message is None else self._extract(text_of(message))
        return self._dataset.score_answer(answer, self._entry)

    def __deepcopy__(self, memo: Any) -> Question:
        copied = Question(self._family)
        copied._dataset, copied._entry = self._dataset, self._entry
        return copied
