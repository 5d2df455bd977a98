"""Every message of a conversation is in what the model sees, once, with the chat templates of many
families (finding M2).
"""

from __future__ import annotations

import contextlib
import functools
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rft.engine.chat import Chat
from rft.engine.settings import EngineSettings
from rft.types.ports import GenerateRequest
from rft.types.written import MessageLeftOut
from tests.helpers.chat_forms import FORMS, Form

ADD = ("add", {"a": 2, "b": 3})
CITY = ("weather", {"city": "Rome"})
TOOLS = tuple(
    {"type": "function", "function": {"name": name, "description": "", "parameters": {}}}
    for name, _ in (ADD, CITY)
)
CONVERSATIONS: dict[str, list[tuple[str, Any]]] = {
    "two turns": [
        ("user", "What is one?"),
        ("says", "It is 1."),
        ("user", "And two?"),
        ("says", "It is 2."),
    ],
    "system": [
        ("system", "Be short."),
        ("user", "Who are you?"),
        ("says", "A model."),
        ("user", "Whose?"),
        ("says", "Mine."),
    ],
    "thought": [
        ("user", "Hard one?"),
        ("says", "<think>\nLet me see.\n</think>\n\nYes."),
        ("user", "Why so?"),
        ("says", "So."),
    ],
    "tool": [
        ("user", "Two and three?"),
        ("calls", [ADD]),
        ("tool", 'It\'s "5" \\ ü\nRESULT42'),
        ("says", "Five."),
        ("user", "Thanks!"),
        ("says", "Bye."),
    ],
    "parallel": [
        ("user", "Both?"),
        ("calls", [ADD, CITY]),
        ("tool", "FIRST"),
        ("tool", "SECOND"),
        ("says", "Done."),
    ],
    "rounds": [
        ("user", "Twice?"),
        ("calls", [ADD]),
        ("tool", "ROUND1"),
        ("calls", [CITY]),
        ("tool", "ROUND2"),
        ("says", "Done."),
    ],
    "system later": [
        ("user", "Hello?"),
        ("says", "Hi."),
        ("system", "Now rhyme."),
        ("user", "Go on?"),
        ("says", "Song, long."),
    ],
    "in a row": [
        ("user", "A tool?"),
        ("calls", [ADD]),
        ("tool", "7"),
        ("user", "Quick!"),
        ("user", "Please!"),
        ("says", "Seven."),
    ],
    "unread call": [
        ("user", "A call?"),
        ("writes", [ADD]),
        ("tool", "RESULT43"),
        ("says", "Read."),
    ],
}
LEFT_OUT = r"does not write message 2 \(role system: 'Now rhyme.'\)"
NO_RESULT = r"does not write message 2 \(role tool: .*result_role: user"
ALTERNATE = "roles must alternate"
NO_CALL = "no previous assistant message with a tool call.*tool_call_parser"
TOOL_TALKS = ("tool", "parallel", "rounds", "in a row", "unread call")
REFUSED: dict[str, dict[str, str]] = {
    "smollm3": {"system later": LEFT_OUT},
    "llama31": {"parallel": "one call at a time"},
    "llama32": {"parallel": "one call at a time"},
    "r1_distill": {"system later": LEFT_OUT},
    "deepseek_v3": {"system later": LEFT_OUT},
    "deepseek_v31": {"system later": LEFT_OUT},
    "gemma2": {"system": "System role not supported", "system later": ALTERNATE}
    | dict.fromkeys(TOOL_TALKS, ALTERNATE),
    "gemma3": {"system later": ALTERNATE} | dict.fromkeys(TOOL_TALKS, ALTERNATE),
    "gemma4": {"unread call": f"{NO_RESULT}.*tool_call_parser"},
    "phi3": dict.fromkeys(TOOL_TALKS, NO_RESULT),
    "phi4": dict.fromkeys(TOOL_TALKS, NO_RESULT),
    "mistral": {
        "system": "writes message 0 .* again .*first message of the user",
        "system later": ALTERNATE,
        "in a row": ALTERNATE,
        "unread call": "with length 9.*tool_call_parser",
    },
    "mistral_small3": dict.fromkeys(TOOL_TALKS, "roles are supported.*result_role: user"),
    "gpt_oss": {"system later": LEFT_OUT, "unread call": NO_CALL},
    "minimax_m2": {"system later": LEFT_OUT, "unread call": NO_CALL},
}
THINKS = tuple(CONVERSATIONS)
# the whole chat at once is another text: the template drops or rewrites what was said
OTHERWISE: dict[str, tuple[str, ...]] = {
    "smollm3": ("tool", "parallel", "rounds", "in a row"),  # has no calls
    "qwen3": ("thought",),
    "qwen3_thinking": THINKS,
    "r1_distill": THINKS,
    "minimax_m2": THINKS,
    "hermes3": ("tool", "rounds"),  # writes the last result in another way
    "deepseek_v3": ("rounds",),
    "deepseek_v31": ("thought",),
    "command_r7b": ("tool", "parallel", "rounds", "in a row", "unread call"),  # drops the plan
    "mistral": ("tool", "parallel", "rounds"),  # adds ids, and has the tools once more
    "gpt_oss": ("two turns", "system", "thought", "tool", "parallel"),
    # adds empty thoughts
    "glm45": ("thought", "tool", "parallel", "rounds", "system later", "in a row", "unread call"),
}


