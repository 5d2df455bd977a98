"""Read numbers, fractions, percentages, amounts, quantities and dates as people and models write
them.

docs/howto/reward.md has the grammar.  Depends on no reward.  Invariants: a text is read in one
pass, so that no answer can make it slow; an ambiguous notation has no value.
"""

from __future__ import annotations

import re
from datetime import date
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from rft.reward.measures import unit_of
from rft.reward.readings import note, truth_of, unreadable
from rft.reward.spelling import normalized
from rft.types.task import Task

_LONGEST = 500  # characters of a value
_MOST_POWER = 999
_MONTHS = "jan feb mar apr may jun jul aug sep oct nov dec".split()
_MONTH = (
    r"(?i:jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sept?(?:ember)?|oct(?:ober)?|nov(?:ember)?"
    r"|dec(?:ember)?)\.?"
)
_SCALES = {
    "hundred": 2,
    "thousand": 3,
    "million": 6,
    "billion": 9,
    "trillion": 12,
    "lakh": 5,
    "crore": 7,
} | {
    "k": 3,
    "K": 3,
    "M": 6,
    "B": 9,
    "万": 4,
    "亿": 8,
}

_DATE = (
    r"(?P<y1>\d{4})(?P<gap1>[-/.])(?P<m1>\d{1,2})(?P=gap1)(?P<d1>\d{1,2})(?!\d|[-/.]\d)"
    r"|(?P<y2>\d{4}) ?年 ?(?P<m2>\d{1,2}) ?月 ?(?P<d2>\d{1,2}) ?日"
    rf"|(?P<d3>\d{{1,2}})(?:st|nd|rd|th)?(?: of)? (?P<m3>{_MONTH}),? (?P<y3>\d{{4}})(?!\d)"
    rf"|\b(?P<m4>{_MONTH}) (?P<d4>\d{{1,2}})(?:st|nd|rd|th)?,? (?P<y4>\d{{4}})(?!\d)"
    r"|(?P<d5>\d{1,2})(?P<gap5>[/.])(?P<m5>\d{1,2})(?P=gap5)(?P<y5>\d{4})(?!\d)"
)
_DIGITS = r"\d{1,3}(?:[ ']\d{3})++(?!\d)(?:[.,]\d++)?|\d++(?:[.,_]\d++)*+|(?<![\w.])\.\d++"
_VALUE = re.compile(
    rf"{_DATE}|(?P<sign>(?<![\w)\]%])[-+])?(?:(?P<money>\$|[€£¥₹]|(?:USD|EUR|GBP|INR|Rs\.?)(?= "
    rf"?\d)) ?(?P<sign2>-)?)?"
    r"(?:(?:(?P<ones>\d++)(?: and)? )?(?P<over>\d++) ?/ ?(?P<under>\d++)(?!/|[.]\d)"
    rf"|(?P<digits>{_DIGITS})"
    r"(?:[eE](?P<exponent>[-+]?\d++)(?!\w)| ?\* ?10\^(?P<ten>[-+]?\d++)|\^(?P<power>[-+]?\d++))?)"
    r"(?P<scale> (?:hundred|thousand|million|billion|trillion|lakh|crore)\b|[kKMB]\b| ?[万亿])?"
    r"(?P<end>)(?:(?!s\b) "
    r"?(?P<unit>(?:°[CF]?|[^\W\d_]{1,20}+|[%€£¥₹])(?:\^-?\d)?(?:/[^\W\d_]{1,20}+(?:\^\d)?)*))?"
)

_JOINTS = re.compile("[ '_]")
_GROUPED = re.compile(r"[1-9]\d{0,2}([,.])\d{3}(?:\1\d{3})*|[1-9]\d?(?:,\d\d)+,\d{3}")

