"""A whole set of tasks looked at: gold answers, duplicates, lengths, templates, kinds of tasks.
What `rft data audit` prints.

Depends on tasksets, rewards and a model's chat template, on no engine.  Invariant: every row is
read, or the number that was is told; nothing is generated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from rft.config.plan import Plan
from rft.errors import ConfigError
from rft.preflight.compared_prompts import NUMBER, TaskText, near, rendered, shared_prompts
from rft.preflight.conversation_check import left_out
from rft.preflight.gold_answers import score_gold_answers
from rft.preflight.model_folder import ModelFiles
from rft.taskset.base import Taskset
from rft.types.task import Task
from rft.workflow.recipes import Recipes

SHOWN = 5  # rows that a finding names
Progress = Callable[[str], None]


@dataclass(frozen=True)
class AuditFinding:
    """One thing that is wrong (`error`) or worth knowing; `rows` are examples, as "taskset[index]"."""

    error: bool
    what: str
    rows: tuple[str, ...] = ()


@dataclass
class TasksetAudit:
    """Counts of one set.  Tokens are those of the prompt after the chat template; None: no
    tokenizer counts them.
    """

    name: str
    is_eval: bool
    rows: int
    read: int = 0
    gold_checked: int = 0
    gold_full: int = 0
    duplicates: int = 0
    near_duplicates: int = 0
    tokens: tuple[int, int, int] | None = None  # median, 95th percentile, longest
    too_long: int = 0
    example: str = ""  # of a prompt after the chat template
    kinds: list[tuple[str, int]] = field(default_factory=list)  # most frequent first
    findings: list[AuditFinding] = field(default_factory=list)


def audit(
    plan: Plan,
    opened: Sequence[Taskset],
    model: ModelFiles | None,
    *,
    most: int = 0,
    progress: Progress = lambda text: None,
) -> tuple[list[TasksetAudit], list[AuditFinding]]:
    """Each taskset, and what is wrong between them.  `most`: rows of each that are read, evenly
    spread; 0: all.
    """
    audits = []
    texts = {}
    for taskset in opened:
        audit_of, task_texts = _audit_taskset(plan, taskset, model, most, progress)
        audits.append(audit_of)
        texts[taskset.settings.name] = task_texts
    progress("comparing tasksets")
    return audits, _between(audits, texts)


def _audit_taskset(
    plan: Plan, taskset: Taskset, model: ModelFiles | None, most: int, progress: Progress
) -> tuple[TasksetAudit, list[TaskText]]:
    name = taskset.settings.name
    count = len(taskset)
    indexes = (
        range(count)
        if not most or count <= most
        else sorted({i * count // most for i in range(most)})
    )
    out = TasksetAudit(name, taskset.settings.is_eval, count)
    tasks = []
    for n, i in enumerate(indexes):
        try:
            tasks.append(taskset.task(i))
        except ConfigError as e:
            out.findings.append(
                AuditFinding(True, f"row {i} cannot be read: {e.message}", (f"{name}[{i}]",))
            )
        if n % 500 == 0:
            progress(f"{name}: read {n} of {len(indexes)} rows")
    out.read = len(tasks)
    _lengths(plan, out, tasks, model, progress)
    _golds(out, tasks, progress)
    texts = [TaskText.of(t) for t in tasks]
    _inside(out, texts, progress)
    kinds = Counter(
        f"{t.workflow}, reward {t.reward or 'none'}: {NUMBER.sub('#', x.text)[:70]}"
        for t, x in zip(tasks, texts, strict=True)
    )
    out.kinds = kinds.most_common(SHOWN)
    return out, texts


def _lengths(
    plan: Plan,
    out: TasksetAudit,
    tasks: Sequence[Task],
    model: ModelFiles | None,
    progress: Progress,
) -> None:
    engine = plan.engines[0]
    limit = plan.engines[0].max_prompt_tokens
    if model is None:
        return
    lengths: dict[int, int] = {}
    for n, task in enumerate(tasks):
        try:
            text = rendered(task, model, engine)
        except ConfigError as e:
            out.findings.append(
                AuditFinding(
                    True, f"the chat template fails: {e.message}", (f"{out.name}[{task.index}]",)
                )
            )
            return
        except ValueError:
            return  # the workflow makes its own prompts from rows
        if reason := left_out(task, model, engine):
            out.findings.append(AuditFinding(True, reason, (f"{out.name}[{task.index}]",)))
            return
        out.example = out.example or text
        if model.can_count:
            lengths[task.index] = model.count_tokens(text)
        if n % 500 == 0:
            progress(f"{out.name}: counted {n} of {len(tasks)} prompts")
    if not lengths:
        return
    values = np.array(list(lengths.values()))
    out.tokens = (int(np.median(values)), int(np.percentile(values, 95)), int(values.max()))
    over = [i for i, n in lengths.items() if limit is not None and n > limit]
    cut = tasks[0].prompt_truncation
    out.too_long = len(over)
    if over:
        then = (
            "their runs fail" if cut == "error" else f"they are cut (prompt_truncation_side: {cut})"
        )
        what = (
            f"{len(over)} prompts are longer than model.max_prompt_tokens {limit} (longest: "
            f"{values.max()}); {then}"
        )
        out.findings.append(AuditFinding(cut == "error", what, _named(out.name, over)))


def _golds(out: TasksetAudit, tasks: Sequence[Task], report_progress: Progress) -> None:
    recipes = Recipes()
    rewards = [recipes.find(task).reward for task in tasks]

    def progress(n: int) -> None:
        if n % 100 == 0:
            report_progress(f"{out.name}: scored {n} of {len(tasks)} gold answers")

    gold_scores = [g for g in score_gold_answers(tasks, rewards, progress) if g is not None]
    out.gold_checked = len(gold_scores)
    out.gold_full = sum(g.full for g in gold_scores)
    broken = [g for g in gold_scores if g.failed]
    low = [g for g in gold_scores if not g.failed and not g.full]
    if broken:
        what = f"the reward {broken[0].failure(f'{len(broken)} rows')}"
        out.findings.append(AuditFinding(True, what, _named(out.name, [g.index for g in broken])))
    if low:
        best, worst = max(g.best or 0.0 for g in low), min(low, key=lambda g: g.best or 0.0)
        what = (
            f"{len(low)} of {len(gold_scores)} gold answers do not get full marks: at most {best:g}; "
            f"{worst.gold[:60]!r} gets {worst.best:g}"
        )
        out.findings.append(AuditFinding(True, what, _named(out.name, [g.index for g in low])))
    if none := sum(t.truth is None for t in tasks):
        out.findings.append(AuditFinding(False, f"{none} of {len(tasks)} rows have no gold answer"))


# ------------------------------------------------------------ duplicates


def _inside(out: TasksetAudit, texts: Sequence[TaskText], progress: Progress) -> None:
    first: dict[str, TaskText] = {}
    same = []
    conflicts = []
    for t in texts:
        if (other := first.setdefault(t.text, t)) is not t:
            same.append(t.index)
            conflicts += [t.index] if other.truth != t.truth else []
    progress(f"{out.name}: comparing {len(first)} prompts")
    different = list(first.values())
    alike = near(different)
    out.duplicates = len(same)
    out.near_duplicates = len(alike)
    if conflicts:
        what = f"{len(conflicts)} rows ask what an earlier row asks, with another gold answer"
        out.findings.append(AuditFinding(True, what, _named(out.name, conflicts)))
    if same:
        out.findings.append(
            AuditFinding(
                False, f"{len(same)} rows ask what an earlier row asks", _named(out.name, same)
            )
        )
    if alike:
        rows = tuple(
            f"{out.name}[{different[i].index}] ~ [{different[j].index}]" for i, j in alike[:SHOWN]
        )
        out.findings.append(
            AuditFinding(False, f"{len(alike)} rows are nearly the same as an earlier one", rows)
        )


def _between(
    audits: Sequence[TasksetAudit], texts: dict[str, list[TaskText]]
) -> list[AuditFinding]:
    """Rows of evaluation sets that are in training sets too."""
    out = []
    for train, held_out in ((t, h) for t in audits if not t.is_eval for h in audits if h.is_eval):
        for pairs, sign, how in zip(
            shared_prompts(texts[train.name], texts[held_out.name]), "=~", _HOW, strict=True
        ):
            if pairs:
                rows = tuple(
                    f"{held_out.name}[{t.index}] {sign} {train.name}[{u.index}]"
                    for t, u in pairs[:SHOWN]
                )
                what = (
                    f"{len(pairs)} of {held_out.read} rows of {held_out.name} are "
                    f"{how.format(train.name)}"
                )
                out.append(AuditFinding(True, what, rows))
    return out


_HOW = ("in {} too", "nearly the same as one of {}")


def _named(name: str, indexes: Sequence[int]) -> tuple[str, ...]:
    return tuple(f"{name}[{i}]" for i in indexes[:SHOWN])
