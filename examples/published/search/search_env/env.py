"""SearchEnv: search and open passages, then answer a question."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field

from search_env.bm25 import Index, index_of_encyclopedia, index_of_file, load_bm25s
from search_env.tasks import accepted_answers, draw_task, exact_match, last_answer, word_f1
from turnwise.envs.core import ResetResult, Solution
from turnwise.envs.solution import tool_call
from turnwise.envs.tool_env import ToolEnv
from turnwise.errors import ConfigError, TaskError, ToolError, shown
from turnwise.tasks import Task
from turnwise.tasks.seeded import SPLITS
from turnwise.tools.core import function_tool
from turnwise.types import Message, text_of, with_system

SYSTEM_PROMPT: Final = (
    "You answer questions from a collection of passages. Search it, and open passages to read them; an answer may need "
    "several of them, one after the other. Then answer with a line such as 'Answer: ...' that holds nothing but the "
    "answer: a name, a number or a year."
)

_SNIPPET: Final = 100


class SearchEnv(ToolEnv):
    """Asks a question about a corpus, mostly one that needs two dependent lookups.

    The score is 1 for the right answer without regard to case, punctuation and articles, else 0; with ``metric="f1"``
    the word F1.
    """

    blocking: ClassVar[bool] = True
    score_range: ClassVar[tuple[float, float]] = (0.0, 1.0)
    default_tasks: ClassVar[str] = "search_env:tasks"
    fork_shares: ClassVar[Collection[str]] = ("index",)

    index: Index
    accepted: list[str]

    def __init__(self, *, corpus: str | None = None, metric: Literal["exact", "f1"] = "exact") -> None:
        """Set corpus and metric.

        Args:
            corpus: A jsonl file with ``id``, ``title`` and ``text``; by default the encyclopedia that a task names.
            metric: ``exact`` or ``f1``.
        """
        if metric not in ("exact", "f1"):
            raise ConfigError(f"metric is {shown(metric)}: it must be 'exact' or 'f1'")
        load_bm25s()
        self.metric = metric
        self.corpus = corpus
        if corpus is not None:
            index_of_file(corpus)

    def reset(self, task: Task | None = None, *, seed: int | None = None) -> ResetResult:
        """Ask the task's question; without a task, one about the encyclopedia is drawn from the seed."""
        if task is None and self.corpus is not None:
            raise TaskError("a corpus of your own needs tasks: search_env:qa_tasks?path=rows.jsonl")
        task = draw_task(seed) if task is None else task
        self.task = task
        where = f"task {task.id!r}: data"
        self.accepted = accepted_answers(task.data, where)
        self.index = index_of_file(self.corpus) if self.corpus is not None else _encyclopedia(task, where)
        return with_system(task.messages(), SYSTEM_PROMPT), {}

    @function_tool(concurrent=True)
    def search(self, query: Annotated[str, "words to look for"], k: Annotated[int, Field(ge=1, le=20)] = 5) -> str:
        """The passages that fit best: id, title and the beginning of the text."""
        passages = self.index.search(query, k)
        lines = [f"[{passage.id}] {passage.title}: {_beginning(passage.text)}" for passage in passages]
        return "\n".join(lines) or "nothing was found: use other words"

    @function_tool("open", inline=True, max_output=8_000)
    def open_passage(self, id: Annotated[str, "id of a passage, as search gives it"]) -> str:  # noqa: A002
        """A passage as a whole."""
        passage = self.index.passages.get(id.strip().strip("[]"))
        if passage is None:
            raise ToolError(f"there is no passage {shown(id)}: ids stand in brackets in what search returns")
        return f"{passage.title}\n\n{passage.text}"

    def score(self, final: Message | None) -> float:
        """Compare the answer with the accepted ones by the metric."""
        compare = exact_match if self.metric == "exact" else word_f1
        return compare(last_answer("" if final is None else text_of(final)), self.accepted)

    def solve(self) -> Solution:
        """Open the articles that lead to the answer, and answer."""
        ids = {passage.title: passage.id for passage in self.index.passages.values()}
        for title in self.task.data.get("path", ()):
            yield tool_call("search", query=title)
            if title in ids:
                yield tool_call("open", id=ids[title])
        yield f"Answer: {self.accepted[0]}"


def _encyclopedia(task: Task, where: str) -> Index:
    split, seed = task.data.get("split"), task.data.get("encyclopedia")
    if seed is None:
        raise TaskError(
            f"{where}['encyclopedia'] is missing: name one, or give the environment your own corpus "
            "(corpus=passages.jsonl)"
        )
    if isinstance(seed, bool) or not isinstance(seed, int) or split not in SPLITS:
        raise TaskError(
            f"{where} names the encyclopedia {shown(seed)} of the split {shown(split)}: it is a seed (an integer), of "
            f"the split {' or '.join(SPLITS)}"
        )
    return index_of_encyclopedia(split, seed)


def _beginning(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _SNIPPET else f"{line[:_SNIPPET].rsplit(' ', 1)[0]} ..."
