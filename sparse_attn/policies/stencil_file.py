"""The YAML file of a calibrated stencil.

kind: stencil
model: mini
grid: {height: 24, width: 24, row_tokens: 0}
layers: 12
kv_heads: 6
anchors: 24
stencils:
  0.9:                              # sparsity: layers of heads
    - ["0:0..9 1:-2..3,7", "0:0"]   # dr:dc ranges; (0, 0) is the query's own key
"""

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

import yaml

from sparse_attn.geometry import Grid
from sparse_attn.policy import Heads

Offsets = tuple[tuple[int, int], ...]


class StencilError(ValueError):
    """A stencil file that cannot be read or belongs to something else."""


@dataclass(frozen=True)
class FittedStencil:
    """The stencil of one sparsity: leading keys that are read anyway, and offsets (dr, dc) of each
    layer and head."""

    anchors: int
    layers: tuple[tuple[Offsets, ...], ...]


@dataclass(frozen=True)
class StencilFile:
    """What the file says, by sparsity."""

    model: str
    grid: Grid
    layers: int
    kv_heads: int
    stencils: Mapping[float, FittedStencil]

    @classmethod
    def load(cls, path: Path) -> Self:
        """Raises StencilError naming the file and what is wrong with it."""
        try:
            values = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise StencilError(f"cannot read the stencil file {path}: {error}") from error
        try:
            return cls._parse(values)
        except (ValueError, TypeError, AttributeError) as error:
            raise StencilError(f"{path}: {error}") from error

    @classmethod
    def _parse(cls, values: Any) -> Self:
        if not isinstance(values, dict) or values.pop("kind", None) != "stencil":
            raise StencilError("not a stencil file (it needs `kind: stencil`)")
        known = [f.name for f in fields(cls)]
        for key in values:
            if key not in known:
                near = difflib.get_close_matches(str(key), known, 1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise StencilError(f"unknown key {key!r}{hint}")
        missing = [key for key in known if key not in values]
        if missing:
            raise StencilError(f"the key {missing[0]!r} is missing")
        stencils = {float(s): _fitted(fit) for s, fit in values.pop("stencils").items()}
        file = cls(grid=Grid(**values.pop("grid")), stencils=stencils, **values)
        file._check_shapes()
        return file

    def _check_shapes(self) -> None:
        for sparsity, fitted in self.stencils.items():
            layers = fitted.layers
            shape = (len(layers), {len(layer) for layer in layers})
            if shape != (self.layers, {self.kv_heads}):
                raise StencilError(
                    f"sparsity {sparsity} has {shape[0]} layers of {sorted(shape[1])} heads, "
                    f"not {self.layers} of {self.kv_heads}"
                )
            for offsets in (head for layer in layers for head in layer):
                self._check_offsets(offsets)

    def _check_offsets(self, offsets: Offsets) -> None:
        reach = self.grid.stride
        for dr, dc in offsets:
            if not (0 <= dr < self.grid.height and abs(dc) < reach and dr * reach + dc >= 0):
                raise StencilError(f"offset ({dr}, {dc}) is not behind the query on {self.grid}")
        if len(set(offsets)) < len(offsets):
            raise StencilError("a head lists an offset twice")

    def check(self, model: str | None, grid: Grid, heads: Heads) -> None:
        """Raises StencilError if the file was made for something else."""
        mine = (self.model, str(self.grid), self.layers, self.kv_heads)
        wanted = (model, str(grid), heads.layers, heads.kv_heads)
        for what, ours, theirs in zip(
            ("model", "grid", "layers", "KV heads"), mine, wanted, strict=True
        ):
            if ours != theirs:
                raise StencilError(
                    f"this stencil file is for {what} {ours}, the model in use has {theirs}; "
                    "calibrate one for it"
                )

    def of(self, sparsity: float) -> FittedStencil:
        """Raises StencilError if the file has no stencil of that sparsity."""
        for known, stencil in self.stencils.items():
            if abs(known - sparsity) < 1e-9:
                return stencil
        have = ", ".join(f"{s:g}" for s in sorted(self.stencils))
        raise StencilError(f"the stencil file has sparsities {have}, not {sparsity:g}")

    def save(self, path: Path) -> None:
        """Write the file; `load` gives the same back."""
        head = {"kind": "stencil"} | asdict(self)
        head["stencils"] = {
            s: {
                "anchors": fitted.anchors,
                "layers": [[format_offsets(h) for h in layer] for layer in fitted.layers],
            }
            for s, fitted in self.stencils.items()
        }
        text = yaml.safe_dump(head, sort_keys=False, width=10_000)
        path.write_text(text, encoding="utf-8")


def _fitted(values: Any) -> FittedStencil:
    if not isinstance(values, dict) or set(values) != {"anchors", "layers"}:
        raise StencilError("a stencil needs `anchors` and `layers`, and nothing else")
    layers = (tuple(parse_offsets(head) for head in layer) for layer in values["layers"])
    return FittedStencil(int(values["anchors"]), tuple(layers))


def parse_offsets(text: str) -> Offsets:
    """(dr, dc) of a text such as "0:0..9 1:-2..3,7"; an empty text is a head that reads none."""
    result: list[tuple[int, int]] = []
    for part in text.split():
        match = re.fullmatch(r"(\d+):(-?\d+(?:\.\.-?\d+)?(?:,-?\d+(?:\.\.-?\d+)?)*)", part)
        if match is None:
            raise StencilError(f"cannot read the offsets {part!r}; write them as 1:-2..3,7")
        for bounds in match[2].split(","):
            low, _, high = bounds.partition("..")
            result += [(int(match[1]), dc) for dc in range(int(low), int(high or low) + 1)]
    return tuple(result)


def format_offsets(offsets: Iterable[tuple[int, int]]) -> str:
    """The inverse of `parse_offsets`, in ascending order."""
    rows: dict[int, list[int]] = {}
    for dr, dc in sorted(offsets):
        rows.setdefault(dr, []).append(dc)
    return " ".join(f"{dr}:{','.join(_ranges(columns))}" for dr, columns in rows.items())


def _ranges(values: list[int]) -> Iterable[str]:
    start = 0
    for i in range(1, len(values) + 1):
        if i == len(values) or values[i] != values[i - 1] + 1:
            low, high = values[start], values[i - 1]
            yield f"{low}" if low == high else f"{low}..{high}"
            start = i
