"""Exact arithmetic on model-written expressions, as used by the calculator tools that ship."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from decimal import ROUND_HALF_EVEN, Context
from fractions import Fraction
from typing import Any, Final

from turnwise.errors import ToolError, shown

MAX_CHARACTERS: Final = 500
"""Length of the longest expression."""

_MAX_BITS: Final = 1024
_MAX_EXPONENT: Final = 300
_SIGNIFICANT: Final = 12
_ROUNDING: Final = Context(prec=_SIGNIFICANT, rounding=ROUND_HALF_EVEN)

_OPERATORS: Final[Mapping[type[ast.operator], Callable[[Any, Any], Any]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}

_DIGITS: Final = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
_NUMBER: Final = rf"(?:{_DIGITS}(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?"
_TOKEN: Final = re.compile(rf"\s*(?:(?P<number>{_NUMBER})|(?P<sign>\*\*|//|[-+*/^()%]))\s*")
_PLAIN: Final = re.compile(rf"[-+]?{_NUMBER}(?:\s*/\s*{_NUMBER})?")

# What people write instead of the signs: a cross, an x between numbers, typographic minus signs, brackets; currency is
# left out, since it changes no value.
_WRITTEN: Final = str.maketrans(
    {"×": "*", "·": "*", "⋅": "*", "x": "*", "X": "*", "÷": "/", "−": "-", "–": "-", "[": "(", "]": ")"}
    | dict.fromkeys("$€£¥", " ")
)


def evaluate(expression: str) -> Fraction:
    """Return the exact value of an arithmetic expression.

    Supported are ``+ - * / // ** ^ ( )`` with the usual precedence, whole exponents, decimals (``.5``), thousands
    separators (``1,200``), a trailing percent sign (``20%`` is a fifth), and currency signs, which are ignored.

    Raises:
        ToolError: The expression is malformed, divides by zero or is too large; the text is for the model.
    """
    if len(expression) > MAX_CHARACTERS:
        raise ToolError(f"the expression has {len(expression)} characters: at most {MAX_CHARACTERS} are evaluated")
    source, numbers = _as_python(expression)
    if not source:
        raise ToolError("the expression is empty: write one such as 3 * (4 + 5)")
    try:
        return _value(ast.parse(source, mode="eval").body, numbers, expression)
    except ZeroDivisionError:
        raise ToolError(f"division by zero in {shown(expression)}") from None
    except (SyntaxError, RecursionError, MemoryError):
        raise ToolError(
            f"{shown(expression)} is not an arithmetic expression: an operator stands between two numbers, a "
            "parenthesis that opens is closed, and a percent sign is part of the number before it"
        ) from None


def _as_python(text: str) -> tuple[str, dict[str, Fraction]]:
    """Return a text as an expression of Python whose numbers are names, and the numbers by name.

    A percent sign becomes an attribute, which binds as tightly.
    """
    ascii_text = text.translate(_WRITTEN)
    tokens: list[str] = []
    numbers: dict[str, Fraction] = {}
    position = len(ascii_text) - len(ascii_text.lstrip())
    while position < len(ascii_text):
        match = _TOKEN.match(ascii_text, position)
        if match is None:
            raise ToolError(
                f"{shown(text[position : position + 20])} cannot be evaluated: write numbers, + - * / ** and "
                "parentheses only"
            )
        if match["number"]:
            tokens.append(f"n{len(numbers)}")
            numbers[tokens[-1]] = _number(match["number"])
        else:
            tokens.append({"^": "**", "%": ".percent"}.get(match["sign"], match["sign"]))
        position = match.end()
    return " ".join(tokens), numbers


def _value(node: ast.expr, numbers: Mapping[str, Fraction], text: str) -> Fraction:
    match node:
        case ast.Name():
            return numbers[node.id]
        case ast.Attribute():
            return _bounded(_value(node.value, numbers, text) / 100)
        case ast.UnaryOp():
            value = _value(node.operand, numbers, text)
            return -value if isinstance(node.op, ast.USub) else value
        case ast.BinOp():
            left, right = _value(node.left, numbers, text), _value(node.right, numbers, text)
            if isinstance(node.op, ast.Pow):
                return _power(left, right, text)
            return _bounded(Fraction(_OPERATORS[type(node.op)](left, right)))
    raise SyntaxError  # two numbers or parentheses without an operator


def _number(token: str) -> Fraction:
    digits, _, exponent = token.replace(",", "").lower().partition("e")
    if exponent and abs(int(exponent)) > _MAX_EXPONENT:
        raise ToolError(f"{token} is too large or too small: exponents go up to {_MAX_EXPONENT}")
    return _bounded(Fraction(f"{digits}e{exponent or 0}"))


def _power(base: Fraction, exponent: Fraction, text: str) -> Fraction:
    if exponent.denominator != 1:
        raise ToolError(f"the exponent {write_number(exponent)} is not a whole number in {shown(text)}")
    # The size is known before the power is computed: 9**9**9 must not be tried.
    size = max(base.numerator.bit_length(), base.denominator.bit_length())
    if abs(base) != 1 and base != 0 and (size - 1) * abs(exponent) > _MAX_BITS:
        raise ToolError(f"the value is too large in {shown(text)}")
    if abs(base) == 1 or base == 0:
        exponent = exponent % 2 if base else min(exponent, Fraction(1))
    return _bounded(Fraction(base**exponent.numerator))


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > _MAX_BITS:
        raise ToolError(f"a number has more than {_MAX_BITS} bits: that is too large")
    return value


def write_number(value: Fraction) -> str:
    """Format a number: ``42``, ``0.125``; non-terminating ones are rounded to 12 significant digits."""
    if value.denominator == 1:
        return str(value.numerator)
    rounded = _ROUNDING.divide(value.numerator, value.denominator)
    if -15 <= rounded.adjusted() <= 30:
        text = f"{rounded:f}"
        return text.rstrip("0").rstrip(".") if "." in text else text
    return f"{rounded.normalize():e}"


def read_number(text: str) -> Fraction | None:
    """Parse a text that is one number, or return None.

    Signs, decimals, thousands separators and simple fractions (``3/4``) are read; currency and percent signs and a
    final full stop are ignored, so ``$1,200.`` is 1200 and ``50%`` is 50.
    """
    if len(text) > MAX_CHARACTERS:
        return None
    ascii_text = text.translate(_WRITTEN).replace("%", " ").strip().rstrip(".").strip()
    ascii_text = re.sub(r"^([-+])\s+", r"\1", ascii_text)
    if not _PLAIN.fullmatch(ascii_text):
        return None
    try:
        return evaluate(ascii_text)
    except ToolError:
        return None
