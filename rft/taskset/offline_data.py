"""Data sets for offline training as tokens: chats to imitate, texts to continue, preference pairs,
answers with labels.

Depends on the tokenizer's files (`chatfiles`) and the rows of a taskset, on no losses.
Invariant: the tokens before an answer equal an engine's prompt, and the trained part of an answer
equals a model's generation, including its end token and nothing after.
"""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from functools import lru_cache
from typing import Any

import numpy as np
import xxhash

from rft.errors import ConfigError
from rft.taskset.base import Taskset, refuse_media
from rft.taskset.chatfiles import (
    KEY,
    ChatFiles,
    ImageTokens,
    LeftOut,
    find_model,
    open_chat,
    read_settings,
)
from rft.taskset.messages import ABSENT, lookup
from rft.taskset.open_source import open_taskset
from rft.taskset.row_images import chat_in
from rft.taskset.settings import OfflineDataSettings
from rft.types.experience import Demonstration, LabelledAnswer, Preference
from rft.types.ids import ExperienceId
from rft.types.images import ImagePlace, names_in
from rft.types.modelfiles import vocab_size
from rft.types.task import Task

log = logging.getLogger(__name__)
_SAID = ("content", "reasoning_content", "reasoning", "thinking")  # text fields of an answer
# the date for templates that print it, so that a resumed run has the same rows
_TODAY = datetime(2026, 1, 1)


