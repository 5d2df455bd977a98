"""A conversation goes on from the tokens of its earlier calls: what follows is found exactly,
whatever the template does.
"""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rft.engine import scripted
from rft.engine.base import TokensDiffer
from rft.engine.chat import Chat, load_tokenizer
from rft.engine.settings import EngineSettings
from rft.types.ports import GenerateRequest

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (  # trims, ends a message without a line break, gives tools a role of their own
    "{% for m in messages %}<|im_start|>{{ 'ipython' if m.role == 'tool' else m.role "
    "}}<|/h|>\n\n{{ m.content | trim }}<|im_end|>"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant<|/h|>\n\n{% endif %}"
)
THINK = (  # shows the thinking of the last answer only, and opens the next one's
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and not "
    "loop.last %}"
    "{{ m.content.split('</think>')[-1].lstrip('\n') }}{% else %}{{ m.content }}{% endif "
    "%}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
GEMMA = (  # has no system role: its text begins the first message of the user
    "{% if messages[0].role == 'system' %}{% set head = messages[0].content + '\n\n' %}{% set rest "
    "= messages[1:] %}"
    "{% else %}{% set head = '' %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}<|im_start|>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ (head "
    "if loop.first else '') + m.content"
    " | trim }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>model\n{% endif %}"
)
BARE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if "
    "add_generation_prompt %}assistant:{% endif %}"
)
SILENT = "{% for m in messages if m.role != 'assistant' %}{{ m.content }}\n{% endfor %}"
FIRST = ({"role": "system", "content": "Be short."}, {"role": "user", "content": "What is 1+1?"})
SMOL = Path("~/.cache/rft/models/SmolLM2-135M-Instruct").expanduser()


@pytest.fixture(params=["tiny", "smollm2"])
def folder(request: pytest.FixtureRequest, tiny_model: Path) -> Path:
    if request.param == "tiny":
        return tiny_model
    if not SMOL.is_dir():
        pytest.skip("SmolLM2 is not on this machine")
    return SMOL


@functools.cache
def tokenizer(folder: Path) -> Any:
    return load_tokenizer(EngineSettings(model_path=str(folder)))


def chat(folder: Path, template: str, check: str = "off") -> Chat:
    s = EngineSettings(
        engine_type="transformers",
        model_path=str(folder),
        max_model_len=4000,
        chat_template=template,
        tokenization_check=check,
    )
    return Chat(s, tokenizer(folder))


def second(
    c: Chat, said: str, end: str, *then: dict[str, str]
) -> tuple[list[int], list[int], GenerateRequest]:
    """(tokens of the first call, prompt of the second, its request) when the model wrote `said` and
    then the special token `end`.
    """
    prompt = c.encode(GenerateRequest(messages=FIRST))
    first = prompt + c.tokenizer(said + end, add_special_tokens=False)["input_ids"]
    request = GenerateRequest(
        messages=(*FIRST, {"role": "assistant", "content": said}, *then),
        prefix_tokens=np.array(first, np.int32),
        prefix_messages=3,
    )
    return first, c.encode(request), request


USER = {"role": "user", "content": "And 2+2?"}
TOOL = {"role": "tool", "content": "  result 4 "}
AFTER = {
    "chatml": (CHATML, "\n<|im_start|>user\nAnd 2+2?<|im_end|>\n<|im_start|>assistant\n"),
    "llama3": (
        LLAMA3,
        "<|im_start|>user<|/h|>\n\nAnd 2+2?<|im_end|><|im_start|>assistant<|/h|>\n\n",
    ),
    "think": (THINK, "\n<|im_start|>user\nAnd 2+2?<|im_end|>\n<|im_start|>assistant\n<think>\n"),
    "gemma": (GEMMA, "\n<|im_start|>user\nAnd 2+2?<|im_end|>\n<|im_start|>model\n"),
}


@pytest.mark.parametrize("style", AFTER)
def test_what_follows_an_answer_that_ended_itself(folder: Path, style: str) -> None:
    template, after = AFTER[style]
    c = chat(folder, template)
    first, prompt, _ = second(c, "It is 2.", "<|im_end|>", USER)
    assert prompt[: len(first)] == first
    assert c.tokenizer.decode(prompt[len(first) :]) == after


