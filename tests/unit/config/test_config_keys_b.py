"""Keys of the top level, buffer, data_processor, explorer and synchronizer: what is active, what is
told as not active, what is refused.
"""

from __future__ import annotations

import csv
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from rft.cli import check_command as command
from rft.config.load import load
from rft.config.plan import Facts, Plan
from rft.config.resolve import resolve
from rft.config.schema.walk import all_keys
from rft.engine.environment import cpu_environment
from rft.engine.settings import EngineSettings
from rft.errors import ConfigError
from rft.testing import tiny

HERE = Path(__file__).parent
FILE = HERE / "data" / "good" / "short.yaml"
KEYS_OF_VERL = Path(__file__).parents[3] / "rft/extras/migrate/compat/keys/data" / "verl_keys.tsv"
BUFFER = "buffer.trainer_input.experience_buffer"
ENGINE = "explorer.rollout_model"


def plan(*overrides: str, gpus: int = 0) -> Plan:
    return resolve(load(FILE, overrides), Facts(cpus=4, gpus=gpus))


def messages(*overrides: str, gpus: int = 0) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        plan(*overrides, gpus=gpus)
    return {e.key: str(e) for e in getattr(caught.value, "errors", [caught.value])}


RUNS = "the run starts"
NEVER = "it is refused without what reads it"
SAID = "a warning: it has no effect without what reads it"
KEYS = [  # key, good value, bad value, what a run does with the good one
    ("mode", "serve", "train_only", RUNS),
    ("mode", "Colocate", "train_only", RUNS),
    ("resume_from_path", "runs/x/global_step_3", "[1]", RUNS),
    ("ray_namespace", "two", "[1]", RUNS),
    ("buffer.total_tasks", "8", "0", RUNS),
    (f"{BUFFER}.storage_type", "FILE", "[1]", RUNS),
    (f"{BUFFER}.replay_buffer.enable", "true", "maybe", RUNS),
    (f"{BUFFER}.replay_buffer.enable", "false", "maybe", RUNS),
    (f"{BUFFER}.replay_buffer.priority_fn", "decay_limit_randomization", "[1]", RUNS),
    (f"{BUFFER}.replay_buffer.priority_fn_args", "{decay: 2.0}", "2", RUNS),
    (f"{BUFFER}.replay_buffer.priority_fn_args", "{decay: 1.0}", "2", RUNS),
    (f"{BUFFER}.replay_buffer.reuse_cooldown_time", "5", "0", RUNS),
    (f"{BUFFER}.replay_buffer.max_uses", "4", "0", RUNS),
    (f"{BUFFER}.max_retry_times", "5", "-1", RUNS),
    (f"{BUFFER}.max_retry_interval", "0.5", "-1", RUNS),
    ("buffer.trainer_input.auxiliary_buffers", "{sft_dataset: {path: sft.jsonl}}", "[1]", NEVER),
    (
        "data_processor.experience_pipeline.operators",
        "[{name: reward_filter, args: {threshold: 1}}]",
        "[{args: {}}]",
        RUNS,
    ),
    ("data_processor.experience_pipeline.save_input", "true", "maybe", RUNS),
    ("data_processor.experience_pipeline.input_save_path", "rollouts.jsonl", "[1]", RUNS),
    ("data_processor.task_pipeline", "null", "3", RUNS),
    # the others: test_config_tasksets.py
    ("data_processor.task_pipeline.num_process", "3", "0", RUNS),
    ("explorer.auxiliary_models", "[{model_path: J, task: SCORE}]", "[{task: score}]", RUNS),
    ("explorer.over_rollout.wait_after_min", "5", "-1", RUNS),
    ("explorer.over_rollout.return_partial_tasks", "true", "maybe", RUNS),
    ("explorer.dynamic_timeout.enable", "true", "maybe", RUNS),
    ("explorer.dynamic_timeout.warmup_min_steps", "2", "-1", RUNS),
    ("explorer.dynamic_timeout.ratio", "2.5", "0", RUNS),
    ("explorer.eval_in_background", "true", "maybe", RUNS),
    ("explorer.bench_on_latest_checkpoint", "true", "maybe", RUNS),
    ("explorer.env_vars", "{SANDBOX: http://h}", "{SANDBOX: 1}", RUNS),
    ("explorer.proxy_port", "9000", "70000", SAID),
    ("explorer.listen_address", "0.0.0.0", "[1]", SAID),
    ("explorer.min_running_model_num", "2", "-1", SAID),
    ("explorer.runner_state_report_interval", "10", "-1", RUNS),
    (f"{ENGINE}.name", "policy", "a/b", RUNS),
    (f"{ENGINE}.engine_type", "vllm_async", "mystery", RUNS),
    (f"{ENGINE}.data_parallel_size", "2", "0", RUNS),
    (f"{ENGINE}.pipeline_parallel_size", "2", "0", RUNS),
    (f"{ENGINE}.ignore_eos", "true", "maybe", RUNS),
    (f"{ENGINE}.enable_chunked_prefill", "false", "maybe", RUNS),
    (f"{ENGINE}.disable_log_stats", "false", "maybe", RUNS),
    (f"{ENGINE}.enable_log_requests", "true", "maybe", RUNS),
    (f"{ENGINE}.enable_openai_api", "true", "maybe", RUNS),
    (f"{ENGINE}.base_port", "8000", "0", RUNS),
    (f"{ENGINE}.api_key", "EMPTY", "[1]", RUNS),
    (f"{ENGINE}.tokenization_check", "Strict", "on", RUNS),
    (f"{ENGINE}.tool_call_parser", "hermes", "[1]", RUNS),
    (f"{ENGINE}.reasoning_parser", "deepseek_r1", "[1]", RUNS),
    (f"{ENGINE}.fully_sharded_loras", "true", "maybe", RUNS),
    (f"{ENGINE}.max_cpu_loras", "2", "0", RUNS),
    ("synchronizer.sync_method", "NCCL", "rsync", RUNS),
    ("synchronizer.sync_method", "online", "rsync", RUNS),
    ("synchronizer.sync_method", "OFFLINE", "rsync", RUNS),
    *(
        ("synchronizer.sync_style", style, "loose", RUNS)
        for style in (
            "explorer_driven",
            "TRAINER_DRIVEN",
            "fully_async",
            "dynamic_by_explorer",
            "dynamic_by_trainer",
        )
    ),
    ("synchronizer.partial_rollout", "true", "maybe", RUNS),
    ("synchronizer.partial_rollout", "false", "maybe", RUNS),
]