@dataclass(frozen=True)
class OfflineData:
    """The rows of a data set as tokens, in file order."""

    settings: OfflineDataSettings
    records: Sequence[Demonstration | Preference]
    fingerprint: str  # of settings that affect tokens, rows and tokens
    left_out: LeftOut | None = None  # rows that are too long
    source: Taskset | None = None  # the data set, with the files of its images

    def __len__(self) -> int:
        return len(self.records)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row; a pair counts both sides, including the prompt twice."""
        return [sum(len(tokens) for tokens, _ in sides(r)) for r in self.records]

    @property
    def trained_tokens(self) -> int:
        """Trained tokens of all rows in one epoch."""
        return sum(int(mask.sum()) for r in self.records for _, mask in sides(r))

    def batch(self, step: int, size: int, seed: int) -> list[int]:
        """Return the indices into `records` of train step `step` (from 1).

        The result depends only on the arguments, so a resumed run continues exactly.  sequential:
        file order, repeated; shuffle: a new permutation in each epoch; random: drawn per step
        without repetition.
        """
        selector = self.settings.rows.selector
        own_seed = self.settings.rows.seed
        rows = len(self)
        if selector == "random":
            rng = np.random.default_rng((seed, own_seed, step))
            return [int(i) for i in rng.choice(rows, size=size, replace=size > rows)]
        places = [divmod((step - 1) * size + i, rows) for i in range(size)]
        if selector == "sequential":
            return [at for _, at in places]
        return [int(_permutation(seed, own_seed, epoch, rows)[at]) for epoch, at in places]

    def task(self, record: Demonstration | Preference) -> Task:
        """Return the row that `record` was made of."""
        assert self.source is not None, "records are made of it"
        return self.source.task(record.id.task)

    def images(self, records: Sequence[Demonstration | Preference]) -> dict[str, bytes]:
        """Read the files of the images that `records` show, by name.  Raises ConfigError for a row
        whose images have changed.
        """
        files: dict[str, bytes] = {}
        for record in (r for r in records if r.images):
            files |= {x.sha256: x.data for x in self.task(record).images}
            if any(place.sha256 not in files for place in record.images):
                raise ConfigError(
                    f"row {record.id.task} of {self.settings.rows.path}: its images are no longer "
                    f"those that the run began with.  Restore them, or start a new run",
                    key=f"{self.settings.rows.key}.format.image_key",
                )
        return files

    def place(self, steps: int, size: int, seed: int) -> str:
        """Return the text that a checkpoint stores after `steps` steps; another data set or order
        gives another text.
        """
        facts = (
            self.fingerprint,
            self.settings.rows.selector,
            self.settings.rows.seed,
            seed,
            size,
            steps,
        )
        return xxhash.xxh3_128_hexdigest(repr(facts).encode())


def open_offline_data(settings: OfflineDataSettings) -> OfflineData:
    """Read and tokenize every row.  Raises ConfigError naming the first unusable row."""
    taskset = _open_rows(settings)
    chat = open_chat(settings.model_path)
    tokens = _Tokens(settings, chat)
    records: list[Demonstration | Preference] = []
    left_out: list[int] = []
    most = 0
    digest = xxhash.xxh3_128(settings.kind.encode())
    for task in map(taskset.task, range(len(taskset))):
        where = f"row {task.index} of {settings.rows.path}"
        record = tokens.record(task, where)
        longest = max(len(t) for t, _ in sides(record))
        last = max(int(t.max()) for t, _ in sides(record))
        if last >= tokens.vocab_size:
            text = (
                f"{where} has token {last}, and the model knows {tokens.vocab_size}: its "
                f"tokenizer was given tokens that it was not"
            )
            raise ConfigError(
                f"{text}.  Add them to the model (resize_token_embeddings), or take the row out",
                key=KEY,
            )
        if longest > settings.max_tokens:
            if settings.filter_overlong:
                left_out.append(task.index)
                most = max(most, longest)
                continue
            raise ConfigError(
                f"{where} has {longest} tokens, more than model.max_model_len "
                f"{settings.max_tokens}.  Raise that, take the row out, or "
                "write filter_overlong: true to leave out every such row",
                key=settings.rows.key,
            )
        records.append(record)
        for ids, mask in sides(record):
            digest.update(ids.tobytes() + mask.tobytes())
        if record.images:
            digest.update(repr(record.images).encode())
        if isinstance(record, LabelledAnswer):
            digest.update(b"%d" % record.label)
    if not records:
        text = f"{settings.rows.path}: no row has at most {settings.max_tokens} tokens"
        raise ConfigError(text, key=settings.rows.key, given=settings.max_tokens)
    labels = {r.label for r in records if isinstance(r, LabelledAnswer)}
    if len(labels) == 1:
        raise ConfigError(
            f"{settings.rows.path}: {settings.label_key!r} is {str(*labels).lower()} in all "
            f"{len(records)} rows; answers of both labels are compared",
            key=f"{settings.rows.key}.format.label_key",
            given=settings.label_key,
        )
    if not left_out:
        return OfflineData(settings, records, digest.hexdigest(), source=taskset)
    facts = {"option": "filter_overlong", "limit": f"model.max_model_len {settings.max_tokens}"}
    left_out_rows = LeftOut(rows=tuple(left_out), total=len(taskset), longest=most, **facts)
    log.info("%s: %s", settings.rows.name, left_out_rows)
    return OfflineData(settings, records, digest.hexdigest(), left_out_rows, taskset)


def sides(record: Demonstration | Preference) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return (tokens int32 [T], loss mask bool [T]) of a demonstration, or of the chosen and the
    rejected side of a pair.
    """
    if isinstance(record, Demonstration):
        return [(record.tokens, record.loss_mask)]
    sequences = [np.concatenate([record.prompt, side]) for side in (record.chosen, record.rejected)]
    return [(tokens, np.arange(len(tokens)) >= len(record.prompt)) for tokens in sequences]


# ---------------------------------------------------------------- a row as tokens


def _open_rows(settings: OfflineDataSettings) -> Taskset:
    """The rows; the chosen chat of a pair stands for a prompt that has no column."""
    # only some rows need response_key: see _with_answer
    form = replace(settings.rows.format, response_key="")
    try:
        return open_taskset(replace(settings.rows, format=form))
    except ConfigError:
        if settings.kind == "pairs":
            form = replace(form, prompt_type="messages", messages_key=settings.chosen_key)
            with suppress(ConfigError):
                return open_taskset(replace(settings.rows, format=form))
        raise


