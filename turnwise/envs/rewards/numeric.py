"""Numbers in answers: read exactly, compared with a tolerance."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar, Final

from turnwise.envs.rewards.answers import extract_answer, extractor, gold_answers
from turnwise.envs.rewards.core import RewardFunction
from turnwise.errors import ConfigError, EnvError, shown

_MOST_CHARACTERS: Final = 200  # of one number
_MOST_EXPONENT: Final = 400
# Groups of three digits, or digits without separators; a decimal part; an exponent in one of its spellings.
_DECIMAL = (
    r"(?:\d{1,3}(?:(?:,\\!|,|\\,|\{,\})\d{3})+(?![\d])|\d+)?(?:\.\d+|(?<=\d)\.(?!\d))?"
    r"(?:[eE][+-]?\d+(?![\w])|\s?(?:\\times|\\cdot|[x×*·])\s?10\s?(?:\^|\*\*)\s?(?:\{\s?[+-]?\d+\s?\}|[+-]?\d+))?"
)
_FRACTION = r"\\[dt]?frac\s?(?:\{\s?-?\d+\s?\}|\d)\s?(?:\{\s?-?\d+\s?\}|\d)"
_VALUE = rf"(?:(?:\d+\s?)?{_FRACTION}|(?:\d+\s)?\d+\s?/\s?\d+(?![\d.,]*\d)|(?=\.?\d){_DECIMAL})"
_NUMBER = re.compile(
    rf"(?<![\w.])(?P<sign>(?<![\w)}}\]])[-+\N{{MINUS SIGN}}]\s?)?(?:\\?[$€£¥]\s?)?(?P<sign2>[-\N{{MINUS SIGN}}])?"
    rf"(?P<value>{_VALUE})(?P<percent>\s?\\?%)?"
)
_PARTS_OF_FRACTION = re.compile(r"-?\d+")
_TIMES_TEN = re.compile(r"\s?(?:\\times|\\cdot|[x×*·])\s?10\s?(?:\^|\*\*)\s?\{?\s?([+-]?\d+)\s?\}?$")
# What makes another number of the one beside it; units do not.
_FUNCTION_BEFORE = re.compile(r"(?:sqrt|\b(?:log|ln|sin|cos|tan)|√)\s*[({\[]?\s*$")
_FACTOR_AFTER = re.compile(
    r"\s*(?:(?:hundred|thousand|million|billion|trillion|dozen)s?\b|\\(?:pi|sqrt)|[π√!]|\^\s*\{?\s*[a-z]|[xyznik]\b)",
    re.IGNORECASE,
)
_WRAPPING = re.compile(r"^(?:\\[(\[]|\\(?:text|mathrm|mathbf)\{|[$(\[{*_`'\"]|\s)+|(?:\\[)\]]|[$)\]}*_`'\".,;:!]|\s)+$")


@dataclass(frozen=True, slots=True)
class Number:
    """A number that stands in a text.

    Attributes:
        value: Exactly; of ``50%`` it is 50.
        percent: Whether a percent sign follows it.
    """

    value: Fraction
    percent: bool = False


def parse_number(text: str) -> Number | None:
    r"""Return the number that a text is, or None.

    Understood are signs, thousands separators (``1,234``), decimals, exponents (``1e3``, ``2 \times 10^3``), fractions
    (``3/4``, ``1 3/4``, ``\frac{3}{4}``), a currency before it and a percent sign behind it. Around it may stand white
    space, brackets, dollar signs, Markdown emphasis and a full stop.
    """
    text = text.strip()
    if len(text) > 2 * _MOST_CHARACTERS:
        return None
    for candidate in (text, _WRAPPING.sub("", text)):
        found = _NUMBER.fullmatch(candidate)
        if found is not None:
            return _read(found)
    return None


def last_number(text: str) -> Number | None:
    """Return the last number that stands in a text, or None."""
    found: re.Match[str] | None = None
    for found in _NUMBER.finditer(text):  # noqa: B007 - the last one is wanted
        pass
    return None if found is None else _read(found)


def _read(found: re.Match[str]) -> Number | None:
    if len(found.group()) > _MOST_CHARACTERS:
        return None
    value = _value(found["value"])
    if value is None:
        return None
    signs = f"{found['sign'] or ''}{found['sign2'] or ''}"
    negative = sum(sign in "-\N{MINUS SIGN}" for sign in signs) % 2
    return Number(-value if negative else value, found["percent"] is not None)


def _value(text: str) -> Fraction | None:
    if "frac" in text or "/" in text:
        return _fraction(text)
    exponent = 0
    times_ten = _TIMES_TEN.search(text)
    if times_ten is not None:
        exponent, text = int(times_ten[1]), text[: times_ten.start()]
    mantissa, _, shift = re.sub(r",\\!|\\,|\{,\}|,", "", text).lower().partition("e")
    exponent += int(shift or 0)
    if abs(exponent) > _MOST_EXPONENT:
        return None
    return Fraction(mantissa) * Fraction(10) ** exponent


def _fraction(text: str) -> Fraction | None:
    before, command, rest = text.partition("\\")
    if not command:
        numbers = [int(digits) for digits in _PARTS_OF_FRACTION.findall(text)]
    elif "{" in rest:
        # \frac{3}{4}, or with one digit bare: \frac3{4}
        body = re.sub(r"^[dt]?frac\s?", "", rest)
        numbers = [int(digits) for digits in re.findall(r"-?\d+" if body.startswith("{") else r"^\d|-?\d+", body)]
    else:
        numbers = [int(digit) for digit in rest if digit.isdigit()]
    *whole, above, below = numbers
    if command and before.strip():
        whole = [int(before)]
    if below == 0:
        return None
    value = Fraction(above, below)
    return whole[0] + value if whole else value


class Numeric(RewardFunction):
    """1 where the answer is the right number within a tolerance, else 0.

    A percent sign on one side only may mean either reading: ``50%`` equals 50 as well as 0.5.
    """

    inline: ClassVar[bool] = True

    def __init__(
        self, *, column: str = "answer", extract: str = "auto", tolerance: float = 0.0, relative: float = 1e-6
    ) -> None:
        r"""Say what is compared, and how closely.

        Args:
            column: Entry of ``task.data`` with the right number (or its text, also one that ends in ``#### 42``), or a
                list of numbers that are all right.
            extract: Where the model's number stands: ``auto`` takes the last ``\boxed{...}``, else the last
                ``#### ...``, else the last number of the text; the other forms are those of
                :func:`~turnwise.envs.rewards.answers.extractor`.
            tolerance: Largest difference that counts as equal.
            relative: The same as a share of the right number. The larger of both holds.

        Raises:
            ConfigError: A setting is out of range.
        """
        for name, value in (("tolerance", tolerance), ("relative", relative)):
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
                raise ConfigError(f"numeric: {name} is {shown(value)}: it must be a number of at least 0")
        self._column = column
        self._extract = None if extract == "auto" else extractor(extract, "numeric")
        self._tolerance = Fraction(tolerance)
        self._relative = Fraction(relative)

    def __call__(self, text: str, data: Mapping[str, Any]) -> float:
        """Compare."""
        gold = [self._gold(each) for each in gold_answers(data, self._column, "numeric")]
        answer = self._answer(text)
        return 0.0 if answer is None else float(any(self._equal(answer, each) for each in gold))

    def _answer(self, text: str) -> Number | None:
        if self._extract is not None:
            marked = self._extract(text)
            return None if marked is None else _marked(marked)
        for form in ("boxed", "hash"):
            marked = extract_answer(text, form)
            if marked is not None:
                return _marked(marked)
        return last_number(text)

    def _gold(self, value: Any) -> Number:
        number: Number | None = None
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
            number = Number(Fraction(str(value)))
        elif isinstance(value, str):
            number = parse_number(extract_answer(value, "hash") or value)
        if number is None:
            raise EnvError(f"numeric: task.data[{self._column!r}] holds {shown(value)}, which is no number")
        return number

    def _equal(self, answer: Number, gold: Number) -> bool:
        limit = max(self._tolerance, self._relative * abs(gold.value))
        if answer.percent and not gold.percent:
            return any(abs(each - gold.value) <= limit for each in (answer.value, answer.value / 100))
        if gold.percent and not answer.percent:
            return abs(answer.value - gold.value) <= limit or abs(100 * answer.value - gold.value) <= limit
        return abs(answer.value - gold.value) <= limit


def _marked(text: str) -> Number | None:
    r"""Return the number of a marked answer: all of it, or the only one in it (``12 apples``, but not ``12\pi``)."""
    whole = parse_number(text)
    if whole is not None:
        return whole
    found = list(itertools.islice(_NUMBER.finditer(text), 2))
    if len(found) != 1:
        return None
    start, end = found[0].span()
    # The end of what stands before it: looked at whole, a text of blanks would take time in the square of its length.
    another = _FUNCTION_BEFORE.search(text[max(0, start - 20) : start]) or _FACTOR_AFTER.match(text, end)
    return None if another else _read(found[0])
