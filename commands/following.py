"""A batch of a server as it goes on: a bar with the time that is left, and its results as files."""

import base64
import binascii
import json
import re
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from commands.refusal import Refusal
from commands.remote import Remote

ENDED = ("completed", "failed", "expired", "cancelled")
FIRST_PAUSE, LONGEST_PAUSE = 0.2, 5.0
SAFE = re.compile(r"[^A-Za-z0-9._-]+")


def follow(remote: Remote, id: str, quiet: bool) -> dict[str, Any]:
    """The batch when it has ended. Progress is shown on a terminal."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("requests"),
        TimeRemainingColumn(),
    )
    hidden = quiet or not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as bar:
        shown = bar.add_task("waiting", total=None)
        pause = FIRST_PAUSE
        while (batch := remote.batch(id))["status"] not in ENDED:
            counts = batch["request_counts"]
            done = counts["completed"] + counts["failed"]
            bar.update(shown, description=batch["status"], total=counts["total"], completed=done)
            time.sleep(pause)
            pause = min(1.2 * pause, LONGEST_PAUSE)
    return batch


def describe(batch: dict[str, Any]) -> str:
    """One line about a batch."""
    counts = batch["request_counts"]
    line = (
        f"{batch['id']}  {batch['status']:<11}  {counts['completed']} of {counts['total']} done, "
        f"{counts['failed']} failed"
    )
    errors = (batch.get("errors") or {}).get("data", [])
    reasons = [f"  line {e['line']}: {e['message']}" for e in errors[:10]]
    return "\n".join([line + _left(batch), *reasons])


def _left(batch: dict[str, Any]) -> str:
    """The time left at the speed so far."""
    counts = batch["request_counts"]
    done = counts["completed"] + counts["failed"]
    if batch["status"] != "in_progress" or not done or not batch["in_progress_at"]:
        return ""
    seconds = (time.time() - batch["in_progress_at"]) / done * (counts["total"] - done)
    return f", about {max(0, round(seconds))} s left"


def store_results(remote: Remote, batch: dict[str, Any], folder: Path) -> tuple[int, int]:
    """Write output.jsonl, errors.jsonl and the pictures into `folder`; returns how many pictures
    and errors there are. Raises Refusal."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        pictures = _store(remote, batch.get("output_file_id"), folder / "output.jsonl", folder)
        errors = _store(remote, batch.get("error_file_id"), folder / "errors.jsonl", None)
    except OSError as error:
        raise Refusal(f"-o: cannot write into {folder}: {error.strerror or error}") from None
    return pictures, errors


def _store(remote: Remote, file_id: str | None, path: Path, pictures: Path | None) -> int:
    """Copy a result file line by line; with its pictures if there is a folder for them."""
    if file_id is None:
        return 0
    count = 0
    with path.open("w", encoding="utf-8") as file:
        for line in remote.lines(file_id):
            file.write(line + "\n")
            count += 1 if pictures is None else _store_pictures(line, pictures)
    return count


def _store_pictures(line: str, folder: Path) -> int:
    try:
        record = json.loads(line)
        body = record["response"]["body"]
        data = [base64.b64decode(picture["b64_json"], validate=True) for picture in body["data"]]
        stem, format = file_stem(record["custom_id"]), body.get("output_format", "png")
    except (ValueError, KeyError, TypeError, binascii.Error):
        raise Refusal("the server's results are not those of a batch of images") from None
    for k, picture in enumerate(data):
        number = f"-{k}" if len(data) > 1 else ""
        (folder / f"{stem}{number}.{SAFE.sub('', format)}").write_bytes(picture)
    return len(data)


def file_stem(id: str) -> str:
    """A file name for a custom_id: the id itself where it is one, else with a part of its digest,
    so that two ids never meet in one file and none becomes a path."""
    import hashlib

    clean = SAFE.sub("_", id).strip(".")[:100]
    if clean == id:
        return id
    return f"{clean}-{hashlib.blake2b(id.encode(), digest_size=4).hexdigest()}"
