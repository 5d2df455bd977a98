"""One session of a client: its calls form one run, and each is stored before it is answered.

Depends on the store, not on HTTP and not groups.  Invariant: an answer that left is in the store,
and a request that is sent again with its key gets the same answer and counts once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import msgspec
import xxhash

from rft.types.completion import Score, Transcript, Turn
from rft.types.sessions import (
    CallStored,
    SessionStore,
    StoredCall,
    StoredSession,
    pack_turns,
    unpack_turns,
)
from rft.types.task import Task
from rft.workflow.base import RunContext
from rft.workflow.endpoint_answers import ApiAnswer
from rft.workflow.endpoint_sessions import RunSession, understood
from rft.workflow.endpoint_wire import ApiError, ApiRequest


class LiveSession(RunSession):
    """`stored` is the session as the ledger has it; `key`: the secret, where it was just made."""

    def __init__(
        self,
        stored: StoredSession,
        ctx: RunContext,
        task: Task,
        store: SessionStore,
        *,
        fresh: bool,
        key: str = "",
    ) -> None:
        # a session without a key of its own is opened by none
        session_key_hash = stored.key_hash or "none " + stored.id
        super().__init__(
            ctx, task, "taskset", True, id=stored.id, key=key, key_hash=session_key_hash
        )
        self.name = "policy"
        self.stored = stored
        self._store = store
        self.opening = fresh and not stored.key_hash  # until its only call is stored
        self._loading = None if fresh else asyncio.Lock()
        # requests that may be sent again: their hash and answer, by retry key
        self._retries: dict[str, tuple[str, asyncio.Future[ApiAnswer]]] = {}
        self._number = 0
        self._stored_images: set[str] = set()
        self.calls: dict[str, StoredCall] = {}  # without payload
        # hears once of each that is stored
        self.on_answer: Callable[[ApiAnswer, int], None] = lambda answer, n: None
        self._owners: list[str] = []  # of each recorded turn: its call
        self.scores: dict[str, Score] = {}  # of single calls
        self.under_way = 0  # calls
        self.scoring = asyncio.Lock()  # while a reward is being stored
        self.forming = False  # its rows are being made: what they hold as their reward is fixed

    async def load(self) -> None:
        """What it was before this process began."""
        if self._loading is None:
            return
        async with self._loading:
            if self._loading is None:
                return
            stored = [
                (call, unpack_turns(call.turns))
                for call in await self._store.session_calls(self.id)
            ]
            self._ctx.know(image for _, turns in stored for turn in turns for image in turn.images)
            for call, some_images in stored:
                turns = [
                    msgspec.structs.replace(turn, images=self._ctx.shown(turn.messages))
                    for turn in some_images
                ]
                self._add(call, turns)
                if call.retry_key:
                    done: asyncio.Future[ApiAnswer] = asyncio.get_running_loop().create_future()
                    done.set_result(
                        ApiAnswer(
                            completions=[t.completion for t in turns],
                            id=call.id,
                            created=call.created,
                        )
                    )
                    self._retries[call.retry_key] = call.asked, done
            self._loading = None

    async def take(self, other: LiveSession) -> None:
        """The calls of `other` are this session's, as the store says already."""
        await other.load()
        for call, turns in other.turns_of_calls():
            self._ctx.know(image for turn in turns for image in turn.images)
            self._add(call, turns)
        self.scores |= other.scores

    async def answer(self, request: ApiRequest, retry_key: str) -> ApiAnswer:
        await self.load()
        digest = xxhash.xxh3_128_hexdigest(msgspec.json.encode(request)) if retry_key else ""
        if (retry := self._retries.get(retry_key)) is not None:
            request_hash, answer = retry
            if request_hash != digest:
                reason = (
                    "this Idempotency-Key was used with another request; give each request a key "
                    "of its own"
                )
                raise ApiError(409, reason, param="Idempotency-Key", code="idempotency_conflict")
            return await asyncio.shield(answer)
        if not retry_key:
            return await self.call(self._answered(request, "", ""))
        # goes on when the client has gone
        job = asyncio.ensure_future(self.call(self._answered(request, retry_key, digest)))
        self._retries[retry_key] = digest, job
        job.add_done_callback(lambda done: self._forget(retry_key, done))
        return await asyncio.shield(job)

    async def reward(self, body: Any) -> dict[str, Any]:
        """What an agent posts that a run starts; here only what is in the store counts."""
        reason = (
            f"post the reward to /v1/sessions/{self.id}/reward, with the key of the client that "
            f"opened this session"
        )
        raise ApiError(404, reason, code="unknown_address")

    def _forget(self, retry_key: str, done: asyncio.Future[ApiAnswer]) -> None:
        if done.cancelled() or done.exception() is not None:
            del self._retries[retry_key]

    async def _answered(self, request: ApiRequest, retry_key: str, digest: str) -> ApiAnswer:
        async with self.scoring:  # a reward that is being stored completes the session
            if self.stored.state != "open":
                raise ApiError(
                    409,
                    "the session has its reward: it is complete; open another one",
                    code="session_complete",
                )
            self.under_way += 1
        try:
            turns = await understood(self.generate(request))
            return await asyncio.shield(self._store_answer(turns, request.n, retry_key, digest))
        finally:
            self.under_way -= 1

    async def _store_answer(
        self, turns: list[Turn], n: int, retry_key: str, digest: str
    ) -> ApiAnswer:
        """Stored, recorded and counted, also where the client has gone meanwhile: none is without
        the others.
        """
        self.under_way += 1
        try:
            number = self._number
            self._number = self._number + 1
            id = f"{self.id}-{number}"
            now = time.time()
            packed = pack_turns(self._with_new_images(turns))
            call = StoredCall(
                id=id,
                number=number,
                retry_key=retry_key,
                asked=digest,
                created=now,
                answers=len(turns),
                turns=packed,
            )
            if not await self._store.note(
                CallStored(self.id, call, self.stored if self.opening else None)
            ):
                raise ApiError(
                    409,
                    "the session is over: withdrawn, or without a reward for too long",
                    code="session_over",
                )
            self.opening = False
            self._add(call, turns)
        finally:
            self.under_way -= 1
        answer = ApiAnswer(
            completions=[t.completion for t in turns], id=call.id, created=call.created
        )
        self.on_answer(answer, n)
        return answer

    def _with_new_images(self, turns: list[Turn]) -> list[Turn]:
        """Leave out images that a call of the session has stored."""
        return [
            msgspec.structs.replace(
                turn, images=tuple(i for i in turn.images if i.sha256 not in self._stored_images)
            )
            for turn in turns
        ]

    def _add(self, call: StoredCall, turns: Any) -> None:
        self._number = max(self._number, call.number + 1)
        self.calls[call.id] = msgspec.structs.replace(call, turns=b"")
        if call.score is not None:
            self.scores[call.id] = call.score
        for turn in turns:
            self._ctx.record(turn)
            self._owners.append(call.id)
            self._stored_images |= {image.sha256 for image in turn.images}
            self.answered[call.id] = turn

    def turns_of_calls(self) -> list[tuple[StoredCall, list[Any]]]:
        turns = self._ctx.transcript().turns
        return [
            (call, [t for t, owner in zip(turns, self._owners, strict=True) if owner == id])
            for id, call in self.calls.items()
        ]

    def transcript(self) -> Transcript:
        """The run as it is trained: one row for each chain of calls."""
        info: dict[str, Any] = {
            "session": self.id,
            "client": self.stored.client,
            "task_id": self.stored.task_id,
        }
        transcript = self._ctx.transcript(
            info=self.stored.metadata | info, layout="chains", score=self.stored.score
        )
        scored = [
            msgspec.structs.replace(t, score=self.scores.get(owner))
            for t, owner in zip(transcript.turns, self._owners, strict=True)
        ]
        return msgspec.structs.replace(transcript, turns=tuple(scored))
