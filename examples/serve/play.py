"""Plays sessions against `rft serve` and rewards them: python examples/serve/play.py RUN_FOLDER
[STEPS]
"""

import asyncio
import json
import os
import sys
import time
from pathlib import Path

import httpx
import openai

from rft.extras.serve.client import AsyncClient, ServeError
from rft.testing.tiny import copy_tasks


async def play(
    rft: AsyncClient, http: httpx.AsyncClient, number: int, task: dict[str, str]
) -> float:
    """One run: a question, an answer, its reward."""
    session = await rft.session(task_id=str(number))
    model = openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, http_client=http)
    answer = await model.chat.completions.create(
        model="policy", messages=[{"role": "user", "content": task["prompt"]}]
    )
    reward = float(answer.choices[0].message.content == task["response"])
    await rft.reward(session, reward)
    return reward


async def main(folder: Path, steps: int) -> None:
    address = json.loads((folder / "serve.json").read_text())["base_url"]
    tasks = copy_tasks(n=600)
    limits = httpx.Limits(max_connections=64)
    async with (
        AsyncClient(address, os.environ["RFT_SERVE_KEY"]) as rft,
        httpx.AsyncClient(limits=limits, timeout=120) as http,
    ):
        for step in range(steps):
            numbers = [n for n in range(step * 64, step * 64 + 64) for _ in range(8)]
            rewards = await asyncio.gather(
                *(play(rft, http, n, tasks[n % 600]) for n in numbers), return_exceptions=True
            )
            if wrong := [e for e in rewards if isinstance(e, ServeError | openai.OpenAIError)]:
                sys.exit(f"the service has ended: {wrong[0]}")
            print(f"step {step}: reward {sum(rewards) / len(rewards):.3f}", flush=True)


while not (Path(sys.argv[1]) / "serve.json").exists():  # the engines of `rft serve` are starting
    time.sleep(0.1)
asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 80))
