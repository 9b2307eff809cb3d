"""Checks of a test (asserted values, truths and expected exceptions), and their alterations.

Only checks that every passing run reaches count: top-level statements of the test's body, and of the body of a ``for``
over a non-empty literal, up to the first statement that may leave the test.
"""

from __future__ import annotations

import ast
import builtins
import random
import string
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef

_OPPOSITES: Final = {
    "assertEqual": "assertNotEqual",
    "assertTrue": "assertFalse",
    "assertIs": "assertIsNot",
    "assertIsNone": "assertIsNotNone",
    "assertIn": "assertNotIn",
    "assertIsInstance": "assertNotIsInstance",
    "assertGreater": "assertLessEqual",
    "assertLess": "assertGreaterEqual",
    "assertRegex": "assertNotRegex",
    "assertAlmostEqual": "assertNotAlmostEqual",
}
_OPPOSITE: Final = _OPPOSITES | {there: here for here, there in _OPPOSITES.items()}
_COMPARES: Final = ("assertEqual", "assertIs", "assertListEqual", "assertDictEqual", "assertTupleEqual")
_RAISES: Final = ("raises", "assertRaises", "assertRaisesRegex")
_NOT_LITERAL: Final = (ast.Name, ast.Call, ast.Attribute, ast.JoinedStr, ast.Lambda, ast.Starred, ast.BinOp)
_BLOCK: Final = 16
_SIGNS: Final = "!#%&*+-/:;<=>?@^"
_EXCEPTIONS: Final = ("ValueError", "TypeError", "KeyError", "IndexError", "AttributeError", "ZeroDivisionError")


@dataclass(frozen=True, slots=True)
class Edit:
    """One alteration of a check.

    Attributes:
        check: Index of the check in :func:`checks_of`.
        leaf: Index of the literal in :attr:`Check.leaves`; ``REVERSED`` or ``EXCEPTION``.
        text: Source of the new literal or exception; "" for ``REVERSED``.
    """

    check: int
    leaf: int
    text: str = ""


REVERSED: Final = -1
"""The check must fail: an assertion is negated, an exception must not be raised."""
EXCEPTION: Final = -2
"""Another exception must be raised."""


@dataclass(frozen=True, slots=True)
class Check:
    """A check of a test function, inside its syntax tree.

    Attributes:
        body: The list of statements that contains it.
        index: Its index there.
        kind: ``value`` (compared with a literal), ``truth``, or ``raises``.
        leaves: The literals of the expected value, for ``value``.
        pure: Whether the expected value is made of literals only, so that different ones are never equal.
        rows: Whether the leaves are the values of a parameter, one for each case of the test.
    """

    body: list[ast.stmt]
    index: int
    kind: str
    leaves: tuple[ast.Constant, ...] = ()
    expected: ast.expr | None = None
    pure: bool = False
    rows: bool = False

    @property
    def statement(self) -> ast.stmt:
        """The check's statement."""
        return self.body[self.index]

    def apply(self, edit: Edit) -> None:
        """Alter the check in its tree."""
        if edit.leaf >= 0:
            self.leaves[edit.leaf].value = ast.literal_eval(edit.text)
        elif edit.leaf == EXCEPTION:
            _raises_call(self.statement).args[0] = ast.parse(edit.text, mode="eval").body
        else:
            self._reverse()

    def _reverse(self) -> None:
        statement = self.statement
        if isinstance(statement, ast.Assert):
            test = statement.test
            if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
                statement.test = test.operand
            else:
                statement.test = ast.UnaryOp(ast.Not(), test)
        elif isinstance(statement, ast.Expr):
            method = statement.value.func  # type: ignore[attr-defined]
            method.attr = _OPPOSITE.get(method.attr, "assertNotEqual")
        else:
            self.body[self.index : self.index + 1] = statement.body  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class _ValueSources:
    """Sources of expected values: the test's parameters with their literals, and functions of its file."""

    rows: dict[str, list[ast.Constant]]
    makers: Collection[str]


