"""The index of `indexed`: a few bytes per key from which the keys of a query are picked.

A key before rotary embedding is projected onto the first directions of a PCA of its head's keys,
and each coordinate is stored in 4 bits. The score of a key is the inner product of the query with
the key rebuilt from its index and rotated to its position. (Before the embedding, because there
the few directions that matter are the same at every position.)
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor

BITS = 4
LEVELS = 1 << BITS
GAUSSIAN_STEP = 0.3352
"""Step of the best uniform quantiser of 16 levels for a unit normal (Max, "Quantizing for minimum
distortion", 1960, table II)."""


@dataclass(frozen=True, slots=True, eq=False)
class IndexLayer:
    """What one layer's index is made with, fp32.

    mean: [H, D], mean key before rotary embedding.
    basis: [H, D, r], orthonormal directions.
    step: [H, r], width of a quantisation step along each.
    cos, sin: [N, D/2], rotary angles of the visual positions.
    row_pairs: how many leading pairs of dimensions turn with the row alone; the others turn with
        the column alone. So a query needs one projection per row and per column, not per key.
    """

    mean: Float[Tensor, "H D"]
    basis: Float[Tensor, "H D r"]
    step: Float[Tensor, "H r"]
    cos: Float[Tensor, "N D2"]
    sin: Float[Tensor, "N D2"]
    row_pairs: int

    @property
    def dims(self) -> int:
        return self.basis.shape[2]

    @property
    def key_bytes(self) -> int:
        """Bytes of index per key and head."""
        return self.dims * BITS // 8

    def to(self, target: torch.device | torch.dtype) -> "IndexLayer":
        """The same on a device, or in another precision."""
        return IndexLayer(
            self.mean.to(target), self.basis.to(target), self.step.to(target),
            self.cos.to(target), self.sin.to(target), self.row_pairs,
        )  # fmt: skip

    def double(self) -> "IndexLayer":
        return self.to(torch.float64)

    def encode(
        self, k: Float[Tensor, "*n H D"], positions: Int64[Tensor, "*n"]
    ) -> UInt8[Tensor, "*n H b"]:
        """Index of keys (after rotary embedding) at visual positions: two coordinates a byte, the
        even one in the low half."""
        cos, sin = self.cos[positions], self.sin[positions]
        raw = rotate(k, cos, -sin) - self.mean
        codes = torch.einsum("...hd,hdr->...hr", raw, self.basis) / self.step
        codes = (codes.floor() + LEVELS // 2).clamp(0, LEVELS - 1).to(torch.uint8)
        return codes[..., 0::2] | codes[..., 1::2] << BITS

    def decode(
        self, packed: UInt8[Tensor, "*n H b"], positions: Int64[Tensor, "*n"]
    ) -> Float[Tensor, "*n H D"]:
        """The keys that an index stands for, after rotary embedding."""
        codes = torch.stack([packed & (LEVELS - 1), packed >> BITS], -1).flatten(-2)
        offset = codes.to(self.step.dtype) - (LEVELS - 1) / 2
        raw = self.mean + torch.einsum("...hr,hdr->...hd", offset * self.step, self.basis)
        return rotate(raw, self.cos[positions], self.sin[positions])

    def head(self, head: int) -> "IndexLayer":
        """The index of one head alone, with H = 1."""
        one = slice(head, head + 1)
        return IndexLayer(
            self.mean[one], self.basis[one], self.step[one], self.cos, self.sin, self.row_pairs
        )


def row_pairs(cos: Float[Tensor, "N D2"], sin: Float[Tensor, "N D2"], stride: int) -> int:
    """Leading pairs whose angle depends on the row alone, where all others depend on the column
    alone. Raises ValueError if the positions do not separate like that."""
    by_place = torch.stack([cos, sin]).unflatten(1, (-1, stride))
    row_only = by_place.isclose(by_place[:, :, :1], atol=1e-5).all(0).flatten(0, 1).all(0)
    column_only = by_place.isclose(by_place[:, :1], atol=1e-5).all(0).flatten(0, 1).all(0)
    count = int(row_only.long().cumprod(0).sum())
    if not column_only[count:].all():
        raise ValueError(
            "an index before rotary embedding needs 2-D positions, where each pair of dimensions "
            "turns with the row alone or with the column alone; this model's do not"
        )
    return count


@dataclass(frozen=True, slots=True, eq=False)
class Pick:
    """How the reads of one step of one layer are picked.

    picks: keys per head. candidates: keys whose exact scores decide, chosen by the index; 0 lets
    the index decide. share: neighbouring KV heads with one selection. scale: of the scores.
    """

    index: IndexLayer
    picks: int
    candidates: int
    share: int
    scale: float


def rotate(x: Float[Tensor, "*n H D"], cos: Tensor, sin: Tensor) -> Float[Tensor, "*n H D"]:
    """Rotary embedding, half-split pairs (i, i + D/2); cos and sin are [*n, D/2]."""
    a, b = x.chunk(2, -1)
    cos, sin = cos[..., None, :], sin[..., None, :]
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


def shared_scores(raw: Float[Tensor, "*b Q n"]) -> Float[Tensor, "*b n"]:
    """One score per key for Q queries that share a selection; -inf where a key may not be read.

    One query: its own scores. Several: the sum of their softmax weights, so that a query with
    large scores does not outvote the others.
    """
    if raw.shape[-2] == 1:
        return raw[..., 0, :]
    weight = raw.softmax(-1).sum(-2)
    return weight.masked_fill(raw[..., 0, :].isneginf(), -torch.inf)


def best(
    scores: Float[Tensor, "*b n"], keys: Int64[Tensor, "n"], count: int
) -> tuple[Int64[Tensor, "*b c"], Float[Tensor, "*b c"]]:
    """The `count` keys of the highest scores and these scores, best first; among equals the newest
    key. `keys` ascend. Fewer keys than `count` are all returned."""
    order = scores.flip(-1).argsort(dim=-1, descending=True, stable=True)[..., :count]
    at = scores.shape[-1] - 1 - order
    return keys[at], scores.gather(-1, at)
