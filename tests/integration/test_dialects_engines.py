"""Each dialect over real engines: bytes that are no text come back changed, and are never tokenised
again.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from rft.engine.built_in import make
from rft.engine.environment import cpu_environment
from rft.engine.settings import EngineSettings
from rft.types import block
from rft.types.ids import GroupId
from rft.types.ports import Engine
from rft.types.task import SamplingArgs, Task
from rft.workflow.base import RunContext, seed_for
from rft.workflow.endpoint import serve
from rft.workflow.run_rows import experiences
from tests.helpers.talks import TALKS

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore"),  # vLLM's imports are full of other people's deprecations
]
TASK = Task(
    taskset="t",
    index=0,
    prompt="hi",
    workflow="w",
    sampling=SamplingArgs(max_tokens=12),
)


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=["transformers", pytest.param("vllm", marks=pytest.mark.vllm)],
)
async def engine(
    request: Any, tiny_untied: Path, environment: pytest.MonkeyPatch
) -> AsyncIterator[Engine]:
    settings = EngineSettings(
        engine_type=request.param,
        model_path=str(tiny_untied),
        max_model_len=200,
        max_num_seqs=4,
        kv_cache_bytes=1 << 26,
        fixed_weights=True,
    )
    for name, value in cpu_environment(settings).items():
        environment.setenv(name, value)
    engine = await make(settings)
    yield engine
    await engine.close()


async def test_rows_of_an_engine_are_equal_in_each_dialect(engine: Engine) -> None:
    rows = {}
    for dialect, talk_class in TALKS.items():
        ctx = RunContext(engine, TASK, run=0, request_id="r", seed=seed_for(7, 0))
        async with serve(ctx, TASK) as run:
            talk = talk_class(run.base_url, run.api_key, streamed=dialect != "chat", tools=())
            for text in ("hi", "so", "on"):
                await talk.say(text)
        first, _, last = ctx.completions
        sampled = np.concatenate([first.prompt_tokens, first.tokens])
        assert np.array_equal(last.prompt_tokens[: len(sampled)], sampled)
        transcript = ctx.transcript(layout="chains")
        found = experiences(TASK, "w", transcript, None, GroupId(1, 0, 0, 0), 0, 0)
        assert len(found) == 1
        rows[dialect] = block.encode(found)
    assert len(set(rows.values())) == 1, [*rows]
    assert "\ufffd" in first.text, "these bytes would be others if the text was tokenised"
