"""A weight sync that goes wrong inside a real vLLM worker stops the run, named; the engines are
left with proven weights.
"""

import pytest

from rft.launch import leftovers
from rft.monitor.read import read, series
from tests.helpers import runs

FAULTS = {  # what the worker does at its third and later loads, and what must be said
    "sync.skip": "canary",
    "sync.missing_tensor": "got no weights",
    "sync.stale_head": "computes with other weights",
}


@pytest.mark.vllm
@pytest.mark.parametrize(
    "fault",
    [
        "sync.skip",
        *(
            pytest.param(f, marks=pytest.mark.slow)
            for f in ("sync.missing_tensor", "sync.stale_head")
        ),
    ],
)
def test_a_faulty_load_stops_the_run_with_its_reason(tiny_model, tmp_path, fault):
    before = leftovers.snapshot()
    nth = ",".join(f"{fault}:{n}" for n in range(3, 9))
    run = runs.Run(
        *runs.arguments(
            tiny_model,
            tmp_path,
            *runs.SMALL,
            "explorer.rollout_model.engine_type=vllm",
            "trainer.total_steps=20",
            runs.parity(tmp_path),
        ),
        env={"RFT_FAULT": nth},
    )
    assert run.end() == 4, run.output
    assert "WeightSyncFailed" in run.output and FAULTS[fault] in run.output, run.output
    served = series(read(runs.folder(tmp_path) / "metrics.jsonl"), "sync/version")
    assert [step for step, _ in served] == [0, 1], (
        "versions 0 and 1 were proven, version 2 never counted as served"
    )
    assert runs.state(tmp_path)["phase"] == "failed"
    assert runs.left(before) == []