def checks_of(function: Function, makers: Collection[str] = ()) -> list[Check]:
    """Return the checks that every passing run of a test reaches, in order.

    Args:
        function: The test.
        makers: Functions of its file whose results are expected values, such as ``eur(3)``.
    """
    sources = _ValueSources(_parameters(function), makers)
    return [
        check
        for body, index in _reached_statements(function.body)
        if (check := _check_at(body, index, sources)) is not None
    ]


def _reached_statements(body: list[ast.stmt]) -> Iterator[tuple[list[ast.stmt], int]]:
    for index, statement in enumerate(body):
        yield body, index
        if _may_leave(statement):
            return
        if isinstance(statement, ast.For) and isinstance(statement.iter, (ast.Tuple, ast.List)) and statement.iter.elts:
            yield from _reached_statements(statement.body)


def _may_leave(statement: ast.AST) -> bool:
    """Whether control may leave the body of the test without a failure."""
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
        return False
    if isinstance(statement, (ast.Return, ast.Break, ast.Continue, ast.Yield, ast.YieldFrom)):
        return True
    return any(_may_leave(child) for child in ast.iter_child_nodes(statement))


def _check_at(body: list[ast.stmt], index: int, sources: _ValueSources) -> Check | None:
    statement = body[index]
    if isinstance(statement, ast.Assert):
        test = statement.test
        if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], (ast.Eq, ast.Is)):
            sides = (test.comparators[0], test.left)
            return _value_check(body, index, sides, sources, same=isinstance(test.ops[0], ast.Is))
        return Check(body, index, "truth")
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        call = statement.value
        name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
        if name in _COMPARES and len(call.args) >= 2:
            return _value_check(body, index, (call.args[1], call.args[0]), sources, same=name == "assertIs")
        return Check(body, index, "truth") if name in _OPPOSITE else None
    if (
        isinstance(statement, ast.With)
        and len(statement.items) == 1
        and _expects_exception(statement.items[0].context_expr)
    ):
        return Check(body, index, "raises")
    return None


def _value_check(
    body: list[ast.stmt], index: int, sides: Sequence[ast.expr], sources: _ValueSources, *, same: bool
) -> Check:
    """Return the check of a comparison; the expected value is the literal side, the right one if both qualify."""
    for side in sides:
        if _is_literal(side) and not all(_is_literal(other) for other in sides):
            return Check(body, index, "value", _leaves(side, same=same), side, pure=True)
    for side in sides:
        if isinstance(side, ast.Name) and side.id in sources.rows and not same:
            return Check(body, index, "value", tuple(sources.rows[side.id]), side, pure=True, rows=True)
    for side in sides:
        if not same and _is_constructed(side, sources.makers):
            return Check(body, index, "value", _leaves(side, same=False), side)
    return Check(body, index, "value")


def _is_literal(node: ast.expr) -> bool:
    return not any(isinstance(child, _NOT_LITERAL) for child in ast.walk(node)) and _evaluates(node)


