"""What a process works on and whom it waits for, in words; times are those of a virtual clock."""

from __future__ import annotations

import asyncio

from rft.worker.waiting import Activity, activities, idles, sentence, waits, works
from tests.helpers import simulated


async def _inside(noun: str, whom: str, seconds: float, *, whole: bool = False) -> None:
    with waits(noun, whom, opaque=whole):
        await asyncio.sleep(seconds)


def test_waits_for_the_same_are_counted_since_the_first() -> None:
    async def play() -> tuple[str, str]:
        jobs = [asyncio.ensure_future(_inside("question", "judge helpful", 100)) for _ in range(32)]
        await asyncio.sleep(40)
        jobs.append(asyncio.ensure_future(_inside("call", "tool search", 100)))
        await asyncio.sleep(1)
        said = sentence(activities())
        await asyncio.sleep(70)
        later = sentence(activities())
        await asyncio.gather(*jobs)
        assert activities() == []
        return said, later

    assert simulated.run(play()) == (
        "32 questions wait for judge helpful, 41 s; 1 call waits for tool search, 1 s",
        "1 call waits for tool search, 71 s",
    )


def test_of_nested_waits_the_innermost_counts() -> None:
    async def play() -> list[str]:
        said = []
        with waits("run", "workflow w"):
            said.append(sentence(activities()))
            with waits("call", "the policy"):
                said.append(sentence(activities()))
            both = [asyncio.ensure_future(_inside("call", "the policy", n)) for n in (1, 2)]
            for _ in range(2):
                await asyncio.sleep(0.5)
                said.append(sentence(activities()))
                await asyncio.sleep(0.7)
            await asyncio.gather(*both)
            said.append(sentence(activities()))
        return said

    assert simulated.run(play()) == [
        "1 run waits for workflow w, 0 s",
        "1 call waits for the policy, 0 s",
        "2 calls wait for the policy, 0 s",
        "1 call waits for the policy, 2 s",
        "1 run waits for workflow w, 2 s",
    ]


def test_whom_a_judge_asks_in_its_turn_is_not_said() -> None:
    async def play() -> str:
        with waits("question", "judge helpful", opaque=True):
            job = asyncio.ensure_future(_inside("call", "model judge", 9))
            await asyncio.sleep(5)
            said = sentence(activities())
            await job
        return said

    assert simulated.run(play()) == "1 question waits for judge helpful, 5 s"


def test_parts_that_wait_for_each_other_are_said_where_nothing_else_is() -> None:
    async def play() -> list[str]:
        said = []
        with (
            works(lambda: "explore step 1: 2 of 8 groups"),
            idles("the trainer waits for the explorer"),
        ):
            said.append(sentence(activities()))
            with waits("call", "the policy"):
                said.append(sentence(activities()))
        return said

    step = "explore step 1: 2 of 8 groups, 0 s"
    assert simulated.run(play()) == [
        f"{step}; the trainer waits for the explorer, 0 s",
        f"{step}; 1 call waits for the policy, 0 s",
    ]


def test_a_line_is_short_and_never_empty() -> None:
    found = [Activity(f"tool {n}", "call", False, 2, 9.0 - n) for n in range(6)]
    assert sentence(found).endswith("2 calls wait for tool 3, 6 s; and 2 more")
    assert sentence([]) == "no part of the run says what it waits for; see its logs"
