"""`indexed`: per head and query the keys that a small index ranks highest."""

from collections import Counter
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from sparse_attn.geometry import Grid
from sparse_attn.index import BITS, IndexLayer, Pick
from sparse_attn.policies.index_file import IndexFile, IndexFileError
from sparse_attn.policy import UNUSED, Heads, ReadPlan, ReadPolicy

EVERYTHING = 1.0


class Indexed(ReadPolicy):
    """Read set: the last `recent` keys and, of all other resident keys, those that the index ranks
    highest for this query; n = ceil((1 - s) * N) in all. Ties go to the newest key.
    Resident set: the anchors (which are read only if picked) and a window per head. A key dies
    when it leaves its head's window.

    sparsity: share of the N visual keys that a head does not read.
    file: safetensors file of a calibrated index (`index_file`).
    dims: directions of the index, 4 bits each: 8 (4 bytes a key) or 16 (8 bytes).
    resident: share of the N visual keys that stay, on average over the heads of the model; the
        windows are shared out so that the least attention mass is lost. 1: everything.
    anchors: leading keys that stay whatever the window, or "first_row".
    rerank: pick twice as many by the index, and of these the best by their exact scores.
    share: neighbouring KV heads that read the same keys.
    recent: keys read without being picked, counted from the query's own.
    model: name of the model, which must be the file's.

    Raises ValueError for budgets that cannot be, IndexFileError (a ValueError) for a file of
    something else.
    """

    name = "indexed"

    def __init__(
        self,
        grid: Grid,
        heads: Heads,
        sparsity: float,
        file: str | IndexFile,
        dims: int = 8,
        resident: float = EVERYTHING,
        anchors: int | str = 0,
        rerank: bool = False,
        share: int = 1,
        recent: int = 1,
        model: str | None = None,
    ) -> None:
        super().__init__(grid, heads, sparsity, anchors)
        self.calibrated = file if isinstance(file, IndexFile) else IndexFile.load(Path(file))
        self.calibrated.check(model, grid, heads)
        self.dims, self.rerank, self.share, self.recent = dims, rerank, share, recent
        self._check(resident)
        self.rings = self._rings(resident)
        self._heads_by_ring = Counter(ring for layer in self.rings for ring in layer)
        self._layers: dict[tuple[int, torch.device], IndexLayer] = {}
        self._windows: dict[torch.device, Tensor] = {}

    def of_heads(self, first: int, count: int) -> Self:
        """Raises ValueError if heads that share their picks would be torn apart."""
        if first % self.share or count % self.share:
            raise ValueError(f"share={self.share} does not divide the {count} KV heads of a rank")
        part = super().of_heads(first, count)
        part.calibrated = self.calibrated.of_heads(first, count)
        part.rings = [layer[first : first + count] for layer in self.rings]
        part._heads_by_ring = Counter(ring for layer in part.rings for ring in layer)
        part._layers, part._windows = {}, {}
        return part

    def _check(self, resident: float) -> None:
        if self.dims % 8 or not 8 <= self.dims <= self.calibrated.dims:
            raise IndexFileError(
                f"dims must be a multiple of 8 up to the {self.calibrated.dims} of the index file, "
                f"got {self.dims}"
            )
        if not 1 <= self.recent <= self.budget:
            raise ValueError(f"recent must lie in 1..{self.budget}, got {self.recent}")
        if self.share < 1 or self.heads.kv_heads % self.share:
            raise ValueError(f"{self.heads.kv_heads} KV heads cannot share by {self.share}")
        stored = int(resident * self.grid.tokens) - self.anchors
        if not 0 < resident <= 1 or stored < self.smallest:
            raise ValueError(
                f"resident must lie in (0, 1] and leave at least {self.smallest} keys beside the "
                f"{self.anchors} anchors; {resident} leaves {stored}"
            )

    @property
    def smallest(self) -> int:
        """Smallest window of a head: what is read unpicked, and a key to pick from."""
        return self.recent + 1

    def _rings(self, resident: float) -> list[tuple[int, ...]]:
        most = self.grid.tokens - self.anchors
        if resident == EVERYTHING:
            return [(most,) * self.heads.kv_heads] * self.heads.layers
        stored = int(resident * self.grid.tokens) - self.anchors
        first_row = self.anchors >= self.grid.stride
        windows = self.calibrated.windows(stored, self.share, self.smallest, first_row)
        return [tuple(min(w, most) for w in layer) for layer in windows]

    @property
    def picks(self) -> int:
        """Keys picked by the index for one query."""
        return self.budget - self.recent

    @property
    def candidates(self) -> int:
        """Keys whose exact scores are computed before the pick; 0 without re-ranking."""
        return 2 * self.picks if self.rerank else 0

    @property
    def index_bytes(self) -> int:
        return self.dims * BITS // 8

    def pick(self, layer: int, device: torch.device, scale: float) -> Pick:
        key = (layer, device)
        if key not in self._layers:
            self._layers[key] = self.calibrated.layer(layer, self.dims).to(device)
        return Pick(self._layers[key], self.picks, self.candidates, self.share, scale)

    def ring(self, layer: int) -> tuple[int, ...]:
        return self.rings[layer]

    def new_state(self, rows: int, device: torch.device) -> Tensor:
        """Offsets picked for the step and layer at hand, int16 [rows, H, picks, 2]."""
        state = torch.zeros(
            (rows, self.heads.kv_heads, self.picks, 2), dtype=torch.int16, device=device
        )
        state[..., 0] = UNUSED
        return state

    def plan(self, layer: int, state: Tensor | None, device: torch.device) -> ReadPlan:
        if state is None:
            raise ValueError("indexed needs its state: pass what new_state returned")
        if device not in self._windows:
            windows = torch.full((self.heads.kv_heads,), self.recent, dtype=torch.int32)
            self._windows[device] = windows.to(device)
        return ReadPlan(self._windows[device], state, 0, self.grid.stride)

    def read_total(self, t: int) -> int:
        return sum(n * min(self.budget, stored) for stored, n in self._stored(t))

    def extra_read_bytes(self, t: int, entry_bytes: int) -> int:
        """The index of every stored key, and the keys of the candidates."""
        per_key = [
            n * (stored * self.index_bytes + min(stored, self.candidates) * entry_bytes // 2)
            for stored, n in self._stored(t)
        ]
        return sum(per_key)

    def _stored(self, t: int) -> list[tuple[int, int]]:
        """(keys stored for the query at position t, heads that store so many)."""
        return [(min(t + 1, self.anchors + ring), n) for ring, n in self._heads_by_ring.items()]

    def read_bound(self) -> int:
        return self.budget
