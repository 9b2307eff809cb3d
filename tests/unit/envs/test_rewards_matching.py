"""Shipped reward functions that look at the text alone: exact match, regex, numbers, JSON."""

from __future__ import annotations

import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise.envs.rewards import ExactMatch, Numeric, Regex, extract_answer, normalize, parse_number
from turnwise.envs.rewards.matching import last_number
from turnwise.errors import ConfigError, EnvError

# Where the answer stands.


@pytest.mark.parametrize(
    ("form", "text", "answer"),
    [
        ("text", "  all of it \n", "all of it"),
        ("last_line", "first\n\n last \n \n", "last"),
        ("last_line", " \n", None),
        ("boxed", r"\boxed{1} then \boxed{\frac{1}{2}} end", r"\frac{1}{2}"),
        ("boxed", r"\fbox{x} \boxed {a\}b}", r"a\}b"),
        ("boxed", r"\boxed{never closed", None),
        ("boxed", r"\boxed{1} \boxed{never closed", "1"),
        ("boxed", r"\boxed{\boxed{7}}", "7"),
        ("boxed", "} stray } braces \\boxed{3}", "3"),
        ("hash", "so\n#### 42\n", "42"),
        ("hash", "#### 1\n####2", "2"),
        ("hash", "no mark", None),
        ("tag:answer", "<answer>a</answer> and <answer>\nb\n</answer>", "b"),
        ("tag:answer", "<answer>open <answer>b</answer>", "b"),
        ("tag:answer", "<answer>open", None),
        (r"regex:is (\w+)", "it is one, it is two.", "two"),
        (r"regex:(?P<x>\d)(?P<answer>\d)", "12 34", "4"),
        (r"regex:\d+", "1 22", "22"),
    ],
)
def test_extractors_find_answers(form, text, answer):
    assert extract_answer(text, form) == answer


@pytest.mark.parametrize("form", ["boxd", "tag:", "regex:", "regex:(", "", None])
def test_an_unknown_form_is_refused(form):
    with pytest.raises(ConfigError, match="extract is"):
        extract_answer("text", form)


@pytest.mark.parametrize(
    "hostile",
    ["\\boxed{" * 20000, "{" * 100000, "}" * 100000, "<answer>" * 20000, "```" + " " * 50000, "[" * 50000,
     '{"a":' * 20000, "####" * 30000, "1," * 50000, "-" * 100000, "\\frac{" * 20000, "1/" * 50000, "." * 100000,
     "```json\n" * 20000],
)  # fmt: skip
def test_no_text_costs_more_than_its_length(hostile):
    began = time.process_time()
    for form in ("boxed", "hash", "tag:answer", "last_line"):
        extract_answer(hostile, form)
    last_number(hostile)
    parse_number(hostile)
    assert time.process_time() - began < 5


# Exact match.


@pytest.mark.parametrize(
    ("how", "one", "other", "equal"),
    [
        ("none", "a b", "a  b", False),
        ("space", " a \n b", "a b", True),
        ("space", "ﬁve", "five", True),
        ("space", "A", "a", False),
        ("case", "STRASSE", "straße", True),
        ("words", "The Eiffel-Tower!", "eiffel tower", True),
        ("words", "theatre", "atre", False),
        ("words", "", "A", False),
        ("words", "", "+", False),
        ("words", "the", "A", False),
    ],
)
def test_normalisation(how, one, other, equal):
    assert (normalize(one, how) == normalize(other, how)) is equal


@given(st.text(), st.sampled_from(["none", "space", "case", "words"]))
def test_normalising_twice_changes_nothing(text, how):
    once = normalize(text, how)
    if how != "case" and how != "words":
        assert normalize(once, how) == once
    assert ExactMatch(normalize=how)(text, {"answer": text}) == 1.0


def test_exact_match():
    assert ExactMatch()("Paris", {"answer": "Paris"}) == 1
    assert ExactMatch()("paris", {"answer": "Paris"}) == 0
    assert ExactMatch(normalize="words")("The PARIS.", {"answer": ["London", "paris"]}) == 1
    assert ExactMatch(column="gold", extract="tag:answer")("<answer>4</answer>", {"gold": 4}) == 1
    assert ExactMatch(extract="boxed")("4", {"answer": "4"}) == 0
    with pytest.raises(EnvError, match=r"task\.data has no 'answer'; it has 'gold'"):
        ExactMatch()("4", {"gold": 4})
    with pytest.raises(EnvError, match=r"task.data\['answer'\] is \[\]"):
        ExactMatch()("4", {"answer": []})
    with pytest.raises(ConfigError, match="normalize is 'lower'"):
        ExactMatch(normalize="lower")


def test_regex():
    assert Regex(r"<think>.*</think>")("<think>\nso\n</think> 4") == 1
    assert Regex("4")("5") == 0
    assert Regex(r"\d+", whole=True)(" 42 \n") == 1
    assert Regex(r"\d+", whole=True)("42!") == 0
    assert Regex("YES", ignore_case=True)("yes") == 1
    with pytest.raises(ConfigError, match="pattern is '\\('"):
        Regex("(")


