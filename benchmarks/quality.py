"""What policies and KV formats cost in likelihood: teacher-forced loss on held-out pictures.

    python -m benchmarks.quality --pictures pictures.safetensors

Every row compares one policy with dense attention, picture by picture: mean and standard error of
the difference in nats per visual token, and what is read and stored against dense bf16. Teacher
forcing flatters: sampled pictures lose more.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.results_writer import RESULTS, results, write
from engine.models.base import VisualModel
from engine.models.options import LoadOptions
from engine.models.presets import load_model
from engine.policy_files import FOLDER, index_path, stencil_path
from engine.shares import shares
from engine.teacher import Pictures, policy_loss
from sparse_attn import policies
from sparse_attn.budget import read_budget
from sparse_attn.format import FORMATS
from sparse_attn.policy import Heads, ReadPolicy

SPARSITIES = (0.9, 0.95, 0.8)
RESIDENT = (0.5, 0.25, 0.33, 0.17)
FIRST_ROW = {"anchors": "first_row"}
Options = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One configuration; `name` is what tables call it, `options` are as users write them."""

    group: str
    name: str
    policy: str
    sparsity: float = 0.0
    options: Options = field(default_factory=dict)
    format: str = "bf16"


def reading(s: float, n: int, index: Options, stencil: Options) -> Iterator[Case]:
    """What to read at sparsity s; n: reads of a head."""
    for name, policy, options in (
        ("indexed, 4 bytes a key", "indexed", index),
        ("indexed, 8 bytes a key", "indexed", index | {"dims": 16}),
        ("indexed, 4 bytes, re-ranked", "indexed", index | {"rerank": True}),
        ("indexed, 4 bytes, shared by 2 heads", "indexed", index | {"share": 2}),
        (
            "indexed, 4 bytes, half resident with first row",
            "indexed",
            index | {"resident": 0.5} | FIRST_ROW,
        ),
        ("diagonal, N_r = 2 N_att", "diagonal", {"recent": 2 * n}),
        ("diagonal, N_r = 4 N_att", "diagonal", {"recent": 4 * n}),
        ("streaming", "streaming", {}),
        ("window", "window", {}),
        ("window, first row", "window", FIRST_ROW),
        ("lines", "lines", {"anchors": 0}),
        ("stencil, built in, first row", "stencil", FIRST_ROW),
        ("stencil, calibrated", "stencil", stencil),
    ):
        yield Case("reading", name, policy, s, options)


def evicting(resident: float, index: Options) -> Iterator[Case]:
    """What to keep, where everything kept is read."""
    sparsity = 1 - resident
    kept = {"resident": resident}
    yield Case("evicting", "windows per head, first row", "indexed", 0.0, index | kept | FIRST_ROW)
    yield Case("evicting", "windows per head", "indexed", 0.0, index | kept)
    yield Case("evicting", "first row and last keys", "window", sparsity, FIRST_ROW)
    yield Case("evicting", "last keys", "window", sparsity)


def evicting_by_score(resident: float) -> Iterator[Case]:
    """What language models do."""
    sparsity = 1 - resident
    yield Case("evicting", "H2O, decay .95", "h2o", sparsity, {"decay": 0.95})
    yield Case("evicting", "TOVA", "tova", sparsity)
    yield Case("evicting", "ALISA", "alisa", sparsity)


def cases(grid_budget: dict[float, int], index: Options, stencil: Options) -> Iterator[Case]:
    """All configurations, the most interesting first."""
    yield from reading(0.9, grid_budget[0.9], index, stencil)
    yield Case("formats", "dense, int8", "dense", format="int8")
    yield Case("formats", "indexed at .9, int8", "indexed", 0.9, index, "int8")
    for resident in RESIDENT[:2]:
        yield from evicting(resident, index)
    yield from reading(0.95, grid_budget[0.95], index, stencil)
    for resident in RESIDENT[:2]:
        yield from evicting_by_score(resident)
    yield from reading(0.8, grid_budget[0.8], index, stencil)
    for resident in RESIDENT[2:]:
        yield from evicting(resident, index)
        yield from evicting_by_score(resident)


class Quality:
    """Losses of one model on one set of pictures."""

    def __init__(self, model: VisualModel, pictures: Pictures, name: str) -> None:
        self.model, self.pictures, self.name = model, pictures, name
        self.heads = Heads(model.shape.layers, model.shape.kv_heads)
        self.dense, self.dense_reads = self._loss(Case("", "dense", "dense"))

    def row(self, case: Case) -> dict[str, Any]:
        """Loss against dense, what is read and what is stored."""
        loss, reads = self._loss(case)
        change = (loss - self.dense).mean(1)
        return {
            "group": case.group,
            "name": case.name,
            "policy": case.policy,
            "sparsity": case.sparsity,
            "options": _named(case.options),
            "format": case.format,
            "loss": float(change.mean()),
            "loss_se": float(change.std() / len(change) ** 0.5),
            "keys_read": reads,
            **shares(self._policy(case), case.format, self.model.shape.head_dim),
            "pictures": len(self.pictures),
            "dense_nll": float(self.dense.mean()),
            "model": self.name,
        }

    def _policy(self, case: Case) -> ReadPolicy:
        return policies.build(
            case.policy, self.model.grid, self.heads, case.sparsity, case.options, self.name
        )

    def _loss(self, case: Case) -> tuple[Tensor, float]:
        format = None if case.format == "bf16" else FORMATS[case.format]
        return policy_loss(self.model, self.pictures, self._policy(case), format)


def _named(options: Options) -> Options:
    """Options without the folder of files."""
    return {k: Path(v).name if k == "file" else v for k, v in options.items()}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="mini", help="preset or folder of weights")
    parser.add_argument("--name", help="model name that the calibration files bear")
    parser.add_argument("--pictures", type=Path, required=True, help="held-out pictures")
    parser.add_argument("--files", type=Path, default=FOLDER, help="folder of calibration files")
    parser.add_argument("--count", type=int, default=24, help="pictures used")
    parser.add_argument(
        "--resume", action="store_true", help="keep the rows of an output that was cut short"
    )
    parser.add_argument("--limit", type=int, help="configurations measured, of the first ones")
    parser.add_argument("--backend", default="native", choices=("native", "reference"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("-o", "--output", type=Path, default=RESULTS / "policies-mini.json")
    return parser.parse_args()


def main() -> None:
    args = parse()
    torch.set_num_threads(args.threads)
    model = load_model(args.model, LoadOptions(backend=args.backend))
    quality = Quality(model, Pictures.load(args.pictures)[: args.count], args.name or model.name)
    print(f"dense: {float(quality.dense.mean()):.4f} nats/token", flush=True)
    index = {"file": str(args.files / index_path(quality.name).name)}
    stencil = {"file": str(args.files / stencil_path(quality.name).name)}
    budgets = {s: read_budget(model.grid, s) for s in SPARSITIES}
    rows: list[dict[str, Any]] = []
    if args.resume and args.output.is_file():
        rows = json.loads(args.output.read_text(encoding="utf-8"))["rows"]
    done = {(r["group"], r["name"], r["sparsity"], str(r["options"])) for r in rows}
    for case in list(cases(budgets, index, stencil))[: args.limit]:
        if (case.group, case.name, case.sparsity, str(_named(case.options))) in done:
            continue
        rows.append(quality.row(case))
        print(json.dumps(rows[-1]), flush=True)
        command = " ".join(["python -m benchmarks.quality", *sys.argv[1:]])
        write(args.output, results(args.output.name, rows, command=command))


if __name__ == "__main__":
    main()
