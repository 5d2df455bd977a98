"""Section `explorer`: who plays the tasks, with which engines, how long a run may take."""

from __future__ import annotations

from typing import Annotated, Literal

from rft.config.schema.base import Args, IgnoreCase, Later, Moot, Name, Section, key, renamed, section
from rft.config.schema.model import ExternalModelConfig

Device = Annotated[Literal["auto", "cuda", "cpu"], IgnoreCase]
EngineType = Annotated[
    Literal["vllm", "transformers", "scripted", "external"],
    renamed(vllm_async="vllm", hf="transformers", openai="external"),
]

_SERVE = "belongs to mode: serve, which comes later"


class ServedModelConfig(Section):
    """One or several engines that serve one model.  Null values are chosen for the device or taken from `model`."""

    name: Name | None = key(None, "Beginning of the engines' names in logs and metrics.  Null: engine.", on_resume="safe")
    engine_type: EngineType = key(
        "vllm",
        "vllm; transformers (slower, runs where vLLM cannot be installed); scripted (answers from a script, for tests); external (a "
        "model behind an OpenAI-compatible address; auxiliary models only).",
    )
    engine_num: int = key(1, "Engines side by side.", unit="engines", on_resume="safe", ge=1)
    tensor_parallel_size: int = key(1, "GPUs (on CPU: processes) of one engine.", unit="GPUs", on_resume="safe", ge=1)
    data_parallel_size: int = key(
        1,
        "Copies of the model in one engine.  Each becomes an engine of its own, so that it is loaded, proven and restarted on its own.",
        unit="copies",
        on_resume="safe",
        ge=1,
    )
    pipeline_parallel_size: int = key(
        1, "vllm: stages in which one engine's layers are cut, each on GPUs of its own.", unit="stages", on_resume="safe", ge=1
    )
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
    tool_call_parser: str | None = key(
        None,
        "vLLM's parser that finds tool calls in an answer (hermes, llama3_json, ...); read with enable_auto_tool_choice.  Needs vLLM "
        "installed, also with other engines.",
        on_resume="safe",
    )
    reasoning_parser: str | None = key(
        None,
        "vLLM's parser that separates reasoning from the answer (qwen3, deepseek_r1, ...).  Needs vLLM installed, also with other engines.",
        on_resume="safe",
    )
    enable_auto_tool_choice: bool = key(
        False, "Take tool calls out of the answer's text; needs tool_call_parser.", on_resume="safe"
    )
    enable_openai_api: bool = key(
        False,
        "Serve the model to onlookers of this machine too, by OpenAI's protocol, while the run goes on: calls are answered, not recorded. "
        "Agents in workflows need no such port.",
        on_resume="safe",
    )
    base_port: int | None = key(None, "Port of that server, on 127.0.0.1.  Null: a free one.", on_resume="safe", ge=1, le=65535)
    api_key: str | None = key(
        None, "Key that it asks for.  Null: a random one, in openai_api.json of the run folder.", on_resume="safe"
    )
    enable_history: bool = key(
        True, "Keep every model call of a run.  They are always kept; false has no effect.", on_resume="safe"
    )
    enable_log_requests: bool = key(False, "vllm: log every request.", on_resume="safe")
    disable_log_stats: bool = key(
        True, "vllm: no statistics.  False: throughput and cache use are logged at every weight sync.", on_resume="safe"
    )
    use_v1: bool = key(True, "vllm: its newer engine, which is the only one; false has no effect.", on_resume="safe")
    fully_sharded_loras: bool = key(
        False,
        "vllm, with model.lora_configs: its own LoRA layers, with both matrices cut over the engine's GPUs; false cuts one of them.",
        on_resume="safe",
    )
    max_cpu_loras: int | None = key(
        None,
        "vllm, where its own LoRA layers are used: room for so many adapters in host memory.  A run has one.",
        unit="adapters",
        on_resume="safe",
        ge=1,
    )
    external_model_config: ExternalModelConfig | None = key(
        None, "What engine_type external asks; auxiliary models only.", on_resume="safe"
    )
    start_timeout: float = key(600.0, "How long an engine may take to start.", unit="s", on_resume="safe", gt=0)
    stall_timeout: float | None = key(
        10.0,
        "An engine that has work, and for so long neither finished a step (vllm) or answered at all (every engine) nor used its "
        "processors, counts as hung: its processes are killed, it is restarted with the current weights, its requests are asked again.  "
        "However slow an engine is, it uses its processors.  Null: never.",
        unit="s",
        on_resume="safe",
        ge=1,
    )
    step_timeout: float | None = key(
        600.0,
        "How long one step may take of an engine that uses its processors, before it counts as hung all the same (waiting in circles).  "
        "Null: never.",
        unit="s",
        on_resume="safe",
        ge=1,
    )
    extra_engine_args: Args = key({}, "Further arguments of the engine, handed on as they are.", on_resume="safe")


class InferenceModelConfig(ServedModelConfig):
    """The engines of the policy.  Null values are chosen for the device or taken from `model`."""

    external_model_config: ExternalModelConfig | None = key(
        None,
        "For auxiliary models.",
        later=Moot("the policy is a local model, whose tokens and weights are known; name a server in explorer.auxiliary_models"),
    )

    tokenization_check: Annotated[Literal["strict", "warn", "off"], IgnoreCase] = key(
        "off",
        "Compare the tokens of several turns with those of the whole chat tokenized at once: end the run (strict), count and warn once "
        "(warn), or do not.  Trained are the tokens as the engine saw and wrote them in any case.",
        on_resume="safe",
    )