_OPERAND = r"(?:[\d(√π\\]|[b-zB-HJ-Z]\b)"
# text before a number that is part of an operation, a bound, a name, a time or a function
_PART_OF = re.compile(
    r"(?:[\w)\]π%] ?[+*/^] ?\(?|\w_\(?|[±√] ?\(?|(?:\b[A-Za-z]|[\d%)\]]) ?- ?|[A-Z]-|[A-Za-z]|\d:"
    r"|\b[a-zA-Z] ?\(|\b(?:log|ln|sin|cos|tan|exp|sqrt|mod|modulo|choose|twice|double|triple) ?\(?"
    r"|\b(?:half|third|quarter|root|square|cube|factorial|reciprocal|logarithm) of |[≤≥] ?"
    r"|(?<![</\w])[A-Za-z] ?[<>] ?|[<>]= ?|\\(?:leq?|geq?|lt|gt)(?:slant)? ?|\bat (?:least|most) |\bup to "
    r"|\b(?:less|more|fewer|greater|larger|smaller|higher|lower) than )\Z"
)
# text behind a number that is part of an operation, a bound or a formula: 7x, 7(x + 1)
_GOES_ON = re.compile(
    rf" ?(?:[+*/^] ?{_OPERAND}|[π√]|- ?{_OPERAND}|:\d)|(?:[ABDEG-Za-rt-zα-λν-ω]|[xyz]++)(?![^\W\d_]|\.[a-z])"
    r"|\((?=[^()]{0,50}[\d+*/^]|[a-z]\))|\+(?!\w)| (?:dozen|factorial|thirds|fourths"
    r"|(?:fif|six|seven|eigh|nin|ten|hundred|thousand)ths|mod|modulo|choose|below|at (?:least|most)"
    r"|(?:or|and) (?:more|less|fewer|up|over|under|above|below|greater|smaller|higher|lower))\b"
)
# text that denies the number behind it, or before it
_DENIED = re.compile(
    r"(?:\b(?:not|never|nor|neither|except|nicht|pas|не|no es|(?:other|rather) than|instead of)"
    r"|\b(?:anything|all) but|\bcannot|n't|不是|不等于|≠|!=|\\neq?)"
    r"(?: (?:be|equal to|equals?|exactly|quite|necessarily))* ?\Z"
)
_WRONG = re.compile(
    r"(?:,? (?:which |that )?(?:is|was|would be|seems|must be|ist|est|es)(?: \w+ly)? |,? ?\(| ?是?)"
    r"(?:(?:too|the wrong|wrong|incorrect|false|impossible|invalid|falsch|faux|incorrecto|an? (?:mistake|error))\b"
    r"|错|不对|不正确)"
    r"| (?:(?:is|was|would|could|can|must)(?: ?not|n't)|can't)(?: be)?"
    r"(?: (?:it|right|correct|true|valid|possible|allowed|an? \w+|the (?:right |correct )?\w+))?(?=[.,;!\n)]|$)"
)
_OR = re.compile(
    r"(?: [^\W\d_]+){0,2} ?[,(]? ?(?:or|oder|ou|或者?|または|или) ?(?:maybe|perhaps|possibly)? ?"
)
_EQUALS = re.compile(r" ?= ?")
_LISTED = re.compile(r"\s?[,;](?: and| or)?\s?| and ")
_LIST_OPENS = re.compile(r"(?:[(\[=:]|\A|\b(?:is|are|between|either)) ?$")
_LIST_CLOSES = re.compile(r" ?(?:[)\].\n]|$)")
_END = re.compile(r"[ .。\"']*")
_NOUN = re.compile(
    rf"(?: [^\W\d_]{{3,}}(?: [^\W\d_]{{2,}}){{0,3}})?(?: ?\([^()\d]*\))?{_END.pattern}"
)

