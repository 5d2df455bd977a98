"""Rows with images to train on: answers and pairs become the tokens that an engine would see, and
keep the names and places of their images.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rft.engine.chat import Chat, load_images, load_tokenizer
from rft.engine.settings import EngineSettings
from rft.errors import ConfigError
from rft.taskset.offline_data import OfflineData, open_offline_data, sides
from rft.taskset.settings import FormatSettings, OfflineDataSettings, TasksetSettings
from rft.testing import tiny, tiny_vision
from rft.types.images import Image
from rft.types.ports import GenerateRequest

RED = tiny_vision.picture((220, 30, 30), size=(32, 16))
BLUE = tiny_vision.picture((40, 60, 220), size=(20, 31))
URL = f"data:image/png;base64,{base64.b64encode(RED).decode()}"
CHAT = {"prompt_type": "messages", "messages_key": "messages"}
Opened = Callable[..., OfflineData]


@pytest.fixture(scope="module", params=["qwen2_5_vl", "gemma3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_vision.make(tmp_path_factory.mktemp("vision") / "model", request.param)


@pytest.fixture
def given(tmp_path: Path, folder: Path) -> Opened:
    (tmp_path / "blue.png").write_bytes(BLUE)

    def make(rows: list[dict[str, Any]] | Path, kind: Any = "chats", **more: Any) -> OfflineData:
        file = rows if isinstance(rows, Path) else tmp_path / "rows.jsonl"
        if isinstance(rows, list):
            file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        form = FormatSettings(**{"image_key": "images", **more.pop("form", {})})
        source = TasksetSettings(name="mine", key="mine", path=str(file), workflow="", format=form)
        common = {"model_path": str(folder), "max_tokens": 200}
        return open_offline_data(OfflineDataSettings(rows=source, kind=kind, **{**common, **more}))

    return make


def text(value: str) -> dict[str, str]:
    return {"type": "text", "text": value}


def seen(folder: Path, messages: list[dict[str, Any]], *files: bytes) -> tuple[list[int], Any]:
    """Return the tokens and places that an engine makes of a prompt."""
    settings = EngineSettings(name="e", model_path=str(folder), engine_type="transformers")
    tokenizer = load_tokenizer(settings)
    chat = Chat(settings, tokenizer, len(tokenizer), load_images(settings))
    request = GenerateRequest(messages=tuple(messages), images=tuple(map(Image.of, files)))
    tokens = chat.encode(request)
    return tokens, chat.places(request, tokens)


def test_an_answer_has_the_prompt_that_an_engine_would_see(given: Opened, folder: Path) -> None:
    data = given(
        [
            {"prompt": "what?", "images": URL, "response": "r"},
            {"prompt": "text alone", "response": "t"},
            {"prompt": "a<image>b<image>", "images": [URL, "blue.png"], "response": "rb"},
        ]
    )
    parts = [
        [Image.of(RED).part, text("what?")],
        "text alone",
        [text("a"), Image.of(RED).part, text("b"), Image.of(BLUE).part],
    ]
    for record, content, files in zip(data.records, parts, ([RED], [], [RED, BLUE]), strict=True):
        ((tokens, mask),) = sides(record)
        prompt, places = seen(folder, [{"role": "user", "content": content}], *files)
        assert tokens[: len(prompt)].tolist() == prompt
        assert mask.tolist() == (np.arange(len(tokens)) >= len(prompt)).tolist()
        assert record.images == places
        assert data.images([record]) == {Image.of(x).sha256: x for x in files}
    assert data.trained_tokens == 2 + 2 + 3


def test_every_turn_of_a_conversation_with_images(given: Opened, folder: Path) -> None:
    talk = [
        {"role": "user", "content": [{"type": "image"}, text("colour?")]},
        {"role": "assistant", "content": [text("r")]},
        {"role": "user", "content": [text("and "), {"type": "image"}]},
        {"role": "assistant", "content": "b"},
    ]
    row = {"messages": talk, "images": [URL, "blue.png"]}
    (record,) = given([row], form=CHAT, every_turn=True).records
    ((tokens, mask),) = sides(record)
    first, second = record.images
    ends = np.flatnonzero(np.diff(mask.astype(int)))
    assert len(ends) == 3  # two answers, the second ends the row
    assert first.start + first.length <= ends[0] < second.start
    named = [{**m, "content": m["content"]} for m in talk[:3]]
    named[0]["content"] = [Image.of(RED).part, text("colour?")]
    named[1]["content"] = "r"
    named[2]["content"] = [text("and "), Image.of(BLUE).part]
    prompt, places = seen(folder, named, RED, BLUE)
    assert tokens[: len(prompt)].tolist() == prompt
    assert record.images == places


PAIR = {"chosen": "r", "rejected": "b"}


@pytest.mark.parametrize("form", ["texts", "TRL", "whole chats", "parquet"])
def test_both_answers_of_a_pair_follow_the_same_image(
    given: Opened, folder: Path, tmp_path: Path, form: str
) -> None:
    user = {"role": "user", "content": [{"type": "image"}, text("what?")]}
    answers = {
        name: [{"role": "assistant", "content": [text(value)]}] for name, value in PAIR.items()
    }
    if form == "texts":
        data = given([{"prompt": "what?", "images": [URL], **PAIR}], "pairs")
    elif form == "TRL":
        data = given([{"prompt": [user], "images": [URL], **answers}], "pairs")
    elif form == "whole chats":
        chats = {name: [user, *answer] for name, answer in answers.items()}
        data = given([{"images": [URL], **chats}], "pairs")
    else:  # Arrow gives each part the keys of the others, with nulls
        row = {"prompt": [user], "images": [{"bytes": RED, "path": None}], **answers}
        pq.write_table(pa.Table.from_pylist([row]), tmp_path / "train.parquet")
        data = given(tmp_path / "train.parquet", "pairs")
    (record,) = data.records
    messages = [{"role": "user", "content": [Image.of(RED).part, text("what?")]}]
    prompt, places = seen(folder, messages, RED)
    assert record.images == places
    for tokens, mask in sides(record):
        assert tokens[~mask].tolist() == prompt
        assert mask.sum() == 2
    assert data.images(data.records) == {Image.of(RED).sha256: RED}


def test_a_row_that_names_its_images_has_those_of_its_column(given: Opened) -> None:
    """As `rft buffer export` writes them."""
    content = [Image.of(BLUE).part, text("and"), Image.of(BLUE).part]
    talk = [{"role": "user", "content": content}, {"role": "assistant", "content": "b"}]
    (record,) = given([{"messages": talk, "images": ["blue.png"]}], form=CHAT).records
    assert [place.sha256 for place in record.images] == [Image.of(BLUE).sha256] * 2


def refused(given: Opened, match: str, *rows: dict[str, Any], **more: Any) -> None:
    with pytest.raises(ConfigError, match=match):
        given([{"prompt": "fine", "response": "r"}, *rows], **more)


def test_what_cannot_be_trained_is_refused_with_its_row(given: Opened, tmp_path: Path) -> None:
    row = {"prompt": "what?", "images": URL, "response": "r"}
    placeholder = ("<|image_pad|>", "<start_of_image>")
    refused(given, r"row 1 of .* has [23] placeholders", {**row, "prompt": "".join(placeholder)})
    refused(
        given,
        "row 1 of .* is no model of a family",
        row,
        model_path=str(tiny.make(tmp_path / "text")),
    )
    refused(given, "rows.jsonl:2: image 1 of 1: a d", {**row, "images": URL[:-80]})
    refused(given, "column 'images' is not empty; .* format.image_key", row, form={"image_key": ""})
    refused(
        given, "row 1 of .* has .* tokens, more than model.max_model_len 11", row, max_tokens=11
    )
    shows = [text("r"), {"type": "image"}]
    talk = [{"role": "user", "content": "draw"}, {"role": "assistant", "content": shows}]
    with pytest.raises(ConfigError, match=r"row 0 of .*, message 1: an answer to imitate shows"):
        given([{"messages": talk, "images": [URL]}], form=CHAT)


def test_an_image_that_changes_after_the_start_stops_the_run(given: Opened, tmp_path: Path) -> None:
    data = given([{"prompt": "what?", "images": "blue.png", "response": "b"}])
    before = data.fingerprint
    (tmp_path / "blue.png").write_bytes(tiny_vision.picture((1, 2, 3), size=(20, 31)))
    with pytest.raises(ConfigError, match=r"row 0 of .* its images are no longer those"):
        data.images(data.records)
    after = given([{"prompt": "what?", "images": "blue.png", "response": "b"}])
    assert after.fingerprint != before  # a run does not go on with other pictures
