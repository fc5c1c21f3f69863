"""Pictures that a model draws itself, kept in chunks on disk so that a kill costs one chunk.

What calibration and evaluation of any model need: no picture of anyone else takes part.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.engine import Engine
from engine.events import Event, Failed, Finished, Progress
from engine.teacher import Pictures
from scheduler.request import ImageRequest, PolicyChoice, Sampling

CHUNK = 8
"""Pictures drawn together, and lost at most when a run is killed."""


@dataclass(frozen=True, slots=True)
class Order:
    """Pictures to draw. Picture i is of prompt i % len(prompts), from seed + i // len(prompts)."""

    prompts: tuple[str, ...]
    count: int
    seed: int = 0
    policy: PolicyChoice = PolicyChoice()

    def prompt(self, number: int) -> str:
        return self.prompts[number % len(self.prompts)]

    def seed_of(self, number: int) -> int:
        """Seeds of different prompts differ too: a seed is the noise of a picture."""
        return self.seed + number


Told = Callable[[int, int, int], None]
"""(picture, tokens drawn, tokens in all)."""


def draw_pictures(
    engine: Engine, order: Order, folder: Path, told: Told = lambda *_: None
) -> Pictures:
    """Draw what `folder` does not hold yet, and return all of it.

    Raises RuntimeError if the model fails on a picture, ValueError for a prompt it cannot take.
    """
    folder.mkdir(parents=True, exist_ok=True)
    grid = engine.model.grid
    prompts = {text: engine.model.encode_prompt(text, grid) for text in order.prompts}
    tokens = [
        _chunk(engine, order, range(first, min(first + CHUNK, order.count)), folder, told)
        for first in range(0, order.count, CHUNK)
    ]
    return Pictures.of([prompts[order.prompt(i)] for i in range(order.count)], torch.cat(tokens))


def _chunk(engine: Engine, order: Order, numbers: range, folder: Path, told: Told) -> Tensor:
    path = folder / f"{numbers.start:05d}.safetensors"
    total = engine.model.grid.tokens
    if path.is_file():
        found = load_file(path)["tokens"]
        if len(found) >= len(numbers):
            for number in numbers:
                told(number, total, total)
            return found[: len(numbers)].long()
    tokens = torch.tensor(_drawn(engine, order, numbers, told))
    part = path.with_suffix(".part")
    save_file({"tokens": tokens.int()}, part)
    part.replace(path)
    return tokens


def _drawn(engine: Engine, order: Order, numbers: range, told: Told) -> list[tuple[int, ...]]:
    tokens: dict[int, tuple[int, ...]] = {}

    def listener(number: int) -> Callable[[Event], None]:
        def listen(event: Event) -> None:
            if isinstance(event, Failed):
                raise RuntimeError(f"picture {number} was not drawn: {event.reason}")
            if isinstance(event, Progress):
                told(number, event.done, event.total)
            if isinstance(event, Finished):
                tokens[number] = event.tokens
                told(number, event.stats.tokens, event.stats.tokens)

        return listen

    sampling: Sampling = engine.model.sampling
    for number in numbers:
        request = ImageRequest(
            order.prompt(number), seed=order.seed_of(number), sampling=sampling,
            policy=order.policy,
        )  # fmt: skip
        engine.add(request, listener(number))
    while engine.step():
        pass
    return [tokens[number] for number in numbers]
