"""Weights load strictly: whatever is wrong is named."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine.weights import WeightError, load, shards

SHAPES = {"a.weight": (4, 3), "b": (5,)}


def tensors() -> dict[str, torch.Tensor]:
    return {
        "a.weight": torch.randint(-127, 127, (4, 3), dtype=torch.int8),
        "a.weight.scale": torch.rand(4).half(),
        "b": torch.randn(5).half(),
    }


def test_int8_and_float_load(tmp_path: Path) -> None:
    saved = tensors()
    save_file(saved, tmp_path / "w.safetensors")
    loaded = load([tmp_path / "w.safetensors"], SHAPES)
    expected = saved["a.weight"].float() * saved["a.weight.scale"].float()[:, None]
    assert loaded["a.weight"].float().equal(expected)
    assert loaded["b"].float().equal(saved["b"].float())


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"b": None}, "'b'"),
        ({"extra": torch.zeros(1)}, "'extra'"),
        ({"b": torch.zeros(6)}, r"\(6,\)"),
        ({"b": torch.zeros(5, dtype=torch.int32)}, "int32"),
        ({"a.weight.scale": None}, "a.weight.scale"),
        ({"a.weight.scale": torch.zeros(3).half()}, "a.weight.scale"),
        ({"a.weight": torch.zeros(4, 3)}, "a.weight"),
    ],
)
def test_what_is_wrong_is_named(
    tmp_path: Path, change: dict[str, torch.Tensor | None], named: str
) -> None:
    kept = {k: v for k, v in (tensors() | change).items() if v is not None}
    save_file(kept, tmp_path / "w.safetensors")
    with pytest.raises(WeightError, match=named):
        load([tmp_path / "w.safetensors"], SHAPES)


def test_truncated_and_foreign_files(tmp_path: Path) -> None:
    save_file(tensors(), tmp_path / "w.safetensors")
    content = (tmp_path / "w.safetensors").read_bytes()
    for bad in (content[:-3], content[:20], b"PK\x03\x04 not a tensor", b""):
        (tmp_path / "w.safetensors").write_bytes(bad)
        with pytest.raises(WeightError, match=r"w\.safetensors"):
            load([tmp_path / "w.safetensors"], SHAPES)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    save_file({"b": torch.zeros(1)}, tmp_path / "m-00002-of-00003.safetensors")
    with pytest.raises(WeightError, match="m-00001-of-00003"):
        shards(tmp_path, "m")
    with pytest.raises(WeightError, match="nothing"):
        shards(tmp_path, "nothing")
