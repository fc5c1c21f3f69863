"""KV on disk: an arena that goes on behind the memory, read layer by layer ahead of its use.

Bytes of the arena below `memory_bytes` are memory, those above are a file. A sequence whose extent
reaches above is on disk as a whole; the others are untouched by all this. The extents themselves
are the scheduler's, and it fills the lowest first, so the disk is used when memory is full.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float
from torch import Tensor

from engine.cache import host_memory
from engine.image import Group
from engine.offload.disk import ScratchFile
from engine.offload.prefetch import Prefetcher
from engine.offload.regions import StagedLayer
from engine.phases import DecodeAttention, PrefillAttention
from sparse_attn import attention, reference
from sparse_attn.cache import LayerCache, LayerTable
from sparse_attn.policies.scored import ScoredPolicy
from sparse_attn.policy import Batch, ReadPlan

BUFFERS = 2

Staged = tuple[StagedLayer, LayerTable]


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence of a sub-batch. slot: first byte of its cache in the arena. row: of the policy's
    state. position: of the query (0 where its prompt is read)."""

    image: int
    slot: int
    prompt: int
    position: int
    row: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """Sequences of a sub-batch whose staged layer fills a buffer together. indices: in the
    sub-batch."""

    layer: StagedLayer
    rows: tuple[Row, ...]
    indices: tuple[int, ...]
    scored: bool

    def starts(self) -> range:
        """First byte of each staged sequence."""
        return range(0, len(self.rows) * self.layer.bytes, self.layer.bytes)


@dataclass(slots=True)
class Traffic:
    """Bytes that crossed between memory and the disk tier."""

    read: int = 0
    written: int = 0


class KVTier:
    """The disk half of a KV arena of `memory_bytes` + `disk_bytes`.

    staging_bytes: of each of two buffers; a layer of a sequence must fit.
    reserve_bytes: below the border that are reserved too, for a sequence that straddles it.
    """

    def __init__(
        self, folder: Path, memory_bytes: int, disk_bytes: int, staging_bytes: int,
        reserve_bytes: int = 0, overlap: bool = True,
    ) -> None:  # fmt: skip
        self.memory_bytes, self.staging_bytes = memory_bytes, staging_bytes
        start = max(0, memory_bytes - reserve_bytes)
        self.file = ScratchFile(folder, memory_bytes + disk_bytes, start)
        buffers = [host_memory(staging_bytes) for _ in range(BUFFERS)]
        self._prefetcher: Prefetcher[Chunk] = Prefetcher(self._load, buffers, overlap)
        self._writer = ThreadPoolExecutor(1, "bishop-writer")
        self._writes: list[Future[None]] = []
        self._failures: dict[int, str] = {}
        self._staged: WeakKeyDictionary[Group, dict[int, Staged]] = WeakKeyDictionary()
        self.traffic = Traffic()

    def staged(self, group: Group, layer: int) -> Staged:
        """A layer of a group when it is staged; made once."""
        known = self._staged.setdefault(group, {})
        if layer not in known:
            shape = StagedLayer.of(group.layout, layer)
            known[layer] = shape, shape.table()
        return known[layer]

    def holds(self, slot: int, group: Group) -> bool:
        """Whether the sequence at byte `slot` of the arena is on disk."""
        return slot + group.layout.bytes > self.memory_bytes

    # A step

    def begin(self, runs: Sequence[object], layers: int) -> None:
        """Start to load what the attention objects of a step's sub-batches will need, in order."""
        tiered = [run for run in runs if isinstance(run, TieredDecode)]
        self._prefetcher.begin(
            chunk for layer in range(layers) for run in tiered for chunk in run.chunks(layer)
        )

    def finish(self) -> dict[int, str]:
        """Wait until everything of the step is written; the images that lost something, and why."""
        self._prefetcher.cancel()
        for future in self._writes:
            future.result()
        self._writes.clear()
        failures, self._failures = self._failures, {}
        return failures

    def take(self) -> tuple[Chunk, Tensor]:
        return self._prefetcher.take()

    def give_back(self, buffer: Tensor) -> None:
        self._prefetcher.give_back(buffer)

    def store(self, images: Sequence[int], places: Sequence[list[int]], rows: Tensor) -> None:
        """Write rows [sequences, n, bytes] of images at bytes of the arena, in a thread."""

        def write() -> None:
            for image, at, data in zip(images, places, rows, strict=True):
                self._try(image, lambda at=at, data=data: self._write(at, data))  # type: ignore[misc]

        self._writes.append(self._writer.submit(write))

    def close(self) -> None:
        self.finish()
        self._prefetcher.close()
        self._writer.shutdown()
        self.file.close()

    def _write(self, places: list[int], rows: Tensor) -> None:
        self.traffic.written += self.file.write(places, rows)

    def _load(self, chunk: Chunk, buffer: Tensor) -> None:
        for row, start in zip(chunk.rows, chunk.starts(), strict=True):
            runs = chunk.layer.reads(row.prompt, row.position, chunk.scored)
            into = buffer[start : start + chunk.layer.bytes]
            shifted = [(row.slot + at, to, size) for at, to, size in runs]
            self._try(row.image, lambda s=shifted, i=into: self._read(s, i))  # type: ignore[misc]

    def _read(self, runs: list[tuple[int, int, int]], into: Tensor) -> None:
        self.traffic.read += self.file.read(runs, into)

    def _try(self, image: int, run: Callable[[], None]) -> None:
        """An error of the disk is the end of one image, not of the engine."""
        try:
            run()
        except OSError as error:
            self._failures[image] = (
                f"its keys and values could not be kept in the offload folder: {error.strerror} "
                "(is the disk full?)"
            )


