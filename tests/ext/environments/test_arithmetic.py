"""The calculator: exact values, readable errors, and no work without a bound."""

from __future__ import annotations

import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise.errors import ToolError
from turnwise.ext.environments.arithmetic import MAX_CHARACTERS, evaluate, read_number, write_number

VALUES = {
    "2+3*4": "14",
    "(2+3)*4": "20",
    "10-3-4": "3",
    "2/4*2": "1",
    "-2**2": "-4",
    "(-2)**2": "4",
    "2**3**2": "512",
    "2^-1": "0.5",
    "--3": "3",
    "7//2": "3",
    "-7//2": "-4",
    "0.1+0.2": "0.3",
    ".5*10": "5",
    "100*.2": "20",
    "5.*2": "10",
    "1,200*2": "2400",
    "$1,200*5%": "60",
    "20%": "0.2",
    "50 %": "0.5",
    "3 × 4 ÷ 2": "6",
    "12 x 3": "36",
    "9 − 4": "5",
    "[1+2]*3": "9",
    "1e3/4": "250",
    "12/60*50": "10",
    "(-1)**99999999999999999999": "-1",
    "0**99999999999999999999": "0",
}

PROBLEMS = {
    "": "is empty",
    " \n ": "is empty",
    "2+": "'2+' is not an arithmetic expression",
    "*2": "operator stands between two numbers",
    "(1+2": "that opens is closed",
    "1)": "that opens is closed",
    "2 3": "operator stands between two numbers",
    "2(3)": "operator stands between two numbers",
    "17 % 5": "percent sign is part of the number before it",
    "1/0": "division by zero",
    "5//(2-2)": "division by zero",
    "0**-1": "division by zero",
    "2**0.5": "exponent 0.5 is not a whole number",
    "sqrt(4)": "'sqrt(4)' cannot be evaluated",
    "__import__('os')": "cannot be evaluated",
    "1,2": "cannot be evaluated",
    "١+١": "cannot be evaluated",
    "9**9**9": "too large",
    "9**9**9**9": "too large",
    "2**-100000000000": "too large",
    "10**300*10**300": "too large",
    "1e999": "too large",
    "1e-99999999999999999999": "too large or too small",
    "(" * 201 + "1" + ")" * 201: "not an arithmetic expression",
    "1" * (MAX_CHARACTERS + 1): f"at most {MAX_CHARACTERS}",
}


@pytest.mark.parametrize("expression", VALUES)
def test_values_are_exact(expression):
    assert write_number(evaluate(expression)) == VALUES[expression]


@pytest.mark.parametrize("expression", PROBLEMS)
def test_invalid_expressions_raise_tool_errors(expression):
    with pytest.raises(ToolError) as caught:
        evaluate(expression)
    assert PROBLEMS[expression] in str(caught.value)
    assert len(str(caught.value)) < 300


def test_no_expression_takes_long():
    hostile = ["9**9**9**9", "(" * 500, "9**99*" * 80 + "1", "1/3+" * 120 + "1", "1e300*1e-300*" * 35 + "1", "%" * 500]
    hostile += ["2**1000/3**600+" * 30 + "1", "1" + "%" * 499]
    began = time.process_time()
    for expression in hostile:
        try:
            value = evaluate(expression)
        except ToolError:
            continue
        assert max(value.numerator.bit_length(), value.denominator.bit_length()) <= 1024
    assert time.process_time() - began < 0.5


@st.composite
def expressions(draw, depth=4):
    """A text, and its value as Python's fractions have it (None: a division by zero stands in it)."""
    if depth == 0 or draw(st.booleans()):
        number = draw(st.integers(0, 999))
        spaces = draw(st.integers(0, 2))
        return (f"{number / 10**spaces:.{spaces}f}", Fraction(number, 10**spaces))
    operand, one = draw(expressions(depth=depth - 1))
    right, other = draw(expressions(depth=depth - 1))
    sign = draw(st.sampled_from("+-*/"))
    space = draw(st.sampled_from(["", " "]))
    if one is None or other is None or (sign == "/" and other == 0):
        return (f"({operand}{space}{sign}{space}{right})", None)
    value = {"+": one + other, "-": one - other, "*": one * other, "/": one / other if other else None}[sign]
    return (f"({operand}{space}{sign}{space}{right})", value)


@given(expressions())
def test_values_are_those_of_fractions(expression):
    text, value = expression
    if value is None:
        with pytest.raises(ToolError, match="division by zero"):
            evaluate(text)
    elif len(text) <= MAX_CHARACTERS:
        assert evaluate(text) == value


@given(st.text(max_size=60) | st.text(alphabet="0123456789.,()+-*/%^xe $", max_size=60))
def test_any_text_has_a_value_or_a_tool_error(text):
    try:
        value = evaluate(text)
    except ToolError:
        return
    assert isinstance(value, Fraction)
    assert write_number(value)


@given(st.integers(-(10**18), 10**18), st.integers(0, 8))
def test_finite_decimals_round_trip(number, decimals):
    value = Fraction(number, 10**decimals)
    if len(str(abs(number))) <= 12:
        assert read_number(write_number(value)) == value


def test_numbers_that_do_not_end_are_rounded():
    assert write_number(Fraction(1, 3)) == "0.333333333333"
    assert write_number(Fraction(2, 3)) == "0.666666666667"
    assert write_number(Fraction(-200000, 3)) == "-66666.6666667"
    assert write_number(Fraction(10**40, 3)) == "3.33333333333e+39"
    assert write_number(Fraction(1, 10**20)) == "1e-20"


def test_read_number_accepts_single_numbers():
    for text, value in {"$1,200.": 1200, " 42 ": 42, "50%": 50, "-3": -3, "- 3": -3, "42.0": 42, "+7": 7}.items():
        assert read_number(text) == value
    assert read_number("3/4") == Fraction(3, 4)
    for text in ("", "18 dollars", "1,08", "1 2", "3/0", "(3)", "2+2", "nan", "9" * 600):
        assert read_number(text) is None, text
