"""A model folder's tokenizer and chat template, read with `tokenizers` and `jinja2` alone: how a chat reads, how long it is.

Knows the Hugging Face folder layout, neither torch nor transformers.  Invariant: the same text as the engine sees.
"""

from __future__ import annotations

import difflib
import itertools
import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from rft.errors import ConfigError

KEY = "model.model_path"
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True, kw_only=True)
class ChatFiles:
    """What a folder says about texts."""

    folder: Path
    tokenizer_config: dict[str, Any]

    @cached_property
    def chat_template(self) -> str | None:
        file = self.folder / "chat_template.jinja"
        if file.is_file():
            return file.read_text(encoding="utf-8")
        given = self.tokenizer_config.get("chat_template")
        if isinstance(given, list):  # several named templates
            named = {t["name"]: t["template"] for t in given}
            given = named.get("default", next(iter(named.values()), None))
        return given

    @cached_property
    def _tokenizer(self) -> Any:
        from tokenizers import Tokenizer

        made = Tokenizer.from_file(str(self.folder / "tokenizer.json"))
        made.no_padding()  # what the file says of both is for other uses
        made.no_truncation()
        return made

    @property
    def can_count(self) -> bool:
        return (self.folder / "tokenizer.json").is_file()

    def count_tokens(self, text: str) -> int:
        return self.count_each([text])[0]

    def count_each(self, texts: Iterable[str]) -> list[int]:
        """Tokens of each text; several at a time are quicker."""
        return [len(e.ids) for e in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    def encode_each(self, texts: Iterable[str]) -> list[list[int]]:
        """Token ids of each text, as it stands."""
        return [e.ids for e in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    def encode_text(self, text: str) -> list[int]:
        """Token ids of a text by itself, with the special tokens that the tokenizer puts around it."""
        return list(self._tokenizer.encode(text).ids)

    def marked(self, tokens: list[int], mask: list[bool]) -> str:
        """The text of `tokens`, special ones included; where `mask` is True it stands between « and »."""
        pieces = [
            (on, [t for t, _ in part]) for on, part in itertools.groupby(zip(tokens, mask, strict=True), lambda pair: pair[1])
        ]
        texts = [(on, self._tokenizer.decode(ids, skip_special_tokens=False)) for on, ids in pieces]
        return "".join(f"«{text}»" if on else text for on, text in texts)

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]],
        *,
        template: str | None,
        opening: bool = True,
        **kwargs: Any,
    ) -> str:
        """The prompt that the engine will see.  Raises ConfigError when there is no template or it does not work.

        `opening`: with the beginning of the assistant's next message.
        """
        source = template or self.chat_template
        if source is None:
            raise ConfigError(f"the tokenizer of {self.folder} has no chat template; write model.chat_template_path", key=KEY)
        names = {**self._special_tokens(), **kwargs, "add_generation_prompt": opening}
        return render(source, messages, tools, names)

    def _special_tokens(self) -> dict[str, str]:
        found = {}
        for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
            value = self.tokenizer_config.get(name)
            value = value.get("content") if isinstance(value, dict) else value
            if isinstance(value, str):
                found[name] = value
        return found


def open_chat(path: str) -> ChatFiles:
    """Tokenizer and template of a model.  Raises ConfigError where there is no such folder, or tokens cannot be counted in it."""
    folder = find_model(path)
    if not (folder / "tokenizer.json").is_file():
        raise ConfigError(f"{folder} has no tokenizer.json, so the tokens of a prompt cannot be counted", key=KEY, given=path)
    file = folder / "tokenizer_config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except ValueError as e:
        raise ConfigError(f"{file} cannot be read as JSON: {e}", key=KEY, given=path) from None
    return ChatFiles(folder=folder, tokenizer_config=config)


def render(source: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]], names: dict[str, Any]) -> str:
    """A chat template on `messages`, in Jinja's sandbox, the way transformers does it."""
    from jinja2 import TemplateError

    try:
        text: str = _compiled(source).render(messages=messages, tools=tools or None, **{"add_generation_prompt": True, **names})
    except (TemplateError, TypeError, KeyError) as e:
        raise ConfigError(f"the chat template does not work on these messages: {type(e).__name__}: {e}", key=KEY) from None
    return text


@lru_cache(maxsize=16)
def _compiled(source: str) -> Any:
    from datetime import datetime

    from jinja2 import TemplateError
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise TemplateError(message)

    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    env.filters["tojson"] = lambda x, indent=None, **_: json.dumps(x, ensure_ascii=False, indent=indent)
    env.globals["raise_exception"] = refuse
    env.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return env.from_string(source)


def find_model(path: str) -> Path:
    """The folder that `path` names: a folder, or a hub id in the local cache.  Raises ConfigError."""
    folder = Path(path)
    if folder.is_dir():
        return folder
    if folder.exists():
        advice = "  A GGUF cannot be trained; name the original model that it was made from" if folder.suffix == ".gguf" else ""
        raise ConfigError(
            f"{path} is a file; it must be a folder with config.json, tokenizer and safetensors.{advice}", key=KEY, given=path
        )
    if _HUB_ID.fullmatch(path) and not path.startswith("."):
        home = Path(
            os.environ.get("HF_HUB_CACHE") or Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser() / "hub"
        )
        repo = home / f"models--{path.replace('/', '--')}"
        main = repo / "refs" / "main"
        if main.is_file() and (snapshot := repo / "snapshots" / main.read_text().strip()).is_dir():
            return snapshot
        if "/" not in path or path.count("/") == 1:
            near = _near(folder)
            raise ConfigError(
                f"{path!r} is neither a folder nor a model in the local hub cache ({home}).{near}  Download it first "
                f"(`hf download {path}`), or write the path of a folder",
                key=KEY,
                given=path,
            )
    raise ConfigError(f"folder {path} does not exist.{_near(folder)}", key=KEY, given=path)


def _near(path: Path) -> str:
    folder = path.parent
    while not folder.is_dir() and folder != folder.parent:
        folder, path = folder.parent, path.parent
    try:
        names = [p.name for p in folder.iterdir() if p.is_dir()]
    except OSError:
        return ""
    near = difflib.get_close_matches(path.name, names, n=1)
    return f"  Did you mean {folder / near[0]}?" if near else ""
