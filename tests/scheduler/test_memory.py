"""The cache arena: extents never overlap or leak, whatever the order of calls."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.memory import ExtentAllocator


def allocator(*sizes: int) -> tuple[ExtentAllocator, list[int]]:
    """An arena of 100 bytes, alignment 1, and one extent for each size, from offset 0 up."""
    memory = ExtentAllocator(100, alignment=1)
    offsets = [memory.allocate([size]) for size in sizes]
    return memory, [o[0] for o in offsets if o is not None]


def test_sizes_and_offsets_are_aligned() -> None:
    memory = ExtentAllocator(1000, alignment=256)
    assert memory.total_bytes == 768
    assert memory.allocate([1, 257]) == (512, 0)
    assert (memory.used_bytes, memory.free_bytes, memory.largest_free_bytes) == (768, 0, 0)


def test_takes_the_smallest_hole_that_holds_it() -> None:
    memory, (a, _, c, _) = allocator(30, 10, 20, 10)
    memory.free([a, c])  # holes of 30, 20 and the rest, 30
    assert memory.allocate([15]) == (c,)


def test_takes_the_lowest_of_equal_holes() -> None:
    memory, (a, _, c, _) = allocator(20, 10, 20, 50)
    memory.free([c, a])
    assert memory.allocate([20]) == (a,)


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (2, 1, 0)])
def test_neighbours_that_are_free_become_one(order: tuple[int, ...]) -> None:
    memory, offsets = allocator(20, 30, 50)
    for index in order:
        memory.free([offsets[index]])
    assert memory.largest_free_bytes == 100
    assert memory.allocate([100]) == (0,)


def test_a_hole_between_two_extents_is_not_larger_than_it_is() -> None:
    memory, (_, b, _) = allocator(30, 40, 30)
    memory.free([b])
    assert not memory.fits([41])
    assert memory.fits([40])


def test_several_sizes_fit_together_or_not_at_all() -> None:
    memory, (_, b, _, d) = allocator(40, 10, 44, 6)
    memory.free([b, d])  # holes of 10 and 6
    assert memory.fits([10])
    assert memory.fits([5, 5, 6])
    assert not memory.fits([6, 10, 1])
    assert not memory.fits([8, 8])
    assert memory.allocate([8, 8]) is None
    assert memory.allocate([6, 10]) == (94, 40)


def test_nothing_fits_in_a_full_arena() -> None:
    memory, _ = allocator(100)
    assert memory.largest_free_bytes == 0
    assert memory.allocate([1]) is None


@pytest.mark.parametrize("offsets", [[0, 0], [1], [0, 7]])
def test_freeing_what_is_not_allocated_is_an_error_and_changes_nothing(offsets: list[int]) -> None:
    memory, _ = allocator(40)
    with pytest.raises(ValueError, match="not an allocated extent"):
        memory.free(offsets)
    assert memory.used_bytes == 40
    memory.free([0])
    with pytest.raises(ValueError, match="freed twice"):
        memory.free([0])


def test_refuses_what_makes_no_sense() -> None:
    with pytest.raises(ValueError, match="alignment must be 1 byte or more"):
        ExtentAllocator(100, alignment=0)
    with pytest.raises(ValueError, match="needs at least 256"):
        ExtentAllocator(255)
    with pytest.raises(ValueError, match="1 byte or more"):
        ExtentAllocator(256).allocate([0])


def test_a_copy_is_independent() -> None:
    memory, (a,) = allocator(60)
    other = memory.copy()
    other.free([a])
    assert other.fits([100])
    assert not memory.fits([100])


@settings(deadline=None)
@given(st.data())
def test_extents_never_overlap_and_never_leak(data: st.DataObject) -> None:
    alignment = data.draw(st.sampled_from([1, 8, 256]))
    memory = ExtentAllocator(40 * alignment, alignment)
    held: list[dict[int, int]] = []  # what each allocation holds, offset -> size rounded up
    for _ in range(data.draw(st.integers(1, 25))):
        if data.draw(st.booleans()) and held:
            memory.free(list(held.pop(data.draw(st.integers(0, len(held) - 1)))))
        else:
            sizes = data.draw(st.lists(st.integers(1, 12 * alignment), min_size=1, max_size=3))
            promised = memory.fits(sizes)
            offsets = memory.allocate(sizes)
            assert (offsets is not None) == promised
            rounded = [-(-size // alignment) * alignment for size in sizes]
            if offsets is not None:
                held.append(dict(zip(offsets, rounded, strict=True)))
            else:
                assert max(_holes(held, memory.total_bytes), default=0) < sum(rounded)
        holes = _holes(held, memory.total_bytes)
        assert memory.largest_free_bytes == max(holes, default=0)
        assert memory.free_bytes == sum(holes)
        assert all(offset % alignment == 0 for extents in held for offset in extents)
    for extents in held:
        memory.free(list(extents))
    assert memory.largest_free_bytes == memory.total_bytes
    assert memory.used_bytes == 0


def _holes(held: list[dict[int, int]], total: int) -> list[int]:
    """Sizes of the gaps between extents; fails if two overlap or one leaves the arena."""
    edge, holes = 0, []
    extents = sorted(extent for each in held for extent in each.items())
    for offset, size in [*extents, (total, 0)]:
        assert offset >= edge, "extents overlap"
        holes.append(offset - edge)
        edge = offset + size
    return [hole for hole in holes if hole]
