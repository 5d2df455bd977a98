"""Section `explorer`: who plays the tasks, with which engines, how long a run may take."""

from __future__ import annotations

from typing import Annotated, Literal

from rft.config.schema.base import Args, IgnoreCase, Later, Name, Section, key, renamed, section
from rft.config.schema.model import ExternalModelConfig

Device = Annotated[Literal["auto", "cuda", "cpu"], IgnoreCase]
EngineType = Annotated[
    Literal["vllm", "transformers", "scripted", "external"],
    renamed(vllm_async="vllm", hf="transformers", openai="external"),
]

_NO_SERVER = "engines open no port yet; workflows call ctx.chat"
_NO_ADAPTERS = "adapters come with LoRA; the whole model is trained"
_ONE_ANSWER = "tool calls and reasoning stay in the answer's text; read them in the workflow"
_SERVE = "belongs to mode: serve, which comes later"
_RATIO = "belongs to over_rollout.ratio; a step waits for all of its groups"


class ServedModelConfig(Section):
    """One or several engines that serve one model.  Null values are chosen for the device or taken from `model`."""

    name: Name | None = key(None, "Beginning of the engines' names in logs and metrics.  Null: engine.", on_resume="safe")
    engine_type: EngineType = key(
        "vllm",
        "vllm; transformers (slower, runs where vLLM cannot be installed); scripted (answers from a script, for tests); external (a "
        "model behind an OpenAI-compatible address).",
        later=Later("use vllm with a local model", values=("external",)),
    )
    engine_num: int = key(1, "Engines side by side.", unit="engines", on_resume="safe", ge=1)
    tensor_parallel_size: int = key(1, "GPUs (on CPU: processes) of one engine.", unit="GPUs", on_resume="safe", ge=1)
    data_parallel_size: int = key(
        1, "Copies of the model in one engine.", unit="copies", on_resume="safe", ge=1, later=Later("raise engine_num instead")
    )
    pipeline_parallel_size: int = key(
        1, "Stages in which one engine's layers are cut.", unit="stages", on_resume="safe", ge=1,
        later=Later("use tensor_parallel_size"),
    )  # fmt: skip
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
    enable_chunked_prefill: bool = key(True, "vllm: cut long prompts over several engine steps.", on_resume="safe")
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
    max_model_len: int | None = key(None, "Prompt and response together.  Null: model.max_model_len.", unit="tokens", ge=2)
    max_prompt_tokens: int | None = key(None, "Longest prompt.  Null: model.max_prompt_tokens.", unit="tokens", ge=1)
    max_response_tokens: int | None = key(None, "Longest response.  Null: model.max_response_tokens.", unit="tokens", ge=1)
    min_response_tokens: int | None = key(
        None, "No end before this many tokens.  Null: model.min_response_tokens.", unit="tokens", ge=0
    )
    enable_prompt_truncation: bool | None = key(
        None, "What happens to a prompt that is too long.  Null: model.enable_prompt_truncation."
    )
    repetition_penalty: float | None = key(
        None, "Penalty on tokens already seen; 1 = off.  Null: model.repetition_penalty.", gt=0
    )
    ignore_eos: bool = key(False, "Write on after the end token, up to max_tokens; for measuring speed.")
    chat_template: str | None = key(None, "Chat template (Jinja text).  Null: model.custom_chat_template.")
    enable_thinking: bool | None = key(
        None, "Value of `enable_thinking` for chat templates that know it.  Null: model.enable_thinking."
    )
    trust_remote_code: bool | None = key(
        None, "Run Python code that comes with the model.  Null: model.trust_remote_code.", on_resume="safe"
    )
    tool_call_parser: str | None = key(None, "Parser that finds tool calls in an answer.", later=Later(_ONE_ANSWER))
    reasoning_parser: str | None = key(None, "Parser that separates reasoning from the answer.", later=Later(_ONE_ANSWER))
    enable_auto_tool_choice: bool = key(False, "Let the model choose its tools.", later=Later(_ONE_ANSWER))
    enable_openai_api: bool = key(False, "Open an OpenAI-compatible port.", on_resume="safe", later=Later(_NO_SERVER, True))
    base_port: int | None = key(
        None, "First port of these servers.  Null: free ones.", on_resume="safe", ge=1, le=65535, later=Later(_NO_SERVER, True)
    )
    api_key: str | None = key(
        None, "Key that these servers ask for.  Null: none.", on_resume="safe", later=Later(_NO_SERVER, True)
    )
    enable_history: bool = key(
        True, "Keep every model call of a run.  They are always kept; false has no effect.", on_resume="safe"
    )
    enable_log_requests: bool = key(False, "vllm: log every request.", on_resume="safe")
    disable_log_stats: bool = key(
        True, "vllm: no statistics.  False: throughput and cache use are logged at every weight sync.", on_resume="safe"
    )
    use_v1: bool = key(True, "vllm: its newer engine, which is the only one; false has no effect.", on_resume="safe")
    fully_sharded_loras: bool = key(False, "Cut adapters over all GPUs.", on_resume="safe", later=Later(_NO_ADAPTERS, True))
    max_cpu_loras: int | None = key(
        None, "Adapters kept in host memory.", unit="adapters", on_resume="safe", ge=1, later=Later(_NO_ADAPTERS, True)
    )
    external_model_config: ExternalModelConfig | None = key(
        None, "What engine_type external asks.", later=Later("use vllm with a local model")
    )
    start_timeout: float = key(600.0, "How long an engine may take to start.", unit="s", on_resume="safe", gt=0)
    extra_engine_args: Args = key({}, "Further arguments of the engine, handed on as they are.", on_resume="safe")