class TieredDecode:
    """`DecodeAttention` for sub-batches with sequences on disk: each layer of those is staged."""

    def __init__(self, tier: KVTier, inner: DecodeAttention, rows: Sequence[Row]) -> None:
        self.tier, self.inner, self.rows = tier, inner, rows
        self.scored = isinstance(inner.group.policy, ScoredPolicy)
        on_disk = [tier.holds(row.slot, inner.group) for row in rows]
        self.in_memory = [i for i, away in enumerate(on_disk) if not away]
        self.away = [i for i, away in enumerate(on_disk) if away]

    def __call__(
        self,
        layer: int,
        q: Float[Tensor, "M Hq D"],
        k: Float[Tensor, "M H D"],
        v: Float[Tensor, "M H D"],
    ) -> Float[Tensor, "M Hq D"]:
        out = torch.empty_like(q)
        if self.in_memory:
            at = torch.tensor(self.in_memory)
            here = self._part(at, self.inner.batch.slots[at])
            out[at] = here(layer, q[at], k[at], v[at])
        for _ in self.chunks(layer):
            chunk, buffer = self.tier.take()
            at = torch.tensor(chunk.indices)
            out[at] = self._staged(chunk, buffer, at, q[at], k[at], v[at])
            self.tier.give_back(buffer)
        return out

    def chunks(self, layer: int) -> Iterator[Chunk]:
        """Sequences on disk, as many at a time as a buffer holds."""
        staged, _ = self.tier.staged(self.inner.group, layer)
        size = self.tier.staging_bytes // staged.bytes
        for start in range(0, len(self.away), size):
            indices = tuple(self.away[start : start + size])
            yield Chunk(staged, tuple(self.rows[i] for i in indices), indices, self.scored)

    def _part(self, at: Tensor, slots: Tensor) -> DecodeAttention:
        inner, b = self.inner, self.inner.batch
        batch = Batch(slots, b.positions[at], b.prompts[at], b.rows[at])
        return DecodeAttention(inner.arena, inner.group, batch, inner.state, inner.backend)

    def _staged(
        self, chunk: Chunk, buffer: Tensor, at: Tensor, q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        layer, inner = chunk.layer, self.inner
        entries = layer.layout.format.view(buffer, layer.layout.head_dim)
        cache = LayerCache(entries, self.tier.staged(inner.group, layer.layer)[1])
        slots = torch.tensor(chunk.starts()) // layer.entry_bytes
        batch = self._part(at, slots).batch
        policy = inner.group.policy
        plan = policy.plan(layer.layer, inner.state, q.device)
        attention.append(k, v, cache, batch, inner.backend, plan=plan)
        places = self._places(chunk, cache, plan)
        out = attention.decode(
            q, cache, policy, plan, batch, q.shape[-1] ** -0.5, layer=layer.layer,
            state=inner.state, backend=inner.backend,
        )  # fmt: skip
        self._store(chunk, buffer, places)
        return out

    def _places(self, chunk: Chunk, cache: LayerCache, plan: ReadPlan) -> list[list[int]]:
        """Entry, within its head's region, of each sequence's new key."""
        heads, layout, layer = range(len(cache.table.rings)), chunk.layer.layout, chunk.layer.layer
        if plan.held is None:
            return [[layout.visual_entry(layer, h, r.position) for h in heads] for r in chunk.rows]
        return [
            [reference.visual_entry(cache, h, r.position, r.row, plan) for h in heads]
            for r in chunk.rows
        ]

    def _store(self, chunk: Chunk, buffer: Tensor, places: list[list[int]]) -> None:
        """Write what the step has added: an entry a head, and its index where there is one."""
        layer = chunk.layer
        layout, size = layer.layout, layer.entry_bytes
        offsets = layout.offsets[layer.layer]
        at = [[(o + p) * size for o, p in zip(offsets, ps, strict=True)] for ps in places]
        cells = buffer[: len(buffer) // size * size].view(-1, size)
        starts = torch.tensor(chunk.starts())[:, None] - layer.first
        self._write_back(chunk, at, cells[(torch.tensor(at) + starts) // size])
        if size := layout.index_bytes:
            offsets, skip = layout.index_offsets[layer.layer], layout.prompt
            at = [
                [o + (p - skip) * size for o, p in zip(offsets, ps, strict=True)] for ps in places
            ]
            starts = starts + layer.first - layer.index_first + layer.index_at
            bytes_at = (torch.tensor(at) + starts)[:, :, None] + torch.arange(size)
            self._write_back(chunk, at, buffer[bytes_at])

    def _write_back(self, chunk: Chunk, at: list[list[int]], data: Tensor) -> None:
        """`data` [sequences, heads, bytes] to bytes `at` of each sequence."""
        images = [row.image for row in chunk.rows]
        places = [[row.slot + a for a in ats] for row, ats in zip(chunk.rows, at, strict=True)]
        self.tier.store(images, places, data)


class TieredPrefill:
    """`PrefillAttention` for sub-batches with sequences on disk, which get their prompts there."""

    def __init__(self, tier: KVTier, inner: PrefillAttention, rows: Sequence[Row]) -> None:
        self.tier, self.rows, self.group = tier, rows, inner.group
        away = [tier.holds(row.slot, inner.group) for row in rows]
        self.away = [i for i, is_away in enumerate(away) if is_away]
        slots: list[int | None] = [
            None if is_away else s for is_away, s in zip(away, inner.slots, strict=True)
        ]
        self.inner = PrefillAttention(inner.arena, inner.group, slots, inner.lengths)

    def __call__(
        self,
        layer: int,
        q: Float[Tensor, "M Hq D"],
        k: Float[Tensor, "M H D"],
        v: Float[Tensor, "M H D"],
    ) -> Float[Tensor, "M Hq D"]:
        keys, values = k.split(self.inner.lengths), v.split(self.inner.lengths)
        for i in self.away:
            self._store(layer, self.rows[i], keys[i], values[i])
        return self.inner(layer, q, k, v)

    def _store(self, layer: int, row: Row, keys: Tensor, values: Tensor) -> None:
        layout, heads = self.group.layout, keys.shape[1]
        entries = layout.format.empty(len(keys) * heads, layout.head_dim, keys.device)
        by_head = (x.transpose(0, 1).flatten(0, 1) for x in (keys, values))
        layout.format.write(entries, torch.arange(len(entries)), *by_head)
        size = layout.format.entry_bytes(layout.head_dim)
        places = [row.slot + o * size for o in layout.offsets[layer]]
        data = entries.view(torch.uint8).reshape(1, heads, len(keys) * size)
        self.tier.store([row.image], [places], data)
