"""Tokenise messages once, for engines with a Hugging Face tokenizer.

A request that extends an earlier call keeps that call's tokens; only the template's text after the
answer is rendered and tokenised.  `rft.types.written` finds that text by rendering the conversation
with a mark in place of the answer, so the template may change the history (drop earlier thinking,
merge the system message).

Depends on no model.  Invariant: the model sees exactly `prompt_tokens` of the completion; nothing
is tokenised twice, and no message is left out.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
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
from rft.images.processor import ImageProcessor, PreparedImage, ShownImage, Sight
from rft.types import modelfiles
from rft.types.images import Image, ImagePlace, names_in
from rft.types.ports import GenerateRequest
from rft.types.thoughts import TAIL_TOKENS, opens_thought
from rft.types.written import Tail, behind_answer, check_written, way_out

log = logging.getLogger(__name__)
# arguments of renderers and tokenizers, which control the rendering itself and not the text
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
Images = Sequence[Image]
# precedes a text that continues a sentence, so that tokenizers add no leading space
_ANCHOR = "x"


class Chat:
    """Renders requests with the tokenizer's chat template or the one from the settings (Jinja text
    or a file).
    """

    def __init__(
        self,
        settings: EngineSettings,
        tokenizer: Any,
        vocab_size: int | None = None,
        images: ImageProcessor | None = None,
    ) -> None:
        """`vocab_size`: number of token ids with an embedding; None = size of the tokenizer.
        `images`: None = the model reads texts only.
        """
        self.settings = settings
        self.tokenizer = tokenizer
        self.images = images
        self.vocab_size = len(tokenizer) if vocab_size is None else vocab_size
        self.template = _template(settings.chat_template)
        self._no_template = ""
        if self.template is None and tokenizer.chat_template is None:
            self._no_template = (
                f"the tokenizer of {settings.model_path} has no chat template; set "
                f"chat_template or send prompt_tokens"
            )
        special = special_tokens(tokenizer)
        self._added = {
            i: str(tokenizer.convert_ids_to_tokens(i))
            for i in special | set(tokenizer.added_tokens_decoder)
        }
        self._special = {i: text for i, text in self._added.items() if i in special}
        self.differing = 0  # prompts that differ from the whole chat tokenised at once

    def encode(self, request: GenerateRequest, limit: int | None = None) -> list[int]:
        """Return the token ids of the prompt, at most `limit`; None: as the settings say.

        Raises PromptTooLong, TokensDiffer (tokenization_check: strict), MessageLeftOut, or
        ValueError: no prompt, no template, forbidden token ids or template arguments, messages that
        the template or the tokenizer rejects.
        """
        try:
            return self._encoded(request, limit)
        except (ValueError, MemoryError):
            raise
        except Exception as e:  # templates and tokenizers raise any type
            advice = f"; {way_out(request.messages)}" if isinstance(e, TemplateError) else ""
            what = (
                f"the chat template or the tokenizer of {self.settings.model_path} cannot take "
                f"this request"
            )
            raise ValueError(f"{what}: {type(e).__name__}: {e}{advice}") from e

    def _encoded(self, request: GenerateRequest, limit: int | None) -> list[int]:
        goes_on = False
        if request.images and self.images is None:
            raise ValueError(
                f"the messages show {len(request.images)} images, and {self.settings.model_path} "
                f"is no model of a family that is offered with images"
            )
        if request.prompt_tokens:
            if self.settings.policy_tokenizer is not None:
                raise ValueError(
                    f"{self.settings.name}: prompt_tokens are of another tokenizer (alignment: "
                    f"text); send messages"
                )
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
            ids = self._at_once(request)
        limit = prompt_limit(self.settings, goes_on=goes_on) if limit is None else limit
        ids = cut(ids, limit, "error" if request.images else request.prompt_truncation)
        check_prompt(len(ids), limit)
        check_tokens(ids, self.vocab_size, self.settings.name)
        self.places(request, ids)
        return ids

    def prepared(self, request: GenerateRequest) -> list[PreparedImage]:
        """Return what the model sees of the request's images, each once.  Raises ValueError for a
        file that cannot be used.
        """
        if self.images is None:
            return []
        return [self.images.process(image.data) for image in request.images]

    def places(self, request: GenerateRequest, tokens: Sequence[int]) -> tuple[ImagePlace, ...]:
        """Find the images that the messages show among the tokens of their prompt.  Raises
        ValueError for placeholders without an image.
        """
        if self.images is None:
            return ()
        before = request.prefix_places
        start = 0 if request.prefix_tokens is None else len(request.prefix_tokens)
        by_name = {x.sha256: p for x, p in zip(request.images, self.prepared(request), strict=True)}
        names = list(names_in(request.messages))[len(before) :]
        later = self.images.places(tokens, names, [by_name[name] for name in names], start)
        return (*before, *later)

    def sight(self, tokens: Sequence[int], places: Sequence[ImagePlace], files: Images) -> Sight:
        """Return what the model sees at `places`.  Raises ValueError as `prepared`."""
        shown = []
        data = {image.sha256: image.data for image in files}
        for place in places:
            assert self.images is not None, "there are places"
            image = self.images.process(data[place.sha256])
            inside = np.asarray(tokens[place.start : place.start + place.length])
            at = place.start + np.flatnonzero(inside == self.images.image_token_id)
            shown.append(ShownImage(image, at))
        return shown

    def encode_conversation(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """Return the token ids of a finished conversation, for a reward model.  Raises
        PromptTooLong, ValueError.
        """
        if self._no_template:
            raise ValueError(self._no_template)
        template = self.template or self.tokenizer.get_chat_template()

        def render(chat: list[dict[str, Any]], *, tokenize: bool = False) -> Any:
            chat = modelfiles.prepare_tool_calls(chat, template)
            kwargs = self.settings.chat_template_kwargs
            return self.tokenizer.apply_chat_template(
                chat, chat_template=template, tokenize=tokenize, return_dict=False, **kwargs
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
        """Return the first token id of each of `request.choices`.  Raises ValueError if two are
        equal.
        """
        first = [self.answer_tokens(word)[:1] for word in request.choices]
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
            modelfiles.prepare_tool_calls(messages, template),
            tools=tools,
            chat_template=template,
            add_generation_prompt=True,
            tokenize=tokenize,
            return_dict=False,
            **{**self.settings.chat_template_kwargs, **args},
        )

    def _at_once(self, request: GenerateRequest) -> list[int]:
        """Return the tokens of the whole chat."""
        messages = [dict(m) for m in request.messages]
        if not request.images:
            return list(self._render(request, messages, tokenize=True))
        text = str(self._render(request, messages, tokenize=False))
        return self._tokens_of(self._expanded(request, text, request.messages))

    def _expanded(
        self, request: GenerateRequest, text: str, messages: Sequence[Mapping[str, Any]]
    ) -> str:
        """Write the images of `messages` into their rendered text."""
        if not request.images:
            return text
        by_name = {x.sha256: p for x, p in zip(request.images, self.prepared(request), strict=True)}
        assert self.images is not None, "`prepared` checks it"
        return self.images.expand([text], [by_name[name] for name in names_in(messages)])[0]

    def _tokens_of(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _go_on(self, request: GenerateRequest, before: list[int]) -> list[int]:
        """Return `before`, which ends with an answer, plus the tokens of the text after the answer."""
        answer = request.prefix_messages - 1
        tail = behind_answer(
            request.messages,
            answer,
            lambda messages: str(self._render(request, messages, tokenize=False)),
        )
        later = request.messages[request.prefix_messages :]
        tail = tail._replace(text=self._expanded(request, tail.text, later))
        ids = before + self._without_end(tail, before)
        if self.settings.tokenization_check != "off":
            self._compare(request, ids)
        return ids

    def _without_end(self, tail: Tail, before: list[int]) -> list[int]:
        """Return the tokens of `tail` without the end of the answer that `before` already contains."""
        last = before[-1]
        end = tail.text[: tail.ends]
        ends = self._added if tail.called else self._special
        if ends.get(last, "\0") in end:  # the model ended its answer itself
            after = self._tokens(tail.text)
            return after[after.index(last) + 1 :]
        return self._tokens(
            tail.text[self._end_of_call(end, before) :] if tail.called else tail.text
        )

    def _end_of_call(self, end: str, before: list[int]) -> int:
        """Return how many characters of `end` the model already wrote after its last call: the
        common part, else all before the first special token.
        """
        written = str(
            self.tokenizer.decode(before[-len(end) - 1 :], skip_special_tokens=False)
        ).removesuffix(self._added.get(before[-1], ""))
        both = next((n for n in range(len(end), 0, -1) if written.endswith(end[:n])), 0)
        return both or min(
            (place for text in self._special.values() if (place := end.find(text)) >= 0), default=0
        )

    def answer_tokens(self, text: str) -> list[int]:
        """Return the token ids of an answer's text, which follows a line break."""
        return self._tokens(text, "\n")

    def _tokens(self, text: str, behind: str = _ANCHOR) -> list[int]:
        """Return the token ids of `text` when it follows `behind`."""

        anchor = self._tokens_of(behind)
        both = self._tokens_of(behind + text)
        return both[len(anchor) :] if both[: len(anchor)] == anchor else self._tokens_of(text)

    def _compare(self, request: GenerateRequest, ids: list[int]) -> None:
        at_once = self._at_once(request)
        if at_once == ids:
            return
        self.differing += 1
        at = next(
            (i for i, (a, b) in enumerate(zip(ids, at_once, strict=False)) if a != b),
            min(len(ids), len(at_once)),
        )
        near = slice(max(0, at - 4), at + 8)
        text = (
            f"the tokens of this conversation differ from those of the whole chat tokenised at "
            f"once, from token {at} of {len(ids)}: "
            f"{self.tokenizer.decode(ids[near])!r} there, {self.tokenizer.decode(at_once[near])!r} "
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
        """Return whether the prompt ends inside a thought, which the answer continues."""
        tail = self.tokenizer.decode(
            prompt[-TAIL_TOKENS:], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return opens_thought(str(tail))

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        """Decode generated tokens; special tokens are kept except BOS, EOS, padding and ends of
        turns.
        """
        ids = [token for token in map(int, tokens) if token not in self._unread]
        return str(
            self.tokenizer.decode(
                ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )

    def decode_stopped(
        self, tokens: Sequence[int] | np.ndarray, stops: Sequence[str]
    ) -> tuple[str, str]:
        """Return the text of an answer that stopped by itself, and its stop text; the special token
        that ended the answer is not part of the text.
        """
        end = self._special.get(int(tokens[-1])) if len(tokens) else None
        return cut_at_stop(
            self.decode(tokens if end is None or end in stops else tokens[:-1]), stops
        )

    @cached_property
    def _unread(self) -> set[int]:
        names = self.tokenizer
        ids = (names.bos_token_id, names.eos_token_id, names.pad_token_id, self.end_of_turn)
        return {token for token in ids if token is not None}

    @cached_property
    def end_of_turn(self) -> int | None:
        """The special token that the template writes behind an answer, else that of the
        tokenizer.
        """
        usual: int | None = self.tokenizer.eos_token_id
        if self._no_template:
            return usual
        messages = ({"role": "user", "content": _ANCHOR}, {"role": "assistant", "content": _ANCHOR})
        request = GenerateRequest(messages=messages)
        try:
            tail = behind_answer(
                messages, 1, lambda marked: str(self._render(request, marked, tokenize=False))
            )
        except (ValueError, TemplateError):  # the template supports only other conversations
            return usual
        return next((token for token in self._tokens(tail.text) if token in self._special), usual)


def special_tokens(tokenizer: Any) -> set[int]:
    """Return the ids of a tokenizer's special tokens."""
    added = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    return added | set(tokenizer.all_special_ids)


def cut(ids: list[int], limit: int, side: str) -> list[int]:
    """Shorten a prompt to `limit` token ids: the last (left), the first (right) or both ends
    (middle); error: keep all.
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
    """Return the request's template arguments that `template` reads; unread arguments have no
    effect.

    Raises ValueError for RESERVED names, and for client-chosen names that the template does not
    read.
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
    """Return the variables of a chat template that a caller may set."""
    from jinja2 import meta
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    env = ImmutableSandboxedEnvironment(extensions=[loopcontrols])
    template = modelfiles.without_generation_tag(template)
    return frozenset(
        meta.find_undeclared_variables(env.parse(template)) - env.globals.keys() - RESERVED
    )


def load_tokenizer(settings: EngineSettings) -> Any:
    """Load the tokenizer from tokenizer_path or the model's folder.  Raises SetupError if it is
    missing.
    """
    from transformers import AutoTokenizer

    folder = settings.tokenizer_path or settings.model_path
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=settings.trust_remote_code)
    except (OSError, ValueError) as e:
        raise SetupError(f"no tokenizer in {folder}: {e}") from e


def load_images(settings: EngineSettings) -> ImageProcessor | None:
    """Load the model's image processor; None for a model of texts.  Raises SetupError."""
    return ImageProcessor.of_model(
        settings.model_path,
        args=settings.image_processor_args,
        trust_remote_code=settings.trust_remote_code,
    )


def _template(template: str | None) -> str | None:
    """Return a template's Jinja text; a value without "{" is a file path."""
    if template is None or "{" in template:
        return template
    path = Path(template).expanduser()
    if not path.is_file():
        raise ConfigError(
            f"{template!r} is neither a Jinja template nor a file",
            key="chat_template",
            given=template,
        )
    return path.read_text(encoding="utf-8")
