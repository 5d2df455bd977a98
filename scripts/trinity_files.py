"""What becomes of Trinity-RFT's example files: docs/measured/from-trinity-files.md, and the same on
the terminal.

    python scripts/trinity_files.py FOLDER [--plugins FOLDER] [--json FILE] [--write
    "agentscope-ai/Trinity-RFT, 2026-06-25"] [--add]

FOLDER holds the YAML files as they were published (their text is in no part of this repository).
Each is converted with `rft convert trinity` and checked twice: by itself, as `rft check --schema-only` does, and whole, with a tiny model
and rows that have the columns it names in place of its own.  With `--add` the rows of the page
whose files FOLDER does not have stay as they were measured.
"""

from __future__ import annotations

import argparse
import base64
import collections
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rft.config.load import stage_names
from rft.errors import ConfigError
from rft.extras.migrate.convert.report import yaml_text
from rft.extras.migrate.convert.trinity import convert_file
from rft.plugins import REGISTRY, load_shipped, refused_names
from rft.preflight.check import check
from rft.preflight.check_report import Report
from rft.taskset.settings import FormatSettings
from rft.testing.tiny_vision import picture

PAGE = Path(__file__).parent.parent / "docs" / "measured" / "from-trinity-files.md"
SECTIONS = {"model", "buffer", "algorithm", "explorer", "trainer", "mode"}
GIVEN = ("model", "data")
"""What a reader has to bring anyway."""


@dataclass
class Outcome:
    name: str
    outcome: str  # runs as it is, runs with warnings, needs, refused
    why: tuple[str, ...] = ()  # of a file that needs something or is refused
    warnings: tuple[str, ...] = ()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--plugins",
        type=Path,
        help="folder on sys.path: the files' own workflows with their imports changed",
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--write",
        metavar="SOURCE",
        help=f"write {PAGE.name}; SOURCE: where the files are from, and when",
    )
    parser.add_argument("--add", action="store_true", help="keep the page's rows of other files")
    given = parser.parse_args()
    if given.plugins:
        sys.path.insert(0, str(given.plugins))
    folder = given.folder.absolute()
    os.chdir(folder.parent)  # paths in the files are relative to the folder around the examples
    with tempfile.TemporaryDirectory() as work:
        found = [judged(path, str(path.relative_to(folder)), Path(work)) for path in files(folder)]
    if given.add:
        measured = {one.name for one in found}
        found = sorted(
            [*found, *(row for row in rows_of_page() if row.name not in measured)],
            key=lambda one: one.name,
        )
    for one in found:
        print(f"{one.name:70} {one.outcome}")
        for line in (*one.why, *(f"warning: {w}" for w in one.warnings)):
            print(f"    {line}")
    print(summary(found))
    if given.json:
        given.json.write_text(json.dumps([asdict(one) for one in found], indent=1))
    if given.write:
        PAGE.write_text(page(found, given.write))
    return 0


def files(folder: Path) -> Iterator[Path]:
    """Configurations, each text once; not what other programs read, nor the half that is read with
    the file whose trainer_config_path names it.
    """
    texts: set[str] = set()
    for path in sorted(folder.rglob("*.y*ml")):
        text = path.read_text()
        sections = {line.partition(":")[0] for line in text.splitlines()}
        if SECTIONS & sections and "actor_rollout_ref" not in sections and text not in texts:
            texts.add(text)
            yield path


def judged(path: Path, name: str, work: Path) -> Outcome:
    for variable in ("TASKSET", "SFT_DATASET", "MODEL", "CRITIC_MODEL", "AUX_MODEL"):
        os.environ.setdefault(f"TRINITY_{variable}_PATH", "org/name")
    try:
        file = convert_file(path)
        path = work / "converted.yaml"
        path.write_text(yaml_text(file.values))
        stages = stage_names(path) or ("",)
    except ConfigError as e:
        return Outcome(name, "refused", tuple(map(str, e.errors)))
    alone = [check(path, schema_only=True, stage=stage) for stage in stages]
    if refused := _errors(alone):
        return Outcome(name, "refused", refused)
    warnings = tuple(dict.fromkeys(w for r in alone for w in r.warnings))
    needs = tuple(dict.fromkeys(str(n) for r in alone for n in r.needs if n.kind not in GIVEN))
    if needs:
        return Outcome(name, "needs", needs, warnings)
    whole = [
        check(path, brought(report, work), stage=stage)
        for report, stage in zip(alone, stages, strict=True)
    ]
    if lacking := _errors(whole):
        return Outcome(
            name, "refused", tuple(f"with model and data: {x}" for x in lacking), warnings
        )
    return Outcome(name, "runs with warnings" if warnings else "runs as it is", (), warnings)


def _errors(reports: list[Report]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(str(e) for r in reports for e in r.errors))


# ---------------------------------------------------------------- a model and data in place of the
# file's own


