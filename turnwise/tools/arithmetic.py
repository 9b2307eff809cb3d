"""Exact arithmetic on model-written expressions, as used by the calculator tools that ship."""

from __future__ import annotations

import re
from decimal import ROUND_HALF_EVEN, Context
from fractions import Fraction
from typing import Final

from turnwise.errors import ToolError, shown

MAX_CHARACTERS: Final = 500
"""Length of the longest expression."""

_MAX_DEPTH: Final = 50
_MAX_BITS: Final = 1024
_MAX_EXPONENT: Final = 300
_SIGNIFICANT: Final = 12
_ROUNDING: Final = Context(prec=_SIGNIFICANT, rounding=ROUND_HALF_EVEN)

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
    return _Parser(expression).value()


class _Parser:
    """Recursive descent; each method parses a tighter-binding level than its caller."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = _tokens(text)
        self._next = 0
        self._depth = 0

    def value(self) -> Fraction:
        if not self._tokens:
            raise ToolError("the expression is empty: write one such as 3 * (4 + 5)")
        value = self._sum()
        if self._next < len(self._tokens):
            token = self._tokens[self._next]
            following = self._tokens[self._next - 1]
            if token == ")":
                raise ToolError(f"a parenthesis closes that never opened in {shown(self._text)}")
            percent = " (a percent sign is part of the number before it)" if following == "%" else ""
            raise ToolError(f"there is no operator between {following!r} and {token!r} in {shown(self._text)}{percent}")
        return value

    def _peek(self) -> str:
        return self._tokens[self._next] if self._next < len(self._tokens) else ""

    def _take(self) -> str:
        token = self._peek()
        self._next += 1
        return token

    def _sum(self) -> Fraction:
        value = self._product()
        while self._peek() in ("+", "-"):
            sign = self._take()
            right = self._product()
            value = _bounded(value + right if sign == "+" else value - right)
        return value

    def _product(self) -> Fraction:
        value = self._signed()
        while self._peek() in ("*", "/", "//"):
            sign = self._take()
            right = self._signed()
            if sign == "*":
                value = _bounded(value * right)
            elif right == 0:
                raise ToolError(f"division by zero in {shown(self._text)}")
            else:
                value = _bounded(value / right if sign == "/" else Fraction(value // right))
        return value

    def _signed(self) -> Fraction:
        if self._peek() in ("+", "-"):
            sign = self._take()
            with _Deeper(self):
                value = self._signed()
            return -value if sign == "-" else value
        return self._power()

    def _power(self) -> Fraction:
        base = self._atom()
        while self._peek() == "%":
            self._take()
            base = _bounded(base / 100)
        if self._peek() not in ("**", "^"):
            return base
        self._take()
        with _Deeper(self):
            exponent = self._signed()
        return _power(base, exponent, self._text)

    def _atom(self) -> Fraction:
        token = self._take()
        if token == "(":
            with _Deeper(self):
                value = self._sum()
            if self._take() != ")":
                raise ToolError(f"a parenthesis is never closed in {shown(self._text)}")
            return value
        if not token:
            raise ToolError(f"{shown(self._text)} ends where a number is missing")
        if not (token[0].isdigit() or token[0] == "."):
            raise ToolError(f"a number is missing before {token!r} in {shown(self._text)}")
        return _number(token)


class _Deeper:
    """Bounds the parser's recursion depth."""

    def __init__(self, parser: _Parser) -> None:
        self._parser = parser

    def __enter__(self) -> None:
        self._parser._depth += 1
        if self._parser._depth > _MAX_DEPTH:
            raise ToolError(f"the expression is nested more than {_MAX_DEPTH} deep")

    def __exit__(self, *exception: object) -> None:
        self._parser._depth -= 1


def _tokens(text: str) -> list[str]:
    plain = text.translate(_WRITTEN)
    tokens: list[str] = []
    position = len(plain) - len(plain.lstrip())
    while position < len(plain):
        match = _TOKEN.match(plain, position)
        if match is None:
            raise ToolError(
                f"{shown(text[position : position + 20])} cannot be evaluated: write numbers, + - * / ** and "
                "parentheses only"
            )
        tokens.append(match["number"] or match["sign"])
        position = match.end()
    return tokens


def _number(token: str) -> Fraction:
    digits, _, exponent = token.replace(",", "").lower().partition("e")
    if exponent and abs(int(exponent)) > _MAX_EXPONENT:
        raise ToolError(f"{token} is too large or too small: exponents go up to {_MAX_EXPONENT}")
    return _bounded(Fraction(f"{digits}e{exponent or 0}"))


def _power(base: Fraction, exponent: Fraction, text: str) -> Fraction:
    if exponent.denominator != 1:
        raise ToolError(f"the exponent {write_number(exponent)} is not a whole number in {shown(text)}")
    if base == 0 and exponent < 0:
        raise ToolError(f"division by zero in {shown(text)}")
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
    plain = text.translate(_WRITTEN).replace("%", " ").strip().rstrip(".").strip()
    plain = re.sub(r"^([-+])\s+", r"\1", plain)
    if not _PLAIN.fullmatch(plain):
        return None
    try:
        return evaluate(plain)
    except ToolError:
        return None
