"""Chats, texts and pairs become exactly the tokens that are trained, or an error that names the
row.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rft.errors import ConfigError
from rft.taskset import template_worker
from rft.taskset.chatfiles import open_chat
from rft.taskset.offline_data import OfflineData, open_offline_data
from rft.taskset.settings import FormatSettings, OfflineDataSettings, TasksetSettings
from rft.types.experience import Demonstration, Preference

# ChatML, as most models write it: a line break follows the end token and is never generated
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' "
    "}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Templates that drop what an earlier answer said in <think>, as some do
FORGETFUL = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + (m['content'] if loop.last else "
    "m['content'].split('</think>')[-1]) }}"
    "{{ '<|im_end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant' }}{% "
    "endif %}"
)
TALK = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "2+2"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "and 3+3"},
    {"role": "assistant", "content": "6"},
]


@pytest.fixture
def given(tmp_path: Path, tiny_model: Path) -> Any:
    def make(
        rows: list[dict[str, Any]],
        kind: Any = "chats",
        form: dict[str, Any] | None = None,
        **more: Any,
    ) -> OfflineData:
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps(r) + "\n" for r in rows))
        source = TasksetSettings(
            name="mine",
            path=str(file),
            workflow="",
            format=FormatSettings(**(form or {})),
            selector=more.pop("selector", "sequential"),
        )
        return open_offline_data(
            OfflineDataSettings(
                rows=source, kind=kind, **{"model_path": str(tiny_model), "max_tokens": 200, **more}
            )
        )

    return make


def decoded(tiny_model: Path, tokens: np.ndarray) -> str:
    from tokenizers import Tokenizer

    return str(
        Tokenizer.from_file(str(tiny_model / "tokenizer.json")).decode(
            tokens.tolist(), skip_special_tokens=False
        )
    )


def token_of(tiny_model: Path, text: str) -> int:
    """The only token of `text`."""
    from tokenizers import Tokenizer

    (only,) = (
        Tokenizer.from_file(str(tiny_model / "tokenizer.json"))
        .encode(text, add_special_tokens=False)
        .ids
    )
    return int(only)


def spans(tiny_model: Path, d: Demonstration) -> list[str]:
    """The trained stretches, as text."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], d.loss_mask.astype(int), [0]])))
    return [decoded(tiny_model, d.tokens[a:b]) for a, b in edges.reshape(-1, 2)]


def test_a_question_and_its_answer(given: Any, tiny_model: Path) -> None:
    data = given([{"prompt": "qx7", "response": "7"}])
    (d,) = data.records
    assert isinstance(d, Demonstration) and spans(tiny_model, d) == ["7<|im_end|>"]
    assert decoded(tiny_model, d.tokens) == "<|im_start|>uqx7<|im_end|><|im_start|>a7<|im_end|>"
    assert (data.trained_tokens, data.lengths) == (2, [len(d.tokens)])


@pytest.mark.parametrize("template", [None, CHATML])
def test_every_turn_or_the_last(given: Any, tiny_model: Path, template: str | None) -> None:
    form = {"prompt_type": "messages", "messages_key": "messages"}
    (last,) = given([{"messages": TALK}], form=form, chat_template=template).records
    (every,) = given(
        [{"messages": TALK}], form=form, chat_template=template, every_turn=True
    ).records
    assert spans(tiny_model, last) == ["6<|im_end|>"], (
        "up to the end token, without the line break behind it"
    )
    assert spans(tiny_model, every) == ["4<|im_end|>", "6<|im_end|>"]
    np.testing.assert_array_equal(last.tokens, every.tokens)
    assert decoded(tiny_model, every.tokens).endswith("6<|im_end|>") and not every.loss_mask[0]


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_end_tokens_are_those_of_the_model(
    given: Any, tiny_model: Path, tmp_path: Path, file: str
) -> None:
    """Also where the tokenizer is in another folder, whose files say nothing of this model; of
    config.json where it has nothing else.
    """
    break_at = token_of(tiny_model, "\n")
    (tmp_path / "model").mkdir()
    for name in {"config.json", file}:
        ends = {"eos_token_id": [2, break_at]} if name == file else {}
        (tmp_path / "model" / name).write_text(json.dumps({"vocab_size": 259, **ends}))
    row = [{"messages": TALK}]
    form = {"prompt_type": "messages", "messages_key": "messages"}
    unended = CHATML.replace("<|im_end|>", "")
    (d,) = given(
        row, form=form, chat_template=unended, weights_path=str(tmp_path / "model")
    ).records
    assert spans(tiny_model, d) == ["6\n"], "the line break ends a generation, so it is trained"


