"""The face of the engine towards the front ends."""

from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

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
    """`alive`: the worker thread runs. `stuck_seconds`: how long the current step has taken."""

    alive: bool
    stuck_seconds: float
    error: str | None = None


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
        """Raise RequestError if the model cannot draw the request; nothing is queued."""

    def stream(self, request: ImageRequest) -> EventStream:
        """Submit and follow a request from asyncio; closing the stream aborts it.

        Raises RequestError before anything is queued if the model cannot serve it."""

    def run(self, requests: Sequence[ImageRequest]) -> Iterator[tuple[int, Event]]:
        """Submit many requests from a plain thread and yield (request index, event)."""

    def policies(self) -> PolicyCatalog:
        """The policies, their options, and whether this engine can run them."""

    def read_set(self, query: ReadQuery) -> ReadSet:
        """What a head reads and keeps at a position. Raises RequestError for what is not there.
        A picture whose learnt reads are no longer kept is answered like a fresh one."""

    def health(self) -> Health: ...

    def stats(self) -> EngineStats: ...
