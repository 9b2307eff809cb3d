"""Search tasks: generated two- and three-hop questions, rows from a file, and answer metrics."""

from __future__ import annotations

import functools
import random
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from search_env.encyclopedia import Town, Work, encyclopedia
from turnwise.errors import TaskError, shown
from turnwise.seeding import stable_hash
from turnwise.tasks import Task
from turnwise.tasks.seeded import check_split
from turnwise.tasks.sources import JsonlRows

# The part before the colon stays on one line: else blank lines would take quadratic time.
_ANSWER: Final = re.compile(r"^[^\w\n]*(?:final )?answer[^\w\n]*:\W*(.*)$", re.IGNORECASE | re.MULTILINE)
_ARTICLES: Final = frozenset(("a", "an", "the"))


def last_answer(text: str) -> str:
    """Return what follows the last ``Answer:`` of a message, or all of it."""
    answers: list[str] = _ANSWER.findall(text)
    return answers[-1] if answers else text


def words(text: str) -> list[str]:
    """Return the normalised words of a text: NFKC, without case, punctuation, thousands separators and articles."""
    normalised = unicodedata.normalize("NFKC", text).casefold()
    normalised = re.sub(r"(?<=\d),(?=\d{3}\b)", "", normalised)
    tokens = re.findall(r"\w+", normalised)
    # An answer that is only an article, such as the choice A, must not become empty.
    return [token for token in tokens if token not in _ARTICLES] or tokens


def exact_match(answer: str, accepted: Sequence[str]) -> float:
    """Return 1 if the answer has the words of an accepted one, else 0."""
    return float(any(words(answer) == words(answer_text) for answer_text in accepted))


def word_f1(answer: str, accepted: Sequence[str]) -> float:
    """Return the largest word F1 of the answer against the accepted ones.

    ``F1 = 2c / (p + g)`` with p words in the answer, g in the accepted one and c in common, counted with multiplicity,
    as in SQuAD (Rajpurkar et al. 2016).
    """
    return max((_overlap_f1(words(answer), words(answer_text)) for answer_text in accepted), default=0.0)


def _overlap_f1(answer: list[str], accepted: list[str]) -> float:
    common = sum((Counter(answer) & Counter(accepted)).values())
    return 2 * common / (len(answer) + len(accepted)) if common else 0.0


_QUESTIONS_PER_ENCYCLOPEDIA: Final = 1_000


@dataclass(frozen=True, slots=True)
class Question:
    """A question, its answer, and the titles of the articles that lead to it."""

    text: str
    answer: str
    path: tuple[str, ...]