@pytest.mark.parametrize("style", AFTER)
def test_a_cut_answer_is_closed(folder: Path, style: str) -> None:
    template, after = AFTER[style]
    c = chat(folder, template)
    first, prompt, _ = second(c, "It is", "", USER)
    assert prompt[: len(first)] == first
    assert c.tokenizer.decode(prompt[len(first) :]) == "<|im_end|>" + after


@pytest.mark.parametrize("style", ["chatml", "gemma"])
def test_equals_the_whole_chat_where_the_template_is_stable(folder: Path, style: str) -> None:
    c = chat(folder, AFTER[style][0], "strict")
    _, prompt, request = second(c, "It is 2.", "<|im_end|>", USER)
    assert prompt == c.encode(GenerateRequest(messages=request.messages))
    assert c.differing == 0


def test_thinking_stays_in_the_history(folder: Path) -> None:
    c = chat(folder, THINK)
    first, prompt, request = second(c, "one and one\n</think>\n\nIt is 2.", "<|im_end|>", USER)
    assert prompt[: len(first)] == first
    assert "one and one" in c.tokenizer.decode(prompt)
    assert "one and one" not in c.tokenizer.decode(
        c.encode(GenerateRequest(messages=request.messages))
    )


def test_a_tool_answers(folder: Path) -> None:
    c = chat(folder, LLAMA3)
    first, prompt, _ = second(c, "call", "<|im_end|>", TOOL, USER)
    assert c.tokenizer.decode(prompt[len(first) :]).startswith(
        "<|im_start|>ipython<|/h|>\n\nresult 4<|im_end|><|im_start|>user"
    )


def test_a_template_without_special_tokens(folder: Path) -> None:
    c = chat(folder, BARE)
    first, prompt, _ = second(c, " It is 2.", "", USER)
    assert prompt[: len(first)] == first
    assert c.tokenizer.decode(prompt[len(first) :]) == "\nuser: And 2+2?\nassistant:"


def test_three_turns_grow_by_what_is_new(folder: Path) -> None:
    c = chat(folder, CHATML)
    first, prompt, request = second(c, "It is 2.", "<|im_end|>", USER)
    written = prompt + c.tokenizer("4<|im_end|>", add_special_tokens=False)["input_ids"]
    messages = (
        *request.messages,
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "Bye"},
    )
    third = c.encode(
        GenerateRequest(
            messages=messages, prefix_tokens=np.array(written, np.int32), prefix_messages=5
        )
    )
    assert third[: len(written)] == written and third[: len(first)] == first
    assert third == c.encode(GenerateRequest(messages=messages))


def test_a_template_that_hides_answers_is_refused(folder: Path) -> None:
    c = chat(folder, SILENT)
    with pytest.raises(ValueError, match="leaves out earlier answers"):
        second(c, "It is 2.", "", USER)


def test_the_check_warns_once_counts_and_ends(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    said = "so\n</think>\n\n2"
    c = chat(folder, THINK, "warn")
    with caplog.at_level(logging.WARNING):
        second(c, said, "<|im_end|>", USER)
        second(c, said, "<|im_end|>", USER)
    assert c.differing == 2 and len(caplog.records) == 1 and "at once" in caplog.text
    with pytest.raises(TokensDiffer, match="tokenization_check"):
        second(chat(folder, THINK, "strict"), said, "<|im_end|>", USER)


async def test_the_scripted_engine_goes_on_too() -> None:
    engine = scripted.ScriptedEngine("2", "4")
    (a,) = await engine.generate(GenerateRequest(messages=FIRST))
    before = np.concatenate([a.prompt_tokens, a.tokens])
    messages = (*FIRST, a.message, USER)
    (b,) = await engine.generate(
        GenerateRequest(messages=messages, prefix_tokens=before, prefix_messages=3)
    )
    assert (b.prompt_tokens == scripted.encode(messages)).all()
    cut = GenerateRequest(messages=messages, prefix_tokens=before[:-1], prefix_messages=3)
    engine.will_say("4")
    assert ((await engine.generate(cut))[0].prompt_tokens == scripted.encode(messages)).all()


@pytest.mark.parametrize(("style", "opens"), [("think", True), ("chatml", False)])
def test_a_template_may_open_a_thought(folder: Path, style: str, opens: bool) -> None:
    c = chat(folder, AFTER[style][0])
    assert c.opens_thought(c.encode(GenerateRequest(messages=FIRST))) is opens  # G2
