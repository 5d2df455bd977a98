"""What an engine needs to know.  Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """One rollout engine."""

    engine_type: str = "vllm"  # vllm | transformers | scripted
    name: str = "engine-0"
    model_path: str = ""
    tokenizer_path: str | None = None  # folder with tokenizer and chat template; None = model_path
    device: str = "cpu"  # cuda | cpu, resolved
    dtype: str = "float32"
    tensor_parallel_size: int = 1
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
    seed: int = 42
    trust_remote_code: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    tokenization_check: str = "off"  # off | warn | strict: compare the tokens of several turns with the whole chat's
    log_requests: bool = False  # vllm
    log_stats: bool = False  # vllm: at every pause
    extra_engine_args: dict[str, Any] = field(default_factory=dict)
    start_timeout_s: float = 600.0
    call_timeout_s: float = 600.0  # pause, load, resume, health
    request_timeout_s: float = 3600.0  # one generate call, waits while paused included
    fixed_weights: bool = False  # serve the weights of model_path as they are (judges); a load is refused