def brought(report: Report, work: Path) -> list[str]:
    """Overrides that name the tiny model and made rows."""
    assert report.plan is not None and report.config is not None
    plan = report.plan
    buffers = report.config.buffer.trainer_input.auxiliary_buffers
    sets = (*plan.explorer.tasksets, *plan.explorer.eval_tasksets)
    model = tiny(work, images=any(t.format.image_key for t in sets))
    found = [f"model.model_path={model}", f"checkpoint_root_dir={work}/runs"]
    if plan.learner.critic.model_path != plan.learner.model_path:
        found.append(f"model.critic_model_path={model}")
    for i, m in enumerate(plan.auxiliary):
        if m.engines[0].external is None:
            found.append(f"explorer.auxiliary_models[{i}].model_path={model}")
    base = "buffer.explorer_input"
    train = plan.explorer.tasksets
    evals = plan.explorer.eval_tasksets
    keys = (
        [f"{base}.taskset"]
        if len(train) == 1
        else [f"{base}.tasksets[{i}]" for i in range(len(train))]
    )
    for t, key in zip(
        (*train, *evals),
        [*keys, *(f"{base}.eval_tasksets[{i}]" for i in range(len(evals)))],
        strict=True,
    ):
        found.append(f"{key}.path={rows(t.format, work, t.name, numbers=t.feature_keys)}")
    data = plan.trainer.offline_data
    expert = plan.expert
    if data is not None:
        path = rows(data.rows.format, work, "data", data.chosen_key, data.rejected_key)
        found.append(f"buffer.trainer_input.experience_buffer.path={path}")
    if expert is not None:
        found += [
            f"buffer.trainer_input.auxiliary_buffers.{name}.path={rows(expert.rows.format, work, name)}"
            for name in buffers
        ]
    return found


def tiny(work: Path, *, images: bool = False) -> Path:
    """A tiny model, of texts or of images too, with room for the longest contexts; nothing is run."""
    from rft.testing import tiny, tiny_vision

    folder = work / ("sees" if images else "model")
    if not folder.exists():
        (tiny_vision if images else tiny).make(folder)
        config = json.loads((folder / "config.json").read_text())
        config.get("text_config", config)["max_position_embeddings"] = 1 << 17
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def rows(
    form: FormatSettings, work: Path, name: str, *more: str, numbers: Sequence[str] = ()
) -> Path:
    """Rows with every column that `form` names."""
    chat = [{"role": "user", "content": "1 + 1?"}]
    row: dict[str, Any] = {
        "nums": [1, 2],
        "target": 3,
        "seed": 1,
        "size": 4,
        "p": 0.8,
        **dict.fromkeys(numbers, 0.5),
    }
    texts = {
        form.prompt_key: "1 + 1?",
        form.response_key: "2",
        **{column: f"{i}" for i, column in enumerate(more)},
    }
    if form.image_key:
        file = base64.b64encode(picture((220, 30, 30))).decode()
        row[form.image_key] = [f"data:image/png;base64,{file}"]
        texts[form.prompt_key] = "<image>1 + 1?"
    lists = {form.messages_key: [*chat, {"role": "assistant", "content": "2"}]}
    if form.prompt_type == "messages":
        lists[form.prompt_key] = chat
    for column, value in {**texts, **lists}.items():
        place = row
        *above, last = column.split(".")
        for part in above:
            place = place.setdefault(part, {})
        place[last] = value
    path = work / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row | {"id": i}) + "\n" for i in range(4096)))
    return path


# ---------------------------------------------------------------- the page


def rows_of_page() -> Iterator[Outcome]:
    """What was measured before.  A reason that is only a name tells what is said of the name today."""
    load_shipped()
    for line in PAGE.read_text().splitlines():
        if not line.startswith("| `"):
            continue
        name, outcome, why = (cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:4])
        count = re.fullmatch(r"runs with (\d+) warning\(s\)", outcome)
        warnings = ("",) * int(count[1]) if count else ()
        reasons = tuple(_today(one) for one in why.split("<br>")) if why else ()
        yield Outcome(
            name.strip("`"), "runs with warnings" if count else outcome, reasons, warnings
        )


def _today(why: str) -> str:
    named = re.search(r"(workflow|reward) '([\w:.]+)': ", why)
    if named is None:
        return why
    kind, name = named.groups()
    told = refused_names(kind).get(name)
    if name in REGISTRY.names(kind):
        told = "it is here since this file was measured, and the file could not be had again"
    return why if told is None else f"{why[: named.end()]}{told}"


def summary(found: list[Outcome]) -> str:
    counts = collections.Counter(one.outcome for one in found)
    passed = len(found) - counts["refused"]
    plays = counts["runs as it is"] + counts["runs with warnings"]
    kinds = ", ".join(f"{n} {what}" for what, n in counts.most_common())
    return (
        f"{len(found)} files: {passed} pass `rft check --schema-only` ({passed / len(found):.0%}), "
        f"{plays} run with a model and data given ({plays / len(found):.0%}); {kinds}."
    )


def page(found: list[Outcome], source: str) -> str:
    lines = [
        "# Trinity-RFT's example files",
        "",
        f"What `rft check` says of each, converted, made by `scripts/trinity_files.py` from the files of "
        f"{source},",
        "with the extras that workflows name installed, own Python files with their imports "
        "changed, and a tiny model and made rows in",
        "place of theirs. A file *needs* what its reason names; a refused one runs once that is "
        "changed. What means something else here",
        "is told in [Coming from Trinity-RFT](howto/from-trinity.md).",
        "",
        summary(found),
        "",
        "| File | Outcome | What to know |",
        "|---|---|---|",
    ]
    for one in found:
        said = "<br>".join(map(_cell, one.why))
        outcome = (
            f"runs with {len(one.warnings)} warning(s)"
            if one.warnings and not one.why
            else one.outcome
        )
        lines.append(f"| `{one.name}` | {outcome} | {said} |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.split("  (line")[0].replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    raise SystemExit(main())
