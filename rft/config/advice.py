"""What is allowed and probably not meant, seen only in the resolved plan: idle GPUs, schedules without an end, evaluation temperatures.

Knows plans, not files.  Invariant: nothing here is an error; `resolve` refuses what cannot be right.
"""

from __future__ import annotations

from rft.config.plan import Plan
from rft.config.problems import Problems


def advise(plan: Plan, keys: dict[str, str], p: Problems) -> None:
    """`keys`: name of each taskset → its configuration key."""
    _gpus(plan, p)
    _schedule(plan, p)
    _evaluation(plan, keys, p)


def _gpus(plan: Plan, p: Problems) -> None:
    c = plan.cluster
    used = len(plan.engines) * c.gpus_per_engine + c.auxiliary_gpus + c.trainer_gpus
    if idle := c.gpus - used:
        p.warn(
            f"{idle} of {c.gpus} GPUs are used by no role (engines {len(plan.engines)} x {c.gpus_per_engine}"
            f"{f', auxiliary models {c.auxiliary_gpus}' if c.auxiliary_gpus else ''}, trainer {c.trainer_gpus}): raise "
            "trainer.world_size or explorer.rollout_model.engine_num, or lower cluster.gpu_per_node"
        )


def _schedule(plan: Plan, p: Problems) -> None:
    o = plan.learner.optim
    warmup = o.lr_warmup_steps < 0 and o.lr_warmup_steps_ratio > 0
    if plan.total_steps is None and (warmup or o.lr_scheduler_type != "constant"):
        what = " and ".join(
            [f"lr_warmup_steps_ratio {o.lr_warmup_steps_ratio:g}"] * warmup
            + [f"lr_scheduler_type {o.lr_scheduler_type}"] * (o.lr_scheduler_type != "constant")
        )
        p.warn(
            f"algorithm.optimizer: the number of train steps decides {what}, and it is known only once the tasksets are opened; write "
            "trainer.total_steps (or lr_warmup_steps) to fix the schedule"
        )


def _evaluation(plan: Plan, keys: dict[str, str], p: Problems) -> None:
    training = {t.sampling.temperature for t in plan.explorer.tasksets}
    for t in plan.explorer.eval_tasksets:
        key, temperature = keys.get(t.name, t.name), t.sampling.temperature
        if temperature == 0 and t.num_runs > 1:
            p.warn(f"{key}: temperature 0 gives the same answer {t.num_runs} times; use a temperature above 0 or one run")
        elif temperature > 0 and t.num_runs == 1:
            p.note(
                f"{key}: one answer per task at temperature {temperature:g} is a noisy measure; use temperature 0, or repeat_times of 4 "
                "or more for a mean"
            )
        if training and temperature > 0 and temperature not in training:
            trained = ", ".join(f"{x:g}" for x in sorted(training))
            p.note(f"{key}: evaluated at temperature {temperature:g}, trained at {trained}: the two rewards are not comparable")
