"""Checks of a test: asserted values, asserted truth and expected exceptions, and how each is altered or reversed.

Only checks are found that every passing run of the test reaches: statements at the top of its body, and of the body of
a ``for`` over a literal that is not empty, up to the first statement that may leave the test.
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
        place: Its index there.
        kind: ``value`` (compared with a literal), ``truth``, or ``raises``.
        leaves: The literals of the expected value, for ``value``.
        pure: Whether the expected value is made of literals only, so that different ones are never equal.
        rows: Whether the leaves are the values of a parameter, one for each case of the test.
    """

    body: list[ast.stmt]
    place: int
    kind: str
    leaves: tuple[ast.Constant, ...] = ()
    expected: ast.expr | None = None
    pure: bool = False
    rows: bool = False

    @property
    def statement(self) -> ast.stmt:
        """The check's statement."""
        return self.body[self.place]

    def apply(self, edit: Edit) -> None:
        """Alter the check in its tree."""
        if edit.leaf >= 0:
            self.leaves[edit.leaf].value = ast.literal_eval(edit.text)
        elif edit.leaf == EXCEPTION:
            _raised(self.statement).args[0] = ast.parse(edit.text, mode="eval").body
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
            self.body[self.place : self.place + 1] = statement.body  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class _Known:
    """What expected values are made of: parameters of the test, with their literals, and functions of its file."""

    rows: dict[str, list[ast.Constant]]
    makers: Collection[str]


def checks_of(function: Function, makers: Collection[str] = ()) -> list[Check]:
    """Return the checks that every passing run of a test reaches, in order.

    Args:
        function: The test.
        makers: Functions of its file whose results are expected values, such as ``eur(3)``.
    """
    known = _Known(_parameters(function), makers)
    return [found for body, place in _reached(function.body) if (found := _check(body, place, known)) is not None]


def _reached(body: list[ast.stmt]) -> Iterator[tuple[list[ast.stmt], int]]:
    for place, statement in enumerate(body):
        yield body, place
        if _may_leave(statement):
            return
        if isinstance(statement, ast.For) and isinstance(statement.iter, (ast.Tuple, ast.List)) and statement.iter.elts:
            yield from _reached(statement.body)


def _may_leave(statement: ast.AST) -> bool:
    """Whether control may leave the body of the test without a failure."""
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
        return False
    if isinstance(statement, (ast.Return, ast.Break, ast.Continue, ast.Yield, ast.YieldFrom)):
        return True
    return any(_may_leave(child) for child in ast.iter_child_nodes(statement))


def _check(body: list[ast.stmt], place: int, known: _Known) -> Check | None:
    statement = body[place]
    if isinstance(statement, ast.Assert):
        test = statement.test
        if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], (ast.Eq, ast.Is)):
            sides = (test.comparators[0], test.left)
            return _value(body, place, sides, known, same=isinstance(test.ops[0], ast.Is))
        return Check(body, place, "truth")
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        call = statement.value
        name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
        if name in _COMPARES and len(call.args) >= 2:
            return _value(body, place, (call.args[1], call.args[0]), known, same=name == "assertIs")
        return Check(body, place, "truth") if name in _OPPOSITE else None
    if isinstance(statement, ast.With) and len(statement.items) == 1 and _raises(statement.items[0].context_expr):
        return Check(body, place, "raises")
    return None


def _value(body: list[ast.stmt], place: int, sides: Sequence[ast.expr], known: _Known, *, same: bool) -> Check:
    """Find the expected one of two compared sides; the right one where both look like it."""
    for side in sides:
        if _is_literal(side) and not all(_is_literal(each) for each in sides):
            return Check(body, place, "value", _leaves(side, same=same), side, pure=True)
    for side in sides:
        if isinstance(side, ast.Name) and side.id in known.rows and not same:
            return Check(body, place, "value", tuple(known.rows[side.id]), side, pure=True, rows=True)
    for side in sides:
        if not same and _is_made(side, known.makers):
            return Check(body, place, "value", _leaves(side, same=False), side)
    return Check(body, place, "value")


def _is_literal(node: ast.expr) -> bool:
    return not any(isinstance(each, _NOT_LITERAL) for each in ast.walk(node)) and _evaluates(node)


