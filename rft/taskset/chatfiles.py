"""A model folder's tokenizer and chat template, read with `tokenizers` and `jinja2` alone: how a
chat reads, and which are too long.

Knows the Hugging Face folder layout, neither torch nor transformers.  What a workflow adds to a
chat is not counted. Invariants: the same text as the engine sees; the same files and rows leave out
the same rows, in however many processes they are counted.
"""

from __future__ import annotations

import difflib
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import xxhash

from rft.errors import ConfigError
from rft.files.disk import read_regular
from rft.files.strict_json import parse_json
from rft.taskset import parallel
from rft.taskset.settings import PromptLimit, TasksetSettings
from rft.types import modelfiles
from rft.types.task import Task
from rft.worker.threads import TooLong, within

KEY = "model.model_path"
RENDER_S = 10.0
MAX_TEXT = 32 << 20
MAX_TEMPLATE = 1 << 20
_WIDTH = re.compile(r"%[^a-zA-Z%]*(\d{5,}|\*)")
_NAMED = 5


@dataclass(frozen=True, kw_only=True)
class ChatFiles:
    """What a folder says about texts."""

    folder: Path
    tokenizer_config: dict[str, Any]

    @cached_property
    def chat_template(self) -> str | None:
        """Raises ConfigError for one that is no text."""
        return self._templates.get("default", next(iter(self._templates.values()), None))

    @cached_property
    def _templates(self) -> dict[str, str]:
        """By name; the files beside go before what the settings say."""
        file = self.folder / "chat_template.jinja"
        files = {"default": file} if file.exists() else {}
        files |= {p.stem: p for p in sorted(self.folder.glob("additional_chat_templates/*.jinja"))}
        if files:
            return {name: read_template(path, KEY) for name, path in files.items()}
        given = self.tokenizer_config.get("chat_template")
        if isinstance(given, list) and all(
            isinstance(t, dict) and {"name", "template"} <= t.keys() for t in given
        ):
            given = {t["name"]: t["template"] for t in given}
        named = given if isinstance(given, dict) else {} if given is None else {"default": given}
        if not all(isinstance(text, str) for text in named.values()):
            raise ConfigError(
                f"{self.folder / 'tokenizer_config.json'}: chat_template must be a text", key=KEY
            )
        return named

    @cached_property
    def _tokenizer(self) -> Any:
        from tokenizers import Tokenizer

        file = self.folder / "tokenizer.json"
        try:
            made = Tokenizer.from_file(str(file))
        except Exception as e:  # the library has no class for it
            raise ConfigError(f"{file} is no tokenizer: {e}", key=KEY) from None
        made.no_padding()  # the settings in the file are for other uses
        made.no_truncation()
        return made

    @property
    def can_count(self) -> bool:
        return (self.folder / "tokenizer.json").is_file()

    def count_tokens(self, text: str) -> int:
        return self.count_each([text])[0]

    def count_each(self, texts: Iterable[str]) -> list[int]:
        """Tokens of each text; several at a time are quicker."""
        return [
            len(e.ids)
            for e in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        ]

    def encode_each(self, texts: Iterable[str]) -> list[list[int]]:
        """Token ids of each text, as it stands."""
        return [
            e.ids for e in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        ]

    @cached_property
    def _marks_beginnings(self) -> bool:
        """Whether a text begins with other tokens than stand in the middle of one: some tokenizers
        put a space before it.
        """
        alone, behind = self.encode_each(("a", "\na"))
        return behind[-len(alone) :] != alone

    def encode_pieces(self, pieces: Sequence[str]) -> list[list[int]]:
        """Token ids of pieces of one text, each as it stands behind the one before."""
        if not self._marks_beginnings:
            return self.encode_each(pieces)
        alone = self.encode_each(pieces)
        joined = self.encode_each(map("".join, itertools.pairwise(pieces)))
        behind = zip(alone, joined, alone[1:], strict=False)
        return [alone[0], *(both[len(a) :] if both[: len(a)] == a else b for a, both, b in behind)]

    def encode_text(self, text: str) -> list[int]:
        """Token ids of a single text, with the special tokens that the tokenizer puts around it."""
        return list(self._tokenizer.encode(text).ids)

    def text(self, tokens: list[int]) -> str:
        """Special tokens included."""
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False))

    def marked(self, tokens: list[int], mask: list[bool]) -> str:
        """The text of `tokens`, special ones included; where `mask` is True it stands between « and
        ».
        """
        pieces = [
            (on, [t for t, _ in part])
            for on, part in itertools.groupby(zip(tokens, mask, strict=True), lambda pair: pair[1])
        ]
        return "".join(f"«{self.text(ids)}»" if on else self.text(ids) for on, ids in pieces)

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]],
        *,
        template: str | None,
        opening: bool = True,
        **kwargs: Any,
    ) -> str:
        """The prompt that the engine will see.  Raises ConfigError when there is no template or it
        does not work.

        `opening`: with the beginning of the assistant's next message.
        """
        source = (
            template or (self._templates.get("tool_use") if tools else None) or self.chat_template
        )
        if source is None:
            raise ConfigError(
                f"the tokenizer of {self.folder} has no chat template; write "
                f"model.chat_template_path",
                key=KEY,
            )
        names = {**self.special_tokens, **kwargs, "add_generation_prompt": opening}
        return render(source, modelfiles.as_read(messages, source), tools, names)

    @cached_property
    def special_tokens(self) -> dict[str, str]:
        """By their names in templates, such as eos_token; older models have them in a file of their
        own.
        """
        given = self.tokenizer_config
        if "added_tokens_decoder" not in given:
            given = {**given, **read_settings(self.folder / "special_tokens_map.json")}
        texts = {
            name: v.get("content") if isinstance(v, dict) else v
            for name, v in given.items()
            if name.endswith("_token")
        }
        return {name: text for name, text in texts.items() if isinstance(text, str)}


