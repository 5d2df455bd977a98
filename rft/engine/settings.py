"""Config sections of models behind a server, and the settings of engines.  Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rft.schema import units
from rft.schema.base import Diagnostics, Section, safe_key
from rft.types.ids import SEED

# environment variable: module that vLLM's own processes import before they build the model
EXTERNAL_LIB = "RFT_EXTERNAL_LIB"
# engines with a short name; all others are plugins
SELF = "self"  # name of the policy as its own teacher
ENGINE_TYPES = ("vllm", "transformers", "scripted", "external")


class ExternalModelConfig(Section):
    """A model behind an external OpenAI-compatible server."""

    enable: bool = safe_key(
        False, "Ask that server instead of an engine of the run; the same as engine_type: external."
    )
    base_url: str | None = safe_key(
        None, "The server's address, e.g. https://host/v1.  Null: what base_url_env says."
    )
    base_url_env: str = safe_key(
        "OPENAI_BASE_URL", "Environment variable with the server's address."
    )
    api_key_env: str = safe_key(
        "OPENAI_API_KEY",
        "Environment variable with the key; no key is sent where it is not set.",
    )
    model_name: str | None = safe_key(None, "Name of the model there.  Null: model_path.")
    headers: dict[str, str] = safe_key({}, "Headers of every request.")
    header_envs: dict[str, str] = safe_key(
        {}, "Headers whose value is a secret: name of the environment variable with it."
    )
    requests_per_minute: float | None = safe_key(
        None,
        "Most requests started per minute.  Null: no limit but max_concurrent.",
        unit="requests/min",
        gt=0,
    )
    max_retries: units.Retries = safe_key(
        5,
        "How often a request is repeated after 429, 5xx or a broken connection, with growing "
        "pauses.",
    )
    extra_body: dict[str, Any] = safe_key(
        {}, "Further entries of every request, e.g. a server's own sampling options."
    )


class ExternalPolicyConfig(ExternalModelConfig):
    """A model behind an external OpenAI-compatible server instead of the policy, in mode: bench."""

    enable: bool = safe_key(
        False, "mode: bench: evaluate that model, instead of model_path and of checkpoints."
    )
    max_concurrent: units.Requests = safe_key(
        64, "Requests under way at the same time; others wait."
    )
    request_timeout: units.Seconds = safe_key(600.0, "How long one request may take.")
    price_per_1k_prompt_tokens: units.Dollars = safe_key(
        0.0,
        "What a thousand tokens of prompts cost; for bench/cost_usd.",
    )
    price_per_1k_completion_tokens: units.Dollars = safe_key(
        0.0,
        "What a thousand tokens of answers cost; for bench/cost_usd.",
    )

    def rules(self, at: str, diagnostics: Diagnostics) -> None:
        if not self.enable:
            self.warn_unused(
                at,
                (n for n in type(self).model_fields if n != "enable"),
                "enable is false",
                diagnostics,
            )


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """One rollout engine, or one engine of an auxiliary model."""

    engine_type: str = "vllm"  # vllm | transformers | scripted | external
    name: str = "engine-0"
    task: str = "generate"  # score: a model with a classification head
    model_path: str = ""
    tokenizer_path: str | None = None  # folder with tokenizer and chat template; None = model_path
    device: str = "cpu"  # cuda | cpu, resolved
    dtype: str = "float32"
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    max_model_len: int = 2048
    max_prompt_tokens: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    gpu_memory_utilization: float = 0.9
    kv_cache_bytes: int | None = None  # CPU: size of the KV cache
    enforce_eager: bool = True
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True  # vllm
    block_size: int | None = None  # None = chosen for the device
    cpu_threads: int = 2
    # CPU, several processes: index of the engine's first core among the machine's cores
    first_core: int = 0
    seed: int = SEED
    trust_remote_code: bool = False
    external_lib: str | None = None  # module imported before the model, in every model process
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    # entries that replace those of preprocessor_config.json
    image_processor_args: dict[str, Any] = field(default_factory=dict)
    # off | warn | strict: compare the tokens of several turns with the whole chat's
    tokenization_check: str = "off"
    tool_call_parser: str | None = None  # vLLM's parser of tool calls in an answer's text
    reasoning_parser: str | None = None  # vLLM's parser of the reasoning
    log_requests: bool = False  # vllm
    log_stats: bool = False  # vllm: at every pause
    extra_engine_args: dict[str, Any] = field(default_factory=dict)
    start_timeout_s: float = 600.0
    call_timeout_s: float = 600.0  # pause, load, resume, health
    # limit with work but without a finished step or processor time; None = none
    stall_timeout_s: float | None = 10.0
    step_timeout_s: float | None = 600.0  # limit with work but without a finished step
    request_timeout_s: float = 3600.0  # one generate call, including waits while paused
    # transformers: compute every text alone, so that rounding does not depend on other texts
    deterministic: bool = False
    # vllm: use vLLM's LoRA layers for adapters up to this rank; None = rft's own adapter layers
    lora_rank: int | None = None
    fully_sharded_loras: bool = False  # for vLLM's LoRA layers
    max_cpu_loras: int | None = None  # for vLLM's LoRA layers
    router_replay: bool = False  # report the routed experts of each token
    # vllm on a shared GPU: 1 = weights move to host memory, 2 = weights are dropped; 0 = never
    # sleeps
    sleep_level: int = 0
    top_logprobs: int = 0  # most likely tokens that `score` returns at each position
    # folder of the tokenizer whose tokens `score` gets and reads as text; None = its own tokens
    policy_tokenizer: str | None = None
    # serve the weights of model_path unchanged (judges); loads are refused
    fixed_weights: bool = False
    max_concurrent: int = 256  # requests in progress (external)
    external: ExternalModelConfig | None = None

    @property
    def workers(self) -> int:
        """Processes that hold a part of the model."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def gpus(self) -> int:
        return self.workers if self.device == "cuda" else 0


@dataclass(frozen=True, kw_only=True)
class AuxiliarySettings:
    """A judge, teacher or reward model: its engines, and the names by which workflows and rewards
    address the model.
    """

    names: tuple[str, ...]
    engines: tuple[EngineSettings, ...]
    max_concurrent: int = 256  # requests in progress over all its engines
    unscorable: str = ""  # why it cannot score the policy's tokens
    # of the moving average of the policy that it serves; None = fixed weights
    decay: float | None = None

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def task(self) -> str:
        return self.engines[0].task
