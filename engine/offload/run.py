"""`Offload`: what the runner calls in a step. With nothing offloaded it does nothing."""

from collections.abc import Sequence

from engine.models.base import Attention
from engine.offload.kv_tier import KVTier, Row, TieredDecode, TieredPrefill
from engine.offload.weights import WeightStream
from engine.phases import DecodeAttention, PrefillAttention


class Offload:
    """weights: None where all of them are in memory. tier: None where all KV is."""

    def __init__(self, weights: WeightStream | None = None, tier: KVTier | None = None) -> None:
        self.weights, self.tier = weights, tier

    def prefill(self, inner: PrefillAttention, rows: Sequence[Row]) -> Attention:
        """The attention of a sub-batch that reads its prompts."""
        if self.tier is None or not self._any_away(self.tier, inner, rows):
            return inner
        return TieredPrefill(self.tier, inner, rows)

    def decode(self, inner: DecodeAttention, rows: Sequence[Row]) -> Attention:
        """The attention of a sub-batch that draws a token."""
        if self.tier is None or not self._any_away(self.tier, inner, rows):
            return inner
        return TieredDecode(self.tier, inner, rows)

    def begin(self, attention: Sequence[Attention], layers: int) -> None:
        """A step starts, with these sub-batches."""
        if self.tier is not None:
            self.tier.begin(attention, layers)

    def before(self, layer: int) -> None:
        """A layer is about to compute. Raises OffloadError if its weights cannot be read."""
        if self.weights is not None:
            self.weights.need(layer)

    def finish(self) -> dict[int, str]:
        """The step is over; the images that cannot go on, and why."""
        return {} if self.tier is None else self.tier.finish()

    def close(self) -> None:
        if self.weights is not None:
            self.weights.close()
        if self.tier is not None:
            self.tier.close()
        self.weights = self.tier = None

    @property
    def read_bytes(self) -> int:
        """Bytes that came from disk since the start."""
        weights = 0 if self.weights is None else self.weights.read_bytes
        return weights + (0 if self.tier is None else self.tier.traffic.read)

    @property
    def written_bytes(self) -> int:
        return 0 if self.tier is None else self.tier.traffic.written

    @staticmethod
    def _any_away(
        tier: KVTier, inner: PrefillAttention | DecodeAttention, rows: Sequence[Row]
    ) -> bool:
        return any(tier.holds(row.slot, inner.group) for row in rows)
