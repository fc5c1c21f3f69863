"""Where each sequence lies in the cache arena: contiguous extents, best fit, no gaps left behind.

The length of an image is known, so an extent never grows: one extent per sequence for its whole
life gives kernels a base address and strides, with no page table to follow.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Self


class ExtentAllocator:
    """Hands out byte extents of an arena of `total_bytes`.

    Sizes are rounded up to `alignment`, and so every offset is a multiple of it. The smallest free
    extent that holds a size is used, the lowest offset among equals: the same calls always give the
    same offsets. An extent costs a binary search and a shift of the list of free extents.
    """

    def __init__(self, total_bytes: int, alignment: int = 256):
        if alignment < 1:
            raise ValueError(f"alignment must be 1 byte or more, got {alignment}")
        if total_bytes < alignment:
            raise ValueError(f"the arena has {total_bytes} bytes: needs at least {alignment}")
        self.alignment = alignment
        self.total_bytes = total_bytes - total_bytes % alignment
        self._used: dict[int, int] = {}  # offset -> size
        self._holes = [(0, self.total_bytes)]  # (offset, size), by offset
        self._by_size = [(self.total_bytes, 0)]  # the same holes as (size, offset), by size
        self.used_bytes = 0

    @property
    def free_bytes(self) -> int:
        return self.total_bytes - self.used_bytes

    @property
    def largest_free_bytes(self) -> int:
        """Size of the largest extent that could be allocated now."""
        return self._by_size[-1][0] if self._by_size else 0

    def rounded(self, size: int) -> int:
        """Bytes that an extent of `size` bytes really takes. ValueError if size < 1."""
        if size < 1:
            raise ValueError(f"an extent has 1 byte or more, got {size}")
        return -(-size // self.alignment) * self.alignment

    def could_ever_fit(self, sizes: Sequence[int]) -> bool:
        """Whether `sizes` fit together in the empty arena."""
        return sum(map(self.rounded, sizes)) <= self.total_bytes

    def fits(self, sizes: Sequence[int]) -> bool:
        """Whether `allocate(sizes)` would succeed now."""
        wanted = sorted(map(self.rounded, sizes), reverse=True)
        if sum(wanted) <= self.largest_free_bytes:
            return True
        if sum(wanted) > self.free_bytes:
            return False
        holes = self._by_size.copy()
        return all(_take(holes, size) is not None for size in wanted)

    def allocate(self, sizes: Sequence[int]) -> tuple[int, ...] | None:
        """Offsets of one extent for each size, or None (and no change) if not all of them fit.

        The largest is placed first, which leaves the others the best chance."""
        if not self.fits(sizes):
            return None
        offsets = [0] * len(sizes)
        for index in sorted(range(len(sizes)), key=lambda i: -self.rounded(sizes[i])):
            offsets[index] = self._place(self.rounded(sizes[index]))
        return tuple(offsets)

    def free(self, offsets: Sequence[int]) -> None:
        """Give extents back. ValueError (and no change) if one is not allocated or named twice."""
        for offset in offsets:
            if offset not in self._used or offsets.count(offset) > 1:
                raise ValueError(f"offset {offset} is not an allocated extent (freed twice?)")
        for offset in offsets:
            self._release(offset)

    def copy(self) -> Self:
        """An allocator in the same state, to try things out on."""
        other = type(self)(self.total_bytes, self.alignment)
        other._used = self._used.copy()
        other._holes = self._holes.copy()
        other._by_size = self._by_size.copy()
        other.used_bytes = self.used_bytes
        return other

    def _place(self, size: int) -> int:
        hole = _take(self._by_size, size)
        assert hole is not None, "fits() was asked first"
        hole_size, offset = hole
        at = bisect_left(self._holes, (offset, hole_size))
        rest = [(offset + size, hole_size - size)] if hole_size > size else []
        self._holes[at : at + 1] = rest
        self._used[offset] = size
        self.used_bytes += size
        return offset

    def _release(self, offset: int) -> None:
        size = self._used.pop(offset)
        self.used_bytes -= size
        start, end = offset, offset + size
        at = bisect_left(self._holes, (offset, 0))
        first, last = at, at
        if at > 0 and sum(self._holes[at - 1]) == start:
            first, start = at - 1, self._holes[at - 1][0]
        if at < len(self._holes) and self._holes[at][0] == end:
            last, end = at + 1, sum(self._holes[at])
        for hole_offset, hole_size in self._holes[first:last]:
            del self._by_size[bisect_left(self._by_size, (hole_size, hole_offset))]
        self._holes[first:last] = [(start, end - start)]
        insort(self._by_size, (end - start, start))


def _take(by_size: list[tuple[int, int]], size: int) -> tuple[int, int] | None:
    """Cut `size` bytes off the best hole; returns that hole as (size, offset) as it was."""
    at = bisect_left(by_size, (size, 0))
    if at == len(by_size):
        return None
    hole_size, offset = by_size.pop(at)
    if hole_size > size:
        insort(by_size, (hole_size - size, offset + size))
    return hole_size, offset