@pytest.mark.parametrize(
    ("answer", "trained"), [("4", "4<|im_end|>"), ("4<|im_end|>5", "4<|im_end|>5<|im_end|>")]
)
def test_an_engine_stops_at_the_first_of_several_ends(
    given: Any, tiny_model: Path, tmp_path: Path, answer: str, trained: str
) -> None:
    """Phi's templates write <|end|>, a line break, and behind the last answer the tokenizer's own
    end as well.
    """
    model = shutil.copytree(tiny_model, tmp_path / "model")
    (model / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [2, token_of(tiny_model, "<|im_start|>")]})
    )
    template = CHATML.replace("{% endif %}", "{% else %}{{ '<|im_start|>' }}{% endif %}")
    (d,) = given(
        [{"prompt": "2+2", "response": answer}], model_path=str(model), chat_template=template
    ).records
    assert spans(tiny_model, d) == [trained]


def test_the_prompt_is_what_an_engine_would_read(given: Any, tiny_model: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    form = {"prompt_type": "messages", "messages_key": "messages"}
    (d,) = given([{"messages": TALK}], form=form).records
    prompt = tokenizer.apply_chat_template(
        TALK[:-1], add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert d.tokens[: len(prompt)].tolist() == prompt and d.loss_mask.tolist().index(True) == len(
        prompt
    )


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m.role }}{%- generation -%} {{ m.content }}{% endgeneration "
        "%}{% endfor %}",
        "{{ tools | tojson(separators=(',', ':'), sort_keys=true) }}{% for m in messages %}{{ "
        "m.content }}{% endfor %}",
        "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}",
        [
            {"name": "default", "template": "none"},
            {"name": "tool_use", "template": "{{ tools[0].b }}{{ messages[0].content }}"},
        ],
    ],
)
def test_a_chat_reads_as_transformers_writes_it(
    tiny_model: Path, tmp_path: Path, template: Any
) -> None:
    """Marks of answers, arguments of tojson, special tokens in a file of their own, a template for
    tools.
    """
    from transformers import AutoTokenizer

    model = shutil.copytree(tiny_model, tmp_path / "model")
    (model / "chat_template.jinja").unlink()
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    (model / "special_tokens_map.json").write_text(
        json.dumps({"bos_token": {"content": "<|im_start|>"}, "eos_token": "<|im_end|>"})
    )
    tools = [{"type": "function", "b": "ä<", "a": [1, 2]}]
    right = AutoTokenizer.from_pretrained(model).apply_chat_template(
        TALK, tools=tools, tokenize=False
    )
    assert open_chat(str(model)).render(TALK, tools, template=None, opening=False) == right


