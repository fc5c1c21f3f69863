"""From the records of a batch's lines to its two result files."""

from scheduler.jobs.batches import Batches
from scheduler.jobs.files import Files
from scheduler.jobs.lines import Lines
from scheduler.jobs.shared import Shared, file_key
from scheduler.jobs.storage import Writer
from scheduler.jobs.tables import Batch, File, Line

PURPOSE = "batch_output"


class ResultFiles:
    """Assembles the files of batches that `Batches.claim_ending` handed out."""

    def __init__(self, shared: Shared, files: Files, batches: Batches, lines: Lines) -> None:
        self._shared, self._files, self._batches, self._lines = shared, files, batches, lines

    def assemble(self, batch: Batch) -> bool:
        """Write both files and end the batch; every line is in exactly one of them.

        False if a record was damaged: its line runs again and the batch goes on. Raises LeaseLost.
        """
        with _Result(self, batch, "output") as output, _Result(self, batch, "error") as errors:
            if not self._write(batch, output, errors):
                self._batches.reopen(batch)
                return False
            written = output.publish(), errors.publish()
            self._batches.ended(batch, *written)
            output.file = errors.file = None
        return True

    def _write(self, batch: Batch, output: "_Result", errors: "_Result") -> bool:
        whole = True
        for line, record in self._lines.records(batch):
            if record is None:
                self._lines.redo(batch, line)
                whole = False
            elif whole:
                _place(line, output, errors).add(record)
        return whole

    def open(self, batch: Batch, kind: str) -> tuple[File, Writer]:
        name = f"{batch.id}_{kind}.jsonl"
        file = self._files.begin(batch.tenant, PURPOSE, name, batch.output_seconds)
        return file, self._shared.storage.writer(file_key(file.id))

    def discard(self, file: File) -> None:
        self._files.discard(file.id)


class _Result:
    """One result file; it exists only if a line belongs into it."""

    def __init__(self, results: ResultFiles, batch: Batch, kind: str) -> None:
        self._results, self._batch, self._kind = results, batch, kind
        self._writer: Writer | None = None
        self._size = 0
        self.file: File | None = None

    def add(self, record: bytes) -> None:
        if self._writer is None:
            self.file, self._writer = self._results.open(self._batch, self._kind)
        self._writer.write(record + b"\n")
        self._size += len(record) + 1

    def publish(self) -> File | None:
        if self._writer is None or self.file is None:
            return None
        self._writer.commit()
        self.file.bytes = self._size
        return self.file

    def __enter__(self) -> "_Result":
        return self

    def __exit__(self, *_: object) -> None:
        if self._writer is not None:
            self._writer.discard()
        if self.file is not None:
            self._results.discard(self.file)


def _place(line: Line, output: _Result, errors: _Result) -> _Result:
    return output if line.outcome == "completed" else errors
