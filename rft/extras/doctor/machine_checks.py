"""One check of `rft doctor --gpu`, in its own process: NAME DEVICE MODEL RANK WORLD FOLDER.

Checks are made of the parts that runs use: the learner with its attention and FSDP2, engines,
transports, synchronizer and canary. Rank 0 writes its lines to FOLDER/NAME.jsonl.  Knows nothing of
the other checks.  Invariant: a check that is not right raises, and says ok only of what was
computed and compared.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.util
import shutil
import subprocess
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
from rft.launch.start import probe_prompts
from rft.sync.settings import SyncSettings
from rft.trainer.pack import Budget, RankBatch, TrainRow, plan
from rft.trainer.settings import LearnerSettings, OptimSettings
from rft.types.completion import Completion
from rft.types.ids import Version
from rft.types.ports import GenerateRequest

Found = Iterator[Line]
Check = Callable[[str, str, int, int, Path], Found]
_SIZE = {"cuda": 8192, "cpu": 512}  # rows and columns of the product that is timed
_BYTES = {"cuda": 256 << 20, "cpu": 16 << 20}  # that ranks add


def main(
    checks: Mapping[str, Check],
    name: str,
    device: str,
    model: str,
    rank: str,
    world: str,
    folder: str,
) -> int:
    """Runs one of `checks` and writes its lines as they come.  Exit code 1 where it failed."""
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
    """Driver, libraries and GPUs; a tensor goes to each GPU and comes back."""
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
    driver = (
        _smi("--query-gpu=driver_version").splitlines()[0]
        if shutil.which("nvidia-smi")
        else "unknown (no nvidia-smi)"
    )
    yield ok(
        "versions",
        f"driver {driver}, torch {torch.__version__}, CUDA {torch.version.cuda}, cuDNN {cudnn}, "
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
    """A product in the type that runs take, against float64."""
    import torch

    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    if device == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise SetupError("this GPU has no bfloat16 arithmetic")
    size = _SIZE[device]
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    right = a[:64].double() @ b.double()
    (a @ b).sum().item()  # the first one also loads the library
    began = time.perf_counter()
    made = a @ b
    made.sum().item()
    seconds = time.perf_counter() - began
    error = float((made[:64].double() - right).abs().max() / right.abs().max())
    limit = 2e-2 if dtype == torch.bfloat16 else 1e-5
    text = (
        f"{str(dtype).removeprefix('torch.')} product of {size} x {size}: "
        f"{2 * size**3 / seconds / 1e12:.2f} TFLOP/s, error {error:.1e}"
    )
    if error > limit:
        raise RunFailed(f"{text}, allowed are {limit:.0e} of the largest value")
    yield ok("arithmetic", text)


def attention(device: str, model: str, rank: int, world: int, folder: Path) -> Found:
    """Which kernels run, and whether shared prompts give the log-probs of rows that are padded."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from rft.trainer.attention import installed

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
            continue  # torch's way to say that this kernel cannot take it
    package = "installed" if importlib.util.find_spec("flash_attn") else "not installed"
    varlen = "there" if importlib.util.find_spec("torch.nn.attention.varlen") else "not there"
    yield ok(
        "attention",
        f"sdpa kernels {', '.join(run)}; flash-attn {package}; torch varlen {varlen}; padded rows "
        f"take "
        f"{installed('auto', device, dtype)} where attn_implementation is auto; shared prompts "
        f"take sdpa",
    )
    rows = _rows(np.random.default_rng(0))
    learner = _made(settings)
    shared = learner.score([rows])
    del learner
    padded = _made(dataclasses.replace(settings, row_layout="padded")).score([rows])
    apart = max(
        float(np.abs(a["old"] - b["old"]).max()) for a, b in zip(shared[0], padded[0], strict=True)
    )
    text = f"shared prompts against padded rows in float32: log-probs differ by {apart:.1e}"
    if not apart < 1e-3:
        raise RunFailed(f"{text}, allowed are 1e-3")
    yield ok("shared prompts", text)


