"""What docs/quality.md shows of the studies of `mini`: results files and plots from their folders.

    bishop characterize --prompts benchmarks/prompts/mini-scenes.jsonl -o out/characterize-mini ...
    bishop evaluate --prompts benchmarks/prompts/mini-scenes.jsonl -o out/evaluate-mini ...
    bishop calibrate ... -o out/calibrate/mini.yaml
    python -m benchmarks.quality_page characterize out/characterize-mini
    python -m benchmarks.quality_page evaluate out/evaluate-mini
    python -m benchmarks.quality_page calibrate out/calibrate

Then the figures of the page are filled in (benchmarks.docs).
"""

import argparse
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from benchmarks import docs
from benchmarks.results_writer import RESULTS, ROOT, results, targets, write

IMAGES = ROOT / "docs" / "quality"
LARGEST = 60_000
"""Bytes of a plot in the documents."""
Row = dict[str, Any]

PAPER = "arXiv 2609.19702"
BESIDE_PAPER: tuple[tuple[str, str, str], ...] = (
    ("attention on the prompt", "prompt", "more than .5"),
    ("attention on the most recent 10 %", "local", "the rest"),
    ("attention on the middle", "middle", ".062 Janus-Pro, .081 NextStep-1, .085 Lumina-mGPT"),
)
STRIPES = "diagonal above vertical at all distances for image models, not for language models"


def characterize(folder: Path) -> None:
    """characterize-mini.json and its plots."""
    facts = json.loads((folder / "characterize.json").read_text(encoding="utf-8"))
    command = (
        "bishop characterize --model mini --prompts benchmarks/prompts/mini-scenes.jsonl "
        f"--limit {facts['prompts']} --seeds {facts['seeds']}"
    )
    save("characterize-mini.json", list(characterized(facts)), command)
    for name in ("regions", "similarity", "density", "offsets"):
        keep_plot(folder / f"{name}.png", f"characterize-{name}.png")


def characterized(facts: Mapping[str, Any]) -> Iterable[Row]:
    """Rows of the results file; head by head is in the report."""
    heads = facts["heads"]
    for what, key, paper in BESIDE_PAPER:
        yield {"kind": "paper", "what": what, "mini": mean(heads, key), "the_paper": paper}
    above = min(r["diagonal"] - r["vertical"] for r in facts["similarity"])
    found = f"least difference {above:.2f}"
    yield {
        "kind": "paper",
        "what": "diagonal against vertical",
        "mini": found,
        "the_paper": STRIPES,
    }
    for layer in sorted({h["layer"] for h in heads}):
        own = [h for h in heads if h["layer"] == layer]
        names = ("prompt", "local", "middle", "entropy", "density_0.9", "density_0.95",
                 "density_0.99", "stable_prompts", "stable_seeds", "stable_steps")  # fmt: skip
        kinds = Counter(h["kind"] for h in own)
        listed = ", ".join(f"{n} {kind}" for kind, n in kinds.most_common())
        yield {"kind": "layer", "layer": layer, **{n: mean(own, n) for n in names}, "heads": listed}
    for kind, n in Counter(h["kind"] for h in heads).most_common():
        yield {"kind": "heads", "looks_at": kind, "heads": n, "share": n / len(heads)}
    yield from ({"kind": "similarity", **row} for row in facts["similarity"])
    yield from ({"kind": "offsets", **row} for row in facts["offsets"])
    prefill, decode = facts["prefill"], {"phase": "decode"}
    names = ("entropy", "density_0.9", "density_0.95", "density_0.99")
    near = facts["similarity"][0]
    decode |= {"diagonal": near["diagonal"], "vertical": near["vertical"]}
    yield {"kind": "phases", **decode, **{n: mean(heads, n) for n in names}}
    names = ("diagonal", "vertical", *names)
    yield {"kind": "phases", "phase": "prefill", **{n: mean(prefill, n) for n in names}}
    yield {"kind": "study", **{k: facts[k] for k in ("pictures", "prompts", "seeds")}}


