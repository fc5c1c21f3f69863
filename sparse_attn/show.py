"""A picture of what a policy reads and stores: the grid of visual keys, for some queries and heads.

matplotlib is imported only when something is drawn: it is slow to load.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from jaxtyping import Int64
from torch import Tensor

from sparse_attn.geometry import Grid
from sparse_attn.index import best
from sparse_attn.policies.indexed import Indexed
from sparse_attn.policy import Batch, ReadPolicy

FUTURE, DEAD, STORED, READ, QUERY = range(5)
COLORS = ("#ffffff", "#d9d9d9", "#9ecae1", "#08519c", "#e6550d")
NAMES = ("not drawn yet", "evicted", "stored", "read", "the query's own")


class ShowError(RuntimeError):
    """Nothing can be drawn here; the message says what to install or change."""


def policy_picture(
    policy: ReadPolicy,
    path: Path,
    positions: Sequence[int] | None = None,
    heads: Sequence[tuple[int, int]] | None = None,
    title: str | None = None,
) -> None:
    """Write a PNG with one row of grids per (layer, KV head) and one column per query position.

    positions: visual positions of queries; by default three, spread over the picture.
    heads: (layer, KV head) pairs; by default the first head of the first and the last layer, which
        are one where a policy treats all heads alike.
    What depends on an image (diagonal, eviction by scores, picks by an index) is shown for random
    attention weights, and the title says so. Raises ShowError without matplotlib, ValueError for
    positions or heads that are not there.
    """
    positions = _default_positions(policy.grid) if positions is None else positions
    heads = _default_heads(policy) if heads is None else heads
    _check(policy, positions, heads)
    cells = [[cell_states(policy, layer, head, t) for t in positions] for layer, head in heads]
    _draw(policy, path, positions, heads, cells, _title(policy, title))


def cell_states(
    policy: ReadPolicy, layer: int, head: int, t: int
) -> Int64[Tensor, "height stride"]:
    """What is true of each visual key for the query at position t: one of the states above."""
    state = example_state(policy, layer, t)
    read = policy.reads(layer, state, one(t))[0, head]
    stored = torch.zeros(policy.grid.tokens, dtype=torch.bool)
    stored[policy.resident(layer, head, t, state, 0)] = True
    cells = torch.full((policy.grid.tokens,), DEAD)
    cells[t + 1 :] = FUTURE
    cells[stored] = STORED
    cells[read] = READ
    cells[t] = QUERY
    return cells.view(policy.grid.height, policy.grid.stride)


def example_state(policy: ReadPolicy, layer: int, t: int) -> Tensor | None:
    """A state the policy may have at position t, learnt from weights that favour neighbours."""
    state = policy.new_state(1, torch.device("cpu"))
    if isinstance(policy, Indexed) and state is not None:
        _pick_examples(policy, layer, t, state)
    elif policy.learns:
        for step in range(t):
            weights = example_weights(policy.grid, policy.heads.kv_heads, step)
            policy.update(layer, state, one(step), weights * policy.reads(layer, state, one(step)))
    return state


def example_weights(grid: Grid, heads: int, t: int) -> Tensor:
    """Random attention that falls off with the distance in the picture: [1, H, N]."""
    keys = torch.arange(grid.tokens)
    away = (keys // grid.stride - t // grid.stride).abs()
    aside = (keys % grid.stride - t % grid.stride).abs()
    noise = torch.rand(1, heads, grid.tokens, generator=torch.Generator().manual_seed(t))
    return noise * torch.exp(-0.35 * (away + aside))


def one(t: int) -> Batch:
    """A batch of one sequence without a prompt, in row 0 of the state."""
    zero, at = torch.zeros(1, dtype=torch.int64), torch.tensor([t], dtype=torch.int32)
    return Batch(zero, at, torch.zeros_like(at), zero)


def _pick_examples(policy: Indexed, layer: int, t: int, state: Tensor) -> None:
    """The keys that `example_weights` would pick in place of an index."""
    weights = example_weights(policy.grid, policy.heads.kv_heads, t)[0]
    for head in range(policy.heads.kv_heads):
        first = head - head % policy.share
        keys = [j for j in policy.resident(layer, head, t) if j <= t - policy.recent]
        if keys:
            at = torch.tensor(keys)
            chosen, _ = best(weights[first, at], at, policy.picks)
            state[0, head, : len(chosen), 0] = (t - chosen).to(state.dtype)


def _default_positions(grid: Grid) -> list[int]:
    rows = sorted({grid.height // 6, grid.height // 2, grid.height - 1})
    return [grid.position(row, grid.width // 2) for row in rows]


def _default_heads(policy: ReadPolicy) -> list[tuple[int, int]]:
    pairs = [(0, 0), (policy.heads.layers - 1, policy.heads.kv_heads - 1)]
    last = policy.grid.position(policy.grid.height - 1, policy.grid.width // 2)
    first, other = (cell_states(policy, layer, head, last) for layer, head in pairs)
    return pairs[:1] if policy.learns or torch.equal(first, other) else pairs


def _check(policy: ReadPolicy, positions: Sequence[int], heads: Sequence[tuple[int, int]]) -> None:
    for t in positions:
        if not 0 <= t < policy.grid.tokens:
            raise ValueError(
                f"position {t} is not on a {policy.grid} grid (0..{policy.grid.tokens - 1})"
            )
    for layer, head in heads:
        if not (0 <= layer < policy.heads.layers and 0 <= head < policy.heads.kv_heads):
            raise ValueError(
                f"there is no head {head} of layer {layer}; the model has {policy.heads.layers} "
                f"layers of {policy.heads.kv_heads} KV heads"
            )
    if not positions or not heads:
        raise ValueError("name at least one position and one head")


def _title(policy: ReadPolicy, title: str | None) -> str:
    title = title or f"{policy.name}, sparsity {policy.sparsity:g}, {policy.grid}"
    example = policy.learns or isinstance(policy, Indexed)
    return title + ("; an example: it depends on the image" if example else "")


def _draw(
    policy: ReadPolicy,
    path: Path,
    positions: Sequence[int],
    heads: Sequence[tuple[int, int]],
    cells: list[list[Tensor]],
    title: str,
) -> None:
    try:
        from matplotlib.colors import ListedColormap
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ShowError(f"pictures need matplotlib ({error}): pip install matplotlib") from error
    columns, rows = len(positions), len(heads)
    figure = Figure(figsize=(2.4 * columns + 0.4, 2.6 * rows + 0.9), dpi=80, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    for i, (layer, head) in enumerate(heads):
        for j, t in enumerate(positions):
            axis = axes[i][j]
            axis.pcolormesh(
                cells[i][j].numpy(), cmap=ListedColormap(COLORS), vmin=0, vmax=len(COLORS),
                edgecolors="#eeeeee", linewidth=0.3,
            )  # fmt: skip
            axis.invert_yaxis()
            axis.set_aspect("equal")
            axis.set_xticks([])
            axis.set_yticks([])
            place = f"row {policy.grid.row(t)}, column {policy.grid.column(t)}"
            axis.set_title(f"layer {layer}, head {head}\n{place}", fontsize=8)
    handles = [
        Patch(facecolor=c, edgecolor="#999999", label=n) for c, n in zip(COLORS, NAMES, strict=True)
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=5, fontsize=7, frameon=False)
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, format="png")
