"""Checks a machine in minutes with the parts that runs use: `rft doctor --gpu`.

Each check is a separate process (`rft.extras.doctor.machine_checks`), so that what it takes is
given back, and what kills it is told instead of killing the others.  Knows processes and deadlines;
not what is checked.  Invariant: every check that was asked for has a line, and when `run` ends none
of its processes is left.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path

import msgspec

from rft.engine.environment import cpu_environment, trainer_environment
from rft.engine.settings import EngineSettings
from rft.extras.doctor.check_line import TRANSPORTS, Line
from rft.launch import leftovers

DEADLINE_S = 240.0  # of one check
CHECKS: dict[str, str] = {  # name: what to do where it fails
    "versions": "install a driver and the torch build for its CUDA version; nvidia-smi has to list "
    "the GPUs in this shell or container",
    "arithmetic": "set trainer.param_dtype and explorer.rollout_model.dtype to float32, or use "
    "GPUs with bfloat16",
    "attention": "set trainer.attn_implementation: sdpa and trainer.row_layout: padded, and report "
    "the message",
    "collective": "see NCCL_DEBUG=INFO; in containers give --shm-size=2g; NCCL_P2P_DISABLE=1 tells "
    "whether links between GPUs are at fault",
    "training": "run it with one rank (trainer.world_size: 1); if that works, the links between "
    "GPUs are at fault",
    "transformers": "explorer.rollout_model.engine_type: transformers cannot be used here; see the "
    "message",
    "vllm": "install the vLLM of `rft doctor` for this CUDA version, or use "
    "explorer.rollout_model.engine_type: transformers",
    "memory": "end the processes that hold it (`rft doctor` and nvidia-smi list them)",
}


def run(
    device: str,
    model: Path,
    ranks: int,
    on_line: Callable[[Line], None],
    *,
    checks: Sequence[str] = tuple(CHECKS),
    deadline_s: float = DEADLINE_S,
) -> bool:
    """Every check on `device` (cuda | cpu) with the model folder `model`, `ranks` processes where
    they work together.

    Returns whether none failed.
    """
    good = True

    def told(line: Line) -> None:
        nonlocal good
        good = good and line.state != "failed"
        on_line(line)

    # by it what the checks leave is told from others' processes
    os.environ.setdefault(leftovers.MARK, f"doctor-{os.getpid()}")
    before = leftovers.snapshot()
    with tempfile.TemporaryDirectory(prefix="rft-doctor-") as folder:
        for name in sorted(checks, key="memory".__eq__):  # it is the last one
            count = ranks if name in ("collective", "training") else 1
            for line in checked(
                name, device, model, Path(folder), world=count, deadline_s=deadline_s
            ):
                told(line)
    if "memory" in checks:
        left = "; ".join(leftovers.compare(before))
        told(
            _failed("leftovers", left, CHECKS["memory"])
            if left
            else Line(topic="leftovers", state="ok", text="none")
        )
    return good


def checked(
    name: str,
    device: str,
    model: Path,
    folder: Path,
    *,
    world: int = 1,
    deadline_s: float = DEADLINE_S,
    module: str = "rft.extras.doctor.machine_checks",
) -> list[Line]:
    """The lines of one check of `module`, whose ranks are `world` processes; the first one writes
    them.
    """
    if name in TRANSPORTS and importlib.util.find_spec(name) is None:
        return [Line(topic=name, state="note", text="not installed")]
    answer = folder / f"{name}.jsonl"
    began = time.monotonic()
    printed = folder / f"{name}.out"
    with printed.open("wb") as out:
        processes = [
            subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    module,
                    name,
                    device,
                    str(model),
                    str(rank),
                    str(world),
                    str(folder),
                ],
                env=_environment(name, device, model, rank, world),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            for rank in range(world)
        ]
        with ThreadPoolExecutor(world) as waiting:
            pending = {waiting.submit(process.wait) for process in processes}
            codes = [0]
            try:
                while pending and not any(codes):  # the others would wait for one that has died
                    left = max(0.1, deadline_s - (time.monotonic() - began))
                    done, pending = wait(pending, left, return_when=FIRST_COMPLETED)
                    codes = [ended.result() for ended in done]
                    if not done:
                        break
            finally:
                late = bool(pending) and not any(codes)
                for process in processes:
                    _end(process)
    lines = (
        [msgspec.json.decode(text, type=Line) for text in answer.read_bytes().splitlines()]
        if answer.exists()
        else []
    )
    if any(line.state == "failed" for line in lines):
        replace = msgspec.structs.replace
        return [
            replace(line, remedy=line.remedy or CHECKS[name]) if line.state == "failed" else line
            for line in lines
        ]
    if late:
        why = f"no end after {deadline_s:.0f} s"
    elif any(codes):
        why = next(
            f"ended by {signal.Signals(-c).name}" if c < 0 else f"exit code {c}" for c in codes if c
        )
    else:
        return lines
    return [
        *lines,
        _failed(name, f"{why}: {_last(printed)}", CHECKS[name], time.monotonic() - began),
    ]


def _environment(name: str, device: str, model: Path, rank: int, world: int) -> dict[str, str]:
    """As the processes of a run have it: of several ranks each sees its own GPU."""
    own = {**os.environ, leftovers.PART: f"doctor-{name}"}
    if device == "cuda" and world > 1:
        seen = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(world)))).split(",")
        own["CUDA_VISIBLE_DEVICES"] = seen[rank]
    if name in ("transformers", "vllm"):
        return {
            **own,
            **cpu_environment(
                EngineSettings(engine_type=name, device=device, model_path=str(model))
            ),
        }
    return {**own, **trainer_environment(2)} if device == "cpu" else own


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends what is left of a check, its children included."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _failed(topic: str, text: str, remedy: str, seconds: float = 0.0) -> Line:
    return Line(topic=topic, state="failed", text=text, remedy=remedy, seconds=seconds)


def _last(printed: Path) -> str:
    """The last words of a process that did not say itself what was wrong."""
    lines = [line for line in printed.read_text("utf-8", "replace").splitlines() if line.strip()]
    return " / ".join(lines[-3:])[-600:] or "it printed nothing"
