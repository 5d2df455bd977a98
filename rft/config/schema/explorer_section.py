"""Section `explorer`: who runs the tasks, with which engines, how long a run may take."""

from __future__ import annotations

import difflib
from typing import Annotated, Literal

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from rft.engine.settings import ENGINE_TYPES, EngineSettings, ExternalModelConfig
from rft.explorer.service_settings import ServeConfig, ServeRuntime
from rft.explorer.settings import ExplorerSettings
from rft.schema import units
from rft.schema.base import Args, Diagnostics, IgnoreCase, Name, Section, key, safe_key, section

Device = Annotated[Literal["auto", "cuda", "cpu"], IgnoreCase]
_OTHER_ENGINES = {"vllm_async": "vllm", "hf": "transformers", "openai": "external"}


def _engine(value: str) -> str:
    """A built-in name in its usual spelling; or the name of a plugin, which is looked up once
    plugins are loaded.
    """
    name = _OTHER_ENGINES.get(value.strip().lower(), value.strip().lower())
    if ":" in value or name in ENGINE_TYPES:
        return value if ":" in value else name
    if difflib.get_close_matches(name, ENGINE_TYPES, n=1, cutoff=0.85):
        raise PydanticCustomError(
            "literal_error", "no engine", {"expected": " or ".join(map(repr, ENGINE_TYPES))}
        )
    return value


EngineType = Annotated[
    Literal["vllm", "transformers", "scripted", "external"] | str, AfterValidator(_engine)
]


