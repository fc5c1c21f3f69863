"""Batch files that people write, as the lines of the Batch API.

jsonl: lines as the API wants them pass unchanged; other objects are bodies ({"prompt": ...}).
txt: one prompt a line. csv: a header names fields of a body, and `custom_id` if there is one.
"""

import csv
import io
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from commands.refusal import Refusal

ENDPOINT: Final = "/v1/images/generations"
KINDS: Final = (".jsonl", ".txt", ".csv")

WHOLE: Final = ("n", "seed", "top_k", "output_compression")
REAL: Final = ("guidance_scale", "temperature", "top_p", "sparsity")


def read_tasks(path: Path, options: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The tasks of a file. options: fields of bodies that do not say them. Raises Refusal."""
    kind = path.suffix.lower()
    if kind not in KINDS:
        raise Refusal(f"{path}: name a file that ends in {', '.join(KINDS)}")
    reader = {".jsonl": _of_jsonl, ".txt": _of_text, ".csv": _of_csv}[kind]
    found = False
    for task in reader(path, options):
        found = True
        yield task
    if not found:
        raise Refusal(f"{path} holds no prompt")


def _of_jsonl(path: Path, options: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for number, line in _lines(path):
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            raise Refusal(f"{path}, line {number}: not JSON") from None
        if not isinstance(found, dict):
            raise Refusal(f"{path}, line {number}: not a JSON object")
        if "body" not in found:
            id = str(found.pop("custom_id", f"line-{number}"))
            yield task(id, {**options, **found})
        elif isinstance(found["body"], dict):
            yield {**found, "body": {**options, **found["body"]}}
        else:
            yield found


def _of_text(path: Path, options: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for number, line in _lines(path):
        yield task(f"line-{number}", {**options, "prompt": line})


def _of_csv(path: Path, options: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    reader = csv.DictReader(io.StringIO(_text(path), newline=""), restkey="", strict=True)
    if "prompt" not in (reader.fieldnames or ()):
        raise Refusal(f"{path}: the first line must name the columns, 'prompt' among them")
    try:
        for row in reader:
            yield _of_row(path, reader.line_num, row, options)
    except csv.Error as error:
        raise Refusal(f"{path}, line {reader.line_num}: {error}") from None


def _of_row(
    path: Path, number: int, row: Mapping[str, Any], options: Mapping[str, Any]
) -> dict[str, Any]:
    if "" in row:
        raise Refusal(f"{path}, line {number}: more columns than the first line names")
    said = {name: value for name, value in row.items() if value not in (None, "")}
    id = str(said.pop("custom_id", f"line-{number}"))
    try:
        body = {name: _value(name, value) for name, value in said.items()}
    except ValueError as error:
        raise Refusal(f"{path}, line {number}: {error}") from None
    return task(id, {**options, **body})


def _value(name: str, text: str) -> Any:
    for kind, names, word in ((int, WHOLE, "whole number"), (float, REAL, "number")):
        if name in names:
            try:
                return kind(text)
            except ValueError:
                raise ValueError(f"{name} must be a {word}, got {text[:40]!r}") from None
    return text


def task(id: str, body: Mapping[str, Any]) -> dict[str, Any]:
    return {"custom_id": id, "method": "POST", "url": ENDPOINT, "body": dict(body)}


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Lines with their numbers from 1, without the empty ones."""
    for number, line in enumerate(_text(path).split("\n"), start=1):
        if line.strip():
            yield number, line.strip()


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise Refusal(f"cannot read {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise Refusal(f"{path} is not UTF-8 text") from None