_NOTATIONS = [
    (re.compile(pattern), by)
    for pattern, by in (
        (r"\\\$|\bUS\$", "USD "),
        (r"\$([^$\n]*)\$", r" \1 "),
        (r"\\(?:left|right|displaystyle|[bB]igg?[lr]?|!)(?![a-z])", ""),
        (r"\{,\}", ","),
        (r"\\(?:text\w*|math[a-z]+|mbox|boxed|fbox|operatorname)\*? ?\{([^{}]*)\}", r" \1 "),
        (r"\^ ?\{? ?\\circ ?\}?|\\degree|\^°", "°"),
        (r"\\%", "%"),
        (r"\\[,;: ()\[\]]|\\q?quad(?![a-z])|~", " "),
        (r"(\d) ?\\([dtc]?frac)", r"\1 \\\2"),
        (r"\\[dtc]?frac ?(?:\{ ?(-?\d+) ?\}|(\d)) ?(?:\{ ?(\d+) ?\}|(\d))", r"\1\2/\3\4"),
        (r"\\(?:times|cdot)(?![a-z])|[×·⋅∙∗]|(?<=\d) ?x ?(?=\d)", "*"),
        (r"\\div(?![a-z])|÷", "/"),
        (r"(?<=\d)\*\*(?=\d)", "^"),
        (r"\*\*|`|(?<![^\W_])_+(?=\S)|(?<=\S)_+(?![^\W_])", ""),
        (r"(?<![\w*])\*([^*\s][^*\n]*)\*(?![\w*])", r"\1"),
        (r" ?\^ ?[{(] ?([-+]?\d+) ?[})]| ?\^ ?([-+]?\d+)", r"^\1\2"),
        (r"\\sqrt(?![a-z])", "√"),
        (r"\\pi(?![a-z])", "π"),
        (r"\\pm(?![a-z])", "±"),
        (r"\\approx(?![a-z])|[≈≃]", "="),
        (r"(= ?)- (?=\d)", r"\1-"),
        (r"(?i)(?<=\d) minus (?=\d)", " - "),
        (r"(?i)(?<=\d) plus (?=\d)", "+"),
        (r"(?i)(?<=\d) (?:times|multiplied by) (?=\d)", "*"),
        (r"(?i)(?<=\d) (?:divided by|over) (?=\d)", "/"),
        (r"(?i)(?<=\d) (?:raised )?to the power (?:of )?(?=\d)", "^"),
        (r"(?i)(?<=\d) (squared|cubed)\b", lambda m: "^2" if m[1][0] in "sS" else "^3"),
        (
            r"(?i)(?<![\d.,])(\d[\d.,]*+(?: ?(?:°[CF]?|degrees?(?: celsius| fahrenheit)?))?)"
            r" (?:below|under) (?:zero|0)\b",
            r"-\1",
        ),
        (r"(?i)\b(?:minus|negative) (?=[\d$.])", "-"),
        (r"\\?\{", " ("),
        (r"\\?\}", ") "),
        (
            r"\b(square|cubic) (?!root|of\b)([a-z]+)",
            lambda m: f"{m[2]}^{2 if m[1] == 'square' else 3}",
        ),
        (r"(?<=[a-z0-9]) per (?=[a-z])", "/"),
        (r"\(base 10\)", ""),
        (r" {2,}", " "),
    )
]
# text that some notation rewrites
_MARKS = re.compile(
    r"[\\$*`_^{}~×·⋅∙∗÷≈≃]|\d ?x ?\d|= ?- |\b(?:square|cubic|per|base|(?i:minus|negative)) "
    r"|(?i: (?:plus|times|by|over|power|(?:below|under) zero|(?:below|under) 0|squared|cubed)\b)"
)


class Value(NamedTuple):
    """`number` as written, and `amount` in base units of `dimension`: 50% is 1/2, 5 km is 5000 m, a
    date its day number.
    """

    number: Fraction
    amount: Fraction
    dimension: str = ""

    def __str__(self) -> str:
        if self.dimension == "date":
            return date.fromordinal(int(self.amount)).isoformat()
        return f"{self.amount} {self.dimension.strip('%')}".strip()

    def same(self, other: Value, *, percent_is_number: bool = True) -> bool:
        """Return whether both are one value.  A missing unit is taken from the other value; 50%
        equals 1/2, and also 50 unless `percent_is_number` is False.
        """
        dimensions = {self.dimension, other.dimension}
        if self.amount == other.amount and (len(dimensions) == 1 or dimensions == {"", "%"}):
            return True
        return (
            len(dimensions) == 2
            and "" in dimensions
            and "date" not in dimensions
            and (percent_is_number or "%" not in dimensions)
            and self.number == other.number
        )