@dataclass
class Played:
    """A conversation as it was played: its messages, and the tokens that the model saw and wrote."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    sampled: list[tuple[int, list[int]]] = field(default_factory=list)
    prompt: list[int] = field(default_factory=list)
    answered: int = 0

    def request(self, tools: Any) -> GenerateRequest:
        going_on = (
            {"prefix_tokens": np.array(self.tokens, np.int32), "prefix_messages": self.answered}
            if self.answered
            else {}
        )
        return GenerateRequest(messages=tuple(self.messages), tools=tools, **going_on)  # type: ignore[arg-type]


@functools.cache
def chat(name: str, folder: Path) -> Chat:
    form = FORMS[name]
    settings = EngineSettings(
        engine_type="transformers", model_path=name, max_model_len=9000, chat_template=form.template
    )
    return Chat(settings, form.tokenizer(folder))


def play(form: Form, title: str, folder: Path, *, ended: bool = True) -> Played:
    c = chat(form.name, folder)
    done = Played()
    tools = TOOLS if any(role == "calls" for role, _ in CONVERSATIONS[title]) else ()
    ids: list[str] = []
    for number, (role, said) in enumerate(CONVERSATIONS[title]):
        if role in ("system", "user", "tool"):
            done.messages.append(
                {"role": role, "content": said}
                | ({"tool_call_id": ids.pop(0)} if ids and role == "tool" else {})
            )
            continue
        done.prompt = c.encode(done.request(tools))
        answer, text = _answer(form, role, said, number, ended=ended)
        ids = [call["id"] for call in answer.get("tool_calls", ())]
        written = list(c.tokenizer(text, add_special_tokens=False)["input_ids"])
        done.sampled.append((len(done.prompt), written))
        done.tokens = done.prompt + written
        done.messages.append(answer)
        done.answered = len(done.messages)
    return done


def _answer(
    form: Form, role: str, said: Any, number: int, *, ended: bool
) -> tuple[dict[str, Any], str]:
    """The answer as a message, and what the model writes."""
    if role == "says":
        return {"role": "assistant", "content": said}, form.answer.format(said) + form.end
    write = form.calls or FORMS["qwen25"].calls
    assert write is not None
    text = write(said)
    end = (form.end_of_calls or form.end) if ended else ""
    if role == "writes" or form.calls is None:  # nobody reads the call
        return {"role": "assistant", "content": text}, text + end
    calls = [
        {
            "id": f"call{number:02}{i:03}",
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(given)},
        }
        for i, (name, given) in enumerate(said)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}, text + end


def text(form: Form, folder: Path, tokens: list[int]) -> str:
    return str(chat(form.name, folder).tokenizer.decode(tokens, skip_special_tokens=False))


@pytest.mark.parametrize("title", CONVERSATIONS)
@pytest.mark.parametrize("name", FORMS)
def test_the_model_sees_every_message_once(name: str, title: str, tiny_model: Path) -> None:
    form = FORMS[name]
    if why := REFUSED.get(name, {}).get(title):
        with pytest.raises(ValueError, match=f"(?s){why}"):
            play(form, title, tiny_model)
        return
    done = play(form, title, tiny_model)
    seen = text(form, tiny_model, done.tokens)
    for message in done.messages:
        if message["role"] != "assistant":
            # some write results as JSON
            forms = {message["content"], json.dumps(message["content"], ensure_ascii=False)[1:-1]}
            assert any(seen.count(f) == 1 for f in forms), (message, seen)
    for place, written in done.sampled:
        assert done.tokens[place : place + len(written)] == written
    assert form.end * 2 not in seen
    tools = TOOLS if any(role == "calls" for role, _ in CONVERSATIONS[title]) else ()
    at_once = ""
    with contextlib.suppress(MessageLeftOut):  # of calls, which only the tokens have
        whole = chat(name, tiny_model).encode(
            GenerateRequest(messages=tuple(done.messages[:-1]), tools=tools)
        )
        at_once = text(form, tiny_model, whole)
    assert (at_once == text(form, tiny_model, done.prompt)) is (
        title not in OTHERWISE.get(name, ())
    )


@pytest.mark.parametrize("name", [name for name, form in FORMS.items() if form.calls is not None])
def test_a_call_that_was_cut_is_closed(name: str, tiny_model: Path) -> None:
    """Its own end is not written again, and the end of its turn is."""
    form = FORMS[name]
    prompts = [play(form, "rounds", tiny_model, ended=ended).prompt for ended in (True, False)]
    if name in ("smollm3", "glm45"):  # no calls; an answer without an end
        return
    assert text(form, tiny_model, prompts[1]) == text(form, tiny_model, prompts[0])


def test_words_behind_a_call_are_cut_off(tiny_model: Path) -> None:
    form = FORMS["qwen25"]
    c = chat("qwen25", tiny_model)
    user = {"role": "user", "content": "Two and three?"}
    answer, written = _answer(form, "calls", [ADD], 1, ended=False)
    first = (
        c.encode(GenerateRequest(messages=(user,), tools=TOOLS))
        + c.tokenizer(written + " and th")["input_ids"]
    )
    result = {"role": "tool", "content": "5"}
    request = GenerateRequest(
        messages=(user, answer, result),
        tools=TOOLS,
        prefix_tokens=np.array(first, np.int32),
        prefix_messages=2,
    )
    after = text(form, tiny_model, c.encode(request)[len(first) :])
    assert (
        after
        == "<|im_end|>\n<|im_start|>user\n<tool_response>\n5\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_call_that_the_template_drops_is_refused(tiny_model: Path) -> None:
    """gpt-oss's writes the first of several calls."""
    answer, _ = _answer(FORMS["gpt_oss"], "calls", [ADD, CITY], 1, ended=True)
    with pytest.raises(MessageLeftOut, match="does not write message 1"):
        chat("gpt_oss", tiny_model).encode(
            GenerateRequest(messages=({"role": "user", "content": "?"}, answer))
        )
