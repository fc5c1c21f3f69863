"""A thread that keeps a replica in a slot: starts it, listens to it, replaces it."""

import logging
import threading
from typing import TYPE_CHECKING

from engine.replicas.replica import Replica, ReplicaLost, ReplicaRefused, Spawn
from engine.replicas.slot import Slot, Wish

if TYPE_CHECKING:
    from engine.replicas.router import Router

log = logging.getLogger("bishop.replicas")

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0

PATIENCE = 5.0
"""Seconds that a replica may take to end; its process dies with the router's in any case."""


class Keeper:
    """Everything slow happens here, outside the router's lock."""

    def __init__(self, slot: Slot, spawn: Spawn, router: "Router", beat: float) -> None:
        self.slot = slot
        self._spawn, self._router, self._beat = spawn, router, beat
        self._ending = threading.Event()
        self._pause = FIRST_PAUSE
        self._thread = threading.Thread(target=self._keep, name=f"keep-{slot.name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        """Begin to close the replica and to end the thread."""
        self._ending.set()

    def join(self) -> None:
        self._thread.join(PATIENCE)

    def _wanted(self) -> bool:
        return not self._ending.is_set() and self.slot.wish is not Wish.LEAVE

    def _keep(self) -> None:
        goes_on = True
        while goes_on and not self._ending.is_set():
            self._router.starting(self.slot)
            try:
                replica = self._spawn(self.slot.name, self._wanted)
            except ReplicaLost as error:
                self._again(f"it did not start: {error}", refused=False)
            except ReplicaRefused as error:
                self._again(str(error), refused=True)
            else:
                goes_on = self._stand_by(replica)

    def _again(self, reason: str, refused: bool) -> None:
        """Report a failed start and wait, each time longer."""
        self._router.lost(self.slot, reason, refused)
        self._ending.wait(self._pause)
        self._pause = min(2 * self._pause, LONGEST_PAUSE)

    def _stand_by(self, replica: Replica | None) -> bool:
        """Follow a replica until it is lost or let go; whether another is to follow it."""
        if replica is None:
            return self._router.left(self.slot)
        self._pause = FIRST_PAUSE
        try:
            if not self._ending.is_set():
                self._router.arrived(self.slot, replica)
                self._follow(replica)
        except ReplicaLost as error:
            self._router.lost(self.slot, str(error))
            return True
        except Exception as error:  # a slot without its keeper would be empty for ever
            log.exception("unforeseen failure of %s", self.slot.name)
            self._router.lost(self.slot, repr(error))
            return True
        finally:
            replica.close()
        return self._router.left(self.slot)

    def _follow(self, replica: Replica) -> None:
        """Raises ReplicaLost."""
        goes_on = True
        while goes_on and not self._ending.is_set():
            asked = self._router.asked(self.slot)
            report = replica.collect(self._beat)
            goes_on = self._router.heard(self.slot, report, asked)
