"""Which worth of a key gives the best stencil: attention mass, times |v|, or times |v - o|?

    python -m benchmarks.worth --pictures FIT.safetensors --held-out OTHERS.safetensors

Writes benchmarks/results/calibrate-worth-mini.json. Rows of earlier code stay, with its commit.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.results_writer import RESULTS, commit, results, write
from engine.calibrate import Weigh, observe, stencil_file
from engine.compare import Comparison
from engine.models.options import LoadOptions
from engine.models.presets import load_model
from engine.policy_files import policy_of
from engine.teacher import Pictures

FILE = RESULTS / "calibrate-worth-mini.json"
WORTHS: tuple[Weigh, ...] = ("mass", "value", "output")
SPARSITIES = (0.8, 0.9, 0.95, 0.97)


def rows(fit: Pictures, held_out: Pictures) -> Iterator[dict[str, Any]]:
    """One per worth and sparsity, on the same held-out pictures."""
    model = load_model("mini", LoadOptions(backend="native"))
    comparison = Comparison(model, held_out)
    for worth in WORTHS:
        statistics = observe(model, model.grid, fit, 4, worth)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "fitted.yaml"
            stencil_file(model, model.grid, statistics, None, SPARSITIES).save(path)
            for sparsity in SPARSITIES:
                policy = policy_of(model, "stencil", sparsity, {"file": str(path)})
                head = {"worth": worth, "heads_share_by": "attention mass", "sparsity": sparsity}
                yield {**head, **comparison.row(policy), "fitted_on": len(fit), "code": commit()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pictures", type=Path, required=True, help="finished pictures to fit on")
    parser.add_argument("--held-out", type=Path, required=True, help="others, to check on")
    parser.add_argument("--fit-count", type=int, default=24)
    parser.add_argument("--held-out-count", type=int, default=8)
    args = parser.parse_args()
    torch.set_num_threads(1)
    fit = Pictures.load(args.pictures)[: args.fit_count]
    held_out = Pictures.load(args.held_out)[: args.held_out_count]
    old = json.loads(FILE.read_text(encoding="utf-8"))["rows"] if FILE.is_file() else []
    kept = [row for row in old if row["heads_share_by"] != "attention mass"]
    command = "python -m benchmarks.worth --pictures FILE --held-out FILE"
    write(FILE, results(FILE.name, [*rows(fit, held_out), *kept], command=command))


if __name__ == "__main__":
    main()
