"""One image while it is drawn, on the engine's side."""

from dataclasses import dataclass, field
from functools import lru_cache

from engine.events import ImageStats
from engine.models.base import ModelShape
from scheduler.request import ImageRequest
from sparse_attn.geometry import Grid
from sparse_attn.layout import CacheLayout, KVFormat
from sparse_attn.policy import ReadPolicy


@dataclass(frozen=True, eq=False)
class Group:
    """What images of one group share: policy, cache layout, and so one sub-batch.

    policy, layout: of the heads of this rank. whole: of all heads. reserved: bytes that a sequence
    is given on every rank, so that all of them plan alike. visual_bytes: visual KV of a sequence on
    all ranks.
    """

    name: str
    policy: ReadPolicy
    layout: CacheLayout
    whole: ReadPolicy
    reserved: int
    visual_bytes: int

    @classmethod
    def of(cls, name: str, whole: ReadPolicy, shape: ModelShape, format: KVFormat) -> "Group":
        """The group of a policy for all heads on a rank of a model.

        Raises ValueError if the policy cannot be divided so."""
        n = shape.kv_heads
        parts = [whole] if shape.ranks == 1 else [
            whole.of_heads(rank * n, n) for rank in range(shape.ranks)
        ]  # fmt: skip
        layouts = [CacheLayout.of(p, shape.prompt, shape.head_dim, format) for p in parts]
        reserved, visual = max(x.bytes for x in layouts), sum(x.visual_bytes for x in layouts)
        return cls(name, parts[shape.rank], layouts[shape.rank], whole, reserved, visual)


@dataclass(eq=False)
class Image:
    """Image `index` of a request. `prompts`: tokens of each sequence, the conditional first.

    rows: rows of the sequences in the policy's state, while the image runs.
    tokens: visual tokens drawn so far.
    """

    number: int
    request: ImageRequest
    index: int
    group: Group
    prompts: tuple[tuple[int, ...], ...]
    submitted: float
    started: float | None = None
    rows: tuple[int, ...] = ()
    tokens: list[int] = field(default_factory=list)

    @property
    def grid(self) -> Grid:
        return self.group.policy.grid

    @property
    def seed(self) -> int:
        return self.request.seed + self.index

    def restart(self) -> None:
        """Forget everything drawn; the seed draws it again."""
        self.started, self.rows = None, ()
        self.tokens.clear()

    def stats(self, now: float) -> ImageStats:
        group, started = self.group, self.started or now
        reads = total_reads(group.whole)
        entry = group.layout.format.entry_bytes(group.layout.head_dim)
        return ImageStats(
            tokens=len(self.tokens),
            prompt_tokens=len(self.prompts[0]),
            seconds=now - started,
            queue_seconds=started - self.submitted,
            kv_read_bytes=(sum(reads) * entry + picking_bytes(group.whole, entry))
            * len(self.prompts),
            kv_resident_bytes=group.visual_bytes * len(self.prompts),
            density=density(group.whole, len(self.prompts[0])),
        )


@lru_cache(maxsize=256)
def total_reads(policy: ReadPolicy) -> tuple[int, ...]:
    """Visual keys read by the query at each position, over all layers and heads of a sequence."""
    return tuple(policy.read_total(t) for t in range(policy.grid.tokens - 1))


@lru_cache(maxsize=256)
def picking_bytes(policy: ReadPolicy, entry_bytes: int) -> int:
    """Bytes a sequence reads over the whole image to find the keys it reads."""
    return sum(policy.extra_read_bytes(t, entry_bytes) for t in range(policy.grid.tokens - 1))


@lru_cache(maxsize=256)
def density(policy: ReadPolicy, prompt: int) -> float:
    """Keys read / keys dense attention reads, prompt included, mean over the image's steps."""
    heads = policy.heads.layers * policy.heads.kv_heads
    ratios = [
        (read / heads + prompt) / (t + 1 + prompt) for t, read in enumerate(total_reads(policy))
    ]
    return sum(ratios) / max(1, len(ratios))
