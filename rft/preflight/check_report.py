"""The result of `rft check`: errors, warnings, notes, the plan, task previews and memory estimate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rft.config.plan import Plan
from rft.config.schema.root import RunConfig
from rft.config.schema.source import plain
from rft.errors import ConfigError
from rft.secrets import redact

if TYPE_CHECKING:
    from rft.preflight.memory_terms import RoleMemory
    from rft.preflight.missing_dependencies import Need


@dataclass(frozen=True, kw_only=True)
class Report:
    """Everything that `rft check` found.  `plan` is None if errors prevented it."""

    errors: tuple[ConfigError, ...] = ()
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    config: RunConfig | None = None
    plan: Plan | None = None
    tasksets: tuple[Any, ...] = ()  # preview.TasksetPreview
    model: dict[str, Any] = field(default_factory=dict)
    memory: tuple[RoleMemory, ...] = ()  # empty if the model's sizes are unknown
    schema_only: bool = False
    needs: tuple[Need, ...] = ()  # with `schema_only`: named but missing things

    @property
    def ok(self) -> bool:
        return not self.errors

    @property
    def outcome(self) -> str:
        """Return one line for the file: refused, needs, runs with warnings, or runs as it is."""
        if self.errors:
            return f"refused because of {len(self.errors)} error(s)"
        if self.needs:
            return f"needs {', '.join(dict.fromkeys(need.kind for need in self.needs))}"
        return "runs with the listed warnings" if self.warnings else "runs as it is"

    def to_json(self) -> dict[str, Any]:
        """Return plain values, secrets redacted."""
        return {
            "ok": self.ok,
            "outcome": self.outcome,
            "errors": [
                plain({"key": e.key, "given": e.given, "message": redact(e.message)})
                for e in self.errors
            ],
            "warnings": [redact(w) for w in self.warnings],
            "notes": [redact(n) for n in self.notes],
            "needs": plain(self.needs),
            "plan": plain(self.plan) if self.plan is not None else None,
            "tasksets": plain(self.tasksets),
            "model": plain(self.model),
            "values": self._values(),
            "step": step(self.plan, self.tasksets) if self.plan is not None else None,
            "memory": [{**plain(r), "bytes": r.nbytes} for r in self.memory],
        }

    def _values(self) -> list[dict[str, str]]:
        from rft.config.describe import values

        if self.config is None or self.plan is None:
            return []
        return [
            {"key": k, "value": redact(v), "from": redact(where)}
            for k, v, where in values(self.config, self.plan)
        ]


def step(plan: Plan, tasksets: Sequence[Any] = ()) -> dict[str, Any]:
    """Return the size of one explore step and of the run.

    `tasksets`: previews; without them prompts and epochs are unknown.
    """
    from rft.config.describe import timeline

    # imported here because it loads numpy, which stage 1 avoids for an invalid file
    from rft.config.plan_serve import ENDLESS
    from rft.preflight.offline_rows import summary
    from rft.sync.timeline import picture

    if plan.trainer.alone:
        return summary(plan, tuple(tasksets))
    train = [t for t in tasksets if not t.is_eval]
    prompts = [t.mean_prompt_tokens for t in train if t.mean_prompt_tokens is not None]
    rows = sum(t.num_rows for t in train)
    batches = plan.explorer.total_batches
    runs = plan.runs_per_step
    most = max(
        (t.sampling.max_tokens for t in plan.explorer.tasksets),
        default=plan.learner.max_response_tokens,
    )
    return {
        "train_steps": None if plan.total_steps == ENDLESS else plan.total_steps,
        "explore_steps": None if batches == ENDLESS else batches or None,
        "epochs": round(batches * plan.explorer.batch_size / rows, 2) if rows and batches else None,
        "tasks": plan.explorer.batch_size,
        "experiences": runs,
        "prompt_tokens": round(runs * sum(prompts) / len(prompts)) if prompts else None,
        "max_generated_tokens": runs * most,
        "staleness_bound": plan.staleness_bound,
        "sync": timeline(plan),
        "timeline": picture(plan.schedule),
    }