class _Tokens:
    """Converts rows into records with one tokenizer and template."""

    def __init__(self, settings: OfflineDataSettings, chat: ChatFiles) -> None:
        self._settings = settings
        self._chat = chat
        self._ends = end_tokens(chat, settings)
        self._key = settings.rows.key
        folder = settings.weights_path or settings.model_path
        self._images = ImageTokens(settings.rows, folder, settings.image_processor_args)
        self.vocab_size = vocab_size(find_model(folder))

    def record(self, task: Task, where: str) -> Demonstration | Preference:
        """Convert one row.  Raises ConfigError naming the row."""
        refuse_media(task.row, where, self._key, self._settings.rows.format.image_key)
        self._images.read(task)  # a template may fail at the images of a model of texts
        id = ExperienceId(0, 0, 0, task.index, 0)
        match self._settings.kind:
            case "texts":
                return self._text(id, task, where)
            case "pairs":
                return self._pair(id, task, where)
        tokens, mask, images = self._turns(
            task, self._with_answer(task, where), where, every=self._settings.every_turn
        )
        if self._settings.kind == "labels":
            label = self._label(task.row, where)
            return LabelledAnswer(id=id, tokens=tokens, loss_mask=mask, images=images, label=label)
        return Demonstration(id=id, tokens=tokens, loss_mask=mask, images=images)

    def _label(self, row: dict[str, Any], where: str) -> bool:
        column = self._settings.label_key
        if isinstance(label := lookup(row, column), bool):
            return label
        text = f"{where}: column {column!r} holds {label!r}; a label is true or false"
        if label is ABSENT:
            text = f"{where} has no column {column!r}; its columns are {', '.join(map(str, row))}"
        raise ConfigError(text, key=f"{self._key}.format.label_key", given=column)

    def _text(self, id: ExperienceId, task: Task, where: str) -> Demonstration:
        """Train all tokens but the first, which nothing predicts; with the tokenizer's special
        tokens and an end token.
        """
        if task.prompt is None:
            raise ConfigError(
                f"{where}: a text is needed; write prompt_type: plaintext",
                key=f"{self._key}.format.prompt_type",
            )
        ids = self._chat.encode_text(task.prompt)
        if self._ends and ids[-1:] != [self._ends[0]]:
            ids = [*ids, self._ends[0]]
        if len(ids) < 2:
            raise ConfigError(f"{where}: one token alone has nothing to learn", key=self._key)
        return Demonstration(
            id=id, tokens=np.asarray(ids, np.int32), loss_mask=np.arange(len(ids)) > 0
        )

    def _common(self, task: Task) -> list[dict[str, Any]]:
        """The messages that both chats of a pair without a prompt begin with, as TRL reads them."""
        keys = (self._settings.chosen_key, self._settings.rejected_key)
        try:
            chosen, rejected = (self._chat_in(task, lookup(task.row, key)) for key in keys)
        except ValueError:
            return []
        pairs = zip(chosen, rejected[:-1], strict=False)
        same = itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)
        return [message for message, _ in same]

    def _pair(self, id: ExperienceId, task: Task, where: str) -> Preference:
        form = self._settings.rows.format
        column = form.messages_key if form.prompt_type == "messages" else form.prompt_key
        prompt = self._common(task) if lookup(task.row, column) is ABSENT else task.chat()
        if not prompt or prompt[-1].get("role") == "assistant":
            raise ConfigError(
                f"{where}: the prompt of a pair must not end with an answer",
                key=f"{self._key}.format",
            )
        answers = []
        for name, column in (
            ("chosen_key", self._settings.chosen_key),
            ("rejected_key", self._settings.rejected_key),
        ):
            if (value := lookup(task.row, column)) is ABSENT:
                columns = ", ".join(sorted(map(str, task.row)))
                raise ConfigError(
                    f"{where} has no column {column!r}; its columns are {columns}",
                    key=f"{self._key}.format.{name}",
                )
            answer = self._answer(task, value, prompt, name, column, where)
            tokens, mask, images = self._turns(task, [*prompt, answer], where, every=False)
            answers.append(np.split(tokens, [int(np.flatnonzero(mask)[0])]))
        (before, chosen), (_, rejected) = answers
        if np.array_equal(chosen, rejected):
            raise ConfigError(
                f"{where}: both answers are the same, so neither is preferred", key=self._key
            )
        return Preference(id=id, prompt=before, chosen=chosen, rejected=rejected, images=images)

    def _with_answer(self, task: Task, where: str) -> list[dict[str, Any]]:
        messages = task.chat()
        if messages[-1].get("role") == "assistant":
            return messages
        column = self._settings.rows.format.response_key
        if (value := lookup(task.row, column)) is ABSENT:
            raise ConfigError(
                f"{where} has no answer: the row has no key {column!r} (format.response_key), and "
                f"its chat does not end with the assistant",
                key=f"{self._key}.format.response_key",
            )
        return [*messages, self._answer(task, value, messages, "response_key", column, where)]

    def _chat_in(self, task: Task, value: Any) -> tuple[dict[str, Any], ...]:
        return chat_in(self._settings.rows, task, value)

    def _answer(
        self,
        task: Task,
        value: Any,
        prompt: list[dict[str, Any]],
        name: str,
        column: str,
        where: str,
    ) -> dict[str, Any]:
        """Return the answer in a column: a text, a message, or a chat (also as JSON text) with or
        without the prompt before the answer.
        """
        if isinstance(value, str) and value:
            with suppress(ValueError):
                chat = list(self._chat_in(task, value))
                return self._answer(task, chat, prompt, name, column, where)
            return {"role": "assistant", "content": value}
        problem = "must be a text, or a chat that ends with the assistant"
        try:
            chat = [value] if isinstance(value, dict) else value
            *before, answer = self._chat_in(task, chat)
        except ValueError as e:
            answer = {}
            problem = f"{problem}: {e}" if isinstance(value, list) else problem
        if answer.get("role") == "assistant":
            if before in ([], prompt, [m for m in prompt if m["role"] != "system"]):
                return answer
            problem = "holds a chat that does not begin with the row's prompt"
        raise ConfigError(
            f"{where}: {column!r} {problem}", key=f"{self._key}.format.{name}", given=column
        )

    def _turns(
        self, task: Task, messages: list[dict[str, Any]], where: str, *, every: bool
    ) -> tuple[np.ndarray, np.ndarray, tuple[ImagePlace, ...]]:
        """Return (tokens int32 [T], loss mask bool [T], images) of a chat that ends with an answer.

        `every`: train every answer, else only the last.
        """
        answers = [i for i, m in enumerate(messages) if m.get("role") == "assistant"][
            0 if every else -1 :
        ]
        weights = [messages[i].get("weight") for i in answers]
        if not any(w in (None, 1) for w in weights) or not all(w in (None, 0, 1) for w in weights):
            text = (
                f"{where}: the weight of its answers is {weights}; it must be 1 or 0, and not 0 "
                f"for all that are to be trained"
            )
            raise ConfigError(text, key=self._key)
        pieces: list[str] = []
        done = ""
        trained = [i for i, weight in zip(answers, weights, strict=True) if weight != 0]
        ends = [end for i in trained for end in ((i, True), (i + 1, False))]
        texts = self._render(task, messages, ends, where)
        for i, before, through in zip(trained, texts[::2], texts[1::2], strict=True):
            if (
                not before.startswith(done)
                or not through.startswith(before)
                or len(through) == len(before)
            ):
                raise ConfigError(
                    _rewritten(where, i, every), key=f"{self._key}.format.chat_template"
                )
            pieces += [before[len(done) :], through[len(before) :]]
            done = through
            if any(names_in([messages[i]])):
                text = f"{where}, message {i}: an answer to imitate shows an image"
                raise ConfigError(f"{text}, and models write texts", key=self._key)
            if wrong := _other(messages[i], pieces[-1]):
                raise ConfigError(f"{where}, message {i}: {wrong}", key=self._key)
        read = messages[: trained[-1]]
        pieces = self._images.expand(task, read, pieces)
        tokens: list[int] = []
        mask: list[bool] = []
        for n, ids in enumerate(self._chat.encode_pieces(pieces)):
            spoken = self._spoken(ids) if n % 2 else 0
            if n == len(pieces) - 1:
                ids = ids[:spoken]  # nothing follows the last answer
            tokens += ids
            mask += [True] * spoken + [False] * (len(ids) - spoken)
        if not any(mask):
            raise ConfigError(f"{where}: the answer has no tokens", key=self._key)
        images = self._images.places(task, read, tokens)
        return np.asarray(tokens, np.int32), np.asarray(mask, np.bool_), images

    def _spoken(self, ids: list[int]) -> int:
        """Return how many of an answer's tokens a model generates: up to its end token, before line
        breaks and further ends from the template.
        """
        ends = [i for i, token in enumerate(ids) if token in self._ends]
        while len(ends) > 1 and not self._chat.text(ids[ends[-2] + 1 : ends[-1]]).strip():
            ends.pop()
        return ends[-1] + 1 if ends else len(ids)

    def _render(
        self,
        task: Task,
        messages: list[dict[str, Any]],
        beginnings: list[tuple[int, bool]],
        where: str,
    ) -> list[str]:
        s = self._settings
        args = {**s.chat_template_args, **task.chat_template_args}
        template = task.chat_template or s.chat_template
        try:
            return self._chat.render_each(
                messages, list(task.tools), beginnings, template=template, today=_TODAY, **args
            )
        except ConfigError as e:
            raise ConfigError(f"{where}: {e.message}", key=e.key, given=e.given) from None


