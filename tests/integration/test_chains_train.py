"""An agent whose failed runs are several chains of calls trains with the advantages of runs, from
its calls to the ledger.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from statistics import fmean, stdev

import pytest

from tests.helpers import runs

AGENT = '''
import json
import urllib.request

from rft.workflow.agent import AgentWorkflow


class Splits(AgentWorkflow):
    """Even answers are right at once; an odd one is followed by two sub-agents, each a chain of its own, and is wrong."""

    def agent(self, task, base_url, api_key):
        first = self.ask(base_url, api_key, task.prompt)
        if sum(first.encode()) % 2 == 0:
            return 1.0
        self.ask(base_url, api_key, "plan")
        self.ask(base_url, api_key, "check")
        return 0.0

    def ask(self, base_url, api_key, text):
        body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": text}]}).encode()
        headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(f"{base_url}/chat/completions", body, headers)) as answer:
            return json.load(answer)["choices"][0]["message"]["content"] or ""
'''


@pytest.mark.e2e
def test_an_agents_chains_share_the_advantage_of_their_run(
    tiny_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    overrides = (
        f"buffer.explorer_input.default_workflow_type={tmp_path}/agent.py:Splits",
        "buffer.explorer_input.default_reward_fn_type=null",
        "algorithm.repeat_times=6",
        "monitor.keep_trainer_logprobs=true",
        "trainer.total_steps=1",
    )
    run = runs.Run(*runs.arguments(tiny_model, tmp_path / "runs", *overrides), "--in-process")
    assert run.end(300) == 0, run.output
    ledger = runs.folder(tmp_path / "runs") / "buffer/experience_buffer.db"
    with closing(sqlite3.connect(ledger)) as raw:
        sql = (
            "SELECT e.group_id, e.run, e.reward, avg(t.advantage) FROM v_experiences e JOIN "
            "v_tokens t ON t.id = e.id"
        )
        rows = raw.execute(f"{sql} WHERE t.advantage IS NOT NULL GROUP BY e.id").fetchall()
        means = dict(raw.execute("SELECT id, reward_mean FROM v_groups").fetchall())
    groups: dict[str, dict[int, set[tuple[float, float]]]] = {}
    for group, number, reward, advantage in rows:
        groups.setdefault(group, {}).setdefault(number, set()).add((reward, round(advantage, 4)))
    # some runs are chains
    assert any(len(of) > 1 for of in groups.values()) and len(rows) > sum(map(len, groups.values()))
    for group, of in groups.items():
        assert all(len(values) == 1 for values in of.values()), of
        rewards = [next(iter(values))[0] for values in of.values()]
        assert means[group] == pytest.approx(fmean(rewards))
        for values in of.values():
            ((reward, advantage),) = values
            expected = (
                0.0
                if len(set(rewards)) == 1
                else (reward - fmean(rewards)) / (stdev(rewards) + 1e-6)
            )
            assert advantage == pytest.approx(expected, abs=2e-4)