class InferenceModelConfig(ServedModelConfig):
    """The engines of the policy.  Null values are chosen for the device or taken from `model`."""

    tokenization_check: Annotated[Literal["strict", "warn", "off"], IgnoreCase] = key(
        "off",
        "Compare the tokens of several turns with those of the whole chat tokenized at once: end the run, warn, or do not.",
        on_resume="safe",
        later=Later("each model call is trained with the tokens that the engine saw and wrote; nothing is tokenized twice", True),
    )


class AuxiliaryModelConfig(ServedModelConfig):
    """A judge, teacher or reward model beside the policy; its weights stay as they are."""

    model_path: str = key(..., "Folder with config.json, tokenizer and safetensors, or a hub id that is in the local cache.")
    task: Annotated[Literal["generate", "score"], IgnoreCase] = key(
        "generate", "generate: it answers; score: it is a classifier that gives a number for a chat."
    )


class OverRolloutConfig(Section):
    """Not waiting for the slowest tasks of a step; needs a sync_style other than fixed."""

    ratio: float = key(
        0.0, "Share of a step's tasks that need not finish; 0 = off.", ge=0, lt=1, on_resume="safe",
        later=Later("a step waits for all of its groups; explorer.max_timeout ends slow runs"),
    )  # fmt: skip
    wait_after_min: float = key(
        30.0,
        "How long the others may go on once enough tasks are done.",
        unit="s",
        on_resume="safe",
        ge=0,
        later=Later(_RATIO, True),
    )
    return_partial_tasks: bool = key(
        False, "Use the groups of which some runs are done.", on_resume="safe", later=Later(_RATIO, True)
    )


class DynamicTimeoutConfig(Section):
    """A time limit that follows how long runs took."""

    enable: bool = key(
        False, "Use it instead of max_timeout alone.", on_resume="safe", later=Later("explorer.max_timeout is the limit of a run")
    )
    warmup_min_steps: int = key(
        1, "Steps that are measured before it holds.", unit="explore steps", on_resume="safe", ge=0,
        later=Later("read only with enable: true", True),
    )  # fmt: skip
    ratio: float = key(
        3.0, "Limit as a multiple of a run's mean time; max_timeout stays the upper limit.", on_resume="safe", gt=0,
        later=Later("read only with enable: true", True),
    )  # fmt: skip


