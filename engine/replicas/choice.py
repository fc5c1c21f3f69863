"""Which replica draws a picture."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, TypeVar


@dataclass(frozen=True, slots=True)
class Load:
    """What the router knows of a replica.

    interactive, batch: pictures it was given and has not ended. room: pictures it takes.
    waiting: pictures that did not fit its cache at its last report.
    free_bytes: of its cache, less what was sent since.
    suspected: it draws a picture that may be what kills replicas.
    """

    interactive: int
    batch: int
    room: int
    waiting: int
    free_bytes: int
    suspected: bool = False

    @property
    def pictures(self) -> int:
        return self.interactive + self.batch

    def takes(self, interactive: bool, suspect: bool = False) -> bool:
        """An interactive picture may come on top of batch pictures, which the engine parks. A
        suspect has a replica for itself, so that it takes no other picture down."""
        if suspect or self.suspected:
            return suspect and not self.pictures
        if interactive:
            return self.interactive < self.room
        return self.pictures < self.room and not self.waiting


class Loaded(Protocol):
    @property
    def load(self) -> Load: ...


T = TypeVar("T", bound=Loaded)


def choose(replicas: Iterable[T], interactive: bool, suspect: bool = False) -> T | None:
    """The replica for the next picture, or None while it has to wait.

    Interactive pictures go where the fewest of their kind slow each other down, then where most
    cache is free; batch pictures where most cache is free. The first of equals is taken."""
    open_ones = [each for each in replicas if each.load.takes(interactive, suspect)]
    if not open_ones:
        return None
    return min(open_ones, key=lambda each: _rank(each.load, interactive))


def _rank(load: Load, interactive: bool) -> tuple[float, ...]:
    if interactive:
        return (load.interactive / load.room, -load.free_bytes, load.pictures)
    return (-load.free_bytes, load.pictures)
