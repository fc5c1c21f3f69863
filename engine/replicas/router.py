"""`Router`: an `ImageService` over several replicas, of which any may be gone the next moment.

A request is split into its images, and each image goes to the replica with room for it. Images
wait here, not in a replica, until one takes them, so that a replica that joins or frees up gets
work at once. An image whose replica is lost is drawn again elsewhere, from its seed: the same
picture, of which the client has heard nothing twice.
"""

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from threading import Thread
from typing import TypeVar

from engine.events import Event, Failed
from engine.following import Following, Listener, follow, follow_all
from engine.policy_info import PolicyCatalog, ReadSet
from engine.replicas.choice import choose
from engine.replicas.keeper import Keeper
from engine.replicas.picture import Picture, pictures
from engine.replicas.replica import Facts, Replica, ReplicaLost, Report, Spawn
from engine.replicas.slot import Slot, Wish, counters, total
from engine.service_api import (
    EngineStats,
    FleetError,
    Health,
    ModelInfo,
    ReadQuery,
    ReplicaState,
    ReplicaStatus,
)
from scheduler.request import ImageRequest

log = logging.getLogger("bishop.replicas")

T = TypeVar("T")

MOST_REPLICAS = 1024
"""Each has a thread here."""

ROLL_SECONDS = 3600.0
"""How long a rolling restart waits for one replica."""

REMEMBERED = 256
"""Pictures of which the router knows who drew them, for those who want to see their reads."""


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """beat_seconds: longest silence of a replica without work. stuck_seconds: a step that takes
    longer makes a replica count as lost. max_losses: replicas that a picture may lose before it
    fails, since it may be what kills them. drain_seconds: how long a replica that is to leave may
    go on with its pictures before they are moved."""

    beat_seconds: float = 0.5
    stuck_seconds: float = 60.0
    max_losses: int = 8
    drain_seconds: float = 300.0