class ExplorerConfig(Section):
    """The exploring loop."""

    name: Name = key("explorer", "Name in logs.", on_resume="safe", later=Later("logs call it explorer", harmless=True))
    rollout_model: InferenceModelConfig = section(InferenceModelConfig, "The engines of the policy.")
    auxiliary_models: tuple[AuxiliaryModelConfig, ...] = key(
        (),
        "Judges, teachers and reward models.  Their GPUs are counted.",
        on_resume="safe",
        later=Later("judges and teachers come later; use a reward that follows rules"),
    )
    eval_interval: int = key(
        100, "Evaluate every so many explore steps; 0 = not during training.", unit="explore steps", on_resume="safe", ge=0
    )
    eval_on_startup: bool = key(True, "Evaluate the untrained model.", on_resume="safe")
    eval_at_end: bool = key(True, "Evaluate the final model.", on_resume="safe")
    eval_in_background: bool = key(
        False, "Explore on while evaluating.", on_resume="safe", later=Later("exploring waits for an evaluation", True)
    )
    bench_on_latest_checkpoint: bool = key(
        False, "bench: only the last checkpoint instead of all.", on_resume="safe",
        later=Later("belongs to mode: bench, which comes later", True),
    )  # fmt: skip
    max_timeout: float = key(1800.0, "How long one run of a task may take.", unit="s", on_resume="safe", gt=0)
    max_retry_times: int = key(2, "How often a run that failed is tried again.", unit="retries", on_resume="safe", ge=0)
    dynamic_timeout: DynamicTimeoutConfig = section(DynamicTimeoutConfig, "A time limit that follows how long runs took.")
    over_rollout: OverRolloutConfig = section(OverRolloutConfig, "Not waiting for the slowest tasks of a step.")
    max_concurrent_runs: int = key(256, "Runs in flight at the same time.", unit="runs", on_resume="safe", ge=1)
    max_inflight_batches: int = key(
        2, "fully_async: explore steps in flight at the same time.", unit="explore steps", on_resume="safe", ge=1,
        later=Later("belongs to sync_style: fully_async, which comes later", True),
    )  # fmt: skip
    max_failed_groups: int = key(
        10, "Stop after this many groups in a row in which every run failed.", unit="groups", on_resume="safe", ge=1
    )
    env_vars: dict[str, str] = key({}, "Environment variables of the explorer's process.", on_resume="safe")
    runner_per_model: int | None = key(
        None, "Accepted, no effect: runs are coroutines of one process, see max_concurrent_runs.", on_resume="safe", ge=1
    )
    runner_num: int | None = key(None, "Accepted, no effect, as runner_per_model.", unit="runners", on_resume="safe", ge=1)
    runner_prepare_concurrency: int | None = key(None, "Accepted, no effect, as runner_per_model.", on_resume="safe", ge=1)
    runner_prepare_max_retries: int | None = key(None, "Accepted, no effect, as runner_per_model.", on_resume="safe", ge=0)
    max_repeat_times_per_runner: int | None = key(None, "Accepted, no effect, as runner_per_model.", on_resume="safe", ge=1)
    concurrent_mode: Annotated[Literal["sequential", "asynchronous", "multi-threading"], IgnoreCase] = key(
        "asynchronous",
        "Accepted: the runs of a group always go on side by side; blocking workflows get a thread.",
        on_resume="safe",
    )
    runner_state_report_interval: float = key(
        0.0, "Report what every run does, this often; 0 = never.", unit="s", on_resume="safe", ge=0,
        later=Later("runs are counted in the metrics of each step", True),
    )  # fmt: skip
    proxy_port: int = key(8010, "serve: port of the proxy.", on_resume="safe", ge=1, le=65535, later=Later(_SERVE, True))
    listen_address: str = key("127.0.0.1", "serve: address of the proxy.", on_resume="safe", later=Later(_SERVE, True))
    service_status_check_interval: float = key(
        60.0, "serve: how often new weights are looked for.", unit="s", on_resume="safe", gt=0, later=Later(_SERVE, True)
    )
    min_running_model_num: int = key(
        1, "serve: engines that go on while others take new weights.", unit="engines", on_resume="safe", ge=0,
        later=Later(_SERVE, True),
    )  # fmt: skip
    db_url: str | None = key(
        None, "serve: database of the recorded calls.  Null: in the run folder.", on_resume="safe", later=Later(_SERVE, True)
    )
