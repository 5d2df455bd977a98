"""Every shipped reward gives each answer of tests/data/answers.jsonl its right value.  To add one,
add a line there.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator

import pytest

from rft.worker import job_pool
from tests.helpers.answer_battery import lines, shipped, value_of

IN_PROCESSES = {"code_reward", "prime_code_reward", "reasoning_gym", "rlcr_reward"} | {
    f"{name}_reward" for name in ("math", "math_boxed", "math_dapo", "accuracy")
}


@pytest.fixture(scope="module", autouse=True)
def pools() -> Iterator[None]:
    yield
    job_pool.close_all()


@pytest.mark.extra
def test_every_shipped_reward_has_lines() -> None:
    counts = Counter(line.reward for line in lines())
    assert sorted(counts) == sorted(shipped())
    assert len(lines()) >= 400 and min(counts.values()) >= 4


def wrong(name: str) -> list[str]:
    async def values() -> list[str]:
        mine = [line for line in lines() if line.reward == name]
        given = await asyncio.gather(*map(value_of, mine))
        return [
            f"{line.answer!r} with the truth {line.truth!r} is {line.value}, not {value} "
            f"({line.source})"
            for line, value in zip(mine, given, strict=True)
            if value != pytest.approx(line.value)
        ]

    return asyncio.run(values())


@pytest.mark.parametrize("name", sorted(set(shipped()) - IN_PROCESSES))
def test_answers_have_their_right_value(name: str) -> None:
    assert not wrong(name)


@pytest.mark.e2e
@pytest.mark.parametrize("name", sorted(IN_PROCESSES))
def test_answers_have_their_right_value_in_processes(name: str) -> None:
    assert not wrong(name)
