"""An endless stream of scenes, drawn by processes of their own."""

import multiprocessing as mp
import random
from collections.abc import Iterator
from multiprocessing.queues import Queue
from pathlib import Path
from types import TracebackType
from typing import Self

from training.scenes import SceneBatch, SceneSampler, to_arrays
from training.sprites import SpritePack

BATCH = 1024


class SceneStream:
    """Iterates over `SceneBatch`es of `BATCH` training scenes with blurred captions."""

    def __init__(self, pack: Path, seed: int, workers: int = 3, depth: int = 24) -> None:
        context = mp.get_context("spawn")
        self.queue: Queue[SceneBatch] = context.Queue(depth)
        arguments = [(pack, seed * 1000 + i, self.queue) for i in range(workers)]
        self.workers = [context.Process(target=_work, args=a, daemon=True) for a in arguments]

    def __enter__(self) -> Self:
        for worker in self.workers:
            worker.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        for worker in self.workers:
            worker.terminate()
        for worker in self.workers:
            worker.join()

    def __iter__(self) -> Iterator[SceneBatch]:
        while True:
            yield self.queue.get(timeout=120)


def _work(pack: Path, seed: int, queue: "Queue[SceneBatch]") -> None:
    rng = random.Random(seed)
    sampler = SceneSampler(SpritePack.load(pack, images=False), rng)
    while True:
        queue.put(to_arrays([sampler.sample() for _ in range(BATCH)], sampler.tokenizer, rng))
