"""A model's image processor: pixel values, the tokens of an image and their places."""

import numpy as np
import pytest
from transformers import AutoTokenizer
from transformers.models.qwen2_5_vl import Qwen2_5_VLProcessor

from rft.errors import SetupError
from rft.images.processor import ImageProcessor
from rft.testing import tiny, tiny_vision
from rft.types.images import Image

RED = tiny_vision.picture((220, 30, 30), size=(32, 16))


@pytest.fixture(scope="module", params=tiny_vision.FAMILIES)
def folder(request, tmp_path_factory):
    return tiny_vision.make(tmp_path_factory.mktemp("vision") / "model", request.param)


def rendered(folder, images):
    """(text with a placeholder for each image, tokenizer)."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    parts = [{"type": "text", "text": "a"}, *(Image.of(x).part for x in images)]
    messages = [{"role": "user", "content": parts}]
    return tokenizer.apply_chat_template(messages, tokenize=False), tokenizer


def test_the_text_of_an_image_is_that_of_transformers(folder):
    processor = ImageProcessor.of_model(folder)
    done = processor.process(RED)
    if done.grid:
        theirs = Qwen2_5_VLProcessor.replace_image_token(
            type(
                "Stub",
                (),
                {"image_processor": processor._processor, "image_token": "<|image_pad|>"},
            )(),
            {"image_grid_thw": np.array([done.grid])},
            0,
        )
    else:
        theirs = f"\n\n<start_of_image>{'<image_soft_token>' * 4}<end_of_image>\n\n"
    assert done.text == theirs


def test_images_stand_at_their_tokens_in_order(folder):
    processor = ImageProcessor.of_model(folder)
    files = [RED, tiny_vision.picture((0, 0, 200), size=(16, 16))]
    text, tokenizer = rendered(folder, files)
    done = [processor.process(x) for x in files]
    tokens = tokenizer(processor.expand([text], done)[0], add_special_tokens=False)["input_ids"]
    places = processor.places(tokens, ["a", "b"], done)
    assert [p.sha256 for p in places] == ["a", "b"]
    assert [p.length for p in places] == [x.num_tokens for x in done]
    inside = {i for p in places for i in range(p.start, p.start + p.length)}
    assert inside == {i for i, t in enumerate(tokens) if t == processor.image_token_id}
    assert places[0].pixels == done[0].hash != places[1].pixels


def test_a_prompt_has_one_placeholder_for_each_image(folder):
    processor = ImageProcessor.of_model(folder)
    text, _ = rendered(folder, [RED, RED])
    with pytest.raises(ValueError, match=r"has 2 placeholders .* and 1 images"):
        processor.expand([text], [processor.process(RED)])
    with pytest.raises(ValueError, match="has 1 placeholder tokens of images, and its 0 images"):
        processor.places([5, processor.image_token_id], [], [])


def test_arguments_change_the_number_of_tokens(tmp_path):
    folder = tiny_vision.make(tmp_path / "model")
    usual = ImageProcessor.of_model(folder).process(tiny_vision.picture((9, 9, 9), size=(64, 64)))
    size = {"shortest_edge": 64, "longest_edge": 256}
    small = ImageProcessor.of_model(folder, args={"size": size})
    assert small.process(tiny_vision.picture((9, 9, 9), size=(64, 64))).num_tokens == 4
    assert usual.num_tokens == 16


def test_a_shape_that_the_model_cannot_read_is_refused(tmp_path):
    processor = ImageProcessor.of_model(tiny_vision.make(tmp_path / "model"))
    with pytest.raises(ValueError, match="an image of 1000 x 2 pixels: absolute aspect ratio"):
        processor.process(tiny_vision.picture((9, 9, 9), size=(1000, 2)))


def test_a_text_model_has_no_image_processor(tmp_path):
    assert ImageProcessor.of_model(tiny.make(tmp_path / "text")) is None
    assert ImageProcessor.of_model(tmp_path) is None


def test_images_in_memory_are_bounded(tmp_path, monkeypatch):
    processor = ImageProcessor.of_model(tiny_vision.make(tmp_path / "model"))
    first = processor.process(RED)
    assert processor.process(bytes(RED)) is first
    monkeypatch.setattr("rft.images.processor.CACHE_BYTES", first.pixel_values.nbytes)
    processor.process(tiny_vision.picture((0, 0, 200)))
    again = processor.process(RED)
    assert again is not first
    assert again.hash == first.hash


def test_arguments_make_an_image_smaller_and_are_those_of_the_family(tmp_path):
    folder = tiny_vision.make(tmp_path / "qwen")
    own = ImageProcessor.of_model(folder).process(RED)
    smaller = ImageProcessor.of_model(folder, args={"max_pixels": 128}).process(RED)
    assert (own.num_tokens, smaller.num_tokens) == (8, 2)
    assert own.size == smaller.size == (32, 16)
    assert own.hash != smaller.hash
    gemma = tiny_vision.make(tmp_path / "gemma", "gemma3")
    with pytest.raises(
        SetupError, match=r"image_processor_args: Gemma3\w+ of .* has no max_pixels"
    ):
        ImageProcessor.of_model(gemma, args={"max_pixels": 128})
