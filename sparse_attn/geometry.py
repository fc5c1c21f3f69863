"""The picture as a sequence: how visual positions map to rows and columns."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Grid:
    """A raster of visual tokens, `height` rows of `width` plus `row_tokens` end-of-row tokens.

    Position t counts visual tokens from 0 in raster order, end-of-row tokens included:
    t = row * stride + column, and an end-of-row token has column >= width.
    """

    height: int
    width: int
    row_tokens: int = 0

    def __post_init__(self) -> None:
        if self.height < 1 or self.width < 1 or self.row_tokens not in (0, 1):
            raise ValueError(
                f"a grid needs height >= 1, width >= 1 and 0 or 1 row tokens, got {self}"
            )

    @property
    def stride(self) -> int:
        """Positions per row: W, or W + 1 where the model emits end-of-row tokens."""
        return self.width + self.row_tokens

    @property
    def tokens(self) -> int:
        """N, the visual tokens of one image, end-of-row tokens included."""
        return self.height * self.stride

    def row(self, position: int) -> int:
        return position // self.stride

    def column(self, position: int) -> int:
        return position % self.stride

    def position(self, row: int, column: int) -> int:
        return row * self.stride + column

    def linear(self, dr: int, dc: int) -> int:
        """Linear form of the 2-D offset (dr, dc): how far back in the sequence it points."""
        return dr * self.stride + dc

    def __str__(self) -> str:
        return f"{self.height}x{self.width}" + ("+eol" if self.row_tokens else "")
