"""Tasks: the rows that come with the package, and rows of files.

Owns: :func:`tasks`. Refuses: reading what a row says (``rows.py``).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

from turnwise.envs.swe.rows import row
from turnwise.errors import TaskError
from turnwise.tasks import Task


def tasks(n: int | None = None, *, path: str | None = None, repo: str | None = None) -> Iterator[Task]:
    """Yield SWE tasks.

    Args:
        n: At most so many.
        path: A ``.jsonl`` file of published rows; without, those that come with the package.
        repo: Only those of one repository, such as ``ledgerly`` or ``django/django``.

    Raises:
        TaskError: The file cannot be read, or a line of it is no row; or there is no row of that repository.
    """
    found = 0
    for task in _rows(path):
        name = str(task.data.get("repo") or task.data.get("repo_name") or "")
        if repo is not None and repo not in (name, name.rpartition("/")[2]):
            continue
        if n is not None and found >= n:
            return
        found += 1
        yield task
    if not found:
        raise TaskError(f"there is no row{'' if repo is None else f' of repository {repo!r}'} in {path or 'turnwise'}")


def _rows(path: str | None) -> Iterator[Task]:
    if path is None:
        text = (resources.files("turnwise.envs.swe") / "shipped" / "rows.jsonl").read_text("utf-8")
    else:
        try:
            text = Path(path).expanduser().read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise TaskError(f"path {path!r} cannot be read: {error}") from error
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            where = f"{path or 'rows.jsonl'}:{number}"
            try:
                yield row(json.loads(line))
            except ValueError as error:
                raise TaskError(f"{where}: {error}") from error
            except TaskError as error:
                raise TaskError(f"{where}: {error}") from error
