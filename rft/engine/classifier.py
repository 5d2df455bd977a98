"""Score whole chats with a transformers model that has a classification head (a trained reward
model).

Independent of rewards.  Waiting texts are scored in batches, padded to the longest, on one
thread.  Invariant: up to rounding, a text's scores do not depend on the batch; scores are the
model's logits, with no sigmoid or softmax.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Self

from rft.engine.base import ScoresOnly, checked_model
from rft.engine.chat import Chat, load_tokenizer
from rft.engine.settings import EngineSettings
from rft.errors import EngineFailed, OutOfMemory, SetupError, is_out_of_memory

BATCH_TOKENS = 8192  # of one forward, padding included


@dataclass(eq=False)
class _WaitingText:
    ids: list[int]
    answer: asyncio.Future[list[float]]


class ClassifierEngine(ScoresOnly):
    """Created by `start`; called from one event loop."""

    COUNTED = ("requests", "prompt_tokens", "batches")

    def __init__(self, settings: EngineSettings, model: Any, chat: Chat) -> None:
        super().__init__(settings)
        self.model = model
        self._chat = chat
        # without a padding token the model takes one text at a time
        self._pad: int | None = model.config.pad_token_id
        self._waiting: list[_WaitingText] = []
        self._work: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=settings.name)
        self._closed = False

    @classmethod
    async def start(cls, settings: EngineSettings) -> Self:
        """Load model and tokenizer of `model_path`.  Raises SetupError without a classification
        head.
        """
        return await asyncio.to_thread(
            lambda: cls(settings, _load(settings), Chat(settings, load_tokenizer(settings)))
        )

    async def classify(self, messages: Sequence[dict[str, Any]]) -> list[float]:
        """Return one score per label.  Raises PromptTooLong for a chat over max_model_len."""
        if self._closed:
            raise EngineFailed(f"{self.settings.name} is closed")
        ids = self._chat.encode_conversation(messages)
        text = _WaitingText(ids, asyncio.get_running_loop().create_future())
        self._waiting.append(text)
        self._counted["requests"] += 1
        self._counted["prompt_tokens"] += len(ids)
        if self._work is None or self._work.done():
            self._work = asyncio.ensure_future(self._drain())
        return await text.answer

    @property
    def running(self) -> int:
        return len(self._waiting)

    async def health(self) -> None:
        if self._closed:
            raise EngineFailed(f"{self.settings.name} is closed")

    async def close(self) -> None:
        """Fail waiting texts and stop the thread.  May be called twice."""
        self._closed = True
        for text in self._waiting:
            if not text.answer.done():
                text.answer.set_exception(EngineFailed(f"{self.settings.name} is closed"))
        self._waiting.clear()
        await asyncio.to_thread(self._thread.shutdown)

    # ------------------------------------------------------------ inside

    async def _drain(self) -> None:
        while self._waiting:
            batch = self._take()
            try:
                scores = await asyncio.get_running_loop().run_in_executor(
                    self._thread, self._score, [t.ids for t in batch]
                )
            except Exception as e:  # any model error is passed to the waiting callers
                kind = OutOfMemory if is_out_of_memory(e) else EngineFailed
                for text in batch:
                    if not text.answer.done():
                        text.answer.set_exception(
                            kind(f"{self.settings.name}: {type(e).__name__}: {e}")
                        )
                continue
            for text, score in zip(batch, scores, strict=True):
                if not text.answer.done():
                    text.answer.set_result(score)

    def _take(self) -> list[_WaitingText]:
        """Take the oldest text and the texts closest to its length while they fit."""
        if self._pad is None:
            return [self._waiting.pop(0)]
        first = self._waiting[0]
        batch = [first]
        longest = len(first.ids)
        for text in sorted(self._waiting[1:], key=lambda t: abs(len(t.ids) - len(first.ids))):
            longest = max(longest, len(text.ids))
            if (
                len(batch) == self.settings.max_num_seqs
                or longest * (len(batch) + 1) > BATCH_TOKENS
            ):
                break
            batch.append(text)
        taken = set(map(id, batch))
        self._waiting = [t for t in self._waiting if id(t) not in taken]
        return batch

    def _score(self, texts: list[list[int]]) -> list[list[float]]:
        import torch

        if self.model.device.type == "cpu":
            torch.set_num_threads(self.settings.cpu_threads)
        self._counted["batches"] += 1
        longest = max(map(len, texts))
        ids = torch.full((len(texts), longest), self._pad or 0)
        mask = torch.zeros_like(ids)
        for i, text in enumerate(texts):
            ids[i, : len(text)] = torch.tensor(text)
            mask[i, : len(text)] = 1
        with torch.inference_mode():
            logits = self.model(
                input_ids=ids.to(self.model.device), attention_mask=mask.to(self.model.device)
            ).logits
        scores: list[list[float]] = logits.float().cpu().tolist()
        return scores


def _load(settings: EngineSettings) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification

    try:
        config = AutoConfig.from_pretrained(
            settings.model_path, trust_remote_code=settings.trust_remote_code
        )
        if not any(
            "ForSequenceClassification" in name or "RewardModel" in name
            for name in config.architectures or ()
        ):
            raise SetupError(
                f"{settings.name}: {settings.model_path} is a "
                f"{', '.join(config.architectures or ('model without a name',))}; task: score "
                "needs one with a classification head (...ForSequenceClassification)"
            )
        loaded = AutoModelForSequenceClassification.from_pretrained(
            settings.model_path,
            output_loading_info=True,
            dtype=getattr(torch, settings.dtype),
            trust_remote_code=settings.trust_remote_code,
            **settings.extra_engine_args,
        )
    except (OSError, ValueError, TypeError) as e:
        raise SetupError(
            f"{settings.name}: no model could be loaded from {settings.model_path}: {e}"
        ) from e
    return (
        checked_model(settings.name, settings.model_path, loaded)
        .to(settings.device)
        .eval()
        .requires_grad_(False)
    )
