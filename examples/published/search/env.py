"""Questions of two hops over small corpora that differ from task to task, searched by BM25.

A corpus has 72 passages: who made which of 48 works, and where each of 24 people was born. It is drawn from a number,
and the held-out tasks have corpora of their own: what is asked for can be searched, and not remembered.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from search_env import SearchEnv
from search_env.bm25 import Index
from search_env.encyclopedia import Passage

from turnwise.envs.core import ResetResult
from turnwise.errors import TaskError
from turnwise.seeding import stable_hash
from turnwise.tasks import Task

PEOPLE = (  # noqa: SIM905
    "ada ben carl dora emil fay gus hana ivan jude kira lars mia nils olga paul quinn rosa sven tess ugo vera will yara"
).split()
TOWNS = (  # noqa: SIM905
    "agra bern cork dover essen fargo genoa hague izmir jena kyoto lima malmo nice oslo perth quito riga siena turin"
).split()
KINDS = "amber brass copper glass ivory silver".split()  # noqa: SIM905
WORKS = "bell clock globe harp lamp mask organ vase".split()  # noqa: SIM905
SPLITS = {"train": 64, "test": 16}
"""Number of corpora of each split."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """Who made which work, and where everyone was born."""

    makers: dict[str, str]
    births: dict[str, str]

    @property
    def passages(self) -> list[Passage]:
        """The passages, by title, without ids that would tell them apart."""
        works = [
            Passage(f"w{number}", "", f"the {work} was made by {maker}")
            for number, (work, maker) in enumerate(self.makers.items())
        ]
        people = [
            Passage(f"p{number}", "", f"{person} was born in {town}")
            for number, (person, town) in enumerate(self.births.items())
        ]
        return [*works, *people]


@functools.lru_cache(maxsize=128)
def corpus(split: str, number: int) -> Corpus:
    """Draw a corpus of a split."""
    if split not in SPLITS:
        raise TaskError(f"search has no split {split!r}: {', '.join(SPLITS)}")
    rng = random.Random(stable_hash("small corpus", split, number))
    works = [f"{kind} {work}" for kind in KINDS for work in WORKS]
    return Corpus({work: rng.choice(PEOPLE) for work in works}, {person: rng.choice(TOWNS) for person in PEOPLE})


@functools.lru_cache(maxsize=128)
def index_of_corpus(split: str, number: int) -> Index:
    """Return the index of a corpus."""
    return Index(corpus(split, number).passages)


class SmallSearch(SearchEnv):
    """The search environment over the corpus of its task: exact match is the only reward."""

    blocking: ClassVar[bool] = False
    default_tasks: ClassVar[str] = f"{__file__}:tasks"

    def reset(self, task: Task | None = None, *, seed: int | None = None) -> ResetResult:
        """Ask a task's question; without one, it is drawn from the seed."""
        task = next(tasks(1, seed=seed or 0)) if task is None else task
        self.task, self.accepted = task, [task.data["answer"]]
        self.index = index_of_corpus(task.data["split"], task.data["corpus"])
        return [*task.messages()], {}


def tasks(n: int = 200, *, split: str = "train", seed: int = 0) -> Iterator[Task]:
    """Yield ``n`` questions of a split."""
    rng = random.Random(stable_hash("small questions", split, seed))
    for index in range(n):
        number = rng.randrange(SPLITS[split])
        book = corpus(split, number)
        work = rng.choice(list(book.makers))
        maker = book.makers[work]
        data = {"split": split, "corpus": number, "work": work, "maker": maker, "answer": book.births[maker]}
        yield Task(f"search-{split}-{seed}-{index}", f"Where was the maker of the {work} born?", data)