def test_an_answer_has_no_space_that_the_template_does_not_write(
    given: Any, tiny_model: Path, tmp_path: Path
) -> None:
    """Tokenizers as Llama 2's put a space before every text; an answer is the middle of one."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    model = shutil.copytree(tiny_model, tmp_path / "model")
    words = {
        word: i
        for i, word in enumerate(
            ["<unk>", "</s>", "\u2581", "\n", ":", "a", "4", "\u2581a", "\u25814"]
        )
    }
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Metaspace(prepend_scheme="always", split=True),
            pre_tokenizers.Split("\n", "isolated"),
            pre_tokenizers.Split(":", "isolated"),
        ]
    )
    tokenizer.save(str(model / "tokenizer.json"))
    (model / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    template = (
        "{% for m in messages %}a:\n{{ m.content }}{{ eos_token }}{% endfor %}{% if "
        "add_generation_prompt %}a:\n{% endif %}"
    )
    (d,) = given(
        [{"prompt": "a", "response": "4"}], model_path=str(model), chat_template=template
    ).records
    whole = tokenizer.encode("a:\na</s>a:\n4</s>", add_special_tokens=False).ids
    assert (
        d.tokens.tolist() == whole
        and d.loss_mask.tolist() == [False] * (len(whole) - 2) + [True] * 2
    )


def test_special_tokens_of_older_models_end_an_answer(
    given: Any, tiny_model: Path, tmp_path: Path
) -> None:
    model = shutil.copytree(tiny_model, tmp_path / "model")
    (model / "tokenizer_config.json").write_text("{}")
    (model / "generation_config.json").unlink()
    (model / "special_tokens_map.json").write_text('{"eos_token": "<|im_end|>"}')
    (d,) = given(
        [{"prompt": "qx7", "response": "7"}], model_path=str(model), chat_template=CHATML
    ).records
    assert spans(tiny_model, d) == ["7<|im_end|>"]


def test_a_template_that_rewrites_earlier_turns_is_refused_for_every_turn(
    given: Any, tiny_model: Path
) -> None:
    talk = [*TALK[:2], {"role": "assistant", "content": "<think>two</think>4"}, *TALK[3:]]
    form = {"prompt_type": "messages", "messages_key": "messages"}
    (last,) = given([{"messages": talk}], form=form, chat_template=FORGETFUL).records
    assert spans(tiny_model, last) == ["6<|im_end|>"]
    with pytest.raises(
        ConfigError,
        match=r"row 0 of .*message 4.*turns before it differently.*enable_concatenated_multi_turn: "
        r"false",
    ):
        given([{"messages": talk}], form=form, chat_template=FORGETFUL, every_turn=True)


MESSAGES = {"prompt_type": "messages", "messages_key": "messages"}
CALLS = (  # as Qwen2.5 writes calls, in short
    "{% for m in messages %}<|im_start|>{{ m.role[0] }}{% if m.content %}{{ m.content }}{% endif %}"
    "{% for c in m.tool_calls %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor "
    "%}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>a{% endif %}"
)
DEEPSEEKS = (
    "{% for m in messages %}<|im_start|>{{ m.role[0] }}"
    "{% if m['content'] is none %}{{ m.tool_calls[0].function.name + "
    "m.tool_calls[0].function['arguments'] }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>{% endfor %}{% if add_generation_prompt "
    "%}<|im_start|>a{% endif %}"
)

THOUGHTLESS = CHATML.replace("m['content']", "m['content'].split('</think>')[-1]")
# as Llama 3.1's
NAMES = CHATML.replace(
    "m['content']", "(m.tool_calls[0].function.name if m.tool_calls else m.content)"
)
MISTRALS = CALLS.replace(
    "c.function.name }}{{ c.function.arguments | tojson", "c.function | tojson"
)


@pytest.mark.parametrize(
    ("template", "arguments", "shown"),
    [
        (CALLS, '{"a":1}', 'add{"a": 1}<|im_end|>'),
        (CALLS, {"a": 1}, 'add{"a": 1}<|im_end|>'),
        (CALLS, "{", 'add"{"<|im_end|>'),
        (CALLS, "", "add{}<|im_end|>"),
        (CALLS, None, "add{}<|im_end|>"),
        (DEEPSEEKS, '{"a":1}', 'add{"a":1}<|im_end|>'),
        (DEEPSEEKS, {"a": 1}, 'add{"a": 1}<|im_end|>'),
        (MISTRALS, '{"a":1}', '{"name": "add", "arguments": {"a": 1}}<|im_end|>'),
        (MISTRALS, {"a": 1}, '{"name": "add", "arguments": {"a": 1}}<|im_end|>'),
    ],
)
def test_a_call_is_trained_as_the_model_would_write_it(
    given: Any, tiny_model: Path, template: str, arguments: Any, shown: str
) -> None:
    """OpenAI's form has arguments as JSON text, which must not be quoted a second time."""
    call = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "add", "arguments": arguments}}],
    }
    (d,) = given([{"messages": [TALK[1], call]}], form=MESSAGES, chat_template=template).records
    assert spans(tiny_model, d) == [shown]


