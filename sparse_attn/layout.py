"""`CacheLayout`: where every key and value of a sequence lies, and how many bytes that takes.

The cache of one sequence is one contiguous run of entries, layer after layer and head after
head. A head's region is [prompt | anchors | ring]; heads may differ in the size of their ring.
An entry is the key and the value of one token side by side (`sparse_attn.format`), so that a
sparse read fetches both with one run of memory. Where the policy has an index, the index of every
layer and head follows behind all entries: a few bytes per visual entry, in the same order, each
head's on a boundary of 16 bytes, so that a scan is one contiguous read.
"""

from dataclasses import dataclass
from functools import cached_property

from sparse_attn.format import FORMATS, VECTOR, KVFormat
from sparse_attn.policy import ReadPolicy

__all__ = ["ALIGNMENT", "FORMATS", "CacheLayout", "KVFormat"]

ALIGNMENT = 256
"""Bytes; every sequence starts on such a boundary, enough for any vector load."""


@dataclass(frozen=True)
class CacheLayout:
    """Addresses within the cache of one sequence, in entries.

    prompt: entries set aside for the prompt in every head.
    anchors: leading visual keys that are never evicted.
    rings: entries of the ring of each layer and KV head.
    index_bytes: bytes of index beside each visual entry.
    """

    prompt: int
    anchors: int
    rings: tuple[tuple[int, ...], ...]
    head_dim: int
    format: KVFormat
    index_bytes: int = 0

    @classmethod
    def of(cls, policy: ReadPolicy, prompt: int, head_dim: int, format: KVFormat) -> "CacheLayout":
        """The layout of a sequence under `policy` with at most `prompt` prompt tokens."""
        rings = tuple(policy.ring(layer) for layer in range(policy.heads.layers))
        return cls(prompt, policy.anchors, rings, head_dim, format, policy.index_bytes)

    def head_entries(self, layer: int, head: int) -> int:
        return self.prompt + self.anchors + self.rings[layer][head]

    @cached_property
    def offsets(self) -> tuple[tuple[int, ...], ...]:
        """First entry of each layer and head, from the start of the sequence's cache."""
        result, at = [], 0
        for layer, rings in enumerate(self.rings):
            row = []
            for head in range(len(rings)):
                row.append(at)
                at += self.head_entries(layer, head)
            result.append(tuple(row))
        return tuple(result)

    @cached_property
    def entries(self) -> int:
        return sum(
            self.head_entries(layer, head)
            for layer, rings in enumerate(self.rings)
            for head in range(len(rings))
        )

    def head_index_bytes(self, layer: int, head: int) -> int:
        """Bytes of a head's index, padded to the boundary of the next."""
        raw = (self.anchors + self.rings[layer][head]) * self.index_bytes
        return -(-raw // VECTOR) * VECTOR

    @cached_property
    def index_offsets(self) -> tuple[tuple[int, ...], ...]:
        """First byte of each head's index, from the start of the sequence's cache."""
        at = -(-self.entries * self.format.entry_bytes(self.head_dim) // VECTOR) * VECTOR
        result = []
        for layer, rings in enumerate(self.rings):
            row = []
            for head in range(len(rings)):
                row.append(at)
                at += self.head_index_bytes(layer, head)
            result.append(tuple(row))
        return tuple(result)

    @cached_property
    def bytes(self) -> int:
        """Bytes of one sequence, rounded up to the alignment: what the scheduler counts."""
        entries = self.entries * self.format.entry_bytes(self.head_dim)
        index = sum(
            self.head_index_bytes(layer, head)
            for layer, rings in enumerate(self.rings)
            for head in range(len(rings))
        )
        raw = -(-entries // VECTOR) * VECTOR + index
        return -(-raw // ALIGNMENT) * ALIGNMENT

    @property
    def visual_bytes(self) -> int:
        """Bytes of the visual entries and their index (resident bytes of the picture)."""
        stored = sum(self.anchors * len(r) + sum(r) for r in self.rings)
        return stored * (self.format.entry_bytes(self.head_dim) + self.index_bytes)

    def visual_entry(self, layer: int, head: int, key: int) -> int:
        """Entry, within its head's region, of visual key `key`."""
        if key < self.anchors:
            return self.prompt + key
        return self.prompt + self.anchors + (key - self.anchors) % self.rings[layer][head]
