"""The judge: was anything lost, stored twice or trained twice?  Reads files only, the run's and
what its processes were told.

Rules: (1) what was acknowledged is stored, once, as it was; (2) no checkpoint was trained on a row
twice, and its uses are those that its trainer was told; (3) acked = used + leased + available +
explained, and every payload can be read; (4) a finished run used every row of the trained batches
exactly once and has the weights of a run without faults; (5) each used row has the trainer's
log-probs of one of its uses; (6) the images on the disk are those that the ledger names, which are
those that its groups show.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
from sqlalchemy import Connection, select

from rft.buffer.audit import audit_run
from rft.buffer.base import Audit
from rft.buffer.derived_state import chain, counted_uses
from rft.buffer.location import connect, find
from rft.buffer.schema import (
    experiences,
    groups,
    image_uses,
    images,
    payloads,
    token_logprobs,
    uses,
)
from rft.trainer.checkpoint import manifest as manifests
from rft.types.ids import ExperienceId, Version
from rft.types.token_logprobs import of_trainer
from tests.helpers.lab.plan import Plan, weights_of


class Verdict(msgspec.Struct, kw_only=True):
    """`problems` is empty when every rule holds."""

    problems: list[str]
    audit: Audit
    acked: int = 0  # rows that explorers were told to be stored
    lost: int = 0
    twice: int = 0  # rows used twice in the ancestry of a checkpoint
    step: int = 0  # of the newest checkpoint


def told(plan: Plan) -> list[dict[str, Any]]:
    """Every line of the event logs, by time."""
    lines = [
        x for path in sorted(plan.events.glob("*.jsonl")) for x in path.read_bytes().splitlines()
    ]
    return sorted((msgspec.json.decode(x) for x in lines), key=lambda e: e["at"])


def judge(plan: Plan, *, finished: bool = True, may_lose: bool = False) -> Verdict:
    """`finished`: the run has reached its last step.  `may_lose`: a power loss with `process`
    durability may shorten the ledger.
    """
    audit = audit_run(plan.run)
    problems = [
        *audit.problems,
        *([] if audit.balanced else [f"the audit does not balance: {audit}"]),
    ]
    verdict = Verdict(problems=problems, audit=audit)
    engine = connect(find(plan.run), read_only=True)
    try:
        with engine.connect() as tx, tx.begin():
            _acknowledged(tx, plan, verdict, may_lose)
            for path in manifests.committed(plan.checkpoints):
                found = manifests.read(path)
                _trained(tx, plan, verdict, found.version)
            _uses(tx, plan, verdict, may_lose)
            _kept(tx, verdict)
            if plan.images:
                _images(tx, plan, verdict)
    finally:
        engine.dispose()
    newest = manifests.latest(plan.checkpoints)
    verdict.step = newest.version.step if newest else 0
    if finished:
        if verdict.step != plan.steps:
            problems.append(f"the newest checkpoint is of step {verdict.step}, not {plan.steps}")
        elif newest is not None and (
            newest.folder / "trainer" / "weights"
        ).read_text() != weights_of(plan, plan.steps):
            problems.append("the weights are not those of a run without faults")
    return verdict


def _acknowledged(tx: Connection, plan: Plan, verdict: Verdict, may_lose: bool) -> None:
    stored = Counter(dict(tx.execute(select(groups.c.id, groups.c.num_rows)).all()))
    rows = set(tx.scalars(select(experiences.c.id)))
    acked = {r for e in told(plan) if e["event"] == "acked" for r in e["rows"]}
    verdict.acked = len(acked)
    verdict.lost = len(acked - rows)
    if verdict.lost and not may_lose:
        verdict.problems.append(
            f"{verdict.lost} acknowledged rows are not stored, e.g. {min(acked - rows)}"
        )
    if sum(stored.values()) != len(rows):
        verdict.problems.append(
            f"{sum(stored.values())} rows were acknowledged by the groups' headers, {len(rows)} "
            f"are stored"
        )


def _trained(tx: Connection, plan: Plan, verdict: Verdict, version: Version) -> None:
    """What a checkpoint was trained on: by content, so that a row that was explored again counts as
    the same one.
    """
    times = Counter(_content(u.experience) for u in tx.execute(counted_uses(chain(tx, version))))
    twice = [x for x, n in times.items() if n > 1]
    verdict.twice += len(twice)
    if twice:
        verdict.problems.append(
            f"checkpoint {version} was trained twice on {twice[0]} ({len(twice)} such rows)"
        )
    if (wanted := plan.trained(version.step)) != times.keys():
        missing = sorted(wanted - times.keys())
        more = sorted(times.keys() - wanted)
        verdict.problems.append(
            f"checkpoint {version}: rows not trained {missing[:3]}, rows too many {more[:3]}"
        )


def _uses(tx: Connection, plan: Plan, verdict: Verdict, may_lose: bool) -> None:
    """Each step that a trainer was told to be recorded has the uses of the rows it was given."""
    for e in told(plan):
        if e["event"] == "used":
            found = set(
                tx.scalars(
                    select(uses.c.experience).where(
                        uses.c.lineage == e["lineage"], uses.c.step == e["step"]
                    )
                )
            )
            if found != set(e["rows"]) and not (may_lose and not found):
                verdict.problems.append(
                    f"step {e['lineage']}:{e['step']} has {len(found)} uses, its trainer was told "
                    f"{len(e['rows'])}"
                )


def _kept(tx: Connection, verdict: Verdict) -> None:
    k = token_logprobs.c
    kept = {
        r.experience: r for r in tx.execute(select(k.experience, k.step, k.token_start, k.pairs))
    }
    if none := set(tx.scalars(select(uses.c.experience))) - kept.keys():
        verdict.problems.append(
            f"{len(none)} used rows have no log-probs of the trainer, e.g. {min(none)}"
        )
    for name, row in kept.items():
        numbers = set(of_trainer(row.token_start, row.pairs).logprobs[row.token_start :].tolist())
        if numbers != {-float(row.step)}:
            verdict.problems.append(
                f"{name} was used in step {row.step} and has the log-probs {numbers}"
            )


def _images(tx: Connection, plan: Plan, verdict: Verdict) -> None:
    """A file or segment may hold a copy that a killed append left, and a database none."""
    found = tx.execute(select(groups.c.id, groups.c.batch, groups.c.task)).all()
    shown = {g.id: plan.image(g.batch, g.task).sha256 for g in found}
    named = set(tx.scalars(select(images.c.sha256)))
    uses_noted = dict(tx.execute(select(image_uses.c.group_id, image_uses.c.sha256)).all())
    if named != set(shown.values()) or uses_noted != shown:
        verdict.problems.append(f"{len(found)} groups show {set(shown.values()) ^ named} otherwise")
    in_database = plan.storage == "sql"
    if in_database:
        blocks = [bytes(block) for block in tx.scalars(select(payloads.c.block))]
    else:
        suffixes = (".blk", ".seg")
        files = [p for p in (plan.run / "buffer").rglob("*") if p.suffix in suffixes]
        blocks = [file.read_bytes() for file in files]
    tasks = [(batch, task) for batch in range(plan.steps) for task, _ in plan.tasks(batch)]
    for name, data in plan.files(tasks).items():
        count = sum(block.count(data) for block in blocks)
        if bool(count) != (name in named) or (in_database and count > 1):
            verdict.problems.append(f"image {name} is on the disk {count} times")


def _content(experience: str) -> tuple[int, int, int, int]:
    id = ExperienceId.parse(experience)
    return (id.explorer, id.batch, id.task, id.run)