def collective(device: str, model: str, rank: int, world: int, folder: Path) -> Found:
    """Every rank adds its number; all have to see the sum."""
    import torch
    import torch.distributed as dist

    from rft.trainer import sharding

    backend = "NCCL" if device == "cuda" else "gloo"
    sharding.join(_learner(device, model, world=world), rank, str(folder / "collective.meet"))
    given = torch.full((_BYTES[device] // 4,), float(rank + 1), device=device)
    dist.all_reduce(given.clone())
    began = time.perf_counter()
    dist.all_reduce(given)
    low = float(given.min())  # waits for the device
    high = float(given.max())
    seconds = time.perf_counter() - began
    if low != high or low != world * (world + 1) / 2:
        raise RunFailed(
            f"{backend} all-reduce over {world} ranks gave {low} to {high} instead of "
            f"{world * (world + 1) / 2}"
        )
    rate = given.numel() * 4 * 2 * (world - 1) / world / seconds / 1e9
    text = f"{backend} all-reduce of {_BYTES[device] >> 20} MiB over {world} rank(s)"
    yield ok(
        "collective",
        f"{text}: {rate:.1f} GB/s" if world > 1 else f"{text}: one GPU, nothing to compare",
    )
    dist.barrier()
    dist.destroy_process_group()


def training(device: str, model: str, rank: int, world: int, folder: Path) -> Found:
    """Two steps of the learner on every GPU, sharded by FSDP2; the loss has to fall."""
    import torch

    settings = _learner(device, model, world=world)
    learner = _made(settings, rank, str(folder / "training.meet"))
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
    """The engine without vLLM."""
    yield from _engine("transformers", device, model, folder)


def vllm(device: str, model: str, rank: int, world: int, folder: Path) -> Found:
    """vLLM, where it is installed."""
    yield from _engine("vllm", device, model, folder)


def memory(device: str, model: str, rank: int, world: int, folder: Path) -> Found:
    """Whether the checks before have given GPU memory back: no process of ours may hold any."""
    import torch

    if device == "cpu":
        return
    for i in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(i)
        held = [line for line in _holders() if "python" in line or "vllm" in line.lower()]
        used = (total - free) / 2**30
        text = (
            f"gpu {i}: {used:.1f} of {total / 2**30:.1f} GiB in use after the checks, this "
            f"process included"
        )
        yield Line(
            topic="memory",
            state="ok" if used < 2.0 else "note",
            text=f"{text}{'; ' + '; '.join(held) if held else ''}",
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
    """An engine gets weights through each transport, generates, and is trained on; the canary
    judges both versions.
    """
    lines: list[Line] = []
    asyncio.run(_served(kind, device, model, folder, lines.append))
    yield from lines


async def _served(
    kind: str, device: str, model: str, folder: Path, told: Callable[[Line], None]
) -> None:
    from rft.trainer.ranks import Ranks

    settings = _learner(device, model)
    began = time.perf_counter()
    async with engine_and_learner(kind, settings) as (engine, learner):
        told(
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
            told(
                msgspec.structs.replace(
                    ok(f"{kind} sync", text), seconds=round(time.perf_counter() - began, 2)
                )
            )


@asynccontextmanager
async def engine_and_learner(
    kind: str, settings: LearnerSettings
) -> AsyncIterator[tuple[Any, Any]]:
    """An engine beside a learner, both with the learner's model in its type."""
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
        learner = await asyncio.to_thread(_made, settings)
        opened.callback(learner.close)
        yield engine, learner


async def _published(engine: Any, ranks: Any, method: Any, lineage: int, folder: Path) -> str:
    """A train step between two versions; what the canary said of both."""
    sync = SyncSettings(
        method=method,
        engine_dtype=ranks.settings.dtype,
        trainer_dtype=ranks.settings.dtype,
        timeout_s=120.0,
    )
    tokens = 0

    async def train(prompts: Sequence[Sequence[int]]) -> None:
        nonlocal tokens
        rows = await _generated(engine, prompts)
        tokens = sum(r.counted for r in rows)
        await ranks.step([_batch(rows, [rows], 1)])

    first, second, seconds = await two_versions(engine, ranks, sync, lineage, folder, train)
    way = f"nccl over {sync.backend}" if method == "nccl" else method
    return (
        f"{way}: canary {first:.1e} nats, after a train step on {tokens} generated tokens "
        f"{second:.1e}; {seconds:.2f} s for a sync"
    )


async def two_versions(
    engine: Any,
    ranks: Any,
    sync: SyncSettings,
    lineage: int,
    folder: Path,
    between: Callable[[Sequence[Sequence[int]]], Awaitable[None]],
) -> tuple[float, float, float]:
    """Publishes two versions as a run does; `between`, given the canary's prompts, changes the
    trainer's weights once the first is served.

    The canary's largest difference of each version, in nats, and the seconds of the second sync.
    """
    from rft.sync.schedule import Schedule
    from rft.sync.synchronizer import Synchronizer
    from rft.sync.transport.choose import make

    prompts = probe_prompts(ranks.settings.model_path, sync.canary_prompts, 0)
    transport: Any = make(sync, folder)
    synchronizer = Synchronizer(
        sync, [engine], ranks, Schedule(), prompts, Version(lineage, 0), sender=transport
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
    """Answers of the engine as rows to train on."""
    from rft.types.task import SamplingArgs

    def sampling(i: int) -> SamplingArgs:
        return SamplingArgs(temperature=1.0, max_tokens=16, ignore_eos=True, seed=i)

    asked = (
        engine.generate(GenerateRequest(prompt_tokens=tuple(p), sampling=sampling(i)))
        for i, p in enumerate(prompts)
    )
    return [_trained(answers[0], i) for i, answers in enumerate(await asyncio.gather(*asked))]


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
    """Four groups of two rows, random tokens; the sampler is said to have been uniform over 256."""
    made = []
    for group in range(4):
        prompt = rng.integers(3, 250, 12)
        made += [
            _row(np.concatenate([prompt, rng.integers(3, 250, 16)]), 12, np.full(16, -5.5), group)
            for _ in range(2)
        ]
    return made


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


def _batch(rows: Sequence[TrainRow], mine: Sequence[Sequence[TrainRow]], step: int) -> RankBatch:
    tokens = float(sum(r.counted for r in rows))
    return RankBatch(
        step=step, micro_batches=tuple(map(tuple, mine)), tokens=tokens, rows=float(len(rows))
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
        optim=OptimSettings(lr=1e-2),
    )


def _made(settings: LearnerSettings, rank: int = 0, rendezvous: str | None = None) -> Any:
    from rft.trainer.learner import Learner

    return Learner(settings, rank, rendezvous)


def ok(topic: str, text: str) -> Line:
    return Line(topic=topic, state="ok", text=text)


def _holders() -> list[str]:
    """Processes that hold memory of a GPU, as far as nvidia-smi can see them."""
    if not shutil.which("nvidia-smi"):
        return []
    return _smi("--query-compute-apps=pid,used_memory,name").splitlines()


def _smi(query: str) -> str:
    done = subprocess.run(
        ["nvidia-smi", query, "--format=csv,noheader"],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main(CHECKS, *sys.argv[1:]))
