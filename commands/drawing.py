"""Drawing for `bishop generate`: the engine's events become files, a progress bar and a summary."""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from commands.bar import TokenBar
from commands.outputs import Outputs
from commands.refusal import FAILED, Refusal, as_refusal
from commands.summary import Drawn, Summary
from engine.events import Event, Failed, Finished, Progress
from engine.pixels import encode, grid
from engine.service_api import ImageService
from engine.wanted import Wanted, to_request
from scheduler.request import ImageRequest, PolicyChoice, RequestError


@dataclass(frozen=True, slots=True)
class Look:
    """How pictures are stored and how the outcome is told."""

    quality: int
    metadata: bool
    json: bool


def draw(
    wanted: Sequence[Wanted], outputs: Outputs, look: Look, open_engine: Callable[[], ImageService]
) -> int:
    """Draw everything wanted into `outputs`; returns the exit code. Raises Refusal."""
    if look.metadata and outputs.format != "png":
        raise Refusal("--metadata: only PNG files take it")
    service = open_engine()
    requests = to_requests(wanted, service)
    service.start()
    try:
        return _Drawing(service, requests, outputs, look).run()
    finally:
        service.stop()


def to_requests(wanted: Sequence[Wanted], service: ImageService) -> list[ImageRequest]:
    """Raises Refusal for the first that the model cannot draw."""
    try:
        requests = [to_request(each, service.model, PolicyChoice()) for each in wanted]
        for request in requests:
            service.check(request)
    except RequestError as error:
        raise as_refusal(error) from None
    return requests


@dataclass
class _Drawing:
    """Pictures are numbered over all prompts: picture `index` of prompt p is p * n + index."""

    service: ImageService
    requests: list[ImageRequest]
    outputs: Outputs
    look: Look
    drawn: dict[int, Drawn] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)
    pictures: dict[int, UInt8[np.ndarray, "height width 3"]] = field(default_factory=dict)

    def run(self) -> int:
        start = time.monotonic()
        with TokenBar(self.outputs.count, hidden=self.look.json) as bar:
            for prompt, event in self.service.run(self.requests):
                self._take(prompt, event, bar)
        seconds = time.monotonic() - start
        return self._tell(seconds, self._write_sheet())

    def _take(self, prompt: int, event: Event, bar: TokenBar) -> None:
        number = prompt * self.requests[0].n + event.index
        match event:
            case Progress():
                bar.advance(number, event.done, event.total)
            case Finished():
                bar.advance(number, event.stats.tokens, event.stats.tokens)
                self._write(number, self.requests[prompt], event)
            case Failed():
                self.failures[number] = event.reason

    def _write(self, number: int, request: ImageRequest, event: Finished) -> None:
        path = self.outputs.files[number]
        metadata = {"seed": str(event.seed), "model": self.service.model.name}
        self._save(path, event.pixels, metadata if self.look.metadata else None)
        self.drawn[number] = Drawn(path, request.prompt, event.seed, event.stats)
        if self.outputs.sheet:
            self.pictures[number] = event.pixels

    def _write_sheet(self) -> Path | None:
        if not self.pictures:
            return None
        self._save(self.outputs.path, grid([self.pictures[k] for k in sorted(self.pictures)]))
        return self.outputs.path

    def _save(
        self,
        path: Path,
        pixels: UInt8[np.ndarray, "height width 3"],
        metadata: dict[str, str] | None = None,
    ) -> None:
        data = encode(pixels, self.outputs.format, self.look.quality, metadata=metadata)
        try:
            path.write_bytes(data)
        except OSError as error:
            raise Refusal(f"-o: cannot write {path}: {error.strerror or error}") from None

    def _tell(self, seconds: float, sheet: Path | None) -> int:
        pictures = [self.drawn[number] for number in sorted(self.drawn)]
        summary = Summary(self.service.model, self.requests[0].policy, pictures, seconds, sheet)
        print(summary.json(self.failures) if self.look.json else summary.text())
        for number, reason in sorted(self.failures.items()):
            print(f"bishop: picture {number} was not drawn: {reason}", file=sys.stderr)
        return FAILED if self.failures else 0