def mean(rows: Sequence[Mapping[str, Any]], key: str) -> float:
    """Over the rows that have it, five significant digits."""
    values = [row[key] for row in rows if row.get(key) is not None]
    return float(f"{sum(values) / len(values):.5g}")


def evaluate(folder: Path) -> None:
    """evaluate-mini.json, its targets, and the plot."""
    rows = json.loads((folder / "evaluate.json").read_text(encoding="utf-8"))
    shown = [rounded(row | {"kind": "cell"} | intervals(row)) for row in rows]
    known = {t["name"]: t for t in targets().get("evaluate-mini.json", [])}
    measured = {n: v for n, v in judged(rows).items() if n in known}
    command = (
        "bishop evaluate --model mini --prompts benchmarks/prompts/mini-scenes.jsonl --images "
        f"{rows[0]['images']} --policies dense,indexed:0.9,indexed:0.95,diagonal:0.9 "
        "--suite judge --scorer benchmarks.scene_reader:judge --held-out FILE --held-out-count 8"
    )
    save("evaluate-mini.json", shown, command, measured)
    keep_plot(folder / "plot.png", "evaluate.png")


def intervals(row: Mapping[str, Any]) -> Row:
    """Columns a table can show: value and interval in one."""
    return {
        f"{name}_95": f"{row[name]:.3f} ({row[f'{name}_low']:.3f} to {row[f'{name}_high']:.3f})"
        for name in row
        if f"{name}_low" in row
    }


def judged(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """What the targets ask of the best cell at each sparsity: `indexed`."""
    found: dict[str, float] = {}
    for row in rows:
        if row["policy"] == "indexed" and row["format"] == "bf16":
            at = f"at {100 * row['sparsity']:g} %"
            found[f"sample NLL above dense {at}"] = row["sample_nll_change"]
            if "scene_change" in row:
                dense = row["scene"] - row["scene_change"]
                found[f"scene accuracy lost {at}"] = -100 * row["scene_change"] / dense
    return found


def calibrate(folder: Path) -> None:
    """calibrate-mini.json and the Pareto plot, of every FILE.check.json in a folder."""
    rows, command = list[Row](), ""
    for path in sorted(folder.glob("*.check.json")):
        checked = json.loads(path.read_text(encoding="utf-8"))
        file = path.name.removesuffix(".check.json")
        fit = checked["key"]["fit"]
        own = {"file": file, "weigh": fit["weigh"]}
        said = " ".join(f"--sparsity {s:g}" for s in fit["sparsities"])
        command = (
            f"bishop calibrate --model mini --pictures FILE {said} --held-out {fit['held_out']}"
        )
        rows += [rounded(own | row) for row in checked["rows"] if "loss" in row]
        keep_plot(folder / f"{file}.png", f"calibrate-{file}.png")
    save("calibrate-mini.json", rows, command)


def rounded(row: Mapping[str, Any]) -> Row:
    return {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in row.items()}


def save(
    name: str, rows: list[Row], command: str, measured: Mapping[str, float] | None = None
) -> None:
    write(RESULTS / name, results(name, rows, measured, command))


def keep_plot(source: Path, name: str) -> None:
    """Copy a plot; one that is too large loses colours and a third of its sides."""
    target = IMAGES / name
    IMAGES.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    if target.stat().st_size > LARGEST:
        with Image.open(source) as picture:
            small = picture.convert("RGB")
        small = small.resize((small.width * 2 // 3, small.height * 2 // 3), Image.Resampling.BOX)
        small.quantize(16, dither=Image.Dither.NONE).save(target, optimize=True)
    if target.stat().st_size > LARGEST:
        raise SystemExit(f"{target} has {target.stat().st_size} bytes, more than {LARGEST}")


STUDIES: dict[str, Callable[[Path], None]] = {
    "characterize": characterize,
    "evaluate": evaluate,
    "calibrate": calibrate,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("folder", type=Path, help="what the command wrote")
    args = parser.parse_args()
    STUDIES[args.study](args.folder)
    docs.main([])


if __name__ == "__main__":
    main()
