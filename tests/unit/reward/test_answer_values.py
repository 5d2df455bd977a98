"""Values in a text are read by one grammar (findings G1, G10); docs/howto/reward.md states it."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest

from rft.plugins import load_all
from rft.reward.answer_values import first_value, last_value, whole_value
from rft.reward.base import score
from rft.reward.build_reward import build
from rft.reward.measures import unit_of
from rft.reward.readings import UnreadableTruth
from tests.helpers.answers import make_transcript, task


@pytest.fixture(scope="module", autouse=True)
def plugins() -> None:
    load_all()


async def reward_of(truth: Any, answer: str, **args: Any) -> float | None:
    return (await score(build("exact_answer", args), task(truth), make_transcript(answer))).value


@pytest.mark.parametrize(
    ("truth", "right", "wrong"),
    [
        (
            "1/2",
            ["0.5", "1/2", r"\frac{1}{2}", r"so $x = \dfrac12$.", "½", "50%", "2/4"],
            ["I get 7/2", "The date is 2", "2", ""],
        ),
        (r"\frac{1}{2}", ["1/2", ".5"], ["2", "1"]),
        ("2^5", ["32", "2^5", "2**5"], ["5", "2", "25"]),
        (r"1.5 \times 10^{3}", ["1500", "1.5e3", "1,500", "1.5×10³"], ["3", "10", "1.5"]),
        (
            "2024-05-17",
            ["17 May 2024", "May 17, 2024", "2024年5月17日", "on 2024-05-17."],
            ["on the 17", "2002", "2024", "17"],
        ),
        ("1,00,000", ["100000", "1,00,000", "100 000"], ["I think 0", "1"]),
        ("1.234,56", ["1234.56", "x = 1 234,56"], ["x = 56", "1.23456"]),
        ("100000", ["1,00,000", "100,000"], ["0", "1"]),
        (
            "1234",
            ["1{,}234", r"$1\,234$", "1 234", "1\u202f234", "1'234", "1,234.0"],
            ["234", "1.234", "1,234,000"],
        ),
        ("12345", ["12 345"], ["345", "12"]),
        ("-5", ["–5", "−5", "-5", r"$-5$", "x = - 5"], ["5", "10-5"]),
        (42.0, ["42", "42."], ["0", "42.5"]),
    ],
)
async def test_a_truth_is_compared_as_a_whole(
    truth: Any, right: list[str], wrong: list[str]
) -> None:
    """G1."""
    assert {text: await reward_of(truth, text) for text in right} == dict.fromkeys(right, 1.0)
    assert {text: await reward_of(truth, text) for text in wrong} == dict.fromkeys(wrong, 0.0)


@pytest.mark.parametrize(
    "truth",
    [
        "3, 4",
        "7 or 8",
        "x = 5",
        "between 1 and 2",
        "05/06/2024",
        "1.2.3",
        "12,5",
        "(1,2)",
        "2x",
        "seven",
        "",
        "  ",
        [1, 2],
        True,
        "1/0",
    ],
)
async def test_a_truth_that_is_no_single_value_is_refused(truth: Any) -> None:
    """G1."""
    with pytest.raises(
        UnreadableTruth, match=r"the truth of task t\[0\] is .*; it must be one number"
    ):
        await reward_of(truth, "4")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3 + 4 = 7.", "7"),
        ("5-3", None),
        ("7 = 3 + 4", None),
        ("it is -3", "-3"),
        ("x = \u22123", "-3"),
        ("a loss of -$3", "-3 $"),
        (r"\(-\$1,200\)", "-1200 $"),
        ("1,234.50 dollars", "2469/2 $"),
        ("x", None),
        ("7.0", "7"),
        ("12,34", None),
        ("1 234,5", "2469/2"),
        ("it is .5", "1/2"),
        ("-.25", "-1/4"),
        ("1e-3", "1/1000"),
        ("3e", None),
        ("3rd", "3"),
        ("答案：７", "7"),
        ("答案是٧", "7"),
        ("१२", "12"),
        ("7 or 8", None),
        ("7 apples or 8 apples", None),
        ("7 or 7.0", "7"),
        ("The roots are (3, 4)", None),
        ("x = 3, 4", None),
        ("1, 2", None),
        ("In 2023, 5 people came", "5"),
        ("Out of 10, 7 remain.", "7"),
        ("3 = 4", None),
        ("It is 2, not 3", "2"),
        ("x^2", None),
        (r"\sqrt{2}", None),
        (r"3\pi", None),
        ("x_1", None),
        ("2x + 3", None),
        ("f(2)", None),
        ("10:30", None),
        ("- 5\n- 6", "6"),
        ("**42**", "42"),
        (r"\boxed{42}", "42"),
        ("2 million", "2000000"),
        ("$50k", "50000 $"),
        ("3万", "30000"),
        ("1½", "3/2"),
        (r"1\frac{1}{2}", "3/2"),
        ("3 and 1/2", "7/2"),
        ("90 km/h", "25 m s^-1"),
        (r"20 \text{ cm$^2$}", "1/500 m^2"),
        ("5 square meters", "5 m^2"),
        (r"90^\circ", "90 °"),
        ("5/17/2024", "2024-05-17"),
        ("31 February 2024", None),
        ("9" * 5000, None),
        ("2^99999", None),
        ("0^-1", None),
    ],
)
def test_the_last_value_of_a_text(text: str, value: str | None) -> None:
    found = last_value(text)
    assert (None if found is None else str(found)) == value


@pytest.mark.parametrize(
    ("text", "value"), [("72 eggs, 3 a day", "72"), ("5 or 6", None), ("-$5", "-5 $"), ("", None)]
)
def test_the_first_value_of_a_text(text: str, value: str | None) -> None:
    found = first_value(text)
    assert (None if found is None else str(found)) == value


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("5 km", "5000 m", True),
        ("5 km", "5 m", False),
        ("5 km", "5", True),
        ("5 km", "5000", False),
        ("$5", "€5", False),
        ("$5", "5 dollars", True),
        ("50%", "50", True),
        ("50%", "0.5", True),
        ("50%", "0.5%", False),
        ("90 min", "1.5 h", True),
        ("72 apples", "72", True),
        ("1 L", "1000 ml", True),
        ("1 m^2", "10000 cm^2", True),
        ("2024-05-17", "739023", False),
    ],
)
def test_values_with_units(one: str, other: str, same: bool) -> None:
    first = whole_value(one)
    second = whole_value(other)
    assert first is not None and second is not None
    assert first.same(second) is second.same(first) is same


def test_units_are_read_as_they_are_written() -> None:
    assert unit_of("km/h") == ("m s^-1", Fraction(1000, 3600))
    assert unit_of("Mm") != unit_of("mm")
    assert unit_of("apples") is unit_of("") is unit_of("m//s") is None


@pytest.mark.parametrize(
    ("truth", "answer", "value"),
    [
        ("北京", "北京。", 1.0),
        ("Hawai'i", "Hawai’i", 1.0),
        ("1914-1918", "1914–1918", 1.0),
        ("1914-1918", "1914", 0.0),
        ("café", "cafe\u0301", 1.0),
        ("a b", "a\u00a0b", 1.0),
        ("Yes", "yes", 0.0),
        ("7", "７", 1.0),
        (1990, "1990", 1.0),
        ("Yes", "", 0.0),
    ],
)
async def test_texts_in_another_spelling_are_equal(truth: Any, answer: str, value: float) -> None:
    """G10."""
    assert await reward_of(truth, answer, compare="text") == value
