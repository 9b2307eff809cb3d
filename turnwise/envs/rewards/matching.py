"""Reward functions that compare texts: exact match, numbers, regular expressions."""

from __future__ import annotations

import itertools
import math
import re
import string
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar, Final, Literal, TypeAlias, cast, get_args

from turnwise.envs.rewards.core import RewardFunction
from turnwise.errors import ConfigError, EnvError, shown

Normalization: TypeAlias = Literal["none", "space", "case", "words"]

_FORMS: Final = "text, last_line, boxed, hash, tag:NAME or regex:PATTERN"
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_HASH = re.compile(r"####[ \t]*([^\n]*)")
_BRACES = re.compile(r"\\(?:boxed|fbox)\s{0,4}\{|\\.|[{}]")
_PUNCTUATION = str.maketrans(dict.fromkeys(string.punctuation, " "))
Extract: TypeAlias = Callable[[str], str | None]


def extractor(form: str, where: str) -> Extract:
    r"""Return the function that extracts answers of one form.

    Args:
        form: ``text`` (all of it), ``last_line`` (that is not blank), ``boxed`` (the last ``\boxed{...}``), ``hash``
        (the last ``#### ...``), ``tag:NAME`` (the last ``<NAME>...</NAME>``), or ``regex:PATTERN`` (the last match:
        its group ``answer``, else its first group, else all of it).
        where: For messages.
    """
    kind, _, rest = form.partition(":") if isinstance(form, str) else ("", "", "")
    simple: dict[str, Extract] = {"text": str.strip, "last_line": _last_line, "boxed": _last_boxed, "hash": _last_hash}
    if kind == "tag" and rest:
        name = re.escape(rest)
        return _matcher(re.compile(rf"<{name}>(?P<answer>(?:(?!<{name}>).)*?)</{name}>", re.DOTALL))
    if kind == "regex" and rest:
        try:
            return _matcher(re.compile(rest, re.DOTALL))
        except re.error as error:
            raise ConfigError(f"{where}: extract is {shown(form)}, whose pattern is not a regex: {error}") from error
    if form not in simple:
        raise ConfigError(f"{where}: extract is {shown(form)}: it must be {_FORMS}")
    return simple[form]


def extract_answer(text: str, form: str) -> str | None:
    """Return the answer in a text, or None. See :func:`extractor` for the forms."""
    return extractor(form, "extract_answer")(text)


def normalize(text: str, how: Normalization) -> str:
    """Normalise a text for comparison.

    Args:
        text: The text.
        how: ``none``; ``space`` (NFKC, white space collapsed); ``case`` (that, and case folded); ``words`` (that, and
            without punctuation and the articles a, an, the: the normalisation of SQuAD, Rajpurkar et al. 2016).
    """
    if how == "none":
        return text
    text = unicodedata.normalize("NFKC", text)
    if how in ("case", "words"):
        text = text.casefold()
    if how == "words":
        bare = text.translate(_PUNCTUATION)
        # An answer that is nothing else, such as the choice A or a sign, keeps it: it is not the same as none.
        text = next((shortened for shortened in (_ARTICLES.sub(" ", bare), bare) if shortened.strip()), text)
    return " ".join(text.split())


def check_normalization(how: str, where: str) -> Normalization:
    """Check a normalisation's name and return it. Raises ConfigError."""
    if how not in get_args(Normalization):
        raise ConfigError(f"{where}: normalize is {shown(how)}: it must be one of {', '.join(get_args(Normalization))}")
    return cast("Normalization", how)


def gold_answers(data: Mapping[str, Any], column: str, where: str) -> Sequence[Any]:
    """Return the right answers of a task: a column, or each entry of the list there."""
    if column not in data:
        raise EnvError(f"{where}: task.data has no {column!r}; it has {', '.join(map(repr, data)) or 'no entries'}")
    value = data[column]
    answers = list(value) if isinstance(value, (list, tuple)) else [value]
    if not answers or any(answer is None for answer in answers):
        raise EnvError(f"{where}: task.data[{column!r}] is {shown(value)}: it must hold the right answer, or several")
    return answers


def _matcher(pattern: re.Pattern[str]) -> Extract:
    def last(text: str) -> str | None:
        match: re.Match[str] | None = None
        for match in pattern.finditer(text):  # noqa: B007 - the last one is wanted
            pass
        if match is None:
            return None
        group = "answer" if "answer" in pattern.groupindex else 1 if pattern.groups else 0
        value: str | None = match.group(group)
        return None if value is None else value.strip()

    return last


def _last_line(text: str) -> str | None:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else None


def _last_hash(text: str) -> str | None:
    answers = _HASH.findall(text)
    return answers[-1].strip() if answers else None


def _last_boxed(text: str) -> str | None:
    # One pass: a text of nothing but opening boxes costs no more than another one.
    opened: list[int] = []
    last_start = -1
    answer: str | None = None
    for brace in _BRACES.finditer(text):
        token = brace.group()
        if token.endswith("{") and token != "\\{":
            opened.append(-1 if token == "{" else brace.end())
        elif token == "}" and opened:
            start = opened.pop()
            if start > last_start:
                last_start, answer = start, text[start : brace.start()].strip()
    return answer


