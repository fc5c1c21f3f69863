"""What users write (a sparsity, anchors) in keys of a grid."""

from math import ceil

from sparse_attn.geometry import Grid

FIRST_ROW = "first_row"


def read_budget(grid: Grid, sparsity: float) -> int:
    """ceil((1 - s) * N): visual keys a head may read for one query, its own included.

    Raises ValueError unless 0 <= s < 1.
    """
    if not 0 <= sparsity < 1:
        raise ValueError(f"sparsity must lie in [0, 1), got {sparsity}")
    return ceil(round((1 - sparsity) * grid.tokens, 6))


def anchor_count(grid: Grid, anchors: int | str) -> int:
    """Leading visual keys that stay: a number, or "first_row" (its row token included)."""
    if anchors == FIRST_ROW:
        return grid.stride
    if isinstance(anchors, bool) or not isinstance(anchors, int):
        raise ValueError(f"anchors must be a number of keys or {FIRST_ROW!r}, got {anchors!r}")
    if not 0 <= anchors <= grid.tokens:
        raise ValueError(f"anchors must lie in 0..{grid.tokens}, got {anchors}")
    return anchors
