"""Messages to tokens, once.  Shared by the engines that have a Hugging Face tokenizer.

A request that goes on from an earlier call has that call's tokens kept as they are: only what the
template puts after the answer is rendered and tokenised.  It is found by rendering the conversation
with a mark in the answer's place (`rft.types.written`), so it does not matter what the template
does to the history (drops earlier thinking, merges the system message).

Knows no model.  Invariant: what the model sees is exactly `prompt_tokens` of the completion;
nothing is tokenised twice, and no message is left out.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import TemplateError

from rft.engine.base import (
    PromptTooLong,
    TokensDiffer,
    check_prompt,
    check_tokens,
    cut_at_stop,
    prompt_limit,
)
from rft.engine.settings import EngineSettings
from rft.errors import ConfigError, SetupError
from rft.types import modelfiles
from rft.types.ports import GenerateRequest
from rft.types.thoughts import TAIL_TOKENS, opens_thought
from rft.types.written import Tail, behind_answer, check_written, way_out

log = logging.getLogger(__name__)
# of renderers and tokenizers: they decide what rendering gives, not what the text says
RESERVED = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "conversations",
        "max_length",
        "messages",
        "padding",
        "raise_exception",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "self",
        "strftime_now",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)
# stands before a text that goes on a sentence, so that tokenizers do not add the space of a
# beginning
_ANCHOR = "x"


class Chat:
    """Renders requests with the tokenizer's chat template, or the one that the settings give (a
    template or a file).
    """

    def __init__(
        self, settings: EngineSettings, tokenizer: Any, vocab_size: int | None = None
    ) -> None:
        """`vocab_size`: how many token ids the model has an embedding of; None = as many as the
        tokenizer.
        """
        self.settings = settings
        self.tokenizer = tokenizer
        self.vocab_size = len(tokenizer) if vocab_size is None else vocab_size
        self.template = _template(settings.chat_template)
        self._no_template = ""
        if self.template is None and tokenizer.chat_template is None:
            self._no_template = (
                f"the tokenizer of {settings.model_path} has no chat template; set "
                f"chat_template or send prompt_tokens"
            )
        special = {i for i, t in tokenizer.added_tokens_decoder.items() if t.special} | set(
            tokenizer.all_special_ids
        )
        self._added = {
            i: str(tokenizer.convert_ids_to_tokens(i))
            for i in special | set(tokenizer.added_tokens_decoder)
        }
        self._special = {i: text for i, text in self._added.items() if i in special}
        self.differing = 0  # prompts that differ from the whole chat tokenised at once

    def encode(self, request: GenerateRequest) -> list[int]:
        """Token ids of the prompt.

        Raises PromptTooLong, TokensDiffer (tokenization_check: strict), MessageLeftOut, or
        ValueError: no prompt, no template, token ids or template arguments that are not allowed,
        messages that the template or the tokenizer cannot take.
        """
        try:
            return self._encoded(request)
        except (ValueError, MemoryError):
            raise
        except Exception as e:  # templates and tokenizers raise anything
            advice = f"; {way_out(request.messages)}" if isinstance(e, TemplateError) else ""
            what = (
                f"the chat template or the tokenizer of {self.settings.model_path} cannot take "
                f"this request"
            )
            raise ValueError(f"{what}: {type(e).__name__}: {e}{advice}") from e

    def _encoded(self, request: GenerateRequest) -> list[int]:
        goes_on = False
        if request.prompt_tokens:
            ids = list(request.prompt_tokens)
            goes_on = request.prefix_tokens is not None
        elif not request.messages:
            raise ValueError("a request needs messages or prompt_tokens")
        elif self._no_template and request.chat_template is None:
            raise ValueError(self._no_template)
        elif request.prefix_tokens is not None and request.prefix_messages:
            ids = self._go_on(request, [int(t) for t in request.prefix_tokens])
            goes_on = True
        else:
            check_written(
                request.messages,
                lambda messages: str(self._render(request, messages, tokenize=False)),
            )
            ids = self._render(request, [dict(m) for m in request.messages], tokenize=True)
        ids = cut(ids, prompt_limit(self.settings, goes_on=goes_on), request.prompt_truncation)
        check_prompt(len(ids), self.settings, goes_on=goes_on)
        check_tokens(ids, self.vocab_size, self.settings.name)
        return ids

    def whole(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """Token ids of a conversation that is over, for a model that judges it.  Raises
        PromptTooLong, ValueError.
        """
        if self._no_template:
            raise ValueError(self._no_template)
        template = self.template or self.tokenizer.get_chat_template()

        def render(given: list[dict[str, Any]], *, tokenize: bool = False) -> Any:
            given = modelfiles.as_read(given, template)
            kwargs = self.settings.chat_template_kwargs
            return self.tokenizer.apply_chat_template(
                given, chat_template=template, tokenize=tokenize, return_dict=False, **kwargs
            )

        check_written(messages, render)
        ids = render([dict(m) for m in messages], tokenize=True)
        limit = min(
            self.settings.max_model_len,
            self.settings.max_prompt_tokens or self.settings.max_model_len,
        )
        if len(ids) > limit:
            raise PromptTooLong(len(ids), limit)
        return list(ids)

    def choices(self, request: GenerateRequest) -> list[int]:
        """Id of the first token of each of `request.choices`.  Raises ValueError where two begin
        with the same one.
        """
        # what an answer stands behind
        first = [self._tokens(word, "\n")[:1] for word in request.choices]
        if not all(first) or len({token for (token,) in first}) != len(first):
            raise ValueError(
                f"choices {', '.join(map(repr, request.choices))}: each has to begin with another "
                f"token; those of "
                f"{self.settings.model_path} are {first}"
            )
        return [token for (token,) in first]

    def _render(
        self, request: GenerateRequest, messages: list[dict[str, Any]], *, tokenize: bool
    ) -> Any:
        tools = [dict(t) for t in request.tools] or None
        template = (
            request.chat_template or self.template or self.tokenizer.get_chat_template(tools=tools)
        )
        args = template_args(request, template) if request.chat_template_args else {}
        return self.tokenizer.apply_chat_template(
            modelfiles.as_read(messages, template),
            tools=tools,
            chat_template=template,
            add_generation_prompt=True,
            tokenize=tokenize,
            return_dict=False,
            **{**self.settings.chat_template_kwargs, **args},
        )

    def _go_on(self, request: GenerateRequest, before: list[int]) -> list[int]:
        """`before`, which ends with an answer, and the tokens of what follows it."""
        answer = request.prefix_messages - 1
        tail = behind_answer(
            request.messages,
            answer,
            lambda messages: str(self._render(request, messages, tokenize=False)),
        )
        ids = before + self._without_end(tail, before)
        if self.settings.tokenization_check != "off":
            self._compare(request, ids)
        return ids

    def _without_end(self, tail: Tail, before: list[int]) -> list[int]:
        """The tokens of `tail` without the end of the answer, where `before` has it already."""
        last = before[-1]
        end = tail.text[: tail.ends]
        ends = self._added if tail.called else self._special
        if ends.get(last, "\0") in end:  # the model has ended its answer itself
            after = self._tokens(tail.text)
            return after[after.index(last) + 1 :]
        return self._tokens(
            tail.text[self._end_of_call(end, before) :] if tail.called else tail.text
        )

    def _end_of_call(self, end: str, before: list[int]) -> int:
        """How much of `end` is the end of the last call, which the model has written: what both
        have, else all before a special token.
        """
        written = str(
            self.tokenizer.decode(before[-len(end) - 1 :], skip_special_tokens=False)
        ).removesuffix(self._added.get(before[-1], ""))
        both = next((n for n in range(len(end), 0, -1) if written.endswith(end[:n])), 0)
        return both or min(
            (place for text in self._special.values() if (place := end.find(text)) >= 0), default=0
        )

    def _tokens(self, text: str, behind: str = _ANCHOR) -> list[int]:
        """Token ids of a text that stands behind another one."""

        def ids(part: str) -> list[int]:
            return list(self.tokenizer(part, add_special_tokens=False)["input_ids"])

        anchor = ids(behind)
        both = ids(behind + text)
        return both[len(anchor) :] if both[: len(anchor)] == anchor else ids(text)

    def _compare(self, request: GenerateRequest, ids: list[int]) -> None:
        whole = list(self._render(request, [dict(m) for m in request.messages], tokenize=True))
        if whole == ids:
            return
        self.differing += 1
        at = next(
            (i for i, (a, b) in enumerate(zip(ids, whole, strict=False)) if a != b),
            min(len(ids), len(whole)),
        )
        near = slice(max(0, at - 4), at + 8)
        text = (
            f"the tokens of this conversation differ from those of the whole chat tokenised at "
            f"once, from token {at} of {len(ids)}: "
            f"{self.tokenizer.decode(ids[near])!r} there, {self.tokenizer.decode(whole[near])!r} "
            f"at once.  The tokens as the model saw "
            "and wrote them are right for training; set explorer.rollout_model.tokenization_check: "
            "off, or use a chat template that "
            "shows earlier messages as they were"
        )
        if self.settings.tokenization_check == "strict":
            raise TokensDiffer(text)
        if self.differing == 1:
            log.warning("%s: %s (said once)", self.settings.name, text)

    def opens_thought(self, prompt: Sequence[int]) -> bool:
        """Whether a prompt ends inside a thought, with which the answer goes on."""
        tail = self.tokenizer.decode(
            prompt[-TAIL_TOKENS:], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return opens_thought(str(tail))

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        """Text of written tokens: with special ones, but for BOS, EOS, padding and ends of turns."""
        ids = [token for token in map(int, tokens) if token not in self._unread]
        return str(
            self.tokenizer.decode(
                ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )

    def decode_stopped(
        self, tokens: Sequence[int] | np.ndarray, stops: Sequence[str]
    ) -> tuple[str, str]:
        """Text of an answer that ended by itself, and the stop text behind it; the special token
        that ended it is no text.
        """
        end = self._special.get(int(tokens[-1])) if len(tokens) else None
        return cut_at_stop(
            self.decode(tokens if end is None or end in stops else tokens[:-1]), stops
        )

    @cached_property
    def _unread(self) -> set[int]:
        names = self.tokenizer
        ids = {
            token
            for token in (names.bos_token_id, names.eos_token_id, names.pad_token_id)
            if token is not None
        }
        if self._no_template:
            return ids
        messages = ({"role": "user", "content": _ANCHOR}, {"role": "assistant", "content": _ANCHOR})
        request = GenerateRequest(messages=messages)
        try:
            tail = behind_answer(
                messages, 1, lambda marked: str(self._render(request, marked, tokenize=False))
            )
        except (ValueError, TemplateError):  # a template of other conversations
            return ids
        end = next((token for token in self._tokens(tail.text) if token in self._special), None)
        return ids if end is None else ids | {end}


def cut(ids: list[int], limit: int, side: str) -> list[int]:
    """At most `limit` token ids of a prompt: the last ones (left), the first ones (right), or the
    ends (middle); error: all of them.
    """
    if len(ids) <= limit or side == "error":
        return ids
    if side == "left":
        return ids[-limit:]
    if side == "right":
        return ids[:limit]
    if side == "middle":
        return ids[: limit // 2] + ids[len(ids) - (limit - limit // 2) :]
    raise ValueError(f"prompt_truncation {side!r} is not known; use error, left, right or middle")


def template_args(request: GenerateRequest, template: str) -> dict[str, Any]:
    """The request's template arguments that `template` reads; others have no effect and are left
    out.

    Raises ValueError for RESERVED names, and for names that a client chose and the template does
    not read.
    """
    reads = _variables(template)
    strict = set(request.strict_template_args)
    for name in request.chat_template_args:
        if name in RESERVED or (name in strict and name not in reads):
            raise ValueError(
                f"chat template argument {name[:80]!r} is not allowed; the template reads "
                f"{', '.join(sorted(reads)) or 'no arguments'}"
            )
    return {name: value for name, value in request.chat_template_args.items() if name in reads}


@lru_cache(maxsize=64)
def _variables(template: str) -> frozenset[str]:
    """The names that a chat template reads and a caller may set."""
    from jinja2 import meta
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    env = ImmutableSandboxedEnvironment(extensions=[loopcontrols])
    template = modelfiles.plain_jinja(template)
    return frozenset(
        meta.find_undeclared_variables(env.parse(template)) - env.globals.keys() - RESERVED
    )


def load_tokenizer(settings: EngineSettings) -> Any:
    """The tokenizer in its own folder or the model's.  Raises SetupError when there is none."""
    from transformers import AutoTokenizer

    folder = settings.tokenizer_path or settings.model_path
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=settings.trust_remote_code)
    except (OSError, ValueError) as e:
        raise SetupError(f"no tokenizer in {folder}: {e}") from e


def _template(given: str | None) -> str | None:
    """A template is Jinja text; anything else names a file."""
    if given is None or "{" in given:
        return given
    path = Path(given).expanduser()
    if not path.is_file():
        raise ConfigError(
            f"{given!r} is neither a Jinja template nor a file", key="chat_template", given=given
        )
    return path.read_text(encoding="utf-8")
