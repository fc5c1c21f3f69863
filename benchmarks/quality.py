"""What policies and KV formats cost in likelihood: teacher-forced loss on held-out pictures.

    python -m benchmarks.quality --model mini --pictures pictures.safetensors -o quality-mini.json

Every row compares one policy with dense attention, picture by picture: mean and standard error of
the difference in nats per visual token. Teacher forcing flatters: sampled pictures lose more.
"""

import argparse
import json
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.models.base import VisualModel
from engine.models.options import LoadOptions
from engine.models.presets import load_model
from engine.policy_files import FOLDER, index_path, stencil_path
from engine.teacher import Pictures, policy_loss
from sparse_attn import policies
from sparse_attn.format import FORMATS
from sparse_attn.layout import CacheLayout
from sparse_attn.policy import Heads, ReadPolicy

SPARSITIES = (0.8, 0.9, 0.95)


@dataclass(frozen=True)
class Case:
    """One configuration. `options` as users write them."""

    policy: str
    sparsity: float = 0.0
    options: dict[str, Any] = field(default_factory=dict)
    format: str = "bf16"


def cases(index: dict[str, Any], stencil: dict[str, Any], n: dict[float, int]) -> Iterator[Case]:
    """All configurations. index, stencil: options that name the files; n: reads of a head."""
    for s in SPARSITIES:
        yield Case("window", s)
        yield Case("window", s, {"anchors": "first_row"})
        yield Case("streaming", s)
        yield Case("lines", s)
        for factor in (1, 2, 4):
            yield Case("diagonal", s, {"recent": factor * n[s]})
        yield Case("diagonal", s, {"sink": 4})
        yield Case("stencil", s, {"anchors": "first_row"})
        yield Case("stencil", s, stencil)
        yield Case("indexed", s, index)
        yield Case("indexed", s, index | {"dims": 16})
        yield Case("indexed", s, index | {"rerank": True})
        yield Case("indexed", s, index | {"share": 2})
        yield Case("indexed", s, index | {"resident": 0.5})
        yield Case("indexed", s, index | {"resident": 0.5, "anchors": "first_row"})
    for resident in (1 / 2, 1 / 3, 1 / 4, 1 / 6):
        for anchors in (0, "first_row"):
            kept = {"resident": round(resident, 4), "anchors": anchors}
            yield Case("indexed", 0.0, index | kept)
    for s in (0.5, 0.75):
        yield Case("h2o", s, {"decay": 0.95})
        yield Case("tova", s)
        yield Case("alisa", s)
    yield Case("dense", format="int8")
    yield Case("indexed", 0.9, index, "int8")


class Quality:
    """Losses of one model on one set of pictures."""

    def __init__(self, model: VisualModel, pictures: Pictures, name: str) -> None:
        self.model, self.pictures, self.name = model, pictures, name
        self.heads = Heads(model.shape.layers, model.shape.kv_heads)
        self.dense, self.dense_reads = self._loss(Case("dense"))

    def row(self, case: Case) -> dict[str, Any]:
        """Loss against dense, what is read and what is stored."""
        loss, reads = self._loss(case)
        change = (loss - self.dense).mean(1)
        policy = self._policy(case)
        return {
            "policy": case.policy,
            "sparsity": case.sparsity,
            "options": _named(case.options),
            "format": case.format,
            "loss": float(change.mean()),
            "loss_se": float(change.std() / len(change) ** 0.5),
            "reads": reads,
            "density": reads / self.dense_reads,
        } | self._bytes(policy, case)

    def _policy(self, case: Case) -> ReadPolicy:
        return policies.build(
            case.policy, self.model.grid, self.heads, case.sparsity, case.options, self.name
        )

    def _loss(self, case: Case) -> tuple[Tensor, float]:
        format = None if case.format == "bf16" else FORMATS[case.format]
        return policy_loss(self.model, self.pictures, self._policy(case), format)

    def _bytes(self, policy: ReadPolicy, case: Case) -> dict[str, float]:
        """Share of what dense bf16 reads over an image, and stores at its end."""
        format, dim = FORMATS[case.format], self.model.shape.head_dim
        entry, plain = format.entry_bytes(dim), FORMATS["bf16"].entry_bytes(dim)
        steps = range(self.model.grid.tokens - 1)
        read = sum(policy.read_total(t) * entry + policy.extra_read_bytes(t, entry) for t in steps)
        pairs = self.heads.layers * self.heads.kv_heads
        stored = CacheLayout.of(policy, 0, dim, format).visual_bytes
        return {
            "read_share": read / (plain * pairs * sum(t + 1 for t in steps)),
            "resident_share": stored / (plain * pairs * self.model.grid.tokens),
        }


def _named(options: dict[str, Any]) -> dict[str, Any]:
    """Options without the folder of files."""
    return {k: Path(v).name if k == "file" else v for k, v in options.items()}


def report(quality: Quality, rows: Sequence[dict[str, Any]], command: str) -> dict[str, Any]:
    """A results file; its schema is in docs/architecture.md."""
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()  # fmt: skip
    return {
        "machine": {
            "cpu": platform.processor() or platform.machine(),
            "threads": torch.get_num_threads(),
        },
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "commit": commit,
        "command": command,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": quality.name,
        "pictures": len(quality.pictures),
        "dense_nll": float(quality.dense.mean()),
        "rows": list(rows),
        "targets": [],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="mini", help="preset or folder of weights")
    parser.add_argument("--name", help="model name that the calibration files bear")
    parser.add_argument("--pictures", type=Path, required=True, help="held-out pictures")
    parser.add_argument("--files", type=Path, default=FOLDER, help="folder of calibration files")
    parser.add_argument("--count", type=int, default=24, help="pictures used")
    parser.add_argument("--only", help="policies to measure, comma-separated")
    parser.add_argument("--backend", default="native", choices=("native", "reference"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("-o", "--output", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = load_model(args.model, LoadOptions(backend=args.backend))
    quality = Quality(model, Pictures.load(args.pictures)[: args.count], args.name or model.name)
    print(f"dense: {float(quality.dense.mean()):.4f} nats/token", flush=True)
    rows = []
    budgets = {s: policies.build("window", model.grid, quality.heads, s).budget for s in SPARSITIES}
    index = {"file": str(args.files / index_path(quality.name).name)}
    stencil = {"file": str(args.files / stencil_path(quality.name).name)}
    for case in cases(index, stencil, budgets):
        if args.only and case.policy not in args.only.split(","):
            continue
        rows.append(quality.row(case))
        print(json.dumps(rows[-1]), flush=True)
        result = report(quality, rows, " ".join(["python -m benchmarks.quality", *sys.argv[1:]]))
        args.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
