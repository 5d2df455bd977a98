"""One check of `rft doctor --gpu`, in its own process: NAME DEVICE MODEL RANK WORLD FOLDER.

Checks use the parts of runs: the learner with its attention and FSDP2, engines, transports,
synchronizer and canary. Rank 0 writes its lines to FOLDER/NAME.jsonl.  Independent of the other
checks.  Invariant: a failed check raises, and "ok" covers only results that were computed and
compared.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.util
import shutil
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from rft.algorithm.settings import AlgorithmSettings
from rft.engine.settings import EngineSettings
from rft.errors import RftError, RunFailed, SetupError
from rft.extras.doctor.check_line import TRANSPORTS, Line
from rft.extras.doctor.driver import driver, smi
from rft.launch.start import probe_prompts
from rft.sync.settings import FixedSync, SyncConfig, SyncRuntime
from rft.trainer.rows.pack import Budget, RankBatch, TrainRow, plan
from rft.trainer.settings import LearnerSettings, OptimizerConfig
from rft.types.completion import Completion
from rft.types.ids import Version
from rft.types.ports import GenerateRequest

Found = Iterator[Line]
Check = Callable[[str, str, int, int, Path], Found]
_SIZE = {"cuda": 8192, "cpu": 512}  # rows and columns of the timed product
_BYTES = {"cuda": 256 << 20, "cpu": 16 << 20}  # bytes of the all-reduce


def main(
    checks: Mapping[str, Check],
    name: str,
    device: str,
    model: str,
    rank: str,
    world: str,
    folder: str,
) -> int:
    """Run one of `checks` and write its lines as they come.  Returns exit code 1 on failure."""
    answer = Path(folder) / f"{name}.jsonl"
    began = time.monotonic()

    def write(line: Line) -> None:
        nonlocal began
        now = time.monotonic()
        if rank == "0" or line.state == "failed":
            line = (
                line
                if line.seconds
                else msgspec.structs.replace(line, seconds=round(now - began, 2))
            )
            with answer.open("ab") as file:
                file.write(msgspec.json.encode(line) + b"\n")
        began = now

    try:
        for line in checks[name](device, model, int(rank), int(world), Path(folder)):
            write(line)
    except Exception as e:
        write(
            Line(
                topic=name,
                state="failed",
                text=f"{'' if world == '1' else f'rank {rank}: '}{type(e).__name__}: {e}"[:800],
            )
        )
        if not isinstance(e, RftError):
            raise
        return 1
    return 0


def versions(device: str, model: str, rank: int, world: int, folder: Path) -> Found:
    """Report driver, libraries and GPUs; copy a tensor to each GPU and back."""
    import torch

    if device == "cpu":
        yield ok(
            "versions", f"torch {torch.__version__}, {torch.get_num_threads()} threads, no GPU"
        )
        return
    if not torch.cuda.is_available():
        raise SetupError(f"torch {torch.__version__} (CUDA {torch.version.cuda}) sees no GPU")
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    cudnn = torch.backends.cudnn.version()
    yield ok(
        "versions",
        f"driver {driver() or 'unknown'}, torch {torch.__version__}, CUDA {torch.version.cuda}, cuDNN {cudnn}, "
        f"NCCL {nccl}",
    )
    for i in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(i)
        free, total = torch.cuda.mem_get_info(i)
        sent = torch.arange(1 << 20, dtype=torch.int32)
        if not torch.equal(sent.to(f"cuda:{i}").cpu(), sent):
            raise SetupError(f"gpu {i} gives back other bytes than it was given")
        text = (
            f"{facts.name}, compute {facts.major}.{facts.minor}, {free / 2**30:.1f} of "
            f"{total / 2**30:.1f} GiB free"
        )
        yield Line(topic=f"gpu {i}", state="ok" if free > total / 2 else "note", text=text)


def arithmetic(device: str, model: str, rank: int, world: int, folder: Path) -> Found:
    """Compare a product in the type of runs with float64."""
    import torch

    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    if device == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise SetupError("this GPU has no bfloat16 arithmetic")
    size = _SIZE[device]
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    right = a[:64].double() @ b.double()
    (a @ b).sum().item()  # the first product also loads the library
    began = time.perf_counter()
    product = a @ b
    product.sum().item()
    seconds = time.perf_counter() - began
    error = float((product[:64].double() - right).abs().max() / right.abs().max())
    limit = 2e-2 if dtype == torch.bfloat16 else 1e-5
    text = (
        f"{str(dtype).removeprefix('torch.')} product of {size} x {size}: "
        f"{2 * size**3 / seconds / 1e12:.2f} TFLOP/s, error {error:.1e}"
    )
    if error > limit:
        raise RunFailed(f"{text}, allowed are {limit:.0e} of the largest value")
    yield ok("arithmetic", text)


def attention(device: str, model: str, rank: int, world: int, folder: Path) -> Found:
    """Report which kernels run, and check that shared prompts give the log-probs of padded rows."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from rft.trainer.model.attention import installed

    settings = _learner(device, model, dtype="float32")
    dtype = "bfloat16" if device == "cuda" else "float32"
    q = torch.randn(1, 4, 64, 64, device=device, dtype=getattr(torch, dtype))
    kernels = [
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.MATH,
    ]
    run = []
    for kernel in kernels:
        try:
            with sdpa_kernel(kernel):
                torch.nn.functional.scaled_dot_product_attention(
                    q, q, q, is_causal=True
                ).sum().item()
            run.append(kernel.name.removesuffix("_ATTENTION").lower())
        except RuntimeError:
            continue  # torch raises it for an unsupported kernel
    package = "installed" if importlib.util.find_spec("flash_attn") else "not installed"
    chosen = installed("auto", device, dtype)
    yield ok(
        "attention",
        f"sdpa kernels {', '.join(run)}; flash-attn {package}; where attn_implementation is auto, "
        f"shared and packed rows take {chosen}, padded rows "
        f"{'sdpa' if chosen == 'varlen' else chosen}",
    )
    rows = _rows(np.random.default_rng(0))
    learner = _new_learner(settings)
    shared = learner.score([rows])
    del learner
    padded = _new_learner(dataclasses.replace(settings, row_layout="padded")).score([rows])
    apart = max(
        float(np.abs(a["old"] - b["old"]).max()) for a, b in zip(shared[0], padded[0], strict=True)
    )
    text = f"shared prompts against padded rows in float32: log-probs differ by {apart:.1e}"
    if not apart < 1e-3:
        raise RunFailed(f"{text}, allowed are 1e-3")
    yield ok("shared prompts", text)


