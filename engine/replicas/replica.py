"""What the router asks of a replica: one engine, somewhere, that may be gone the next moment."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from engine.events import Event
from engine.policy_info import PolicyCatalog, ReadSet
from engine.service_api import EngineStats, Health, ModelInfo, ReadQuery
from scheduler.request import ImageRequest


class ReplicaLost(Exception):  # noqa: N818
    """The replica is dead, cut off or stuck; the message says which."""


class ReplicaRefused(Exception):  # noqa: N818
    """There is no replica to be had as configured; the message says what to change."""


@dataclass(frozen=True, slots=True)
class Report:
    """What happened in a replica since it was asked before.

    events: (request id, event) in order; an exception is the last thing of its request. Of what
        was drawn while the engine died, nothing is told twice.
    """

    events: tuple[tuple[str, Event | Exception], ...]
    health: Health
    stats: EngineStats


@dataclass(frozen=True, slots=True)
class Facts:
    """What a replica is. where: its machine. pid: its process there. room: images it takes."""

    model: ModelInfo
    policies: PolicyCatalog
    where: str
    pid: int
    room: int


class Replica(Protocol):
    """Every method may be called from any thread and may raise ReplicaLost."""

    @property
    def facts(self) -> Facts: ...

    def submit(self, request: ImageRequest) -> None:
        """Queue a request without waiting; whether it is refused is in a report."""

    def abort(self, id: str) -> None:
        """Drop what is left of a request, without waiting."""

    def collect(self, seconds: float) -> Report:
        """The next report, at once when there are events, after `seconds` otherwise."""

    def check(self, request: ImageRequest) -> None:
        """Raise RequestError if the model cannot draw the request."""

    def read_set(self, query: ReadQuery) -> ReadSet:
        """See `ImageService.read_set`."""

    def close(self) -> None:
        """End the replica whatever it does; never raises."""


class Spawn(Protocol):
    """Makes replicas."""

    def __call__(self, name: str, wanted: Callable[[], bool]) -> Replica | None:
        """A replica that has loaded its model, which may take minutes; None as soon as it is no
        longer wanted.

        Raises ReplicaLost if it died meanwhile, ReplicaRefused if it cannot be configured so."""
