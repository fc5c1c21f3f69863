"""What a policy and a KV format read and keep, as shares of dense bf16."""

from sparse_attn.format import FORMATS
from sparse_attn.layout import CacheLayout
from sparse_attn.policy import ReadPolicy


def shares(policy: ReadPolicy, format: str, head_dim: int) -> dict[str, float]:
    """Bytes read over an image and bytes stored at its end, as shares of dense bf16."""
    entry = FORMATS[format].entry_bytes(head_dim)
    plain, grid = FORMATS["bf16"].entry_bytes(head_dim), policy.grid
    steps = range(grid.tokens - 1)
    read = sum(policy.read_total(t) * entry + policy.extra_read_bytes(t, entry) for t in steps)
    pairs = policy.heads.layers * policy.heads.kv_heads
    stored = CacheLayout.of(policy, 0, head_dim, FORMATS[format]).visual_bytes
    return {
        "read_share": read / (plain * pairs * sum(t + 1 for t in steps)),
        "resident_share": stored / (plain * pairs * grid.tokens),
    }