def collective(device: str, model: str, rank: int, world: int, folder: Path) -> Found:
    """Let every rank add its number, and check the sum on all ranks."""
    import torch
    import torch.distributed as dist

    from rft.trainer.model import sharding

    backend = "NCCL" if device == "cuda" else "gloo"
    sharding.join(_learner(device, model, world=world), rank, str(folder / "collective.meet"))
    source = torch.full((_BYTES[device] // 4,), float(rank + 1), device=device)
    dist.all_reduce(source.clone())
    began = time.perf_counter()
    dist.all_reduce(source)
    low = float(source.min())  # waits for the device
    high = float(source.max())
    seconds = time.perf_counter() - began
    if low != high or low != world * (world + 1) / 2:
        raise RunFailed(
            f"{backend} all-reduce over {world} ranks gave {low} to {high} instead of "
            f"{world * (world + 1) / 2}"
        )
    rate = source.numel() * 4 * 2 * (world - 1) / world / seconds / 1e9
    text = f"{backend} all-reduce of {_BYTES[device] >> 20} MiB over {world} rank(s)"
    yield ok(
        "collective",
        f"{text}: {rate:.1f} GB/s" if world > 1 else f"{text}: one GPU, nothing to compare",
    )
    dist.barrier()
    dist.destroy_process_group()


def training(device: str, model: str, rank: int, world: int, folder: Path) -> Found:
    """Run two steps of the learner on every GPU, sharded by FSDP2; the loss must fall."""
    import torch

    settings = _learner(device, model, world=world)
    learner = _new_learner(settings, rank, str(folder / "training.meet"))
    rows = _rows(np.random.default_rng(0))
    cut = plan(rows, world, Budget(settings.max_token_len_per_gpu))
    before = learner.score([[rows[i] for i in m] for m in cut[rank]])
    for step in (1, 2):
        result = learner.step(_batch(rows, [[rows[i] for i in m] for m in cut[rank]], step))
        if not result.finite:
            raise RunFailed(f"the gradient of step {step} is not finite")
    after = learner.score([[rows[i] for i in m] for m in cut[rank]])
    pairs = [
        (a["old"], b["old"])
        for x, y in zip(after, before, strict=True)
        for a, b in zip(x, y, strict=True)
    ]
    gain = float(np.mean([a.mean() - b.mean() for a, b in pairs])) if pairs else 0.0
    how = "FSDP2" if torch.distributed.is_initialized() else "one unsharded rank"
    text = (
        f"two steps of {how} over {world} rank(s) in {settings.dtype}: log-probs of the trained "
        f"tokens rose by {gain:.3f}"
    )
    if pairs and not gain > 0:
        raise RunFailed(f"{text}; they have to rise")
    yield ok("training", text)
    learner.close()


def transformers(device: str, model: str, rank: int, world: int, folder: Path) -> Found:
    """Check the transformers engine."""
    yield from _engine("transformers", device, model, folder)


def vllm(device: str, model: str, rank: int, world: int, folder: Path) -> Found:
    """Check vLLM, if installed."""
    yield from _engine("vllm", device, model, folder)


def memory(device: str, model: str, rank: int, world: int, folder: Path) -> Found:
    """Check that the previous checks have freed GPU memory: no process of rft may hold any."""
    import torch

    if device == "cpu":
        return
    for i in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(i)
        gpu_processes = [line for line in _holders() if "python" in line or "vllm" in line.lower()]
        used = (total - free) / 2**30
        text = (
            f"gpu {i}: {used:.1f} of {total / 2**30:.1f} GiB in use after the checks, this "
            f"process included"
        )
        yield Line(
            topic="memory",
            state="ok" if used < 2.0 else "note",
            text=f"{text}{'; ' + '; '.join(gpu_processes) if gpu_processes else ''}",
        )


_ALL: tuple[Check, ...] = (
    versions,
    arithmetic,
    attention,
    collective,
    training,
    transformers,
    vllm,
    memory,
)
CHECKS = {check.__name__: check for check in _ALL}


def _engine(kind: str, device: str, model: str, folder: Path) -> Found:
    """Give an engine weights through each transport, let it generate, and train on the result; the
    canary judges both versions.
    """
    lines: list[Line] = []
    asyncio.run(_served(kind, device, model, folder, lines.append))
    yield from lines


async def _served(
    kind: str, device: str, model: str, folder: Path, report: Callable[[Line], None]
) -> None:
    from rft.trainer.loop.ranks import Ranks

    settings = _learner(device, model)
    began = time.perf_counter()
    async with engine_and_learner(kind, settings) as (engine, learner):
        report(
            ok(
                kind,
                f"up in {time.perf_counter() - began:.0f} s, the trainer's rank included, in "
                f"{settings.dtype}",
            )
        )
        for lineage, method in enumerate(TRANSPORTS[kind], 1):
            began = time.perf_counter()
            text = await _published(
                engine, Ranks(learner), method, lineage, folder / f"{kind}-{method}"
            )
            report(
                msgspec.structs.replace(
                    ok(f"{kind} sync", text), seconds=round(time.perf_counter() - began, 2)
                )
            )


@asynccontextmanager
async def engine_and_learner(
    kind: str, settings: LearnerSettings
) -> AsyncIterator[tuple[Any, Any]]:
    """Yield an engine and a learner, both with the learner's model in its type."""
    from rft.engine.built_in import make

    async with AsyncExitStack() as opened:
        served = EngineSettings(
            engine_type=kind,
            name=f"{kind}-0",
            model_path=settings.model_path,
            device=settings.device,
            dtype=settings.dtype,
            max_model_len=128,
            max_num_seqs=16,
            gpu_memory_utilization=0.3,
            kv_cache_bytes=64 << 20,
        )
        engine = await make(served)
        opened.push_async_callback(engine.close)
        learner = await asyncio.to_thread(_new_learner, settings)
        opened.callback(learner.close)
        yield engine, learner


async def _published(engine: Any, ranks: Any, method: Any, lineage: int, folder: Path) -> str:
    """Make a train step between two versions; return the canary's result for both."""
    config = FixedSync(sync_method=method, sync_timeout=120.0)
    dtype = ranks.settings.dtype
    runtime = SyncRuntime(engine_dtype=dtype, trainer_dtype=dtype)
    tokens = 0

    async def train(prompts: Sequence[Sequence[int]]) -> None:
        nonlocal tokens
        rows = await _generated(engine, prompts)
        tokens = sum(r.counted for r in rows)
        await ranks.step([_batch(rows, [rows], 1)])

    first, second, seconds = await two_versions(
        engine, ranks, config, runtime, lineage, folder, train
    )
    way = f"nccl over {runtime.backend}" if method == "nccl" else method
    return (
        f"{way}: canary {first:.1e} nats, after a train step on {tokens} generated tokens "
        f"{second:.1e}; {seconds:.2f} s for a sync"
    )


async def two_versions(
    engine: Any,
    ranks: Any,
    config: SyncConfig,
    runtime: SyncRuntime,
    lineage: int,
    folder: Path,
    between: Callable[[Sequence[Sequence[int]]], Awaitable[None]],
) -> tuple[float, float, float]:
    """Publish two versions as in a run; return the canary's largest difference of each, in nats,
    and the seconds of the second sync.

    `between`, given the canary's prompts, changes the trainer's weights once the first version is
    served.
    """
    from rft.sync.schedule import Schedule
    from rft.sync.synchronizer import Synchronizer
    from rft.sync.transport.choose import make

    prompts = probe_prompts(ranks.settings.model_path, runtime.canary_prompts, 0)
    transport: Any = make(config, folder, backend=runtime.backend)
    synchronizer = Synchronizer(
        config,
        runtime,
        [engine],
        ranks,
        Schedule(),
        prompts,
        Version(lineage, 0),
        sender=transport,
    )
    canary = []
    seconds = 0.0
    try:
        for step in (0, 1):
            if step:
                await between(prompts)
            began = time.perf_counter()
            metrics = await synchronizer.publish(
                await ranks.stage(Version(lineage, step), transport)
            )
            seconds = time.perf_counter() - began
            canary += [m.value for m in metrics if m.name == "sync/canary_max_abs"]
    finally:
        transport.close()
    first, second = canary
    return first, second, seconds


async def _generated(engine: Any, prompts: Sequence[Sequence[int]]) -> list[TrainRow]:
    """Return answers of the engine as rows to train on."""
    from rft.types.task import SamplingArgs

    def sampling(i: int) -> SamplingArgs:
        return SamplingArgs(temperature=1.0, max_tokens=16, ignore_eos=True, seed=i)

    requests = (
        engine.generate(GenerateRequest(prompt_tokens=tuple(p), sampling=sampling(i)))
        for i, p in enumerate(prompts)
    )
    return [_trained(answers[0], i) for i, answers in enumerate(await asyncio.gather(*requests))]


def _trained(done: Completion, group: int) -> TrainRow:
    if len(done.tokens) != 16 or not np.isfinite(done.logprobs).all():
        raise RunFailed(
            f"asked for 16 tokens, got {len(done.tokens)} with log-probs {done.logprobs}"
        )
    return _row(
        np.concatenate([done.prompt_tokens, done.tokens]),
        len(done.prompt_tokens),
        done.logprobs,
        group,
    )


def _rows(rng: np.random.Generator) -> list[TrainRow]:
    """Return four groups of two rows of random tokens, with the log-probs of a uniform sampler over
    256 tokens.
    """
    rows = []
    for group in range(4):
        prompt = rng.integers(3, 250, 12)
        rows += [
            _row(np.concatenate([prompt, rng.integers(3, 250, 16)]), 12, np.full(16, -5.5), group)
            for _ in range(2)
        ]
    return rows


def _row(tokens: np.ndarray, prompt: int, logprobs: np.ndarray, group: int) -> TrainRow:
    mask = np.arange(len(tokens)) >= prompt
    behaviour = np.zeros(len(tokens), np.float32)
    behaviour[mask] = logprobs
    return TrainRow(
        tokens=tokens.astype(np.int32),
        loss_mask=mask,
        logprobs=behaviour,
        temperatures=1.0,
        advantages=np.ones(int(mask.sum()), np.float32),
        group=str(group),
    )


def _batch(
    rows: Sequence[TrainRow], micro_batches: Sequence[Sequence[TrainRow]], step: int
) -> RankBatch:
    tokens = float(sum(r.counted for r in rows))
    return RankBatch(
        step=step,
        micro_batches=tuple(map(tuple, micro_batches)),
        tokens=tokens,
        rows=float(len(rows)),
    )


def _learner(device: str, model: str, *, world: int = 1, dtype: str = "") -> LearnerSettings:
    return LearnerSettings(
        model_path=model,
        device=device,
        dtype=dtype or ("bfloat16" if device == "cuda" else "float32"),
        world_size=world,
        cpu_threads=2,
        total_steps=2,
        algorithm=AlgorithmSettings(policy_loss_fn="reinforce"),
        optim=OptimizerConfig(lr=1e-2),
    )


def _new_learner(settings: LearnerSettings, rank: int = 0, rendezvous: str | None = None) -> Any:
    from rft.trainer.loop.learner import Learner

    return Learner(settings, rank, rendezvous)


def ok(topic: str, text: str) -> Line:
    return Line(topic=topic, state="ok", text=text)


def _holders() -> list[str]:
    """Return processes that hold GPU memory, as far as nvidia-smi sees them."""
    if not shutil.which("nvidia-smi"):
        return []
    return smi("--query-compute-apps=pid,used_memory,name").splitlines()


if __name__ == "__main__":
    sys.exit(main(CHECKS, *sys.argv[1:]))