class ServedModelConfig(Section):
    """One or several engines that serve one model.  Null values are chosen for the device."""

    name: Name | None = safe_key(
        None, "Beginning of the engines' names in logs and metrics.  Null: engine."
    )
    engine_type: EngineType = key(
        EngineSettings.engine_type,
        "vllm; transformers (slower, runs where vLLM cannot be installed); scripted (answers from "
        "a script, for tests); external (a "
        "model behind an OpenAI-compatible address; auxiliary models only); or your own engine: "
        "its name, pkg.module:Name, "
        "path/file.py:Name.",
    )
    engine_num: int = safe_key(1, "Engines side by side.", unit="engines", ge=1)
    tensor_parallel_size: units.Gpus = safe_key(
        EngineSettings.tensor_parallel_size, "GPUs (on CPU: processes) of one engine."
    )
    data_parallel_size: units.Copies = safe_key(
        1,
        "Copies of the model in one engine.  Each becomes a separate engine, which is loaded, "
        "verified and restarted on its own.",
    )
    pipeline_parallel_size: units.Stages = safe_key(
        EngineSettings.pipeline_parallel_size,
        "vllm: stages into which one engine's layers are cut, each on its own GPUs.",
    )
    device: Device = safe_key("auto", "auto: cuda where the cluster has GPUs, else cpu.")
    dtype: Annotated[Literal["auto", "float32", "bfloat16", "float16"], IgnoreCase] = key(
        "auto", "Type of the weights in the engine; auto: bfloat16 on GPUs, float32 on CPU."
    )
    seed: units.Seed | None = key(
        None, "Seed of the first engine; the others count up from it.  Null: the run's seed."
    )
    gpu_memory_utilization: float = safe_key(
        EngineSettings.gpu_memory_utilization,
        "Fraction of a GPU's memory that an engine takes.",
        gt=0,
        le=1,
    )
    enforce_eager: bool | None = safe_key(
        None, "No CUDA graphs and no compilation.  Null: true on CPU, false on GPUs."
    )
    enable_prefix_caching: bool = safe_key(
        EngineSettings.enable_prefix_caching, "Compute shared prompts once."
    )
    enable_chunked_prefill: bool = safe_key(
        EngineSettings.enable_chunked_prefill, "vllm: cut long prompts over several engine steps."
    )
    max_num_seqs: int = safe_key(
        EngineSettings.max_num_seqs, "Sequences decoded at the same time.", unit="sequences", ge=1
    )
    max_num_batched_tokens: units.Tokens | None = safe_key(
        None, "Token budget of one engine step.  Null: the engine's own."
    )
    block_size: units.Tokens | None = safe_key(
        None, "Tokens of one KV-cache block.  Null: chosen for the device."
    )
    kv_cache_bytes: units.Bytes | None = safe_key(
        None,
        "Cache of an engine on CPU for keys, values and states of layers.  Null: 1 GiB with vllm, "
        "2 GiB with transformers.",
    )
    cpu_threads: units.Threads | None = safe_key(
        None, "Threads of an engine on CPU.  Null: the machine's cores."
    )
    tool_call_parser: str | None = safe_key(
        None,
        "vLLM's parser that takes tool calls out of an answer's text (hermes, llama3_json, ...).  "
        "Null: they stay in it.  Needs vLLM installed, also with other engines.",
    )
    reasoning_parser: str | None = safe_key(
        None,
        "vLLM's parser that separates reasoning from the answer (qwen3, deepseek_r1, ...).  Needs "
        "vLLM installed, also with other engines.",
    )
    enable_openai_api: bool = safe_key(
        False,
        "Serve the model to observers of this machine too, by OpenAI's protocol, during the run: "
        "calls are answered, not recorded. "
        "Agents in workflows need no such port.",
    )
    base_port: int | None = safe_key(
        None, "Port of that server, on 127.0.0.1.  Null: a free one.", ge=1, le=65535
    )
    api_key: str | None = safe_key(
        None,
        "Key that clients must send.  Null: a random one, in openai_api.json of the run folder.",
    )
    enable_log_requests: bool = safe_key(False, "vllm: log every request.")
    disable_log_stats: bool = safe_key(
        True,
        "vllm: no statistics.  False: throughput and cache use are logged at every weight sync.",
    )
    start_timeout: units.Seconds = safe_key(
        EngineSettings.start_timeout_s, "How long an engine may take to start."
    )
    stall_timeout: units.Patience | None = safe_key(
        EngineSettings.stall_timeout_s,
        "An engine that has work, and for this long neither finished a step (vllm) or answered at "
        "all (every engine) nor used its "
        "processors, counts as hung: its processes are killed, it is restarted with the current "
        "weights, its requests are asked again.  "
        "However slow an engine is, it uses its processors.  Null: never.",
    )
    step_timeout: units.Patience | None = safe_key(
        EngineSettings.step_timeout_s,
        "How long one step may take of an engine that uses its processors, before it counts as "
        "hung all the same (waiting in circles).  "
        "Null: never.",
    )
    extra_engine_args: Args = safe_key({}, "Further arguments, passed to the engine unchanged.")

    def rules(self, at: str, diagnostics: Diagnostics) -> None:
        if not self.enable_openai_api:
            self.warn_unused(
                at, ("base_port", "api_key"), "enable_openai_api is false", diagnostics
            )


class InferenceModelConfig(ServedModelConfig):
    """The engines of the policy.  Null values are chosen for the device.  Lengths, sampling and
    chat template stand in `model`.
    """

    implied = ("gpu_memory_utilization",)

    ignore_eos: bool = key(
        False, "Keep generating after the end token, up to max_tokens; for measuring speed."
    )
    fully_sharded_loras: bool = safe_key(
        EngineSettings.fully_sharded_loras,
        "vllm, with model.lora_configs: its own LoRA layers, with both matrices sharded over the "
        "engine's GPUs; false shards one of them.",
    )
    max_cpu_loras: units.Adapters | None = safe_key(
        None,
        "vllm, where its own LoRA layers are used: how many adapters fit in host memory.  A run "
        "has one.",
    )
    tokenization_check: Annotated[Literal["strict", "warn", "off"], IgnoreCase] = safe_key(
        EngineSettings.tokenization_check,
        "Compare the tokens of several turns with those of the whole chat tokenized at once: end "
        "the run (strict), count and warn once "
        "(warn), or do not.  Trained are the tokens as the engine saw and wrote them in any case.",
    )
    router_replay: bool = safe_key(
        EngineSettings.router_replay,
        "For mixtures of experts: the engine tells which experts every token went through, they "
        "are stored with the experience (layers x "
        "experts per token bytes for each token), and the trainer lets the token go through the "
        "same ones.",
    )