# Numbers.


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("42", 42), ("-42", -42), ("\N{MINUS SIGN}42", -42), ("+3", 3), ("1,234,567.5", Fraction(2469135, 2)),
        (".5", Fraction(1, 2)),
        ("5.", 5), ("$1,000", 1000), ("-$5", -5), ("$-5", -5), (r"\$ 18", 18), ("3/4", Fraction(3, 4)),
        ("1 3/4", Fraction(7, 4)), (r"\frac{3}{4}", Fraction(3, 4)), (r"-\frac34", Fraction(-3, 4)),
        (r"1\frac{1}{2}", Fraction(3, 2)), (r"\dfrac{-3}{4}", Fraction(-3, 4)), ("1e3", 1000),
        ("1E-3", Fraction(1, 1000)),
        (r"2 \times 10^{5}", 200000), ("2x10^3", 2000), ("**42**", 42), ("$42$", 42), ("(7)", 7), (r"\text{42}", 42),
        (r"1{,}000", 1000), (r"1,\!000", 1000), ("0.1", Fraction(1, 10)),
        ("12,34", None), ("1 000", None), ("abc", None), ("", None), ("1/0", None), (r"\frac{1}{0}", None),
        ("1e999999999", None), ("9" * 300, None), ("nan", None), ("inf", None), ("4 or 5", None), ("0x10", None),
    ],
)  # fmt: skip
def test_numbers_are_read_exactly(text, value):
    number = parse_number(text)
    assert (None if number is None else number.value) == value


@given(st.fractions(max_denominator=10**6))
def test_every_fraction_is_read_back(value):
    assert parse_number(f"{value.numerator}/{value.denominator}").value == value
    sign = "-" if value < 0 else ""
    assert parse_number(rf"{sign}\frac{{{abs(value.numerator)}}}{{{value.denominator}}}").value == value


@given(st.decimals(min_value=-(10**12), max_value=10**12, allow_nan=False, places=4))
def test_every_decimal_is_read_back_with_and_without_separators(value):
    assert parse_number(f"{value:f}").value == Fraction(value)
    assert parse_number(f"{value:,f}").value == Fraction(value)
    assert last_number(f"The answer is {value:,f}, I think.").value == Fraction(value)


@given(st.text())
def test_no_text_makes_the_functions_raise(text):
    Numeric()(text, {"answer": 3})
    ExactMatch(normalize="words")(text, {"answer": "x"})
    for form in ("boxed", "hash", "tag:answer", "last_line"):
        extract_answer(text, form)


@pytest.mark.parametrize(
    ("text", "gold", "right"),
    [
        ("5-3 is 2", 2, True),
        ("x = -3.", -3, True),
        ("I paid 1,200 dollars.", "1200", True),
        ("The answer is 3, not 4", 3, False),
        ("#### 42", "work <<6*7=42>>\n#### 42", True),
        (r"\boxed{42} apples, in 3 boxes", 42, True),
        (r"\boxed{42 apples}", 42, True),
        (r"\boxed{3, 4}", 4, False),
        (r"\boxed{}", 4, False),
        (r"\boxed{5x}", 5, False),
        (r"\boxed{5\pi}", 5, False),
        (r"\boxed{\sqrt{5}}", 5, False),
        ("#### log 5", 5, False),
        ("#### 5 million", 5, False),
        ("#### 5 dozens", 5, False),
        (r"\boxed{5^\circ}", 5, True),
        (r"\boxed{5\text{ km}}", 5, True),
        ("#### 5 years", 5, True),
        ("0.333333", Fraction(1, 3), False),
        ("no number", 1, False),
        ("", 1, False),
        ("v1.2", 2, False),
        ("8", ["7", 8], True),
    ],
)
def test_numeric_prefers_the_marked_number_to_the_last(text, gold, right):
    if isinstance(gold, Fraction):
        gold = "1/3"
        assert Numeric(relative=1e-3)(text, {"answer": gold}) == 1
        right = False
    assert Numeric(relative=0)(text, {"answer": gold}) == float(right)


@pytest.mark.parametrize(
    ("answer", "gold", "right"),
    [("50%", "50", 1), ("50%", "0.5", 0), ("5000%", "50", 0), ("0.5", "50%", 1), ("50", "50%", 1), ("50%", "50%", 1),
     ("50%", "0.5%", 0), (r"50\%", 50, 1)],
)  # fmt: skip
def test_percent_sign_of_the_answer_is_a_unit(answer, gold, right):
    assert Numeric()(answer, {"answer": gold}) == right


def test_tolerances():
    assert Numeric(tolerance=0.5, relative=0)("10.5", {"answer": 10}) == 1
    assert Numeric(tolerance=0.5, relative=0)("10.51", {"answer": 10}) == 0
    assert Numeric(relative=0.01)("1009", {"answer": 1000}) == 1
    assert Numeric(relative=0.01)("1011", {"answer": 1000}) == 0
    assert Numeric()("0.1", {"answer": 0.1}) == 1
    assert Numeric(extract="last_line")("3\n4", {"answer": 4}) == 1
    for name in ("tolerance", "relative"):
        with pytest.raises(ConfigError, match=f"{name} is nan"):
            Numeric(**{name: float("nan")})


@pytest.mark.parametrize("gold", ["many", None, True, float("nan"), {"a": 1}])
def test_a_right_answer_that_is_no_number_is_an_error(gold):
    with pytest.raises(EnvError, match=r"numeric: task.data\['answer'\]"):
        Numeric()("3", {"answer": gold})
