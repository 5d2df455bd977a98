"""The training loop: its steps, its checkpoints, and what a crash may lose."""

from __future__ import annotations

from rft.config import plan_replay, plan_serve
from rft.config.context import Context, filled
from rft.config.roles import serves, trains
from rft.sync.settings import FullyAsyncSync
from rft.trainer.settings import TrainerSettings

MOST_LOST = 50  # train steps that a crash may lose without a warning
SERVICE_SAVE_S = 600.0


def _save_after(ctx: Context, steps: int | None) -> float:
    """When the age of a step makes a checkpoint due; warns where a crash would lose more than
    MOST_LOST of `steps` train steps.
    """
    t = ctx.config.trainer
    if t.save_after is None and serves(ctx.config) and not t.save_interval:
        ctx.derive(
            "trainer.save_after",
            SERVICE_SAVE_S,
            "a service has no end at which a checkpoint would be saved",
        )
        ctx.note(
            f"a crash loses no reward; train steps of the last {SERVICE_SAVE_S:.0f} s are repeated "
            f"(trainer.save_after)"
        )
        return SERVICE_SAVE_S
    lost = min(t.save_interval or plan_serve.ENDLESS, steps or 0)
    if not t.save_after and lost > MOST_LOST and trains(ctx.config):
        many = "all its train steps" if lost == plan_serve.ENDLESS else f"up to {lost} train steps"
        ctx.warn(
            f"a crash would lose {many} (trainer.save_interval is {t.save_interval}): write "
            f"trainer.save_interval: {MOST_LOST // 2}, "
            f"or trainer.save_after: {SERVICE_SAVE_S:.0f}, the seconds after which a step is in a "
            f"checkpoint"
        )
    return t.save_after or 0.0


def trainer(ctx: Context, device: str, steps: int | None) -> TrainerSettings:
    """The training loop of `steps` train steps, None until that is known; what makes a step is
    filled in by the mode's builder.
    """
    t = ctx.config.trainer
    later = ctx.chosen(
        "trainer.checkpoint.async_save",
        t.checkpoint.async_save,
        device == "cuda",
        f"trainer on {device}",
    )
    always = "hf_model" in t.checkpoint.save_contents
    if always:
        ctx.derive(
            "trainer.save_hf_checkpoint", "always", "hf_model in trainer.checkpoint.save_contents"
        )
    s = ctx.config.synchronizer
    return filled(
        TrainerSettings,
        t,
        t.checkpoint,
        s,
        total_steps=steps or 0,
        batch_groups=None,
        batch_rows=None,
        save_after_s=_save_after(ctx, steps),
        save_hf_checkpoint="always" if always else t.save_hf_checkpoint,
        async_save=later,
        checkpoint_dir=ctx.run_dir / "checkpoints",
        read_deadline_s=plan_serve.read_deadline_s(
            ctx, ctx.config.buffer.trainer_input.experience_buffer.max_read_timeout
        ),
        require_batches=s.require_batches
        if isinstance(s, FullyAsyncSync)
        else s.sync_interval  # a window is sampled whole before its first step
        if ctx.config.mode == "colocate"
        else 1,
        seed=ctx.config.seed,
        replay_run=plan_replay.replay_run(ctx),
    )
