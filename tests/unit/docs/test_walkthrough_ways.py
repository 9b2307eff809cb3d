"""The ways in docs/walkthrough.md are those of the code: each file and function is there, and hands on to the next.

A way is a section "The way of ..." with a numbered list of ``path`` and ``function``. Each function is called by an
earlier one of the list, and in the order of the list. Where no call leads to it, the item says in brackets what its
file and the one before it both name: the class that is handed on, or the route of a request (``takes `Trajectory` ``,
``over `/route` ``).
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "walkthrough.md").read_text(encoding="utf-8")
ITEM = re.compile(r"^(\d+)\. `(?P<path>[\w/.]+)` `(?P<function>[\w.]+)`(?: \(\w+ `(?P<link>[^`]+)`\))?", re.MULTILINE)
MOST_FILES = {"The way of a reward": 6, "The way of a sampled id": 28}


@dataclass(frozen=True)
class Stop:
    """One item of a way."""

    path: str
    function: str
    link: str | None = None


def ways(page: str) -> dict[str, list[Stop]]:
    """The lists of a page by their headings; an item that cannot be read is an error."""
    stops_by_heading: dict[str, list[Stop]] = {}
    for heading, text in re.findall(r"^## (The way of [^\n]+)\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL):
        items = list(ITEM.finditer(text))
        numbers = [int(number) for number in re.findall(r"^(\d+)\. ", text, re.MULTILINE)]
        assert numbers == list(range(1, len(items) + 1)), f"{heading}: an item is not `path` `function`"
        stops_by_heading[heading] = [Stop(item["path"], item["function"], item["link"]) for item in items]
    return stops_by_heading


def definition(text: str, name: str) -> ast.AST | None:
    """The function or class of a file, a method as ``Class.method``."""
    node: ast.AST = ast.parse(text)
    for part in name.split("."):
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        inner = [node for node in ast.iter_child_nodes(node) if isinstance(node, kinds) and node.name == part]
        if not inner:
            return None
        node = inner[0]
    return node


def called(node: ast.AST, name: str) -> tuple[int, int] | None:
    """Where a definition calls a function first: line and column."""
    short_name = name.rpartition(".")[2]
    names = {short_name} | ({name.split(".")[-2]} if short_name == "__init__" else set())
    lines = [
        (call.lineno, call.col_offset)
        for call in ast.walk(node)
        if isinstance(call, ast.Call)
        and (call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", None)) in names
    ]
    return min(lines) if lines else None


def broken(stops: list[Stop], texts: dict[str, str]) -> list[str]:
    """What does not hold of a way, given the files' texts."""
    nodes = [definition(texts.get(stop.path, ""), stop.function) for stop in stops]
    problems = [f"{stop.path} has no {stop.function}" for stop, node in zip(stops, nodes, strict=True) if node is None]
    paths = [stop.path for number, stop in enumerate(stops) if number == 0 or stops[number - 1].path != stop.path]
    problems += [f"{path} is entered again" for path in sorted(set(paths)) if paths.count(path) > 1]
    placed: dict[int, tuple[int, int]] = {}
    for number, stop in enumerate(stops[1:], start=1):
        previous = stops[number - 1]
        if stop.link is not None:
            missing = [path for path in (previous.path, stop.path) if stop.link not in texts.get(path, "")]
            problems += [f"{path} does not name {stop.link}" for path in missing]
            continue
        callers = [(i, line) for i in range(number) if (node := nodes[i]) and (line := called(node, stop.function))]
        if not callers:
            problems.append(f"no function before it on the list calls {stop.function}")
            continue
        caller, line = callers[-1]
        if line < placed.get(caller, (0, 0)):
            problems.append(f"{stops[caller].function} calls {stop.function} before what stands above it")
        placed[caller] = line
    return problems


def test_the_way_of_a_reward_is_there() -> None:
    assert "The way of a reward" in ways(PAGE)


@pytest.mark.parametrize("heading", ways(PAGE))
def test_walks_lead_from_file_to_file(heading: str) -> None:
    stops = ways(PAGE)[heading]
    assert len(stops) > 1
    missing = sorted({stop.path for stop in stops if not (ROOT / stop.path).is_file()})
    assert not missing
    assert broken(stops, {stop.path: (ROOT / stop.path).read_text(encoding="utf-8") for stop in stops}) == []
    assert len({stop.path for stop in stops}) <= MOST_FILES[heading]


FILES = {
    "a.py": "class Row: ...\n\ndef first(row: Row):\n    x = second(row)\n    return Box.third(x)\n",
    "b.py": "def second(row): ...\n",
    "c.py": "# a Row\nclass Box:\n    def third(x): ...\n",
}
FIRST, SECOND, THIRD = Stop("a.py", "first"), Stop("b.py", "second"), Stop("c.py", "Box.third")


def test_a_way_that_does_not_hold_is_found_out() -> None:
    assert broken([FIRST, SECOND, THIRD], FILES) == []
    assert broken([FIRST, Stop("c.py", "Box.third", "Row")], FILES) == []
    assert broken([FIRST, THIRD, SECOND], FILES) == ["first calls second before what stands above it"]
    assert broken([SECOND, THIRD], FILES) == ["no function before it on the list calls Box.third"]
    assert broken([FIRST, Stop("b.py", "gone")], FILES)[0] == "b.py has no gone"
    assert broken([FIRST, SECOND, Stop("a.py", "Row", "Row")], FILES) == [
        "a.py is entered again",
        "b.py does not name Row",
    ]


def test_a_list_is_read_whole() -> None:
    items = "1. `a.py` `first`: it\n   goes on.\n2. `c.py` `Box.third` (takes `Row`): the end.\n"
    page = f"## The way of a box\n\n{items}\n## Other\n"
    assert ways(page) == {"The way of a box": [FIRST, Stop("c.py", "Box.third", "Row")]}
    with pytest.raises(AssertionError, match="an item is not"):
        ways(page.replace("`first`", "first"))
