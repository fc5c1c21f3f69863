"""The KV arena: one allocation that holds the caches of all sequences in flight."""

import mmap
import weakref
from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor

from sparse_attn.cache import LayerCache, LayerTable
from sparse_attn.layout import CacheLayout


def host_memory(size: int) -> Tensor:
    """`size` zeroed bytes, in huge pages where the system has them: sparse reads touch another
    page for nearly every key, and walking the page tables would take half of their time.

    Raises OSError if there is not so much memory.
    """
    if size == 0 or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(size, dtype=torch.uint8)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a system without huge pages refuses the advice, which is harmless
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


class KVArena:
    """`total_bytes` of device memory; extents of it are handed out by the scheduler."""

    def __init__(self, total_bytes: int, device: torch.device) -> None:
        self.device = device
        try:
            if device.type == "cpu":
                self._bytes = host_memory(total_bytes)
            else:
                self._bytes = torch.empty(total_bytes, dtype=torch.uint8, device=device)
        except (RuntimeError, OSError, OverflowError) as error:
            raise MemoryError(
                f"cannot allocate a KV cache of {total_bytes / 2**30:.1f} GiB on {device}: "
                "choose a smaller cache_bytes"
            ) from error
        self._layers: dict[int, dict[int, LayerCache]] = {}

    def entries(self, layout: CacheLayout) -> Tensor:
        """The arena as entries of a layout, in its KV format."""
        return layout.format.view(self._bytes, layout.head_dim)

    def entry_of(self, layout: CacheLayout, byte_offset: int) -> int:
        """First entry of a slot (the scheduler aligns slots to whole entries)."""
        entry, rest = divmod(byte_offset, layout.format.entry_bytes(layout.head_dim))
        if rest:
            raise ValueError(f"slot at byte {byte_offset} is not aligned to an entry of {layout}")
        return entry

    def layer(self, layout: CacheLayout, layer: int) -> LayerCache:
        """One layer of the caches of a layout; made once, since every step asks for it."""
        layers = self._layers_of(layout)
        if layer not in layers:
            table = LayerTable.of(layout, layer, self.device)
            layers[layer] = LayerCache(self.entries(layout), table)
        return layers[layer]

    def _layers_of(self, layout: CacheLayout) -> dict[int, LayerCache]:
        """Caches by layer, for as long as the layout lives (hashing one takes too long)."""
        key = id(layout)
        if key not in self._layers:
            self._layers[key] = {}
            weakref.finalize(layout, self._layers.pop, key, None)
        return self._layers[key]


class RowPool:
    """Rows of a policy's state, handed out to sequences and grown when all are taken."""

    def __init__(self, fresh: Callable[[int], Tensor | None]) -> None:
        self._fresh = fresh
        self.state = fresh(1)
        self._initial = None if self.state is None else self.state[0].clone()
        self._free = [0]
        self._size = 1

    def take(self) -> int:
        """A row in its initial state."""
        if not self._free:
            self._grow()
        row = self._free.pop(0)
        if self.state is not None and self._initial is not None:
            self.state[row] = self._initial
        return row

    def give_back(self, row: int) -> None:
        self._free.append(row)

    def _grow(self) -> None:
        more = self._fresh(self._size)
        if self.state is not None and more is not None:
            self.state = torch.cat([self.state, more])
        self._free.extend(range(self._size, 2 * self._size))
        self._size *= 2
