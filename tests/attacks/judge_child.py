"""One user of a judge's ledger.  `python -m tests.attacks.judge_child LEDGER BILL CAP`: asks until
the budget is used up.

The judge's model writes what each call costs into the file BILL when it is sent, as its provider
would.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
from pathlib import Path

import msgspec

from rft.reward import judge_metrics
from rft.reward.judge_args import JudgeArgs
from rft.reward.judge_client import JudgeClient
from rft.reward.judge_costs import BudgetUsedUp
from rft.testing.judge import FakeJudge, completion
from rft.types.completion import Completion
from rft.types.ports import GenerateRequest
from rft.types.task import SamplingArgs

COMPLETION = completion("fine")


class Billed(FakeJudge):
    """Takes some milliseconds, and a share of what the call may cost at most."""

    def __init__(self, bill: Path) -> None:
        super().__init__(5)
        self._bill = os.open(bill, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        tokens = (random.randint(1, 60), random.randint(1, request.sampling.max_tokens))
        os.write(self._bill, f"{(tokens[0] + tokens[1]) / 1000}\n".encode())
        await asyncio.sleep(random.uniform(0.0, 0.01))
        return [msgspec.structs.replace(COMPLETION, usage=tokens)]


async def main(ledger: str, bill: str, cap: float) -> None:
    args = JudgeArgs(
        cache="off",
        cost_ledger=ledger,
        price_per_1k_prompt_tokens=1,
        price_per_1k_completion_tokens=1,
        max_cost_usd=cap,
        max_tokens=50,
    )
    client = JudgeClient(Billed(Path(bill)), "judge", args)
    metrics = judge_metrics.for_judge("attacked")

    async def ask(i: int) -> None:
        request = GenerateRequest(
            messages=({"role": "user", "content": f"How good is answer {i}?"},),
            sampling=SamplingArgs(max_tokens=50),
            request_id=str(i),
        )
        while True:
            await client.generate(request, 60, metrics)

    print("asks", flush=True)
    try:
        await asyncio.gather(*(ask(i) for i in range(4)))
    except BudgetUsedUp:
        print("used up", flush=True)
    finally:
        await client.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], float(sys.argv[3])))