class Router:
    """See `engine.service_api.ImageService`."""

    def __init__(
        self,
        spawn: Spawn,
        replicas: int,
        config: RouterConfig | None = None,
        close: Callable[[], None] | None = None,
    ) -> None:
        """close: called when the last replica has ended."""
        if replicas < 1:
            raise ValueError(f"replicas must be at least 1, got {replicas}")
        self.config = config or RouterConfig()
        self._spawn = spawn
        self._close = close
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._queues: tuple[deque[Picture], deque[Picture]] = (deque(), deque())
        self._slots: list[Slot] = []
        self._keepers: list[Keeper] = []
        self._past = counters()
        self._facts: Facts | None = None
        self._drew: OrderedDict[str, str] = OrderedDict()
        self._stopping = False
        self._names = 0
        self._first = replicas
        self._rolling: Thread | None = None

    # -- ImageService ------------------------------------------------------------------------

    @property
    def model(self) -> ModelInfo:
        return self._known().model

    def start(self) -> None:
        """Wait for the first replica. Raises RuntimeError if there is none to be had."""
        with self._lock:
            if self._slots or self._stopping:
                return
            self._grow(self._first)
            self._changed.wait_for(lambda: self._facts or self._hopeless())
            if self._facts is None:
                reason = self._slots[0].reason or "no replica could be started"
        if self._facts is None:
            self.stop()
            raise RuntimeError(reason)

    def stop(self) -> None:
        with self._lock:
            if self._stopping:
                return
            self._stopping = True
            keepers = list(self._keepers)
            for slot in self._slots:
                for picture in slot.clear(ReplicaState.LOST):
                    _fail(picture, "the engine is stopping")
            for queue in self._queues:
                while queue:
                    _fail(queue.popleft(), "the engine is stopping")
            self._changed.notify_all()
        for keeper in keepers:
            keeper.end()
        for keeper in keepers:
            keeper.join()
        if self._close is not None:
            self._close()

    def check(self, request: ImageRequest) -> None:
        """Raise RequestError if the model cannot draw the request. While no replica answers,
        nothing is known, and the refusal comes with the events."""
        with suppress(ReplicaLost):
            self._ask(lambda replica: replica.check(request))

    def submit(self, request: ImageRequest, listen: Listener) -> None:
        """Queue a request; a model's refusal is told to the listener.

        Raises RuntimeError when the router is stopping."""
        with self._lock:
            if self._stopping:
                raise RuntimeError("the engine is stopping")
            for picture in pictures(request, listen):
                self._queue(picture).append(picture)
            self._dispatch()

    def abort(self, id: str) -> None:
        """Drop what is left of a request; unknown ids are ignored."""
        with self._lock:
            for queue in self._queues:
                kept = [picture for picture in queue if picture.owner != id]
                queue.clear()
                queue.extend(kept)
            for slot in self._slots:
                self._abort_in(slot, id)
            self._dispatch()

    def stream(self, request: ImageRequest) -> Following:
        return follow(self, request)

    def run(self, requests: Sequence[ImageRequest]) -> Iterator[tuple[int, Event]]:
        return follow_all(self, requests)

    def policies(self) -> PolicyCatalog:
        return self._known().policies

    def read_set(self, query: ReadQuery) -> ReadSet:
        """Asked of the replica that drew the picture, as far as it is still there."""
        first = self._drew.get(query.picture or "")
        return self._ask(lambda replica: replica.read_set(query), first)

    def health(self) -> Health:
        """Alive while one replica is; a replica that is stuck is replaced, not waited for."""
        with self._lock:
            engines = sum(slot.open for slot in self._slots)
            missing = engines < sum(slot.wish is not Wish.LEAVE for slot in self._slots)
            reasons = [f"{slot.name}: {slot.reason}" for slot in self._slots if slot.reason]
        error = None if engines else "; ".join(["no replica is alive", *reasons])
        return Health(engines > 0, 0.0, error, engines, missing and not self._stopping)

    def stats(self) -> EngineStats:
        """Sums over the replicas, those that are gone included."""
        with self._lock:
            seen = [self._past]
            for slot in self._slots:
                seen += [slot.stats, slot.past]
            waiting = sum(len(queue) for queue in self._queues)
        summed = total(iter(seen))
        return replace(summed, images_waiting=summed.images_waiting + waiting)

    # -- for operators -----------------------------------------------------------------------

    def replicas(self) -> tuple[ReplicaStatus, ...]:
        with self._lock:
            return tuple(slot.status() for slot in self._slots)

    def scale(self, replicas: int) -> None:
        """Add replicas, or let some leave when their pictures have ended: those that draw nothing
        anyway first, then the youngest."""
        if not 1 <= replicas <= MOST_REPLICAS:
            raise FleetError(f"replicas must lie in 1..{MOST_REPLICAS}, got {replicas}")
        with self._lock:
            staying = [slot for slot in self._slots if slot.wish is not Wish.LEAVE]
            self._grow(replicas - len(staying))
            staying.sort(key=lambda slot: slot.replica is None)
            for slot in staying[replicas:]:
                self._retire(slot, Wish.LEAVE)
            self._dispatch()

    def drain(self, name: str) -> None:
        """Let a replica leave when its pictures have ended; the last one that draws stays."""
        with self._lock:
            slot = self._named(name)
            if not any(other.open for other in self._slots if other is not slot):
                raise FleetError(f"{name} is the only replica that draws: start another one first")
            self._retire(slot, Wish.LEAVE)
            self._dispatch()

    def restart(self, name: str | None = None) -> None:
        """Let a replica's pictures end, then replace it; all in turn without a name."""
        with self._lock:
            if name is not None:
                self._retire(self._named(name), Wish.RESTART)
                self._dispatch()
                return
            if self._rolling is not None and self._rolling.is_alive():
                raise FleetError("the replicas are being restarted already")
            slots = list(self._slots)
            self._rolling = Thread(target=self._roll, args=(slots,), name="roll", daemon=True)
            self._rolling.start()

    def _roll(self, slots: Sequence[Slot]) -> None:
        """Restart one after the other, each when all others draw. If one does not come back, the
        rest stay as they are."""
        for slot in slots:
            with self._lock:
                if not self._changed.wait_for(partial(self._can_spare, slot), ROLL_SECONDS):
                    log.error("a replica did not come back; the rolling restart ends")
                    return
                if slot in self._slots and not self._stopping:
                    self._retire(slot, Wish.RESTART)
                    self._dispatch()

    def _can_spare(self, slot: Slot) -> bool:
        """Whether all other replicas draw that are to stay."""
        others = [each for each in self._slots if each is not slot]
        return self._stopping or all(each.open or each.wish is Wish.LEAVE for each in others)

    def _named(self, name: str) -> Slot:
        for slot in self._slots:
            if slot.name == name:
                return slot
        known = ", ".join(slot.name for slot in self._slots)
        raise FleetError(f"there is no replica {name!r} (there are: {known})")

    # -- what keepers tell -------------------------------------------------------------------

    def starting(self, slot: Slot) -> None:
        """A replica is about to be started in place of one that was lost."""
        with self._lock:
            if slot.state is ReplicaState.LOST:
                slot.become(ReplicaState.STARTING)

    def arrived(self, slot: Slot, replica: Replica) -> None:
        """A replica is ready for work."""
        with self._lock:
            slot.stand(replica)
            self._facts = self._facts or replica.facts
            log.info("%s is ready (%s, process %s)", slot.name, slot.where, slot.pid)
            self._dispatch()
            self._changed.notify_all()

    def asked(self, slot: Slot) -> int:
        """A report is about to be asked for: what has been sent until now will be in it."""
        with self._lock:
            return slot.unseen

    def heard(self, slot: Slot, report: Report, asked: int) -> bool:
        """Take a report; whether the replica is to go on. Raises ReplicaLost if its engine is
        dead or stuck; of its last words, only finished pictures are believed."""
        health = report.health
        with self._lock:
            slot.heard(report, asked)
            for id, item in report.events:
                if health.alive or not isinstance(item, Failed):
                    self._tell(slot, id, item)
            self._dispatch()
            if not health.alive:
                raise ReplicaLost(health.error or "its engine is dead")
            if health.stuck_seconds > self.config.stuck_seconds:
                raise ReplicaLost(f"its step has taken {health.stuck_seconds:.0f} s")
            return self._goes_on(slot)

    def lost(self, slot: Slot, reason: str, refused: bool = False) -> None:
        """A replica is gone, or did not come: what it drew is drawn elsewhere."""
        with self._lock:
            if not self._stopping:
                log.warning("%s is lost: %s", slot.name, reason)
            slot.reason = reason
            left = slot.clear(ReplicaState.REFUSED if refused else ReplicaState.LOST)
            if slot.wish is Wish.RESTART:  # whatever comes next is new
                slot.wish = Wish.STAY
            self._again(left, lost=True)
            self._changed.notify_all()

    def left(self, slot: Slot) -> bool:
        """A replica was let go; whether another is to follow it."""
        with self._lock:
            self._again(slot.clear(ReplicaState.STARTING), lost=False)
            if slot.wish is Wish.RESTART:
                slot.wish = Wish.STAY
            if slot.wish is Wish.STAY:
                return not self._stopping
            self._slots.remove(slot)
            self._keepers = [keeper for keeper in self._keepers if keeper.slot is not slot]
            self._past = counters(self._past, slot.past)
            self._changed.notify_all()
            return False

    # -- inside, under the lock --------------------------------------------------------------

    def _known(self) -> Facts:
        if self._facts is None:
            raise RuntimeError("the router has not been started")
        return self._facts

    def _hopeless(self) -> bool:
        return self._stopping or all(slot.state is ReplicaState.REFUSED for slot in self._slots)

    def _grow(self, count: int) -> None:
        for _ in range(count):
            slot = Slot(f"replica-{self._names}")
            self._names += 1
            self._slots.append(slot)
            keeper = Keeper(slot, self._spawn, self, self.config.beat_seconds)
            self._keepers.append(keeper)
            keeper.start()

    def _retire(self, slot: Slot, wish: Wish) -> None:
        """Give a slot nothing more; its keeper sees to the rest. One that is not there yet is new
        anyway."""
        if slot.wish is Wish.LEAVE or (wish is Wish.RESTART and slot.replica is None):
            return
        slot.wish = wish
        slot.wish_until = time.monotonic() + self.config.drain_seconds
        if slot.state is ReplicaState.READY:
            slot.become(ReplicaState.DRAINING)

    def _goes_on(self, slot: Slot) -> bool:
        if slot.wish is Wish.STAY:
            return True
        return bool(slot.pictures) and time.monotonic() < slot.wish_until

    def _queue(self, picture: Picture) -> deque[Picture]:
        return self._queues[not picture.interactive]

    def _dispatch(self) -> None:
        """Give what waits to replicas with room; batch pictures only when nothing else waits."""
        for queue in self._queues:
            while queue:
                first, there = queue[0], [slot for slot in self._slots if slot.open]
                slot = choose(there, first.interactive, first.suspect)
                if slot is None:
                    return
                self._send(slot, queue.popleft())

    def _send(self, slot: Slot, picture: Picture) -> None:
        assert slot.replica is not None
        slot.pictures[picture.request.id] = picture
        slot.unseen += 1
        with suppress(ReplicaLost):  # its keeper will notice
            slot.replica.submit(picture.request)

    def _tell(self, slot: Slot, id: str, item: Event | Exception) -> None:
        picture = slot.pictures.get(id)
        if picture is not None and picture.tell(item):
            slot.pictures.pop(id, None)  # whoever was told may have aborted it meanwhile
            self._remember(picture.owner, slot.name)

    def _remember(self, owner: str, name: str) -> None:
        self._drew[owner] = name
        while len(self._drew) > REMEMBERED:
            self._drew.popitem(last=False)

    def _abort_in(self, slot: Slot, owner: str) -> None:
        for id, picture in list(slot.pictures.items()):
            if picture.owner == owner:
                del slot.pictures[id]
                if slot.replica is not None:
                    with suppress(ReplicaLost):
                        slot.replica.abort(id)

    def _again(self, left: list[Picture], lost: bool) -> None:
        """Put pictures back, in front of what waits and in their order."""
        for picture in reversed(left):
            picture.losses += lost
            if self._stopping:
                _fail(picture, "the engine is stopping")
            elif picture.losses > self.config.max_losses:
                _fail(picture, f"{picture.losses} replicas were lost while they drew it")
            else:
                self._queue(picture).appendleft(picture)
        self._dispatch()

    def _ask(self, question: Callable[[Replica], T], first: str | None = None) -> T:
        """The answer of the first replica that has one. Raises ReplicaLost if none has."""
        with self._lock:
            slots = sorted((s for s in self._slots if s.open), key=lambda s: s.name != first)
            asked = [slot.replica for slot in slots if slot.replica is not None]
        for replica in asked:
            with suppress(ReplicaLost):
                return question(replica)
        raise ReplicaLost("no replica answers")


def _fail(picture: Picture, reason: str) -> None:
    picture.tell(Failed(picture.index, reason))