@pytest.mark.parametrize(
    ("answer", "template", "why"),
    [
        (
            {"content": "", "tool_calls": [{"function": {"name": "add", "arguments": "{}"}}]},
            None,
            "does not write 'add'",
        ),
        (
            {"content": "yes"},
            "{% for m in messages %}{{ m.role }}{{ m.content[:1] }}{% endfor %}",
            "does not write 'yes'",
        ),
        ({"content": "yes", "reasoning_content": "as asked"}, None, "does not write 'as asked'"),
        ({"content": "<think>as asked</think>yes"}, THOUGHTLESS, "does not write 'as asked'"),
        (
            {
                "content": "let me add",
                "tool_calls": [{"function": {"name": "add", "arguments": "{}"}}],
            },
            NAMES,
            "write 'let me add'",
        ),
        (
            {"content": "yes", "function_call": {"name": "add", "arguments": "{}"}},
            None,
            "does not write 'add'",
        ),
        (
            {"content": "", "tool_calls": '[{"function": {"name": "add"}}]'},
            None,
            "must be a list of calls",
        ),
        (
            {"content": "", "tool_calls": [{"function": {"arguments": "{}"}}]},
            None,
            "each an object with a name",
        ),
        (
            {"content": None},
            "{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}",
            "the answer is empty",
        ),
        ({"content": ""}, None, "the answer is empty"),
    ],
)
def test_an_answer_that_would_be_learnt_as_another_one_is_refused(
    given: Any, answer: Any, template: str | None, why: str
) -> None:
    rows = [
        {"messages": [TALK[1], {"role": "assistant", **turn}]}
        for turn in ({"content": "4"}, answer)
    ]
    rows = rows if template is None else rows[1:]
    with pytest.raises(ConfigError, match=rf"row {len(rows) - 1} of .*, message 1: .*{why}"):
        given(rows, form=MESSAGES, chat_template=template)


def test_what_was_thought_may_stand_elsewhere(given: Any, tiny_model: Path) -> None:
    template = CHATML.replace(
        "m['content']", "m['content'].replace('<think>', '{').replace('</think>', '}')"
    )
    talk = [TALK[1], {"role": "assistant", "content": "<think>two</think>4"}]
    (d,) = given([{"messages": talk}], form=MESSAGES, chat_template=template).records
    assert spans(tiny_model, d) == ["{two}4<|im_end|>"]


def test_a_row_that_the_template_cannot_take_is_named(given: Any) -> None:
    rows = [
        {"messages": [{"role": role, "content": "2+2"}, TALK[2]]} for role in ("user", "system")
    ]
    strict = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        + CHATML
    )
    with pytest.raises(
        ConfigError, match=r"row 1 of .*rows\.jsonl: the chat template does not work .* no system"
    ):
        given(rows, form=MESSAGES, chat_template=strict)


@pytest.mark.parametrize("kind", ["chats", "pairs"])
def test_a_token_that_the_model_has_no_embedding_for_is_refused(
    given: Any, tiny_model: Path, tmp_path: Path, kind: str
) -> None:
    """A tokenizer that was given tokens, and a model that was not: else the step that reads the row
    would end the run.
    """
    from tokenizers import AddedToken, Tokenizer

    model = shutil.copytree(tiny_model, tmp_path / "model")
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken("<call>", special=True)])
    tokenizer.save(str(model / "tokenizer.json"))
    # models that take images, too, leave out what is their family's default: the embedding tells
    if kind == "pairs":
        config = json.loads((model / "config.json").read_text())
        del config["vocab_size"]
        (model / "config.json").write_text(json.dumps(config))
    rows = [
        {"prompt": "2+2", "response": answer, "chosen": answer, "rejected": "5"}
        for answer in ("4", "<call>4")
    ]
    with pytest.raises(
        ConfigError,
        match=r"row 1 of .* has token 259, and the model knows 259.*resize_token_embeddings",
    ):
        given(rows, kind, model_path=str(model))


