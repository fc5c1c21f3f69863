"""The worker of the job store inside a server: validates batches, feeds their lines to the engine,
assembles results, and shows that it lives. It outlasts every failure of database and disk."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial

from scheduler.jobs.errors import LeaseLost, StoreUnavailable
from scheduler.jobs.lines import Claim, Outcome
from scheduler.jobs.tables import Batch
from serving.desk import Desk
from serving.job_answers import STATUSES
from serving.lines import LineRunner, TryAgain
from serving.state import ServerState

log = logging.getLogger("bishop.jobs")

BEATS = 4
"""Signs of life in the time of a lease."""

LONGEST_PAUSE = 10.0


class Pump:
    """One per server. `running` are the lines in the engine."""

    def __init__(self, state: ServerState, desk: Desk) -> None:
        self._state = state
        self._desk = desk
        self._store = desk.store
        self._runner = LineRunner(state)
        self._model = state.service.model.name
        self._poll = state.config.poll_seconds
        self._leaving = False
        self._wake = asyncio.Event()
        self._keeper_wake = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self.running: dict[asyncio.Task[None], Claim] = {}

    async def start(self) -> None:
        beat = self._store.config.lease_seconds / BEATS
        self._tasks = [
            asyncio.create_task(self._for_ever(self._beat, beat, asyncio.Event())),
            asyncio.create_task(self._for_ever(self._keep, self._poll, self._keeper_wake)),
            asyncio.create_task(self._for_ever(self._feed, self._poll, self._wake)),
        ]

    def wake(self) -> None:
        """There may be work: do not wait for the next poll."""
        self._wake.set()
        self._keeper_wake.set()

    def leave(self) -> None:
        """Take no more lines; those that run may end."""
        self._leaving = True

    async def stop(self) -> None:
        """Give everything back that has not ended, and end."""
        self.leave()
        for task in [*self._tasks, *self.running]:
            task.cancel()
        await asyncio.gather(*self._tasks, *self.running, return_exceptions=True)

    # -- loops -------------------------------------------------------------------------------

    async def _for_ever(
        self, run: Callable[[], Awaitable[None]], seconds: float, wake: asyncio.Event
    ) -> None:
        """`run` every `seconds` or when woken; after a failure later and later."""
        pause = seconds
        while True:
            wake.clear()
            pause = seconds if await self._survive(run) else min(2 * pause, LONGEST_PAUSE)
            try:
                async with asyncio.timeout(pause):
                    await wake.wait()
            except TimeoutError:
                continue

    async def _survive(self, run: Callable[[], Awaitable[None]]) -> bool:
        up = self._state.metrics.batch.store_up
        try:
            await run()
        except StoreUnavailable as error:
            log.error("%s; trying again", error)
            up.set(0)
            return False
        except LeaseLost as error:
            log.warning("%s", error)
        except Exception:
            log.exception("unforeseen failure of batch work; trying again")
            return False
        up.set(1)
        return True

    async def _beat(self) -> None:
        await self._desk.work(self._store.workers.beat)

    async def _keep(self) -> None:
        await self._desk.work(self._store.keep)
        counts = await self._desk.work(self._store.batches.by_status)
        for status in STATUSES:
            self._state.metrics.batch.batches.labels(status).set(counts.get(status, 0))
        if self._leaving:
            return
        await self._each(self._store.batches.claim_validation, self._store.validate)
        await self._each(self._store.batches.claim_ending, self._store.results.assemble)

    async def _each(
        self, claim: Callable[[str], Batch | None], work: Callable[[Batch], bool]
    ) -> None:
        """Do `work` on every batch that can be claimed."""
        while (batch := await self._desk.work(claim, self._model)) is not None:
            try:
                done = await self._desk.work(work, batch)
            except LeaseLost as error:
                log.warning("%s", error)
                continue
            except Exception:
                await self._desk.work(self._store.batches.release, batch)
                raise
            log.info("batch %s: %s %s", batch.id, work.__name__, "done" if done else "refused")
            self._wake.set()

    async def _feed(self) -> None:
        """Fill up with lines, and drop those of batches that have been ended."""
        await self._drop_stopped()
        health = self._state.service.health()
        free = self._state.config.batch_lines * health.engines - len(self.running)
        if self._leaving or free < 1 or not health.alive:
            return
        for claim in await self._desk.work(self._store.lines.claim, self._model, free):
            task = asyncio.create_task(self._line(claim))
            self.running[task] = claim
            task.add_done_callback(self._ended)

    async def _drop_stopped(self) -> None:
        if not self.running:
            return
        batches = sorted({claim.batch.seq for claim in self.running.values()})
        stopped = await self._desk.work(self._store.lines.stopped, batches)
        for task, claim in list(self.running.items()):
            if claim.batch.seq in stopped:
                task.cancel()

    # -- one line ----------------------------------------------------------------------------

    def _ended(self, task: asyncio.Task[None]) -> None:
        claim = self.running.pop(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("line %d of %s", claim.number, claim.batch.id, exc_info=error)
        self.wake()

    async def _line(self, claim: Claim) -> None:
        """Run a line and store how it ended, or give it back."""
        try:
            outcome, record = await self._runner.run(claim)
            await self._until_stored(partial(self._finish, claim, outcome, record))
        except TryAgain as error:
            log.warning("line %d of %s waits: %s", claim.number, claim.batch.id, error)
            await asyncio.sleep(self._poll)
            await self._until_stored(partial(self._store.lines.release, claim))
        except asyncio.CancelledError:
            await self._give_back(claim)
            raise

    def _finish(self, claim: Claim, outcome: Outcome, record: bytes) -> None:
        if self._store.lines.finish(claim, outcome, record):
            self._state.metrics.batch.lines.labels(outcome).inc()
        else:
            log.warning("line %d of %s was taken over", claim.number, claim.batch.id)

    async def _until_stored(self, store: Callable[[], None]) -> None:
        """A picture that is drawn is not thrown away because the database is down."""
        pause = self._poll
        while True:
            try:
                await self._desk.work(store)
                return
            except StoreUnavailable as error:
                log.error("%s; trying again in %.0f s", error, pause)
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)

    async def _give_back(self, claim: Claim) -> None:
        """If the store does not answer, the lease runs out."""
        try:
            await asyncio.shield(self._desk.work(self._store.lines.release, claim))
        except (StoreUnavailable, asyncio.CancelledError):
            return
