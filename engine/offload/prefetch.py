"""Loads that are known in advance, in order, each into one of a few buffers, ahead of their use."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Generic, TypeVar

from torch import Tensor

Unit = TypeVar("Unit")


class Prefetcher(Generic[Unit]):
    """`load(unit, buffer)` runs in a thread, as far ahead as there are free buffers.

    overlap: False loads only what is asked for, when it is asked for.
    """

    def __init__(
        self, load: Callable[[Unit, Tensor], None], buffers: list[Tensor], overlap: bool = True
    ) -> None:
        self._load, self._overlap = load, overlap
        self._all, self._free = buffers, deque(buffers)
        self._pool = ThreadPoolExecutor(1, "bishop-prefetch")
        self._coming: deque[tuple[Unit, Tensor, Future[None]]] = deque()
        self._units: Iterator[Unit] = iter(())

    def begin(self, units: Iterable[Unit]) -> None:
        """Start on the units of a step."""
        self.cancel()
        self._units = iter(units)
        if self._overlap:
            self._fill(len(self._free))

    def take(self) -> tuple[Unit, Tensor]:
        """The next unit, loaded. Raises what loading it raised."""
        if not self._coming:
            self._fill(1)
        unit, buffer, future = self._coming.popleft()
        future.result()
        return unit, buffer

    def give_back(self, buffer: Tensor) -> None:
        """The buffer may be loaded again."""
        self._free.append(buffer)
        if self._overlap:
            self._fill(1)

    def cancel(self) -> None:
        """Forget the step; returns when no load runs any more."""
        self._units = iter(())
        wait([future for _, _, future in self._coming])
        self._coming.clear()
        self._free = deque(self._all)

    def close(self) -> None:
        self.cancel()
        self._pool.shutdown()

    def _fill(self, count: int) -> None:
        for _ in range(count):
            unit = next(self._units, None)
            if unit is None:
                return
            buffer = self._free.popleft()
            self._coming.append((unit, buffer, self._pool.submit(self._load, unit, buffer)))
