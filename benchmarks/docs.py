"""Puts measured figures into README.md and docs/: no number there is typed by hand.

    python -m benchmarks.docs            # rewrite
    python -m benchmarks.docs --check    # exit 1 if something would change

A block stands between `<!-- figures: WHAT -->` and `<!-- end figures -->`, where WHAT is
  targets FILE                  a table of the targets of benchmarks/results/FILE
  rows FILE a,b,c [key=value]   a table of columns a, b, c of its rows, of those where key is value
  where FILE                    a sentence on the machine, date and command
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.results_writer import RESULTS, ROOT, met

BLOCK = re.compile(r"(<!-- figures: (.+?) -->\n).*?(<!-- end figures -->)", re.DOTALL)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Put measured figures into the documents.")
    parser.add_argument("--check", action="store_true", help="only say what would change")
    check = parser.parse_args(arguments).check
    changed = [path for path in documents() if update(path, write=not check)]
    for path in changed:
        print(f"{path.relative_to(ROOT)} {'is out of date' if check else 'rewritten'}")
    return 1 if check and changed else 0


def documents() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def update(path: Path, write: bool) -> bool:
    """Fill the blocks of a document; True if its text changes."""
    text = path.read_text(encoding="utf-8")
    filled = fill(text)
    if write and filled != text:
        path.write_text(filled, encoding="utf-8")
    return filled != text


def fill(text: str) -> str:
    return BLOCK.sub(lambda m: f"{m[1]}{render(m[2])}\n{m[3]}", text)


def render(what: str) -> str:
    """The Markdown of one block. Raises ValueError for an unknown directive or column."""
    kind, file, *rest = what.split()
    if kind not in DIRECTIVES:
        raise ValueError(f"unknown block {what!r}; known: {', '.join(DIRECTIVES)}")
    path = RESULTS / file
    if not path.is_file():
        return f"*Not measured yet: `benchmarks/results/{file}` does not exist.*"
    return DIRECTIVES[kind](json.loads(path.read_text(encoding="utf-8")), rest)


def _targets(result: dict[str, Any], _rest: list[str]) -> str:
    rows = [
        (t["name"], f"{number(t['measured'])} {t['unit']}", _goal(t), "yes" if met(t) else "**no**")
        for t in result["targets"]
    ]
    return table(("what", "measured", "target", "met"), rows)


def _goal(target: dict[str, Any]) -> str:
    sign = "at least" if target["better"] == "higher" else "at most"
    return f"{sign} {number(target['target'])}"


def _rows(result: dict[str, Any], rest: list[str]) -> str:
    columns, filters = rest[0].split(","), [pair.split("=", 1) for pair in rest[1:]]
    chosen = [r for r in result["rows"] if all(str(r.get(k)) == v for k, v in filters)]
    if not chosen:
        return "*Not measured yet: the results file has no such rows.*"
    for column in columns:
        if not any(column in row for row in chosen):
            raise ValueError(f"no row has a column {column!r}")
    body = [[number(row.get(c, "")) for c in columns] for row in chosen]
    return table([c.replace("_", " ") for c in columns], body)


def _where(result: dict[str, Any], _rest: list[str]) -> str:
    machine = result["machine"]
    gpu = f", {machine['gpu']}" if "gpu" in machine else ""
    return (
        f"Measured on {machine.get('cores', '?')} cores of {machine.get('cpu', 'unknown')}{gpu}, "
        f"torch {result['versions'].get('torch', '?')}, on {result['date'][:10]}: "
        f"`{result['command']}`"
    )


DIRECTIVES: dict[str, Callable[[dict[str, Any], list[str]], str]] = {
    "targets": _targets,
    "rows": _rows,
    "where": _where,
}


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    names = list(head)
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def number(value: object) -> str:
    """Three significant digits; large counts with thousands separators."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


if __name__ == "__main__":
    sys.exit(main())
