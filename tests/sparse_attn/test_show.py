"""Pictures of policies: what they show is what the policy says."""

import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from sparse_attn import policies, show
from sparse_attn.geometry import Grid
from sparse_attn.policy import Heads, ReadPolicy
from tests.sparse_attn.policies.strategies import any_policy

GRID = Grid(6, 6)


@given(any_policy(), st.data())
@settings(deadline=None, max_examples=40)
def test_cells_are_the_sets(policy: ReadPolicy, data: st.DataObject) -> None:
    t = data.draw(st.integers(0, policy.grid.tokens - 1))
    head = data.draw(st.integers(0, policy.heads.kv_heads - 1))
    cells = show.cell_states(policy, 0, head, t).flatten()
    assert (cells[t + 1 :] == show.FUTURE).all()
    assert cells[t] == show.QUERY
    state = show.example_state(policy, 0, t)
    stored = set(policy.resident(0, head, t, state, 0))
    for key in range(t):
        assert (key in stored) == (cells[key] in (show.STORED, show.READ))
    assert int((cells >= show.READ).sum()) <= policy.read_bound() + 1


def test_a_picture_is_written(tmp_path: Path) -> None:
    policy = policies.build("stencil", GRID, Heads(2, 2), 0.5)
    path = tmp_path / "p.png"
    show.policy_picture(policy, path)
    with Image.open(path) as image:
        found = {color for _, color in image.convert("RGB").getcolors(1 << 20) or []}
    wanted = {tuple(bytes.fromhex(color[1:])) for color in show.COLORS}
    assert wanted <= found


@pytest.mark.parametrize(
    ("positions", "heads", "message"),
    [
        ([36], None, "position 36 is not on a 6x6 grid"),
        ([0], [(2, 0)], "no head 0 of layer 2"),
        ([], None, "at least one position"),
    ],
)
def test_what_is_not_there_is_refused(
    positions: list[int], heads: list[tuple[int, int]] | None, message: str, tmp_path: Path
) -> None:
    policy = policies.build("window", GRID, Heads(2, 2), 0.5)
    with pytest.raises(ValueError, match=message):
        show.policy_picture(policy, tmp_path / "p.png", positions, heads)


def test_without_matplotlib_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.colors", None)
    policy = policies.build("window", GRID, Heads(2, 2), 0.5)
    with pytest.raises(show.ShowError, match="pip install matplotlib"):
        show.policy_picture(policy, tmp_path / "p.png")