class AuxiliaryModelConfig(ServedModelConfig):
    """A judge, teacher or reward model beside the policy; its weights stay as they are.

    Workflows and rewards ask it by name.  Entries that differ in nothing but the name are started once.
    """

    name: Name | None = key(
        None, "How workflows and rewards call it, and in logs and metrics.  Null: auxiliary_model_ and its place in the list, from 0.",
        on_resume="safe",
    )  # fmt: skip
    model_path: str = key(..., "Folder with config.json, tokenizer and safetensors, or a hub id that is in the local cache.")
    tokenizer_path: str | None = key(None, "Folder with another tokenizer and chat template.  Null: model_path.")
    task: Annotated[Literal["generate", "score"], IgnoreCase] = key(
        "generate", "generate: it answers; score: it is a classifier that gives raw numbers (logits) for a chat."
    )
    max_prompt_tokens: int | None = key(None, "Longest prompt.  Null: as long as max_model_len allows.", unit="tokens", ge=1)
    chat_template: str | None = key(None, "Chat template (Jinja text, or a file).  Null: the model's own.")
    enable_thinking: bool | None = key(None, "Value of `enable_thinking` for chat templates that know it.")
    max_concurrent: int = key(256, "Requests under way at the same time; others wait.", unit="requests", on_resume="safe", ge=1)
    request_timeout: float = key(600.0, "How long one request may take.", unit="s", on_resume="safe", gt=0)


class OverRolloutConfig(Section):
    """Not waiting for the slowest tasks of a step: they are ended and counted, and the step has fewer groups.

    With sync_style fixed buffer.on_short_batch must be train or carry.
    """

    ratio: float = key(0.0, "Share of a step's tasks that need not finish; 0 = off.", ge=0, lt=1, on_resume="safe")
    wait_after_min: float = key(
        30.0, "How long the others may go on once enough tasks are done.", unit="s", on_resume="safe", ge=0
    )
    return_partial_tasks: bool = key(
        False,
        "Train what is left of the groups that were ended, if two of their runs are done (one, with repeat_times 1).",
        on_resume="safe",
    )


class DynamicTimeoutConfig(Section):
    """A time limit that follows how long runs took."""

    enable: bool = key(False, "Use it instead of max_timeout alone.", on_resume="safe")
    warmup_min_steps: int = key(
        1, "Steps that are measured before it holds; counted anew after a resume.", unit="explore steps", on_resume="safe", ge=0
    )
    ratio: float = key(
        3.0, "Limit as a multiple of a run's mean time; max_timeout stays the upper limit.", on_resume="safe", gt=0
    )


class ExplorerConfig(Section):
    """The exploring loop."""

    name: Name = key(
        "explorer",
        "mode: explore: which of several explorers this is; its folder, `explorers/NAME` in the run's, and its engines carry the name.",
        on_resume="safe",
    )
    rollout_model: InferenceModelConfig = section(InferenceModelConfig, "The engines of the policy.")
    auxiliary_models: tuple[AuxiliaryModelConfig, ...] = key(
        (),
        "Judges, teachers and reward models.  Their GPUs are counted.",
        on_resume="safe",
    )
    eval_interval: int = key(
        100, "Evaluate every so many explore steps; 0 = not during training.", unit="explore steps", on_resume="safe", ge=0
    )
    eval_on_startup: bool = key(True, "Evaluate the untrained model.", on_resume="safe")
    eval_at_end: bool = key(True, "Evaluate the final model.", on_resume="safe")
    eval_in_background: bool = key(
        False,
        "Explore on while evaluating.  Weights may move meanwhile: eval/<taskset>/model_version/min and /max say which ones answered.",
        on_resume="safe",
    )
    bench_on_latest_checkpoint: bool = key(
        False,
        "bench: only the last checkpoint instead of all.  The base model is evaluated too where eval_on_startup is true.",
        on_resume="safe",
    )
    max_timeout: float = key(1800.0, "How long one run of a task may take.", unit="s", on_resume="safe", gt=0)
    max_group_timeout: float | None = key(
        None,
        "How long all runs of a task together may take, from the first one's begin.  Null: no limit of its own.",
        unit="s",
        on_resume="safe",
        gt=0,
    )
    group_policy: Annotated[Literal["partial", "drop"], IgnoreCase] = key(
        "partial",
        "A group of which runs are missing (failed, unscored, out of time): partial: it is trained if at least half of its runs, and "
        "two, are there; drop: it is not, and another task replaces it.",
        on_resume="safe",
    )
    stop_hopeless_groups: bool = key(
        True,
        "End the other runs of a group once so many have failed that it will not be trained.  Has no effect with deterministic: true.",
        on_resume="safe",
    )
    max_retry_times: int = key(2, "How often a run that failed is tried again.", unit="retries", on_resume="safe", ge=0)
    dynamic_timeout: DynamicTimeoutConfig = section(DynamicTimeoutConfig, "A time limit that follows how long runs took.")
    over_rollout: OverRolloutConfig = section(OverRolloutConfig, "Not waiting for the slowest tasks of a step.")
    max_concurrent_runs: int = key(256, "Runs in flight at the same time.", unit="runs", on_resume="safe", ge=1)
    max_inflight_batches: int = key(
        2, "fully_async: explore steps in flight at the same time.", unit="explore steps", on_resume="safe", ge=1,
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
        0.0, "How often the explorer's log says what every step under way does; 0 = never.", unit="s", on_resume="safe", ge=0
    )
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
