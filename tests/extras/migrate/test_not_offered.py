"""Advice about keys and values that are known elsewhere and not offered."""

from __future__ import annotations

import re

import pytest

from rft.config.schema.walk import all_keys, field_at, literals
from rft.extras.migrate.compat.keys.not_offered import INSTEAD, VALUES, key_hint


@pytest.mark.parametrize("pattern", INSTEAD)
def test_advice_is_for_keys_that_do_not_exist(pattern: str) -> None:
    """`key_hint` is asked for unknown keys only; a pattern without a wildcard at its end must not
    name a real key.
    """
    name = re.sub(r"\[\[\]\*\]|\*taskset\*", "[0]", pattern)
    assert name not in all_keys()


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("buffer.explorer_input.tasksets[0].format.video_key", "videos are not offered"),
        ("buffer.explorer_input.tasksets[0].format.promt_key", ""),
        (
            "buffer.trainer_input.auxiliary_buffers.x.format.video_key",
            "videos are not offered",
        ),
        ("explorer.rollout_model.enable_expert_parallel", "use tensor_parallel_size"),
        ("explorer.auxiliary_models[0].enable_expert_parallel", "use tensor_parallel_size"),
        ("buffer.trainer_input.experience_buffer.capacityy", ""),
        ("service", "Data-Juicer"),
        ("nonsense", ""),
    ],
)
def test_hints(key: str, expected: str) -> None:
    assert expected in key_hint(key) if expected else key_hint(key) == ""


def test_values_with_advice_are_no_values_of_the_schema() -> None:
    for pattern, values in VALUES.items():
        key = pattern.replace("*tasksets[[]*]", "taskset").replace("[[]*]", "")
        field = field_at(tuple(key.split(".")))
        if field is None:  # a key of the other tool alone
            assert key_hint(key.replace("configs", "configs[0]")), pattern
            continue
        assert not set(values) & set(map(str, literals(field.annotation))), pattern
