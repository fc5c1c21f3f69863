"""A thread that keeps a replica in a slot: starts it, listens to it, replaces it."""

import threading
from typing import TYPE_CHECKING

from engine.replicas.replica import Replica, ReplicaLost, ReplicaRefused, Spawn
from engine.replicas.slot import Slot

if TYPE_CHECKING:
    from engine.replicas.router import Router

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0


class Keeper:
    """Everything slow happens here, outside the router's lock."""

    def __init__(self, slot: Slot, spawn: Spawn, router: "Router", beat: float) -> None:
        self._slot, self._spawn, self._router, self._beat = slot, spawn, router, beat
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._keep, name=f"keep-{slot.name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        """Close the replica and end the thread."""
        self._ending.set()
        self._thread.join()

    def _keep(self) -> None:
        pause = FIRST_PAUSE
        while not self._ending.is_set():
            try:
                replica = self._spawn(self._slot.name)
            except ReplicaLost as error:
                self._router.lost(self._slot, f"it did not start: {error}")
                self._ending.wait(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
                continue
            except ReplicaRefused as error:
                self._router.refused(self._slot, str(error))
                return
            pause = FIRST_PAUSE
            if not self._stand_by(replica):
                return

    def _stand_by(self, replica: Replica) -> bool:
        """Follow a replica until it is lost or let go; whether another is to follow it."""
        try:
            if not self._ending.is_set():
                self._router.arrived(self._slot, replica)
                self._follow(replica)
        except ReplicaLost as error:
            self._router.lost(self._slot, str(error))
            return True
        finally:
            replica.close()
        return self._router.left(self._slot)

    def _follow(self, replica: Replica) -> None:
        """Raises ReplicaLost."""
        goes_on = True
        while goes_on and not self._ending.is_set():
            asked = self._router.asked(self._slot)
            report = replica.collect(self._beat)
            goes_on = self._router.heard(self._slot, report, asked)
