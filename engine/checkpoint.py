"""Published checkpoints, read lazily and strictly: every tensor goes straight to its place.

The headers alone say whether a checkpoint fits; only then is memory taken. A file is mapped while
its tensors are copied, so that loading needs no more than one file's pages besides what stays.
"""

import difflib
import re
import threading
import zlib
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm import tqdm

from engine.weights import WeightError, load_json

FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Element types a weight may be stored in, by their safetensors names."""

READ_AHEAD = 1 << 20
"""Bytes read at a time ahead of the copies."""

Convert = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor of a checkpoint: its name there and the shape it must have.

    convert: applied before it is copied; keeps the number of rows.
    """

    name: str
    shape: tuple[int, ...]
    convert: Convert | None = None


@dataclass(frozen=True)
class Param:
    """A tensor we keep: `sources` stacked along the first dimension.

    rows: of the stacked rows, the ones that stay, in this order; None keeps all.
    tail: the other dimensions, where a source's `convert` changes them.
    dtype: element type, whatever the model's is; None takes the model's.
    spread: standard deviation of random weights times the square root of the last dimension;
        `mean` is added. (`load_format: dummy`)
    """

    name: str
    sources: tuple[Source, ...]
    rows: tuple[int, ...] | None = None
    tail: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None
    spread: float = 1.0
    mean: float = 0.0

    @property
    def shape(self) -> tuple[int, ...]:
        rows = sum(s.shape[0] for s in self.sources) if self.rows is None else len(self.rows)
        return (rows, *(self.sources[0].shape[1:] if self.tail is None else self.tail))

    def bytes(self, dtype: torch.dtype) -> int:
        """Bytes it takes in a model of `dtype`."""
        return torch.Size(self.shape).numel() * (self.dtype or dtype).itemsize


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a tensor of a checkpoint lies, and what its header says; `place` counts the tensors of
    a file in the order in which they lie there."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str
    place: int


class Checkpoint:
    """The tensors of a checkpoint by name, known from headers; no data is read yet."""

    def __init__(self, entries: Mapping[str, Entry]) -> None:
        self.entries = dict(entries)

    @classmethod
    def of_folder(cls, folder: Path) -> "Checkpoint":
        """A Hugging Face folder: model.safetensors or its shards, else pytorch_model*.bin.

        Raises WeightError for a missing or truncated file and a tensor that occurs twice.
        """
        return cls.of_files(_files(folder))

    @classmethod
    def of_files(cls, files: Iterable[Path], prefix: str = "") -> "Checkpoint":
        """Files of safetensors or torch's format; `prefix` is put before every name."""
        entries: dict[str, Entry] = {}
        for file in files:
            for entry in _headers(file):
                name = prefix + entry.name
                if name in entries:
                    raise WeightError(f"{file.name}: tensor {name!r} occurs in two files")
                entries[name] = entry
        return cls(entries)

    def __or__(self, other: "Checkpoint") -> "Checkpoint":
        return Checkpoint(self.entries | other.entries)

    def renamed(self, rules: Sequence[tuple[str, str]]) -> "Checkpoint":
        """Under other names: each rule (regular expression, replacement) applied in turn."""
        return Checkpoint({_rename(name, rules): e for name, e in self.entries.items()})

    @property
    def bytes(self) -> int:
        """Bytes of the files that hold it."""
        return sum(file.stat().st_size for file in {e.file for e in self.entries.values()})

    def check(self, params: Sequence[Param], unused: Sequence[str] = ()) -> None:
        """Raise WeightError unless this checkpoint is exactly what `params` need.

        unused: regular expressions of names a checkpoint may hold besides (image input, say).
        """
        wanted = {s.name: s for p in params for s in p.sources}
        for source in wanted.values():
            self._check_source(source)
        ignore = re.compile("|".join(f"(?:{u})" for u in unused) or r"(?!)")
        for name, entry in self.entries.items():
            if name not in wanted and not ignore.match(name):
                hint = _nearest(name, wanted)
                raise WeightError(f"{entry.file.name}: unexpected tensor {name!r}{hint}")

    def _check_source(self, source: Source) -> None:
        entry = self.entries.get(source.name)
        if entry is None:
            hint = _nearest(source.name, self.entries)
            raise WeightError(f"missing tensor {source.name!r}{hint}")
        where = f"{entry.file.name}: tensor {source.name!r}"
        if entry.shape != source.shape:
            raise WeightError(f"{where} has shape {entry.shape}, expected {source.shape}")
        if entry.dtype not in FLOATS:
            known = ", ".join(FLOATS)
            raise WeightError(f"{where} has dtype {entry.dtype}, expected one of {known}")

    def load(
        self,
        params: Sequence[Param],
        dtype: torch.dtype,
        device: torch.device,
        progress: bool = False,
        ahead: bool = True,
    ) -> dict[str, Tensor]:
        """The tensors of `params`, converted on the way; call `check` first.

        ahead: read whole files ahead of the copies; a loss where few of their tensors are wanted.
        Raises WeightError with what it would take if memory does not suffice.
        """
        result = _allocate(params, dtype, device)
        parts: dict[str, list[tuple[Param, Source, int]]] = {}
        for param in params:
            start = 0
            for source in param.sources:
                parts.setdefault(source.name, []).append((param, source, start))
                start += source.shape[0]
        files: dict[Path, list[str]] = {}
        for name in parts:
            files.setdefault(self.entries[name].file, []).append(name)
        with tqdm(total=len(parts), unit="tensor", disable=not progress, desc="loading") as bar:
            for file, names in files.items():
                with _reader(file, ahead) as read:
                    for name in sorted(names, key=lambda n: self.entries[n].place):
                        data = read(self.entries[name].name)
                        for param, source, start in parts[name]:
                            _place(data, param, source, start, result[param.name])
                        bar.update()
        return result


