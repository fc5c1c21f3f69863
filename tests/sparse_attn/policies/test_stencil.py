"""Stencils: the built-in one, the file, and the errors of both."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparse_attn import policies
from sparse_attn.geometry import Grid
from sparse_attn.policies.stencil import Stencil, default_stencil
from sparse_attn.policies.stencil_file import (
    FittedStencil,
    StencilError,
    StencilFile,
    format_offsets,
    parse_offsets,
)
from sparse_attn.policy import Heads

GRID = Grid(6, 5, 1)
HEADS = Heads(2, 2)
OFFSETS = ((0, 0), (0, 1), (1, -2), (1, -1), (1, 0), (3, 2))


def file_of(**changes: object) -> StencilFile:
    layer = (OFFSETS, ((0, 0), (1, 0)))
    values = {"model": "mini", "grid": GRID, "layers": 2, "kv_heads": 2}
    return StencilFile(**values | {"stencils": {0.8: FittedStencil(0, (layer, layer))}} | changes)  # type: ignore[arg-type]


def built(path: Path, **options: object) -> Stencil:
    model = options.pop("model", "mini")
    sparsity = options.pop("sparsity", 0.8)
    grid = options.pop("grid", GRID)
    options = {"file": str(path)} | options
    policy = policies.build("stencil", grid, HEADS, sparsity, options, model)  # type: ignore[arg-type]
    assert isinstance(policy, Stencil)
    return policy


def test_a_file_reads_back_as_written(tmp_path: Path) -> None:
    file_of().save(tmp_path / "s.yaml")
    assert StencilFile.load(tmp_path / "s.yaml") == file_of()


def test_heads_keep_their_own_offsets_and_rings(tmp_path: Path) -> None:
    file_of().save(tmp_path / "s.yaml")
    policy = built(tmp_path / "s.yaml")
    assert policy.ring(0) == (3 * 6 + 2 + 1, 6 + 1)
    assert policy.read_bound() == 6
    t = GRID.position(4, 5)
    assert policy.read_total(t) == 2 * (len(OFFSETS) - 2 + 2), "offsets over the row edge are out"


@given(st.sets(st.tuples(st.integers(0, 5), st.integers(-5, 5)), max_size=40))
def test_offsets_survive_their_text(offsets: set[tuple[int, int]]) -> None:
    assert set(parse_offsets(format_offsets(offsets))) == offsets


@given(st.integers(1, 35), st.one_of(st.none(), st.integers(1, 6)))
def test_the_default_uses_its_budget_and_keeps_its_bound(budget: int, rows: int | None) -> None:
    stencil = default_stencil(GRID, budget, rows)
    assert stencil.size <= budget
    assert stencil.window >= 1
    if rows is None:
        assert stencil.size == budget
    else:
        assert stencil.rows <= rows


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "other"}, "for model mini, the model in use has other"),
        ({"grid": Grid(5, 6)}, "for grid 6x5.eol, the model in use has 5x6"),
        ({"sparsity": 0.9}, "has sparsities 0.8, not 0.9"),
        ({"rows": 2}, "3 rows back, more than the bound of 2"),
        ({"anchors": 3}, "was made for 0 anchors at sparsity 0.8, not 3"),
        ({"file": "nowhere.yaml"}, "cannot read the stencil file nowhere.yaml"),
    ],
)
def test_a_file_of_something_else_is_refused(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    file_of().save(tmp_path / "s.yaml")
    with pytest.raises(StencilError, match=message):
        built(tmp_path / "s.yaml", **changes)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("kind: stencil", "kind: stencl", "not a stencil file"),
        ("kv_heads:", "kv_head:", "did you mean 'kv_heads'"),
        ("kv_heads: 2", "", "'kv_heads' is missing"),
        ("anchors: 0", "anchor: 0", "needs `anchors` and `layers`"),
        ("3:2", "3:x", "cannot read the offsets"),
        ("3:2", "3:2,2", "lists an offset twice"),
        ("3:2", "9:2", "is not behind the query"),
        ("layers: 2", "layers: 3", "not 3 of 2"),
    ],
)
def test_a_broken_file_says_where(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = tmp_path / "s.yaml"
    file_of().save(path)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(StencilError, match=message):
        built(path)


def test_what_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_bytes(b"\xbe\xef")
    with pytest.raises(StencilError, match="cannot read the stencil file"):
        built(tmp_path / "s.yaml")


def test_a_file_above_its_budget_is_refused(tmp_path: Path) -> None:
    file = file_of()
    file_of(stencils={0.95: file.of(0.8)}).save(tmp_path / "s.yaml")
    with pytest.raises(StencilError, match="more than the 2 its sparsity allows"):
        built(tmp_path / "s.yaml", sparsity=0.95)