def _evaluates(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False
    return True


def _is_made(node: ast.expr, makers: Collection[str]) -> bool:
    """Whether an expression only puts values together: literals, and calls of classes such as ``Money(3, "EUR")``."""
    if isinstance(node, ast.Call):
        name = _called(node)
        known = name[:1].isupper() or name in ("date", "datetime", "time", "timedelta") or name in makers
        return known and not node.keywords and all(_is_made(each, makers) for each in node.args)
    if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
        return all(_is_made(each, makers) for each in node.elts)
    return _is_literal(node)


def _leaves(node: ast.expr, *, same: bool) -> tuple[ast.Constant, ...]:
    """Return the literals of an expression that have alternatives; of those compared by identity, True and False."""
    found = [each for each in ast.walk(node) if isinstance(each, ast.Constant) and len(_class_of(each.value)) > 1]
    return tuple(each for each in found if not same or isinstance(each.value, bool))


def _parameters(function: Function) -> dict[str, list[ast.Constant]]:
    """Return the literals of each parameter of a test that one ``parametrize`` gives, by its name."""
    found: dict[str, list[ast.Constant]] = {}
    marks = [each for each in function.decorator_list if isinstance(each, ast.Call)]
    marks = [each for each in marks if isinstance(each.func, ast.Attribute) and each.func.attr == "parametrize"]
    for mark in marks:
        if len(marks) != 1 or len(mark.args) < 2 or not isinstance(mark.args[1], (ast.List, ast.Tuple)):
            continue
        names = _names(mark.args[0])
        for case in mark.args[1].elts:
            for name, value in zip(names, _of_case(case, len(names)), strict=False):
                if isinstance(value, ast.Constant) and len(_class_of(value.value)) > 2:
                    found.setdefault(name, []).append(value)
    # A parameter that is an input, too, would alter both sides.
    used = [each.id for part in function.body for each in ast.walk(part) if isinstance(each, ast.Name)]
    return {name: values for name, values in found.items() if used.count(name) == 1}


def _names(node: ast.expr) -> list[str]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [each.strip() for each in node.value.split(",")]
    if isinstance(node, (ast.Tuple, ast.List)):
        return [str(each.value) for each in node.elts if isinstance(each, ast.Constant)]
    return []


def _of_case(case: ast.expr, count: int) -> list[ast.expr]:
    if isinstance(case, ast.Call):
        return case.args if _called(case) == "param" else []
    if count > 1:
        return case.elts if isinstance(case, (ast.Tuple, ast.List)) else []
    return [case]


def _raises(node: ast.expr) -> bool:
    if not isinstance(node, ast.Call) or not node.args:
        return False
    return _called(node) in _RAISES


def _raised(statement: ast.stmt) -> ast.Call:
    assert isinstance(statement, ast.With)
    call = statement.items[0].context_expr
    assert isinstance(call, ast.Call)
    return call


def _class_of(value: object) -> list[str]:
    """Return the sources of the literals that a literal could be as well, itself among them.

    Each of them has the same class, so that nothing tells which of them was there.
    """
    return _alternatives(value, random.Random(0))


def _alternatives(value: object, rng: random.Random) -> list[str]:
    if isinstance(value, bool):
        return ["False", "True"]
    if isinstance(value, int):
        first = value // _BLOCK * _BLOCK
        return [repr(each) for each in range(first, first + _BLOCK)]
    if isinstance(value, float):
        if value.is_integer() and abs(value) < 2**53:
            return [repr(float(each)) for each in _alternatives_of_whole(int(value))]
        text = repr(value)
        return [] if not text[-1].isdigit() or "e" in text else [text[:-1] + each for each in string.digits[1:]]
    if isinstance(value, (str, bytes)):
        return _respelled(value, rng)
    return []


def _alternatives_of_whole(value: int) -> range:
    first = value // _BLOCK * _BLOCK
    return range(first, first + _BLOCK)


def _respelled(value: str | bytes, rng: random.Random) -> list[str]:
    """Exchange one character: a digit where there is one, else a letter, else a sign."""
    text = value.decode("latin-1") if isinstance(value, bytes) else value
    for alphabet in (string.digits, string.ascii_lowercase, string.ascii_uppercase, _SIGNS):
        places = [place for place, each in enumerate(text) if each in alphabet]
        if places:
            place = rng.choice(places)
            found = [text[:place] + each + text[place + 1 :] for each in alphabet]
            return [repr(each.encode("latin-1") if isinstance(value, bytes) else each) for each in found]
    return []


@dataclass(frozen=True, slots=True)
class Altered:
    """Alterations of one test, each a list of edits.

    Attributes:
        kind: ``value``, ``made`` (of a value that code of the repository makes), ``truth`` or ``raises``.
        twins: What no correct program passes.
        rows: Whether parameters of the cases are altered, which may change their names.
    """

    kind: str
    twins: list[tuple[Edit, ...]] = field(default_factory=list)
    reversal: tuple[Edit, ...] = ()
    rows: bool = False


def alterations(
    function: Function, most: int, rng: random.Random, *, makers: Collection[str] = (), since: int = 0
) -> list[Altered]:
    """Return ways to alter a test, the best first.

    Args:
        function: The test.
        most: Most twins of each way.
        rng: Draws literals and checks.
        makers: See :func:`checks_of`.
        since: Line from which checks are taken, where there are any: earlier ones pass without the solution.
    """
    checks = checks_of(function, makers)
    numbers = [number for number, check in enumerate(checks) if (check.statement.end_lineno or 0) >= since]
    numbers = numbers or list(range(len(checks)))
    found = [_of_values(checks, number, most, rng) for number in numbers if checks[number].leaves]
    # Those of the first check before others, which a program without the solution may pass.
    found.sort(key=lambda each: (each.twins[0][0].check != numbers[0] if each.twins else True, each.kind != "value"))
    truths = [number for number in numbers if checks[number].kind == "truth"]
    if truths:
        found.append(_of_truths(truths, most, rng))
    found += [_of_exceptions(checks, number, most, rng) for number in numbers if checks[number].kind == "raises"]
    found += [Altered("truth", [(Edit(number, REVERSED),)], (Edit(number, REVERSED),)) for number in numbers]
    return [each for each in found if each.twins]


def _of_values(checks: list[Check], number: int, most: int, rng: random.Random) -> Altered:
    check, reversal = checks[number], (Edit(number, REVERSED),)
    if check.rows:
        drawn = [_drawn(leaf.value, most, rng) for leaf in check.leaves]
        edits = [
            tuple(Edit(number, leaf, texts[twin]) for leaf, texts in enumerate(drawn))
            for twin in range(min(map(len, drawn)))
        ]
        return Altered("value", edits, reversal, rows=True)
    plain = [leaf for leaf, each in enumerate(check.leaves) if isinstance(each.value, (int, float))]
    leaf = rng.choice(plain or range(len(check.leaves)))
    texts = _drawn(check.leaves[leaf].value, most, rng)
    if check.pure:
        texts = _different(check, leaf, texts)
    return Altered("value" if check.pure else "made", [(Edit(number, leaf, text),) for text in texts], reversal)


def _drawn(value: object, most: int, rng: random.Random) -> list[str]:
    others = [text for text in _alternatives(value, rng) if text != repr(value)]
    return rng.sample(others, min(most, len(others)))


def _different(check: Check, leaf: int, texts: list[str]) -> list[str]:
    """Keep the literals that make expected values of which no two are equal."""
    assert check.expected is not None
    node, held = check.leaves[leaf], check.leaves[leaf].value
    known = [ast.literal_eval(check.expected)]
    kept = []
    for text in texts:
        node.value = ast.literal_eval(text)
        value = ast.literal_eval(check.expected)
        if value not in known:
            known.append(value)
            kept.append(text)
    node.value = held
    return kept


def _of_truths(truths: list[int], most: int, rng: random.Random) -> Altered:
    """Negate each choice of a few assertions: nothing tells which of these tests was there."""
    count = min(len(truths), max(1, (most + 1).bit_length() - 1))
    chosen = [truths[0], *rng.sample(truths[1:], count - 1)]
    twins = [
        tuple(Edit(number, REVERSED) for place, number in enumerate(chosen) if bits >> place & 1)
        for bits in range(1, 2**count)
    ]
    return Altered("truth", rng.sample(twins, min(most, len(twins))), (Edit(chosen[0], REVERSED),))


def _of_exceptions(checks: list[Check], number: int, most: int, rng: random.Random) -> Altered:
    reversal = (Edit(number, REVERSED),)
    kind = _raised(checks[number].statement).args[0]
    name = kind.id if isinstance(kind, ast.Name) else kind.attr if isinstance(kind, ast.Attribute) else ""
    if not name:
        return Altered("raises", [reversal], reversal)
    real = vars(builtins).get(name)
    others = [each for each in _EXCEPTIONS if not _related(real, vars(builtins)[each])]
    names = rng.sample(others, min(most, len(others)))
    return Altered("raises", [(Edit(number, EXCEPTION, each),) for each in names], reversal)


def _related(one: object, other: type) -> bool:
    return isinstance(one, type) and (issubclass(one, other) or issubclass(other, one))


def _called(call: ast.Call) -> str:
    """Return the last part of the name of what is called, or ""."""
    if isinstance(call.func, ast.Name):
        return call.func.id
    return call.func.attr if isinstance(call.func, ast.Attribute) else ""
