"""Check a machine in minutes with the parts that runs use: `rft doctor --gpu`.

Each check is a separate process (`rft.extras.doctor.machine_checks`), which frees its memory at the
end and whose death is reported without affecting other checks.  Depends on processes and deadlines,
not on the content of checks.  Invariant: every requested check has a line, and no process is left
when `run` returns.
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
CHECKS: dict[str, str] = {  # name -> remedy after a failure
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
    """Run every check on `device` (cuda | cpu) with the model folder `model`; return whether none
    failed.

    `ranks`: number of processes in checks of several ranks.
    """
    good = True

    def report(line: Line) -> None:
        nonlocal good
        good = good and line.state != "failed"
        on_line(line)

    # distinguishes leftovers of the checks from other processes
    os.environ.setdefault(leftovers.MARK, f"doctor-{os.getpid()}")
    before = leftovers.snapshot()
    with tempfile.TemporaryDirectory(prefix="rft-doctor-") as folder:
        for name in sorted(checks, key="memory".__eq__):  # memory comes last
            count = ranks if name in ("collective", "training") else 1
            for line in checked(
                name, device, model, Path(folder), world=count, deadline_s=deadline_s
            ):
                report(line)
    if "memory" in checks:
        leftover_text = "; ".join(leftovers.compare(before))
        report(
            _failed("leftovers", leftover_text, CHECKS["memory"])
            if leftover_text
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
    """Run one check of `module` in `world` processes; return the lines written by rank 0."""
    if name in TRANSPORTS and importlib.util.find_spec(name) is None:
        return [Line(topic=name, state="note", text="not installed")]
    answer = folder / f"{name}.jsonl"
    began = time.monotonic()
    printed = folder / f"{name}.out"
    arguments = (name, device, str(model))
    with printed.open("wb") as out:
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", module, *arguments, str(rank), str(world), str(folder)],
                env=_environment(name, device, model, rank, world),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            for rank in range(world)
        ]
        codes = _exit_codes(processes, began + deadline_s)
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
    if codes is None:
        reason = f"no end after {deadline_s:.0f} s"
    elif any(codes):
        reason = next(
            f"ended by {signal.Signals(-c).name}" if c < 0 else f"exit code {c}" for c in codes if c
        )
    else:
        return lines
    return [
        *lines,
        _failed(name, f"{reason}: {_last(printed)}", CHECKS[name], time.monotonic() - began),
    ]


def _exit_codes(processes: list[subprocess.Popen[bytes]], deadline: float) -> list[int] | None:
    """Wait until all processes have ended or one has failed, then end the others.

    None: `deadline` (monotonic) has passed.
    """
    with ThreadPoolExecutor(len(processes)) as threads:
        pending = {threads.submit(process.wait) for process in processes}
        codes = [0]
        try:
            while pending and not any(codes):
                remaining_s = max(0.1, deadline - time.monotonic())
                done, pending = wait(pending, remaining_s, return_when=FIRST_COMPLETED)
                if not done:
                    return None
                codes = [future.result() for future in done]
        finally:
            for process in processes:
                _end(process)
    return codes


def _environment(name: str, device: str, model: Path, rank: int, world: int) -> dict[str, str]:
    """Return a process's environment as in a run: each of several ranks sees its own GPU."""
    environment = {**os.environ, leftovers.PART: f"doctor-{name}"}
    if device == "cuda" and world > 1:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(world)))).split(
            ","
        )
        environment["CUDA_VISIBLE_DEVICES"] = visible[rank]
    if name in ("transformers", "vllm"):
        return {
            **environment,
            **cpu_environment(
                EngineSettings(engine_type=name, device=device, model_path=str(model))
            ),
        }
    return {**environment, **trainer_environment(2)} if device == "cpu" else environment


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the remaining processes of a check, including children."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _failed(topic: str, text: str, remedy: str, seconds: float = 0.0) -> Line:
    return Line(topic=topic, state="failed", text=text, remedy=remedy, seconds=seconds)


def _last(printed: Path) -> str:
    """Return the last lines of a process that reported no error itself."""
    lines = [line for line in printed.read_text("utf-8", "replace").splitlines() if line.strip()]
    return " / ".join(lines[-3:])[-600:] or "it printed nothing"
