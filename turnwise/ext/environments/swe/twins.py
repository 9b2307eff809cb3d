"""Contradictory twins: a test file with altered copies of each test, all under random names.

A twin is altered such that no program passes both: another expected literal, or an assertion reversed. Names are drawn
anew for each run, and only the judge has the mapping; the file does not reveal which copy is the test.
"""

from __future__ import annotations

import ast
import copy
import random
import re
import secrets
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from turnwise.ext.environments.swe.checks import Edit, Function, checks_of
from turnwise.ext.environments.swe.logs import Statuses, TestStatus

VERSION: Final = 2
"""Version of the alterations and their records, part of the key of cached plans."""
_PLAIN_BASES: Final = ("object", "TestCase", "IsolatedAsyncioTestCase")
_NOT_TESTS: Final = ("fixture", "xfail", "hookimpl", "expectedFailure", "property", "staticmethod", "classmethod")
_BY_NAME: Final = re.compile(
    r"(?:^|\s)(?:-[vqsl]*x[vqsl]*|-k|--exitfirst|--maxfail\S*|--deselect\S*|--lf|--ff|--sw|--stepwise)(?:\s|$)"
)


@dataclass(frozen=True, slots=True)
class Family:
    """A test and its twins.

    Attributes:
        path: The test's file.
        test: Its name there: ``test_a`` or ``TestB::test_a``.
        kind: See :class:`~turnwise.ext.environments.swe.checks.Alteration`.
        twins: The edits of each twin.
        reversal: Edits of a twin that nothing deterministic passes together with the test.
        cases: Names of the test's cases in order: ``[a-1]``; of one without parameters ``("",)``.
        rows: Whether the names of a twin's cases may differ, so that they are counted.
        void: Cases that the twins do not check.
    """

    path: str
    test: str
    kind: str
    twins: tuple[tuple[Edit, ...], ...]
    reversal: tuple[Edit, ...] = ()
    cases: tuple[str, ...] = ("",)
    rows: bool = False
    void: tuple[str, ...] = ()

    def node(self, case: str) -> str:
        """Return the name that pytest gives to a case of the test."""
        return f"{self.path}::{self.test}{case}"


@dataclass(frozen=True, slots=True)
class TwinPlan:
    """The twins of a row's tests.

    Attributes:
        families: Tests with their twins.
        files: SHA-256 of each file with twins at the time they were made.
        lacking: Tests that must be fixed and have no twin.
        reason: Why the row has no twin at all, or "".
    """

    families: tuple[Family, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    lacking: tuple[str, ...] = ()
    reason: str = ""


NO_TWINS: Final = TwinPlan()


@dataclass(slots=True)
class _Test:
    function: Function
    body: list[ast.stmt]


class TestFile:
    """The syntax tree of a test file, and the tests in it that can be renamed.

    Raises:
        ValueError: It cannot be parsed.
    """

    __test__ = False

    def __init__(self, path: str, text: str) -> None:
        self.path = path
        try:
            self._tree = ast.parse(text)
        except (SyntaxError, RecursionError, MemoryError) as error:
            raise ValueError(f"{path} is not Python {error}") from error
        self._tests = _tests(self._tree)
        functions = [statement for statement in self._tree.body if isinstance(statement, ast.FunctionDef)]
        self.makers = frozenset(
            function.name for function in functions if not function.name.startswith("test") and _is_test(function)
        )
        """Plain functions of the file, whose results tests expect."""

    @property
    def tests(self) -> dict[str, Function]:
        """The tests that can be renamed, by name."""
        return {name: test.function for name, test in self._tests.items()}

    def rewrite(self, members: Mapping[str, Sequence[tuple[str, tuple[Edit, ...]]]], *, only: bool = False) -> str:
        """Return the file's text with several copies of a test.

        Args:
            members: For each test the names and edits of its copies, in order.
            only: Whether other tests are left out.
        """
        tree = copy.deepcopy(self._tree)
        for name, test in _tests(tree).items():
            copies: list[ast.stmt] = [self._renamed(test.function, new, edits) for new, edits in members.get(name, ())]
            if copies or only:
                index = test.body.index(test.function)
                test.body[index : index + 1] = copies or [ast.Pass()]
        return ast.unparse(ast.fix_missing_locations(tree)) + "\n"

    def _renamed(self, function: Function, name: str, edits: Sequence[Edit]) -> Function:
        twin = copy.deepcopy(function)
        twin.name = name
        if isinstance(twin.body[0], ast.Expr) and isinstance(twin.body[0].value, ast.Constant) and len(twin.body) > 1:
            del twin.body[0]  # a docstring may reveal the expected value
        checks = checks_of(twin, self.makers)
        for edit in edits:
            checks[edit.check].apply(edit)
        for node in ast.walk(twin):
            if isinstance(node, ast.Assert):
                node.msg = None
        return twin


def _tests(tree: ast.Module) -> dict[str, _Test]:
    mentions = _mentions(tree)
    tests: dict[str, _Test] = {}
    for owner, body in _test_bodies(tree):
        functions = [statement for statement in body if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef))]
        counts = Counter(function.name for function in functions)
        for function in functions:
            name = function.name
            # A test that the file or a subclass mentions keeps its name.
            if name.startswith("test") and counts[name] == 1 and not mentions[name] and _is_test(function):
                tests[f"{owner}::{name}" if owner else name] = _Test(function, body)
    return tests


