"""The face of the engine towards the front ends."""

from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, runtime_checkable

from engine.events import Event
from engine.policy_info import PolicyCatalog, ReadSet
from scheduler.request import ImageRequest, PolicyChoice, Sampling


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a front end may offer for a loaded model."""

    name: str
    sizes: tuple[tuple[int, int], ...]  # (width, height) in pixels, the default first
    visual_tokens: int
    prompt_limit: str  # in the model's own words, e.g. "30 words"
    sampling: Sampling  # defaults
    policies: tuple[str, ...]
    backend: str  # "native" or "reference"
    device: str
    dtype: str


@dataclass(frozen=True, slots=True)
class Health:
    """`alive`: pictures are drawn. `stuck_seconds`: how long the current step has taken.

    engines: how many of them draw. replacing: some that should draw do not, and come back by
    themselves.
    """

    alive: bool
    stuck_seconds: float
    error: str | None = None
    engines: int = 1
    replacing: bool = False


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since start and gauges of now, for /metrics.

    offload_read_bytes, offload_written_bytes: weights and KV that came from and went to disk.
    """

    images_running: int
    images_waiting: int
    cache_bytes_used: int
    cache_bytes_total: int
    steps: int
    tokens: int
    images_finished: int
    images_failed: int
    images_aborted: int
    images_parked: int
    kv_read_bytes: int
    offload_read_bytes: int = 0
    offload_written_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ReadQuery:
    """Which reads are asked for. `picture`: id of a request whose learnt reads are wanted."""

    policy: PolicyChoice
    layer: int
    head: int
    position: int
    size: tuple[int, int] | None = None
    picture: str | None = None


class EventStream(Protocol):
    """The events of one request. `aclose` aborts what still runs of it; it is idempotent."""

    def __aiter__(self) -> AsyncIterator[Event]: ...

    async def __anext__(self) -> Event: ...

    async def aclose(self) -> None: ...


class ImageService(Protocol):
    """One worker thread owns the device; these methods may be called from any thread."""

    @property
    def model(self) -> ModelInfo: ...

    def start(self) -> None: ...

    def stop(self) -> None:
        """Abort what runs, end the thread, release the device. Idempotent."""

    def check(self, request: ImageRequest) -> None:
        """Raise RequestError if the model cannot draw the request; nothing is queued. May wait
        for another machine."""

    def stream(self, request: ImageRequest) -> EventStream:
        """Submit and follow a request from asyncio; closing the stream aborts it.

        Raises RequestError if the model cannot serve it: before anything is queued, or from the
        stream where another machine has to be asked."""

    def run(self, requests: Sequence[ImageRequest]) -> Iterator[tuple[int, Event]]:
        """Submit many requests from a plain thread and yield (request index, event)."""

    def policies(self) -> PolicyCatalog:
        """The policies, their options, and whether this engine can run them."""

    def read_set(self, query: ReadQuery) -> ReadSet:
        """What a head reads and keeps at a position. Raises RequestError for what is not there.
        A picture whose learnt reads are no longer kept is answered like a fresh one."""

    def health(self) -> Health: ...

    def stats(self) -> EngineStats: ...


class ReplicaState(StrEnum):
    """`REFUSED`: it could not start as configured. Whatever is not ready is started again."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    LOST = "lost"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """One of several engines, as an operator sees it.

    where: its machine, and pid: its process there, once it has started. pictures: that it was
    given. free_bytes, cache_bytes: of its KV cache. restarts: replacements, wished or not. reason:
    why the last one was lost. seconds: since it reached its state.
    """

    name: str
    state: ReplicaState
    where: str
    pid: int | None
    pictures: int
    free_bytes: int
    cache_bytes: int
    restarts: int
    reason: str | None
    seconds: float


class FleetError(ValueError):
    """The replicas cannot be changed as asked; the message says why."""


@runtime_checkable
class Fleet(Protocol):
    """What an `ImageService` over several replicas offers besides. All of it returns at once, and
    `replicas` shows how far it is. Raises FleetError."""

    def replicas(self) -> tuple[ReplicaStatus, ...]: ...

    def scale(self, replicas: int) -> None:
        """Start more, or let the youngest leave when their pictures have ended."""

    def drain(self, name: str) -> None:
        """Let a replica leave when its pictures have ended; there is one less afterwards."""

    def restart(self, name: str | None = None) -> None:
        """Replace a replica when its pictures have ended; all, one after the other, without a
        name."""
