"""Strict loading of safetensors: every name, shape and dtype must be the expected one."""

import difflib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

SCALE = ".scale"
"""Suffix of the fp16 scale (one per output row) that goes with an int8 matrix."""


class WeightError(ValueError):
    """A weight file or tensor that is not what the model needs; the message names it."""


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor as stored: float with no scale, or int8 with `scale` [rows]."""

    data: Tensor
    scale: Tensor | None = None

    def float(self) -> Tensor:
        """Dequantised, fp32."""
        full = self.data.float()
        if self.scale is None:
            return full
        return full * self.scale.float().view(-1, *[1] * (full.ndim - 1))


def load(files: list[Path], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Weight]:
    """All tensors named in `shapes`, from `files`.

    Raises WeightError for an unreadable file, a missing, unexpected or repeated name, and a wrong
    shape or dtype; each names the tensor and the file.
    """
    raw: dict[str, Tensor] = {}
    for path in files:
        for name, tensor in _tensors(path):
            if name in raw:
                raise WeightError(f"{path.name}: tensor {name!r} occurs in two files")
            raw[name] = tensor
    scales = {n: raw.pop(n) for n in list(raw) if n.endswith(SCALE) and n[: -len(SCALE)] in raw}
    _check_names(raw, shapes)
    return {name: _weight(name, raw[name], scales, shapes[name]) for name in shapes}


def shards(folder: Path, stem: str) -> list[Path]:
    """`stem.safetensors`, or all of `stem-0000i-of-0000n.safetensors`, complete and in order."""
    single = folder / f"{stem}.safetensors"
    if single.is_file():
        return [single]
    found = sorted(folder.glob(f"{stem}-*-of-*.safetensors"))
    if not found:
        raise WeightError(f"{folder} holds no {stem}.safetensors and no shards of it")
    total = int(found[0].stem.rsplit("-", 1)[1])
    names = {f"{stem}-{i:05d}-of-{total:05d}.safetensors" for i in range(1, total + 1)}
    missing = sorted(names - {p.name for p in found})
    if missing:
        raise WeightError(f"{folder} lacks the shard {missing[0]}")
    return found


def load_json(path: Path) -> dict[str, object]:
    """A JSON object from a file. Raises WeightError if it is missing or no object."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise WeightError(f"cannot read {path}: {error}") from error
    if not isinstance(data, dict):
        raise WeightError(f"{path} holds no JSON object")
    return data


def _tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                yield name, file.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise WeightError(f"{path} is no readable safetensors file: {error}") from error


def _check_names(raw: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
    for name in shapes:
        if name not in raw:
            raise WeightError(f"missing tensor {name!r}{_nearest(name, raw)}")
    for name in raw:
        if name not in shapes:
            raise WeightError(f"unexpected tensor {name!r}{_nearest(name, shapes)}")


def _nearest(name: str, known: Mapping[str, object]) -> str:
    match = difflib.get_close_matches(name, known, 1)
    return f"; the nearest name is {match[0]!r}" if match else ""


def _weight(
    name: str, data: Tensor, scales: Mapping[str, Tensor], shape: tuple[int, ...]
) -> Weight:
    if tuple(data.shape) != shape:
        raise WeightError(f"tensor {name!r} has shape {tuple(data.shape)}, expected {shape}")
    scale = scales.get(name + SCALE)
    if data.dtype == torch.int8:
        if scale is None or tuple(scale.shape) != shape[:1]:
            raise WeightError(f"int8 tensor {name!r} needs {name + SCALE!r} of shape {shape[:1]}")
        return Weight(data, scale)
    if scale is not None or not data.is_floating_point():
        raise WeightError(f"tensor {name!r} has dtype {data.dtype}, expected a float or int8")
    return Weight(data)
