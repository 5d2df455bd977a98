"""A run on pictures is exported, replayed, scored again and trained on elsewhere: the same rows, the
same files.
"""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from rft.buffer.experience_export import export
from rft.buffer.query import Questions, open_run
from rft.buffer.replay_reader import ReplayReader
from rft.errors import ConfigError
from rft.launch.execute import execute
from rft.taskset.offline_data import open_offline_data, sides
from rft.taskset.settings import FormatSettings, OfflineDataSettings, TasksetSettings
from rft.testing import tiny_vision
from rft.types.block import decode
from rft.types.experience import Experience
from tests.helpers import runs

STEPS = 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_vision.make(tmp_path_factory.mktemp("vision") / "model")


@pytest.fixture(scope="module")
def run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("run")
    return execute(TINY, given(model, root, "first"), in_process=True).run_dir


TINY = Path(__file__).with_name("tiny_config.yaml")


def given(model: Path, root: Path, name: str, *more: str) -> list[str]:
    source = "buffer.explorer_input.taskset"
    return [
        f"model.model_path={model}",
        f"checkpoint_root_dir={root}",
        f"name={name}",
        runs.parity(root),
        "buffer.explorer_input.eval_tasksets=[]",
        f"{source}.path=rft.testing.tiny_vision:colour_tasks",
        f"{source}.format.image_key=images",
        f"trainer.total_steps={STEPS}",
        *more,
    ]


def stored(questions: Questions) -> dict[str, Experience]:
    with questions.ask("SELECT id FROM v_experiences ORDER BY id") as answer:
        ids = [id for (id,) in answer.rows]
    return questions.payload(ids)


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_an_exported_run_has_the_same_rows_and_files(
    run: Path, model: Path, tmp_path: Path, suffix: str
) -> None:
    to = tmp_path / f"rows.{suffix}"
    with open_run(run) as questions:
        count = export(questions, to, tokens=True)
        rows = stored(questions)
        files = {n: questions.image(n) for n in {p.sha256 for x in rows.values() for p in x.images}}
        with pytest.raises(ConfigError, match=r"rows\.images, for its images, exists"):
            export(
                questions,
                tmp_path / f"rows.{'jsonl' if suffix == 'parquet' else 'parquet'}",
                tokens=True,
            )
    assert count == len(rows) and len(files) > STEPS
    assert {p.name: p.read_bytes() for p in (tmp_path / "rows.images").iterdir()} == files
    assert all(sha256(data).hexdigest() == name for name, data in files.items())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["rows.images", to.name]
    read: list[dict[str, Any]] = (
        pq.read_table(to).to_pylist()
        if suffix == "parquet"
        else [json.loads(line) for line in to.read_text().splitlines()]
    )
    for row in read:
        (place,) = rows[row["id"]].images
        assert row["image_places"] == [
            {
                "sha256": place.sha256,
                "start": place.start,
                "length": place.length,
                "grid": list(place.grid),
                "pixels": place.pixels,
            }
        ]
        assert row["images"] == [f"rows.images/{place.sha256}"]
    form = FormatSettings(prompt_type="messages", messages_key="messages", image_key="images")
    source = TasksetSettings(name="again", path=str(to), workflow="", format=form)
    data = open_offline_data(
        OfflineDataSettings(rows=source, kind="chats", model_path=str(model), max_tokens=200)
    )
    assert data.images(data.records) == files
    for record, row in zip(data.records, read, strict=True):
        x = rows[row["id"]]
        assert row["tokens"] == x.tokens.tolist() and row["loss_mask"] == x.loss_mask.tolist()
        ((tokens, _),) = sides(record)
        assert record.images == x.images
        start = int(x.loss_mask.argmax())
        assert tokens[:start].tolist() == x.tokens[:start].tolist()


def test_a_replayed_run_gets_the_same_rows_files_and_weights(
    run: Path, model: Path, tmp_path: Path
) -> None:
    with open_run(run) as questions:
        rows = stored(questions)
        with ReplayReader(run) as reader:
            for step in range(1, STEPS + 1):
                lease = reader.rows_of(step)
                for x in decode(lease.frame):
                    assert x.images == rows[str(x.id)].images
                    assert all(
                        lease.images[p.sha256] == questions.image(p.sha256) for p in x.images
                    )
    more = ("mode=train", f"buffer.trainer_input.replay_run={run}")
    again = execute(TINY, given(model, tmp_path, "again", *more), in_process=True).run_dir
    name = f"checkpoints/global_step_{STEPS}/huggingface/model.safetensors"
    assert (again / name).read_bytes() == (run / name).read_bytes()
