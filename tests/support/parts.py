"""Parts of test runs: of long tests that guard the same, .ci/run takes some each time, `make test-long` all."""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest

PART = "TURNWISE_TESTS_PART"
"""In the environment: ``NUMBER/OF``, the part of each group of tests marked ``alike`` that runs; without it, all."""


def in_part(items: Sequence[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Split tests into those that this run takes and those that it leaves out.

    The members of a group are numbered in the order of their names, so that every part has as many of them.
    """
    part = os.environ.get(PART)
    if not part:
        return list(items), []
    number, of = (int(figure) for figure in part.split("/"))
    groups: dict[str, list[str]] = {}
    for item in items:
        if (position := _place(item)) is not None:
            groups.setdefault(position[0], []).append(position[1])
    order = {(group, name): index for group, names in groups.items() for index, name in enumerate(sorted(set(names)))}
    selected: list[pytest.Item] = []
    deselected: list[pytest.Item] = []
    for item in items:
        position = _place(item)
        (selected if position is None or order[position] % of == number % of else deselected).append(item)
    return selected, deselected


def _place(item: pytest.Item) -> tuple[str, str] | None:
    """Return the group of a test and its name there; None for one that is like no other."""
    mark = item.get_closest_marker("alike")
    if mark is None:
        return None
    group, *name = mark.args
    return group, name[0] if name else item.nodeid
