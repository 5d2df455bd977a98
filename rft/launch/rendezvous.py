"""Rendezvous of training and exploring processes on one Ray: a named actor.

The first process creates it, and it ends with that process; another process then creates a new one.
So processes start in any order, nothing outlives the run, and every wait is for an answer.
Invariant: at most one coordinator of a run is offered at a time.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from rft.config.plan import Plan
from rft.errors import DeadlineExceeded, RftError, RunFailed, SetupError
from rft.launch.cluster import here
from rft.launch.ray_calls import answer
from rft.launch.remote import ANSWER_S, guarded

log = logging.getLogger(__name__)
AGAIN_S = 0.2  # until Ray frees the name of a dead actor


class Rendezvous:
    """Body of the actor.

    An offer is (run id of the trainer's process, proxies by name).
    """

    def __init__(self) -> None:
        self._offer: tuple[str, dict[str, Any]] | None = None
        self._changed = asyncio.Condition()

    async def offer(self, run_id: str, parts: dict[str, Any]) -> None:
        """Store the offer.  Raises SetupError while another process's coordinator lives."""
        if self._offer is not None and self._offer[0] != run_id:
            try:
                await asyncio.wait_for(
                    self._offer[1]["coordinator"].records(1 << 40, wait=False), ANSWER_S
                )
            except RftError:
                pass  # it has ended
            except TimeoutError:
                raise SetupError(
                    "another process trains this run already and does not answer; end it first"
                ) from None
            else:
                raise SetupError(
                    "another process trains this run already; stop it, or give this run another "
                    "`name`"
                )
        async with self._changed:
            self._offer = (run_id, parts)
            self._changed.notify_all()

    async def find(self, ended: tuple[str, ...]) -> tuple[str, dict[str, Any]]:
        """Wait for an offer by a process not in `ended`."""
        async with self._changed:
            await self._changed.wait_for(
                lambda: self._offer is not None and self._offer[0] not in ended
            )
        assert self._offer is not None
        return self._offer

    async def last(self) -> None:
        """Wait for ever: the call fails when this process ends."""
        await asyncio.Event().wait()


def address(plan: Plan) -> tuple[str, str]:
    """Return (namespace, name) of the rendezvous of a run."""
    return plan.cluster.namespace, f"rft-rendezvous:{plan.buffer.run}"


async def _rendezvous(plan: Plan) -> Any:
    import ray

    namespace, name = address(plan)
    options = {
        **here(),
        "name": name,
        "namespace": namespace,
        "get_if_exists": True,
        "max_concurrency": 10000,
    }
    return await answer("create the rendezvous", ray.remote(Rendezvous).options(**options).remote)


async def keep(plan: Plan, run_id: str, parts: dict[str, Any]) -> None:
    """Offer the coordinator of this process until cancelled, recreating the rendezvous if it ends."""
    while True:
        rendezvous = await _rendezvous(plan)
        try:
            await guarded(rendezvous.offer.remote(run_id, parts), "the rendezvous")
            await guarded(rendezvous.last.remote(), "the rendezvous")
        except RunFailed:
            await _wait_for_name()


async def _wait_for_name() -> None:
    log.info("the rendezvous ended with the process that created it; creating another")
    await asyncio.sleep(AGAIN_S)


async def find(plan: Plan, welcome: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Find the training process and its parts, once this one may join (`Coordinator.welcome`).

    Raises DeadlineExceeded after synchronizer.sync_timeout, and errors of `welcome`.
    """
    limit = plan.sync.sync_timeout
    ended: tuple[str, ...] = ()
    namespace, _ = address(plan)
    log.info("looking for the trainer of run %s in namespace %s", plan.buffer.run, namespace)
    try:
        async with asyncio.timeout(limit):
            while True:
                try:
                    run_id, parts = await guarded(
                        (await _rendezvous(plan)).find.remote(ended), "the rendezvous"
                    )
                except RunFailed:
                    await _wait_for_name()
                    continue
                try:
                    await parts["coordinator"].welcome(**welcome)
                except RunFailed as e:
                    log.info("the trainer that was found has ended: %s", e)
                    ended = (*ended, run_id)
                    continue
                return run_id, parts
    except TimeoutError:
        raise DeadlineExceeded(
            f"no trainer of run {plan.buffer.run} in namespace {namespace} on this cluster within "
            f"{limit:g} s; start it (the same "
            "project, group, name and checkpoint_root_dir, mode: train), or raise "
            "synchronizer.sync_timeout"
        ) from None
