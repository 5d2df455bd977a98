"""One form of rotary embeddings, whatever config.json and the written keys look like."""

from __future__ import annotations

from typing import Any

import pytest

from rft.errors import ConfigError
from rft.types import rotary

OLD = {"rope_theta": 10000.0, "max_position_embeddings": 512}
NEW = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "max_position_embeddings": 512,
}
YARN = {"rope_type": "yarn", "factor": 4.0}


@pytest.mark.parametrize("config", [OLD, NEW])
def test_theta_alone_keeps_the_rest(config: dict[str, Any]) -> None:
    assert rotary.applied(config, {"rope_theta": 5e5}) == {
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}
    }
    scaled = {
        **config,
        "rope_parameters": {
            "rope_type": "linear",
            "factor": 2.0,
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.5,
        },
    }
    assert rotary.applied(scaled, {"rope_theta": 5e5})["rope_parameters"] == {
        "rope_type": "linear",
        "factor": 2.0,
        "rope_theta": 5e5,
        "partial_rotary_factor": 0.5,
    }


@pytest.mark.parametrize("config", [OLD, NEW])
def test_scaling_keeps_theta_and_the_trained_length(config: dict[str, Any]) -> None:
    made = rotary.applied(config, {"rope_scaling": YARN, "attention_bias": True})
    assert made == {
        "attention_bias": True,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 4.0,
            "rope_theta": 10000.0,
            "original_max_position_embeddings": 512,
        },
    }
    assert rotary.applied(
        config, {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 7.0}
    )["rope_parameters"] == {
        "rope_type": "linear",
        "factor": 2.0,
        "rope_theta": 7.0,
    }


def test_an_exported_config_says_it_once() -> None:
    config = {**OLD, "rope_scaling": None, "vocab_size": 9}
    made = rotary.replaced(config, {"rope_scaling": YARN})
    assert set(made) == {"max_position_embeddings", "vocab_size", "rope_parameters"}
    assert rotary.replaced(config, {"vocab_size": 10}) == {**config, "vocab_size": 10}


def test_parts_of_a_model_keep_what_is_not_overridden() -> None:
    config = {"text_config": {**NEW, "vocab_size": 9}, "rope_parameters": {"a": 1}}
    override = {"text_config": {"max_position_embeddings": 600}, "rope_parameters": {"b": 2}}
    made = rotary.replaced(config, override)
    assert made == {
        "text_config": {**NEW, "vocab_size": 9, "max_position_embeddings": 600},
        "rope_parameters": {"b": 2},
    }
    assert [rotary.positions(config, x) for x in ({}, override)] == [512, 600]


@pytest.mark.parametrize(
    ("scaling", "known"),
    [(YARN, 2048), ({"rope_type": "linear", "factor": 2.0}, 1024), (None, 512)],
)
def test_positions(scaling: dict[str, Any] | None, known: int) -> None:
    assert rotary.positions(OLD, {"rope_scaling": scaling}) == known
    assert rotary.positions({}, {"rope_scaling": scaling, "rope_theta": 1.0}) is None


def test_what_cannot_be_told_in_one_mapping_is_refused() -> None:
    kinds = {
        "rope_parameters": {
            "full_attention": {"rope_type": "default"},
            "sliding_attention": {"rope_type": "default"},
        }
    }
    with pytest.raises(ConfigError, match="several kinds"):
        rotary.applied(kinds, {"rope_theta": 1.0})
    with pytest.raises(ConfigError, match=r"model\.rope_theta: is needed"):
        rotary.applied({}, {"rope_scaling": YARN})
