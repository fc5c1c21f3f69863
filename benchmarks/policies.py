"""The pictures and the table of bytes in docs/policies.md.

    python -m benchmarks.policies

Draws each policy on the grid of `mini` into docs/policies/, and writes what a sequence of `mini`
reads and stores in bf16 to benchmarks/results/policies-bytes.json.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.results_writer import RESULTS, ROOT, results, write
from engine.models.options import LoadOptions
from engine.models.presets import load_model
from engine.policy_files import index_path, policy_of, stencil_path
from engine.shares import shares
from sparse_attn.format import FORMATS
from sparse_attn.layout import CacheLayout
from sparse_attn.policy import ReadPolicy
from sparse_attn.show import policy_picture

MODEL = "mini"
MIB = 1 << 20
LARGEST = 100_000
"""Bytes of a picture in the documents."""


@dataclass(frozen=True)
class Shown:
    """A policy as the page shows it. `when`: when it is the right choice."""

    policy: str
    when: str
    sparsity: float = 0.9
    options: dict[str, Any] = field(default_factory=dict)
    format: str = "bf16"
    picture: bool = True

    @property
    def name(self) -> str:
        kept = {k: v for k, v in self.options.items() if k != "file"}
        words = [f"{k}={v:g}" if isinstance(v, float) else f"{k}={v}" for k, v in kept.items()]
        if self.sparsity:
            words.insert(0, f"sparsity={self.sparsity:g}")
        if self.format != "bf16":
            words.append(self.format)
        return f"{self.policy}" + (f" ({', '.join(words)})" if words else "")


def shown() -> list[Shown]:
    index = {"file": str(index_path(MODEL))}
    half = index | {"resident": 0.5, "anchors": "first_row"}
    return [
        Shown("dense", "nothing else fits, or to compare with", 0.0, picture=False),
        Shown("dense", "memory is short and quality must not change", 0.0, {}, "int8", False),
        Shown("indexed", "quality counts and the cache fits: it reads what each query needs",
              options=index),
        Shown("indexed", "the same, and half of the cache must go", options=half),
        Shown("indexed", "both, as few bytes as possible", 0.9, half, "int8", False),
        Shown("stencil", "no index is there, or every access must be known in advance",
              options={"file": str(stencil_path(MODEL))}),
        Shown("stencil", "nothing was calibrated for the model", options={"anchors": "first_row"}),
        Shown("diagonal", "the paper's results are to be repeated"),
        Shown("window", "a baseline: nothing is cheaper"),
        Shown("streaming", "a baseline"),
        Shown("lines", "a baseline that drops whole rows", 0.8),
        Shown("h2o", "a baseline, for study on the reference backend", options={"decay": 0.95}),
    ]  # fmt: skip


def build(shown: Shown) -> tuple[ReadPolicy, int]:
    """The policy on `mini`, and the head dimension."""
    model = load_model(MODEL, LoadOptions())
    policy = policy_of(model, shown.policy, shown.sparsity, shown.options)
    return policy, model.shape.head_dim


def row(shown: Shown, policy: ReadPolicy, dim: int) -> dict[str, Any]:
    """Bytes of one sequence over a whole image."""
    format = FORMATS[shown.format]
    entry, steps = format.entry_bytes(dim), range(policy.grid.tokens - 1)
    read = sum(policy.read_total(t) * entry + policy.extra_read_bytes(t, entry) for t in steps)
    return {
        "policy": shown.name,
        "read_MiB": read / MIB,
        "resident_MiB": CacheLayout.of(policy, 0, dim, format).visual_bytes / MIB,
        **shares(policy, shown.format, dim),
        "right_choice_when": shown.when,
    }


def picture_path(shown: Shown, number: int) -> Path:
    return ROOT / "docs" / "policies" / f"{number:02d}-{shown.policy}.png"


def draw(shown: Shown, number: int, policy: ReadPolicy) -> None:
    path = picture_path(shown, number)
    path.parent.mkdir(parents=True, exist_ok=True)
    policy_picture(policy, path, title=shown.name)
    if path.stat().st_size > LARGEST:
        raise SystemExit(f"{path} has {path.stat().st_size} bytes, more than {LARGEST}")


def main() -> None:
    rows = []
    for number, one in enumerate(shown()):
        policy, dim = build(one)
        rows.append(row(one, policy, dim))
        if one.picture:
            draw(one, number, policy)
    result = results("policies-bytes.json", rows, command="python -m benchmarks.policies")
    write(RESULTS / "policies-bytes.json", result)


if __name__ == "__main__":
    main()