def open_chat(path: str) -> ChatFiles:
    """Tokenizer and template of a model.  Raises ConfigError where there is no such folder, or
    tokens cannot be counted in it.
    """
    folder = find_model(path)
    if not (folder / "tokenizer.json").is_file():
        raise ConfigError(
            f"{folder} has no tokenizer.json, so the tokens of a prompt cannot be counted",
            key=KEY,
            given=path,
        )
    return ChatFiles(
        folder=folder, tokenizer_config=read_settings(folder / "tokenizer_config.json")
    )


def read_settings(file: Path) -> dict[str, Any]:
    """A JSON file of a model's folder; empty if there is none.  Raises ConfigError."""
    try:
        found = parse_json(read_regular(file, MAX_TEXT).decode("utf-8")) if file.exists() else {}
    except (OSError, ValueError) as e:
        raise ConfigError(
            f"{file} cannot be read as JSON: {e}", key=KEY, given=str(file.parent)
        ) from None
    if not isinstance(found, dict):
        raise ConfigError(
            f"{file} holds a {type(found).__name__}; it must be a mapping",
            key=KEY,
            given=str(file.parent),
        )
    return found


def read_template(file: Path, key: str) -> str:
    """A chat template's text.  Raises ConfigError naming `key`."""
    try:
        return read_regular(file, MAX_TEMPLATE).decode("utf-8")
    except OSError as e:
        raise ConfigError(
            f"{file} cannot be read: {e.strerror}", key=key, given=str(file)
        ) from None
    except UnicodeDecodeError as e:
        raise ConfigError(
            f"{file} is not UTF-8 text (byte {e.start})", key=key, given=str(file)
        ) from None


