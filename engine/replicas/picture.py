"""One image of a request on its way: what its client has heard, so that it hears nothing twice."""

import time
from dataclasses import dataclass, field, replace

from engine.events import Event, Failed, Finished, Partial, Progress
from engine.following import Listener
from scheduler.request import ImageRequest, Priority

SUSPECT = 3
"""Replicas lost with a picture after which it is drawn alone."""


@dataclass(eq=False, slots=True)
class Picture:
    """Image `index` of the request `owner`, as a request for one image.

    done, partials: progress and unfinished pictures that were told. losses: replicas that were
    lost while they drew it. submitted: by the monotonic clock, in seconds.
    """

    request: ImageRequest
    owner: str
    index: int
    listen: Listener
    done: int = 0
    partials: int = 0
    losses: int = 0
    submitted: float = field(default_factory=time.monotonic)

    @property
    def suspect(self) -> bool:
        """Whether it may be what its replicas died of."""
        return self.losses >= SUSPECT

    @property
    def interactive(self) -> bool:
        return self.request.priority is Priority.INTERACTIVE

    def tell(self, item: Event | Exception) -> bool:
        """Pass on what is new; whether it was the last thing there is to say.

        A picture that is drawn again, from the start, is the same picture: what its client has
        heard of the first try holds for the second."""
        if isinstance(item, Exception):
            self.listen(item)
            return True
        if self._is_new(item):
            self.listen(replace(self._timed(item), index=self.index))
        return isinstance(item, Finished | Failed)

    def _timed(self, event: Event) -> Event:
        """Waiting in the router and tries that were lost are time in the queue."""
        if not isinstance(event, Finished):
            return event
        waited = time.monotonic() - self.submitted - event.stats.seconds
        return replace(event, stats=replace(event.stats, queue_seconds=max(0.0, waited)))

    def _is_new(self, event: Event) -> bool:
        match event:
            case Progress(done=done):
                new, self.done = done > self.done, max(done, self.done)
                return new
            case Partial(number=number):
                new, self.partials = number >= self.partials, max(number + 1, self.partials)
                return new
        return True


def pictures(request: ImageRequest, listen: Listener) -> list[Picture]:
    """The images of a request, each as a request of its own: image k with seed s is the image of
    a request for one with seed s + k. The last one finished of a request lends its learnt reads
    to the request's id, so the first image keeps that id."""
    return [
        Picture(
            replace(request, n=1, seed=request.seed + k, id=image_id(request.id, k)),
            request.id,
            k,
            listen,
        )
        for k in range(request.n)
    ]


def image_id(request: str, index: int) -> str:
    return request if index == 0 else f"{request}.{index}"
