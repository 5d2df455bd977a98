"""What can be proven about GPUs on a machine without one, in one table.

    python scripts/gpu_proof.py [--part NAME ...] [--json]
    python scripts/gpu_proof.py --break-it [--part NAME ...]

Each part is a set of tests.  `--break-it` plants one fault at a time in a copy of the code and
shows which part finds it.  Exit code 1 where a part fails, or a fault is found by none.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
COPIED = ("rft", "tests", "examples", "workflows", "scripts", "pyproject.toml")


@dataclass(frozen=True)
class Part:
    """A claim and the tests that show it."""

    claim: str
    tests: tuple[str, ...]


PARTS = {
    "learner": Part(
        "fake GPU: the learner builds, trains and publishes in every option and family; new waits",
        ("tests/unit/trainer/test_whole_learner.py",),
    ),
    "memory": Part(
        "fake GPU, real sizes (8B to 70B, 4 to 56 ranks): the estimate covers the counted bytes",
        ("tests/unit/config/test_memory_counted.py",),
    ),
    "canary": Part(
        "bfloat16 on both sides: right weights pass over 12 seeds, wrong ones do not",
        ("tests/unit/sync/test_canary_bfloat16.py",),
    ),
    "engine": Part(
        "the transformers engine starts in bfloat16 and float16",
        ("tests/unit/engine/test_forwards.py",),
    ),
    "weights": Part(
        "bfloat16 weights are checked and staged bit for bit, at the rate of float32",
        ("tests/contract/test_transport.py",),
    ),
    "nodes": Part(
        "ranks and engines sit where the plan says, on 1 to 4 nodes with fake GPUs",
        ("tests/integration/test_placement_ray.py",),
    ),
    "vllm": Part(
        "every key of an engine reaches a field that this vLLM has",
        ("tests/integration/test_vllm_models.py", "tests/unit/engine/test_vllm_layout.py"),
    ),
}


@dataclass(frozen=True)
class Fault:
    """A fault as a replacement of one piece of text in one file, and the part that finds it."""

    name: str
    file: str
    old: str
    new: str
    found_by: str


FAULTS = (
    Fault(
        "a .cpu() in the step",
        "rft/trainer/loop/learner.py",
        "logprobs: torch.Tensor = x.logprobs.detach()\n",
        "logprobs: torch.Tensor = x.logprobs.detach()\n        logprobs.cpu()\n",
        "learner",
    ),
    Fault(
        "a new wait: a boolean index",
        "rft/trainer/loop/step_totals.py",
        "size = torch.where(mask, apart, 0)",
        "size = torch.where(mask, apart, 0) + 0 * apart[mask].sum()",
        "learner",
    ),
    Fault(
        "a host tensor given to a kernel",
        "rft/trainer/model/batch.py",
        "        targets=tensor(np.concatenate([r.tokens for r in rows])[mask], np.int64),\n",
        "        targets=torch.from_numpy(\n"
        "            np.concatenate([r.tokens for r in rows])[mask].astype(np.int64)\n        ),\n",
        "learner",
    ),
    Fault(
        "a [T, V] tensor",
        "rft/trainer/loop/learner.py",
        "        loss.backward()\n        needs_samples",
        "        whole = x.logprobs[:, None].expand(-1, 151936).clone()\n"
        "        (loss + 0 * whole.sum()).backward()\n        needs_samples",
        "memory",
    ),
    Fault(
        "a renamed field of vLLM",
        "rft/engine/vllm_args.py",
        "kv_cache_memory_bytes",
        "kv_cache_bytes_of_memory",
        "vllm",
    ),
    Fault(
        "ranks dealt across nodes",
        "rft/launch/cluster.py",
        "bundle_label_selector=labels",
        "bundle_label_selector=None",
        "nodes",
    ),
    Fault(
        "the old ceiling of the canary",
        "rft/types/noise.py",
        "max(_LEAST_LARGEST, mean, multiple * _WIDER * noise.largest)",
        "min(0.25, multiple * _WIDER * noise.largest)",
        "canary",
    ),
)


def played(root: Path, *tests: str) -> dict[str, float]:
    """Run pytest in `root`; return numbers of passed, failed and skipped tests and the seconds."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "pytest", "-q", "-m", "", "-p", "no:cacheprovider"]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        subprocess.run(
            [*command, f"--junitxml={report}", *tests],
            cwd=root,
            env=os.environ | {"PYTHONPATH": str(root)},
            stdout=sys.stderr,
            check=False,
        )
        suites = [*ElementTree.parse(report).getroot().iter("testsuite")] if report.exists() else []
    count = {"tests": 0, "failures": 0, "errors": 0, "skipped": 0}
    for suite in suites:
        count = {name: n + int(suite.get(name, 0)) for name, n in count.items()}
    failed = count["failures"] + count["errors"]
    return {
        "passed": count["tests"] - failed - count["skipped"],
        "failed": failed,
        "skipped": count["skipped"],
        "seconds": round(time.perf_counter() - began),
    }


def prove(names: Sequence[str], as_json: bool) -> int:
    """Play the parts and print their table."""
    rows = {name: played(ROOT, *PARTS[name].tests) for name in names}
    if as_json:
        print(json.dumps(rows, indent=2))
    else:
        print("| Part | Claim | Passed | Failed | Skipped | Seconds |\n|---|---|---|---|---|---|")
        for name, row in rows.items():
            cells = [name, PARTS[name].claim, *(f"{value:g}" for value in row.values())]
            print(f"| {' | '.join(cells)} |")
    return int(any(row["failed"] or not row["passed"] for row in rows.values()))


def break_it(names: Sequence[str]) -> int:
    """Plant each fault in a copy; print the part that finds it."""
    missed = 0
    print("| Fault | Part | Found |\n|---|---|---|")
    for fault in [f for f in FAULTS if f.found_by in names]:
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder)
            for name in COPIED:
                source = ROOT / name
                (shutil.copytree if source.is_dir() else shutil.copy)(source, copy / name)
            file = copy / fault.file
            text = file.read_text(encoding="utf-8")
            if fault.old not in text:
                raise SystemExit(f"{fault.file} has no {fault.old!r}: write the fault anew")
            file.write_text(text.replace(fault.old, fault.new), encoding="utf-8")
            result = played(copy, "-x", *PARTS[fault.found_by].tests)
        missed += not result["failed"]
        print(f"| {fault.name} | {fault.found_by} | {'yes' if result['failed'] else 'NO'} |")
    return int(missed > 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", action="append", choices=PARTS, help="only these parts")
    parser.add_argument("--break-it", action="store_true", help="plant faults and find them")
    parser.add_argument("--json", action="store_true", help="print the table as JSON")
    options = parser.parse_args()
    names = options.part or [*PARTS]
    return break_it(names) if options.break_it else prove(names, options.json)


if __name__ == "__main__":
    sys.exit(main())