class AuxiliaryModelConfig(ServedModelConfig):
    """A judge, teacher or reward model beside the policy; its weights do not change, unless it serves
    a moving average of the policy's.

    Workflows and rewards ask it by name.  Entries that differ only in their name share one model.
    """

    name: Name | None = safe_key(
        None,
        "Its name in workflows, rewards, logs and metrics.  Null: auxiliary_model_ and its place "
        "in the list, from 0.",
    )
    model_path: str = key(
        ...,
        "Folder with config.json, tokenizer and safetensors, or a hub id that is in the local "
        "cache.",
    )
    tokenizer_path: str | None = key(
        None, "Folder with another tokenizer and chat template.  Null: model_path."
    )
    alignment: Annotated[Literal["tokens", "text"], IgnoreCase] = key(
        "tokens",
        "How it scores the policy's tokens as a teacher.  tokens: by their ids, with the policy's "
        "tokenizer.  text: with any tokenizer, by spans of text at whose ends tokens of both end; a "
        "span's log-prob is divided among the policy's tokens in proportion to their own, so within "
        "a span it is not the teacher's.",
    )
    moving_average: float | None = key(
        None,
        "Decay d of an exponential moving average of the policy's weights, which this model serves: "
        "after each train step average = d average + (1 - d) weights.  It begins with the policy of "
        "the start, and is published and verified with every version.  Null: fixed weights.",
        gt=0,
        lt=1,
    )
    task: Annotated[Literal["generate", "score"], IgnoreCase] = key(
        EngineSettings.task,
        "generate: it answers; score: it is a classifier that returns raw numbers (logits) for a "
        "chat.",
    )
    max_model_len: int | None = key(
        None, "Prompt and response together.  Null: model.max_model_len.", unit="tokens", ge=2
    )
    max_prompt_tokens: units.Tokens | None = key(
        None, "Longest prompt.  Null: as long as max_model_len allows."
    )
    chat_template: str | None = key(
        None, "Chat template (Jinja text, or a file).  Null: the model's own."
    )
    enable_thinking: bool | None = key(
        None, "Value of `enable_thinking` for chat templates that know it."
    )
    trust_remote_code: bool | None = safe_key(
        None, "Run Python code that comes with the model.  Null: model.trust_remote_code."
    )
    external_model_config: ExternalModelConfig | None = safe_key(
        None, "What engine_type external asks."
    )
    max_concurrent: units.Requests = safe_key(
        EngineSettings.max_concurrent, "Concurrent requests; further ones wait."
    )
    request_timeout: units.Seconds = safe_key(600.0, "How long one request may take.")


class OverRolloutConfig(Section):
    """Stop waiting for the slowest tasks of a step: they are cancelled and counted, and the step
    has fewer groups.

    buffer.on_short_batch must be train or carry.
    """

    ratio: float = safe_key(
        0.0, "Fraction of a step's tasks that need not finish; 0 = off.", ge=0, lt=1
    )
    wait_after_min: units.Pause = safe_key(
        ExplorerSettings.wait_after_s,
        "How much longer the others may run once enough tasks are done.",
    )
    return_partial_tasks: bool = safe_key(
        ExplorerSettings.keep_partial,
        "Train on the finished runs of cancelled groups, if there are at least two of them (one, "
        "with repeat_times 1).",
    )

    def rules(self, at: str, diagnostics: Diagnostics) -> None:
        if not self.ratio:
            self.warn_unused(
                at, ("wait_after_min", "return_partial_tasks"), f"{at}.ratio is 0", diagnostics
            )


class DynamicTimeoutConfig(Section):
    """A time limit derived from how long recent runs took."""

    enable: bool = safe_key(False, "Use this limit, with max_timeout as its upper bound.")
    warmup_min_steps: units.ExploreStepsOr0 = safe_key(
        ExplorerSettings.timeout_warmup,
        "Steps that are measured before the limit applies; counted anew after a resume.",
    )
    ratio: float = safe_key(
        3.0, "Limit as a multiple of a run's mean time, up to max_timeout.", gt=0
    )

    def rules(self, at: str, diagnostics: Diagnostics) -> None:
        if not self.enable:
            self.warn_unused(
                at, ("warmup_min_steps", "ratio"), f"{at}.enable is false", diagnostics
            )


