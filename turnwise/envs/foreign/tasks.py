"""Tasks of foreign environments."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from turnwise.envs.foreign.core import ask, framework_of
from turnwise.errors import TaskError
from turnwise.tasks.core import Task

SPLITS: Final = {"train": 0, "validation": 500_000_000, "test": 1_000_000_000}
"""Distance of the seeds of a split from those of ``train``: none has a seed of another."""
_BATCH: Final = 256


def tasks(
    env: str,
    split: str = "train",
    size: int | None = None,
    seed: int = 0,
    python: str | None = None,
    kwargs: dict[str, Any] | None = None,
    start: int = 0,
) -> Iterator[Task]:
    """Yield the tasks of an environment: the rows of its own dataset, or seeds where it draws its episodes.

    Args:
        env: Its name, such as ``reasoning-gym:chain_sum``.
        split: ``train``, ``validation`` or ``test``; a dataset may have others.
        size: Number of tasks; by default 1000 seeds, or all rows of a dataset.
        seed: First seed of ``train``; those of other splits are far from them.
        python: The interpreter that has the framework, where its dataset has rows.
        kwargs: The framework's own arguments of this environment, where its dataset has rows.
        start: Number of the first task.

    Raises:
        TaskError: An argument is out of range.
        RegistryError: There is no such framework or environment.
        ConfigError: A framework with rows is not installed.
    """
    framework, name = framework_of(env)
    if size is not None and size < 1:
        raise TaskError(f"tasks of {env}: size is {size!r}: it must be at least 1")
    if framework.has_rows:
        request = {"op": "tasks", "name": name, "kwargs": kwargs or {}, "system_prompt": None, "split": split}
        while size is None or start < size:
            count = _BATCH if size is None else min(_BATCH, size - start)
            rows = ask(framework, python, {**request, "start": start, "count": count})["rows"]
            for row in rows:
                yield Task(f"{name}-{split}-{start}", row["prompt"], row["data"])
                start += 1
            if len(rows) < count:
                return
        return
    if split not in SPLITS:
        raise TaskError(f"tasks of {env}: split is {split!r}: it must be one of {', '.join(SPLITS)}")
    count = 1000 if size is None else size
    if not 0 <= seed <= SPLITS["validation"] - count:
        raise TaskError(f"tasks of {env}: seed is {seed}: it must be from 0 to {SPLITS['validation'] - count}")
    first = SPLITS[split] + seed
    for index in range(start, count):
        yield Task(f"{name}-{split}-{seed + index}", "", {"seed": first, "size": count, "index": index})
