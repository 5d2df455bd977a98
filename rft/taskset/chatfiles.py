"""Render chats and count their tokens with a model folder's tokenizer and chat template, using only
`tokenizers` and `jinja2`.

Depends on the Hugging Face folder layout, neither on torch nor, without images, on transformers.  Messages that a
workflow adds to a chat are not counted.  Invariant: the text equals the engine's; the same files
and rows leave out the same rows, however many processes count.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import xxhash

from rft.errors import ConfigError, SetupError
from rft.files.disk import read_regular
from rft.files.strict_json import parse_json
from rft.images.processor import FAMILIES, ImageProcessor, PreparedImage
from rft.taskset import parallel, template_worker
from rft.taskset.settings import PromptLimit, TasksetSettings
from rft.types import modelfiles
from rft.types.images import ImagePlace, names_in
from rft.types.task import Task

KEY = "model.model_path"
MAX_TEXT = 32 << 20
MAX_TEMPLATE = 1 << 20
_NAMED = 5


@dataclass(frozen=True, kw_only=True)
class ChatFiles:
    """The tokenizer and templates of a model's folder."""

    folder: Path
    tokenizer_config: dict[str, Any]

    @cached_property
    def chat_template(self) -> str | None:
        """Raises ConfigError if the template is no text."""
        return self._templates.get("default", next(iter(self._templates.values()), None))

    @cached_property
    def _templates(self) -> dict[str, str]:
        """Templates by name; template files take precedence over tokenizer_config.json."""
        file = self.folder / "chat_template.jinja"
        files = {"default": file} if file.exists() else {}
        files |= {p.stem: p for p in sorted(self.folder.glob("additional_chat_templates/*.jinja"))}
        if files:
            return {name: read_template(path, KEY) for name, path in files.items()}
        templates = self.tokenizer_config.get("chat_template")
        if isinstance(templates, list) and all(
            isinstance(t, dict) and {"name", "template"} <= t.keys() for t in templates
        ):
            templates = {t["name"]: t["template"] for t in templates}
        named = (
            templates
            if isinstance(templates, dict)
            else {}
            if templates is None
            else {"default": templates}
        )
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
            tokenizer = Tokenizer.from_file(str(file))
        except Exception as e:  # the library raises plain Exception
            raise ConfigError(f"{file} is no tokenizer: {e}", key=KEY) from None
        tokenizer.no_padding()  # the settings in the file are for other uses
        tokenizer.no_truncation()
        return tokenizer

    @property
    def can_count(self) -> bool:
        return (self.folder / "tokenizer.json").is_file()

    def count_tokens(self, text: str) -> int:
        return self.count_each([text])[0]

    def count_each(self, texts: Iterable[str]) -> list[int]:
        """Return the number of tokens of each text; batches are faster."""
        return [
            len(e.ids)
            for e in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        ]

    def encode_each(self, texts: Iterable[str]) -> list[list[int]]:
        """Return the token ids of each text, without special tokens."""
        return [
            e.ids for e in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        ]

    @cached_property
    def _marks_beginnings(self) -> bool:
        """Whether tokens at the start of a text differ from tokens inside it; some tokenizers
        prepend a space.
        """
        alone, behind = self.encode_each(("a", "\na"))
        return behind[-len(alone) :] != alone

    def encode_pieces(self, pieces: Sequence[str]) -> list[list[int]]:
        """Return the token ids of consecutive pieces of one text, each as it follows the previous
        piece.
        """
        if not self._marks_beginnings:
            return self.encode_each(pieces)
        alone = self.encode_each(pieces)
        joined = self.encode_each(map("".join, itertools.pairwise(pieces)))
        behind = zip(alone, joined, alone[1:], strict=False)
        return [alone[0], *(both[len(a) :] if both[: len(a)] == a else b for a, both, b in behind)]

    def encode_text(self, text: str) -> list[int]:
        """Return the token ids of a text, with the special tokens that the tokenizer adds."""
        return list(self._tokenizer.encode(text).ids)

    def text(self, tokens: list[int]) -> str:
        """Decode tokens, including special tokens."""
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False))

    def marked(self, tokens: list[int], mask: list[bool]) -> str:
        """Decode `tokens`, including special tokens; parts where `mask` is True are put between «
        and ».
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
        """Return the prompt that the engine will see; `opening` adds the start of the assistant's
        message.

        Raises ConfigError without a template, or if the template fails.
        """
        beginnings = [(len(messages), opening)]
        (text,) = self.render_each(messages, tools, beginnings, template=template, **kwargs)
        return text

    def render_each(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]],
        beginnings: Sequence[tuple[int, bool]],
        *,
        template: str | None,
        today: datetime | None = None,
        **kwargs: Any,
    ) -> list[str]:
        """Return the texts of several beginnings of a chat: (number of messages, opening).

        `today`: the date that the template reads.
        Raises ConfigError without a template, or if the template fails.
        """
        source = (
            template or (self._templates.get("tool_use") if tools else None) or self.chat_template
        )
        if source is None:
            raise ConfigError(
                f"the tokenizer of {self.folder} has no chat template; write "
                f"model.custom_chat_template",
                key=KEY,
            )
        names = {**self.special_tokens, **kwargs}
        return template_worker.render(
            source, messages, tools, names, beginnings, today=today, key=KEY
        )

    @cached_property
    def special_tokens(self) -> dict[str, str]:
        """Special tokens by their names in templates, such as eos_token; older models have them in
        a separate file.
        """
        config = self.tokenizer_config
        if "added_tokens_decoder" not in config:
            config = {**config, **read_settings(self.folder / "special_tokens_map.json")}
        texts = {
            name: v.get("content") if isinstance(v, dict) else v
            for name, v in config.items()
            if name.endswith("_token")
        }
        return {name: text for name, text in texts.items() if isinstance(text, str)}


def open_chat(path: str) -> ChatFiles:
    """Open tokenizer and template of a model.  Raises ConfigError if the folder is missing or has
    no tokenizer.json.
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
    """Read a JSON file of a model's folder; empty if the file is missing.  Raises ConfigError."""
    try:
        content = parse_json(read_regular(file, MAX_TEXT).decode("utf-8")) if file.exists() else {}
    except (OSError, ValueError) as e:
        raise ConfigError(
            f"{file} cannot be read as JSON: {e}", key=KEY, given=str(file.parent)
        ) from None
    if not isinstance(content, dict):
        raise ConfigError(
            f"{file} holds a {type(content).__name__}; it must be a mapping",
            key=KEY,
            given=str(file.parent),
        )
    return content


