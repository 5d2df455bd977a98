"""What the page of a rollout tells of a teacher, token by token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from rft.buffer.inspect import Shown
from rft.buffer.token_texts import TokenTexts
from rft.extras.view.token_colours import COLOURS, shown_tokens
from rft.testing.storage_contract import row
from rft.types.experience import Experience
from rft.types.ids import GroupId, Version


def shown(x: Experience, tmp_path: Path) -> list[Any]:
    page = Shown({}, x, "", (), None)
    return list(shown_tokens(page, TokenTexts(tmp_path), "teacher", None, 100))


def test_a_teachers_difference_and_what_it_would_say(tmp_path: Path) -> None:
    x = row(GroupId(1, 0, 0, 0).run(0), reward=1.0, version=Version(1, 0))
    trained = np.flatnonzero(x.loss_mask)
    count = len(trained)
    assert "teacher" in COLOURS and count > 1
    assert {t.css for t in shown(x, tmp_path)} <= {"prompt", "masked", "none"}, "no teacher"
    teacher = x.logprobs.copy()
    teacher[trained[0]] -= np.float32(1.5)
    teacher[trained[1]] += np.float32(0.25)
    top = np.log(np.tile([0.6, 0.3, 0.06, 0.03, 0.01], (count, 1))).astype(np.float16)
    ids = np.tile([7, 8, 9, 10], (count, 1)).astype(np.int32) + np.arange(count)[:, None]
    taught = msgspec.structs.replace(
        x,
        teacher_spans=x.version_spans,
        teacher_logprobs=teacher,
        teacher_top_ids=ids.astype(np.int32),
        teacher_top_logprobs=top,
    )
    tokens = shown(taught, tmp_path)
    first, second = tokens[trained[0]], tokens[trained[1]]
    assert (first.css, second.css) == ("n3", "p1")
    assert "it would say '7' 0.60, '8' 0.30, '9' 0.06" in first.about
    assert "it would say '8' 0.60, '9' 0.30, '10' 0.06" in second.about
    assert f"teacher's {float(teacher[trained[0]]):.6g}" in first.about
    assert not any("would say" in t.about for t in tokens if t.css in ("prompt", "masked"))
