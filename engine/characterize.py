"""Attention watched while the engine draws densely; memory does not grow with the pictures.

Only the conditional sequence of an image is looked at. Pictures are drawn in batches that march in
step, so that one row of attention per layer and step is all there is at a time.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from engine.engine import Engine
from engine.events import Event, Failed
from scheduler.request import ImageRequest
from sparse_attn.cache import LayerCache
from sparse_attn.characterize.layer import Labels, LayerCharacter
from sparse_attn.characterize.prefill import PromptCharacter
from sparse_attn.characterize.rows import Rows
from sparse_attn.policy import Batch


class Watcher:
    """Folds the attention of the conditional sequences into sums, layer by layer."""

    def __init__(self, engine: Engine) -> None:
        shape, grid = engine.model.shape, engine.model.grid
        self.group = shape.q_heads // shape.kv_heads
        self.layers = [LayerCharacter(shape.q_heads, grid) for _ in range(shape.layers)]
        self.prefill = [PromptCharacter(shape.q_heads) for _ in range(shape.layers)]
        self.labels = Labels([], [])

    @property
    def pictures(self) -> int:
        return len(self.labels.prompts)

    def prompts(self, layer: int, q: Tensor, k: Tensor, lengths: list[int]) -> None:
        parts = zip(q.split(lengths), k.split(lengths), strict=True)
        for i, (queries, keys) in enumerate(parts):
            if i < self.pictures:
                self.prefill[layer].add(queries, keys.repeat_interleave(self.group, 1))

    def step(self, layer: int, q: Tensor, cache: LayerCache, batch: Batch) -> None:
        """Sequences come with all conditional ones first (`Runner._sequences`)."""
        count = self.pictures
        t, prompt = int(batch.positions[0]), int(batch.prompts[0])
        if (batch.positions[:count] != t).any() or (batch.prompts[:count] != prompt).any():
            raise ValueError(
                "pictures are watched in step, so all of a batch must fit into the cache together; "
                "lower --batch or raise --cache-mib"
            )
        weights = self._weights(q[:count], cache, batch, prompt, t)
        rows = Rows(t, weights[..., :prompt], weights[..., prompt:])
        self.layers[layer].add(rows, self.labels)

    def _weights(self, q: Tensor, cache: LayerCache, batch: Batch, prompt: int, t: int) -> Tensor:
        table = cache.table
        visual = table.prompt + torch.arange(t + 1, device=q.device)
        inside = torch.cat([torch.arange(prompt, device=q.device), visual])
        base = batch.slots[: len(q), None] + table.offsets
        at = (base[..., None] + inside).flatten()
        k, _ = table.format.read(cache.arena, at, q.shape[-1])
        k = k.view(*base.shape, len(inside), -1).to(q.dtype).repeat_interleave(self.group, 1)
        score = torch.einsum("bhd,bhkd->bhk", q, k) * q.shape[-1] ** -0.5
        weights: Tensor = score.softmax(-1)
        return weights


@dataclass(frozen=True, slots=True)
class Study:
    """What is drawn: every prompt from `seeds` seeds, `batch` pictures at a time."""

    prompts: tuple[str, ...]
    seeds: int = 2
    first_seed: int = 0
    batch: int = 4

    @property
    def pictures(self) -> list[tuple[int, int]]:
        """(prompt, seed) numbers."""
        return [(p, s) for p in range(len(self.prompts)) for s in range(self.seeds)]


Told = Callable[[int, int, int], None]


def characterize(engine: Engine, study: Study, told: Told = lambda *_: None) -> Watcher:
    """Draw the pictures of a study and watch. `told(picture, tokens drawn, tokens in all)`.

    Raises ValueError if the pictures of a batch do not march in step, RuntimeError if one fails.
    """
    watcher, first = Watcher(engine), 0
    engine.runner.watch = watcher
    try:
        for pairs in _batches(engine, study):
            _draw(engine, study, watcher, pairs, lambda i, *n, first=first: told(first + i, *n))
            first += len(pairs)
    finally:
        engine.runner.watch = None
    return watcher


Pairs = Sequence[tuple[int, int]]


def _batches(engine: Engine, study: Study) -> Iterator[Pairs]:
    """Pictures whose prompts have one length, `study.batch` at a time."""
    model = engine.model
    lengths = [len(model.encode_prompt(text, model.grid)) for text in study.prompts]
    by_length = sorted(study.pictures, key=lambda pair: lengths[pair[0]])
    for _, group in groupby(by_length, key=lambda pair: lengths[pair[0]]):
        pairs = list(group)
        yield from (pairs[i : i + study.batch] for i in range(0, len(pairs), study.batch))


def _draw(engine: Engine, study: Study, watcher: Watcher, pairs: Pairs, told: Told) -> None:
    watcher.labels = Labels([p % 2 for p, _ in pairs], [s % 2 for _, s in pairs])

    def listen(event: Event) -> None:
        if isinstance(event, Failed):
            raise RuntimeError(f"a picture was not drawn: {event.reason}")

    for prompt, seed in pairs:
        request = ImageRequest(
            study.prompts[prompt], seed=study.first_seed + seed, sampling=engine.model.sampling
        )
        engine.add(request, listen)
    total, step = engine.model.grid.tokens, 0
    while engine.step():
        step += 1
        for i in range(len(pairs)):
            told(i, min(step, total), total)


def facts(watcher: Watcher, engine: Engine, study: Study) -> dict[str, Any]:
    """Everything found, as JSON takes it."""
    grid, layers = engine.model.grid, watcher.layers
    heads = [
        {"layer": i, "head": h, **row}
        for i, layer in enumerate(layers)
        for h, row in enumerate(layer.heads())
    ]
    return {
        "model": engine.model.name,
        "grid": {"height": grid.height, "width": grid.width, "row_tokens": grid.row_tokens},
        "pictures": len(study.pictures),
        "prompts": len(study.prompts),
        "seeds": study.seeds,
        "heads": heads,
        "prefill": [{"layer": i, **p.means()} for i, p in enumerate(watcher.prefill)],
        "similarity": _similarity(layers),
        "similarity_by_layer": [
            {"layer": i, **row} for i, layer in enumerate(layers) for row in layer.similarities()
        ],
        "offsets": _top_offsets(layers),
    }


def _similarity(layers: Sequence[LayerCharacter]) -> list[dict[str, float]]:
    """Means over the layers."""
    each = [layer.similarities() for layer in layers]
    return [
        {key: sum(r[key] for r in rows) / len(rows) for key in rows[0]}
        for rows in zip(*each, strict=True)
    ]


def _top_offsets(layers: Sequence[LayerCharacter], count: int = 12) -> list[dict[str, float]]:
    """The offsets (dr, dc) with the most mass, mean over layers and heads."""
    mass = torch.stack([layer.offsets.means() for layer in layers]).mean((0, 1))
    top = mass.flatten().topk(min(count, mass.numel()))
    columns, middle = mass.shape[1], mass.shape[1] // 2
    return [
        {"dr": int(i) // columns, "dc": int(i) % columns - middle, "mass": float(m)}
        for m, i in zip(top.values, top.indices, strict=True)
    ]
