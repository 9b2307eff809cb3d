"""A programming problem, whatever dataset it comes from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

Kind: TypeAlias = Literal["asserts", "calls", "programs"]


@dataclass(frozen=True, slots=True)
class Case:
    """One test of a problem whose tests are data.

    Attributes:
        given: Arguments of the call, or the text on the standard input.
        wanted: What the call returns, or the text on the standard output. It never enters a sandbox.
        hidden: Whether the model is not shown it.
    """

    given: Any
    wanted: Any
    hidden: bool = True


@dataclass(frozen=True, slots=True)
class Asserts:
    """Tests that are code.

    Attributes:
        tests: Statements, each a test.
        check: Code that defines ``check(candidate)``; empty where there is none.
        prelude: Code that the tests stand on: helper functions of the prompt, setup.
        imports: Import statements, made where the module is there.
        hidden: How many of ``tests``, at the end, the model is not shown.
    """

    tests: tuple[str, ...] = ()
    check: str = ""
    prelude: str = ""
    imports: tuple[str, ...] = ()
    hidden: int = 0


@dataclass(frozen=True, slots=True)
class Problem:
    """What is asked, and how an answer is judged.

    Attributes:
        kind: ``asserts``: code that asserts; ``calls``: calls of a function with their results; ``programs``: inputs of
            a program with their outputs.
        format: Which dataset's form the row has.
        entry: The function that is called, perhaps ``Solution.name``; empty where tests name what they use.
        opening: Code that an answer may go on from, or replace (a signature with its docstring, imports).
        starter: Code that the model is shown as a beginning.
        cases: The tests of ``calls`` and ``programs``.
        asserts: The tests of ``asserts``.
        reference: Code that is right, or None.
        seconds: Seconds that a test may take, where the row says so.
        memory: Bytes that a test may take, where the row says so.
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
