"""The parts of long tests that .ci/run takes: together they are all, and each has its share of every group."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from support.parts import PART, in_part

GROUPS = {"a": ("jobs", "x"), "b": ("jobs", "x"), "c": ("jobs", "y"), "d": ("rows",), "e": ("rows",), "f": None}


def item(name: str) -> Any:
    args = GROUPS[name]
    mark = None if args is None else SimpleNamespace(args=args)
    return SimpleNamespace(nodeid=name, get_closest_marker=lambda kind: mark if kind == "alike" else None)


def taken(monkeypatch: pytest.MonkeyPatch, part: str | None) -> list[str]:
    monkeypatch.delenv(PART, raising=False)
    if part:
        monkeypatch.setenv(PART, part)
    selected, deselected = in_part([item(name) for name in GROUPS])
    assert sorted(test_item.nodeid for test_item in [*selected, *deselected]) == sorted(GROUPS)
    return [test_item.nodeid for test_item in selected]


def test_parts_of_a_group_cover_all_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    assert taken(monkeypatch, None) == sorted(GROUPS)
    # Those of one name stay together, and what is like no other is in every part.
    assert taken(monkeypatch, "0/2") == ["a", "b", "d", "f"]
    assert taken(monkeypatch, "1/2") == ["c", "e", "f"]
    assert taken(monkeypatch, "7/2") == taken(monkeypatch, "1/2")
