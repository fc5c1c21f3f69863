"""How much is let in: pictures in the queue, requests per key. Who is refused learns when to
come back."""

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from serving.errors import ApiError
from serving.keys import ApiKey

WINDOW = 60.0
"""Seconds over which the rate of finished pictures is measured."""

LONGEST_WAIT = 60


class Queue:
    """Interactive pictures that wait or run; more than `limit` at once are refused."""

    def __init__(
        self,
        limit: int,
        refused: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit = limit
        self._refused = refused
        self._clock = clock
        self._ended: deque[tuple[float, int]] = deque(maxlen=1000)
        self.pictures = 0

    @contextmanager
    def place(self, pictures: int) -> Iterator[None]:
        """Hold places while pictures are drawn. Raises ApiError (429); an empty queue takes a
        request of any size."""
        if self.pictures and self.pictures + pictures > self._limit:
            self._refused()
            raise too_many(
                f"{self.pictures} pictures are waiting or being drawn, and {self._limit} may",
                self._wait(self.pictures + pictures - self._limit),
                "queue_full",
            )
        self.pictures += pictures
        try:
            yield
        finally:
            self.pictures -= pictures
            self._ended.append((self._clock(), pictures))

    def _wait(self, pictures: int) -> float:
        """Seconds until as many have ended, at the rate of the last minute."""
        now = self._clock()
        recent = [(at, ended) for at, ended in self._ended if now - at < WINDOW]
        if not recent:
            return 5.0
        rate = sum(ended for _, ended in recent) / max(1.0, now - recent[0][0])
        return pictures / rate


class KeyLimits:
    """Requests of each key: how many a minute (a bucket that refills evenly), how many at once."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: dict[str, tuple[float, float]] = {}
        self._running: Counter[str] = Counter()

    @contextmanager
    def place(self, key: ApiKey) -> Iterator[None]:
        """Raises ApiError (429)."""
        if key.concurrent is not None and self._running[key.name] >= key.concurrent:
            message = f"this key may have {key.concurrent} requests at the same time"
            raise too_many(message, 1.0, "concurrency_limit_exceeded")
        self._spend(key)
        self._running[key.name] += 1
        try:
            yield
        finally:
            self._running[key.name] -= 1

    def _spend(self, key: ApiKey) -> None:
        if key.requests_per_minute is None:
            return
        size, rate = float(key.requests_per_minute), key.requests_per_minute / 60
        now = self._clock()
        left, since = self._buckets.get(key.name, (size, now))
        left = min(size, left + (now - since) * rate)
        if left < 1:
            message = f"this key may send {key.requests_per_minute} requests a minute"
            raise too_many(message, (1 - left) / rate, "rate_limit_exceeded")
        self._buckets[key.name] = (left - 1, now)


def too_many(message: str, seconds: float, code: str) -> ApiError:
    wait = max(1, min(LONGEST_WAIT, math.ceil(seconds)))
    text = f"{message}: ask again in {wait} s"
    return ApiError(429, text, code=code, headers={"retry-after": str(wait)})
