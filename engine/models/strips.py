"""Convolutions over strips of rows: the same result, less memory in flight."""

from collections.abc import Callable

from torch import Tensor, nn


def conv_by_strips(
    x: Tensor, conv: nn.Conv2d, strips: int, before: Callable[[Tensor, slice], Tensor]
) -> Tensor:
    """conv(before(x)) of x [B, C, H, W].

    before: takes some rows of x and which they are, and treats each place alone or doubles the
    rows. Each strip is computed with the neighbouring
    rows that a 3 x 3 kernel needs.
    """
    rows = x.shape[2]
    strips = min(strips, rows)
    if strips == 1:
        return _conv(conv, before(x, slice(0, rows)))
    result: Tensor | None = None
    for i in range(strips):
        top, bottom = rows * i // strips, rows * (i + 1) // strips
        above, below = min(1, top), min(1, rows - bottom)
        at = slice(top - above, bottom + below)
        part = before(x[:, :, at], at)
        factor = part.shape[2] // (at.stop - at.start)
        out = _conv(conv, part)
        if result is None:
            shape = (len(x), out.shape[1], rows * factor, out.shape[3])
            result = out.new_empty(shape)
        last = out.shape[2] - below * factor
        result[:, :, top * factor : bottom * factor] = out[:, :, above * factor : last]
    assert result is not None
    return result


def _conv(conv: nn.Conv2d, x: Tensor) -> Tensor:
    out: Tensor = conv(x)
    return out
