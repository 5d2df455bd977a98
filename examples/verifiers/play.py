"""Play one task of an environment of verifiers (v1) with the policy, and post its reward.

    python play.py '{"taskset": {"id": "largest"}}' < number_of_the_task

`agent_command_workflow` runs it, by a Python that has verifiers.  Every agent that names no model
of its own is the policy, and the mean reward of its runs is the run's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
from pathlib import Path

import httpx
import verifiers.v1 as vf


async def play(env: vf.Env, number: int) -> float:
    """Return the reward of a task.  Exits with the errors of the environment."""
    base_url = os.environ["OPENAI_BASE_URL"]
    client = vf.EvalClientConfig(base_url=base_url, api_key_var="OPENAI_API_KEY")
    [task] = env.taskset.include(idx=[str(number)])
    async with env.serving():
        episode = await env.run_episode(task, vf.ModelContext(model="policy", client=client))
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not episode.ok:
        sys.exit("\n".join(f"{error.type}: {error.message}" for error in errors))
    return statistics.mean(trace.reward for trace in episode.traces if trace.agent.trainable)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("env", type=json.loads, help="its configuration, as JSON")
    options = parser.parse_args()
    # its harnesses call `uv`, which is beside this Python
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = vf.load_environment(vf.resolve_env_config(options.env))
    reward = asyncio.run(play(env, int(sys.stdin.read())))
    key = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    url = f"{os.environ['OPENAI_BASE_URL']}/reward"
    httpx.post(url, json={"reward": reward}, headers=key).raise_for_status()


if __name__ == "__main__":
    main()
