"""The inside of a replica: an engine whose events wait in an outbox until they are collected."""

import os
import socket
import threading

from engine.config import EngineConfig
from engine.events import Event
from engine.policy_info import ReadSet
from engine.replicas.replica import Facts, Report
from engine.service import EngineService
from engine.service_api import ReadQuery
from scheduler.request import ImageRequest, RequestError

Told = tuple[str, Event | Exception]


class Host:
    """A replica in this process (see `engine.replicas.replica.Replica`)."""

    def __init__(self, config: EngineConfig) -> None:
        """Raises what `EngineService` raises when it cannot load."""
        self._service = EngineService(config)
        self._service.start()
        self._outbox: list[Told] = []
        self._filled = threading.Condition()
        self._facts = Facts(
            self._service.model,
            self._service.policies(),
            socket.gethostname(),
            os.getpid(),
            config.max_images,
        )

    @property
    def facts(self) -> Facts:
        return self._facts

    def submit(self, request: ImageRequest) -> None:
        try:
            self._service.submit(request, lambda item: self._put((request.id, item)))
        except RequestError as error:
            self._put((request.id, error))
        except RuntimeError:  # the engine is dead, which the next report says
            self._put(None)

    def abort(self, id: str) -> None:
        self._service.abort(id)

    def collect(self, seconds: float) -> Report:
        """The next report. The events are taken before the health is asked, so that an engine's
        last words never come with a clean bill of health."""
        with self._filled:
            self._filled.wait_for(lambda: self._outbox, seconds)
            events, self._outbox = tuple(self._outbox), []
        return Report(events, self._service.health(), self._service.stats())

    def check(self, request: ImageRequest) -> None:
        self._service.check(request)

    def read_set(self, query: ReadQuery) -> ReadSet:
        return self._service.read_set(query)

    def close(self) -> None:
        self._service.stop()

    def _put(self, told: Told | None) -> None:
        with self._filled:
            if told is not None:
                self._outbox.append(told)
            self._filled.notify()
