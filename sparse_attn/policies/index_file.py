"""The safetensors file of a calibrated index."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from sparse_attn.calibrate.windows import shared_windows
from sparse_attn.geometry import Grid
from sparse_attn.index import IndexLayer, row_pairs
from sparse_attn.policy import Heads

_TENSORS = ("mean", "basis", "step", "cos", "sin", "lost", "lost_beside_first_row")


class IndexFileError(ValueError):
    """An index file that cannot be read or belongs to something else."""


@dataclass(frozen=True, eq=False)
class IndexFile:
    """What the file says.

    mean, basis, step: [L, H, D], [L, H, D, r], [L, H, r], see `IndexLayer`.
    cos, sin: [N, D/2], rotary angles of the visual positions.
    lost: [L, H, N + 1], attention mass per query that falls on keys outside a window of w keys;
        lost_beside_first_row: the same of the keys below the first row.
    """

    model: str
    grid: Grid
    mean: Float[Tensor, "L H D"]
    basis: Float[Tensor, "L H D r"]
    step: Float[Tensor, "L H r"]
    cos: Float[Tensor, "N D2"]
    sin: Float[Tensor, "N D2"]
    lost: Float[Tensor, "L H W"]
    lost_beside_first_row: Float[Tensor, "L H W"]

    @classmethod
    def load(cls, path: Path) -> Self:
        """Raises IndexFileError naming the file and what is wrong with it."""
        try:
            with safe_open(path, "pt") as file:
                head = file.metadata() or {}
                missing = [n for n in _TENSORS if n not in file.keys()]  # noqa: SIM118
                if missing or head.get("kind") != "index":
                    raise IndexFileError(
                        f"{path} is not an index file: it lacks {missing or 'kind'}"
                    )
                tensors = {name: file.get_tensor(name).float() for name in _TENSORS}
        except (OSError, SafetensorError) as error:
            raise IndexFileError(
                f"cannot read the index file {path}: {error}; make one with "
                "`bishop calibrate --kind indexed`"
            ) from error
        file_ = cls(head["model"], Grid(**json.loads(head["grid"])), **tensors)
        file_._check_shapes(path)
        return file_

    def of_heads(self, first: int, count: int) -> Self:
        """The part of some KV heads."""
        names = ("mean", "basis", "step", "lost", "lost_beside_first_row")
        part = {name: getattr(self, name)[:, first : first + count] for name in names}
        return replace(self, **part)

    def _check_shapes(self, path: Path) -> None:
        layers, heads, dim, dims = self.basis.shape
        tokens = self.grid.tokens
        wanted = {
            "mean": (layers, heads, dim), "step": (layers, heads, dims),
            "cos": (tokens, dim // 2), "sin": (tokens, dim // 2),
            "lost": (layers, heads, tokens + 1),
            "lost_beside_first_row": (layers, heads, tokens + 1),
        }  # fmt: skip
        for name, shape in wanted.items():
            if tuple(getattr(self, name).shape) != shape:
                raise IndexFileError(
                    f"{path}: {name} has shape {tuple(getattr(self, name).shape)}, not {shape}"
                )

    def save(self, path: Path) -> None:
        grid = {k: getattr(self.grid, k) for k in ("height", "width", "row_tokens")}
        head = {"kind": "index", "model": self.model, "grid": json.dumps(grid)}
        tensors = {name: getattr(self, name).float().contiguous() for name in _TENSORS}
        save_file(tensors, path, head)
        _sort_header(path)

    def check(self, model: str | None, grid: Grid, heads: Heads) -> None:
        """Raises IndexFileError if the file was made for something else."""
        mine = (self.model, str(self.grid), *self.basis.shape[:2])
        wanted = (model, str(grid), heads.layers, heads.kv_heads)
        for what, ours, theirs in zip(
            ("model", "grid", "layers", "KV heads"), mine, wanted, strict=True
        ):
            if ours != theirs:
                raise IndexFileError(
                    f"this index file is for {what} {ours}, the model in use has {theirs}; "
                    "calibrate one for it"
                )

    @property
    def dims(self) -> int:
        return self.basis.shape[3]

    def layer(self, layer: int, dims: int) -> IndexLayer:
        """The index of one layer on its first `dims` directions."""
        basis = self.basis[layer, :, :, :dims].contiguous()
        step = self.step[layer, :, :dims].contiguous()
        pairs = row_pairs(self.cos, self.sin, self.grid.stride)
        return IndexLayer(self.mean[layer], basis, step, self.cos, self.sin, pairs)

    def windows(
        self, resident: int, share: int, smallest: int, first_row: bool
    ) -> list[tuple[int, ...]]:
        """Window of each layer and head, `resident` keys on average over all heads, anchors left
        out; `share` neighbouring heads get the same."""
        lost = self.lost_beside_first_row if first_row else self.lost
        return shared_windows(lost, resident, share, smallest)


def _sort_header(path: Path) -> None:
    """safetensors writes its metadata in an order that changes from run to run; the same index
    must give the same bytes."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    text = json.dumps(header, sort_keys=True, separators=(",", ":")).encode().ljust(size)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])
