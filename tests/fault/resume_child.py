"""Plays runs in forked children of one process, each again and again with other faults that may
kill it, until it is done.  Used by tests.

    python resume_child.py PLANS.json      [{"name": ..., "config": ..., "changes": [...], "faults": ["trainer.used:2", ...]}, ...]

Prints one line of JSON for each attempt: the run's name, its fault, and how it ended (-9: killed).
Importing torch costs more than such a run does, so children inherit it; nothing has been computed
before they are forked.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path

import torch
import transformers.models.llama.modeling_llama  # noqa: F401

import rft.engine.transformers
import rft.launch.modes
import rft.trainer.loop.learner  # noqa: F401
from rft.launch.execute import execute


def attempt(config: Path, changes: list[str], fault: str) -> int:
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = 1
    try:
        os.environ["RFT_FAULT"] = fault
        torch.set_num_threads(1)
        sys.stdout = sys.stderr
        execute(config, changes, in_process=True)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    for plan in json.loads(Path(sys.argv[1]).read_text()):
        for fault in [*plan["faults"], ""]:
            code = attempt(Path(plan["config"]), plan["changes"], fault)
            print(json.dumps({"name": plan["name"], "fault": fault, "code": code}), flush=True)
            if code != -9:
                break


if __name__ == "__main__":
    main()