def test_rows_are_the_same_on_every_day(given: Any) -> None:
    """Or a run could not go on tomorrow."""
    now = "{{ strftime_now('%Y %f') }}" + CHATML
    first, second = (
        given([{"prompt": "2+2", "response": "4"}], chat_template=now) for _ in range(2)
    )
    assert first.fingerprint == second.fingerprint


def test_a_text_is_trained_wholly_and_ends(given: Any, tiny_model: Path) -> None:
    (d,) = given([{"prompt": "hello"}], "texts").records
    assert (
        decoded(tiny_model, d.tokens) == "hello<|im_end|>"
        and d.loss_mask.tolist() == [False] + [True] * 5
    )


PAIR = {"prompt": "q", "chosen": "yes", "rejected": "no"}
NESTED = {"prompt_key": "data.prompt", "response_key": "data.completion"}


@pytest.mark.parametrize(
    ("row", "form"),
    [
        (PAIR, {}),
        ({**PAIR, "chosen": {"role": "assistant", "content": "yes"}}, {}),
        (
            {
                **PAIR,
                "chosen": [
                    {"role": "user", "content": "q"},
                    {"role": "assistant", "content": "yes"},
                ],
            },
            {},
        ),
        (
            {**PAIR, "prompt": [{"role": "user", "content": "q"}]},
            {"prompt_type": "messages", "messages_key": "prompt"},
        ),
        (  # TRL's implicit prompt
            {
                name: [{"role": "user", "content": "q"}, {"role": "assistant", "content": text}]
                for name, text in (("chosen", "yes"), ("rejected", "no"))
            },
            {},
        ),
        (
            {
                **PAIR,
                "chosen": '[{"role": "user", "content": "q"}, {"role": "assistant", "content": '
                '"yes"}]',
            },
            {},
        ),
    ],
)
def test_pairs_in_every_form(
    given: Any, tiny_model: Path, row: dict[str, Any], form: dict[str, Any]
) -> None:
    (p,) = given([row], "pairs", form).records
    assert isinstance(p, Preference)
    texts = [decoded(tiny_model, t) for t in (p.prompt, p.chosen, p.rejected)]
    assert texts == ["<|im_start|>uq<|im_end|><|im_start|>a", "yes<|im_end|>", "no<|im_end|>"]


@pytest.mark.parametrize("kind", ["chats", "pairs", "texts"])
def test_an_answer_is_looked_for_in_the_rows_that_need_one(
    given: Any, tiny_model: Path, kind: str
) -> None:
    """Whatever columns the first row has."""
    asked = {"messages": TALK[1:2]} if kind == "chats" else PAIR
    rows = [asked | {"response": "4"}, {"messages": TALK[1:3]} if kind == "chats" else asked]
    form = MESSAGES if kind == "chats" else {}
    for order in (rows, rows[::-1]):
        first, second = given(order, kind, form).records
        if kind == "chats":
            assert spans(tiny_model, first) == spans(tiny_model, second) == ["4<|im_end|>"]


