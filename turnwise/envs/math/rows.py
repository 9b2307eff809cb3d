"""Tasks of ``math``: rows in GSM8K's form, from a file that is read line by line, or made in place.

Owns: :func:`tasks`, :func:`row` and :func:`calculations`. Refuses: reading files; that is ``turnwise/tasks``, which
says file and line of whatever is no row.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from turnwise.envs.math.made import made_rows
from turnwise.errors import TaskError, shown
from turnwise.tasks import SourceConfig, Task, iter_tasks

_CALCULATION: Final = re.compile(r"<<([^<>=]+)=([^<>=]*)>>")
_MARK: Final = "####"


def tasks(
    n: int | None = None, *, path: str | Path | None = None, split: str | None = None, seed: int = 0
) -> Iterator[Task]:
    """Yield word problems, one at a time.

    Args:
        n: How many at most; all of a file by default, 200 of those that are made.
        path: A jsonl file with the columns ``question`` and ``answer``, or a directory that holds ``<split>.jsonl``.
            None makes problems in place.
        split: ``train`` or ``test``, where ``path`` is no file; ``train`` by default.
        seed: Of the problems that are made: others for each seed.

    Raises:
        TaskError: There is no such file or split, or a line is no row.
    """
    if path is not None:
        file = _file(Path(path).expanduser(), split)
        source = SourceConfig(source=str(file), name=file.stem, map="turnwise.envs.math:row")
        yield from itertools.islice(iter_tasks(source), n)
        return
    named = split or "train"
    for index, (question, solution) in enumerate(made_rows(200 if n is None else n, split=named, seed=seed)):
        record = row({"question": question, "answer": solution})
        yield Task.from_record(record, default_id=f"math-{named}-{seed}-{index}")


def row(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of a task for a row of GSM8K: what ``map: turnwise.envs.math:row`` of a source calls.

    Args:
        record: ``question``, and ``answer``: the solution and behind ``####`` its result, or the result alone.

    Raises:
        TaskError: A column is missing, or the answer says no result.
    """
    question, solution = _column(record, "question"), _column(record, "answer")
    result = solution.rpartition(_MARK)[2].strip()
    if not result or (_MARK not in solution and "\n" in result):
        raise TaskError(
            f"column 'answer' is {shown(solution)}, which says no result: end it with a line '{_MARK} 42', or "
            "write the result alone"
        )
    return {"id": record.get("id"), "prompt": question, "answer": result, "solution": solution}


def calculations(solution: str) -> list[tuple[str, str]]:
    """Return what a solution marks as ``<<12*3=36>>``: expressions and their results, in order."""
    return [(match[1].strip(), match[2].strip()) for match in _CALCULATION.finditer(solution)]


def _file(path: Path, split: str | None) -> Path:
    if path.is_dir():
        path = path / f"{split or 'train'}.jsonl"
    elif split is not None:
        raise TaskError(f"{path}: split={split!r} is for directories; name a file, or a directory with {split}.jsonl")
    if not path.is_file():
        raise TaskError(f"{path}: there is no such file: give path=FILE.jsonl with the columns 'question' and 'answer'")
    return path


def _column(record: Mapping[str, Any], name: str) -> str:
    value = record.get(name) if isinstance(record, Mapping) else None
    if value is None:
        there = ", ".join(map(repr, record)) if isinstance(record, Mapping) else shown(record)
        raise TaskError(f"column {name!r} is missing (here: {there or 'nothing'})")
    if not isinstance(value, str) or not value.strip():
        raise TaskError(f"column {name!r} is {shown(value)}: it must be a text that is not empty")
    return value
