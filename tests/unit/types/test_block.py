"""Frames: what goes in comes out, chosen rows where asked; damaged frames are refused."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from rft.types.block import bundle, contents, decode, encode
from rft.types.completion import VersionSpan
from rft.types.experience import Experience
from rft.types.ids import GroupId, Version


def row(run: int, length: int, *, teacher: bool = False, reward: float = 1.0) -> Experience:
    mask = np.arange(length) >= 2
    return Experience(
        id=GroupId(1, 0, 3, 4).run(run),
        taskset="t",
        task_index=4,
        workflow="w",
        status="complete",
        tokens=np.arange(length, dtype=np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, -0.5, 0.0).astype(np.float32),
        version_spans=(VersionSpan(Version(1, 2), 2, length),),
        reward=reward,
        teacher_logprobs=np.full(length, -1, np.float32) if teacher else None,
    )


ROWS = [row(0, 5), row(1, 21, teacher=True), row(2, 9)]


def same(a: Experience, b: Experience) -> bool:
    return encode([a]) == encode([b])


def test_an_edited_reward_reaches_advantages_that_read_the_rewards_of_tokens() -> None:
    """Its last trained token takes the difference; what the frame holds stays as it is."""
    mask = np.array([0, 0, 1, 1, 0], np.bool_)
    earned = np.array([0, 0, 0.25, 0.5, 0.25], np.float32)
    given = msgspec.structs.replace(
        row(0, 5),
        loss_mask=mask,
        logprobs=np.where(mask, -0.5, 0.0).astype(np.float32),
        token_rewards=earned,
    )
    block = encode([given, ROWS[2]])
    edited, other = decode(bundle([(block, [0, 1], [0.0, 3.0])]), checked=True)
    assert edited.token_rewards is not None and edited.token_rewards.tolist() == [
        0,
        0,
        0.25,
        -0.5,
        0.25,
    ]
    assert (edited.reward, other.reward, other.token_rewards) == (0.0, 3.0, None)
    (same_reward,) = decode(bundle([(block, [0], [1.0])]))
    assert (
        same_reward.token_rewards is not None
        and same_reward.token_rewards.tolist() == earned.tolist()
    )


def test_rows_come_back_all_or_chosen() -> None:
    frame = encode(ROWS)
    assert len(frame) % 8 == 0
    assert all(map(same, decode(frame), ROWS))
    assert [str(x.id) for x in decode(memoryview(frame), [2, 0])] == [
        str(ROWS[2].id),
        str(ROWS[0].id),
    ]
    assert decode(encode([])) == []
    with pytest.raises(IndexError):
        decode(frame, [3])


def test_checked_rows_are_the_same_and_their_values_are_not_looked_at_again() -> None:
    frame = encode(ROWS)
    assert all(map(same, decode(frame, checked=True), ROWS))
    assert all(
        map(same, decode(bundle([(frame, [2, 0], [1.0, 1.0])]), checked=True), [ROWS[2], ROWS[0]])
    )
    broken = frame.replace(np.float32(-0.5).tobytes(), np.float32(np.nan).tobytes())
    with pytest.raises(ValueError, match="logprobs: not finite"):
        decode(broken)
    assert np.isnan(decode(broken, checked=True)[0].logprobs[-1])


def test_a_row_has_one_hash_in_every_block() -> None:
    alone = [contents(encode([x]))[0] for x in ROWS]
    assert contents(encode(ROWS)) == alone
    assert contents(encode(ROWS), [1]) == alone[1:2]
    assert contents(encode([row(0, 5, reward=0.5)])) != alone[:1]
    assert contents(encode([row(0, 6)])) != alone[:1]


def test_a_changed_byte_of_a_row_changes_its_hash() -> None:
    frame = bytearray(encode(ROWS))
    frame[-9] ^= 1
    before = contents(encode(ROWS))
    after = contents(bytes(frame))
    assert before[:2] == after[:2] and before[2] != after[2]


def test_a_bundle_holds_chosen_rows_with_the_rewards_that_stand() -> None:
    found = decode(bundle([(encode(ROWS), [2, 0], [0.25, 1.0]), (encode(ROWS), [1], [None])]))
    assert [(x.id.run, x.reward) for x in found] == [(2, 0.25), (0, 1.0), (1, None)]
    assert same(found[1], ROWS[0])


@pytest.mark.parametrize(
    "make",
    [lambda: encode(ROWS), lambda: bundle([(encode(ROWS), [0, 1, 2], [1.0] * 3)])],
)
def test_every_cut_is_noticed(make: object) -> None:
    frame: bytes = make()  # type: ignore[operator]
    for end in range(0, len(frame) - 8, 7):
        for checked in (False, True):
            with pytest.raises(ValueError):
                decode(frame[:end], checked=checked)


def test_what_is_no_frame_is_refused() -> None:
    whole = encode(ROWS)
    for bad in (
        b"",
        b"\x80\x05cos\nsystem\n",
        whole + bytes(8),
        bundle([(bundle([]), [], [])]),
        bundle([(whole, [0], [])]),
    ):
        with pytest.raises(ValueError, match="experience frame"):
            decode(bad)
    with pytest.raises(ValueError, match="begins with"):
        contents(bundle([]))


def test_a_wrong_value_is_told_by_its_field() -> None:
    end = 12 + int.from_bytes(encode(ROWS)[4:12], "little")
    heads = msgspec.msgpack.decode(encode(ROWS)[12:end])
    heads[1][0]["reward"] = "high"
    head = msgspec.msgpack.encode(heads)
    frame = (
        b"RFT2"
        + len(head).to_bytes(8, "little")
        + head
        + bytes(-(12 + len(head)) % 8)
        + encode(ROWS)[end + -end % 8 :]
    )
    with pytest.raises(msgspec.ValidationError, match=r"\$\.reward"):
        decode(frame)


def test_the_attempt_that_wrote_a_token_is_kept() -> None:
    spans = (
        VersionSpan(Version(1, 30), 0, 1),
        VersionSpan(Version(1, 30, 2), 1, len(ROWS[0].tokens)),
    )
    row = msgspec.structs.replace(ROWS[0], version_spans=spans)
    assert decode(encode([row]))[0].version_spans == spans


def test_experts_come_back_as_small_as_they_are() -> None:
    for kind in (np.uint8, np.uint16):
        given = np.arange(4 * 3 * 2).reshape(4, 3, 2).astype(kind)
        rows = [msgspec.structs.replace(row(0, 5), routed_experts=given), row(1, 7)]
        frame = encode(rows)
        back = decode(frame)
        assert back[0].routed_experts is not None and back[0].routed_experts.dtype == kind
        assert np.array_equal(back[0].routed_experts, given) and back[1].routed_experts is None
        assert len(frame) - len(encode([row(0, 5), row(1, 7)])) < given.nbytes + 64
    assert contents(encode([row(1, 7)])) == contents(encode(rows), [1]), (
        "rows without experts are what they were"
    )


def test_experts_that_do_not_fit_are_refused() -> None:
    for given, why in (
        (np.zeros((4, 2), np.uint8), "must be uint8 or uint16"),
        (np.zeros((4, 2, 2), np.int32), "must be uint8 or uint16"),
        (np.zeros((6, 2, 2), np.uint8), "of 6 positions, but there are 5 tokens"),
    ):
        with pytest.raises(ValueError, match=why):
            msgspec.structs.replace(row(0, 5), routed_experts=given)
    frame = encode(
        [msgspec.structs.replace(row(0, 5), routed_experts=np.zeros((4, 2, 2), np.uint8))]
    )
    with pytest.raises(ValueError, match="cut short"):
        decode(frame.replace(b"\x93\x04\x02\x02", b"\x93\x7f\x02\x02"))
