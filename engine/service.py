"""`EngineService`: one worker thread owns the device; front ends talk to it through queues."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from engine.config import EngineConfig
from engine.engine import Engine
from engine.events import Event
from engine.following import Following, Listener, follow, follow_all
from engine.models.base import VisualModel
from engine.policy_info import PolicyCatalog, ReadSet
from engine.reads import catalog, read_set
from engine.service_api import EngineStats, Health, ModelInfo, ReadQuery
from scheduler.request import ImageRequest, RequestError
from sparse_attn.policies import POLICIES

log = logging.getLogger("bishop.engine")


class EngineService:
    """See `engine.service_api.ImageService`. Loading happens here, stepping in the thread."""

    def __init__(self, config: EngineConfig, model: VisualModel | None = None) -> None:
        self._engine = Engine(config, model)
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._error: str | None = None
        self._step_started: float | None = None

    @property
    def model(self) -> ModelInfo:
        model, engine = self._engine.model, self._engine
        return ModelInfo(
            name=model.name,
            sizes=model.sizes,
            visual_tokens=model.grid.tokens,
            prompt_limit=model.prompt_limit,
            sampling=model.sampling,
            policies=tuple(POLICIES),
            backend=engine.backend,
            device=str(engine.config.device),
            dtype=engine.config.kv_format,
        )

    def start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="bishop-engine", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join()
        self._engine.close()

    def check(self, request: ImageRequest) -> None:
        """Raise RequestError if the model cannot draw the request; nothing is queued."""
        self._engine.intake.check(request)

    def submit(self, request: ImageRequest, listen: Listener) -> None:
        """Check in the caller's thread, so that a refusal is raised at once, then queue."""
        self.check(request)

        def add() -> None:
            try:
                self._engine.add(request, listen)
            except RequestError as error:
                listen(error)

        self._command(add, listen)

    def abort(self, id: str) -> None:
        """Drop what is left of a request; unknown ids are ignored."""
        self._command(partial(self._engine.abort, id))

    def stream(self, request: ImageRequest) -> Following:
        """Submit and follow a request; closing the stream aborts what is left of it."""
        return follow(self, request)

    def run(self, requests: Sequence[ImageRequest]) -> Iterator[tuple[int, Event]]:
        """Submit many requests from a plain thread and yield (request index, event)."""
        return follow_all(self, requests)

    def policies(self) -> PolicyCatalog:
        return catalog(self._engine.model, self._engine.backend)

    def read_set(self, query: ReadQuery) -> ReadSet:
        """What a head reads and keeps at a position. Raises RequestError for what is not there."""
        policy = self._engine.intake.policy(query.policy, query.size)
        learned = self._engine.learned.get(query.picture or "")
        fits = learned is not None and (learned.choice, learned.grid) == (query.policy, policy.grid)
        parts = self._engine.model.shape.ranks > 1  # each rank has learnt for its own heads
        state = learned.state if learned is not None and fits and not parts else None
        try:
            return read_set(policy, query.layer, query.head, query.position, state)
        except ValueError as error:
            raise RequestError(str(error), str(error).split()[0]) from error

    def health(self) -> Health:
        error = self._error or self._engine.fault()
        alive = self._thread is not None and self._thread.is_alive() and error is None
        started = self._step_started
        stuck = 0.0 if started is None else time.monotonic() - started
        return Health(alive, stuck, error)

    def stats(self) -> EngineStats:
        counters, planned = self._engine.counters, self._engine.scheduler.stats()
        return EngineStats(
            images_running=planned.running,
            images_waiting=planned.waiting + planned.parked,
            cache_bytes_used=planned.used_bytes,
            cache_bytes_total=planned.total_bytes,
            steps=counters.steps,
            tokens=counters.tokens,
            images_finished=counters.finished,
            images_failed=counters.failed,
            images_aborted=counters.aborted,
            images_parked=planned.totals.parked,
            kv_read_bytes=counters.kv_read_bytes,
            offload_read_bytes=self._engine.offload.read_bytes,
            offload_written_bytes=self._engine.offload.written_bytes,
        )

    def _command(self, run: Callable[[], None], listen: Listener | None = None) -> None:
        with self._wake:
            if self._stopping or self._error:
                if listen is not None:
                    raise RuntimeError(self._error or "the engine is stopping")
                return
            self._commands.append(run)
            self._wake.notify()

    def _work(self) -> None:
        try:
            while self._take_commands():
                self._step_started = time.monotonic()
                busy = self._engine.step()
                self._step_started = None
                if not busy:
                    self._sleep()
            self._engine.fail_all("the engine is stopping")
        except Exception as error:
            log.exception("the engine thread died")
            self._error = f"the engine died: {type(error).__name__}: {error}"
            self._engine.fail_all(self._error)

    def _take_commands(self) -> bool:
        """Run what front ends asked for; False when it is time to stop."""
        while True:
            with self._wake:
                if self._stopping:
                    return False
                if not self._commands:
                    return True
                command = self._commands.popleft()
            command()

    def _sleep(self) -> None:
        with self._wake:
            while not (self._commands or self._stopping):
                self._wake.wait()
