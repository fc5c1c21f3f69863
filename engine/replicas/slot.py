"""A place for a replica: which one stands in it, what it draws, and how often it was replaced."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from enum import StrEnum

from engine.replicas.choice import Load
from engine.replicas.picture import Picture
from engine.replicas.replica import Replica, Report
from engine.service_api import EngineStats, ReplicaState, ReplicaStatus

NOTHING = EngineStats(*(0 for _ in fields(EngineStats)))
GAUGES = ("images_running", "images_waiting", "cache_bytes_used", "cache_bytes_total")


class Wish(StrEnum):
    """What is to become of a replica when its pictures have ended."""

    STAY = "stay"
    RESTART = "restart"
    LEAVE = "leave"


@dataclass(eq=False, slots=True)
class Slot:
    """The router's lock guards everything here.

    past: counters of the replicas that stood here before. image_bytes: cache of one picture, as
    last seen. unseen: pictures that were sent after the last report was asked for.
    """

    name: str
    state: ReplicaState = ReplicaState.STARTING
    wish: Wish = Wish.STAY
    wish_until: float = 0.0
    replica: Replica | None = None
    where: str = ""
    pid: int | None = None
    room: int = 1
    pictures: dict[str, Picture] = field(default_factory=dict)
    stats: EngineStats = NOTHING
    past: EngineStats = NOTHING
    image_bytes: int = 0
    unseen: int = 0
    generation: int = 0
    reason: str | None = None
    since: float = field(default_factory=time.monotonic)

    def become(self, state: ReplicaState) -> None:
        self.state, self.since = state, time.monotonic()

    @property
    def open(self) -> bool:
        """Whether it may be given pictures."""
        ready = self.state is ReplicaState.READY and self.replica is not None
        return ready and self.wish is Wish.STAY

    @property
    def load(self) -> Load:
        interactive = sum(picture.interactive for picture in self.pictures.values())
        free = self.stats.cache_bytes_total - self.stats.cache_bytes_used
        return Load(
            interactive,
            len(self.pictures) - interactive,
            self.room,
            self.stats.images_waiting,
            free - self.unseen * self.image_bytes,
            any(picture.suspect for picture in self.pictures.values()),
        )

    def heard(self, report: Report, asked: int) -> None:
        """Take a report's numbers; `asked`: `unseen` when the report was asked for."""
        self.stats = report.stats
        self.unseen -= asked
        if report.stats.images_running:
            self.image_bytes = report.stats.cache_bytes_used // report.stats.images_running

    def stand(self, replica: Replica) -> None:
        """A new replica stands here."""
        facts = replica.facts
        self.replica, self.room = replica, facts.room
        self.where, self.pid = facts.where, facts.pid
        self.generation += 1
        self.become(ReplicaState.READY)

    def clear(self, state: ReplicaState) -> list[Picture]:
        """The replica is gone: what it counted stays, its pictures are handed back."""
        left = list(self.pictures.values())
        self.pictures.clear()
        self.past, self.stats, self.unseen = counters(self.past, self.stats), NOTHING, 0
        self.replica = self.pid = None
        self.become(state)
        return left

    def status(self) -> ReplicaStatus:
        return ReplicaStatus(
            self.name,
            self.state,
            self.where,
            self.pid,
            len(self.pictures),
            max(self.load.free_bytes, 0),
            self.stats.cache_bytes_total,
            max(self.generation - 1, 0),
            self.reason,
            time.monotonic() - self.since,
        )


def total(stats: Iterator[EngineStats]) -> EngineStats:
    """Field by field."""
    sums = dict.fromkeys(_names(), 0)
    for each in stats:
        for name in sums:
            sums[name] += getattr(each, name)
    return EngineStats(**sums)


def counters(*stats: EngineStats) -> EngineStats:
    """The sum of what only ever grows."""
    summed = total(iter(stats))
    return EngineStats(
        **{name: 0 if name in GAUGES else getattr(summed, name) for name in _names()}
    )


def _names() -> list[str]:
    return [each.name for each in fields(EngineStats)]
