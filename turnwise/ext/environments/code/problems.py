"""Programming problems in one representation for all datasets."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

Kind: TypeAlias = Literal["asserts", "calls", "programs"]


@dataclass(frozen=True, slots=True)
class Case:
    """A test stated as data.

    Attributes:
        input: Arguments of the call, or the standard input.
        expected: Expected result or standard output. It never enters a sandbox.
        hidden: Whether the model is not shown it.
    """

    input: Any
    expected: Any
    hidden: bool = True


@dataclass(frozen=True, slots=True)
class Asserts:
    """Tests written as code.

    Attributes:
        check: Code that defines ``check(candidate)``, or empty.
        prelude: Helper functions and setup for the tests.
        imports: Import statements, skipped where the module is missing.
        hidden: How many of the last ``tests`` the model is not shown.
    """

    tests: tuple[str, ...] = ()
    check: str = ""
    prelude: str = ""
    imports: tuple[str, ...] = ()
    hidden: int = 0


@dataclass(frozen=True, slots=True)
class Problem:
    """A programming problem.

    Attributes:
        kind: ``asserts``: code that asserts; ``calls``: function calls with results; ``programs``: inputs with outputs.
        entry: The function called, perhaps ``Solution.name``; empty where the tests name it.
        opening: Code that an answer may continue or replace (a signature with its docstring, imports).
        starter: Starter code shown to the model.
        cases: The tests of ``calls`` and ``programs``.
        asserts: The tests of ``asserts``.
        reference: A correct solution, or None.
        seconds: Seconds for a test, where the row sets them.
        memory: Bytes for a test, where the row sets them.
    """

    kind: Kind
    format: str
    entry: str = ""
    opening: str = ""
    starter: str = ""
    cases: tuple[Case, ...] = ()
    asserts: Asserts = field(default_factory=Asserts)
    reference: str | None = None
    seconds: float | None = None
    memory: int | None = None
