"""Section `explorer`: who plays the tasks, with which engines, how long a run may take."""

from __future__ import annotations

from typing import Annotated, Literal

from rft.config.schema.base import Args, IgnoreCase, Name, Section, key, renamed, section

Device = Annotated[Literal["auto", "cuda", "cpu"], IgnoreCase]


class InferenceModelConfig(Section):
    """The engines that generate.  Null values are chosen for the device."""

    engine_type: Annotated[Literal["vllm", "transformers", "scripted"], renamed(vllm_async="vllm", hf="transformers")] = key(
        "vllm", "vllm; transformers (slower, runs where vLLM cannot be installed); scripted (answers from a script, for tests)."
    )
    engine_num: int = key(1, "Engines side by side.", unit="engines", on_resume="safe", ge=1)
    tensor_parallel_size: int = key(1, "GPUs (on CPU: processes) of one engine.", unit="GPUs", on_resume="safe", ge=1)
    device: Device = key("auto", "auto: cuda where the cluster has GPUs, else cpu.", on_resume="safe")
    dtype: Annotated[Literal["auto", "float32", "bfloat16", "float16"], IgnoreCase] = key(
        "auto", "Type of the weights in the engine; auto: bfloat16 on GPUs, float32 on CPU."
    )
    seed: int | None = key(None, "Seed of the first engine, the others count on.  Null: the run's seed.", ge=0)
    gpu_memory_utilization: float = key(0.9, "Share of a GPU's memory that an engine takes.", on_resume="safe", gt=0, le=1)
    enforce_eager: bool | None = key(
        None, "No CUDA graphs and no compilation.  Null: true on CPU, false on GPUs.", on_resume="safe"
    )
    enable_prefix_caching: bool = key(True, "Compute shared prompts once.", on_resume="safe")
    max_num_seqs: int = key(256, "Sequences decoded at the same time.", unit="sequences", on_resume="safe", ge=1)
    max_num_batched_tokens: int | None = key(
        None, "Token budget of one engine step.  Null: the engine's own.", unit="tokens", on_resume="safe", ge=1
    )
    block_size: int | None = key(
        None, "Tokens of one KV-cache block.  Null: chosen for the device.", unit="tokens", on_resume="safe", ge=1
    )
    kv_cache_bytes: int | None = key(
        None,
        "KV cache of an engine on CPU.  Null: as much as max_num_seqs full sequences need.",
        unit="bytes",
        on_resume="safe",
        ge=1 << 20,
    )
    cpu_threads: int | None = key(
        None, "Threads of an engine on CPU.  Null: the machine's cores.", unit="threads", on_resume="safe", ge=1
    )
    start_timeout: float = key(600.0, "How long an engine may take to start.", unit="s", on_resume="safe", gt=0)
    extra_engine_args: Args = key({}, "Further arguments of the engine, handed on as they are.", on_resume="safe")


class ExplorerConfig(Section):
    """The exploring loop."""

    name: Name = key("explorer", "Name in logs.", on_resume="safe")
    rollout_model: InferenceModelConfig = section(InferenceModelConfig, "The engines of the policy.")
    eval_interval: int = key(
        100, "Evaluate every so many explore steps; 0 = not during training.", unit="explore steps", on_resume="safe", ge=0
    )
    eval_on_startup: bool = key(True, "Evaluate the untrained model.", on_resume="safe")
    eval_at_end: bool = key(True, "Evaluate the final model.", on_resume="safe")
    max_timeout: float = key(1800.0, "How long one run of a task may take.", unit="s", on_resume="safe", gt=0)
    max_retry_times: int = key(2, "How often a run that failed is tried again.", unit="retries", on_resume="safe", ge=0)
    max_concurrent_runs: int = key(256, "Runs in flight at the same time.", unit="runs", on_resume="safe", ge=1)
    max_failed_groups: int = key(
        10, "Stop after this many groups in a row in which every run failed.", unit="groups", on_resume="safe", ge=1
    )