def _rewritten(where: str, i: int, every: bool) -> str:
    alone = (
        "; write enable_concatenated_multi_turn: false to train the last answer alone"
        if every
        else ""
    )
    return (
        f"{where}, message {i}: the chat template does not write the answer behind its prompt, or "
        f"writes the turns before it "
        f"differently, so it is not known which tokens to imitate{alone}, or give another chat "
        f"template"
    )


def _other(answer: dict[str, Any], text: str) -> str | None:
    """Return why `text`, the rendered `answer`, does not contain the answer; None if it does."""
    if not any(
        value and isinstance(value, str | list)
        for key, value in answer.items()
        if key not in ("role", "name", "id")
    ):
        return "the answer is empty"
    tool_calls = answer.get("tool_calls") or []
    calls = [
        *(tool_calls if isinstance(tool_calls, list) else [tool_calls]),
        *filter(None, [answer.get("function_call")]),
    ]
    calls = [c.get("function") or c if isinstance(c, dict) else c for c in calls]
    if not all(isinstance(c, dict) and isinstance(c.get("name"), str) for c in calls):
        return "its tool_calls must be a list of calls, each an object with a name"
    phrases = [c["name"] for c in calls]
    phrases += (
        part
        for key in _SAID
        if isinstance(value := answer.get(key), str)
        for part in re.split("</?think>", value)
    )
    lost = next((s.strip() for s in phrases if s.strip() not in text), None)
    advice = "give another chat template, or leave that out of the row"
    return (
        None
        if lost is None
        else f"the chat template does not write {lost[:80]!r} of the answer; {advice}"
    )


def end_tokens(chat: ChatFiles, settings: OfflineDataSettings) -> list[int]:
    """Return the tokens that end a generation in engines: the tokenizer's end token first, then
    those of the model's folder.
    """
    end_ids: list[int] = []
    model = find_model(settings.weights_path or settings.model_path)
    if (eos := chat.special_tokens.get("eos_token")) is not None and len(
        ids := chat.encode_each([eos])[0]
    ) == 1:
        end_ids += ids
    config_file = model / "generation_config.json"
    more = read_settings(config_file if config_file.exists() else model / "config.json").get(
        "eos_token_id"
    )
    end_ids += [t for t in (more if isinstance(more, list) else [more]) if isinstance(t, int)]
    return list(dict.fromkeys(end_ids))


@lru_cache(maxsize=4)
def _permutation(seed: int, own_seed: int, epoch: int, rows: int) -> np.ndarray:
    return np.random.default_rng((seed, own_seed, epoch)).permutation(rows)
