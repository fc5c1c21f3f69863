"""Which bytes of a sequence's cache a layer needs at a position, and where they lie when staged.

A staged layer is [entries of every head | index of every head], as in the cache, but on its own.
What the disk tier reads for a step is what the policy keeps: the prompt and the resident keys older
than the query's own. Rings make that at most four runs a head.
"""

from dataclasses import dataclass
from math import lcm

import torch

from engine.offload.disk import Run
from sparse_attn.cache import LayerTable
from sparse_attn.format import VECTOR
from sparse_attn.layout import CacheLayout


@dataclass(frozen=True, slots=True)
class StagedLayer:
    """One layer of one layout. first, index_first: its first byte of entries and of index in the
    cache of a sequence. index_at: first byte of the index when staged. bytes: a staged sequence,
    a whole number of entries."""

    layout: CacheLayout
    layer: int
    first: int
    index_first: int
    index_at: int
    bytes: int

    @classmethod
    def of(cls, layout: CacheLayout, layer: int) -> "StagedLayer":
        entry, heads = layout.format.entry_bytes(layout.head_dim), range(len(layout.rings[layer]))
        entries = sum(layout.head_entries(layer, h) for h in heads) * entry
        index_at = -(-entries // VECTOR) * VECTOR
        raw = index_at + sum(layout.head_index_bytes(layer, h) for h in heads)
        unit = lcm(entry, VECTOR)
        return cls(
            layout, layer, layout.offsets[layer][0] * entry, layout.index_offsets[layer][0],
            index_at, -(-raw // unit) * unit,
        )  # fmt: skip

    @property
    def entry_bytes(self) -> int:
        return self.layout.format.entry_bytes(self.layout.head_dim)

    def table(self) -> LayerTable:
        """Addresses of a staged sequence, on the host."""
        offsets, index = self.layout.offsets[self.layer], self.layout.index_offsets[self.layer]
        return LayerTable(
            torch.tensor([o - offsets[0] for o in offsets]),
            torch.tensor(self.layout.rings[self.layer], dtype=torch.int32),
            self.layout.prompt, self.layout.anchors, self.layout.head_dim, self.layout.format,
            torch.tensor([i - index[0] + self.index_at for i in index]),
        )  # fmt: skip

    def reads(self, prompt: int, t: int, scored: bool) -> list[Run]:
        """Runs (byte of the sequence, byte when staged, bytes) that the query at position t may
        read, its own key left out. scored: keys lie anywhere in a ring."""
        rings, size = self.layout.rings[self.layer], self.entry_bytes
        visual = {ring: self._visual(ring, t, scored) for ring in set(rings)}
        entries = {ring: self._entries(kept, prompt) for ring, kept in visual.items()}
        runs = []
        for ring, first in zip(rings, self.layout.offsets[self.layer], strict=True):
            at = first * size
            runs += [(at + p, at + p - self.first, n) for p, n in entries[ring]]
        if self.layout.index_bytes:
            for head, ring in enumerate(rings):
                runs += self._index(head, visual[ring])
        return runs

    def _entries(self, visual: list[tuple[int, int]], prompt: int) -> list[tuple[int, int]]:
        """(first byte within a head's region, bytes) of its prompt and of visual keys."""
        start, size = self.layout.prompt, self.entry_bytes
        runs = _joined([(0, prompt), *((start + place, count) for place, count in visual)])
        return [(place * size, count * size) for place, count in runs]

    def _visual(self, ring: int, t: int, scored: bool) -> list[tuple[int, int]]:
        """(place, keys) of the visual keys of a head, counted from the first anchor."""
        anchors = self.layout.anchors
        if scored:
            return [(0, anchors + ring)]
        runs = [(0, min(t, anchors))]
        oldest, count = max(anchors, t - ring + 1), max(0, min(t - anchors, ring - 1))
        if count:
            place = (oldest - anchors) % ring
            before_wrap = min(count, ring - place)
            runs += [(anchors, count - before_wrap), (anchors + place, before_wrap)]
        return [run for run in runs if run[1]]

    def _index(self, head: int, visual: list[tuple[int, int]]) -> list[Run]:
        size, first = self.layout.index_bytes, self.layout.index_offsets[self.layer][head]
        staged = first - self.index_first + self.index_at
        return [(first + at * size, staged + at * size, count * size) for at, count in visual]


def _joined(runs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Runs that follow one another as one."""
    joined: list[tuple[int, int]] = []
    for start, count in runs:
        if joined and sum(joined[-1]) == start:
            joined[-1] = joined[-1][0], joined[-1][1] + count
        elif count:
            joined.append((start, count))
    return joined


def read_bytes(layout: CacheLayout, prompt: int, t: int, scored: bool = False) -> int:
    """Bytes that a sequence on disk streams for the decode step at position t: predicted."""
    return sum(
        size
        for layer in range(len(layout.rings))
        for _, _, size in StagedLayer.of(layout, layer).reads(prompt, t, scored)
    )


def written_bytes(layout: CacheLayout) -> int:
    """Bytes that a sequence on disk writes for a decode step: an entry, and its index, per head."""
    heads = sum(len(rings) for rings in layout.rings)
    return heads * (layout.format.entry_bytes(layout.head_dim) + layout.index_bytes)
