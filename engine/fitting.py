"""Calibration from prompts to a checked policy file, in steps that a killed run need not repeat.

The model draws pictures of the prompts; attention on most of them gives the policy; the others say
what it costs, beside policies that need no calibration. Everything follows from the prompts and the
seed, so the same call writes the same files.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from engine.calibrate import INDEX_DIMS, Weigh, index_file, observe, stencil_file
from engine.compare import Comparison
from engine.models.base import VisualModel
from engine.policy_files import policy_of
from engine.teacher import Pictures
from sparse_attn.calibrate.statistics import LayerStatistics

Kind = Literal["stencil", "indexed"]
Told = Callable[[str, int, int], None]
"""(what, done, in all)."""


@dataclass(frozen=True, slots=True)
class Fit:
    """What is wanted. rows: row bound R of every head. resident: share of the image that may stay,
    on average over the heads. held_out: pictures that only check."""

    kind: Kind
    sparsities: tuple[float, ...]
    rows: int | None = None
    resident: float | None = None
    weigh: Weigh = "value"
    dims: int = 8
    held_out: int = 8

    def __post_init__(self) -> None:
        if self.rows is not None and self.resident is not None:
            raise ValueError("give a row bound or a resident fraction, not both")
        if self.rows is not None and self.rows < 1:
            raise ValueError(f"a row bound must be at least 1, got {self.rows}")
        if self.resident is not None and not 0 < self.resident <= 1:
            raise ValueError(f"a resident fraction must lie in (0, 1], got {self.resident:g}")
        if self.kind == "indexed" and self.rows is not None:
            raise ValueError("indexed has no row bound; its windows come from a resident fraction")
        for sparsity in self.sparsities:
            if not 0 < sparsity < 1:
                raise ValueError(f"sparsity must lie in (0, 1), got {sparsity:g}")


def fit(
    model: VisualModel, pictures: Pictures, wanted: Fit, path: Path, told: Told
) -> list[dict[str, Any]]:
    """Write the policy file at `path` (and, for indexed, the safetensors beside it) and
    PATH.check.json; returns its rows. Raises ValueError for budgets that cannot be.
    """
    if len(pictures) <= wanted.held_out:
        raise ValueError(
            f"{len(pictures)} pictures leave none to calibrate on beside {wanted.held_out} held out"
        )
    split = len(pictures) - wanted.held_out
    statistics = observe(
        model, model.grid, pictures[:split], 4, wanted.weigh, lambda n, of: told("watching", n, of)
    )
    save(model, statistics, wanted, path)
    return check(model, pictures[split:], wanted, path, told)


def save(model: VisualModel, statistics: list[LayerStatistics], wanted: Fit, path: Path) -> None:
    """Write the policy file."""
    if wanted.kind == "stencil":
        file = stencil_file(
            model, model.grid, statistics, wanted.rows, wanted.sparsities, wanted.resident
        )
        file.save(path)
        return
    index_file(model, model.grid, statistics, max(wanted.dims, INDEX_DIMS)).save(tensors_of(path))
    options: dict[str, Any] = {"dims": wanted.dims}
    if wanted.resident is not None:
        options |= {"resident": wanted.resident, "anchors": "first_row"}
    head = {"kind": "indexed", "model": model.name, "file": tensors_of(path).name}
    values = head | {"sparsities": list(wanted.sparsities), "options": options}
    path.write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")


def tensors_of(path: Path) -> Path:
    """Where the tensors of an indexed policy file lie."""
    return path.with_suffix(".safetensors")


def cases(wanted: Fit, path: Path) -> Iterator[tuple[str, str, float, dict[str, Any]]]:
    """(name, policy, sparsity, options): what was fitted, and what it must beat."""
    yield "dense", "dense", 0.0, {}
    for sparsity in wanted.sparsities:
        yield f"{wanted.kind}, calibrated", wanted.kind, sparsity, {"file": str(path)}
    for sparsity in wanted.sparsities:
        for name in ("window", "streaming", "diagonal"):
            yield name, name, sparsity, {}
        yield "stencil, built in", "stencil", sparsity, {}


def check(
    model: VisualModel, held_out: Pictures, wanted: Fit, path: Path, told: Told
) -> list[dict[str, Any]]:
    """Loss on held-out pictures against bytes; what is in PATH.check.json already is kept."""
    target = path.with_suffix(".check.json")
    key = {
        "fit": asdict(wanted) | {"sparsities": list(wanted.sparsities)},
        "pictures": len(held_out),
    }
    key |= {"model": model.name, "policy": path.read_text(encoding="utf-8")}
    rows: list[dict[str, Any]] = _kept(target, key)
    listed, comparison = list(cases(wanted, path)), None
    for name, policy, sparsity, options in listed[len(rows) :]:
        try:
            built = policy_of(model, policy, sparsity, options)
        except ValueError as error:
            rows.append({"name": name, "policy": policy, "sparsity": sparsity, "why": str(error)})
            continue
        comparison = comparison or Comparison(model, held_out)
        rows.append({"name": name, "policy": policy, "sparsity": sparsity, **comparison.row(built)})
        told("checking", len(rows), len(listed))
        target.write_text(json.dumps({"key": key, "rows": rows}, indent=1) + "\n")
    return rows


def _kept(target: Path, key: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of an earlier run of the very same check."""
    if not target.is_file():
        return []
    try:
        found = json.loads(target.read_text(encoding="utf-8"))
    except ValueError:
        return []
    return list(found["rows"]) if found.get("key") == key else []
