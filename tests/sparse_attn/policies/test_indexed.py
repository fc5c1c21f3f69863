"""What `indexed` refuses, and how it shares out what stays."""

from pathlib import Path

import pytest
import torch

from sparse_attn import policies
from sparse_attn.calibrate.windows import shared_windows
from sparse_attn.geometry import Grid
from sparse_attn.policies.index_file import IndexFile, IndexFileError
from sparse_attn.policies.indexed import Indexed
from sparse_attn.policy import Heads
from tests.sparse_attn.policies.strategies import MODEL, random_index

GRID, HEADS = Grid(6, 5, 1), Heads(2, 4)


def built(**options: object) -> Indexed:
    model, grid = options.pop("model", MODEL), options.pop("grid", GRID)
    given = {"file": random_index(GRID, HEADS)} | options
    policy = policies.build("indexed", grid, HEADS, 0.7, given, model)  # type: ignore[arg-type]
    assert isinstance(policy, Indexed)
    return policy


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "other"}, "for model random, the model in use has other"),
        ({"grid": Grid(6, 6)}, "for grid 6x5.eol, the model in use has 6x6"),
        ({"dims": 12}, "multiple of 8 up to the 16"),
        ({"dims": 24}, "multiple of 8 up to the 16"),
        ({"share": 3}, "4 KV heads cannot share by 3"),
        ({"recent": 0}, "recent must lie in 1..11"),
        ({"recent": 12}, "recent must lie in 1..11"),
        ({"resident": 0.0}, "resident must lie in"),
        ({"resident": 0.2, "anchors": "first_row"}, "leaves 1"),
        ({"file": "nowhere.safetensors"}, "cannot read the index file nowhere.safetensors"),
    ],
)
def test_what_cannot_be_says_so(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        built(**options)


def test_a_file_reads_back_as_written(tmp_path: Path) -> None:
    file = random_index(GRID, HEADS, dim=16)
    file.save(tmp_path / "i.safetensors")
    back = IndexFile.load(tmp_path / "i.safetensors")
    assert (back.model, back.grid) == (file.model, file.grid)
    for name in ("mean", "basis", "step", "cos", "sin", "lost", "lost_beside_first_row"):
        assert torch.equal(getattr(back, name), getattr(file, name)), name


def test_a_file_with_a_wrong_shape_says_which(tmp_path: Path) -> None:
    file = random_index(GRID, HEADS, dim=16)
    object.__setattr__(file, "step", file.step[:, :, :5])
    file.save(tmp_path / "i.safetensors")
    with pytest.raises(IndexFileError, match=r"step has shape \(2, 4, 5\), not \(2, 4, 16\)"):
        IndexFile.load(tmp_path / "i.safetensors")


@pytest.mark.parametrize("share", [1, 2, 4])
def test_windows_keep_to_the_budget_and_are_shared(share: int) -> None:
    policy = built(resident=0.5, share=share)
    rings = torch.tensor(policy.rings)
    assert rings.float().mean() <= 0.5 * GRID.tokens
    assert rings.min() >= 2
    assert (rings.unflatten(1, (-1, share)) == rings[:, ::share, None]).all()


def test_windows_go_where_the_mass_is() -> None:
    """One head looks back a little, another far, and the third not at all."""
    w = torch.arange(21)
    near, far, none = (w < 3) * 1.0, 0.8**w, torch.zeros(21)
    [windows] = shared_windows(torch.stack([near, far, none])[None], keys=8)
    assert windows[0] == 3
    assert windows[2] == 2
    assert windows[1] == 19, "what the others leave"
