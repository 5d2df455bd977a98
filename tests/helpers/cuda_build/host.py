"""vLLM's CUDA build computes on tensors of the host: its Triton kernels in Triton's interpreter, its
compiled operators around experts in Python.

Kernels are interpreted right in float32 only.  Depends on `gpu.install`, which must run first.
"""

from __future__ import annotations

import importlib
import os
import tempfile
from pathlib import Path
from typing import Any

from tests.helpers.cuda_build import gpu

_KEPT: list[Any] = []  # operators live as long as their library


def install(capability: tuple[int, int]) -> None:
    """Fake GPUs of `capability`, whose tensors are on the host; call it before anything of vLLM."""
    os.environ["TRITON_INTERPRET"] = "1"
    gpu.install(capability)
    import torch

    for name, answer in (("synchronize", None), ("get_memory_info", (gpu.MEMORY, gpu.MEMORY))):
        setattr(torch.accelerator, name, lambda *_, answer=answer, **__: answer)


def operators() -> None:
    """Register the compiled operators around vLLM's kernel for experts."""
    import torch
    import vllm._custom_ops  # noqa: F401  (loads their schemas)

    for module in ("vllm._C_stable_libtorch", "vllm._moe_C_stable_libtorch"):
        importlib.import_module(module)

    def align(
        ids: torch.Tensor,
        experts: int,
        block: int,
        rows: torch.Tensor,
        owners: torch.Tensor,
        end: torch.Tensor,
        *_: Any,
    ) -> None:
        """Sort rows by expert, each expert's padded to whole blocks."""
        flat = ids.flatten()
        rows.fill_(len(flat))
        owners.fill_(-1)
        at = 0
        for expert in range(experts):
            own = (flat == expert).nonzero()[:, 0]
            blocks = -(-len(own) // block)
            rows[at : at + len(own)] = own.to(rows.dtype)
            owners[at // block : at // block + blocks] = expert
            at += blocks * block
        end.fill_(at)

    def silu(out: torch.Tensor, x: torch.Tensor) -> None:
        gate, up = x.chunk(2, -1)
        out.copy_(torch.nn.functional.silu(gate) * up)

    def clamped(
        out: torch.Tensor, x: torch.Tensor, alpha: float = 1.702, limit: float = 7.0
    ) -> None:
        gate = x[..., ::2].clamp(max=limit)
        up = x[..., 1::2].clamp(-limit, limit)
        out.copy_((up + 1) * gate * torch.sigmoid(alpha * gate))

    def summed(x: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(x.sum(1))

    for space, name, function in (
        ("_moe_C", "moe_align_block_size", align),
        ("_moe_C", "moe_sum", summed),
        ("_C", "silu_and_mul", silu),
        ("_C", "swigluoai_and_mul", clamped),
    ):
        library = torch.library.Library(space, "IMPL")
        library.impl(name, function, "CPU")
        _KEPT.append(library)


def worker(model: Path, dtype: str) -> Any:
    """Return vLLM's worker with `model` loaded by vLLM itself; its sleep overwrites the weights
    with NaN.
    """
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.v1.worker import gpu_worker
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    from rft.engine import vllm_args
    from rft.engine.settings import EngineSettings

    settings = EngineSettings(
        engine_type="vllm",
        model_path=str(model),
        device="cuda",
        dtype=dtype,
        max_model_len=64,
        sleep_level=2,
        enforce_eager=True,
    )
    config = vllm_args.engine_args(settings).create_engine_config()
    config.device_config.device = torch.device("cpu")
    with set_current_vllm_config(config):
        _start(config)
        made = get_model_loader(config.load_config).load_model(
            vllm_config=config, model_config=config.model_config
        )
    runner: Any = object.__new__(GPUModelRunner)
    runner.vllm_config, runner.lora_config, runner.model = config, None, made
    runner.encoder_cache = runner.speculator = runner.pooling_runner = None
    worker: Any = object.__new__(gpu_worker.Worker)
    worker.vllm_config, worker.model_config, worker.rank = config, config.model_config, 0
    worker.model_runner, worker._sleep_mode_backend = runner, Poison(made)
    worker._sleep_saved_buffers, worker._sleep_saved_draft_buffers = {}, {}
    worker._sleep_saved_parameters = {}
    return worker


class Poison:
    """A pool of GPU memory whose sleep leaves NaN in every tensor of a model."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def suspend(self, level: int) -> None:
        assert level == 2, "at level 1 the weights are kept"
        for _, tensor in tensors(self._model):
            if tensor.is_floating_point():
                tensor.data.fill_(float("nan"))

    def resume(self, tags: Any) -> None:
        """The memory is there again; what it held is not."""


def tensors(model: Any) -> list[tuple[str, Any]]:
    """Return parameters, buffers and tensors in plain attributes of `model`, by name."""
    import torch

    attributes = [
        (f"{name}.{key}", value)
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, torch.Tensor)
    ]
    return [
        (name, tensor)
        for name, tensor in [*model.named_parameters(), *model.named_buffers(), *attributes]
        if not tensor.is_meta
    ]


def _start(config: Any) -> None:
    """Start the process groups of one worker; those of experts are there for models with experts."""
    import torch
    from vllm.distributed import parallel_state
    from vllm.v1.worker.gpu_worker import init_worker_distributed_environment
    from vllm.v1.worker.workspace import init_workspace_manager

    if torch.distributed.is_initialized():
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(1, 1)
        return
    store = Path(tempfile.mkdtemp()) / "store"
    init_worker_distributed_environment(config, 0, f"file://{store}", 0, "gloo")
    init_workspace_manager(torch.device("cpu"), 1)


class _Counter(int):
    """A loop's variable in an interpreted kernel, whose type a kernel may change."""

    def to(self, dtype: Any) -> _Counter:
        return self


def _mend_loops() -> None:
    """Let `tl.range` give interpreted kernels more than Python's numbers, which have no `to`."""
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    patched = interpreter._patch_lang_core

    def patch(lang: Any, scope: Any) -> None:
        patched(lang, scope)
        numbers = lang.range
        scope.set_attr(lang, "range", lambda *a, **k: map(_Counter, numbers(*a, **k)))

    interpreter._patch_lang_core = patch


def sampling() -> None:
    """Let Model Runner V2's sampler read memory of the host, and call the kernels that it calls for
    tensors of a GPU.
    """
    import torch
    from vllm.utils import torch_utils
    from vllm.v1.sample.ops import topk_topp_sampler
    from vllm.v1.sample.ops import topk_topp_triton as ops
    from vllm.v1.worker.gpu import buffer_utils

    class Shared(buffer_utils.UvaBuffer):
        def __init__(self, size: Any, dtype: Any) -> None:
            self.cpu = self._uva = torch.zeros(size, dtype=dtype)
            self.np = self.cpu.numpy()

    masked = ops.apply_top_k_top_p_triton

    def as_on_gpus(logits: Any, k: Any, p: Any, **more: Any) -> Any:
        """For tensors of the host vLLM leaves out what it does for at most 64 rows with a top_p."""
        split = p is not None and len(logits) <= ops._SPLIT_MAX_BATCH
        if k is not None or not split:
            logits = masked(logits, k, p, **more)
        if split and (k is None or more.get("has_topp_only_rows", True)):
            ops._apply_topp_split(logits, k, p, float("-inf"), gpu.UNITS)
        return logits

    topk_topp_sampler.apply_top_k_top_p_triton = as_on_gpus
    buffer_utils.UvaBuffer = Shared
    buffer_utils.is_uva_available = lambda: True
    buffer_utils.get_accelerator_view_from_cpu_tensor = lambda tensor: tensor
    torch_utils.PIN_MEMORY = False
    torch_utils.is_pin_memory_available = lambda: False  # of 0.32
    _mend_loops()


def sampler(config: Any, rows: int, size: int) -> tuple[Any, Any]:
    """Return Model Runner V2's sampler for a vocabulary of `size`, made as it makes its own, and the
    state of its requests.
    """
    import torch
    from vllm.v1.worker.gpu.sample.sampler import Sampler
    from vllm.v1.worker.gpu.states import RequestState

    model = config.model_config
    device = torch.device("cpu")
    requests = RequestState(
        max_num_reqs=rows,
        max_model_len=model.max_model_len,
        max_num_batched_tokens=rows,
        num_speculative_steps=0,
        vocab_size=size,
        device=device,
    )
    made = Sampler(
        vllm_config=config,
        max_num_reqs=rows,
        vocab_size=size,
        device=device,
        req_states=requests,
        logprobs_mode=model.logprobs_mode,
        use_fp64_gumbel=model.use_fp64_gumbel,
    )
    return made, requests


def batch(requests: Any, indices: list[int]) -> Any:
    """Return a step of Model Runner V2 that decodes one token of each of the requests `indices`."""
    import numpy as np
    import torch
    from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers

    count = len(indices)
    buffers = InputBuffers(count, count, torch.device("cpu"))
    made = InputBatch.make_dummy(count, count, buffers)
    made.idx_mapping_np = np.array(indices, np.intp)
    made.idx_mapping = made.expanded_idx_mapping = torch.tensor(indices)
    lengths = requests.prefill_len.cpu[made.idx_mapping]
    made.seq_lens = made.seq_lens_cpu_upper_bound = lengths
    made.positions = lengths.long() - 1
    return made