def read_template(file: Path, key: str) -> str:
    """Read a chat template.  Raises ConfigError naming `key`."""
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


def find_model(path: str, key: str = KEY) -> Path:
    """Return the folder of `path`: a folder, or a hub id in the local cache.  Raises ConfigError."""
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
    if (snapshot := modelfiles.snapshot(path)) is not None:
        return snapshot
    if modelfiles.HUB_ID.fullmatch(path):
        cache = modelfiles.hub_cache()
        problem = f"{path!r} is neither a folder nor a model in the local hub cache ({cache})"
        download = f"hf download {path}"
    else:
        problem = f"folder {path} does not exist"
        download = f"hf download NAME --local-dir {path}"
    remedy = (
        f"Write the tiny model with `python -m rft.testing.tiny {path}`"
        if folder.name == "tiny-model"
        else f"Download the model first (`{download}`), or write the path of a model folder"
    )
    raise ConfigError(f"{problem}.{_near(folder)}  {remedy}", key=key, given=path)


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


_opened = lru_cache(maxsize=1)(open_chat)  # used by worker processes that count several parts


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """The rows that `option` leaves out of `total`, in order: longer than `limit`, at most
    `longest` tokens.
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
    """Return the tasks beyond `settings.prompt_limit`; None if there are none.

    Raises ConfigError if nothing remains, if tokens cannot be counted, or if the limit refuses such
    rows.
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
    labels = {
        "option": "filter_overlong_prompts",
        "limit": f"model.max_prompt_tokens {limit.max_tokens}",
    }
    return LeftOut(rows=tuple(over), total=total, longest=longest, **labels) if over else None


def _counted(
    tasks: Iterable[Task], settings: TasksetSettings, limit: PromptLimit
) -> Iterator[tuple[int, int]]:
    """Yield (row, tokens of its chat) of each task with a chat."""
    chats = _chats(tasks, settings, limit)
    parts = iter(lambda: list(itertools.islice(chats, parallel.AT_ONCE)), [])
    first = next(parts, [])
    second = next(parts, [])
    common = asdict(limit)
    all_parts = itertools.chain([first], [second] if second else [], parts)
    indexes: list[list[tuple[int, int]]] = []

    def questions() -> Iterator[list[Any]]:
        for part in all_parts:
            indexes.append([(index, more) for index, _, _, more in part])
            yield [(messages, tools) for _, messages, tools, _ in part]

    if settings.num_process > 1 and second:
        answers = parallel.spread("chatfiles:count", common, questions(), settings.num_process)
    else:
        answers = (count(common, q) for q in questions())
    for answer in answers:
        for (index, more), tokens in zip(indexes.pop(0), answer, strict=True):
            yield index, tokens + more


