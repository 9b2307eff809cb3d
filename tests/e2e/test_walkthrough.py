"""The page that follows one task through the code says what the code does, and the code can be read in its order."""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "turnwise"
DOCS = ROOT / "docs"
sys.path.insert(0, str(ROOT / "examples" / "walkthrough"))

import blocks  # noqa: E402
import quotes  # noqa: E402

# What is called ahead of its place on the path: a name is looked up, and the trainer waits for the group.
AHEAD = {"make_agent", *(f"LocalReplayBuffer.{name}" for name in ("sample", "ready", "in_flight"))}
# What keeps an episode on disk when it ends, which no later step reads.
ASIDE = "trajectory_file.py"

NUMBER = re.compile(r"(?<![\w.])\d+(?:,\d{3})*(?:\.\d+)?(?![\w.]*\d)")


class Trail:
    """Follows the calls into files of the package: which file is entered when, and from which one.

    Attributes:
        entered: Files in the order of their first call.
        calls: (calling file, called file), with the first such call.
    """

    def __init__(self) -> None:
        self.entered: list[str] = []
        self.calls: dict[tuple[str, str], str] = {}

    def __enter__(self) -> Trail:
        self._before = sys.getprofile()
        threading.setprofile(self._follow)
        sys.setprofile(self._follow)
        return self

    def __exit__(self, *exc: object) -> None:
        sys.setprofile(self._before)
        threading.setprofile(None)  # type: ignore[arg-type]

    def _follow(self, frame: FrameType, event: str, _: Any) -> None:
        # A function's frame, not a module's or a class body's.
        if event != "call" or not frame.f_code.co_flags & inspect.CO_OPTIMIZED:
            return
        file, name = _place(frame), frame.f_code.co_qualname
        if file is None or file == ASIDE:
            return
        caller = frame.f_back
        while caller is not None and _place(caller) is None:
            caller = caller.f_back
        if name in AHEAD or (caller is not None and caller.f_code.co_qualname in AHEAD):
            return
        if caller is not None and _place(caller) == ASIDE:
            return
        if file not in self.entered:
            self.entered.append(file)
        if caller is not None and (source := _place(caller)) not in (None, file):
            self.calls.setdefault((str(source), file), f"{caller.f_code.co_qualname} -> {name}")


def _place(frame: FrameType) -> str | None:
    path = frame.f_code.co_filename
    return path[len(str(PACKAGE)) + 1 :] if path.startswith(f"{PACKAGE}/") else None


@pytest.fixture(scope="module")
def trail() -> Trail:
    return Trail()


@pytest.fixture(scope="module")
def printed(trail: Trail) -> list[blocks.Block]:
    return quotes.printed(lambda: trail)


@pytest.fixture(scope="module")
def page() -> str:
    return (DOCS / "walkthrough.md").read_text()


def sections(page: str) -> list[str]:
    return re.findall(r"^## turnwise/(\S+)$", page, re.MULTILINE)


def test_printed_blocks_equal_those_of_the_page(printed: list[blocks.Block], page: str) -> None:
    differences = blocks.differences(page, printed)
    assert not differences, "python examples/walkthrough/main.py --write brings it up to date\n" + "\n\n".join(
        differences
    )


def test_each_file_has_one_section_in_order_of_entry(printed: list[blocks.Block], trail: Trail, page: str) -> None:
    named = sections(page)
    assert len(named) > 30
    assert [name for name in named if not (PACKAGE / name).is_file()] == []
    assert [name for name in named if name not in trail.entered] == []
    assert named == [name for name in trail.entered if name in named]


def test_calls_between_files_have_no_cycle(printed: list[blocks.Block], trail: Trail) -> None:
    inherited = set(_subclass_to_base())
    edges = {edge: how for edge, how in trail.calls.items() if edge not in inherited}
    reach: dict[str, set[str]] = {}
    for source, target in edges:
        reach.setdefault(source, set()).add(target)
    cycles = {(a, b): how for (a, b), how in edges.items() if a in _reachable(reach, b)}
    assert cycles == {}


def _subclass_to_base() -> Iterator[tuple[str, str]]:
    """Yield (file of a class, file of a base of it): a class may call what it inherits."""
    for name, module in list(sys.modules.items()):
        if not name.startswith("turnwise."):
            continue
        for value in vars(module).values():
            if inspect.isclass(value) and value.__module__ == name:
                for base in value.__mro__[1:]:
                    if base.__module__.startswith("turnwise.") and base.__module__ != name:
                        yield _file_of(name), _file_of(base.__module__)


def _file_of(module: str) -> str:
    return str(Path(str(sys.modules[module].__file__)).relative_to(PACKAGE))


