"""The forms of published chat templates (tests/data/chat_templates), and how the models of each
family write an answer and a call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "data" / "chat_templates"
Calls = Sequence[tuple[str, dict[str, Any]]]
_SPECIAL = re.compile(
    r"<\|[^|<>]+\|?>|<[a-z_]+\|>|<｜[^｜]+｜>|</?s>|<(?:start|end)_of_turn>|\[/?[A-Z_]{4,}\]|\[gMASK\]|<sop>|\]~!?b\[|\]~b\]|\[e~\["
)
_ADDED = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)


def _hermes(calls: Calls) -> str:
    return "\n".join(
        f"<tool_call>\n{_json(name=name, arguments=given)}\n</tool_call>" for name, given in calls
    )


def _json(**fields: Any) -> str:
    return json.dumps(fields)


def _llama(calls: Calls) -> str:
    return "; ".join(_json(name=name, parameters=given) for name, given in calls)


def _coder(calls: Calls) -> str:
    def values(given: dict[str, Any]) -> str:
        return "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in given.items())

    return "\n".join(
        f"<tool_call>\n<function={name}>\n{values(given)}</function>\n</tool_call>"
        for name, given in calls
    )


def _deepseek(calls: Calls) -> str:
    one = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
    body = "\n".join(one.format(name, json.dumps(given)) for name, given in calls)
    return f"<｜tool▁calls▁begin｜>{body}<｜tool▁calls▁end｜>"


def _deepseek_v31(calls: Calls) -> str:
    one = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
    body = "".join(one.format(name, json.dumps(given)) for name, given in calls)
    return f"<｜tool▁calls▁begin｜>{body}<｜tool▁calls▁end｜>"


def _gemma4(calls: Calls) -> str:
    def value(x: Any) -> str:
        return f'<|"|>{x}<|"|>' if isinstance(x, str) else str(x)

    def values(given: dict[str, Any]) -> str:
        return ",".join(f"{k}:{value(v)}" for k, v in sorted(given.items()))

    return "".join(
        f"<|tool_call>call:{name}{{{values(given)}}}<tool_call|>" for name, given in calls
    )


def _command(calls: Calls) -> str:
    lines = ",\n".join(
        "    " + _json(tool_call_id=str(i), tool_name=name, parameters=given)
        for i, (name, given) in enumerate(calls)
    )
    return (
        f"<|START_THINKING|>I will add.<|END_THINKING|><|START_ACTION|>[\n{lines}\n]<|END_ACTION|>"
    )


def _mistral(calls: Calls) -> str:
    return (
        f"[TOOL_CALLS] {json.dumps([{'name': name, 'arguments': given} for name, given in calls])}"
    )


def _gpt_oss(calls: Calls) -> str:
    one = " to=functions.{}<|channel|>commentary json<|message|>{}"
    return "<|call|><|start|>assistant".join(
        one.format(name, json.dumps(given)) for name, given in calls
    )


def _glm(calls: Calls) -> str:
    def values(given: dict[str, Any]) -> str:
        return "".join(
            f"\n<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>" for k, v in given.items()
        )

    return "".join(f"\n<tool_call>{name}{values(given)}\n</tool_call>" for name, given in calls)


def _minimax(calls: Calls) -> str:
    def values(given: dict[str, Any]) -> str:
        return "".join(f'<parameter name="{k}">{v}</parameter>\n' for k, v in given.items())

    body = "".join(f'<invoke name="{name}">\n{values(given)}</invoke>\n' for name, given in calls)
    return f"\n<minimax:tool_call>\n{body}</minimax:tool_call>"


@dataclass(frozen=True)
class Form:
    """A family's template, and what its models write: `{}` is an answer's text, and calls where the
    family has a form of them.
    """

    name: str
    end: str
    answer: str = "{}"
    calls: Callable[[Calls], str] | None = None
    end_of_calls: str = ""  # empty: that of an answer
    bos: str | None = None
    eos: str | None = None

    @property
    def template(self) -> str:
        return (FOLDER / f"{self.name}.jinja").read_text(encoding="utf-8")

    @property
    def special(self) -> list[str]:
        """Tokens that the family's tokenizers have as one."""
        text = f"{self.template}{self.end}{self.end_of_calls}{self.calls([('x', {})]) if self.calls else ''}"
        return sorted({*_SPECIAL.findall(text), self.end, *filter(None, (self.bos, self.eos))})

    def tokenizer(self, folder: Path) -> Any:
        """The tiny model's, with the family's tokens."""
        from transformers import AutoTokenizer

        made = AutoTokenizer.from_pretrained(
            folder, bos_token=self.bos, eos_token=self.eos or self.end
        )
        made.add_special_tokens({"additional_special_tokens": self.special})
        made.add_tokens(list(_ADDED))
        return made


CHATML = Form("qwen25", "<|im_end|>", calls=_hermes)
LLAMA = Form("llama31", "<|eot_id|>", calls=_llama, bos="<|begin_of_text|>")
DEEPSEEK = Form(
    "deepseek_v3", "<｜end▁of▁sentence｜>", calls=_deepseek, bos="<｜begin▁of▁sentence｜>"
)
FORMS: dict[str, Form] = {
    form.name: form
    for form in (
        Form("chatml", "<|im_end|>"),
        Form("smollm2", "<|im_end|>"),
        replace(CHATML, name="smollm3"),
        CHATML,
        replace(CHATML, name="qwen3"),
        replace(CHATML, name="qwen3_thinking"),
        replace(CHATML, name="qwen3_coder", calls=_coder),
        replace(CHATML, name="hermes3", bos="<|begin_of_text|>"),
        LLAMA,
        replace(LLAMA, name="llama32"),
        replace(DEEPSEEK, name="r1_distill"),
        DEEPSEEK,
        replace(DEEPSEEK, name="deepseek_v31", calls=_deepseek_v31),
        Form("gemma2", "<end_of_turn>", bos="<bos>"),
        Form("gemma3", "<end_of_turn>", bos="<bos>"),
        Form("gemma4", "<turn|>", calls=_gemma4, end_of_calls="<|tool_response>", bos="<bos>"),
        Form("phi3", "<|end|>", eos="<|endoftext|>"),
        Form("phi4", "<|im_end|>"),
        Form("phi4_mini", "<|end|>", eos="<|endoftext|>"),
        Form(
            "command_r7b",
            "<|END_OF_TURN_TOKEN|>",
            "<|START_RESPONSE|>{}<|END_RESPONSE|>",
            calls=_command,
            bos="<BOS_TOKEN>",
        ),
        Form("mistral", "</s>", " {}", calls=_mistral, bos="<s>"),
        Form("mistral_small3", "</s>", bos="<s>"),
        Form(
            "gpt_oss",
            "<|return|>",
            "<|channel|>final<|message|>{}",
            calls=_gpt_oss,
            end_of_calls="<|call|>",
        ),
        Form("granite", "<|end_of_text|>"),
        Form(
            "glm45",
            "<|user|>",
            "\n<think></think>\n{}",
            calls=_glm,
            end_of_calls="<|observation|>",
            eos="<|endoftext|>",
        ),
        Form("minimax_m2", "[e~[", calls=_minimax, bos="]~!b["),
    )
}