@pytest.mark.parametrize(
    ("rows", "kind", "form", "why"),
    [
        ([{"prompt": "q"}], "chats", {}, "row 0 of .* has no answer"),
        (
            [{"messages": TALK[:2]}],
            "chats",
            {"prompt_type": "messages", "messages_key": "messages"},
            "has no answer",
        ),
        (
            [PAIR, {"prompt": "q", "chosen": "yes"}],
            "pairs",
            {},
            "row 1 of .* has no column 'rejected'; its columns are chosen, prompt",
        ),
        ([{**PAIR, "rejected": "yes"}], "pairs", {}, "both answers are the same"),
        ([{**PAIR, "chosen": 7}], "pairs", {}, "must be a text, or a chat"),
        (
            [
                {
                    **PAIR,
                    "chosen": [
                        {"role": "user", "content": "other"},
                        {"role": "assistant", "content": "y"},
                    ],
                }
            ],
            "pairs",
            {},
            "not begin with",
        ),
        (
            [{"messages": TALK}],
            "pairs",
            {"prompt_type": "messages", "messages_key": "messages"},
            "must not end with an answer",
        ),
        (
            [{**PAIR, "images": []}, {**PAIR, "images": ["cat.png"]}],
            "pairs",
            {},
            "row 1 of .*: column 'images' is not empty",
        ),
        (
            [{"prompt": "q" * 300, "response": "a"}],
            "chats",
            {},
            r"row 0 of .* has \d+ tokens, more than model.max_model_len 200",
        ),
    ],
)
def test_a_row_that_cannot_be_used_is_named(
    given: Any, rows: Any, kind: str, form: Any, why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        given(rows, kind, form)


@pytest.mark.parametrize("last", ["gpt", "function_call"])
def test_a_chat_of_sharegpt_is_read(given: Any, tiny_model: Path, last: str) -> None:
    chat = [{"from": "human", "value": "q"}, {"from": last, "value": "yes"}]
    form = {"prompt_type": "messages", "messages_key": "conversations"}
    if last == "function_call":
        with pytest.raises(ConfigError, match="not of 'function_call'"):
            given([{"conversations": chat}], form=form)
        return
    (d,) = given([{"conversations": chat}], form=form).records
    assert spans(tiny_model, d) == ["yes<|im_end|>"]


def test_pairs_without_a_common_beginning_are_named(given: Any) -> None:
    row = {
        name: [{"role": "user", "content": name}, {"role": "assistant", "content": "a"}]
        for name in ("chosen", "rejected")
    }
    with pytest.raises(ConfigError, match=r"row 0 of .*: the prompt of a pair"):
        given([row], "pairs")


def test_all_turns_of_a_chat_are_rendered_in_one_request(
    given: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    render = template_worker.render

    def counted(*arguments: Any, **names: Any) -> list[str]:
        asked.append(arguments[4])
        return render(*arguments, **names)

    monkeypatch.setattr(template_worker, "render", counted)
    turns = [{"role": role, "content": "x"} for _ in range(6) for role in ("user", "assistant")]
    form = {"prompt_type": "messages", "messages_key": "messages"}
    given([{"messages": turns}], form=form, every_turn=True)
    assert [len(beginnings) for beginnings in asked] == [12]


@pytest.mark.parametrize("content", ["{", "[1]"])
def test_a_generation_config_that_cannot_be_read_is_named(
    given: Any, tiny_model: Path, tmp_path: Path, content: str
) -> None:
    settings = given([{"prompt": "2+2", "response": "4"}]).settings
    model = shutil.copytree(tiny_model, tmp_path / "model")
    (model / "generation_config.json").write_text(content)
    with pytest.raises(
        ConfigError, match=r"generation_config\.json (cannot be read as JSON|holds a list)"
    ):
        open_offline_data(replace(settings, model_path=str(model)))


def test_long_rows_can_be_left_out(given: Any) -> None:
    rows = [{"prompt": "q" * n, "response": "a"} for n in (3, 300, 5, 400)]
    data = given(rows, filter_overlong=True)
    assert str(data.left_out).startswith(
        "2 of 4 rows are left out (filter_overlong): they have more tokens than "
        "model.max_model_len 200"
    )
    assert (len(data), data.left_out.rows) == (2, (1, 3)) and [r.id.task for r in data.records] == [
        0,
        2,
    ]
    with pytest.raises(ConfigError, match="no row has at most 200 tokens"):
        given([rows[1]], filter_overlong=True)


def test_the_order_is_a_function_of_the_step(given: Any) -> None:
    rows = [{"prompt": f"q{i}", "response": "a"} for i in range(10)]
    data = given(rows)
    assert [data.batch(s, 4, 1) for s in (1, 2, 3)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 1]]
    shuffled = given(rows, selector="shuffle")
    taken = [i for s in range(1, 6) for i in shuffled.batch(s, 4, 1)]
    assert sorted(taken[:10]) == sorted(taken[10:]) == list(range(10)) and taken[:10] != taken[10:]
    assert shuffled.batch(3, 4, 1) == taken[8:12] != given(rows, selector="shuffle").batch(3, 4, 2)
    drawn = given(rows, selector="random")
    assert all(len(set(drawn.batch(s, 10, 1))) == 10 for s in range(1, 4))
    counts = Counter(i for s in range(1, 400) for i in drawn.batch(s, 4, 1))
    assert max(counts.values()) < 1.5 * min(counts.values())


def test_a_place_in_the_data_tells_rows_and_order_apart(given: Any) -> None:
    rows = [{"prompt": f"q{i}", "response": "a"} for i in range(4)]
    place = given(rows).place(3, 2, 1)
    assert place == given(rows).place(3, 2, 1)
    others = [
        given(rows).place(4, 2, 1),
        given(rows).place(3, 4, 1),
        given(rows, selector="shuffle").place(3, 2, 1),
        given(rows[::-1]).place(3, 2, 1),
        given([*rows[:3], {"prompt": "q3", "response": "b"}]).place(3, 2, 1),
        replace(given(rows), fingerprint="").place(3, 2, 1),
    ]
    assert len({place, *others}) == 7


@pytest.mark.parametrize(
    "response",
    [{"role": "assistant", "content": "4"}, [TALK[1], {"role": "assistant", "content": "4"}]],
)
def test_an_answer_may_be_a_message_or_a_chat(given: Any, tiny_model: Path, response: Any) -> None:
    (d,) = given([{"data": {"prompt": [TALK[1]], "completion": response}}], form=NESTED).records
    assert spans(tiny_model, d) == ["4<|im_end|>"]
    assert decoded(tiny_model, d.tokens) == "<|im_start|>u2+2<|im_end|><|im_start|>a4<|im_end|>"


def test_answers_of_pairs_may_lie_below_a_column(given: Any, tiny_model: Path) -> None:
    row = {
        "data": {"prompt": "q", "better": "yes", "worse": [{"role": "assistant", "content": "no"}]}
    }
    form = {"prompt_key": "data.prompt"}
    (p,) = given([row], "pairs", form, chosen_key="data.better", rejected_key="data.worse").records
    assert isinstance(p, Preference)
    assert [decoded(tiny_model, t) for t in (p.chosen, p.rejected)] == [
        "yes<|im_end|>",
        "no<|im_end|>",
    ]


@pytest.mark.parametrize(
    ("response", "why"),
    [
        (7, "'data.completion' must be a text, or a chat that ends with the assistant$"),
        (
            [{"role": "assistant", "content": [{"type": "image"}]}],
            "parts of images need format.image_key, sound and videos are not offered",
        ),
        (
            [{"role": "user", "content": "other"}, {"role": "assistant", "content": "4"}],
            "not begin with the row's prompt",
        ),
    ],
)
def test_an_answer_of_another_kind_says_what_it_must_be(
    given: Any, response: Any, why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        given([{"data": {"prompt": "2+2", "completion": response}}], form=NESTED)


def test_an_answer_of_weight_0_is_not_trained(given: Any, tiny_model: Path) -> None:
    """As OpenAI's fine-tuning files mark it; it was trained."""

    def weighted(*weights: Any, every: bool = True) -> list[str]:
        talk = [dict(m) for m in TALK]
        for at, weight in zip((2, 4), weights, strict=True):
            talk[at]["weight"] = weight
        (d,) = given([{"messages": talk}], form=MESSAGES, every_turn=every).records
        return spans(tiny_model, d)

    assert weighted(1, 1) == weighted(None, None) == ["4<|im_end|>", "6<|im_end|>"]
    assert weighted(0, 1) == ["6<|im_end|>"] and weighted(1, 0) == ["4<|im_end|>"]
    assert weighted(0, 1, every=False) == ["6<|im_end|>"]
    for *weights, every in ((0, 0, True), (0.5, 1, True), (1, 0, False)):
        with pytest.raises(
            ConfigError, match=r"row 0 of .* weight of its answers is .*must be 1 or 0"
        ):
            weighted(*weights, every=every)
