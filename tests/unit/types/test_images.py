"""Images of an experience: their places are checked, and rows without any are encoded as before."""

import msgspec
import numpy as np
import pytest

from rft.types.block import decode, encode
from rft.types.completion import Completion, VersionSpan
from rft.types.experience import Experience, from_completions
from rft.types.ids import GroupId, Version
from rft.types.images import Image, ImagePlace, names_in
from rft.types.task import SamplingArgs

PLACE = ImagePlace("a" * 64, 1, 2, (1, 2, 4), "hash")


def row(*places: ImagePlace, trained: int = 1) -> Experience:
    mask = np.zeros(6, np.bool_)
    mask[6 - trained :] = True
    return Experience(
        id=GroupId(1, 0, 0, 0).run(0),
        taskset="t",
        task_index=0,
        workflow="w",
        status="complete",
        tokens=np.arange(6, dtype=np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, np.float32(-1), np.float32(0)),
        version_spans=(VersionSpan(Version(1, 0), 0, 6),),
        reward=1.0,
        images=places,
    )


def completion(prompt: list[int], answer: list[int], *places: ImagePlace) -> Completion:
    return Completion(
        prompt_tokens=np.array(prompt, np.int32),
        tokens=np.array(answer, np.int32),
        logprobs=np.full(len(answer), -1, np.float32),
        text="x",
        finish_reason="stop",
        version_spans=(VersionSpan(Version(1, 0), 0, len(answer)),),
        sampling=SamplingArgs(),
        images=places,
    )


def joined(*completions: Completion) -> Experience:
    names = {"taskset": "t", "task_index": 0, "workflow": "w", "reward": 1.0}
    return from_completions(GroupId(1, 0, 0, 0).run(0), completions, **names)


def test_places_survive_a_block_and_rows_without_images_do_not_name_them():
    assert decode(encode([row(PLACE)]))[0].images == (PLACE,)
    assert b"images" not in encode([row()])
    assert decode(encode([row()]))[0].images == ()


@pytest.mark.parametrize(
    "places",
    [
        [ImagePlace("a", 5, 2)],
        [ImagePlace("a", 1, 0)],
        [ImagePlace("a", -1, 2)],
        [PLACE, ImagePlace("a", 2, 2)],
    ],
)
def test_places_lie_inside_the_tokens_and_do_not_overlap(places):
    with pytest.raises(ValueError, match="images: "):
        row(*places)


def test_tokens_of_an_image_are_never_trained():
    with pytest.raises(ValueError, match="the loss mask marks tokens of an image"):
        row(ImagePlace("a", 3, 2), trained=2)


def test_calls_of_one_row_show_the_same_images():
    first = completion([1, 2], [3], ImagePlace("a", 0, 1))
    second = completion([1, 2, 3, 4], [5], ImagePlace("a", 0, 1), ImagePlace("b", 3, 1))
    assert joined(first, second).images == second.images
    other = msgspec.structs.replace(second, images=(ImagePlace("b", 0, 1),))
    with pytest.raises(ValueError, match="does not continue"):
        joined(first, other)


def test_an_image_is_named_by_its_bytes():
    image = Image.of(b"abc")
    assert image.sha256.startswith("ba7816bf")
    messages = [
        {"role": "system", "content": "text"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, image.part, image.part]},
    ]
    assert list(names_in(messages)) == [image.sha256] * 2
