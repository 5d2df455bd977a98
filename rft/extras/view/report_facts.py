"""What there is to say about a run: its subject, numbers, answers, cost, alarms and versions, read
from its folder.

Depends on no HTML and no terminal.  Invariant: what a run does not have is left out, never guessed;
numbers are those of metrics.jsonl and of the ledger's views.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice
from operator import itemgetter
from typing import Any, TypeVar

from rft.api.stored_run import StoredRun
from rft.buffer.inspect import Shown, equation, look, written_by
from rft.buffer.query import READ_TIMEOUT_S, Questions
from rft.buffer.query import open_run as questions_of
from rft.config.save import changed, start_command
from rft.errors import ConfigError, RftError
from rft.extras.view.charts import may_be_charted
from rft.launch.progress import duration
from rft.launch.rundir import RunDir
from rft.monitor.curves import evaluations, is_main
from rft.monitor.pictures import covered
from rft.monitor.read import AllSeries, Records, Spent
from rft.types.metrics import MetricRecord

T = TypeVar("T")
ANSWERS = 3  # of each kind
_Z = 1.96  # 95 %
_TOTALS = ("perf/step_s", "time/wait_s", "engine/generated_tokens", "experience/response_tokens")
_TOOK = ("perf/step_s", "rollout/time/batch", "sync/total_s")  # what ended with a record, seconds


@dataclass(frozen=True)
class EvalPoint:
    """One evaluation of one taskset: its mean, a 95 % interval over tasks where one can be given,
    and what else was counted.
    """

    name: str
    step: int
    mean: float
    low: float | None
    high: float | None
    tasks: int | None
    runs: int | None
    failed: int | None


@dataclass(frozen=True)
class ShownAnswer:
    """An answer as it was stored.  `prompt` and `text` are what people read; `written_by` are
    weight versions.
    """

    kind: str
    id: str
    task: str
    prompt: str
    text: str
    reward: float | None
    equation: str
    gold: str
    status: str
    written_by: str
    trained_in: str


@dataclass(frozen=True)
class Raised:
    """One alarm: what the run wrote about it, in words."""

    name: str
    role: str
    step: int
    text: str


@dataclass(frozen=True)
class RunFacts:
    """All of it.  Lists are empty where a run has nothing of the kind; `missing` says why."""

    name: str
    folder: str
    phase: str
    reason: str
    steps: int
    subject: list[tuple[str, str]]
    series: AllSeries
    evals: list[EvalPoint]
    answers: list[ShownAnswer]
    cost: list[tuple[str, str]]
    alarms: list[Raised]
    changed: list[tuple[str, str]]  # keys that are not the default
    versions: list[tuple[str, str]]
    repeat: list[str]  # command lines
    missing: list[str] = field(default_factory=list)


class RunSummary:
    """What the records of a run come to, taken one at a time; `keys` are metrics whose series is
    kept besides those that are drawn.
    """

    def __init__(self, records: Iterable[MetricRecord], keys: Collection[str] = ()) -> None:
        self.series = AllSeries(
            lambda n: (
                n in keys or n.startswith(("eval/", "bench/")) or is_main(n) or may_be_charted(n)
            )
        )
        self.steps = 0
        self.answers_each = 0.0
        self.explored = False
        self.alarms: list[Raised] = []
        self.spent = Spent()
        self.totals: Counter[str] = Counter()
        self.ends = array("d")  # of what is measured, seconds; of mode bench nothing is
        self.took = array("d")
        for record in records:
            self._take(record)

    def _take(self, r: MetricRecord) -> None:
        self.series.take(r)
        self.spent.take(r)
        self.alarms += [
            Raised(n.removeprefix("alarm/"), r.role, r.step, " ".join(r.notes))
            for n in r.values
            if n.startswith("alarm/")
        ]
        v = {name: value for name, value in r.values.items() if math.isfinite(value)}
        self.totals.update({name: v[name] for name in _TOTALS if name in v})  # type: ignore[dict-item]  # not whole numbers
        self.explored |= r.role == "explorer"
        if r.role == "trainer":
            self.steps = r.step
        if v.get("rollout/runs"):
            groups = v.get("rollout/groups/accepted", 0.0) + v.get("rollout/groups/rejected", 0.0)
            self.answers_each = v["rollout/runs"] / groups if groups else 0.0
        names = (
            [n for n in v if n.startswith("eval/") and n.endswith("/time")]
            if r.role == "eval"
            else _TOOK
        )
        self.ends.append(r.time)
        self.took.append(max((v.get(n, 0.0) for n in names), default=0.0))


def collect(run: StoredRun, *, answers: bool = True, keys: Collection[str] = ()) -> RunFacts:
    """Raises ConfigError and RunFailed where what is there cannot be read at all; a part that is
    missing is named in `missing`.
    """
    if (run.run_dir / "stages.json").exists():
        below = ", ".join(sorted(str(p.parent) for p in run.run_dir.glob("*/state.json")))
        raise ConfigError(
            f"{run.run_dir} is a program of stages; give the folder of one ({below})", key="RUN"
        )
    missing: list[str] = []
    path = run.run_dir / "metrics.jsonl"
    records = Records(path)
    summary = RunSummary(records if path.is_file() else (), keys)
    if note := records.note if path.is_file() else f"{path}: nothing has been measured yet":
        missing.append(note)
    saved = _saved(run, missing)
    tree = saved.get("tree", {})

    def rows_or_reason(what: str, rows: Callable[[], list[T]]) -> list[T]:
        try:
            return rows()
        except (
            TypeError,
            ValueError,
            AttributeError,
            KeyError,
            ArithmeticError,
            RecursionError,
        ) as e:
            missing.append(f"{what}: not what a run writes ({type(e).__name__}: {e})")
            return []

    try:
        state = RunDir(run.run_dir).read_state()
    except ConfigError as e:
        state = {}
        missing.append(e.message)
    return RunFacts(
        name=run.run_dir.resolve().name,
        folder=str(run.run_dir),
        phase=RunDir(run.run_dir).phase(state)[0],
        reason=str(state.get("reason", "")),
        steps=summary.steps,
        subject=rows_or_reason("subject", lambda: _subject(tree, summary)),
        series=summary.series,
        evals=eval_points(summary.series),
        answers=rows_or_reason("answers", lambda: _answers(run, missing)) if answers else [],
        cost=rows_or_reason(
            "cost", lambda: _cost(tree, summary, RunDir(run.run_dir).worked_s(state))
        ),
        alarms=summary.alarms,
        changed=rows_or_reason("settings", lambda: list(changed(tree).items())),
        versions=rows_or_reason(
            "versions",
            lambda: [
                ("seed", str(tree.get("seed", "unknown"))),
                *saved.get("versions", {}).items(),
            ],
        ),
        repeat=rows_or_reason("command", lambda: _repeat(saved)),
        missing=missing,
    )


def _saved(run: StoredRun, missing: list[str]) -> dict[str, Any]:
    try:
        return run.saved()
    except ConfigError as e:
        missing.append(f"configuration: {e.message}")
        return {}


def _repeat(saved: dict[str, Any]) -> list[str]:
    if not saved.get("path"):
        return []
    tree = saved["tree"]
    command = start_command(
        tree.get("mode", ""),
        saved["path"],
        saved.get("overrides", ()),
        tree.get("plugin_dirs") or (),
    )
    return [f"# {saved['path']}  sha256 {saved.get('sha256')}", command]


def _subject(tree: dict[str, Any], measured: RunSummary) -> list[tuple[str, str]]:
    """Model, data and algorithm; a key that another version of rft did not have is left out."""

    def at(path: str, default: Any = None) -> Any:
        node: Any = tree
        for name in path.split("."):
            node = node.get(name) if isinstance(node, dict) else None
        return default if node is None else node

    explorer_input = at("buffer.explorer_input", {})
    train = [t for t in (explorer_input.get("taskset"), *explorer_input.get("tasksets", ())) if t]
    evaluated = explorer_input | {
        "default_workflow_type": explorer_input.get("default_eval_workflow_type")
        or explorer_input.get("default_workflow_type")
    }
    lora = " with LoRA" if at("model.lora_configs") else ""
    rate = at("algorithm.optimizer.lr")
    total = f" of {at('trainer.total_steps')}" if at("trainer.total_steps") else ""
    answers = f", {measured.answers_each:g} answers each" if measured.answers_each else ""
    rows = [
        ("model", f"{at('model.model_path')}{lora}" if at("model.model_path") else ""),
        (
            "algorithm",
            at("algorithm.algorithm_type", "")
            + ("" if rate is None else f", learning rate {rate:g}"),
        ),
        *[("trained on", _taskset(t, explorer_input)) for t in train],
        *[
            ("evaluated on", _taskset(t, evaluated))
            for t in explorer_input.get("eval_tasksets", ())
        ],
        ("a step", f"{at('buffer.batch_size')} tasks{answers}" if train else ""),
        ("mode", at("mode", "")),
        ("steps", f"{measured.steps}{total}" if measured.steps or tree else ""),
    ]
    return [(name, text) for name, text in rows if text]


def _taskset(t: dict[str, Any], explorer_input: dict[str, Any]) -> str:
    reward = (
        t.get("default_reward_fn_type")
        or explorer_input.get("default_reward_fn_type")
        or "the workflow's own"
    )
    workflow = t.get("default_workflow_type") or explorer_input.get("default_workflow_type")
    return (
        f"{t.get('name')}: {t.get('path')} ({t.get('split') or 'all'}), workflow {workflow}, "
        f"reward {reward}"
    )


# ------------------------------------------------------------ numbers


def eval_points(series: AllSeries) -> list[EvalPoint]:
    """Every evaluation by name and step; of a step that was written twice the later one."""
    points = []
    for name in sorted(evaluations(series.by_name)):
        prefix, mean, n = name.rpartition("/mean@")  # else a loss, beside which nothing is counted
        errors, *counted = (
            dict(series.points(f"{prefix}/{k}")) for k in (f"sem@{n}", "tasks", "runs", "failed")
        )
        for step, value in series.points(name):
            tasks, runs, failed = (_count(by_step.get(step)) for by_step in counted)
            low, high = interval(value, errors.get(step), tasks) if mean else (None, None)
            points.append(EvalPoint(name, step, value, low, high, tasks, runs, failed))
    return points


def _count(value: float | None) -> int | None:
    # nobody counts further
    return int(value) if value is not None and 0 <= value < 1 << 53 else None


def interval(
    mean: float, sem: float | None, tasks: int | None
) -> tuple[float | None, float | None]:
    """95 % interval of a mean over tasks: mean ± 1.96 standard errors.

    Without a standard error, or where it is 0 because all tasks came out alike, Wilson's for a
    share of `tasks` (Wilson 1927), if the mean can be one: then it is wide rather than narrow.
    """
    if sem:
        return mean - _Z * sem, mean + _Z * sem
    if not tasks or not 0 <= mean <= 1:
        return None, None
    scale = 1 + _Z**2 / tasks
    middle = mean + _Z**2 / (2 * tasks)
    half = _Z * math.sqrt(mean * (1 - mean) / tasks + _Z**2 / (4 * tasks**2))
    return max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale)


def _cost(
    tree: dict[str, Any], measured: RunSummary, worked_s: float | None = None
) -> list[tuple[str, str]]:
    """Hours, tokens and dollars; `worked_s`: of its processes, where that is known."""
    if not measured.series.names:
        return []
    seconds = worked_s or covered(measured.ends, measured.took)
    total = measured.totals
    spent = measured.spent
    busy = total["perf/step_s"] - total["time/wait_s"]
    ranks = tree.get("trainer", {}).get("world_size") or 1
    engines = (tree.get("explorer", {}).get("rollout_model") or {}).get("engine_num") or 1
    generated = total["engine/generated_tokens"]
    trained = total["experience/response_tokens"]
    rows = [
        (
            "duration",
            f"{duration(seconds)}, pauses between its processes left out" if seconds else "",
        ),
        (
            "trainer",
            f"{ranks} rank(s): {duration(ranks * seconds)} held, {duration(ranks * busy)} at work"
            if busy
            else "",
        ),
        (
            "engines",
            f"{engines} engine(s): {duration(engines * seconds)} held" if measured.explored else "",
        ),
        ("tokens generated", f"{generated:,.0f}" if generated else ""),
        ("tokens trained", f"{trained:,.0f}" if trained else ""),
        (
            "judges and servers",
            f"{spent.usd:.4f} USD" if spent.usd else "0 USD (no prices are set)",
        ),
    ]
    return [(name, text) for name, text in rows if text]


def first_and_last(points: Sequence[EvalPoint]) -> list[tuple[EvalPoint, EvalPoint]]:
    """Of each evaluation; `points` are in the order of `eval_points`."""
    by_name = [list(group) for _, group in groupby(points, key=lambda p: p.name)]
    return [(m[0], m[-1]) for m in by_name]


# ------------------------------------------------------------ answers


def _answers(run: StoredRun, missing: list[str]) -> list[ShownAnswer]:
    """The best, worst and most usual answers, each of different tasks; nothing is drawn at random,
    so a report can be repeated.
    """
    if not (run.run_dir / "buffer").is_dir():
        missing.append("answers: the run has no buffer of rollouts")
        return []
    answers = []
    shown = set[str]()
    try:
        with questions_of(run.run_dir) as questions:
            for kind, rows in zip(("best", "worst", "typical"), _looked_at(questions), strict=True):
                of_groups: dict[str, str] = {}
                for id, group in rows:
                    if id not in shown:
                        of_groups.setdefault(group, id)
                ids = list(of_groups.values())[:ANSWERS]
                shown.update(ids)
                answers += [_answer(kind, look(questions, id=id)[0]) for id in ids]
    except RftError as e:
        missing.append(f"answers: {e.message if isinstance(e, ConfigError) else e}")
        return []
    if not answers:
        missing.append("answers: nothing has been scored yet")
    return answers


def _looked_at(questions: Questions) -> list[list[tuple[str, str]]]:
    """(id, group) of the best, the worst, and those of the median reward, as far as a value that
    occurs can be it; at most so many of each.

    Of the last quarter of what was trained; where nothing was yet, of all there is.
    """
    with questions.ask(
        "SELECT max(used_step) FROM v_experiences", timeout_s=READ_TIMEOUT_S
    ) as answer:
        last = next(iter(answer.rows))[0]
    where = f"used_step > {last * 3 // 4} AND reward IS NOT NULL" if last else "reward IS NOT NULL"
    sql = (
        f"SELECT id, group_id, reward, count(*) OVER () FROM v_experiences WHERE {where} ORDER "
        f"BY reward DESC, id"
    )
    best = list[tuple[str, str]]()
    worst = list[tuple[str, str]]()
    typical = list[tuple[str, str]]()
    end = 0
    with questions.ask(sql, timeout_s=READ_TIMEOUT_S) as answer:
        for (_, count), rows in groupby(answer.rows, key=itemgetter(2, 3)):
            alike = [(id, group) for id, group, *_ in islice(rows, 40 * ANSWERS)]
            begin = end
            end = end + len(alike) + sum(1 for _ in rows)
            best = [*best, *alike][: 40 * ANSWERS]
            worst = [*alike, *worst][: 40 * ANSWERS]
            typical = alike if begin <= (count - 1) // 2 < end else typical
    return [best, worst, typical]


def _answer(kind: str, x: Shown) -> ShownAnswer:
    row = x.row
    task = f"{row['taskset']}[{row['task_index']}], run {row['run']}"
    return ShownAnswer(
        kind=kind,
        id=row["id"],
        task=task,
        prompt=row["prompt_text"] or "",
        text=row["response_text"] or "",
        reward=row["reward"],
        equation=equation(x),
        gold=str(x.payload.info.get("gold_answer", "")) if x.payload is not None else "",
        status=row["status"],
        written_by=written_by(row) or "unknown",
        trained_in=", ".join(f"step {u.version.step}" for u in x.uses if u.counts) or "no step",
    )