def _chats(
    tasks: Iterable[Task], settings: TasksetSettings, limit: PromptLimit
) -> Iterator[tuple[int, list[Any], list[Any], int]]:
    """Yield (row, messages, tools, tokens of its images beyond their placeholders)."""
    folder = limit.weights_path or limit.model_path
    images = ImageTokens(settings, folder, limit.image_processor_args)
    files = _opened(limit.model_path)
    for task in tasks:
        try:
            messages = task.chat()
        except ValueError as e:
            if limit.refuse:
                continue  # its workflow builds its own prompt
            raise ConfigError(
                str(e), key=f"taskset {settings.name}.filter_overlong_prompts", given=True
            ) from None
        yield task.index, messages, list(task.tools), images.beyond(task, files)


class ImageTokens:
    """Reads the images of tasks as the engine does."""

    def __init__(self, settings: TasksetSettings, folder: str, args: Mapping[str, Any]) -> None:
        """`folder`: of the model, with its image processor."""
        self._settings = settings
        self._folder = folder
        self._args = args
        self._processor: ImageProcessor | None = None
        self.most = 0  # tokens of the images of a row, of those counted by `beyond`

    def read(self, task: Task) -> dict[str, PreparedImage]:
        """Return the images by name.  Raises ConfigError that names the row, for a model of texts too."""
        if not task.images:
            return {}
        with self._errors(task):
            return {x.sha256: self._opened().process(x.data) for x in task.images}

    def expand(
        self, task: Task, messages: Sequence[Mapping[str, Any]], pieces: list[str]
    ) -> list[str]:
        """Write the images of `messages` into consecutive pieces of their text.  Raises as `read`."""
        images = self.read(task)
        with self._errors(task):
            shown = [images[name] for name in names_in(messages)]
            return self._opened().expand(pieces, shown) if shown else pieces

    def places(
        self, task: Task, messages: Sequence[Mapping[str, Any]], tokens: list[int]
    ) -> tuple[ImagePlace, ...]:
        """Find the images of `messages` among their tokens.  Raises as `read`."""
        images = self.read(task)
        names = list(names_in(messages))
        with self._errors(task):
            shown = [images[name] for name in names]
            return self._opened().places(tokens, names, shown) if shown else ()

    def _opened(self) -> ImageProcessor:
        if self._processor is None:
            self._processor = ImageProcessor.of_model(self._folder, args=self._args)
        if self._processor is None:
            raise ValueError(
                f"it shows images, and {self._folder} is no model of a family that is offered "
                f"with images ({', '.join(FAMILIES)})"
            )
        return self._processor

    @contextmanager
    def _errors(self, task: Task) -> Iterator[None]:
        """Name the row in errors."""
        try:
            yield
        except (ValueError, SetupError) as e:
            raise ConfigError(
                f"row {task.index} of {self._settings.path}: {e}",
                key=f"taskset {self._settings.name}.format.image_key",
                given=self._settings.format.image_key or None,
            ) from None

    def beyond(self, task: Task, files: ChatFiles) -> int:
        """Return the tokens that images take beyond their placeholders.  Raises as `read`."""
        images = self.read(task)
        tokens = {name: files.count_tokens(image.text) for name, image in images.items()}
        names = list(names_in(task.messages))
        self.most = max(self.most, sum(images[name].num_tokens for name in names))
        return sum(tokens[name] - 1 for name in names)


def count(limit: dict[str, Any], chats: list[Any]) -> list[int]:
    """Return the tokens of each (messages, tools); `limit` holds the fields of a PromptLimit.  Also
    called in worker processes.
    """
    files = _opened(limit["model_path"])
    template = limit["chat_template"]
    values = limit["chat_template_args"]
    texts = [
        files.render(messages, tools, template=template, **values) for messages, tools in chats
    ]
    keys = [xxhash.xxh3_128_digest(text.encode()) for text in texts]
    new = dict(zip(keys, texts, strict=True))  # data sets repeat prompts
    counts = dict(zip(new, files.count_each(new.values()), strict=True))
    return [counts[key] for key in keys]
