"""Which replica is chosen."""

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from engine.replicas.choice import Load, choose


@dataclass
class Candidate:
    load: Load


loads = st.builds(
    Load,
    interactive=st.integers(0, 5),
    batch=st.integers(0, 5),
    room=st.integers(1, 8),
    waiting=st.integers(0, 2),
    free_bytes=st.integers(0, 1000),
    suspected=st.booleans(),
)
candidates = st.lists(loads.map(Candidate), max_size=6)


@given(candidates, st.booleans(), st.booleans())
def test_only_a_replica_with_room_is_chosen(
    found: list[Candidate], interactive: bool, suspect: bool
) -> None:
    chosen = choose(found, interactive, suspect)
    able = [each for each in found if each.load.takes(interactive, suspect)]
    assert (chosen is None) == (not able)
    assert chosen is None or chosen in able


@given(candidates)
def test_a_line_goes_where_most_cache_is_free(found: list[Candidate]) -> None:
    chosen = choose(found, interactive=False)
    able = [each.load.free_bytes for each in found if each.load.takes(False)]
    assert chosen is None or chosen.load.free_bytes == max(able)


@given(candidates)
def test_an_interactive_picture_is_slowed_least(found: list[Candidate]) -> None:
    chosen = choose(found, interactive=True)
    able = [e.load.interactive / e.load.room for e in found if e.load.takes(True)]
    assert chosen is None or chosen.load.interactive / chosen.load.room == min(able)


@given(loads)
def test_a_suspect_is_alone(load: Load) -> None:
    assert not load.takes(True, suspect=True) or load.pictures == 0
    if load.suspected:
        assert not load.takes(True) and not load.takes(False)


def test_lines_wait_where_the_cache_is_full_but_interactive_pictures_do_not() -> None:
    full = Load(interactive=1, batch=3, room=8, waiting=1, free_bytes=0)
    assert full.takes(interactive=True)
    assert not full.takes(interactive=False)