class LayerTensors(dict[str, Tensor]):
    """Tensors by name, those of a layer only once it is asked for: a model whose layers are moved
    away as they are made never has all of them in memory. `load` gives the tensors of some params.
    """

    def __init__(
        self, params: Sequence[Param], load: Callable[[list[Param]], dict[str, Tensor]]
    ) -> None:
        self._load, self._layers = load, dict[int, list[Param]]()
        others: list[Param] = []
        for param in params:
            layer = re.match(r"layers\.(\d+)\.", param.name)
            (self._layers.setdefault(int(layer[1]), []) if layer else others).append(param)
        super().__init__(load(others))

    def bring(self, layer: int) -> None:
        """Load the tensors of a layer."""
        self.update(self._load(self._layers.pop(layer)))


def random_tensors(
    params: Sequence[Param], dtype: torch.dtype, device: torch.device, seed: int = 0
) -> dict[str, Tensor]:
    """Random weights in the shapes of `params` (`load_format: dummy`). Each depends on its name and
    the seed alone, so that some can be made without the others."""
    generator = torch.Generator(device)
    result = _allocate(params, dtype, device)
    for param in params:
        tensor = result[param.name]
        generator.manual_seed(zlib.crc32(param.name.encode()) ^ seed)
        tensor.normal_(generator=generator).mul_(param.spread * max(1, tensor.shape[-1]) ** -0.5)
        tensor.add_(param.mean)
    return result


