"""A GPU without memory or kernels: tensors on `cuda` have shapes and no values, so the trainer's steps of real models run anywhere.

torch's FakeTensorMode computes shapes, types and devices; a few lines of C++ (fake_gpu.cpp) let a torch for CPUs accept the device,
and collectives go to torch's fake process group.  On top, storages are counted (`Gpu.peak`), and every operator that makes the host
wait for the device is noted (`Gpu.waits`).
Changes torch for good, so it runs in a process of its own.  Invariant: what is counted is what torch's operators allocate for the
same step on a real GPU, without the allocator's rounding and fragmentation.
"""

from __future__ import annotations

import importlib
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

ROOT = Path(__file__).parents[3]
NUMBER = 2.0  # what is read from the device
aten = torch.ops.aten
INDEXED = (aten.index.Tensor, aten.index_put_.default, aten.index_put.default)
FSDP = "torch.distributed.fsdp._fully_shard"


class Gpu(TorchDispatchMode):
    """The device: bytes of the storages on it, and where the host waited for it."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.at_peak: dict[
            str, int
        ] = {}  # bytes of the storages at the peak, by the operator that made them
        self.vocabulary = 0  # entries of a row of logits
        self.logit_rows = 0  # of the tallest tensor with whole rows of logits
        self.waits: list[str] = []  # "file function operator", in the order of the step
        self.copies: list[str] = []  # the same of tensors from host memory that is not pinned
        self._sizes: dict[int, tuple[int, str]] = {}
        self._paused = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = self._waited(func, args, kwargs)
        if out is None:
            out = func(*args, **kwargs)
        if not self._paused:
            tree_map_only(torch.Tensor, lambda t: self._see(t, str(func)), out)
        return out

    # ------------------------------------------------------------ bytes

    def _see(self, tensor: torch.Tensor, maker: str) -> None:
        if isinstance(tensor, DTensor):
            tensor = tensor._local_tensor  # it has no memory of its own
        if type(tensor) is not FakeTensor or tensor.device.type != "cuda":
            return
        storage = tensor.untyped_storage()
        if storage._cdata not in self._sizes:
            weakref.finalize(storage, self._freed, storage._cdata)
            self._sizes[storage._cdata] = (0, maker)
            if tensor.dim() > 1 and tensor.shape[-1] == self.vocabulary:
                self.logit_rows = max(self.logit_rows, tensor.numel() // self.vocabulary)
        self.resized(tensor)

    def resized(self, tensor: torch.Tensor) -> None:
        """Count the storage of `tensor`, if it is one of the device's, with the size that it has now."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._sizes:
            return
        before, maker = self._sizes[storage._cdata]
        self._sizes[storage._cdata] = (storage.nbytes(), maker)
        self.live += storage.nbytes() - before
        if self.live > self.peak:
            self.peak = self.live

    def _freed(self, key: int) -> None:
        self.live -= self._sizes.pop(key)[0]

    # ------------------------------------------------------------ waits

    def _waited(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Note an operator for which the host waits; its result where only the device would know the shape."""
        first = args[0] if args else None
        if not isinstance(first, torch.Tensor) or first.device.type != "cuda":
            return None
        if (
            func is aten._to_copy.default
            and torch.device(kwargs.get("device") or "cuda").type == "cpu"
        ):
            self.waits.append(f"{line()} to the host")
        elif func is aten.nonzero.default:
            self.waits.append(f"{line()} nonzero")
            return torch.zeros(first.numel(), max(1, first.dim()), dtype=torch.int64, device="cuda")
        elif func is aten.bincount.default:
            self.waits.append(f"{line()} bincount")
            length = kwargs.get("minlength", args[2] if len(args) > 2 else 0)
            return torch.zeros(length, dtype=torch.int64, device="cuda")
        elif func in INDEXED and any(i is not None and i.dtype == torch.bool for i in args[1]):
            self.waits.append(f"{line()} x[bool]")
            return torch.empty_like(first) if func is aten.index.Tensor else first
        return None

    def read(self, tensor: FakeTensor) -> float:
        """What `item` and its like give."""
        if tensor.device.type == "cuda":
            self.waits.append(f"{line()} item")
        return NUMBER


def line() -> str:
    """The file and function of `rft` that runs."""
    frames = [f for f in traceback.extract_stack() if f.filename.startswith(str(ROOT / "rft"))]
    return (
        f"{Path(frames[-1].filename).relative_to(ROOT)} {frames[-1].name}" if frames else "autograd"
    )


# ---------------------------------------------------------------- torch


def install() -> Gpu:
    """Let torch compute on the device, which is loaded."""
    gpu = Gpu()
    _cuda()
    _kernels.impl("silu_backward", _no_kernel, "CUDA")
    _fsdp(gpu)
    _values(gpu)
    _from_the_host(gpu)
    F.scaled_dot_product_attention = _attention
    return gpu


@contextmanager
def running(gpu: Gpu) -> Iterator[Gpu]:
    """Tensors are fake inside."""
    with FakeTensorMode(allow_non_fake_inputs=True), gpu:
        yield gpu


def _cuda() -> None:
    """What torch.cuda says of the device: an H100 with 80 GiB."""
    for module, answers in (
        (
            torch.cuda,
            {
                "is_available": True,
                "device_count": 1,
                "current_device": 0,
                "get_device_capability": (9, 0),
            },
        ),
        (
            torch.cuda,
            {
                "_lazy_init": None,
                "manual_seed_all": None,
                "synchronize": None,
                "mem_get_info": (80 << 30, 80 << 30),
            },
        ),
        (torch.accelerator, {"is_available": True, "synchronize": None}),
    ):
        for name, answer in answers.items():
            setattr(module, name, lambda *_, answer=answer: answer)


class _Event:
    def __init__(self, *_: Any, **__: Any) -> None: ...
    def record(self, *_: Any) -> _Event:
        return self

    def wait(self, *_: Any) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True


class _Stream:
    def __init__(self, *_: Any, **__: Any) -> None: ...
    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: Any) -> None: ...
    def wait_event(self, event: _Event) -> None: ...
    def wait_stream(self, stream: _Stream) -> None: ...
    def record_event(self, *_: Any) -> _Event:
        return _Event()

    def synchronize(self) -> None: ...


def _fsdp(gpu: Gpu) -> None:
    """FSDP2 on the device: meshes are real, streams do nothing, and storages that it resizes in place are counted."""
    import torch.distributed.device_mesh as meshes
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    mesh = meshes.init_device_mesh

    def init_device_mesh(*args: Any, **more: Any) -> Any:
        with unset_fake_temporarily():
            return mesh(*args, **more)

    meshes.init_device_mesh = init_device_mesh
    handle = SimpleNamespace(
        **{n: getattr(torch.cpu, n) for n in dir(torch.cpu) if not n.startswith("__")}
    )
    handle.current_device, handle.Event, handle.Stream = (lambda: 0), _Event, _Stream
    handle.current_stream = handle.stream = lambda *_: _Stream()
    modules = [
        importlib.import_module(f"{FSDP}.{n}")
        for n in (
            "_fsdp_init",
            "_fsdp_param_group",
            "_fsdp_collectives",
            "_fsdp_state",
            "_fsdp_param",
        )
    ]
    for module in modules:
        if hasattr(module, "_get_device_handle"):
            module._get_device_handle = lambda *_: handle  # type: ignore[attr-defined]
    for name in ("alloc_storage", "free_storage"):
        counted = _counted(getattr(modules[-1], name), gpu)
        for module in modules:
            if hasattr(module, name):
                setattr(module, name, counted)
    for name in [n for n in vars(ShardingPropagator) if n.startswith("_propagate_tensor_meta")]:
        setattr(ShardingPropagator, name, _uncounted(getattr(ShardingPropagator, name), gpu))


def _counted(resize: Callable[[torch.Tensor], None], gpu: Gpu) -> Callable[[torch.Tensor], None]:
    def counted(tensor: torch.Tensor) -> None:
        resize(tensor)
        gpu.resized(tensor)

    return counted


def _uncounted(function: Callable[..., Any], gpu: Gpu) -> Callable[..., Any]:
    """DTensor tries operators on whole tensors that do not exist."""

    def uncounted(*args: Any, **more: Any) -> Any:
        gpu._paused += 1
        try:
            return function(*args, **more)
        finally:
            gpu._paused -= 1

    return uncounted


def _values(gpu: Gpu) -> None:
    """What is read of a fake tensor."""
    fake: Any = FakeTensor
    fake.item = fake.__float__ = lambda self: gpu.read(self)
    fake.__int__ = lambda self: int(gpu.read(self))
    fake.__bool__ = lambda self: bool(gpu.read(self))
    fake.tolist = lambda self: [gpu.read(self)] * self.numel()
    fake.numpy = lambda self, **_: np.full(
        tuple(self.shape),
        NUMBER,
        str(self.dtype).removeprefix("torch.").replace("bfloat16", "float32"),
    )
    torch.Tensor.pin_memory = _pinned  # type: ignore[method-assign,assignment]


def _pinned(tensor: torch.Tensor, *_: Any) -> torch.Tensor:
    """Return `tensor`, marked as pinned memory: a copy from it need not wait."""
    tensor.is_pinned_here = True  # type: ignore[attr-defined]
    return tensor


def _from_the_host(gpu: Gpu) -> None:
    """Tensors with values become fake ones on the device."""
    move, from_data, as_tensor = torch.Tensor.to, torch.tensor, torch.as_tensor

    def moved(self: torch.Tensor, *args: Any, **more: Any) -> torch.Tensor:
        device = more.get("device") or next(
            (a for a in args if isinstance(a, str | torch.device)), None
        )
        if device is None or torch.device(device).type != "cuda" or self.device.type != "cpu":
            return move(self, *args, **more)
        if not (more.get("non_blocking") and hasattr(self, "is_pinned_here")):
            gpu.copies.append(line())
        dtype = more.get("dtype") or next(
            (a for a in args if isinstance(a, torch.dtype)), self.dtype
        )
        return torch.empty(self.shape, dtype=dtype, device="cuda")

    def made(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def on_device(data: Any, *args: Any, device: Any = None, **more: Any) -> torch.Tensor:
            if (
                device is None
                or torch.device(device).type != "cuda"
                or isinstance(data, FakeTensor)
            ):
                return make(data, *args, device=device, **more)
            with unset_fake_temporarily():
                values = make(data, *args, **more)
            return moved(values, "cuda")

        return on_device

    torch.Tensor.to = moved  # type: ignore[method-assign,assignment]
    torch.tensor, torch.as_tensor = made(from_data), made(as_tensor)
    swap = torch.utils.swap_tensors

    def swapped(one: torch.Tensor, other: torch.Tensor) -> None:
        mode = detect_fake_mode()
        assert mode is not None
        # no other reference to a tensor that is swapped may remain
        mode.fake_tensor_converter.meta_converter.tensor_memo.clear()
        swap(one, other)

    torch.utils.swap_tensors = swapped


_kernels = torch.library.Library(
    "aten", "IMPL"
)  # of operators that are several others where a device has no kernel for them


def _no_kernel(*args: Any) -> torch.Tensor:
    raise AssertionError("fake tensors are not computed")


_plain_attention = F.scaled_dot_product_attention


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """The kernel that torch takes on an H100: flash in bfloat16 without a mask, else the memory-efficient one."""
    if query.device.type != "cuda":
        return _plain_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if attn_mask is None and query.dtype == torch.bfloat16:
        out: torch.Tensor = aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, scale=scale
        )[0]
        return out
    if attn_mask is not None:
        if any(
            stride % 8 for stride in attn_mask.stride()[:-1]
        ):  # this kernel reads 8 at a time, so torch makes a copy that is
            attn_mask = F.pad(attn_mask, (0, 8 - attn_mask.shape[-1] % 8))[
                ..., : attn_mask.shape[-1]
            ]
        attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])
    efficient: torch.Tensor = aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale
    )[0]
    return efficient


# ---------------------------------------------------------------- the trainer


def join(world_size: int) -> None:
    """Ranks that do not exist: this process is rank 0."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
