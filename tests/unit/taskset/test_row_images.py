"""Images of rows: every usual form of data sets, and what is refused with the row's number."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rft.errors import ConfigError
from rft.taskset.base import Taskset
from rft.taskset.files import open_path
from rft.taskset.settings import FormatSettings, PromptLimit, TasksetSettings
from rft.testing import tiny, tiny_vision
from rft.types.images import Image

RED, BLUE = (tiny_vision.picture(c) for c in ((220, 30, 30), (40, 60, 220)))
URL = f"data:image/png;base64,{base64.b64encode(RED).decode()}"


def opened(path: Path, **fmt: object) -> Taskset:
    more = {k: fmt.pop(k) for k in ("prompt_limit", "skip_bad_rows") if k in fmt}
    settings = TasksetSettings(
        name="pictures",
        path=str(path),
        workflow="math_workflow",
        format=FormatSettings(**{"image_key": "images", **fmt}),  # type: ignore[arg-type]
        **more,
    )
    return Taskset(settings, open_path(settings))


def jsonl(folder: Path, *rows: dict) -> Path:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps({"response": "r", **row}) + "\n" for row in rows))
    return file


def parts(task):
    """The content of the last message, with the names of images."""
    names = {Image.of(RED).sha256: "RED", Image.of(BLUE).sha256: "BLUE"}
    return [p.get("text") or names[p["image"]] for p in task.chat()[-1]["content"]]


def test_paths_data_urls_and_lists_go_before_the_text_or_to_markers(tmp_path):
    (tmp_path / "red.png").write_bytes(RED)
    (tmp_path / "blue.png").write_bytes(BLUE)
    rows = opened(
        jsonl(
            tmp_path,
            {"prompt": "what?", "images": "red.png"},
            {"prompt": "a<image>b <image>", "images": [URL, {"path": "blue.png"}]},
            {"prompt": "<image><image>", "images": ["red.png", "red.png"]},
            {"prompt": "a text with <image>"},
            {"prompt": "none", "images": []},
        )
    )
    assert parts(rows.task(0)) == ["RED", "what?"]
    assert parts(rows.task(1)) == ["a", "RED", "b ", "BLUE"]
    assert parts(rows.task(2)) == ["RED", "RED"]
    assert len(rows.task(2).images) == 1
    assert rows.task(3).prompt == "a text with <image>"
    assert rows.task(4).images == ()
    assert rows.task(0).row["images"] == [Image.of(RED).sha256]
    assert rows.task(0).images == (Image.of(RED),)


def test_parquet_bytes_and_veRLs_columns(tmp_path):
    file = tmp_path / "train.parquet"
    table = pa.Table.from_pylist(
        [
            {
                "data_source": "geo3k",
                "prompt": [{"role": "user", "content": "<image>How many?"}],
                "images": [{"bytes": RED, "path": None}],
                "reward_model": {"ground_truth": "3", "style": "rule"},
            }
        ]
    )
    pq.write_table(table, file)
    fmt = {"preset": "verl", "prompt_type": "messages", "messages_key": "prompt"}
    task = opened(file, response_key="reward_model.ground_truth", **fmt).task(0)
    assert parts(task) == ["RED", "How many?"]
    assert task.row["images"] == [Image.of(RED).sha256]
    with pytest.raises(
        ConfigError, match=r"column 'images' holds images, .* name .* in format.image_key"
    ):
        opened(file, image_key="")


def test_content_parts_of_openai_and_of_data_sets(tmp_path):
    own = [{"type": "image_url", "image_url": {"url": URL}}, {"type": "text", "text": "a"}]
    next_one = [{"type": "text", "text": "b"}, {"type": "image"}]
    file = jsonl(
        tmp_path,
        {"message": [{"role": "user", "content": own}]},
        {"message": [{"role": "user", "content": next_one}], "images": [URL]},
    )
    rows = opened(file, prompt_type="messages")
    assert parts(rows.task(0)) == ["RED", "a"]
    assert parts(rows.task(1)) == ["b", "RED"]
    json.dumps(rows.task(0).row)
    alone = opened(
        jsonl(tmp_path, {"message": [{"role": "user", "content": own}]}),
        prompt_type="messages",
        image_key="pictures",
    )
    assert parts(alone.task(0)) == ["RED", "a"]


BAD = {
    "truncated": ({"images": URL[:-80]}, "image 1 of 1: a d"),
    "address": ({"images": "https://192.0.2.1/a.png"}, "is an address; download it"),
    "absent": ({"images": "absent.png"}, "does not exist"),
    "a long name": ({"images": "a" * 5000}, r"a{100,300} does not exist, .* or a data URL"),
    "base64 alone": ({"images": URL.split(",")[1]}, r"does not exist, .* data URL \(data:"),
    "no image in it": ({"images": [{"x": 1}]}, r"\{'x': 1\} \(dict\) is no image"),
    "number": ({"images": [5]}, r"5 \(int\) is no image"),
    "markers": ({"prompt": "<image><image>", "images": [URL]}, "2 places .* and 1 images"),
    "a marker alone": ({"prompt": "<image>", "images": None}, "1 places .* and 0 images"),
    "too many": ({"prompt": "<image>", "images": [URL, URL]}, "1 places .* and 2 images"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_image_is_refused_with_its_row(tmp_path, name):
    row, reason = BAD[name]
    file = jsonl(tmp_path, {"prompt": "fine"}, {"prompt": "what?", **row})
    with pytest.raises(ConfigError, match=rf"rows.jsonl:2: .*{reason}"):
        opened(file)
    assert len(opened(file, skip_bad_rows=True)) == 1


def test_a_key_that_no_row_has_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no key 'pictures'"):
        opened(jsonl(tmp_path, {"prompt": "a"}), image_key="pictures")


def test_tokens_of_images_count_and_a_model_of_texts_is_refused(tmp_path):
    folder = tiny_vision.make(tmp_path / "vision")
    file = jsonl(tmp_path, {"prompt": "colour?", "images": URL}, {"prompt": "colour?"})
    # 24 x 16 pixels: 6 tokens, between two others
    limit = PromptLimit(model_path=str(folder), max_tokens=18)
    assert opened(file, prompt_limit=limit).left_out.rows == (0,)
    assert (
        opened(file, prompt_limit=PromptLimit(model_path=str(folder), max_tokens=20)).left_out
        is None
    )
    fewer = PromptLimit(
        model_path=str(folder), max_tokens=18, image_processor_args={"max_pixels": 128}
    )
    assert opened(file, prompt_limit=fewer).left_out is None
    text = PromptLimit(model_path=str(tiny.make(tmp_path / "text")), max_tokens=100)
    with pytest.raises(ConfigError, match=r"row 0 of .* is no model of a family"):
        opened(file, prompt_limit=text)