@pytest.mark.parametrize(
    ("key", "good", "bad", "then"), KEYS, ids=[f"{k}={v}" for k, v, _, _ in KEYS]
)
def test_key(key: str, good: str, bad: str, then: str) -> None:
    if then == NEVER:
        found = {k: m for k, m in messages(f"{key}={good}").items() if k.startswith(key)}
        assert found and all("leave it out" in m for m in found.values())
        assert any(k.startswith(key) for k in messages(f"{key}={bad}"))
        return
    said = [
        w for w in plan(f"{key}={good}").warnings if w.startswith(key) and "has no effect: " in w
    ]
    assert then != SAID or said
    assert any(k.startswith(key) for k in messages(f"{key}={bad}"))


def test_a_changed_key_changes_the_plan() -> None:
    same = {
        (k, v)
        for k, v, _, then in KEYS
        if then == RUNS and v in ("null", "1", "vllm_async", "{decay: 2.0}")
    }
    # each needs replay_buffer.enable
    same |= {(k, v) for k, v, _, _ in KEYS if "replay" in k and v != "true"}
    same |= {
        ("synchronizer.partial_rollout", "true"),
        ("buffer.total_tasks", "8"),
    }
    same |= {("explorer.dynamic_timeout.ratio", "2.5")}  # needs dynamic_timeout.enable
    # need enable_openai_api
    same |= {(f"{ENGINE}.base_port", "8000"), (f"{ENGINE}.api_key", "EMPTY")}
    # need an adapter
    same |= {(f"{ENGINE}.fully_sharded_loras", "true"), (f"{ENGINE}.max_cpu_loras", "2")}
    plain = plan()
    for key, good, _, then in KEYS:
        if then == NEVER:
            continue
        same |= {(key, good)} if then == SAID else set()
        changed = replace(
            plan(f"{key}={good}"),
            tracked_run=plain.tracked_run,
            derived=plain.derived,
            warnings=plain.warnings,
        )
        assert (changed == plain) == ((key, good) in same), key


