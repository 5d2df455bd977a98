"""A request may bring a chat template and values for it; both win over the engine's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rft.engine.chat import Chat, load_tokenizer
from rft.engine.settings import EngineSettings
from rft.types.ports import GenerateRequest

TEMPLATE = "{{ messages[0].content }}{{ tone }}{{ more }}"


def test_template_and_values_of_a_request(tiny_model: Path) -> None:
    kwargs = {"tone": "1", "more": "2"}
    settings = EngineSettings(
        engine_type="transformers",
        name="e",
        model_path=str(tiny_model),
        max_model_len=100,
        max_prompt_tokens=50,
        chat_template=TEMPLATE,
        chat_template_kwargs=kwargs,
    )
    chat = Chat(settings, load_tokenizer(settings))

    def shown(**more: object) -> str:
        return chat.decode(
            chat.encode(GenerateRequest(messages=({"role": "user", "content": "hi"},), **more))
        )  # type: ignore[arg-type]

    assert shown() == "hi12"
    assert shown(chat_template_args={"tone": "9"}) == "hi92"
    assert shown(chat_template="{{ more }}!{{ messages[0].content }}") == "2!hi"


def test_a_call_of_a_tool_without_text_has_no_content_where_the_template_asks_for_that(
    tiny_model: Path,
) -> None:
    """DeepSeek's templates, of which this is a part, leave out the call otherwise."""
    settings = EngineSettings(model_path=str(tiny_model), max_model_len=100)
    chat = Chat(settings, load_tokenizer(settings))
    call = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "add", "arguments": '{"a":1}'}}],
    }

    def shown(template: str) -> str:
        messages = ({"role": "user", "content": "hi"}, call)
        template = (
            "{{ messages[0].content }}{% for message in messages[1:] %}" + template + "{% endfor %}"
        )
        return chat.decode(chat.encode(GenerateRequest(messages=messages, chat_template=template)))

    for test in ("message['content'] is none", "message.content is none"):
        arguments = "{{ message.tool_calls[0].function.arguments }}"
        assert shown("{% if " + test + " %}" + arguments + "{% endif %}") == 'hi{"a":1}'
    both = (
        "{{ message.tool_calls[0].function.arguments }}{% if message.content is not none %}an "
        "empty answer{% endif %}"
    )
    assert shown(both) == 'hi{"a":1}'
    assert (
        shown("{{ message.tool_calls[0].function.arguments }}{{ message.content + '.' }}")
        == 'hi{"a":1}.'
    )
    none = (
        "{% if messages[0].content is none %}{{ messages[0].tool_calls[0].function.arguments "
        "}}{% endif %}"
    )
    judge = Chat(replace(settings, chat_template=none), load_tokenizer(settings))
    assert judge.decode(judge.encode_conversation([call])) == '{"a":1}'
    assert call["content"] == ""


def test_arguments_of_a_call_are_written_once(tiny_model: Path) -> None:
    """OpenAI's form has them as JSON text, which a template that writes JSON would quote; one that
    adds them to a text needs it.
    """
    settings = EngineSettings(model_path=str(tiny_model), max_model_len=100)
    chat = Chat(settings, load_tokenizer(settings))
    call = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "add", "arguments": '{"a":1}'}}],
    }

    def shown(template: str) -> str:
        return chat.decode(
            chat.encode(
                GenerateRequest(
                    messages=(call,),
                    chat_template="{% for c in messages[0].tool_calls %}" + template,
                )
            )
        )

    assert shown("{{ c.function.arguments | tojson }}{% endfor %}") == '{"a": 1}'
    assert (
        shown(
            "{% for k, v in c.function['arguments']|items %}{{ k }}:{{ v }}{% endfor %}{% endfor %}"
        )
        == "a:1"
    )
    assert shown("{{ '-' + c['function']['arguments'] + '-' }}{% endfor %}") == '-{"a":1}-'
    assert (
        shown("{{ c['function']['arguments'] }}{{ '' ~ c.function.arguments }}{% endfor %}")
        == '{"a":1}{"a":1}'
    )
    named = "{% set given = c.function.arguments %}"
    assert (
        shown(named + "{% for k, v in given.items() %}{{ k }}:{{ v }}{% endfor %}{% endfor %}")
        == "a:1"
    ), "as GLM's"
    refuses = named + "{% if given is string %}{{ raise_exception('no text') }}{% endif %}"
    assert (
        shown(refuses + "{{ given is mapping }}{{ given | tojson }}{% endfor %}") == 'True{"a": 1}'
    ), "as LFM2's"
    assert (
        shown("{{ c.function | tojson }}{% endfor %}") == '{"name": "add", "arguments": {"a": 1}}'
    ), "as Mistral's"


def test_an_answer_reads_as_it_was_written(tiny_model: Path) -> None:
    """As with vLLM: some tokenizers would take out spaces before points and commas, which code
    needs.
    """
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"from": 0, ".": 1, "import": 2}, unk_token="."))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, clean_up_tokenization_spaces=True)
    chat = Chat(EngineSettings(model_path=str(tiny_model)), tokenizer)
    assert chat.decode([0, 1, 2]) == "from . import"