class ExplorerConfig(Section):
    """The exploring loop."""

    name: Name = safe_key(
        ExplorerSettings.name,
        "mode: explore: which of several explorers this is; its folder, `explorers/NAME` in the "
        "run's, and its engines carry the name.",
    )
    rollout_model: InferenceModelConfig = section(
        InferenceModelConfig, "The engines of the policy."
    )
    auxiliary_models: tuple[AuxiliaryModelConfig, ...] = safe_key(
        (), "Judges, teachers and reward models.  Their GPUs are counted."
    )
    eval_interval: units.ExploreStepsOr0 = safe_key(
        100, "Evaluate every so many explore steps; 0 = not during training."
    )
    eval_on_startup: bool = safe_key(
        ExplorerSettings.eval_on_startup, "Evaluate the untrained model."
    )
    eval_at_end: bool = safe_key(ExplorerSettings.eval_at_end, "Evaluate the final model.")
    eval_in_background: bool = safe_key(
        ExplorerSettings.eval_in_background,
        "Keep exploring during an evaluation.  Weights may change meanwhile: "
        "eval/<taskset>/model_version/min and /max tell which "
        "versions answered.",
    )
    bench_on_latest_checkpoint: bool = safe_key(
        False,
        "bench: only the last checkpoint instead of all.  The base model is evaluated too where "
        "eval_on_startup is true.",
    )
    max_timeout: units.Seconds = safe_key(
        ExplorerSettings.max_timeout_s, "How long one run of a task may take."
    )
    max_group_timeout: units.Seconds | None = safe_key(
        None,
        "How long all runs of a task together may take, from the start of the first.  Null: no "
        "separate limit.",
    )
    group_policy: Annotated[Literal["partial", "drop"], IgnoreCase] = safe_key(
        "partial",
        "A group of which runs are missing (failed, unscored, out of time): partial: it is trained "
        "if at least half of its runs, and "
        "two, are there; drop: it is not, and another task replaces it.",
    )
    stop_hopeless_groups: bool = safe_key(
        True,
        "Cancel the other runs of a group once so many have failed that it will not be trained.  "
        "Has no effect with deterministic: true.",
    )
    max_retry_times: units.Retries = safe_key(
        ExplorerSettings.max_retry_times, "How often a failed run is retried."
    )
    dynamic_timeout: DynamicTimeoutConfig = section(
        DynamicTimeoutConfig, "A time limit derived from how long recent runs took."
    )
    over_rollout: OverRolloutConfig = section(
        OverRolloutConfig, "Not waiting for the slowest tasks of a step."
    )
    max_concurrent_runs: units.Runs = safe_key(
        ExplorerSettings.max_concurrent_runs, "Concurrent runs."
    )
    max_inflight_batches: units.ExploreSteps = safe_key(2, "fully_async: concurrent explore steps.")
    max_failed_groups: units.Groups = safe_key(
        ExplorerSettings.breaker,
        "Stop after this many groups in a row in which every run failed, or none got a reward.",
    )
    env_vars: dict[str, str] = safe_key({}, "Environment variables for the explorer's process.")
    runner_state_report_interval: units.Pause = safe_key(
        ExplorerSettings.report_interval_s,
        "How often the explorer logs the state of every step in progress; 0 = never.",
    )
    proxy_port: int = safe_key(
        ServeRuntime.port,
        "serve: port of the service; 0 = a free one, see serve.json.",
        ge=0,
        le=65535,
    )
    listen_address: str = safe_key(
        ServeRuntime.host,
        "serve: address that the service listens on.  The default is reached from this machine "
        "alone; behind another one put a proxy that "
        "speaks TLS.",
    )
    serve: ServeConfig = section(
        ServeConfig, "serve: who may ask, how much, and how long a session waits."
    )
    min_running_model_num: units.EnginesOr0 | None = safe_key(
        None,
        "serve: engines that keep answering while the others load new weights.  Null: all but one, "
        "so that weights roll one engine at a "
        "time.  0: all load at the same time, and requests wait.  A single engine always pauses "
        "its requests; none fails.",
    )