def render(
    source: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]], names: dict[str, Any]
) -> str:
    """A chat template on `messages`, in Jinja's sandbox, the way transformers does it."""
    from jinja2 import TemplateError

    try:
        given = {
            "messages": messages,
            "tools": tools or None,
            "add_generation_prompt": True,
            **names,
        }
        return within(RENDER_S, lambda: str(_compiled(source).render(given)))
    except (
        TemplateError,
        ArithmeticError,
        AttributeError,
        LookupError,
        MemoryError,
        RecursionError,
        TypeError,
        ValueError,
    ) as e:
        raise ConfigError(
            f"the chat template does not work on these messages: {type(e).__name__}: {e}", key=KEY
        ) from None
    except TooLong:
        raise ConfigError(
            f"the chat template did not finish these messages within {RENDER_S:g} s", key=KEY
        ) from None


@lru_cache(maxsize=16)
def _compiled(source: str) -> Any:
    from datetime import datetime

    from jinja2 import TemplateError
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise TemplateError(message)

    class Environment(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset(("*", "**", "%"))

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            """One step of the interpreter ends by no deadline, so none may be large."""
            sized = [len(x) for x in (left, right) if isinstance(x, str | list | tuple)]
            numbers = [abs(x) for x in (left, right) if isinstance(x, int)]
            if (operator == "*" and sized and max(sized) * max(numbers, default=1) > MAX_TEXT) or (
                operator == "**" and max(numbers, default=0) > 1000
            ):
                raise TemplateError(f"{operator!r} would make too large a value")
            if operator == "%" and isinstance(left, str) and _WIDTH.search(left):
                raise TemplateError("a format asks for too much space")
            return super().call_binop(context, operator, left, right)

    env = Environment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    env.filters["tojson"] = (
        lambda x, ensure_ascii=False, indent=None, separators=None, sort_keys=False: json.dumps(
            x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )
    )
    env.globals["raise_exception"] = refuse
    env.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return env.from_string(modelfiles.plain_jinja(source))


def find_model(path: str, key: str = KEY) -> Path:
    """The folder that `path` names: a folder, or a hub id in the local cache.  Raises ConfigError."""
    folder = Path(path)
    if folder.is_dir():
        return folder
    if folder.exists():
        advice = (
            "  A GGUF cannot be trained; name the original model that it was made from"
            if folder.suffix == ".gguf"
            else ""
        )
        raise ConfigError(
            f"{path} is a file; it must be a folder with config.json, tokenizer and "
            f"safetensors.{advice}",
            key=key,
            given=path,
        )
    if (found := modelfiles.snapshot(path)) is not None:
        return found
    if modelfiles.HUB_ID.fullmatch(path):
        raise ConfigError(
            f"{path!r} is neither a folder nor a model in the local hub cache "
            f"({modelfiles.hub_cache()}).{_near(folder)}  "
            + (
                f"Write the tiny model with `python -m rft.testing.tiny {path}`"
                if folder.name == "tiny-model"
                else f"Download it first (`hf download {path}`), or write the path of a folder"
            ),
            key=key,
            given=path,
        )
    raise ConfigError(f"folder {path} does not exist.{_near(folder)}", key=key, given=path)


def _near(path: Path) -> str:
    folder = path.parent
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
        path = path.parent
    try:
        names = [p.name for p in folder.iterdir() if p.is_dir()]
    except OSError:
        return ""
    near = difflib.get_close_matches(path.name, names, n=1)
    return f"  Did you mean {folder / near[0]}?" if near else ""


_opened = lru_cache(maxsize=1)(open_chat)  # in a process that counts one part after the other


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """The rows that `option` leaves out, in order, of `total`: they have more tokens than `limit`
    says, at most `longest`.
    """

    rows: tuple[int, ...]
    total: int
    longest: int
    option: str
    limit: str

    def __str__(self) -> str:
        named = ", ".join(map(str, self.rows[:_NAMED])) + (
            ", ..." if len(self.rows) > _NAMED else ""
        )
        return (
            f"{len(self.rows)} of {self.total} rows are left out ({self.option}): they have more "
            f"tokens than {self.limit}, up to "
            f"{self.longest}.  Rows {named}"
        )


def find_overlong(tasks: Iterable[Task], settings: TasksetSettings) -> LeftOut | None:
    """The tasks beyond `settings.prompt_limit`; None if there is none.

    Raises ConfigError if nothing is left, or cannot be counted, or where the limit says that such a
    row is to be refused.
    """
    limit = settings.prompt_limit
    assert limit is not None
    over: list[int] = []
    total = longest = 0
    for index, tokens in _counted(tasks, settings, limit):
        total += 1
        longest = max(longest, tokens)
        if tokens > limit.max_tokens:
            over.append(index)
            if limit.refuse:
                raise ConfigError(
                    f"the prompt of row {index} of {settings.path} has {tokens} tokens, more than "
                    f"model.max_prompt_tokens "
                    f"{limit.max_tokens} (prompt_truncation_side: error).  Raise that, leave such "
                    f"rows out (filter_overlong_prompts), or "
                    "have prompts cut: prompt_truncation_side left, right or middle",
                    key="model.prompt_truncation_side",
                    given="error",
                )
    if over and len(over) == total:
        raise ConfigError(
            f"every prompt of {settings.path} has more than model.max_prompt_tokens "
            f"{limit.max_tokens} tokens (up to {longest}), so "
            "filter_overlong_prompts leaves nothing; raise it",
            key=f"taskset {settings.name}.filter_overlong_prompts",
            given=True,
        )
    said = {
        "option": "filter_overlong_prompts",
        "limit": f"model.max_prompt_tokens {limit.max_tokens}",
    }
    return LeftOut(rows=tuple(over), total=total, longest=longest, **said) if over else None


def _counted(
    tasks: Iterable[Task], settings: TasksetSettings, limit: PromptLimit
) -> Iterator[tuple[int, int]]:
    """(row, tokens of its chat) of each task that has a chat."""
    chats = _chats(tasks, settings, limit)
    parts = iter(lambda: list(itertools.islice(chats, parallel.AT_ONCE)), [])
    first = next(parts, [])
    second = next(parts, [])
    common = asdict(limit)
    whole = itertools.chain([first], [second] if second else [], parts)
    indexes: list[list[int]] = []

    def questions() -> Iterator[list[Any]]:
        for part in whole:
            indexes.append([index for index, _, _ in part])
            yield [(messages, tools) for _, messages, tools in part]

    if settings.num_process > 1 and second:
        answers = parallel.spread("chatfiles:count", common, questions(), settings.num_process)
    else:
        answers = (count(common, q) for q in questions())
    for answer in answers:
        yield from zip(indexes.pop(0), answer, strict=True)


def _chats(
    tasks: Iterable[Task], settings: TasksetSettings, limit: PromptLimit
) -> Iterator[tuple[int, list[Any], list[Any]]]:
    for task in tasks:
        try:
            messages = task.chat()
        except ValueError as e:
            if limit.refuse:
                continue  # its workflow makes its own prompt
            raise ConfigError(
                str(e), key=f"taskset {settings.name}.filter_overlong_prompts", given=True
            ) from None
        yield task.index, messages, list(task.tools)


def count(limit: dict[str, Any], chats: list[Any]) -> list[int]:
    """Tokens of each (messages, tools) under the fields of a PromptLimit; what another process
    does, too.
    """
    files = _opened(limit["model_path"])
    template = limit["chat_template"]
    values = limit["chat_template_args"]
    texts = [
        files.render(messages, tools, template=template, **values) for messages, tools in chats
    ]
    keys = [xxhash.xxh3_128_digest(text.encode()) for text in texts]
    new = dict(zip(keys, texts, strict=True))  # data sets repeat their prompts
    counts = dict(zip(new, files.count_each(new.values()), strict=True))
    return [counts[key] for key in keys]