def _reachable(edges: dict[str, set[str]], start: str) -> set[str]:
    seen, pending = set[str](), [start]
    while pending:
        for name in edges.get(pending.pop(), ()):
            if name not in seen:
                seen.add(name)
                pending.append(name)
    return seen


def test_numbers_between_the_blocks_are_numbers_of_the_blocks(page: str) -> None:
    quoted = set(NUMBER.findall("\n".join(block.text for block in blocks.read(page))))
    prose = re.sub(r"```.*?```|<!--.*?-->|^\d+\. ", "", page, flags=re.DOTALL | re.MULTILINE)
    numbers = {number for number in NUMBER.findall(prose) if float(number.replace(",", "")) > 4}
    assert len(numbers) > 5
    assert numbers <= quoted


def test_links_of_both_pages_resolve() -> None:
    for name in ("walkthrough.md", "concepts.md"):
        links = re.findall(r"\]\(([^)#]+)[^)]*\)", (DOCS / name).read_text())
        assert links
        assert [link for link in links if "://" not in link and not (DOCS / link).exists()] == []


def test_every_word_that_the_concepts_point_to_is_a_file_of_the_package() -> None:
    named = re.findall(r"`((?:turnwise/)[\w./]+)`", (DOCS / "concepts.md").read_text())
    assert len(named) > 5
    assert [name for name in named if not (ROOT / name).exists()] == []


# The comparison itself: what must not pass does not pass.

EXACT = blocks.Block("mask", "loss_mask 0 0 1 1\nids 4 5\n")
ABOUT = blocks.Block("loss", "loss -0.1833  tokens 27\n", approximate=True)
PAGE = f"# Title\n\ntext\n\n{EXACT.markdown()}\n\nmore\n\n{ABOUT.markdown()}\n"


def with_text(block: blocks.Block, old: str, new: str) -> blocks.Block:
    assert old in block.text
    return dataclasses.replace(block, text=block.text.replace(old, new))


def test_a_page_with_all_blocks_as_printed_has_no_difference() -> None:
    assert blocks.read(PAGE) == [EXACT, ABOUT]
    assert blocks.differences(PAGE, [EXACT, ABOUT]) == []


@pytest.mark.parametrize(
    ("printed_now", "message"),
    [
        ([with_text(EXACT, "0 0 1 1", "0 1 1 1"), ABOUT], "block 'mask' on the page"),
        ([with_text(EXACT, "ids 4 5", "ids 4 5 "), ABOUT], "block 'mask' on the page"),
        ([EXACT, with_text(ABOUT, "-0.1833", "-0.1933")], "block 'loss' on the page"),
        ([EXACT, with_text(ABOUT, "-0.1833", "0.1833")], "block 'loss' on the page"),
        ([EXACT, with_text(ABOUT, "27", "28")], "block 'loss' on the page"),
        ([EXACT, dataclasses.replace(ABOUT, approximate=False)], "block 'loss' on the page"),
        ([dataclasses.replace(EXACT, approximate=True), ABOUT], "block 'mask' on the page"),
        ([EXACT, ABOUT, blocks.Block("new", "1\n")], "block 'new' is printed, but not on the page"),
        ([EXACT], "block 'loss' is on the page, but not printed"),
        ([ABOUT, EXACT], "another order"),
    ],
)
def test_difference_of_a_page_is_reported(printed_now: list[blocks.Block], message: str) -> None:
    [difference] = blocks.differences(PAGE, printed_now)
    assert message in difference


def test_decimals_of_an_approximate_block_may_differ_in_their_last_digits() -> None:
    assert blocks.differences(PAGE, [EXACT, with_text(ABOUT, "-0.1833", "-0.1834")]) == []


def test_duplicate_or_unfenced_block_is_reported() -> None:
    assert "block 'mask' stands twice" in blocks.differences(PAGE + EXACT.markdown(), [EXACT, ABOUT])[0]
    broken = PAGE + "\n<!-- block: lost -->\ntext\n"
    assert "not followed by a fenced" in blocks.differences(broken, [EXACT, ABOUT])[0]


def test_writing_replaces_blocks_and_nothing_else() -> None:
    now = [with_text(EXACT, "0 0 1 1", "0 1 1 1"), with_text(ABOUT, "-0.1833", "-0.25")]
    new = blocks.written(PAGE, now)
    assert blocks.read(new) == now
    assert [line for line in new.splitlines() if "text" in line] == [x for x in PAGE.splitlines() if "text" in x]
    assert blocks.written(new, [EXACT, ABOUT]) == PAGE
