"""Prompts in and files out, checked before anything is drawn."""

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from commands.refusal import Refusal
from engine.pixels import FORMATS, SUFFIXES, Format


def read_prompts(words: Sequence[str], file: Path | None) -> list[str]:
    """The prompts of the command line, then those of a file, a line each. Raises Refusal."""
    found = list(words)
    if file is not None:
        found += [line.strip() for line in _text(file).splitlines() if line.strip()]
    if not found:
        raise Refusal("PROMPT: say what to draw, or name a file with --prompts")
    if not all(prompt.strip() for prompt in found):
        raise Refusal("PROMPT: the prompt is empty: say what to draw")
    return found


def _text(file: Path) -> str:
    try:
        data = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
        return data.decode("utf-8")
    except OSError as error:
        raise Refusal(f"--prompts: cannot read {file}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise Refusal(f"--prompts: {file} is not UTF-8 text") from None


@dataclass(frozen=True, slots=True)
class Outputs:
    """`path` names one picture or the contact sheet; several are numbered after it."""

    path: Path
    format: Format
    count: int
    sheet: bool

    @classmethod
    def of(cls, path: Path, format: str | None, count: int, sheet: bool) -> "Outputs":
        """Raises Refusal if the format is unclear or a file cannot be written there."""
        chosen = _format(path, format)
        named = path if path.suffix else path.with_name(f"{path.name}.{chosen}")
        outputs = cls(named, chosen, count, sheet)
        check_folder(named.parent, "-o")
        for file in [named, *outputs.files]:
            _check_file(file)
        return outputs

    @property
    def files(self) -> list[Path]:
        """out.png, or out-0.png, out-1.png, ... for several pictures or beside a sheet."""
        if self.count == 1 and not self.sheet:
            return [self.path]
        stem, suffix = self.path.stem, self.path.suffix
        return [self.path.with_name(f"{stem}-{k}{suffix}") for k in range(self.count)]


def _format(path: Path, wanted: str | None) -> Format:
    if wanted is not None and wanted not in FORMATS:
        raise Refusal(f"--format: {wanted!r} is not one of {', '.join(FORMATS)}")
    named = SUFFIXES.get(path.suffix.lower())
    if path.suffix and named is None:
        raise Refusal(f"-o: {path.suffix!r} is no known format; use {', '.join(SUFFIXES)}")
    if wanted and named and wanted != named:
        raise Refusal(f"--format {wanted} does not fit -o {path}; leave one of them out")
    return next((format for format in FORMATS if format in (wanted, named)), "png")


def check_folder(folder: Path, flag: str) -> None:
    """Raises Refusal naming `flag` if no file can be made in `folder`. It tries: permission bits
    tell a superuser nothing, and nothing of a full or read-only disk."""
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"x")
    except OSError as error:
        raise Refusal(f"{flag}: cannot write into {folder}: {error.strerror or error}") from None


def _check_file(file: Path) -> None:
    if file.is_dir():
        raise Refusal(f"-o: {file} is a folder; name a file in it")
    if file.exists():
        try:
            file.open("ab").close()
        except OSError as error:
            raise Refusal(f"-o: cannot write {file}: {error.strerror or error}") from None