class _Place(NamedTuple):
    """A place in a text where a value is written."""

    start: int
    end: int
    match: re.Match[str]

    @property
    def value(self) -> Value | None:
        """The value, or None if the text looks like a value but cannot be read."""
        match = self.match
        if len(match[0]) > _LONGEST:
            return None
        try:
            return _dated(match) if match["over"] is match["digits"] is None else _counted(match)
        except (ValueError, ZeroDivisionError):
            return None


def whole_value(text: str, *, noun: bool = True) -> Value | None:
    """Return the value of a whole text, or None.  `noun`: words may follow, so "72 apples" is 72."""
    return None if len(text) > _LONGEST else _read_whole(text, noun)


@lru_cache(4096)
def _read_whole(text: str, noun: bool) -> Value | None:
    text = rewritten(text)
    places = _places(text)
    if len(places) != 1 or text[: places[0].start].strip(" \"'"):
        return None
    rest = _NOUN if noun else _END
    return (
        places[0].value
        if rest.fullmatch(text, places[0].end)
        and not _is_part(text, places[0])
        and not _is_denied(text, places[0])
        else None
    )


def gold_value(task: Task, *, behind: str = "") -> Value:
    """Return the value of the row's truth, or of the part after the mark `behind`.  Raises
    UnreadableTruth.
    """
    truth = str(truth_of(task))
    gold = whole_value(truth.rpartition(behind)[2] if behind else truth)
    if gold is None:
        raise unreadable(
            task,
            "one number, fraction, amount or date; else use compare: text, or a reward of "
            "mathematics",
        )
    return gold


def agree(part: str, text: str, value: Value | None, gold: Value) -> bool:
    """Return whether a value of an answer equals the gold value, and note the comparison."""
    right = value is not None and value.same(gold)
    note(part, text, value, gold, right)
    return right


def last_value(text: str) -> Value | None:
    """Return the last value in a text; None if it is one of several, part of an expression, or
    unreadable.
    """
    return _at(rewritten(text), -1)


def first_value(text: str) -> Value | None:
    """Return the first value in a text, under the same conditions as `last_value`."""
    return _at(rewritten(text), 0)


def rewritten(text: str) -> str:
    """Rewrite a text in one notation: without LaTeX and Markdown, * for products, ^ for powers."""
    text = normalized(text)
    if _MARKS.search(text) is not None:
        for pattern, by in _NOTATIONS:
            text = pattern.sub(by, text)
    return text.strip()


def _places(text: str) -> list[_Place]:
    places: list[_Place] = []
    end = 0
    while (match := _VALUE.search(text, end)) is not None:
        counted = match["unit"] is not None and unit_of(match["unit"]) is None  # noun, no unit
        end = match.end("end" if counted else 0)
        places.append(_Place(match.start(), end, match))
    return places


def _at(text: str, index: int) -> Value | None:
    places = [place for place in _places(text) if not _is_denied(text, place)]
    if not places or _is_part(text, places[index]):
        return None
    value = places[index].value
    if value is None or len(places) == 1:
        return value
    earlier, later = places[-2:] if index else places[:2]
    gap = text[earlier.end : later.start]
    if (
        _OR.fullmatch(gap)
        or (_EQUALS.fullmatch(gap) and not _is_part(text, earlier))
        or _is_list(text, places, index)
    ):
        neighbour = (earlier if index else later).value
        return value if neighbour is not None and value.same(neighbour) else None
    return value


