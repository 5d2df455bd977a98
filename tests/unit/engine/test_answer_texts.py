"""What of an answer's tokens is text: special tokens are, the form of a chat is not (findings G4,
G17).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rft.engine.base import cut_at_stop
from rft.engine.chat import Chat
from rft.engine.settings import EngineSettings
from rft.testing.fakes import ScriptedModel
from rft.testing.tiny import BOS, EOS, PAD, tokenizer
from rft.types.ports import GenerateRequest
from rft.types.task import SamplingArgs

TAGS = ["<think>", "</think>", "<answer>", "</answer>", "<end_of_turn>"]
TURNS = (
    "{% for m in messages %}{{ m['role'][0] + m['content'] + '<end_of_turn>' }}{% endfor %}{% "
    "if add_generation_prompt %}a{% endif %}"
)


@pytest.fixture(scope="module")
def words() -> Any:
    made = tokenizer()
    made.add_special_tokens({"additional_special_tokens": TAGS})
    return made


@pytest.fixture(scope="module")
def chat(words: Any) -> Chat:
    words.chat_template = TURNS
    return Chat(EngineSettings(model_path="tiny", max_model_len=100), words)


@pytest.mark.parametrize(
    ("written", "stops", "text", "stop_text"),
    [
        (f"<think>k</think><answer>7</answer>{EOS}", [], "<think>k</think><answer>7</answer>", ""),
        (f"{BOS}7{PAD}<end_of_turn>8{EOS}", [], "78", ""),
        ("7<end_of_turn>", [], "7", ""),
        ("<answer>7</answer>", ["</answer>"], "<answer>7", "</answer>"),
        ("<answer>7</answer>", [], "<answer>7", ""),
        ("so 7.\nIt", ["\n", "It"], "so 7.", "\n"),
        (EOS, [], "", ""),
    ],
)
def test_special_tokens_are_text(
    chat: Chat, written: str, stops: list[str], text: str, stop_text: str
) -> None:
    """G4: all but BOS, EOS, padding, ends of turns, and the token that ended the answer.  G17: the
    stop text is kept apart.
    """
    tokens = chat.tokenizer(written, add_special_tokens=False)["input_ids"]
    assert chat.decode_stopped(np.array(tokens), stops) == (text, stop_text)


def test_an_answer_that_was_cut_keeps_its_last_token(chat: Chat) -> None:
    assert (
        chat.decode(chat.tokenizer("<answer>7</answer>", add_special_tokens=False)["input_ids"])
        == "<answer>7</answer>"
    )
    assert chat.decode_stopped([], []) == ("", "")


@pytest.mark.parametrize(
    "template", [None, "{{ raise_exception('no') }}", "{{ messages[0]['content'] }}"]
)
def test_templates_without_an_end_of_an_answer_leave_out_the_rest(
    words: Any, template: str | None
) -> None:
    words.chat_template = template
    chat = Chat(EngineSettings(model_path="tiny", max_model_len=100), words)
    ids = words(f"<think>7<end_of_turn>{PAD}", add_special_tokens=False)["input_ids"]
    assert chat.decode(ids) == "<think>7<end_of_turn>"
    words.chat_template = TURNS


@pytest.mark.parametrize(
    ("text", "stops", "parts"),
    [
        ("a;b.c", [".", ";"], ("a", ";")),
        ("abc", ["x"], ("abc", "")),
        ("abc", [], ("abc", "")),
        ("abc", ["bc", "b"], ("a", "b")),
    ],
)
def test_a_text_is_cut_at_the_first_stop(
    text: str, stops: list[str], parts: tuple[str, str]
) -> None:
    assert cut_at_stop(text, stops) == parts


async def test_engines_say_which_stop_text_ended_an_answer() -> None:
    model = ScriptedModel("<answer>7</answer> done")
    request = GenerateRequest(
        messages=({"role": "user", "content": "?"},), sampling=SamplingArgs(stop=("</answer>",))
    )
    (answer,) = await model.generate(request)
    assert (answer.text, answer.stop_text, answer.answer) == (
        "<answer>7",
        "</answer>",
        "<answer>7</answer>",
    )
