"""Data sets to train on as they are: chats to imitate, texts to continue, pairs of a better and a
worse answer, as tokens.

Knows the tokenizer's files (`chatfiles`) and the rows of a taskset, no losses.  Invariant: the
tokens before an answer are those that an engine would be given, and what is trained of an answer is
what a model would have to generate, its end token included, nothing after.
"""

from __future__ import annotations

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
from rft.taskset.base import ABSENT, as_chat, lookup, of_texts
from rft.taskset.chatfiles import KEY, ChatFiles, LeftOut, find_model, open_chat, read_settings
from rft.taskset.open_source import open_taskset
from rft.taskset.settings import OfflineDataSettings
from rft.types.experience import Demonstration, Preference
from rft.types.ids import ExperienceId
from rft.types.modelfiles import vocab_size
from rft.types.task import Task

log = logging.getLogger(__name__)
_SAID = ("content", "reasoning_content", "reasoning", "thinking")  # texts of an answer
# of templates that write it: rows must be the same on the day when a run goes on
_TODAY = datetime(2026, 1, 1)


@dataclass(frozen=True)
class OfflineData:
    """The rows of a data set as tokens, in the order of the file."""

    settings: OfflineDataSettings
    records: Sequence[Demonstration | Preference]
    fingerprint: str  # of settings that matter, rows and tokens
    left_out: LeftOut | None = None  # the rows that are too long

    def __len__(self) -> int:
        return len(self.records)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row; of a pair those of both sides, their prompt twice."""
        return [sum(len(tokens) for tokens, _ in sides(r)) for r in self.records]

    @property
    def trained_tokens(self) -> int:
        """Of all rows, in one epoch."""
        return sum(int(mask.sum()) for r in self.records for _, mask in sides(r))

    def batch(self, step: int, size: int, seed: int) -> list[int]:
        """The places in `records` of train step `step` (from 1): a function of its arguments alone,
        so a resumed run continues exactly.

        sequential: file order, again and again; shuffle: another permutation in each epoch; random:
        drawn for each step, no row twice.
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

    def place(self, steps: int, size: int, seed: int) -> str:
        """What a checkpoint after `steps` steps remembers; another data set or another order gives
        another text.
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
    """Reads and tokenizes every row.  Raises ConfigError naming the first row that cannot be used."""
    # only some rows need that column: see _with_answer
    own = replace(settings.rows.format, response_key="")
    taskset = open_taskset(replace(settings.rows, format=own))
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
    if not records:
        text = f"{settings.rows.path}: no row has at most {settings.max_tokens} tokens"
        raise ConfigError(text, key=settings.rows.key, given=settings.max_tokens)
    if not left_out:
        return OfflineData(settings, records, digest.hexdigest())
    said = {"option": "filter_overlong", "limit": f"model.max_model_len {settings.max_tokens}"}
    gone = LeftOut(rows=tuple(left_out), total=len(taskset), longest=most, **said)
    log.info("%s: %s", settings.rows.name, gone)
    return OfflineData(settings, records, digest.hexdigest(), gone)


def sides(record: Demonstration | Preference) -> list[tuple[np.ndarray, np.ndarray]]:
    """(tokens int32 [T], loss mask bool [T]) of what is trained of a record: itself, or of a pair
    the chosen and the rejected side.
    """
    if isinstance(record, Demonstration):
        return [(record.tokens, record.loss_mask)]
    whole = [np.concatenate([record.prompt, side]) for side in (record.chosen, record.rejected)]
    return [(tokens, np.arange(len(tokens)) >= len(record.prompt)) for tokens in whole]


# ---------------------------------------------------------------- a row as tokens


class _Tokens:
    """Turns rows into records with one tokenizer and template."""

    def __init__(self, settings: OfflineDataSettings, chat: ChatFiles) -> None:
        self._settings = settings
        self._chat = chat
        self._ends = end_tokens(chat, settings)
        self._key = settings.rows.key
        self.vocab_size = vocab_size(find_model(settings.weights_path or settings.model_path))

    def record(self, task: Task, where: str) -> Demonstration | Preference:
        """Raises ConfigError that names the row."""
        of_texts(task.row, where, self._key)
        id = ExperienceId(0, 0, 0, task.index, 0)
        match self._settings.kind:
            case "texts":
                return self._text(id, task, where)
            case "pairs":
                return self._pair(id, task, where)
            case "chats":
                tokens, mask = self._turns(
                    task, self._with_answer(task, where), where, every=self._settings.every_turn
                )
                return Demonstration(id=id, tokens=tokens, loss_mask=mask)

    def _text(self, id: ExperienceId, task: Task, where: str) -> Demonstration:
        """All tokens but the first, which nothing predicts; the tokenizer's own special tokens, and
        one that ends the text.
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

    def _pair(self, id: ExperienceId, task: Task, where: str) -> Preference:
        prompt = task.chat()
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
                there = ", ".join(sorted(map(str, task.row)))
                raise ConfigError(
                    f"{where} has no column {column!r}; its columns are {there}",
                    key=f"{self._key}.format.{name}",
                )
            answer = self._answer(value, prompt, name, column, where)
            tokens, mask = self._turns(task, [*prompt, answer], where, every=False)
            answers.append(np.split(tokens, [int(np.flatnonzero(mask)[0])]))
        (before, chosen), (_, rejected) = answers
        if np.array_equal(chosen, rejected):
            raise ConfigError(
                f"{where}: both answers are the same, so neither is preferred", key=self._key
            )
        return Preference(id=id, prompt=before, chosen=chosen, rejected=rejected)

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
        return [*messages, self._answer(value, messages, "response_key", column, where)]

    def _answer(
        self, value: Any, prompt: list[dict[str, Any]], name: str, column: str, where: str
    ) -> dict[str, Any]:
        """The answer in a column: a text, a message, or a chat (or its JSON text) of the prompt and
        it, which may leave the prompt out.
        """
        if isinstance(value, str) and value:
            with suppress(ValueError):
                return self._answer(list(as_chat(value)), prompt, name, column, where)
            return {"role": "assistant", "content": value}
        problem = "must be a text, or a chat that ends with the assistant"
        try:
            *before, answer = as_chat([value] if isinstance(value, dict) else value)
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
    ) -> tuple[np.ndarray, np.ndarray]:
        """(tokens int32 [T], loss mask bool [T]) of a chat that ends with an answer; `every` answer
        is trained, or the last alone.
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
        for i in (i for i, weight in zip(answers, weights, strict=True) if weight != 0):
            before = self._render(task, messages[:i], where, True)
            through = self._render(task, messages[: i + 1], where, False)
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
            if wrong := _other(messages[i], pieces[-1]):
                raise ConfigError(f"{where}, message {i}: {wrong}", key=self._key)
        tokens: list[int] = []
        mask: list[bool] = []
        for n, ids in enumerate(self._chat.encode_pieces(pieces)):
            spoken = self._spoken(ids) if n % 2 else 0
            if n == len(pieces) - 1:
                ids = ids[:spoken]  # nothing comes after the last answer
            tokens += ids
            mask += [True] * spoken + [False] * (len(ids) - spoken)
        if not any(mask):
            raise ConfigError(f"{where}: the answer has no tokens", key=self._key)
        return np.asarray(tokens, np.int32), np.asarray(mask, np.bool_)

    def _spoken(self, ids: list[int]) -> int:
        """How many of an answer's tokens a model generates: up to its end token; templates put line
        breaks and other ends after that.
        """
        ends = [i for i, token in enumerate(ids) if token in self._ends]
        while len(ends) > 1 and not self._chat.text(ids[ends[-2] + 1 : ends[-1]]).strip():
            ends.pop()
        return ends[-1] + 1 if ends else len(ids)

    def _render(self, task: Task, messages: list[dict[str, Any]], where: str, opening: bool) -> str:
        s = self._settings
        args = {"strftime_now": _TODAY.strftime, **s.chat_template_args, **task.chat_template_args}
        template = task.chat_template or s.chat_template
        try:
            return self._chat.render(
                messages, list(task.tools), template=template, opening=opening, **args
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
    """Why `text`, which the template wrote of `answer`, says something else."""
    if not any(
        value and isinstance(value, str | list)
        for key, value in answer.items()
        if key not in ("role", "name", "id")
    ):
        return "the answer is empty"
    given = answer.get("tool_calls") or []
    calls = [
        *(given if isinstance(given, list) else [given]),
        *filter(None, [answer.get("function_call")]),
    ]
    calls = [c.get("function") or c if isinstance(c, dict) else c for c in calls]
    if not all(isinstance(c, dict) and isinstance(c.get("name"), str) for c in calls):
        return "its tool_calls must be a list of calls, each an object with a name"
    said = [c["name"] for c in calls]
    said += (
        part
        for key in _SAID
        if isinstance(value := answer.get(key), str)
        for part in re.split("</?think>", value)
    )
    lost = next((s.strip() for s in said if s.strip() not in text), None)
    advice = "give another chat template, or leave that out of the row"
    return (
        None
        if lost is None
        else f"the chat template does not write {lost[:80]!r} of the answer; {advice}"
    )


def end_tokens(chat: ChatFiles, settings: OfflineDataSettings) -> list[int]:
    """What ends a generation in engines: the tokenizer's end token first, then those of the model's
    folder.
    """
    found: list[int] = []
    model = find_model(settings.weights_path or settings.model_path)
    if (eos := chat.special_tokens.get("eos_token")) is not None and len(
        ids := chat.encode_each([eos])[0]
    ) == 1:
        found += ids
    own = model / "generation_config.json"
    more = read_settings(own if own.exists() else model / "config.json").get("eos_token_id")
    found += [t for t in (more if isinstance(more, list) else [more]) if isinstance(t, int)]
    return list(dict.fromkeys(found))


@lru_cache(maxsize=4)
def _permutation(seed: int, own_seed: int, epoch: int, rows: int) -> np.ndarray:
    return np.random.default_rng((seed, own_seed, epoch)).permutation(rows)
