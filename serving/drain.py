"""Leaving without losing anything: new requests are refused, those inside may end."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

STEP = 0.02


class Drain:
    """Counts what runs. `started` is set once and stays set."""

    def __init__(self) -> None:
        self.started = False
        self.running = 0

    @contextmanager
    def request(self) -> Iterator[None]:
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1

    async def wait(self, seconds: float, busy: Callable[[], bool]) -> None:
        """Refuse what is new and wait until nothing runs and nothing is `busy`, or time is up."""
        self.started = True
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        # Polled: what is busy outside of here sets no event.
        while (self.running or busy()) and loop.time() < end:  # noqa: ASYNC110
            await asyncio.sleep(STEP)
