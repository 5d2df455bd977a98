"""Writes docs/measured/from-verl-files.md: what `rft convert verl` makes of the launch scripts that
veRL publishes.  Names and outcomes only.

    python scripts/verl_files.py NAME=FOLDER ... [--draft] [--write]

FOLDER is a checkout of veRL, or a folder of one, and NAME what the page calls it, as
`b178a3cd=../verl`.  Every script that starts one of veRL's programs is converted; exit code 1 if
one of them ends in anything but an account or a refusal.  With `--draft` every module counts as
main_ppo, and what is open as a comment, as forks need it.
"""

from __future__ import annotations

import re
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from rft.errors import ConfigError  # noqa: E402
from rft.extras.migrate.convert import programs  # noqa: E402
from rft.extras.migrate.convert.launch import Launch, read_launch  # noqa: E402
from rft.extras.migrate.convert.recording import Inputs  # noqa: E402
from rft.extras.migrate.convert.verl import Conversion, convert, draft  # noqa: E402

PAGE = ROOT / "docs" / "measured" / "from-verl-files.md"
OURS = "FSDP and vLLM"
OUTCOMES = ("clean", "asks", "to decide", "refused", "crash")
HEAD = """# veRL's scripts

What `rft convert verl` makes of the launch scripts in veRL's repository at {revisions}. Names and outcomes only; `--report` gives the
account of one of them. Written by `python scripts/verl_files.py --write`.

- *clean*: the configuration says what the script says, and `rft check --schema-only` accepts it.
- *asks*: the same, with questions: a value that only the environment tells has veRL's default.
- *to decide*: nothing is written before a person has decided about the arguments or keys that are named; `--allow` leaves them out.
- *refused*: another program, or an argument that cannot be read.

"""


@dataclass(frozen=True)
class File:
    """One script: where it stands, what it needs, and what became of it."""

    source: str
    name: str
    group: str
    outcome: str
    why: str = ""

    @property
    def row(self) -> str:
        return f"| {self.name} | {self.outcome}{f': {self.why}' if self.why else ''} |"


def files(source: str, folder: Path, as_trainer: bool) -> Iterator[File]:
    for path in sorted(folder.rglob("*.sh")):
        text = path.read_text(errors="replace")
        own = as_trainer and "actor_rollout_ref." in text
        if own or programs.mentions(text) or re.search(r"-m (verl|recipe)\.[\w.]*main", text):
            yield one(source, str(path.relative_to(folder)), path, as_trainer)


def one(source: str, name: str, path: Path, as_trainer: bool) -> File:
    text = path.read_text(errors="replace")
    try:
        launch = read_launch(path, Inputs(other="main_ppo" if as_trainer else None))
        done = draft(launch) if as_trainer else convert(launch)
    except ConfigError as e:
        return File(source, name, _needs(text, None), "refused", _short(e.errors[0].message))
    except Exception:
        traceback.print_exc()
        return File(source, name, _needs(text, None), "crash")
    return File(source, name, _needs(text, launch), *_outcome(done))


def _outcome(done: Conversion) -> tuple[str, str]:
    named = [r.argument.key for r in done.refused] + [e.partition(":")[0] for e in done.errors]
    if named:
        return "to decide", ", ".join(dict.fromkeys(named))
    return ("asks" if done.questions else "clean"), ""


def _needs(text: str, launch: Launch | None) -> str:
    """The group on the page, by what the script needs."""
    given = (
        {a.key: str(a.value) for a in (*launch.arguments, *launch.options)}
        if launch is not None
        else {}
    )
    keys = " ".join([*given, *given.values()])
    code = text.lower()
    if launch is None:
        keys = code
    if "megatron" in keys:
        return "Megatron"
    for engine in ("sglang", "trtllm"):
        if (
            given.get(
                "actor_rollout_ref.rollout.name", engine if f"rollout.name={engine}" in code else ""
            )
            == engine
        ):
            return {"sglang": "SGLang", "trtllm": "TensorRT-LLM"}[engine]
    if given.get("trainer.device") == "npu":
        return "NPU"
    if "data.image_key" in given or re.search(r"geo3k|[-_]vl[-_]|deepeyes", keys.lower()):
        return "images"
    return OURS


def _short(message: str) -> str:
    """The cause without file, line and list."""
    text = re.sub(r"^[\w.-]+\.sh, line \d+: ", "", message).partition(";")[0]
    return text.replace("|", "\\|")[:100]


def page(found: list[File], revisions: str) -> str:
    groups = sorted({f.group for f in found}, key=lambda g: (g != OURS, g))
    lines = [
        "| Needs | scripts | " + " | ".join(OUTCOMES[:-1]) + " |",
        "|---|---|" + "---|" * (len(OUTCOMES) - 1),
    ]
    for group in groups:
        counts = Counter(f.outcome for f in found if f.group == group)
        lines.append(
            f"| {group} | {counts.total()} | "
            + " | ".join(str(counts[o]) for o in OUTCOMES[:-1])
            + " |"
        )
    for group in groups:
        for source in dict.fromkeys(f.source for f in found if f.group == group):
            rows = [f.row for f in found if (f.group, f.source) == (group, source)]
            lines += ["", f"## {group}, {source}", "", "| Script | Outcome |", "|---|---|", *rows]
    return HEAD.format(revisions=revisions) + "\n".join(lines) + "\n"


def main(given: list[str]) -> int:
    write = "--write" in given
    sources = dict(a.split("=", 1) for a in given if "=" in a)
    if not sources:
        print(__doc__)
        return 2
    as_trainer = "--draft" in given
    found = [f for name, folder in sources.items() for f in files(name, Path(folder), as_trainer)]
    text = page(found, " and ".join(sources))
    if write:
        PAGE.write_text(text, encoding="utf-8")
    print(
        text
        if not write
        else "\n".join(
            line for line in text.splitlines() if re.match(r"\| (Needs|[A-Za-z ]+) \| [\ds]", line)
        )
    )
    return int(any(f.outcome == "crash" for f in found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