def _test_bodies(tree: ast.Module) -> list[tuple[str, list[ast.stmt]]]:
    """Return the bodies with tests: the module's, and those of classes that inherit none."""
    classes = [statement for statement in tree.body if isinstance(statement, ast.ClassDef)]
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    plain = [
        owner
        for owner in classes
        if owner.name not in used
        and not owner.keywords
        and all(_base_name(base) in _PLAIN_BASES for base in owner.bases)
    ]
    return [("", tree.body), *((owner.name, owner.body) for owner in plain)]


def _base_name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _mentions(tree: ast.Module) -> Counter[str]:
    """Count the names that a file mentions, in strings, too."""
    mentions: Counter[str] = Counter()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            mentions[node.id] += 1
        elif isinstance(node, ast.Attribute):
            mentions[node.attr] += 1
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            mentions.update(re.findall(r"\w+", node.value))
        elif isinstance(node, (ast.alias, ast.keyword)):
            mentions.update(
                re.findall(r"\w+", f"{node.name} {node.asname}" if isinstance(node, ast.alias) else str(node.arg))
            )
    return mentions


def _is_test(function: Function) -> bool:
    decorators = " ".join(ast.unparse(decorator) for decorator in function.decorator_list)
    nodes = [node for part in function.body for node in ast.walk(part)]
    return not any(word in decorators for word in _NOT_TESTS) and not any(
        isinstance(node, (ast.Yield, ast.YieldFrom)) for node in nodes
    )


def command_obstacle(command: str, files: Sequence[str]) -> str:
    """Return why a command cannot run further tests, or ""."""
    if _BY_NAME.search(" ".join([command, *files])):
        return "its command selects tests by name, or stops at a failure"
    return ""


@dataclass(frozen=True, slots=True)
class Member:
    """A test or a twin under its name in one run; ``twin`` is the index of the twin, -1 for the test."""

    family: Family
    twin: int
    name: str


@dataclass(slots=True)
class Roll:
    """The tests of one run under their fresh names.

    Attributes:
        members: By fresh name.
        names: Original names of tests without twins, by fresh name.
    """

    members: dict[str, Member] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)

    def read(self, statuses: Statuses) -> tuple[Statuses, dict[tuple[str, int], TestStatus]]:
        """Return the statuses of the tests by original names, and those of twins by case of a test and twin."""
        tests: Statuses = {}
        twins: dict[tuple[str, int], TestStatus] = {}
        seen: Counter[str] = Counter()
        for node, status in statuses.items():
            head, mark, case = node.partition("[")
            path, _, name = head.rpartition("::")
            member = self.members.get(name)
            if member is None:
                tests[f"{path}::{self.names[name]}{mark}{case}" if name in self.names else node] = status
                continue
            number, case = seen[name], f"{mark}{case}"
            seen[name] += 1
            if member.family.rows:
                cases = member.family.cases
                case = cases[number] if number < len(cases) else case
            real = member.family.node(case)
            if member.twin < 0:
                tests[real] = status
            else:
                twins[real, member.twin] = status
        return tests, twins

    def named(self, text: str) -> str:
        """Put the tests' own names into a text; a twin is ``test_a~2``."""

        def original(match: re.Match[str]) -> str:
            member = self.members.get(match[0])
            if member is None:
                return self.names.get(match[0], match[0])
            name = member.family.test.rpartition("::")[2]
            return name if member.twin < 0 else f"{name}~{member.twin + 1}"

        return re.sub(r"\btest_[0-9a-f]{16}\b", original, text)


def fresh_name() -> str:
    """Return a new name of a test; all have one form and length."""
    return f"test_{secrets.token_hex(8)}"


def enroll(file: TestFile, families: Collection[Family], rng: random.Random, roll: Roll) -> str:
    """Return a file's text with all its tests renamed and their twins added.

    Args:
        file: The file.
        families: Families of the file.
        rng: Shuffles.
        roll: Is extended by the file's names.
    """
    by_test = {family.test: family for family in families}
    members: dict[str, list[tuple[str, tuple[Edit, ...]]]] = {}
    for test in file.tests:
        family = by_test.get(test)
        if family is None:
            name = fresh_name()
            members[test] = [(name, ())]
            roll.names[name] = test.rpartition("::")[2]
            continue
        members_of_test: list[tuple[int, tuple[Edit, ...]]] = [(-1, ()), *enumerate(family.twins)]
        rng.shuffle(members_of_test)
        for twin, edits in members_of_test:
            member = Member(family, twin, fresh_name())
            roll.members[member.name] = member
            members.setdefault(test, []).append((member.name, edits))
    return file.rewrite(members)


def select(file: TestFile, selected: Collection[tuple[Family, int]], roll: Roll) -> str:
    """Return a file's text with one member of each selected family and no other test.

    Args:
        file: The file.
        selected: Families of the file, each with the index of a twin; -1 is the test, ``len(twins)`` its reversal.
        roll: Is extended by the file's names.
    """
    members = {}
    for family, twin in selected:
        name = fresh_name()
        roll.members[name] = Member(family, twin, name)
        edits: tuple[Edit, ...] = () if twin < 0 else (*family.twins, family.reversal)[twin]
        members[family.test] = [(name, edits)]
    return file.rewrite(members, only=True)
