"""The report of `bishop characterize`: one HTML file that asks for nothing else, and JSON."""

import json
from base64 import b64encode
from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from commands import figures

if TYPE_CHECKING:
    from torch import Tensor

    from sparse_attn.characterize.layer import LayerCharacter

Facts = dict[str, Any]
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 60rem; margin: 2rem auto;
  padding: 0 1rem; }
h2 { margin-top: 2.5rem; } img { max-width: 100%; height: auto; }
table { border-collapse: collapse; font-size: 13px; margin: .5rem 0; }
th, td { padding: .15rem .6rem; text-align: right; border-bottom: 1px solid #ddd; }
th:first-child, td:first-child { text-align: left; } .note { color: #555; }
details { margin: .5rem 0; } .scroll { overflow-x: auto; }
"""


def write(folder: Path, facts: Facts, layers: Sequence["LayerCharacter"]) -> None:
    """report.html, characterize.json, and the plots as PNG files beside them."""
    plots = {name: draw(facts, layers) for name, draw in PLOTS.items()}
    for name, data in plots.items():
        (folder / f"{name}.png").write_bytes(data)
    (folder / "characterize.json").write_text(json.dumps(rounded(facts), indent=1) + "\n")
    (folder / "report.html").write_text(html(facts, plots), encoding="utf-8")


def rounded(value: Any) -> Any:
    """Floats with five significant digits: more is noise, and takes room."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {k: rounded(v) for k, v in value.items()}
    return [rounded(v) for v in value] if isinstance(value, list) else value


def mean(rows: Iterable[Facts], key: str) -> float:
    """Mean of a key over rows that have it."""
    values = [row[key] for row in rows if row.get(key) is not None]
    return sum(values) / len(values) if values else float("nan")


def layer_numbers(facts: Facts) -> list[int]:
    return sorted({head["layer"] for head in facts["heads"]})


def of_layer(facts: Facts, layer: int) -> list[Facts]:
    return [head for head in facts["heads"] if head["layer"] == layer]


def _regions(facts: Facts, _layers: Any) -> bytes:
    numbers = layer_numbers(facts)
    parts = {
        name: [mean(of_layer(facts, i), name) for i in numbers]
        for name in ("prompt", "local", "middle")
    }
    return figures.stacked(numbers, parts, "layer", "share of attention")


def _similarity(facts: Facts, _layers: Any) -> bytes:
    rows = facts["similarity"]
    kinds = ("diagonal", "vertical", "diagonal_shuffled")
    curves = {k.replace("_", ", "): [r[k] for r in rows] for k in kinds}
    return figures.lines(
        [r["distance"] for r in rows], curves, "distance d between queries", "cosine similarity"
    )


def _density(facts: Facts, _layers: Any) -> bytes:
    numbers = layer_numbers(facts)
    curves = {
        f"{m} % of the mass": [mean(of_layer(facts, i), f"density_{m / 100:g}") for i in numbers]
        for m in (90, 95, 99)
    }
    return figures.lines(numbers, curves, "layer", "share of the keys needed")


def _offsets(_facts: Facts, layers: Sequence["LayerCharacter"]) -> bytes:
    """Columns are heads, rows are layers."""
    maps = torch.cat([layer.offsets.means() for layer in layers])
    return _heads(maps, layers)


def _queries(_facts: Facts, layers: Sequence["LayerCharacter"]) -> bytes:
    return _heads(torch.cat([layer.binned.means() for layer in layers]), layers)


def _heads(maps: "Tensor", layers: Sequence["LayerCharacter"]) -> bytes:
    heads = layers[0].regions.heads
    titles = [f"{i // heads}:{i % heads}" for i in range(len(maps))]
    return figures.heat(maps, titles, min(heads, 12))


PLOTS = {
    "regions": _regions,
    "similarity": _similarity,
    "density": _density,
    "offsets": _offsets,
    "queries": _queries,
}


def html(facts: Facts, plots: dict[str, bytes]) -> str:
    """The whole page."""
    grid = facts["grid"]
    title = f"Attention of {facts['model']} while it draws"
    intro = (
        f"{facts['pictures']} pictures of {facts['prompts']} prompts, {facts['seeds']} seeds each, "
        f"drawn with dense attention on a grid of {grid['height']} x {grid['width']}. Figures are "
        "means over all queries of the conditional sequences."
    )
    sections = "".join(
        f"<h2>{escape(head)}</h2>{body}" for head, body in _sections(facts, plots).items()
    )
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head><body>'
        f"<h1>{escape(title)}</h1><p>{escape(intro)}</p>{sections}</body></html>\n"
    )


def _sections(facts: Facts, plots: dict[str, bytes]) -> dict[str, str]:
    return {
        "Where attention falls": _picture(plots, "regions", "attention by region and layer")
        + _note(
            "prompt: all of the prompt; local: the most recent 10 % of the decoded tokens; middle: "
            "the tokens before them."
        )
        + _table([_overall(facts)]),
        "Kinds of heads": _table(_kinds(facts))
        + _note(
            "prompt/sink: more than half of the attention on the prompt and the first four tokens; "
            "else where most of what falls on the picture lies: local (two rows and columns around "
            "the query), column (at most one column aside, farther up), row (same row, farther "
            "left), global (anything else)."
        ),
        "Stripes: diagonal against vertical": _picture(
            plots, "similarity", "similarity by distance"
        )
        + _table(facts["similarity"])
        + _note(CONTROL),
        "How many keys are needed": _picture(plots, "density", "density by layer")
        + _note("Chosen anew for each query, prompt included."),
        "Where a head looks: offsets": _picture(plots, "offsets", "offset maps")
        + _note(
            "layer:head. Up: rows above the query (its own row at the top); middle column: "
            "the query's own column. Darkest: the head's largest value; white: a thousandth of it."
        )
        + _table(facts["offsets"]),
        "Queries and keys": _picture(plots, "queries", "query by key maps")
        + _note("layer:head. Down: queries; across: the prompt, then keys, in bins."),
        "Prefill": _table(facts["prefill"]) + _note("Among the tokens of the prompt, by layer."),
        "All heads": "<details><summary>Table</summary>" + _table(facts["heads"]) + "</details>",
    }


CONTROL = (
    "Cosine similarity between the attention of queries d apart. Vertical: same keys; diagonal: "
    "keys shifted by d. No language model comes with Bishop, so the control is the text order of a "
    "shuffled grid: the same weights, with all keys put into one random order before the shift. If "
    "a diagonal similarity came from anything but the raster (broad attention, say), it would "
    "survive the shuffle. The control cannot show what a language model's attention looks like."
)


def _overall(facts: Facts) -> Facts:
    names = ("prompt", "local", "middle", "entropy", "density_0.9", "density_0.95", "density_0.99")
    stable = ("stable_prompts", "stable_seeds", "stable_steps")
    return {"": "all heads"} | {n: mean(facts["heads"], n) for n in (*names, *stable)}


def _kinds(facts: Facts) -> list[Facts]:
    found = Counter(head["kind"] for head in facts["heads"])
    return [
        {
            "kind": kind, "heads": n, "share": n / len(facts["heads"]),
            **{k: mean((h for h in facts["heads"] if h["kind"] == kind), k) for k in _KIND_COLUMNS},
        }
        for kind, n in found.most_common()
    ]  # fmt: skip


_KIND_COLUMNS = ("prompt", "local", "middle", "entropy", "stable_prompts", "stable_steps")


def _picture(plots: dict[str, bytes], name: str, alt: str) -> str:
    data = b64encode(plots[name]).decode()
    return f'<img alt="{escape(alt)}" src="data:image/png;base64,{data}">'


def _note(text: str) -> str:
    return f'<p class="note">{escape(text)}</p>'


def _table(rows: Sequence[Facts]) -> str:
    head = "".join(f"<th>{escape(str(k).replace('_', ' '))}</th>" for k in rows[0])
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(_cell(v))}</td>" for v in row.values()) + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3g}" if isinstance(value, float) else str(value)
