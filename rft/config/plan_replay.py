"""Training on the rows of another run (buffer.trainer_input.replay_run)."""

from __future__ import annotations

from pathlib import Path

from rft.config.context import Context

_REPLAY = "buffer.trainer_input.replay_run"


def replays(ctx: Context) -> bool:
    """Whether the run trains on rows of another one."""
    return ctx.config.mode == "train" and ctx.config.buffer.trainer_input.replay_run is not None


def replay_run(ctx: Context) -> Path | None:
    """The folder of that run; what contradicts it is an error."""
    written = ctx.config.buffer.trainer_input.replay_run
    if written is None:
        return None
    if ctx.config.mode != "train":
        ctx.error(_REPLAY, f"is for mode: train, and mode is {ctx.config.mode}", given=written)
    if ctx.config.trainer.total_steps is None:
        ctx.error(
            "trainer.total_steps",
            f"is required with {_REPLAY}: how many steps of that run are trained again",
        )
    if ctx.config.monitor.keep_trainer_logprobs:
        ctx.error(
            "monitor.keep_trainer_logprobs",
            f"is kept in the ledger of the run that sampled; write false beside {_REPLAY}",
        )
    folder = Path(ctx.find(written)).expanduser().absolute()
    if folder == ctx.run_dir.absolute():
        ctx.error(
            _REPLAY, "is the folder of this run itself; give this run another name", given=written
        )
    return folder
