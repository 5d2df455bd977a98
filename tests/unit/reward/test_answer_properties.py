"""What holds of every answer that states one value: equal values score as the gold answer, others
never, in whatever notation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import date
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rft.plugins import load_all
from rft.reward.base import score
from rft.reward.build_reward import build
from rft.reward.readings import UnreadableTruth
from rft.worker import job_pool
from tests.helpers.answers import make_transcript, task

pytestmark = pytest.mark.extra("worlds")  # rewards of data sets are an extra
ANSWERS = {  # how an answer states a value, by reward
    "exact_answer": "So it is {}.",
    "gsm8k_reward": "We add.\n#### {}",
    "math_boxed_reward": "So \\boxed{{{}}}",
    "math_reward": "<think>I add.</think><answer>{}</answer>",
    "accuracy_reward": "The answer is {}",
    "math_dapo_reward": "Answer: {}",
    "search_qa_reward": "<think>I add.</think> <answer>{}</answer>",
    "final_answer": "Thought: I add.\nAnswer: {}",
}
NUMBERS = st.one_of(
    st.integers(-10_000_000, 10_000_000).map(Fraction),
    st.fractions(-1000, 1000, max_denominator=60),
    st.decimals(-99999, 99999, places=3).map(Fraction),
)


@pytest.fixture(scope="module", autouse=True)
def pools() -> Iterator[None]:
    load_all()
    yield
    job_pool.close_all()


def value_of(reward: str, truth: Any, text: str) -> float | None:
    """The accuracy of an answer."""
    given_score = asyncio.run(score(build(reward, {}), task(truth), make_transcript(text)))
    return given_score.parts.get("accuracy", given_score.parts.get("acc", given_score.value))


def _grouped(digits: str, mark: str, *, last: int = 3, before: int = 3) -> str:
    groups = [digits[-last:]]
    digits = digits[:-last]
    while digits:
        groups.insert(0, digits[-before:])
        digits = digits[:-before]
    return mark.join(groups)


def notations(number: Fraction) -> list[str]:
    """Ways to write a number."""
    size = abs(number)
    texts = [
        f"{size.numerator}/{size.denominator}",
        rf"\frac{{{size.numerator}}}{{{size.denominator}}}",
    ]
    if size > 1 and size.denominator > 1:
        ones, over = divmod(size.numerator, size.denominator)
        texts += [
            f"{ones} {over}/{size.denominator}",
            rf"{ones}\frac{{{over}}}{{{size.denominator}}}",
        ]
    if 10**9 % size.denominator == 0:
        decimal = f"{float(size):.9f}".rstrip("0").rstrip(".")
        ones_text, _, decimals = decimal.partition(".")
        texts += [
            decimal,
            f"{decimal}e0",
            rf"{decimal} \times 10^{{0}}",
            decimal.translate({48 + n: 0xFF10 + n for n in range(10)}),
        ]
        if len(ones_text) > 3:
            rest = f".{decimals}" if decimals else ""
            texts += [
                _grouped(ones_text, mark) + rest for mark in (",", " ", "\u202f", "'", "{,}", r"\,")
            ]
            texts.append(_grouped(ones_text, ",", before=2) + rest)
            texts += [f"{_grouped(ones_text, '.')},{decimals}"] if decimals else []
        texts += [f"${decimal}$", f"**{decimal}**"]
    sign = "-" if number < 0 else ""
    return [text.replace(text.lstrip("$*"), sign + text.lstrip("$*"), 1) for text in texts]


@given(st.data(), NUMBERS, st.sampled_from(sorted(ANSWERS)))
def test_equal_numbers_score_in_any_notation(
    data: st.DataObject, number: Fraction, reward: str
) -> None:
    ways = notations(number)
    truth = data.draw(st.sampled_from(ways))
    answer = data.draw(
        st.sampled_from(
            [*ways, *(w.replace("-", "−") for w in ways), *(w.replace("-", "–") for w in ways)]
        )
    )
    assert value_of(reward, truth, ANSWERS[reward].format(answer)) == 1


@given(st.data(), NUMBERS, NUMBERS, st.sampled_from(sorted(ANSWERS)))
def test_another_number_never_scores(
    data: st.DataObject, number: Fraction, other: Fraction, reward: str
) -> None:
    other = data.draw(
        st.sampled_from(
            [
                other,
                -number,
                number * 10,
                number / 10,
                number + 1,
                number * 1000,
                1 / number if number else 7,
            ]
        )
    )
    if other == number:
        return
    truth = data.draw(st.sampled_from(notations(number)))
    answer = data.draw(st.sampled_from(notations(Fraction(other))))
    assert value_of(reward, truth, ANSWERS[reward].format(answer)) != 1


@given(
    st.data(),
    st.dates(date(1000, 1, 1), date(9999, 12, 31)),
    st.dates(date(1000, 1, 1), date(9999, 12, 31)),
    st.booleans(),
)
def test_dates_score_in_any_notation_and_others_never(
    data: st.DataObject, day: date, other: date, same: bool
) -> None:
    def written(of: date) -> str:
        form = data.draw(
            st.sampled_from(
                [
                    "%Y-%m-%d",
                    "{d} %B %Y",
                    "%B {d}, %Y",
                    "%b {d} %Y",
                    "%d.%m.%Y",
                    "%Y/%m/%d",
                    "%Y年%m月%d日",
                ]
            )
        )
        return of.strftime(form.replace("{d}", str(of.day)))

    if not same and day == other:
        return
    for reward in ("exact_answer", "search_qa_reward", "accuracy_reward", "final_answer"):
        answer = ANSWERS[reward].format(written(day if same else other))
        assert (value_of(reward, written(day), answer) == 1) is same


@given(
    st.sampled_from(sorted(ANSWERS)),
    st.sampled_from(
        ["", " ", "\n", "<think>7</think>", "<think>7", "\u200b", "<answer></answer>", "\\boxed{}"]
    ),
)
def test_an_empty_answer_never_scores(reward: str, answer: str) -> None:
    assert value_of(reward, "7", answer) != 1
    assert value_of(reward, "A" if reward == "search_qa_reward" else "0", answer) != 1


@given(
    st.sampled_from(["exact_answer", "gsm8k_reward"]),
    NUMBERS,
    NUMBERS,
    st.sampled_from([" or ", ", ", " - ", " = x + ", " and "]),
)
def test_a_truth_of_several_values_is_refused(
    reward: str, one: Fraction, two: Fraction, between: str
) -> None:
    with pytest.raises(UnreadableTruth):
        value_of(reward, f"{one.numerator}{between}{two.numerator}", "7")


@pytest.mark.e2e
@given(NUMBERS, NUMBERS)
def test_a_hedge_never_scores(one: Fraction, two: Fraction) -> None:
    if one != two:
        for reward in ANSWERS:
            assert value_of(reward, str(two), ANSWERS[reward].format(f"{one} or {two}")) != 1


OTHER_VALUES = [  # what is said of 5 here is not that the answer is 5
    "{}x",
    "{}i",
    "{}y^2",
    "{} squared",
    "{} is wrong",
    "{} is not the answer",
    "not {}",
    "it cannot be {}",
    "{} below zero",
    "at least {}",
    "{} or more",
    "half of {}",
    "x > {}",
]


@given(st.integers(2, 10**6), st.sampled_from(OTHER_VALUES), st.sampled_from(sorted(ANSWERS)))
def test_a_number_in_a_formula_or_a_denial_never_scores(
    number: int, form: str, reward: str
) -> None:
    assert value_of(reward, str(number), ANSWERS[reward].format(form.format(number))) != 1


@given(st.integers(2, 10**6))
def test_a_percentage_is_no_plain_number_in_a_short_answer(number: int) -> None:
    for truth, answer in ((f"{number}%", f"{number}"), (f"{number}", f"{number} %")):
        assert value_of("search_qa_reward", truth, f"<answer>{answer}</answer>") == 0