def test_each_unread_auxiliary_buffer_is_refused() -> None:
    used = messages(
        "buffer.trainer_input.auxiliary_buffers={sft: {path: a.jsonl, format: {prompt_key: q}}, "
        "dpo: {path: b.jsonl}}"
    )
    assert set(used) == {
        f"buffer.trainer_input.auxiliary_buffers.{name}" for name in ("sft", "dpo")
    }


def test_keys_of_named_buffers_are_checked() -> None:
    found = messages("buffer.trainer_input.auxiliary_buffers={sft: {path: a, capcity: 3}, dpo: {}}")
    key = "buffer.trainer_input.auxiliary_buffers"
    assert (
        "Did you mean" in found[f"{key}.sft.capcity"] and "capacity" in found[f"{key}.sft.capcity"]
    )
    assert "is required" in found[f"{key}.dpo.path"]


# ---------------------------------------------------------------- what is active


def test_total_tasks() -> None:
    assert plan("buffer.total_steps=null", "buffer.total_tasks=16").explorer.total_batches == 4
    assert plan("buffer.total_steps=null", "buffer.total_tasks=17").total_steps == 5
    assert plan("buffer.total_tasks=8").total_steps == 2
    assert (
        "5 steps of batch_size 4, but total_steps is 2"
        in messages("buffer.total_tasks=20")["buffer.total_tasks"]
    )
    capped = plan("buffer.total_steps=null", "buffer.total_tasks=16", "trainer.total_steps=9")
    assert capped.total_steps == 4 and any("never reached" in w for w in capped.warnings)


def test_ignore_eos_holds_for_every_taskset() -> None:
    held_out = "buffer.explorer_input.eval_tasksets=[{path: rows.jsonl}]"
    greedy = plan(held_out, f"{ENGINE}.ignore_eos=true")
    assert all(
        t.sampling.ignore_eos for t in (*greedy.explorer.tasksets, *greedy.explorer.eval_tasksets)
    )


@pytest.mark.parametrize("storage", ["sql", "queue", "file"])
def test_any_storage_may_have_its_ledger_in_postgresql(storage: str) -> None:
    url = "postgresql://rft:word@db.example/runs"
    buffer = plan(f"{BUFFER}.storage_type={storage}", f"{BUFFER}.path={url}").buffer
    assert (buffer.storage_type, buffer.ledger_url) == (
        storage,
        url.replace("://", "+psycopg://", 1),
    )
    assert f"{BUFFER}.path" in messages(
        f"{BUFFER}.storage_type={storage}", f"{BUFFER}.path=mysql://db.example/runs"
    )


def test_engine_names() -> None:
    assert [e.name for e in plan(f"{ENGINE}.engine_num=2").engines] == ["engine-0", "engine-1"]
    assert plan(f"{ENGINE}.name=policy").engines[0].name == "policy-0"


