"""A run that is started again says where it goes on."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rft.buffer.buffer import Buffer
from rft.buffer.settings import BufferSettings
from rft.config.load import load
from rft.config.save import save
from rft.errors import ConfigError, ConfigErrors
from rft.launch.execute import _changes
from rft.launch.modes import TrainOffline
from rft.launch.rundir import RunDir
from rft.launch.start import begin
from rft.testing.storage_contract import fill
from rft.trainer.checkpoint import manifest as manifests
from rft.types.ids import Version
from rft.types.ports import Consumption


async def test_a_second_start_without_a_checkpoint_says_that_it_begins_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "rft.launch.start")
    said = []
    for _ in range(2):
        buffer = Buffer(BufferSettings(folder=tmp_path / "buffer"))
        await buffer.open()
        try:
            start = await begin(buffer, None)
        finally:
            await buffer.close()
        said.append(
            (start.lineage, [r.getMessage() for r in caplog.records if "starting" in vars(r)])
        )
    assert said == [
        (1, []),
        (2, ["no checkpoint was saved before the stop; starting again at step 0"]),
    ]


@pytest.mark.parametrize(("kept", "rows"), [("keep", True), ("keep", False), ("orphan", True)])
async def test_rows_that_are_kept_are_of_the_same_run(
    tmp_path: Path, kept: str, rows: bool
) -> None:
    """Also without a checkpoint: they would be trained with the rewards of another configuration."""
    file = tmp_path / "c.yaml"
    file.write_text(
        f"model: {{model_path: m}}\nbuffer: {{resume_rows: {kept}, batch_size: 4, explorer_input: "
        f"{{taskset: {{path: x}}}}}}"
    )
    run = RunDir(tmp_path / "run")
    save(load(file), run.path)
    plan: Any = SimpleNamespace(
        resume_mode="auto", buffer=BufferSettings(folder=run.path / "buffer", resume_rows=kept)
    )  # type: ignore[arg-type]
    assert _changes(load(file), plan, run) == []
    buffer = Buffer(plan.buffer)
    await buffer.open()
    await buffer.start_lineage(None, None)
    if rows:
        await fill(buffer, 1, 0)
    await buffer.close()
    other = load(file, ["buffer.batch_size=8"])
    if kept == "orphan" or not rows:
        assert _changes(other, plan, run) == []
        return
    with pytest.raises(ConfigErrors, match=r"buffer\.batch_size: was 4"):
        _changes(other, plan, run)


def test_a_run_that_would_end_where_another_one_ended_is_refused(tmp_path: Path) -> None:
    """Steps count on from the checkpoint that resume_from_path names: a run of fewer would train
    nothing, and say that it is done.
    """
    folder = tmp_path / "other" / "checkpoints" / "global_step_7"
    folder.mkdir(parents=True)
    used = Consumption(num_uses=3, digest="ab" * 16, cursor=4)
    manifests.commit(folder, version=Version(2, 7), parent=None, consumption=used)
    run = RunDir(tmp_path / "run")

    def begun(total: int) -> TrainOffline:
        plan: Any = SimpleNamespace(
            continue_from_checkpoint=True,
            resume_from_path=folder,
            trainer=SimpleNamespace(total_steps=total),
            run_dir=run.path,
        )
        return TrainOffline(plan)

    assert begun(8).done(run) is None
    for total in (5, 7):
        with pytest.raises(
            ConfigError, match=rf"trainer.total_steps: is {total}, and .*global_step_7.*more than 7"
        ):
            begun(total).done(run)
