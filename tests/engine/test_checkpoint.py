"""Published checkpoints: what is wrong is named before memory is taken, and loading is lean."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.checkpoint import Checkpoint, Param, Source, random_tensors
from engine.weights import WeightError

CPU = torch.device("cpu")
PARAMS = [
    Param("fused", (Source("a", (4, 3)), Source("b", (2, 3)))),
    Param("some", (Source("c", (10, 2)),), rows=(7, 1, 9), dtype=torch.float32),
    Param("plus", (Source("d", (5,), lambda x: x.float() + 1),)),
]


def tensors(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    shapes = {s.name: s.shape for p in PARAMS for s in p.sources}
    return {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}


def save_shards(folder: Path, saved: dict[str, torch.Tensor]) -> list[Path]:
    """One tensor a shard, and an index."""
    names = {n: f"model-{i:05d}-of-{len(saved):05d}.safetensors" for i, n in enumerate(saved, 1)}
    for name, file in names.items():
        save_file({name: saved[name]}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return [folder / file for file in names.values()]


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sharded", [False, True])
def test_tensors_go_to_their_places(tmp_path: Path, stored: torch.dtype, sharded: bool) -> None:
    saved = tensors(stored)
    if sharded:
        save_shards(tmp_path, saved)
    else:
        save_file(saved, tmp_path / "model.safetensors")
    checkpoint = Checkpoint.of_folder(tmp_path)
    checkpoint.check(PARAMS)
    loaded = checkpoint.load(PARAMS, torch.bfloat16, CPU)
    assert loaded["fused"].equal(torch.cat([saved["a"], saved["b"]]).bfloat16())
    assert loaded["some"].equal(saved["c"][[7, 1, 9]].float())
    assert loaded["plus"].equal((saved["d"].float() + 1).bfloat16())


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"b": None}, "missing tensor 'b'"),
        ({"extra": torch.zeros(1)}, "unexpected tensor 'extra'"),
        ({"b": torch.zeros(3, 3)}, r"'b' has shape \(3, 3\), expected \(2, 3\)"),
        ({"d": torch.zeros(5, dtype=torch.int64)}, "'d' has dtype I64"),
        ({"d": torch.zeros(5, dtype=torch.int8)}, "'d' has dtype I8"),
    ],
)
def test_what_is_wrong_is_named(
    tmp_path: Path, change: dict[str, torch.Tensor | None], named: str
) -> None:
    kept = {k: v for k, v in (tensors() | change).items() if v is not None}
    save_file(kept, tmp_path / "model.safetensors")
    with pytest.raises(WeightError, match=named):
        Checkpoint.of_folder(tmp_path).check(PARAMS)


def test_tensors_that_are_not_needed_may_be_there(tmp_path: Path) -> None:
    save_file(tensors() | {"vision.x": torch.zeros(2)}, tmp_path / "model.safetensors")
    Checkpoint.of_folder(tmp_path).check(PARAMS, [r"vision\."])
    with pytest.raises(WeightError, match=r"vision\.x"):
        Checkpoint.of_folder(tmp_path).check(PARAMS, [r"visio\."])


def test_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(WeightError, match="download complete"):
        Checkpoint.of_folder(tmp_path)
    shards = save_shards(tmp_path, tensors())
    whole = shards[2].read_bytes()
    for bad in (whole[:-1], whole[:9], b""):
        shards[2].write_bytes(bad)
        with pytest.raises(WeightError, match=f"{shards[2].name} is no complete"):
            Checkpoint.of_folder(tmp_path)
    shards[2].unlink()
    with pytest.raises(WeightError, match=f"lacks the shard {shards[2].name}"):
        Checkpoint.of_folder(tmp_path)


def test_torch_files_execute_nothing(tmp_path: Path) -> None:
    saved, file = tensors(), tmp_path / "pytorch_model.bin"
    torch.save(saved, file)
    loaded = Checkpoint.of_folder(tmp_path).load(PARAMS, torch.float32, CPU)
    assert loaded["fused"].equal(torch.cat([saved["a"], saved["b"]]))
    torch.save(saved | {"x": Path("evil")}, file)
    with pytest.raises(WeightError, match="read safely"):
        Checkpoint.of_folder(tmp_path)
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(WeightError, match=r"pytorch_model\.bin"):
        Checkpoint.of_folder(tmp_path)


def test_random_tensors_are_reproducible() -> None:
    one, other = (random_tensors(PARAMS, torch.bfloat16, CPU, seed=3) for _ in range(2))
    assert all(one[p.name].equal(other[p.name]) for p in PARAMS)
    assert {n: (tuple(t.shape), t.dtype) for n, t in one.items()} == {
        p.name: (p.shape, p.dtype or torch.bfloat16) for p in PARAMS
    }


MEASURE = """
import sys, threading, time
from pathlib import Path
import torch
from engine.checkpoint import Checkpoint, Param, Source

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

shards, rows = int(sys.argv[2]), int(sys.argv[3])
params = [Param(f"w{i}", (Source(f"t{i}", (rows, 1024)),)) for i in range(2 * shards)]
checkpoint = Checkpoint.of_folder(Path(sys.argv[1]))
checkpoint.check(params)
torch.zeros(1 << 20).bfloat16()
before, peak, done = resident(), 0, False
def watch():
    global peak
    while not done:
        peak = max(peak, resident())
        time.sleep(0.0002)
thread = threading.Thread(target=watch)
thread.start()
kept = checkpoint.load(params, torch.bfloat16, torch.device("cpu"))
done = True
thread.join()
print(peak - before, sum(t.nbytes for t in kept.values()))
"""


def test_loading_takes_little_more_than_what_stays(tmp_path: Path) -> None:
    """At most 1.2 x the largest shard besides the weights, files in the page cache counted in."""
    shards, rows = 4, 4096  # 32 MiB in fp32 on disk a shard, half of it in bf16
    names = {}
    for i in range(shards):
        file = f"model-{i:05d}.safetensors"
        saved = {f"t{2 * i + j}": torch.randn(rows, 1024) for j in range(2)}
        names |= dict.fromkeys(saved, file)
        save_file(saved, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    largest = max(f.stat().st_size for f in tmp_path.glob("*.safetensors"))
    command = [sys.executable, "-c", MEASURE, str(tmp_path), str(shards), str(rows)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    peak, stays = map(int, printed)
    assert stays == shards * 2 * rows * 1024 * 2
    assert peak - stays <= 1.2 * largest, f"{(peak - stays) / largest:.2f} x the largest shard"
    assert load_file(tmp_path / "model-00000.safetensors")
