"""What engines, and the models beside the policy, need to know.  Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rft.types.ids import SEED

# that have a name; others are plugins
ENGINE_TYPES = ("vllm", "transformers", "scripted", "external")


@dataclass(frozen=True, kw_only=True)
class ExternalSettings:
    """A model behind an external OpenAI-compatible server.  Secrets are named here, never stored."""

    model_name: str
    base_url: str | None = None  # None = what base_url_env says
    base_url_env: str = "OPENAI_BASE_URL"
    api_key_env: str = "OPENAI_API_KEY"
    headers: dict[str, str] = field(default_factory=dict)
    # header -> environment variable with its value
    header_envs: dict[str, str] = field(default_factory=dict)
    requests_per_minute: float | None = None
    max_retries: int = 5
    extra_body: dict[str, Any] = field(default_factory=dict)  # further entries of every request
    price_per_1k_prompt_tokens: float = 0.0  # US dollars
    price_per_1k_completion_tokens: float = 0.0


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
    # of several processes on CPU: place of the engine's first core among those of the machine
    first_core: int = 0
    seed: int = SEED
    trust_remote_code: bool = False
    external_lib: str | None = None  # module imported before the model, by each process that has it
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    # off | warn | strict: compare the tokens of several turns with the whole chat's
    tokenization_check: str = "off"
    tool_call_parser: str | None = None  # vLLM's name of it; finds tool calls in an answer's text
    reasoning_parser: str | None = None  # cuts the reasoning out of an answer's text
    log_requests: bool = False  # vllm
    log_stats: bool = False  # vllm: at every pause
    extra_engine_args: dict[str, Any] = field(default_factory=dict)
    start_timeout_s: float = 600.0
    call_timeout_s: float = 600.0  # pause, load, resume, health
    # with work, and neither a finished step nor processor time; None = never
    stall_timeout_s: float | None = 10.0
    step_timeout_s: float | None = 600.0  # with work, and no finished step
    request_timeout_s: float = 3600.0  # one generate call, waits while paused included
    # transformers: every text is computed alone, so that no rounding tells of its company
    deterministic: bool = False
    # vllm: its own LoRA layers for adapters up to this rank; None = adapters go beside its layers
    lora_rank: int | None = None
    fully_sharded_loras: bool = False  # of them
    max_cpu_loras: int | None = None  # of them
    router_replay: bool = False  # tell which experts each token went through
    # vllm, where it shares its GPU: 1 = weights go to host memory, 2 = they go away; 0 = it never
    # sleeps
    sleep_level: int = 0
    # serve the weights of model_path as they are (judges); a load is refused
    fixed_weights: bool = False
    max_concurrent: int = 256  # requests under way (external)
    external: ExternalSettings | None = None

    @property
    def workers(self) -> int:
        """Processes that hold a part of the model."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def gpus(self) -> int:
        return self.workers if self.device == "cuda" else 0


@dataclass(frozen=True, kw_only=True)
class AuxiliarySettings:
    """A judge, teacher or reward model: engines whose weights are fixed, and the names under which
    workflows and rewards ask them.
    """

    names: tuple[str, ...]
    engines: tuple[EngineSettings, ...]
    max_concurrent: int = 256  # requests under way, over all its engines

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def task(self) -> str:
        return self.engines[0].task
