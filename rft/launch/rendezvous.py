"""Where a process that trains and those that explore find each other on one Ray: an actor whose
name both know.

Whoever comes first makes it, and it ends with whoever made it; the others then make another.  So
any order of starting will do, nothing outlives the run, and every wait is for an answer.
Invariant: of one run at most one coordinator is offered at a time.
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
AGAIN_S = 0.2  # after an actor that had just died: Ray frees its name in a moment


class Rendezvous:
    """Body of the actor.  An offer is (run id of the trainer's process, proxies by name)."""

    def __init__(self) -> None:
        self._offer: tuple[str, dict[str, Any]] | None = None
        self._changed = asyncio.Condition()

    async def offer(self, run_id: str, parts: dict[str, Any]) -> None:
        """Raises SetupError while the coordinator of another process lives."""
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
        """Waits for an offer that is not by one of `ended`."""
        async with self._changed:
            await self._changed.wait_for(
                lambda: self._offer is not None and self._offer[0] not in ended
            )
        assert self._offer is not None
        return self._offer

    async def last(self) -> None:
        """As long as this process lives."""
        await asyncio.Event().wait()


def address(plan: Plan) -> tuple[str, str]:
    """(namespace, name) of the rendezvous of a run."""
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
    """Offers the coordinator of this process as long as that is awaited, also after the process
    that made the rendezvous has ended.
    """
    while True:
        rendezvous = await _rendezvous(plan)
        try:
            await guarded(rendezvous.offer.remote(run_id, parts), "the rendezvous")
            await guarded(rendezvous.last.remote(), "the rendezvous")
        except RunFailed:
            await _anew()


async def _anew() -> None:
    log.info("the rendezvous ended with the process that created it; creating another")
    await asyncio.sleep(AGAIN_S)


async def find(plan: Plan, welcome: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The parts of the process that trains, once it lets this one join (`Coordinator.welcome`).

    Raises DeadlineExceeded when there is none within synchronizer.sync_timeout, and what the
    coordinator says against joining.
    """
    limit = plan.sync.timeout_s
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
                    await _anew()
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
