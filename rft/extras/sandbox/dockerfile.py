"""Carry out a Dockerfile inside a runtime of this machine, whose programs stand for its FROM.

Invariant: an instruction has the effect that it has in an image, or is refused by its name.
"""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from rft.types.runtimes import AgentRuntime, RuntimeFailed, packed, packed_folder

_IGNORED = ("CMD", "ENTRYPOINT", "LABEL", "EXPOSE", "MAINTAINER", "STOPSIGNAL")


@dataclass
class Steps:
    """`workdir` and `env` at the end; `runs`: (folder, command); `copies`: (sources, target); in
    `order`.
    """

    workdir: str = "/"
    env: dict[str, str] = field(default_factory=dict)
    order: list[tuple[str, list[str], str]] = field(default_factory=list)


def read_dockerfile(text: str) -> Steps:
    """Raises ValueError for an instruction that needs an image."""
    steps = Steps()
    joined = re.sub(r"\\\n", " ", "\n".join(x for x in text.splitlines() if not x.startswith("#")))
    for line in filter(None, (x.strip() for x in joined.splitlines())):
        name, _, rest = line.partition(" ")
        name, rest = name.upper(), rest.strip()
        if name == "FROM":
            if steps.order or steps.env or steps.workdir != "/":
                raise ValueError("a second FROM needs containers (sandbox: container)")
        elif name == "WORKDIR":
            steps.workdir = str(PurePosixPath(steps.workdir, rest))
        elif name == "ENV":
            steps.env |= _pairs(rest)
        elif name in ("COPY", "ADD") and not rest.startswith("--") and "://" not in rest:
            words = json.loads(rest) if rest.startswith("[") else shlex.split(rest)
            target = str(PurePosixPath(steps.workdir, words[-1]))
            steps.order.append(("copy", words[:-1], target + "/" * words[-1].endswith(("/", "."))))
        elif name == "RUN" and not rest.startswith("--"):
            command = json.loads(rest) if rest.startswith("[") else ["/bin/sh", "-c", rest]
            steps.order.append(("run", command, steps.workdir))
        elif name not in _IGNORED:
            raise ValueError(f"{line[:80]!r} needs containers (sandbox: container)")
    return steps


def _pairs(text: str) -> dict[str, str]:
    words = shlex.split(text)
    if "=" not in words[0]:
        return {words[0]: " ".join(words[1:])}
    return dict(word.partition("=")[::2] for word in words)


def carry_out(steps: Steps, context: Path, runtime: AgentRuntime, timeout_s: float) -> None:
    """Copy and run; `context`: the Dockerfile's folder.  Raises RuntimeFailed."""
    for kind, words, place in steps.order:
        if kind == "copy":
            for source in words:
                _copy(context, source, place, runtime)
            continue
        line = ["/bin/sh", "-c", 'mkdir -p "$0" && cd "$0" && exec "$@"', place, *words]
        done = runtime.exec(line, env=steps.env, timeout_s=timeout_s)
        if done.code != 0:
            raise RuntimeFailed(
                f"RUN {words[-1][:80]!r} ended with {done.code}: "
                f"{done.errors.decode(errors='replace')[-500:]}"
            )


def _copy(context: Path, source: str, target: str, runtime: AgentRuntime) -> None:
    path = (context / source).resolve()
    if not path.is_relative_to(context.resolve()) or not path.exists():
        raise RuntimeFailed(f"COPY {source}: {context} has no such file")
    if path.is_dir():
        runtime.put(packed_folder(path, target.rstrip("/")))
        return
    inside = target + path.name if target.endswith("/") else target
    runtime.put(packed({inside: path.read_bytes()}, mode=path.stat().st_mode & 0o777))