def tasks(n: int = 200, *, split: str = "train", seed: int = 0) -> Iterator[Task]:
    """Yield ``n`` different questions of a split, a thousand to an encyclopedia."""
    check_split("search", split)
    for index in range(n):
        encyclopedia_seed = stable_hash("search", seed, index // _QUESTIONS_PER_ENCYCLOPEDIA)
        question = questions(split, encyclopedia_seed)[index % _QUESTIONS_PER_ENCYCLOPEDIA]
        yield _task(f"search-{split}-{seed}-{index}", question, split, encyclopedia_seed)


def draw_task(seed: int | None) -> Task:
    """Return the task drawn from a seed, or a random one for None; all share one encyclopedia."""
    task_seed = random.getrandbits(63) if seed is None else seed
    candidates = questions("train", 0)
    return _task(f"search-seed-{task_seed}", candidates[stable_hash("search", task_seed) % len(candidates)], "train", 0)


def _task(name: str, question: Question, split: str, encyclopedia_seed: int) -> Task:
    data = {"split": split, "encyclopedia": encyclopedia_seed, "answer": question.answer, "path": list(question.path)}
    return Task(name, question.text, data)


def qa_tasks(path: str, *, question: str = "question", answer: str = "answer") -> Iterator[Task]:
    """Yield the rows of a jsonl file as tasks, for a custom corpus.

    Args:
        path: The file. A row has a question, and an answer or a list of accepted ones; further fields go to ``data``.
        question: Name of the field with the question.
        answer: Name of the field with the answer.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise TaskError(f"path is {shown(path)}: there is no such file; give a .jsonl with {question!r} and {answer!r}")
    for line in JsonlRows(file).read():
        yield _row_task(line.value, line.where, f"{file.stem}-{line.number + 1}", question, answer)


def _row_task(row: Any, where: str, name: str, question: str, answer: str) -> Task:
    if not isinstance(row, dict):
        raise TaskError(f"{where}: a row is an object with {question!r} and {answer!r}, not {shown(row)}")
    for field in (question, answer):
        if field not in row:
            raise TaskError(f"{where}: field {field!r} is missing (fields here: {', '.join(map(repr, row)) or 'none'})")
    text = row.pop(question)
    if not isinstance(text, str) or not text.strip():
        raise TaskError(f"{where}: field {question!r} is {shown(text)}: it must be a string")
    data = {**row, "answer": row[answer]}
    if answer != "answer":
        del data[answer]
    accepted_answers(data, where)
    return Task(str(data.pop("id", name)), text, data)


def accepted_answers(data: dict[str, Any], where: str) -> list[str]:
    """Return the accepted answers of a task's data."""
    answer = data.get("answer")
    answers = [answer] if isinstance(answer, (str, int, float)) and not isinstance(answer, bool) else answer
    if not isinstance(answers, list) or not answers or not all(isinstance(text, (str, int, float)) for text in answers):
        raise TaskError(f"{where}: field 'answer' is {shown(answer)}: it must be an accepted string or a list of them")
    texts = [str(text) for text in answers]
    if not all(words(text) for text in texts):
        raise TaskError(
            f"{where}: field 'answer' is {shown(answer)}: an accepted answer is empty, or has no letter and no digit "
            "to compare"
        )
    return texts


@functools.lru_cache(maxsize=8)
def questions(split: str, seed: int) -> tuple[Question, ...]:
    """Return the questions of an encyclopedia, shuffled: at least a thousand."""
    book = encyclopedia(split, seed)
    pool = [question for work in book.works for question in _about_work(work)]
    pool += [question for town in book.towns for question in _about_town(town)]
    random.Random(stable_hash("search questions", split, seed)).shuffle(pool)
    return tuple(pool)


def _about_work(work: Work) -> Iterator[Question]:
    maker, town, birthplace = work.maker, work.town, work.maker.town
    name, title = work.name, work.name[0].upper() + work.name[1:]
    birth_river = birthplace.river
    verb = {"building": "designed", "company": "founded", "book": "wrote"}[work.kind]
    path = (title, maker.name)
    yield Question(f"In which year was the person born who {verb} {name}?", str(maker.born), path)
    yield Question(f"In which town was the person born who {verb} {name}?", birthplace.name, path)
    text = f"Who is the mayor of the town in which the person was born who {verb} {name}?"
    yield Question(text, birthplace.mayor, (*path, birthplace.name))
    text = f"On which river lies the birthplace of the person who {verb} {name}?"
    yield Question(text, birth_river.name, (*path, birthplace.name))
    town_phrase = {
        "building": f"the town in which {name} stands",
        "company": f"the town in which {name} has its seat",
        "book": f"the town that the book {name} is about",
    }[work.kind]
    yield Question(f"In which year was {town_phrase} founded?", str(town.founded), (title, town.name))
    town_river = town.river
    text = f"How many kilometres long is the river on which {town_phrase} lies?"
    yield Question(text, str(town_river.length), (title, town.name, town_river.name[0].upper() + town_river.name[1:]))


def _about_town(town: Town) -> Iterator[Question]:
    title = town.river.name[0].upper() + town.river.name[1:]
    text = f"On which mountain is the source of the river that {town.name} lies on?"
    yield Question(text, town.river.mountain, (town.name, title))
