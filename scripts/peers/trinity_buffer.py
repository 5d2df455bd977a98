"""Trinity-RFT's buffer on the race's experiences, one order whenever it is told to; runs in the
peers' environment.

    python trinity_buffer.py SPEC.json      with {arrays, texts, folder, threads}

Protocol on the pipes: it prints {"ready": true} once everything is loaded; each line on stdin is
{"do": NAME, ...} and is answered by one line; it ends when stdin closes.  Writing, reading,
serialising and gathering are Trinity's own, through its public classes, in this process: without
the hop into its Ray actor, except for the queue, which has no other form.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import json
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

SPEC: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
os.environ["OMP_NUM_THREADS"] = str(SPEC["threads"])

import ray  # noqa: E402
import torch  # noqa: E402  # reads OMP_NUM_THREADS when it is imported
from safetensors.numpy import load_file  # noqa: E402
from trinity.buffer.reader.queue_reader import QueueReader  # noqa: E402
from trinity.buffer.reader.sql_reader import SQLReader  # noqa: E402
from trinity.buffer.storage.sql import SQLExperienceStorage  # noqa: E402
from trinity.buffer.writer.file_writer import JSONWriter  # noqa: E402
from trinity.buffer.writer.queue_writer import QueueWriter  # noqa: E402
from trinity.common.config import StorageConfig  # noqa: E402
from trinity.common.experience import (  # noqa: E402
    EID,
    Experience,
    gather_action_masks,
    gather_attention_masks,
    gather_response_attrs,
    gather_token_ids,
)

OUT = sys.stdout
sys.stdout = sys.stderr  # whatever the libraries print is not part of the protocol


def load() -> list[Experience]:
    """The race's experiences in Trinity's form: log-probs and mask of the response only."""
    arrays = load_file(SPEC["arrays"])
    texts = json.loads(Path(SPEC["texts"]).read_text())
    made = []
    at = 0
    for i, (length, prompt, text) in enumerate(
        zip(arrays["lengths"], arrays["prompts"], texts, strict=True)
    ):
        span = slice(at, at + length)
        response = slice(at + prompt, at + length)
        made.append(
            Experience(
                eid=EID(batch=i // 64, task=i // 8, run=i % 8),
                tokens=torch.from_numpy(arrays["tokens"][span].copy()),
                prompt_length=int(prompt),
                logprobs=torch.from_numpy(arrays["logprobs"][response].copy()),
                action_mask=torch.from_numpy(arrays["mask"][response].copy()),
                reward=text["reward"],
                prompt_text=text["prompt"],
                response_text=text["response"],
                info={**text["info"], "model_version": 0, "use_count": 0},
                metrics=text["metrics"],
            )
        )
        at += length
    return made


def storage_config(**given: Any) -> StorageConfig:
    return StorageConfig(
        name="bench", schema_type="experience", max_read_timeout=600, batch_size=64, **given
    )


def sql(path: str) -> StorageConfig:
    return storage_config(storage_type="sql", path=f"sqlite:///{path}", wrap_in_ray=False)


def collate(rows: list[Experience]) -> dict[str, torch.Tensor]:
    """What its trainer makes of a batch, with its own functions."""
    prompt = max(x.prompt_length for x in rows)
    response = max(len(x.tokens) - x.prompt_length for x in rows)
    attention = gather_attention_masks(rows, prompt, response).long()
    tokens = gather_token_ids(rows, prompt, response, 0).long()
    cumulated = torch.cumsum(attention, dim=-1)
    rewards = torch.zeros(attention.shape, dtype=torch.float32)
    rewards[torch.arange(len(rows)), cumulated.argmax(dim=-1)] = torch.tensor(
        [x.reward for x in rows], dtype=torch.float32
    )
    return {
        "position_ids": torch.clip(cumulated - 1, 0, None).long(),
        "input_ids": tokens,
        "attention_mask": attention,
        "response_mask": gather_action_masks(rows, response),
        "token_level_scores": rewards[:, prompt:],
        "rollout_log_probs": gather_response_attrs(rows, "logprobs", response),
    }


def facts(rows: list[Experience]) -> dict[str, Any]:
    """What both sides must agree on."""
    uids = "\n".join(sorted(f"{x.eid.task}/{x.eid.run}" for x in rows))
    return {
        "rows": len(rows),
        "uids": hashlib.sha256(uids.encode()).hexdigest(),
        "tokens": sum(int(x.tokens.sum()) for x in rows),
        "logprobs": round(sum(float(x.logprobs.double().sum()) for x in rows), 3),
    }


def tensor_facts(made: dict[str, torch.Tensor]) -> dict[str, float]:
    mask = made["response_mask"].numpy()
    targets = made["input_ids"].numpy()[:, -mask.shape[1] :][mask]
    logprobs = made["rollout_log_probs"].numpy()[mask]
    return {
        "trained": len(targets),
        "targets": int(targets.sum()),
        "logprobs": float(logprobs.sum(dtype=float)),
    }


class Peer:
    def __init__(self) -> None:
        self.rows = load()

    async def write(self, path: str, rows: int, writers: int) -> dict[str, Any]:
        """`rows` experiences in batches of 64 by `writers` at once, as the storage's actor would
        serve them.
        """
        storage = SQLExperienceStorage(sql(path))
        await storage.prepare()
        began = time.perf_counter()
        await in_batches(storage.write, self.rows[:rows], writers)
        seconds = time.perf_counter() - began
        stored = await storage.query(0, rows + 1)
        await storage.engine.dispose()
        return {"seconds": seconds, **facts(stored)}

    async def write_jsonl(self, path: str, rows: int) -> dict[str, Any]:
        """Its text form, which leaves the arrays out."""
        writer = JSONWriter(storage_config(storage_type="file", path=path, wrap_in_ray=False))
        began = time.perf_counter()
        await in_batches(writer.write, self.rows[:rows], 1)
        return {"seconds": time.perf_counter() - began}

    async def read(self, path: str, batches: int) -> dict[str, Any]:
        """From its SQL storage to the tensors of `batches` batches, each of which is gone before
        the next.
        """
        reader = SQLReader(sql(path))
        await (await reader._get_async_storage()).prepare()
        seconds: list[float] = []
        facts: Counter[str] = Counter()
        for _ in range(batches):
            began = time.perf_counter()
            made = collate(await reader.read(64))
            seconds.append(time.perf_counter() - began)
            facts.update(tensor_facts(made))
        await (await reader._get_async_storage()).engine.dispose()
        return {"seconds": sum(seconds), "each": seconds, "tensors": dict(facts)}

    async def unpack(self, batches: int) -> dict[str, Any]:
        """From the bytes of its queue to the tensors."""
        payloads = [
            Experience.serialize_many(self.rows[i * 64 : i * 64 + 64]) for i in range(batches)
        ]
        began = time.perf_counter()
        for payload in payloads:
            collate(Experience.deserialize_many(payload))
        return {"seconds": time.perf_counter() - began, "bytes": sum(map(len, payloads))}

    async def fill(self, path: str, rows: int) -> dict[str, Any]:
        """`rows` rows through its own tables, many in one transaction: its writer would need
        minutes.
        """
        storage = SQLExperienceStorage(sql(path))
        await storage.prepare()
        payloads = [x.serialize() for x in self.rows]
        for start in range(0, rows, 5000):
            numbers = range(start, min(start + 5000, rows))
            metas = [
                storage.table_model_cls.from_experience(self.rows[i % len(self.rows)])
                for i in numbers
            ]
            blobs = [
                storage.blob_model_cls(id=i + 1, experience_bytes=payloads[i % len(payloads)])
                for i in numbers
            ]
            for i, meta in zip(numbers, metas, strict=True):
                meta.id = i + 1
                meta.task_id = str(i // 8)
                meta.model_version = i // 640
            async with storage.session() as session, session.begin():
                session.add_all(metas)
                session.add_all(blobs)
        count = await storage.count()
        await storage.engine.dispose()
        return {"rows": count}

    async def wake_sql(self, path: str, delays: list[float]) -> dict[str, Any]:
        """Seconds from a write's return to the waiting reader's."""
        writer = SQLExperienceStorage(sql(path))
        reader = SQLExperienceStorage(sql(path))
        await writer.prepare()
        await reader.prepare()
        waits = await wakeups(writer.write, reader.read, self.rows, delays)
        await writer.engine.dispose()
        await reader.engine.dispose()
        return {"waits": waits}

    async def wake_queue(self, path: str, delays: list[float]) -> dict[str, Any]:
        if not ray.is_initialized():  # it and the queue's actor stay for the next order
            ray.init(
                address="local",
                num_cpus=2,
                include_dashboard=False,
                log_to_driver=False,
                namespace="bench",
            )
        config = storage_config(storage_type="queue", path=path, ray_namespace="bench")
        writer = QueueWriter(config)
        reader = QueueReader(config)
        await writer.acquire()
        waits = await wakeups(writer.write, reader.read, self.rows, delays)
        return {"waits": waits}


async def in_batches(
    write: Callable[[list[Experience]], Awaitable[None]], rows: list[Experience], writers: int
) -> None:
    async def one(number: int) -> None:
        for start in range(64 * number, len(rows), 64 * writers):
            await write(rows[start : start + 64])

    await asyncio.gather(*(one(n) for n in range(writers)))


async def wakeups(
    write: Callable[[list[Experience]], Awaitable[None]],
    read: Callable[[int], Awaitable[list[Experience]]],
    rows: list[Experience],
    delays: list[float],
) -> list[float]:
    """The last 8 of 64 experiences are written while a reader waits for all."""
    waits = []
    for i, delay in enumerate(delays):
        start = 64 * i % (len(rows) - 63)
        await write(rows[start : start + 56])
        reading = asyncio.create_task(timed(read(64)))
        await asyncio.sleep(delay)
        await write(rows[start + 56 : start + 64])
        written = time.perf_counter()
        waits.append(max(0.0, await reading - written))
    return waits


async def timed(reading: Awaitable[list[Experience]]) -> float:
    collected = await reading
    if len(collected) != 64:
        raise RuntimeError(f"the peer's reader came back with {len(collected)} of 64 experiences")
    return time.perf_counter()


async def main() -> None:
    logging.disable(logging.INFO)
    torch.set_num_threads(SPEC["threads"])
    peer = Peer()
    gc.freeze()
    say({"ready": True})
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        order = json.loads(line)
        say(await getattr(peer, order.pop("do"))(**order))
    ray.shutdown()


def say(message: dict[str, Any]) -> None:
    print(json.dumps(message), file=OUT, flush=True)


if __name__ == "__main__":
    asyncio.run(main())