def _allocate(
    params: Sequence[Param], dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    total = sum(p.bytes(dtype) for p in params)
    try:
        return {p.name: torch.empty(p.shape, dtype=p.dtype or dtype, device=device) for p in params}
    except RuntimeError as error:
        raise WeightError(
            f"the weights take {total / 2**30:.1f} GiB in {dtype} on {device}, which is more than "
            "is free: choose bf16 or a smaller model"
        ) from error


def _place(data: Tensor, param: Param, source: Source, start: int, target: Tensor) -> None:
    if source.convert is not None:
        data = source.convert(data)
    if param.rows is None:
        target[start : start + len(data)].copy_(data)
        return
    inside = [(i, r - start) for i, r in enumerate(param.rows) if start <= r < start + len(data)]
    at = torch.tensor([i for i, _ in inside], dtype=torch.int64)
    rows = torch.tensor([r for _, r in inside], dtype=torch.int64)
    target[at.to(target.device)] = data[rows].to(target)


def _files(folder: Path) -> list[Path]:
    for single in ("model.safetensors", "pytorch_model.bin"):
        if (folder / single).is_file():
            return [folder / single]
        index = folder / f"{single}.index.json"
        if index.is_file():
            return _indexed(folder, index)
    raise WeightError(
        f"{folder} holds no model.safetensors, no model.safetensors.index.json and no "
        "pytorch_model.bin: is the download complete?"
    )


def _indexed(folder: Path, index: Path) -> list[Path]:
    table = load_json(index).get("weight_map")
    if not isinstance(table, dict):
        raise WeightError(f"{index} holds no weight_map")
    files = [folder / name for name in sorted(set(table.values()))]
    for file in files:
        if not file.is_file():
            raise WeightError(f"{folder} lacks the shard {file.name}, which {index.name} names")
    return files


def _headers(file: Path) -> Iterator[Entry]:
    if file.suffix != ".safetensors":
        for i, (name, tensor) in enumerate(read_torch_file(file).items()):
            yield Entry(file, name, tuple(tensor.shape), _dtype_name(tensor.dtype), i)
        return
    try:
        with safe_open(file, framework="pt") as opened:
            for i, name in enumerate(opened.offset_keys()):
                part = opened.get_slice(name)
                yield Entry(file, name, tuple(part.get_shape()), part.get_dtype(), i)
    except (OSError, SafetensorError) as error:
        raise WeightError(f"{file} is no complete safetensors file: {error}") from error


@contextmanager
def _reader(file: Path, ahead: bool) -> Iterator[Callable[[str], Tensor]]:
    """Reads tensors of a file one by one, on the host, without copying where it can."""
    with _read_ahead(file) if ahead else nullcontext():
        if file.suffix != ".safetensors":
            yield read_torch_file(file).__getitem__
            return
        with safe_open(file, framework="pt") as opened:
            yield opened.get_tensor


@contextmanager
def _read_ahead(file: Path) -> Iterator[None]:
    """A thread reads the file from front to back into the system's cache, at the disk's speed; a
    mapping alone fetches a few pages at a time, and waits for each."""
    stop = threading.Event()

    def read() -> None:
        buffer = bytearray(READ_AHEAD)
        with file.open("rb", buffering=0) as opened:
            while not stop.is_set() and opened.readinto(buffer):
                pass

    thread = threading.Thread(target=read, name="bishop-read-ahead", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def read_torch_file(file: Path) -> dict[str, Tensor]:
    """The tensors of a file in torch's own format, mapped rather than read; nothing is executed."""
    try:
        with torch.serialization.safe_globals([Namespace]):
            data = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError, EOFError, UnpicklingError) as error:
        raise WeightError(
            f"{file} is no file of tensors that can be read safely: {error}; "
            "save its tensors as safetensors"
        ) from error
    for key in ("model", "module", "state_dict"):
        if isinstance(data, dict) and isinstance(data.get(key), dict):
            data = data[key]
            break
    if not isinstance(data, dict):
        raise WeightError(f"{file} holds no dictionary of tensors")
    return {name: t for name, t in data.items() if isinstance(t, Tensor)}


def _dtype_name(dtype: torch.dtype) -> str:
    return next((n for n, d in FLOATS.items() if d == dtype), str(dtype).removeprefix("torch."))


def _rename(name: str, rules: Sequence[tuple[str, str]]) -> str:
    for pattern, replacement in rules:
        name = re.sub(pattern, replacement, name)
    return name


def _nearest(name: str, known: Iterable[str]) -> str:
    match = difflib.get_close_matches(name, list(known), 1)
    return f"; the nearest name is {match[0]!r}" if match else ""