def _is_part(text: str, place: _Place) -> bool:
    """Return whether the number at `place` belongs to a formula, a bound, a name or a time."""
    return bool(_PART_OF.search(_before(text, place)) or _GOES_ON.match(text, place.end))


def _is_denied(text: str, place: _Place) -> bool:
    """Return whether the text says that the number at `place` is wrong."""
    return bool(_DENIED.search(_before(text, place)) or _WRONG.match(text, place.end))


def _before(text: str, place: _Place) -> str:
    return text[max(0, place.start - 30) : place.start]


def _is_list(text: str, places: list[_Place], index: int) -> bool:
    """Return whether the value is one of several in brackets, after = or :, or in a text of values
    only.
    """
    first = last = index % len(places)
    while first and _LISTED.fullmatch(text, places[first - 1].end, places[first].start):
        first -= 1
    while last + 1 < len(places) and _LISTED.fullmatch(
        text, places[last].end, places[last + 1].start
    ):
        last += 1
    closed = _LIST_CLOSES.match(text, places[last].end)
    return (
        first < last
        and closed is not None
        and _LIST_OPENS.search(_before(text, places[first])) is not None
    )


def _dated(match: re.Match[str]) -> Value:
    """Return the date of a match of `_DATE`.  Raises ValueError for no valid date, and for
    ambiguous ones like 5/6/2024.
    """
    form = next(n for n in range(1, 6) if match[f"y{n}"] is not None)
    day = int(match[f"d{form}"])
    named = match[f"m{form}"]
    month = int(named) if named.isdigit() else 1 + _MONTHS.index(named[:3].lower())
    if match["gap5"] == "/":
        day, month = max(day, month), min(day, month)
        if day <= 12 and day != month:
            raise ValueError("two days")
    ordinal = Fraction(date(int(match[f"y{form}"]), month, day).toordinal())
    return Value(ordinal, ordinal, "date")


def _counted(match: re.Match[str]) -> Value:
    """Return the number of any other match, with its unit.  Raises ValueError, ZeroDivisionError."""
    number = _fraction(match) if match["digits"] is None else _decimal(match["digits"])
    power = int(match["power"] or 1)
    tens = int(match["exponent"] or match["ten"] or 0)
    if max(abs(tens), (power != 1) * abs(power) * len(match["digits"] or "")) > _MOST_POWER:
        raise ValueError("too large")
    if match["scale"] is not None:
        tens += _SCALES[match["scale"].strip()]
    if power != 1:
        number **= power
    if tens:
        number *= Fraction(10) ** tens
    if "-" in (match["sign"], match["sign2"]):
        number = -number
    unit = unit_of((match["money"] or match["unit"] or "").strip("."))
    return (
        Value(number, number)
        if unit is None
        else Value(number, number * unit.factor, unit.dimension)
    )


def _fraction(match: re.Match[str]) -> Fraction:
    part = Fraction(int(match["over"]), int(match["under"]))
    if match["ones"] is None:
        return part
    if part >= 1:
        raise ValueError("no mixed number")
    return int(match["ones"]) + part


def _decimal(digits: str) -> Fraction:
    """Return the number of 1,234.5 or 1.234,5 or 1,00,000.

    Raises ValueError for 12,5, which may be two numbers, and for marks that do not group digits.
    """
    ones = _JOINTS.sub("", digits)
    decimals = "0"
    mark = max(ones.rfind(","), ones.rfind("."))
    if (
        mark >= 0
        and ones.count(ones[mark]) == 1
        and (ones[mark] == "." or not _GROUPED.fullmatch(ones))
    ):
        if ones[mark] == "," and ones[:mark].isdecimal() and ones == digits:
            raise ValueError("two numbers")
        ones, decimals = ones[:mark] or "0", ones[mark + 1 :]
    if _GROUPED.fullmatch(ones):
        ones = ones.replace(",", "").replace(".", "")
    return Fraction(f"{ones}.{decimals}")
