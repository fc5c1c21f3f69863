"""Brings numbers and what eyes saw together: the results file, and the model card."""

import json
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from training.sprites import SETS

LOOKED_AT = Path(__file__).with_name("looked-at.json")
CARD = Path(__file__).with_name("card.md")
VERDICTS = ("right", "partly", "wrong")
Row = dict[str, Any]
Verdict = Literal["right", "partly", "wrong"]


def judged_rows(rows: list[Row], looked_at: Path) -> list[Row]:
    """Put verdict and remark on each picture of a sheet.

    Raises:
        ValueError: a picture was not judged, or a verdict is none of `VERDICTS`.
    """
    seen = {(v["sheet"], v["prompt"]): v for v in json.loads(looked_at.read_text())["pictures"]}
    return [row | _verdict(row, seen) if row["kind"] == "picture" else row for row in rows]


def _verdict(row: Row, seen: dict[tuple[str, str], Row]) -> Row:
    found = seen.get((row["sheet"], row["prompt"]))
    if found is None or found["verdict"] not in VERDICTS:
        raise ValueError(f"look at {row['sheet']}, {row['prompt']!r}, and judge it: {VERDICTS}")
    return {"verdict": found["verdict"], "remark": found.get("remark", "")}


def summary(rows: list[Row]) -> list[Row]:
    """How many pictures of each sheet are right, partly right and wrong."""
    sheets = dict.fromkeys(row["sheet"] for row in rows if row["kind"] == "picture")
    return [{"kind": "verdicts", "sheet": s, **_count(rows, s)} for s in sheets]


def measured_targets(rows: list[Row]) -> dict[str, float]:
    """The figures that benchmarks/targets.yaml asks of this file, as far as they are known."""
    values = {
        r["name"]: r["value"] for r in rows if r.get("weights", "int8") == "int8" and "value" in r
    }
    found = {"reconstruction PSNR": values["PSNR"], "blank pictures": values["blank pictures"]}
    if all("verdict" in row for row in rows if row["kind"] == "picture"):
        pairs = _count(rows, "held-out-pairs")
        found["fixed prompts right of 32"] = _count(rows, "fixed-prompts")["right"]
        found["held-out pairs right"] = round(pairs["right"] / sum(pairs.values()), 4)
    return found


def model_card(rows: list[Row]) -> str:
    """`card.md` with its figures and the licences of the sprites filled in."""
    figures = {_key(row): _shown(row) for row in rows if "value" in row}
    figures |= {
        f"{row['sheet']} {verdict}": str(row[verdict])
        for row in rows
        if row["kind"] == "verdicts"
        for verdict in VERDICTS
    }
    text = CARD.read_text(encoding="utf-8").replace("{{licences}}", licences())
    return re.sub(r"\{\{(.+?)\}\}", lambda match: figures[match[1]], text)


def licences() -> str:
    """A table of the sprite sets."""
    lines = ["| style word | set | npm package | licence |", "| --- | --- | --- | --- |"]
    cells = ((s.style, s.attribution, f"`{s.package}` {s.version}", s.license) for s in SETS)
    return "\n".join([*lines, *(f"| {' | '.join(c)} |" for c in cells)])


def _count(rows: Iterable[Row], sheet: str) -> dict[str, int]:
    found = Counter(row.get("verdict") for row in rows if row.get("sheet") == sheet)
    return {verdict: found[verdict] for verdict in VERDICTS}


def _key(row: Row) -> str:
    return f"{row['name']}, {row['weights']}" if "weights" in row else str(row["name"])


def _shown(row: Row) -> str:
    value = row["value"]
    if float(value).is_integer():
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.4f}"