class ExactMatch(RewardFunction):
    """1 where the answer equals the right one (or one of several), else 0."""

    inline: ClassVar[bool] = True

    def __init__(self, *, column: str = "answer", extract: str = "text", normalize: str = "space") -> None:
        """Say what is compared.

        Args:
            column: Entry of ``task.data`` with the right answer, or a list of answers that are all right.
            extract: Where the model's answer stands; see :func:`~turnwise.envs.rewards.matching.extractor`.
            normalize: ``none``, ``space``, ``case`` or ``words``; both sides are brought into that form.

        Raises:
            ConfigError: A setting is none of these.
        """
        self._column = column
        self._extract = extractor(extract, "exact_match")
        self._how = check_normalization(normalize, "exact_match")

    def __call__(self, text: str, data: Mapping[str, Any]) -> float:
        """Compare the answer."""
        gold = gold_answers(data, self._column, "exact_match")
        answer = self._extract(text)
        if answer is None:
            return 0.0
        answer = normalize(answer, self._how)
        return float(any(answer == normalize(str(right).strip(), self._how) for right in gold))


class Regex(RewardFunction):
    """1 where a pattern is found in the text, else 0. For formats, and as a gate before costlier functions.

    The pattern runs on the event loop: unbounded backtracking blocks everything.
    """

    inline: ClassVar[bool] = True

    def __init__(self, pattern: str, *, whole: bool = False, ignore_case: bool = False) -> None:
        """Compile a pattern.

        Args:
            pattern: In Python's ``re`` syntax; ``.`` matches line breaks, too.
            whole: Whether the whole text (stripped) must match.
            ignore_case: Whether case is ignored.
        """
        try:
            self._pattern = re.compile(pattern, re.DOTALL | (re.IGNORECASE if ignore_case else 0))
        except (re.error, TypeError) as error:
            raise ConfigError(f"regex: pattern is {shown(pattern)}, which is not a regex: {error}") from error
        self._whole = whole

    def __call__(self, text: str) -> float:
        """Search, or match the whole text."""
        match = self._pattern.fullmatch(text.strip()) if self._whole else self._pattern.search(text)
        return float(match is not None)


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
    """A number in a text.

    Attributes:
        value: Exact; 50 for ``50%``.
        percent: Whether a percent sign follows.
    """

    value: Fraction
    percent: bool = False


def parse_number(text: str) -> Number | None:
    r"""Parse a text as a number, or return None.

    Accepts signs, thousands separators (``1,234``), decimals, exponents (``1e3``, ``2 \times 10^3``), fractions
    (``3/4``, ``1 3/4``, ``\frac{3}{4}``), a currency before and a percent sign after it, inside white space, brackets,
    dollar signs, Markdown emphasis and a full stop.
    """
    text = text.strip()
    if len(text) > 2 * _MOST_CHARACTERS:
        return None
    for candidate in (text, _WRAPPING.sub("", text)):
        match = _NUMBER.fullmatch(candidate)
        if match is not None:
            return _read(match)
    return None


def last_number(text: str) -> Number | None:
    """Return the last number in a text, or None."""
    match: re.Match[str] | None = None
    for match in _NUMBER.finditer(text):  # noqa: B007 - the last one is wanted
        pass
    return None if match is None else _read(match)


def _read(match: re.Match[str]) -> Number | None:
    if len(match.group()) > _MOST_CHARACTERS:
        return None
    value = _value(match["value"])
    if value is None:
        return None
    signs = f"{match['sign'] or ''}{match['sign2'] or ''}"
    negative = sum(sign in "-\N{MINUS SIGN}" for sign in signs) % 2
    return Number(-value if negative else value, match["percent"] is not None)


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
    prefix, command, rest = text.partition("\\")
    if not command:
        numbers = [int(digits) for digits in _PARTS_OF_FRACTION.findall(text)]
    elif "{" in rest:
        # \frac{3}{4}, or with one digit bare: \frac3{4}
        body = re.sub(r"^[dt]?frac\s?", "", rest)
        numbers = [int(digits) for digits in re.findall(r"-?\d+" if body.startswith("{") else r"^\d|-?\d+", body)]
    else:
        numbers = [int(digit) for digit in rest if digit.isdigit()]
    *integers, above, below = numbers
    if command and prefix.strip():
        integers = [int(prefix)]
    if below == 0:
        return None
    value = Fraction(above, below)
    return integers[0] + value if integers else value


class Numeric(RewardFunction):
    """1 where the answer is the right number within a tolerance, else 0.

    A percent sign of the answer is a unit: ``50%`` equals 50, and never 0.5. A right answer of ``50%`` is 50 or 0.5.
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
                :func:`~turnwise.envs.rewards.matching.extractor`.
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
        """Compare the number."""
        gold = [self._gold(column_value) for column_value in gold_answers(data, self._column, "numeric")]
        answer = self._answer(text)
        return 0.0 if answer is None else float(any(self._equal(answer, column_value) for column_value in gold))

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
            raise EnvError(f"numeric: task.data[{self._column!r}] holds {shown(value)}, which is not a number")
        return number

    def _equal(self, answer: Number, gold: Number) -> bool:
        limit = max(self._tolerance, self._relative * abs(gold.value))
        readings = (1, 100) if gold.percent and not answer.percent else (1,)
        return any(abs(factor * answer.value - gold.value) <= limit for factor in readings)


def _marked(text: str) -> Number | None:
    r"""Return the number of a marked answer: all of it, or the only one in it (``12 apples``, but not ``12\pi``)."""
    number = parse_number(text)
    if number is not None:
        return number
    matches = list(itertools.islice(_NUMBER.finditer(text), 2))
    if len(matches) != 1:
        return None
    start, end = matches[0].span()
    # Only the end of the text before it: a search of all of it would be quadratic for a text of spaces.
    another = _FUNCTION_BEFORE.search(text[max(0, start - 20) : start]) or _FACTOR_AFTER.match(text, end)
    return None if another else _read(matches[0])
