"""What `rft check` has found: errors, warnings, notes, the plan, what its tasks look like and how
much memory it takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rft.config.plan import Plan, schedule
from rft.config.schema.root import RunConfig
from rft.config.schema.source import plain
from rft.errors import ConfigError
from rft.secrets import redact

if TYPE_CHECKING:
    from rft.config.memory_estimate import RoleMemory
    from rft.config.playable import Need


@dataclass(frozen=True, kw_only=True)
class Report:
    """Everything `rft check` found.  `plan` is None where the errors left none."""

    errors: tuple[ConfigError, ...] = ()
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    config: RunConfig | None = None
    plan: Plan | None = None
    tasksets: tuple[Any, ...] = ()  # preview.TasksetPreview
    model: dict[str, Any] = field(default_factory=dict)
    memory: tuple[RoleMemory, ...] = ()  # empty where the model's sizes are not known
    schema_only: bool = False
    needs: tuple[Need, ...] = ()  # with `schema_only`: what is named and not here

    @property
    def ok(self) -> bool:
        return not self.errors

    @property
    def outcome(self) -> str:
        """One line for a whole file: refused, needs, runs with warnings, or runs as it is."""
        if self.errors:
            return f"refused because of {len(self.errors)} error(s)"
        if self.needs:
            return f"needs {', '.join(dict.fromkeys(need.kind for need in self.needs))}"
        return "runs with the listed warnings" if self.warnings else "runs as it is"

    def to_json(self) -> dict[str, Any]:
        """Plain values, secrets redacted."""
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
    """What one explore step and the whole run amount to.  `tasksets`: previews; without them
    prompts and epochs are unknown.
    """
    from rft.config.describe import timeline
    from rft.config.offline_plan import summary

    # loads numpy, which a file that is wrong by itself does without
    from rft.config.plan_serve import ENDLESS
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
        "timeline": picture(schedule(plan.sync)),
    }
