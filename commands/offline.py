"""`bishop batch run`: a batch without a server. Its output is its memory: what has a line there is
done, and a line that a kill cut short is drawn again from the same seed."""

import hashlib
import json
import os
import sys
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from commands.refusal import FAILED, Refusal
from commands.tasks import ENDPOINT, read_tasks
from engine.events import Event, Failed, Finished
from engine.service_api import ImageService
from engine.wanted import RANDOM_SEEDS
from scheduler.jobs.lines import NewLine
from scheduler.jobs.validate import Validation
from scheduler.request import ImageRequest, PolicyChoice, Priority, RequestError

CHUNK = 64
"""Lines in the engine at once."""


def run_batch(
    source: Path,
    target: Path,
    policy: PolicyChoice,
    open_engine: Callable[[], ImageService],
    quiet: bool,
) -> int:
    """Draw what `target` does not hold yet; returns the exit code. Raises Refusal."""
    lines = _validated(source)
    with _open_output(target) as output:
        done, failed = _resume(output)
        left = [line for line in lines if line.custom_id not in done]
        if left:
            failed += _Run(open_engine(), policy, output).draw(left, len(lines), quiet)
    summary = {"total": len(lines), "completed": len(lines) - failed, "failed": failed}
    if quiet:
        print(json.dumps(summary | {"output": str(target)}))
    else:
        print(f"{summary['completed']} of {summary['total']} lines done, {failed} failed: {target}")
    return FAILED if failed else 0


def _validated(source: Path) -> list[NewLine]:
    validation = Validation(ENDPOINT)
    texts = (json.dumps(task).encode() + b"\n" for task in read_tasks(source, {}))
    lines = list(validation.read(texts))
    if validation.errors:
        first = validation.errors[0]
        where = "" if first.line is None else f", request {first.line}"
        raise Refusal(f"{source}{where}: {first.message}")
    return lines


def _open_output(target: Path) -> BinaryIO:
    try:
        return target.open("a+b")
    except OSError as error:
        raise Refusal(f"-o: cannot write {target}: {error.strerror or error}") from None


def _resume(output: BinaryIO) -> tuple[set[str], int]:
    """Ids that are done and how many of them failed; half a last line is cut off."""
    output.seek(0)
    done: set[str] = set()
    failed = end = 0
    for line in output:
        if not line.endswith(b"\n"):
            break
        end += len(line)
        record = _parsed(line)
        done.add(record["custom_id"])
        failed += (record["response"] or {}).get("status_code") != 200
    output.truncate(end)
    output.seek(0, os.SEEK_END)
    return done, failed


def _parsed(line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line)
        if {"custom_id", "response", "error"} <= record.keys():
            return dict(record)
    except (ValueError, AttributeError):
        pass
    raise Refusal("-o: the file holds something else than results of a batch; name another one")


class _Run:
    def __init__(self, service: ImageService, policy: PolicyChoice, output: BinaryIO) -> None:
        self._service, self._policy, self._output = service, policy, output
        self._failed = 0

    def draw(self, lines: list[NewLine], total: int, quiet: bool) -> int:
        """Draw the lines; returns how many failed."""
        self._service.start()
        try:
            with _bar(quiet) as bar:
                task = bar.add_task("drawing", total=total, completed=total - len(lines))
                for start in range(0, len(lines), CHUNK):
                    for _ in self._chunk(lines[start : start + CHUNK]):
                        bar.advance(task)
        finally:
            self._service.stop()
        return self._failed

    def _chunk(self, lines: list[NewLine]) -> Iterator[None]:
        """One step of the iterator per line that has ended."""
        accepted: list[tuple[NewLine, ImageRequest, Any]] = []
        for line in lines:
            try:
                accepted.append((line, *self._request(line)))
            except Exception as error:
                self._write(line, *_refusal(error))
                yield
        ended: dict[int, dict[int, Event]] = {index: {} for index in range(len(accepted))}
        for index, event in self._service.run([request for _, request, _ in accepted]):
            if not isinstance(event, Finished | Failed):
                continue
            ended[index][event.index] = event
            line, request, body = accepted[index]
            if len(ended[index]) == request.n:
                self._write(line, *self._answer(body, ended.pop(index)))
                yield

    def _request(self, line: NewLine) -> tuple[ImageRequest, Any]:
        from engine.wanted import to_request
        from serving.body import parse
        from serving.lines import check_line

        body = parse(line.body.encode())
        check_line(body, self._service.model.name)
        seed = seed_of(line.custom_id) if body.seed is None else body.seed
        wanted = replace(body.wanted, seed=seed)
        request = to_request(wanted, self._service.model, self._policy)
        self._service.check(request)
        return replace(request, priority=Priority.BATCH), body

    def _answer(self, body: Any, events: dict[int, Event]) -> tuple[int, dict[str, Any]]:
        from engine.pixels import encode
        from serving.lines import no_urls
        from serving.render import answer_of

        pictures = [events[index] for index in sorted(events)]
        for event in pictures:
            if isinstance(event, Failed):
                self._check_engine()
                return _failure(f"picture {event.index} could not be drawn: {event.reason}")
        finished = [event for event in pictures if isinstance(event, Finished)]
        encoded = [encode(each.pixels, body.format, body.compression) for each in finished]
        answer = answer_of(body, finished, encoded, no_urls)
        return 200, answer.model_dump(mode="json", exclude_none=True)

    def _check_engine(self) -> None:
        """A dead engine is no failure of lines: they are drawn by the next run."""
        health = self._service.health()
        if not health.alive:
            raise Refusal(f"{health.error or 'the engine has stopped'}; run it again to go on")

    def _write(self, line: NewLine, status: int, body: dict[str, Any]) -> None:
        id = uuid.uuid4().hex
        self._failed += status != 200
        record = {
            "id": f"batch_req_{id}",
            "custom_id": line.custom_id,
            "response": {"status_code": status, "request_id": id, "body": body},
            "error": None,
        }
        try:
            self._output.write(json.dumps(record).encode() + b"\n")
            self._output.flush()
        except OSError as error:
            raise Refusal(f"-o: cannot write: {error.strerror or error}") from None


def seed_of(id: str) -> int:
    """The seed of a line that names none: the same in every run."""
    digest = hashlib.blake2b(id.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % RANDOM_SEEDS


def _refusal(error: Exception) -> tuple[int, dict[str, Any]]:
    from serving.errors import ApiError, as_api_error

    if not isinstance(error, ApiError | RequestError):
        raise error
    refusal = as_api_error(error)
    return refusal.status, refusal.body


def _failure(message: str) -> tuple[int, dict[str, Any]]:
    from serving.errors import ApiError

    return 500, ApiError(500, message, code="image_failed").body


def _bar(quiet: bool) -> Progress:
    console = Console(stderr=True)
    columns = (
        TextColumn("drawing"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("lines"),
        TimeRemainingColumn(),
    )
    hidden = quiet or not sys.stderr.isatty()
    return Progress(*columns, console=console, transient=True, disable=hidden)