def _evaluates(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False
    return True


def _is_constructed(node: ast.expr, makers: Collection[str]) -> bool:
    """Whether an expression consists of literals and constructor calls such as ``Money(3, "EUR")``."""
    if isinstance(node, ast.Call):
        name = _called_name(node)
        constructor = name[:1].isupper() or name in ("date", "datetime", "time", "timedelta") or name in makers
        return constructor and not node.keywords and all(_is_constructed(argument, makers) for argument in node.args)
    if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
        return all(_is_constructed(element, makers) for element in node.elts)
    return _is_literal(node)


def _leaves(node: ast.expr, *, same: bool) -> tuple[ast.Constant, ...]:
    """Return the literals of an expression that have alternatives; if compared by identity, only True and False."""
    literals = [
        child for child in ast.walk(node) if isinstance(child, ast.Constant) and len(_class_of(child.value)) > 1
    ]
    return tuple(literal for literal in literals if not same or isinstance(literal.value, bool))


def _parameters(function: Function) -> dict[str, list[ast.Constant]]:
    """Return the literals of each parameter of a test's single ``parametrize``, by name."""
    literals: dict[str, list[ast.Constant]] = {}
    marks = [mark for mark in function.decorator_list if isinstance(mark, ast.Call)]
    marks = [mark for mark in marks if isinstance(mark.func, ast.Attribute) and mark.func.attr == "parametrize"]
    for mark in marks:
        if len(marks) != 1 or len(mark.args) < 2 or not isinstance(mark.args[1], (ast.List, ast.Tuple)):
            continue
        names = _names(mark.args[0])
        for case in mark.args[1].elts:
            for name, value in zip(names, _case_arguments(case, len(names)), strict=False):
                if isinstance(value, ast.Constant) and len(_class_of(value.value)) > 2:
                    literals.setdefault(name, []).append(value)
    # Altering a parameter that is also an input would alter both sides.
    used = [node.id for part in function.body for node in ast.walk(part) if isinstance(node, ast.Name)]
    return {name: values for name, values in literals.items() if used.count(name) == 1}


def _names(node: ast.expr) -> list[str]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [name.strip() for name in node.value.split(",")]
    if isinstance(node, (ast.Tuple, ast.List)):
        return [str(element.value) for element in node.elts if isinstance(element, ast.Constant)]
    return []


def _case_arguments(case: ast.expr, count: int) -> list[ast.expr]:
    if isinstance(case, ast.Call):
        return case.args if _called_name(case) == "param" else []
    if count > 1:
        return case.elts if isinstance(case, (ast.Tuple, ast.List)) else []
    return [case]


def _expects_exception(node: ast.expr) -> bool:
    if not isinstance(node, ast.Call) or not node.args:
        return False
    return _called_name(node) in _RAISES


def _raises_call(statement: ast.stmt) -> ast.Call:
    assert isinstance(statement, ast.With)
    call = statement.items[0].context_expr
    assert isinstance(call, ast.Call)
    return call


def _class_of(value: object) -> list[str]:
    """Return the sources of a literal's alternatives, itself included.

    Each of them has the same alternatives, so that the original cannot be told from the others.
    """
    return _alternatives(value, random.Random(0))


def _alternatives(value: object, rng: random.Random) -> list[str]:
    if isinstance(value, bool):
        return ["False", "True"]
    if isinstance(value, int):
        first = value // _BLOCK * _BLOCK
        return [repr(number) for number in range(first, first + _BLOCK)]
    if isinstance(value, float):
        if value.is_integer() and abs(value) < 2**53:
            return [repr(float(number)) for number in _alternatives(int(value), rng)]
        text = repr(value)
        return [] if not text[-1].isdigit() or "e" in text else [text[:-1] + digit for digit in string.digits[1:]]
    if isinstance(value, (str, bytes)):
        return _respelled(value, rng)
    return []


def _respelled(value: str | bytes, rng: random.Random) -> list[str]:
    """Exchange one character: a digit if it has one, else a letter, else a sign."""
    text = value.decode("latin-1") if isinstance(value, bytes) else value
    for alphabet in (string.digits, string.ascii_lowercase, string.ascii_uppercase, _SIGNS):
        indices = [index for index, character in enumerate(text) if character in alphabet]
        if indices:
            index = rng.choice(indices)
            spellings = [text[:index] + character + text[index + 1 :] for character in alphabet]
            return [
                repr(spelling.encode("latin-1") if isinstance(value, bytes) else spelling) for spelling in spellings
            ]
    return []


@dataclass(frozen=True, slots=True)
class Alteration:
    """One way to alter a test, as one or more twins.

    Attributes:
        kind: ``value``, ``made`` (of a value that code of the repository makes), ``truth`` or ``raises``.
        twins: The edits of each twin; no correct program passes one.
        reversal: Edits that reverse the check.
        rows: Whether parameters of cases are altered, which may change the names of the cases.
    """

    kind: str
    twins: list[tuple[Edit, ...]] = field(default_factory=list)
    reversal: tuple[Edit, ...] = ()
    rows: bool = False


def alterations(
    function: Function, limit: int, rng: random.Random, *, makers: Collection[str] = (), since: int = 0
) -> list[Alteration]:
    """Return the alterations of a test, the best first.

    Args:
        function: The test.
        limit: Most twins of each alteration.
        rng: Draws literals and checks.
        makers: See :func:`checks_of`.
        since: First line of usable checks, if any follow: earlier ones pass without the solution.
    """
    checks = checks_of(function, makers)
    numbers = [number for number, check in enumerate(checks) if (check.statement.end_lineno or 0) >= since]
    numbers = numbers or list(range(len(checks)))
    options = [_value_alteration(checks, number, limit, rng) for number in numbers if checks[number].leaves]
    # The first check before later ones, which a program without the solution may never reach.
    options.sort(
        key=lambda option: (option.twins[0][0].check != numbers[0] if option.twins else True, option.kind != "value")
    )
    truths = [number for number in numbers if checks[number].kind == "truth"]
    if truths:
        options.append(_truth_alteration(truths, limit, rng))
    options += [
        _exception_alteration(checks, number, limit, rng) for number in numbers if checks[number].kind == "raises"
    ]
    options += [Alteration("truth", [(Edit(number, REVERSED),)], (Edit(number, REVERSED),)) for number in numbers]
    return [option for option in options if option.twins]


def _value_alteration(checks: list[Check], number: int, limit: int, rng: random.Random) -> Alteration:
    check, reversal = checks[number], (Edit(number, REVERSED),)
    if check.rows:
        literals = [_draw_literals(leaf.value, limit, rng) for leaf in check.leaves]
        edits = [
            tuple(Edit(number, leaf, texts[twin]) for leaf, texts in enumerate(literals))
            for twin in range(min(map(len, literals)))
        ]
        return Alteration("value", edits, reversal, rows=True)
    plain = [leaf for leaf, constant in enumerate(check.leaves) if isinstance(constant.value, (int, float))]
    leaf = rng.choice(plain or range(len(check.leaves)))
    texts = _draw_literals(check.leaves[leaf].value, limit, rng)
    if check.pure:
        texts = _distinct_literals(check, leaf, texts)
    return Alteration("value" if check.pure else "made", [(Edit(number, leaf, text),) for text in texts], reversal)


def _draw_literals(value: object, limit: int, rng: random.Random) -> list[str]:
    alternatives = [text for text in _alternatives(value, rng) if text != repr(value)]
    return rng.sample(alternatives, min(limit, len(alternatives)))


def _distinct_literals(check: Check, leaf: int, texts: list[str]) -> list[str]:
    """Return the literals whose expected values differ from each other and from the original."""
    assert check.expected is not None
    node, original = check.leaves[leaf], check.leaves[leaf].value
    seen = [ast.literal_eval(check.expected)]
    distinct = []
    for text in texts:
        node.value = ast.literal_eval(text)
        value = ast.literal_eval(check.expected)
        if value not in seen:
            seen.append(value)
            distinct.append(text)
    node.value = original
    return distinct


def _truth_alteration(truths: list[int], limit: int, rng: random.Random) -> Alteration:
    """Negate every subset of a few assertions, so that the original cannot be told from the twins."""
    count = min(len(truths), max(1, (limit + 1).bit_length() - 1))
    picked = [truths[0], *rng.sample(truths[1:], count - 1)]
    twins = [
        tuple(Edit(number, REVERSED) for bit, number in enumerate(picked) if bits >> bit & 1)
        for bits in range(1, 2**count)
    ]
    return Alteration("truth", rng.sample(twins, min(limit, len(twins))), (Edit(picked[0], REVERSED),))


def _exception_alteration(checks: list[Check], number: int, limit: int, rng: random.Random) -> Alteration:
    reversal = (Edit(number, REVERSED),)
    kind = _raises_call(checks[number].statement).args[0]
    name = kind.id if isinstance(kind, ast.Name) else kind.attr if isinstance(kind, ast.Attribute) else ""
    if not name:
        return Alteration("raises", [reversal], reversal)
    real = vars(builtins).get(name)
    unrelated = [alternative for alternative in _EXCEPTIONS if not _related(real, vars(builtins)[alternative])]
    names = rng.sample(unrelated, min(limit, len(unrelated)))
    return Alteration("raises", [(Edit(number, EXCEPTION, alternative),) for alternative in names], reversal)


def _related(raised: object, other: type) -> bool:
    return isinstance(raised, type) and (issubclass(raised, other) or issubclass(other, raised))


def _called_name(call: ast.Call) -> str:
    """Return the last part of the called function's name, or ""."""
    if isinstance(call.func, ast.Name):
        return call.func.id
    return call.func.attr if isinstance(call.func, ast.Attribute) else ""
