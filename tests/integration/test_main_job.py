"""The main job with everything real: vLLM, Ray, FSDP2 on two ranks, the buffer, weights
synchronised and proven after every step.
"""

import psutil
import pytest

from rft.launch import leftovers
from rft.monitor.read import read, series
from rft.trainer.checkpoint import manifest as manifests
from tests.helpers import runs

ACCURACY = "eval/copy_eval/mean@1"


@pytest.fixture(scope="module")
def job(tiny_model, tmp_path_factory):
    """One run on vLLM; listeners of its processes are looked at in the middle."""
    root = tmp_path_factory.mktemp("main_job")
    before = leftovers.snapshot()
    run = runs.Run(
        *runs.arguments(
            tiny_model,
            root,
            *(
                "explorer.rollout_model.engine_type=vllm",
                "trainer.world_size=2",
                "explorer.eval_on_startup=true",
            ),
            *("trainer.save_interval=30", "trainer.checkpoint.async_save=true"),
        )
    )
    run.wait_for("step 2/")
    family = runs.parts(runs.state(root)["run_id"])
    listening = [
        c.laddr
        for p in family
        for c in p.net_connections(kind="inet")
        if c.status == psutil.CONN_LISTEN
    ]
    code = run.end()
    return root, run, code, listening, runs.left(before)


@pytest.mark.vllm
def test_it_ends_well_and_learns(job):
    root, run, code, _, _ = job
    assert code == 0, run.output
    accuracy = series(read(runs.folder(root) / "metrics.jsonl"), ACCURACY)
    # Answers of vLLM are not seeded here, and a random model meets its first rewards by chance: 80
    # steps ended at 0.78 to 0.99. test_learning.py asks for 0.9 where the seed decides.
    assert accuracy[0][0] == 0 and accuracy[0][1] < 0.3
    assert accuracy[-1][0] == 80 and accuracy[-1][1] > 0.5, accuracy


@pytest.mark.vllm
def test_every_sync_is_proven_to_1e_4(job):
    root, *_ = job
    errors = series(read(runs.folder(root) / "metrics.jsonl"), "sync/canary_max_abs")
    assert [step for step, _ in errors] == list(range(81))
    assert max(error for _, error in errors) <= 1e-4


@pytest.mark.vllm
def test_training_sees_the_engines_log_probs(job):
    root, *_ = job
    mismatch = series(read(runs.folder(root) / "metrics.jsonl"), "mismatch/abs_diff_max")
    assert mismatch and max(error for _, error in mismatch) <= 1e-4
    staleness = series(read(runs.folder(root) / "metrics.jsonl"), "experience/staleness/max")
    assert {value for _, value in staleness} == {0.0}


@pytest.mark.vllm
def test_everything_listens_on_loopback(job):
    _, _, _, listening, _ = job
    assert listening, "a live run has listeners; none seen means the scan looked at nothing"
    assert {address.ip.removeprefix("::ffff:") for address in listening} <= {"127.0.0.1", "::1"}


@pytest.mark.vllm
def test_nothing_is_left(job):
    *_, left = job
    assert left == []


@pytest.mark.vllm
def test_the_account_balances_from_files_alone(job):
    root, *_ = job
    ok, found = runs.audit(runs.folder(root))
    assert ok and found["used"] == 40960, found  # 80 steps x 64 tasks x 8 runs


@pytest.mark.vllm
def test_every_rank_writes_its_part_of_a_checkpoint_while_steps_go_on(job):
    root, *_ = job
    for step in (30, 60, 80):
        # raises where a file is not whole
        found = manifests.read(runs.folder(root) / "checkpoints" / f"global_step_{step}")
        for kind in ("model", "optimizer"):
            assert {f"trainer/{kind}-0000{rank}-of-00002.safetensors" for rank in (1, 2)} <= set(
                found.files
            )
    waited = dict(series(read(runs.folder(root) / "metrics.jsonl"), "time/checkpoint_s"))
    assert {30, 60} <= set(waited)


@pytest.mark.vllm
def test_the_exported_model_loads_and_knows_the_task(job):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    root, *_ = job
    folder = runs.folder(root) / "checkpoints" / "global_step_80" / "huggingface"
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "zq7"}], add_generation_prompt=True, return_tensors="pt"
    )
    answer = model.generate(ids["input_ids"], max_new_tokens=1, do_sample=False)
    assert tokenizer.decode(answer[0, -1]) == "7"