@pytest.mark.e2e
def test_vllm_takes_its_arguments(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    from rft.engine.vllm_args import engine_args

    model = f"model.model_path={tiny.make(tmp_path / 'model')}"
    usual = engine_args(plan(model).engines[0])
    assert (
        usual.disable_log_stats
        and not usual.enable_log_requests
        and usual.enable_chunked_prefill is None
    )
    other = plan(
        model,
        f"{ENGINE}.disable_log_stats=false",
        f"{ENGINE}.enable_log_requests=true",
        f"{ENGINE}.enable_chunked_prefill=false",
    )
    args = engine_args(other.engines[0])
    assert (
        not args.disable_log_stats
        and args.enable_log_requests
        and args.enable_chunked_prefill is False
    )
    rope = engine_args(
        plan(model, "model.rope_scaling={rope_type: linear, factor: 2.0}").engines[0]
    ).hf_overrides
    assert rope == {
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    }
    assert "max_num_batched_tokens" in str(
        messages(f"{ENGINE}.enable_chunked_prefill=false", f"{ENGINE}.max_num_batched_tokens=32")
    )


@pytest.mark.e2e
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_vllm_starts_its_workers_itself(device: str, tmp_path: Path) -> None:
    """In a placement group of Ray it would take Ray for them, and wait for GPUs that its own
    process has.
    """
    pytest.importorskip("vllm")
    from rft.engine.vllm_args import engine_args

    one = EngineSettings(model_path=str(tiny.make(tmp_path / "model")), device=device)
    assert engine_args(one).distributed_executor_backend == "uni"
    for several in (replace(one, tensor_parallel_size=2), replace(one, pipeline_parallel_size=2)):
        assert engine_args(several).distributed_executor_backend == "mp"


def test_vllms_log_is_read_only_where_it_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_LOGGING_LEVEL", raising=False)
    assert cpu_environment(plan().engines[0])["VLLM_LOGGING_LEVEL"] == "WARNING"
    assert (
        cpu_environment(plan(f"{ENGINE}.disable_log_stats=false").engines[0])["VLLM_LOGGING_LEVEL"]
        == "INFO"
    )


def test_vllms_arguments_have_no_effect_on_transformers() -> None:
    p = plan(
        f"{ENGINE}.engine_type=hf",
        f"{ENGINE}.enable_chunked_prefill=false",
        f"{ENGINE}.enable_log_requests=true",
    )
    assert sum("it is for engine_type vllm" in w for w in p.warnings) == 2
    p = plan(
        f"{ENGINE}.engine_type=hf",
        f"{ENGINE}.enable_prefix_caching=false",
        f"{ENGINE}.max_num_batched_tokens=64",
    )
    assert sum("it is for engine_type vllm" in w for w in p.warnings) == 2


def test_what_vllm_and_numpy_refuse_is_refused_at_once() -> None:
    few = messages(f"{ENGINE}.max_num_batched_tokens=128", f"{ENGINE}.max_num_seqs=256")
    assert "a token of each of max_num_seqs 256" in few[f"{ENGINE}.max_num_batched_tokens"]
    assert not plan(f"{ENGINE}.max_num_batched_tokens=128", f"{ENGINE}.max_num_seqs=128").warnings
    args = messages(f"{ENGINE}.extra_engine_args={{tensor_parallel_size: 2, max_num_seqs: 256}}")
    assert set(args) == {f"{ENGINE}.extra_engine_args.tensor_parallel_size"}, (
        "what says the same is no contradiction"
    )
    assert f"{ENGINE}.seed" in messages(f"{ENGINE}.seed={2**32}")
    assert "at least 1" in messages("trainer.profiler.steps=[0]")["trainer.profiler.steps[0]"]


def test_arguments_of_a_tracker_are_a_mapping() -> None:
    found = messages("monitor.monitor_type=wandb", "monitor.monitor_args={wandb: true}")
    assert "must be a mapping of arguments: {wandb: {...}}" in found["monitor.monitor_args.wandb"]
    monitor = plan("monitor.monitor_type=wandb", "monitor.monitor_args={wandb: null}").monitor
    assert monitor.tracker_args("wandb") == {}


def test_judges_are_deterministic_too() -> None:
    judge = "explorer.auxiliary_models=[{model_path: judge, engine_type: transformers}]"
    (engine,) = plan(judge, "deterministic=true", f"{ENGINE}.engine_type=hf").auxiliary[0].engines
    assert engine.deterministic and not engine.enable_prefix_caching


def test_a_service_cannot_be_deterministic() -> None:
    found = messages("mode=serve", "buffer.explorer_input.taskset=null", "deterministic=true")
    assert set(found) == {"deterministic"}


SFT = (
    "mode=train",
    "algorithm.algorithm_type=sft",
    f"{BUFFER}.path=rows",
    "buffer.explorer_input.taskset=null",
)


def test_only_weights_that_move_need_a_way_between_nodes() -> None:
    nodes = ("cluster.node_num=2", "cluster.gpu_per_node=2")
    evals = "buffer.explorer_input.eval_tasksets=[{path: rows.jsonl}]"
    assert plan(*SFT, *nodes).learner.world_size == 4
    assert plan("mode=bench", evals, *nodes).mode == "bench"
    assert "synchronizer.sync_method" in messages(*nodes)


def test_operators_beside_a_data_set_have_no_effect() -> None:
    rows = "data_processor.task_pipeline={inputs: [raw.jsonl], output: {path: rows.jsonl}}"
    replay = messages(*SFT, "buffer.trainer_input.replay_run=runs/other", "trainer.total_steps=2")
    assert "reads a data set" in replay["buffer.trainer_input.replay_run"]
    expert = (
        "algorithm.algorithm_type=mix",
        "buffer.trainer_input.auxiliary_buffers.sft_dataset.path=rows.jsonl",
    )
    replay = messages(
        "mode=train", *expert, "buffer.trainer_input.replay_run=runs/other", "trainer.total_steps=2"
    )
    assert "reads a data set" in replay["buffer.trainer_input.replay_run"], (
        "whose rows would not be mixed in"
    )
    made = plan(*SFT, rows, "data_processor.experience_pipeline.operators=[{name: reward_filter}]")
    assert made.task_pipeline is None
    for key in ("task_pipeline", "experience_pipeline.operators"):
        assert any(
            w.startswith(f"data_processor.{key} has no effect: it is for tasks")
            for w in made.warnings
        )


def test_variables_reach_the_explorer() -> None:
    assert plan("explorer.env_vars={SANDBOX: here}").explorer.env_vars == {"SANDBOX": "here"}


def test_styles() -> None:
    style = "synchronizer.sync_style={}".format
    found = plan(style("dynamic_by_trainer"), "synchronizer.sync_interval=2")
    assert found.staleness_bound is None and any(
        "without synchronizer.max_staleness" in w for w in found.warnings
    )
    assert (
        "rows are up to 1 steps old"
        in messages(style("trainer_driven"), "synchronizer.sync_interval=2", f"{BOUND}=0")[BOUND]
    )
    assert (
        plan(style("trainer_driven"), "synchronizer.sync_interval=2", f"{BOUND}=1").staleness_bound
        == 1
    )
    assert plan(style("explorer_driven"), f"{BOUND}=0").staleness_bound == 0
    quota = (
        style("fully_async"),
        "synchronizer.sync_interval=4",
        "synchronizer.staleness_threshold=0.5",
    )
    made = plan(*quota, "synchronizer.require_batches=2")
    assert (made.schedule.threshold, made.staleness_bound, made.trainer.require_batches) == (
        0.5,
        5,
        2,
    )
    assert made.explorer.by_group and made.explorer.max_inflight == 2
    assert plan(*quota, f"{BOUND}=3").staleness_bound == 3
    assert (
        "must divide sync_interval 4"
        in messages(*quota, "synchronizer.require_batches=3")["synchronizer.require_batches"]
    )
    assert (
        plan("synchronizer.partial_rollout=false").explorer.by_group
        and not plan().explorer.by_group
    )
    assert (
        "must be fixed"
        in messages("deterministic=true", style("trainer_driven"))["synchronizer.sync_style"]
    )
    for key in (
        "synchronizer.require_batches",
        "synchronizer.staleness_threshold",
        "explorer.max_inflight_batches",
    ):
        refused = messages(f"{key}=1")[key]
        assert "belongs to sync_style fully_async; sync_style is fixed: remove it" in refused


BOUND = "synchronizer.max_staleness"


def test_a_broadcast_knows_its_members() -> None:
    nccl = "synchronizer.sync_method=nccl"
    made = plan(nccl, f"{ENGINE}.engine_num=2", f"{ENGINE}.tensor_parallel_size=2")
    assert (made.sync_runtime.backend, made.sync_runtime.workers) == ("gloo", (2, 2))
    assert made.sync.nccl.bucket_bytes == 1 << 30
    unbucketed = plan(nccl, "synchronizer.nccl.bucketed_broadcast=false")
    assert unbucketed.sync.nccl.bucket_bytes is None
    declared = ("cluster.node_num=2", "cluster.gpu_per_node=2", "trainer.world_size=2", nccl)
    assert plan(*declared).sync_runtime.backend == "nccl"
    assert plan(*declared, f"{ENGINE}.device=cpu").sync_runtime.backend == "gloo"
    assert "use nccl or checkpoint" in messages(*declared[:3])["synchronizer.sync_method"]
    for key in ("bucketed_broadcast=false", "overlap_broadcast_and_load=true", "bucket_size_mb=3"):
        refused = messages(f"synchronizer.nccl.{key}")
        assert refused["synchronizer.nccl"].endswith(
            "belongs to sync_method nccl; sync_method is memory: remove it"
        )


def test_a_server_cannot_be_the_policy() -> None:
    assert (
        "cannot be the policy" in messages(f"{ENGINE}.engine_type=OpenAI")[f"{ENGINE}.engine_type"]
    )


def test_over_rollout_needs_steps_that_may_be_short() -> None:
    assert (
        "on_short_batch: stop that ends the run"
        in messages("explorer.over_rollout.ratio=0.2")["explorer.over_rollout.ratio"]
    )
    made = plan(
        "explorer.over_rollout={ratio: 0.2, wait_after_min: 5, return_partial_tasks: true}",
        "buffer.on_short_batch=train",
    )
    assert (made.explorer.over_rollout, made.explorer.wait_after_s, made.explorer.keep_partial) == (
        0.2,
        5.0,
        True,
    )
    assert messages("explorer.over_rollout.ratio=1")
    unread = plan(
        "explorer.over_rollout.wait_after_min=5", "explorer.dynamic_timeout.ratio=2"
    ).warnings
    assert any("explorer.over_rollout.wait_after_min has no effect" in w for w in unread)
    assert any("explorer.dynamic_timeout.ratio has no effect" in w for w in unread)


def test_limits_of_runs_and_groups_reach_the_explorer() -> None:
    plain = plan().explorer
    assert (
        plain.max_group_timeout_s,
        plain.whole_groups,
        plain.stop_hopeless,
        plain.timeout_ratio,
    ) == (None, False, True, None)
    made = plan(
        "explorer.max_group_timeout=60",
        "explorer.group_policy=DROP",
        "explorer.stop_hopeless_groups=false",
        "explorer.dynamic_timeout={enable: true, ratio: 2, warmup_min_steps: 3}",
        "explorer.eval_in_background=true",
        "explorer.runner_state_report_interval=10",
    ).explorer
    assert (made.max_group_timeout_s, made.whole_groups, made.stop_hopeless) == (60.0, True, False)
    assert (
        made.timeout_ratio,
        made.timeout_warmup,
        made.eval_in_background,
        made.report_interval_s,
    ) == (2.0, 3, True, 10.0)
    refused = messages(
        "deterministic=true",
        "explorer.eval_in_background=true",
        "explorer.dynamic_timeout.enable=true",
    )
    assert {"explorer.eval_in_background", "explorer.dynamic_timeout.enable"} <= set(refused)


def test_bench_needs_something_to_evaluate_and_trains_nothing() -> None:
    assert (
        "mode bench plays these tasks"
        in messages("mode=bench")["buffer.explorer_input.eval_tasksets"]
    )
    made = plan(
        "mode=Bench",
        "buffer.explorer_input.eval_tasksets=[{path: rows.jsonl}]",
        "explorer.bench_on_latest_checkpoint=true",
    )
    assert (
        made.mode == "bench"
        and made.explorer.bench_latest
        and made.total_steps == 0
        and made.cluster.trainer_gpus == 0
    )
    assert made.explorer.tasksets == () and len(made.explorer.eval_tasksets) == 1


def test_a_weight_is_for_training() -> None:
    key = "buffer.explorer_input.eval_tasksets"
    assert f"{key}[0].weight" in messages(f"{key}=[{{path: rows.jsonl, weight: 2}}]")


def test_remax_asks_the_explorer_for_a_greedy_run() -> None:
    assert plan("algorithm.algorithm_type=remax").explorer.baseline and not plan().explorer.baseline


def test_evaluation_goes_with_every_style() -> None:
    p = plan(
        "synchronizer.sync_style=fully_async",
        "buffer.explorer_input.eval_tasksets=[{path: rows.jsonl}]",
    )
    assert p.explorer.eval_interval == 100


@pytest.mark.extra
def test_no_tasks_are_needed_to_serve_or_to_bench(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nothing = "buffer.explorer_input.taskset=null"
    evals = "buffer.explorer_input.eval_tasksets=[{path: rows.jsonl}]"
    for mode, more in (("bench", (evals,)), ("serve", ())):
        assert plan(nothing, f"mode={mode}", *more).explorer.tasksets == ()
    for mode in ("both", "explore", "colocate"):
        assert "buffer.explorer_input.tasksets" in messages(nothing, f"mode={mode}")
    model = tiny.make(tmp_path / "model")
    for as_json in (False, True):
        command.check([f"model.model_path={model}", nothing, "mode=serve"], FILE, as_json=as_json)
        out = capsys.readouterr().out
    assert json.loads(out)["ok"]


def test_what_a_service_needs_is_derived_or_refused() -> None:
    made = plan("mode=serve", "explorer.serve.session_ttl=5", "algorithm.repeat_times=3")
    assert made.serve is not None and (made.serve.num_runs, made.serve.config.session_ttl) == (
        3,
        5.0,
    )
    assert (made.sync.sync_style, made.buffer.on_short_batch, made.trainer.read_deadline_s) == (
        "trainer_driven",
        "carry",
        math.inf,
    )
    assert plan("mode=serve", "algorithm.algorithm_type=reinforceplusplus").serve.num_runs == 1, (
        "nothing is compared"
    )
    found = messages(
        "mode=serve", "synchronizer.sync_style=fully_async", "explorer.listen_address=here"
    )
    assert {"synchronizer.sync_style", "explorer.listen_address"} <= found.keys()
    assert any(
        "explorer.serve.session_ttl has no effect" in w
        for w in plan("explorer.serve.session_ttl=5").warnings
    )
    assert (made.serve.config.session_may_reward, made.serve.config.reward_range) == (
        False,
        None,
    )
    rewards = plan(
        "mode=serve", "explorer.serve.reward_range=[0, 1]", "explorer.serve.session_may_reward=true"
    ).serve
    assert rewards is not None and (
        rewards.config.session_may_reward,
        rewards.config.reward_range,
    ) == (
        True,
        (0.0, 1.0),
    )
    assert (
        "must be the lowest reward"
        in messages("mode=serve", "explorer.serve.reward_range=[1, 1]")[
            "explorer.serve.reward_range"
        ]
    )


def test_keys_of_the_exploring_loop_are_told_where_a_service_samples() -> None:
    keys = (
        "max_timeout=7",
        "over_rollout.ratio=0.5",
        "dynamic_timeout.enable=true",
        "group_policy=drop",
        "eval_interval=3",
    )
    operator = "data_processor.experience_pipeline.operators=[{name: deduplicate}]"
    told = [
        w
        for w in plan("mode=serve", *(f"explorer.{k}" for k in keys)).warnings
        if "has no effect: clients" in w
    ]
    named = {w.split()[0].removeprefix("explorer.") for w in told}
    assert named - {"buffer.explorer_input.taskset"} == {
        "max_timeout",
        "over_rollout",
        "dynamic_timeout",
        "group_policy",
        "eval_interval",
    }
    made = plan("mode=serve", "explorer.max_timeout=7", operator)
    assert made.serve is not None and made.serve.max_timeout_s == 7.0, "the deadline of operators"
    assert not any("explorer.max_timeout" in w for w in made.warnings)


@pytest.mark.parametrize(
    ("engines", "written", "together"),
    [(1, "null", None), (2, "null", 1), (4, "null", 1), (4, "0", None), (4, "1", 3)],
)
def test_weights_of_a_service_roll(engines: int, written: str, together: int | None) -> None:
    several = f"{ENGINE}.engine_num={engines}"
    made = plan(
        "mode=serve",
        several,
        f"explorer.min_running_model_num={written}",
        "explorer.serve.drain_timeout=3",
    )
    assert (made.sync_runtime.at_a_time, made.sync_runtime.drain_s) == (together, 3.0)
    assert plan(several).sync_runtime.at_a_time is None, (
        "of a run without a service all load together"
    )


@pytest.mark.parametrize("engines", [1, 2])
def test_an_engine_must_be_left_to_load(engines: int) -> None:
    found = messages(
        "mode=serve", f"{ENGINE}.engine_num={engines}", f"explorer.min_running_model_num={engines}"
    )
    assert f"Write at most {engines - 1}" in found["explorer.min_running_model_num"]


# ---------------------------------------------------------------- GPUs


def test_all_engines_are_counted() -> None:
    eight = ("cluster.node_num=1", "cluster.gpu_per_node=8")
    assert plan(*eight, f"{ENGINE}.engine_num=2").cluster.trainer_gpus == 6
    judges = (
        "explorer.auxiliary_models=[{model_path: J, engine_num: 2}, {model_path: K, "
        "tensor_parallel_size: 2}]"
    )
    p = plan(*eight, f"{ENGINE}.engine_num=2", judges)
    assert (p.cluster.auxiliary_gpus, p.cluster.trainer_gpus, p.learner.world_size) == (4, 2, 2)
    copies = plan(*eight, f"{ENGINE}.data_parallel_size=2", f"{ENGINE}.pipeline_parallel_size=2")
    assert (len(copies.engines), copies.cluster.gpus_per_engine, copies.cluster.trainer_gpus) == (
        2,
        2,
        4,
    )
    found = messages(*eight, f"{ENGINE}.engine_num=4", judges)
    assert (
        "the engines take 8 of 8 GPUs (4 x tensor_parallel_size 1, 4 of them by auxiliary models)"
        in str(found)
    )
    large = messages(
        *eight, "explorer.auxiliary_models=[{model_path: J, tensor_parallel_size: 16}]"
    )
    assert "explorer.auxiliary_models[0].tensor_parallel_size" in large
    assert "explorer.auxiliary_models[0].device" in messages(
        "explorer.auxiliary_models=[{model_path: J, device: cuda}]"
    )
    on_cpu = plan(*eight, "explorer.auxiliary_models=[{model_path: J, device: cpu}]")
    assert on_cpu.cluster.auxiliary_gpus == 0 and plan(judges).cluster.auxiliary_gpus == 0


def test_a_half_takes_only_its_own_gpus() -> None:
    four = ("cluster.node_num=1", "cluster.gpu_per_node=4", f"{ENGINE}.engine_num=4")
    assert "cluster.gpu_per_node" in messages(*four)
    explore = plan(*four, "mode=explore", "cluster.ray_address=auto")
    assert (explore.cluster.gpus_per_engine, explore.cluster.trainer_gpus) == (1, 0)
    train = plan(
        *four,
        "mode=train",
        "cluster.ray_address=auto",
        "explorer.auxiliary_models=[{model_path: J, engine_num: 2}]",
    )
    assert (
        train.cluster.gpus_per_engine,
        train.cluster.trainer_gpus,
        train.learner.world_size,
    ) == (0, 4, 4)


# ---------------------------------------------------------------- what is refused by name


@pytest.mark.extra
@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("explorer.rollout_model.engine_type=sglang", "is not offered; use vllm"),
        ("explorer.rollout_model.engine_type=TensorRT", "is not offered; use vllm"),
        ("explorer.rollout_model.engine_type=tinker", "is not offered; use vllm"),
        (
            "explorer.auxiliary_models=[{model_path: J, engine_type: sglang}]",
            "is not offered; use vllm",
        ),
        ("explorer.auxiliary_models=[{model_path: J, device: npu}]", "NPU devices are not offered"),
        ("explorer.rollout_model.device=npu", "NPU devices are not offered"),
        ("explorer.rollout_model.enable_expert_parallel=true", "expert parallel is not offered"),
        ("explorer.rollout_model.enable_multimodal=true", "format.image_key of a taskset alone"),
        (f"{BUFFER}.format.video_key=video", "videos are not offered"),
    ],
)
def test_refused_by_name(override: str, text: str) -> None:
    assert any(text in m for m in messages(override).values())


# ---------------------------------------------------------------- veRL's table


@pytest.mark.extra
def test_every_target_in_these_sections_is_a_key() -> None:
    keys = {re.sub(r"\[\]", "", k) for k in all_keys()}
    ours = (
        "buffer.",
        "data_processor.",
        "explorer.",
        "synchronizer.",
        "resume_from_path",
        "continue_from_checkpoint",
    )
    seen = 0
    with KEYS_OF_VERL.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file, delimiter="\t"):
            for target in filter(None, (t.strip() for t in row["targets"].split(";"))):
                if not target.startswith(ours) or row["kind"] == "n/a":
                    continue
                seen += 1
                name = re.sub(r"\[\w+\]", "", target)
                # below *_args stand a plugin's own names
                free = re.sub(r"\.(\w*_args|args)\..*$", r".\1", name)
                assert name in keys or free in keys, f"{row['name']}: {target}"
    assert seen > 50
