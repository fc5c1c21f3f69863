"""Plots as PNG bytes. matplotlib is imported only when something is drawn: it is slow to load."""

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.figure import Figure
    from torch import Tensor

INK = ("#08519c", "#e6550d", "#31a354", "#756bb1", "#636363", "#de2d26", "#3182bd", "#fdae6b")


def new(width: float, height: float) -> "Figure":
    """An empty figure; inches at 80 dots."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=80, layout="constrained")


def png(figure: "Figure", colors: int = 96) -> bytes:
    """The figure with few colours, which makes it a third as large."""
    from PIL import Image

    raw, small = io.BytesIO(), io.BytesIO()
    figure.savefig(raw, format="png")
    raw.seek(0)
    picture = Image.open(raw).convert("RGB")
    picture.quantize(colors, dither=Image.Dither.NONE).save(small, "PNG", optimize=True)
    return small.getvalue()


def stacked(names: Sequence[Any], parts: Mapping[str, Sequence[float]], x: str, y: str) -> bytes:
    """Stacked bars, one per name."""
    figure = new(7, 2.8)
    axis = figure.subplots()
    low = [0.0] * len(names)
    for color, (label, values) in zip(INK, parts.items(), strict=False):
        axis.bar(range(len(names)), values, bottom=low, label=label, color=color, width=0.8)
        low = [a + b for a, b in zip(low, values, strict=True)]
    axis.set_xticks(range(len(names)), [str(n) for n in names])
    axis.set_xlabel(x)
    axis.set_ylabel(y)
    axis.legend(loc="upper left", fontsize=8, ncols=len(parts))
    axis.set_ylim(0, 1.2 * max(low))
    axis.set_yticks([tick for tick in axis.get_yticks() if tick <= max(low) + 1e-6])
    return png(figure)


def lines(
    x: Sequence[float], curves: Mapping[str, Sequence[float]], x_label: str, y_label: str
) -> bytes:
    """One line per curve."""
    figure = new(7, 2.8)
    axis = figure.subplots()
    for color, (label, values) in zip(INK, curves.items(), strict=False):
        dashed = "--" if "shuffled" in label else "-"
        axis.plot(range(len(x)), values, dashed, marker="o", markersize=3, label=label, color=color)
    axis.set_xticks(range(len(x)), [f"{v:g}" for v in x])
    axis.set_xlabel(x_label)
    axis.set_ylabel(y_label)
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    return png(figure)


def pareto(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """Loss (nats a token) over what is read and over what stays; one line per name."""
    figure = new(9, 3.2)
    for axis, x in zip(figure.subplots(1, 2, sharey=True), ("read", "resident"), strict=True):
        for color, name in zip(INK, dict.fromkeys(row["name"] for row in rows), strict=False):
            own = sorted((r for r in rows if r["name"] == name), key=lambda r: r[f"{x}_share"])
            axis.errorbar(
                [r[f"{x}_share"] for r in own], [max(r["loss"], 1e-4) for r in own],
                yerr=[r["loss_se"] for r in own], marker="o", markersize=3, label=name, color=color,
            )  # fmt: skip
        axis.set_yscale("log")
        axis.set_xlabel(f"bytes {x}, share of dense bf16")
        axis.grid(alpha=0.3)
    figure.axes[0].set_ylabel("loss, nats/token")
    figure.axes[1].legend(fontsize=7)
    return png(figure)


COSTS = {
    "sample_nll_change": "dense NLL of samples, less dense's",
    "scene_change": "scene score, less dense's",
    "agreement": "tokens as in dense",
    "lpips": "LPIPS-like distance to dense",
}


def cost(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """One panel per measure, one bar of uncertainty per cell."""
    names = [name for name in COSTS if any(name in row for row in rows)]
    figure = new(2.6 * len(names) + 1.5, 0.28 * len(rows) + 1.0)
    for axis, name in zip(figure.subplots(1, len(names), sharey=True, squeeze=False)[0], names,
                          strict=True):  # fmt: skip
        for i, row in enumerate(rows):
            if name in row:
                low, high = row[f"{name}_low"], row[f"{name}_high"]
                axis.plot([low, high], [i, i], color=INK[0])
                axis.plot([row[name]], [i], "o", color=INK[0], markersize=4)
        if name.endswith("_change"):
            axis.axvline(0, color="#999", linewidth=0.8)
        axis.set_title(COSTS[name], fontsize=8)
        axis.grid(axis="x", alpha=0.3)
        axis.set_yticks(range(len(rows)), [row["cell"] for row in rows], fontsize=8)
    figure.axes[0].invert_yaxis()
    return png(figure)


def heat(maps: "Tensor", titles: Sequence[str], columns: int) -> bytes:
    """Small maps side by side, each on its own logarithmic scale (its highest value is darkest)."""
    import numpy as np

    rows = -(-len(maps) // columns)
    figure = new(1.35 * columns, 0.95 * rows)
    axes = figure.subplots(rows, columns, squeeze=False)
    for i, axis in enumerate(axes.flat):
        axis.set_axis_off()
        if i < len(maps):
            shown = _logarithmic(maps[i].numpy(), np)
            axis.imshow(
                shown, cmap=_steps(), vmin=0, vmax=1, aspect="auto", interpolation="nearest"
            )
            axis.set_title(titles[i], fontsize=6, pad=1)
    return png(figure, 16)


def _steps() -> Any:
    """Eight blues: more make the file large and show no more."""
    from matplotlib import colormaps

    return colormaps["Blues"].resampled(8)


def _logarithmic(values: "np.ndarray[Any, Any]", np: Any) -> Any:
    """0 at a thousandth of the highest value and below, 1 at the highest."""
    top = max(float(values.max()), 1e-30)
    return 1 + np.log10(np.clip(values / top, 1e-3, 1)) / 3
