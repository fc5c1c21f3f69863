import random
from itertools import combinations

import numpy as np
import pytest

from engine.models.mini_text import MAX_WORDS, SPECIAL, UNK
from training.prompts import FIXED
from training.scenes import (
    CANVAS,
    GRID,
    MAX_SLOTS,
    SIZES,
    Scene,
    SceneSampler,
    Split,
    blur_words,
    draw_scenes,
    to_arrays,
)
from training.sprites import SpritePack


def centers(scene: Scene, thing: int, pack: SpritePack) -> tuple[float, float]:
    """Mean centre of one thing's sprites."""
    concept = scene.things[thing].concept
    mine = [p for p in scene.placements if pack.sprites[p.sprite].concept == concept]
    assert len(mine) == scene.things[thing].count
    middles = [(p.x + p.size / 2, p.y + p.size / 2) for p in mine]
    return tuple(np.mean(middles, 0))  # type: ignore[return-value]


def test_captions_tell_the_truth(pack: SpritePack) -> None:
    for scene in draw_scenes(pack, 600, 1):
        words = scene.words
        assert 1 <= len(words) <= MAX_WORDS
        for thing in scene.things:
            assert pack.concepts[thing.concept].replace(" ", "_") in words
            assert thing.color is None or thing.color in words
            number = ("a", "two", "three", "four")[thing.count - 1]
            assert number in words or "the" in words
        if scene.relation in ("left", "right", "above", "below") and len(scene.things) == 2:
            (x0, y0), (x1, y1) = (centers(scene, i, pack) for i in (0, 1))
            ahead = {"left": x1 - x0, "right": x0 - x1, "above": y1 - y0, "below": y0 - y1}
            assert scene.relation in words and ahead[scene.relation] > 20


def test_regions_are_where_the_words_say(pack: SpritePack) -> None:
    seen = [s for s in draw_scenes(pack, 600, 2) if s.region]
    assert len({s.region for s in seen}) == 9
    for scene in seen:
        x, y = centers(scene, 0, pack)
        found = f"{'top' if y < 84 else 'bottom' if y > 108 else ''} "
        found += "left" if x < 84 else "right" if x > 108 else ""
        assert scene.region == (found.strip() or "center")


def test_placements_lie_on_the_token_grid(pack: SpritePack) -> None:
    for scene in draw_scenes(pack, 300, 3):
        for p in scene.placements:
            assert p.size in SIZES and p.x % GRID == 0 and p.y % GRID == 0
            assert 0 <= p.x <= CANVAS - p.size and 0 <= p.y <= CANVAS - p.size


def test_training_never_shows_what_is_held_out(pack: SpritePack) -> None:
    sampler = SceneSampler(pack, random.Random(4))
    for _ in range(500):
        things = sampler.sample().things
        assert not any(sampler.is_held_style(t.concept, t.style) for t in things)
        for a, b in combinations(things, 2):
            assert not sampler.is_held_pair(a.concept, b.concept)


@pytest.mark.parametrize("split", ["pairs", "styles"])
def test_held_out_splits_show_nothing_else(pack: SpritePack, split: Split) -> None:
    sampler = SceneSampler(pack, random.Random(5), split)
    for _ in range(50):
        things = sampler.sample().things
        if split == "pairs":
            assert sampler.is_held_pair(things[0].concept, things[1].concept)
        else:
            assert all(sampler.is_held_style(t.concept, t.style) for t in things)


def test_the_same_seed_draws_the_same_scenes(pack: SpritePack) -> None:
    assert draw_scenes(pack, 20, 6) == draw_scenes(pack, 20, 6)
    assert draw_scenes(pack, 20, 6) != draw_scenes(pack, 20, 7)


def test_fixed_prompts_are_not_held_out_styles(pack: SpritePack) -> None:
    """They compare versions of the model; held-out combinations have sheets of their own."""
    words = SceneSampler(pack, random.Random(0))
    single = [p.split(" style")[0].split() for p in FIXED if " of " not in p and "above" not in p]
    shown = [(w[-1], " ".join(w[1:-1])) for w in single]
    known = {name: i for i, name in enumerate(pack.concepts)}
    styles = list(pack.styles)
    for style, name in shown:
        if name in known:
            assert not words.is_held_style(known[name], styles.index(style))


def test_blurred_captions_stay_short_and_keep_most_words() -> None:
    rng, words = random.Random(8), ["a", "red_apple"] * 15
    blurred = [blur_words(words, rng) for _ in range(300)]
    assert all(0 < len(b) <= MAX_WORDS for b in blurred)
    assert any(SPECIAL[UNK] in b for b in blurred)
    assert sum(b == words for b in blurred) > 120


def test_arrays_hold_every_placement(pack: SpritePack) -> None:
    scenes = draw_scenes(pack, 40, 9)
    words = SceneSampler(pack, random.Random(0)).tokenizer
    batch = to_arrays(scenes, words)
    assert batch.text.shape == (40, 32) and batch.slots.shape == (40, MAX_SLOTS, 4)
    used = (batch.slots[:, :, 1] > 0).sum(1)
    assert used.tolist() == [len(s.placements) for s in scenes]
    assert words.normalize(words.decode(batch.text[0].tolist())) == list(scenes[0].words)
    assert len(batch[3:7].text) == 4
