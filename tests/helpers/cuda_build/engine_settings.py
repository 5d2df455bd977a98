"""What vLLM's CUDA build makes of engine settings.

`python -m tests.helpers.cuda_build.engine_settings MAJOR.MINOR` reads JSON objects, fields of
`EngineSettings`, one a line, and prints a JSON object for each.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from tests.helpers.cuda_build import gpu


def configured(given: dict[str, Any]) -> dict[str, Any]:
    """Return parts of the configuration that vLLM makes of the settings `given`."""
    from vllm.v1.executor.abstract import Executor

    from rft.engine import vllm_args
    from rft.engine.settings import EngineSettings

    made = vllm_args.engine_args(EngineSettings(**given)).create_engine_config()
    parallel, scheduler, model = made.parallel_config, made.scheduler_config, made.model_config
    lora = made.lora_config
    return {
        "runner": "V2" if made.use_v2_model_runner else "V1",
        "executor": Executor.get_class(made).__name__,
        "ranks": [parallel.tensor_parallel_size, parallel.pipeline_parallel_size],
        "graphs": made.compilation_config.cudagraph_mode.name != "NONE",
        "async": bool(scheduler.async_scheduling),
        "sleep": bool(model.enable_sleep_mode),
        "dtype": str(model.dtype).removeprefix("torch."),
        "lora": None if lora is None else [lora.max_lora_rank, bool(lora.fully_sharded_loras)],
        "cache": made.cache_config.kv_cache_memory_bytes,
    }


def main() -> None:
    major, minor = map(int, sys.argv[1].split("."))
    gpu.install((major, minor))
    for line in sys.stdin:
        try:
            found = configured(json.loads(line))
        except Exception as e:  # each setting is reported, those that vLLM refuses, too
            found = {"error": f"{type(e).__name__}: {str(e)[:500]}"}
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
