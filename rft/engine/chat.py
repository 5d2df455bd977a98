"""Messages to tokens, once.  Shared by the engines that have a Hugging Face tokenizer.

Knows no model.  Invariant: what the model sees is exactly `prompt_tokens` of the completion; nothing is tokenised twice.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from rft.engine.base import check_prompt, prompt_limit
from rft.engine.settings import EngineSettings
from rft.errors import ConfigError, SetupError
from rft.types.ports import GenerateRequest


class Chat:
    """Renders requests with the tokenizer's chat template, or the one that the settings give (a template or a file)."""

    def __init__(self, settings: EngineSettings, tokenizer: Any) -> None:
        self.settings = settings
        self.tokenizer = tokenizer
        self.template = _template(settings.chat_template)
        if self.template is None and tokenizer.chat_template is None:
            self._no_template = (
                f"the tokenizer of {settings.model_path} has no chat template; set chat_template or send prompt_tokens"
            )
        else:
            self._no_template = ""

    def encode(self, request: GenerateRequest) -> list[int]:
        """Token ids of the prompt.  Raises PromptTooLong, or ValueError when there is no prompt or no template."""
        if request.prompt_tokens:
            ids = list(request.prompt_tokens)
        elif not request.messages:
            raise ValueError("a request needs messages or prompt_tokens")
        elif self._no_template and request.chat_template is None:
            raise ValueError(self._no_template)
        else:
            ids = self.tokenizer.apply_chat_template(
                [dict(m) for m in request.messages],
                tools=[dict(t) for t in request.tools] or None,
                chat_template=request.chat_template or self.template,
                add_generation_prompt=True,
                tokenize=True,
                return_dict=False,
                **{**self.settings.chat_template_kwargs, **request.chat_template_args},
            )
        ids = cut(ids, prompt_limit(self.settings), request.prompt_truncation)
        check_prompt(len(ids), self.settings)
        return ids

    def decode(self, tokens: list[int] | np.ndarray) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))


def cut(ids: list[int], limit: int, side: str) -> list[int]:
    """At most `limit` token ids of a prompt: the last ones (left), the first ones (right), or the ends (middle); error: all of them."""
    if len(ids) <= limit or side == "error":
        return ids
    if side == "left":
        return ids[-limit:]
    if side == "right":
        return ids[:limit]
    if side == "middle":
        return ids[: limit // 2] + ids[len(ids) - (limit - limit // 2) :]
    raise ValueError(f"prompt_truncation {side!r} is not known; use error, left, right or middle")


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
        raise ConfigError(f"{given!r} is neither a Jinja template nor a file", key="chat_template", given=given)
    return path.read_text(encoding="utf-8")
