"""Scenes of one to three groups of sprites, with a caption and the exact truth of the picture.

Sizes and positions are multiples of `GRID` pixels, the side of one visual token: the same sprite
then gives the same tokens wherever it stands, which is what a small model can learn well.
"""

import math
import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Literal

import numpy as np
import numpy.typing as npt

from engine.models.mini_text import MAX_WORDS, PLURAL, SPECIAL, UNK, WordTokenizer
from training.lexicon import COLORS, COUNTS, build_tokenizer, plural
from training.sprites import Sprite, SpritePack

CANVAS = 192
GRID = 8
MAX_SLOTS = 6
SIZES = tuple(range(56, 161, GRID))
STYLE_WEIGHTS = {
    "cartoon": 1.3,
    "vector": 1.3,
    "flat": 1.3,
    "glossy": 0.8,
    "classic": 0.8,
    "blob": 0.7,
    "3d": 1.0,
}
"""Flat, clean sets are drawn more often: they survive 24 x 24 tokens best."""

Split = Literal["train", "pairs", "styles"]
Kind = Literal["plain", "gradient", "checkered", "striped"]
KINDS: tuple[Kind, ...] = ("plain", "gradient", "checkered", "striped")
RELATIONS = {
    "left": ("left", "of"),
    "right": ("right", "of"),
    "above": ("above",),
    "below": ("below",),
    "next": ("next", "to"),
    "and": ("and",),
}
Point = tuple[int, int]


@dataclass(frozen=True)
class Thing:
    """A group of equal objects; `color` and `size_word` are set when the caption says them."""

    concept: int
    style: int
    count: int = 1
    color: str | None = None
    size_word: str | None = None


@dataclass(frozen=True)
class Placement:
    """One sprite on the canvas: top left corner and side in pixels."""

    sprite: int
    size: int
    x: int
    y: int


@dataclass(frozen=True)
class Background:
    """Colours as RGB in 0..1; `cell` is the side of a square or stripe in pixels."""

    kind: Kind
    first: str
    second: str
    rgb: tuple[float, ...]
    horizontal: bool
    cell: int


@dataclass(frozen=True)
class Scene:
    """The truth of one picture. `relation` is how the first thing stands to the others."""

    words: tuple[str, ...]
    things: tuple[Thing, ...]
    relation: str | None
    region: str | None
    placements: tuple[Placement, ...]
    background: Background


@dataclass(frozen=True)
class SceneBatch:
    """Scenes as arrays: what the composer and the transformer read."""

    text: npt.NDArray[np.int16]  # [n, 32] word ids
    slots: npt.NDArray[np.int16]  # [n, MAX_SLOTS, 4]: sprite, size (0: empty), x, y
    background: npt.NDArray[np.float32]  # [n, 9]: kind, rgb, rgb, horizontal, cell

    def __getitem__(self, part: slice) -> "SceneBatch":
        return SceneBatch(self.text[part], self.slots[part], self.background[part])


def stable_hash(*parts: str) -> int:
    """The same on every machine and in every process."""
    return zlib.crc32("|".join(parts).encode())


@dataclass
class SceneSampler:
    """Draws scenes. `split` "train" avoids what "pairs" and "styles" draw from."""

    pack: SpritePack
    rng: random.Random
    split: Split = "train"
    tokenizer: WordTokenizer = field(init=False)

    def __post_init__(self) -> None:
        self.tokenizer = build_tokenizer(self.pack.concepts, self.pack.styles)
        self.sprite_of: dict[tuple[int, int], int] = {
            (s.concept, s.style): i for i, s in enumerate(self.pack.sprites)
        }
        self.styles_of: dict[int, list[int]] = {}
        for concept, style in self.sprite_of:
            self.styles_of.setdefault(concept, []).append(style)
        self.nouns = [self._noun(label) for label in self.pack.concepts]
        self.weights = [STYLE_WEIGHTS.get(style, 1.0) for style in self.pack.styles]
        self.held_styles = [key for key in self.sprite_of if self.is_held_style(*key)]
        self.held_pairs = [] if self.split != "pairs" else self._all_held_pairs()
        held = {"train": True, "pairs": self.held_pairs, "styles": self.held_styles}
        if not held[self.split]:
            concepts = len(self.pack.concepts)
            raise ValueError(f"{concepts} concepts are too few to hold {self.split} out")

    # what is held out

    def is_held_style(self, concept: int, style: int) -> bool:
        """About one in eighteen pictures of a concept in a style is never shown in training."""
        label = self.pack.concepts[concept]
        return stable_hash("style3", label, self.pack.styles[style]) % 18 == 0

    def is_held_pair(self, one: int, other: int) -> bool:
        """One in twenty pairs of concepts never stands in one training picture."""
        a, b = sorted((self.pack.concepts[one], self.pack.concepts[other]))
        return stable_hash("pair", a, b) % 20 == 0

    # drawing

    def sample(self) -> Scene:
        """One scene of the split, with its caption."""
        things = self._things()
        background, said = self._background(things)
        layout = _LAYOUTS[len(things) - 1]
        things, placed, relation, region = layout(self, things)
        words = self._caption(things, relation, region, background if said else None)
        return Scene(tuple(words), tuple(things), relation, region, tuple(placed), background)

    def _things(self) -> list[Thing]:
        if self.split == "styles":
            return [Thing(*self.rng.choice(self.held_styles))]
        while True:
            concepts = self._concepts()
            things = self._styled(concepts)
            held = [self.is_held_style(t.concept, t.style) for t in things]
            pairs = [self.is_held_pair(a, b) for a, b in combinations(concepts, 2)]
            if not any(held) and (self.split == "pairs" or not any(pairs)):
                return things

    def _concepts(self) -> list[int]:
        if self.split == "pairs":
            pair = list(self.rng.choice(self.held_pairs))
            return self.rng.sample(pair, 2)
        count = self.rng.choices((1, 2, 3), (0.45, 0.40, 0.15))[0]
        return self.rng.sample(range(len(self.pack.concepts)), count)

    def _styled(self, concepts: list[int]) -> list[Thing]:
        common = self.rng.choices(range(len(self.weights)), self.weights)[0]
        mixed = len(concepts) > 1 and self.rng.random() < 0.15
        return [Thing(c, self._style(c, None if mixed else common)) for c in concepts]

    def _style(self, concept: int, wanted: int | None) -> int:
        styles = self.styles_of[concept]
        if wanted in styles:
            return wanted
        return self.rng.choices(styles, [self.weights[s] for s in styles])[0]

    def _background(self, things: Sequence[Thing]) -> tuple[Background, bool]:
        """A background every thing can be seen on, and whether the caption speaks of it."""
        said = self.rng.random() < 0.88
        while True:
            found = self._any_background(said)
            if self.rng.random() < 0.15 or self._is_visible(things, found):
                return found, said

    def _any_background(self, said: bool) -> Background:
        kind = self.rng.choices(KINDS, (0.66, 0.26, 0.05, 0.03) if said else (1, 0, 0, 0))[0]
        first, second = self._color_pair()
        if not said and self.rng.random() < 0.6:
            first = "white"
        rgb = [*self._shade(first), *self._shade(second)]
        horizontal, cell = self.rng.random() < 0.5, self.rng.choice((16, 24, 32))
        return Background(kind, first, second, tuple(rgb), horizontal, cell)

    def _color_pair(self) -> tuple[str, str]:
        weights = [0.5 if name == "black" else 1.6 if name == "white" else 1.0 for name in COLORS]
        first = self.rng.choices(list(COLORS), weights)[0]
        return first, self.rng.choice([name for name in COLORS if name not in (first, "black")])

    def _shade(self, color: str) -> list[float]:
        return [min(max(v + self.rng.randint(-6, 6), 0), 255) / 255 for v in COLORS[color]]

    def _is_visible(self, things: Sequence[Thing], background: Background) -> bool:
        shades = [background.rgb[:3]] + ([background.rgb[3:]] if background.kind != "plain" else [])
        means = [self._sprite(thing).mean for thing in things]
        return all(_distance(mean, shade) > 75 for mean in means for shade in shades)

    # layouts: things -> placements

    def _place(self, thing: Thing, size: int, centers: Sequence[Point]) -> list[Placement]:
        sprite = self.sprite_of[thing.concept, thing.style]
        corners = [(_snap(x - size / 2, size), _snap(y - size / 2, size)) for x, y in centers]
        return [Placement(sprite, size, x, y) for x, y in corners]

    def _jitter(self, *steps: int) -> int:
        return GRID * self.rng.choice([*steps, *(-s for s in steps)])

    def _sprite(self, thing: Thing) -> Sprite:
        return self.pack.sprites[self.sprite_of[thing.concept, thing.style]]

    # captions

    def _caption(
        self,
        things: Sequence[Thing],
        relation: str | None,
        region: str | None,
        background: Background | None,
    ) -> list[str]:
        same = len({thing.style for thing in things}) == 1
        style, own = self._style_words(things[0]) if same else [], not same
        if same and style and self.rng.random() < 0.15:
            style, own = [], True
        nouns = [self._noun_phrase(thing, own and self.rng.random() < 0.85) for thing in things]
        tail = [style, self._background_words(background)]
        if self.rng.random() < 0.4:
            tail.reverse()
        head = _join(nouns, relation, self._coin(0.3))
        return [*head, *self._region_words(region), *tail[0], *tail[1]]

    def _noun_phrase(self, thing: Thing, with_style: bool) -> list[str]:
        words = [COUNTS[thing.count - 1] if thing.count > 1 or self._coin(0.92) else "the"]
        words += [thing.size_word] if thing.size_word else []
        words += [self.pack.styles[thing.style]] if with_style else []
        words += [thing.color] if thing.color else []
        return words + self.nouns[thing.concept][thing.count > 1]

    def _style_words(self, thing: Thing) -> list[str]:
        style = self.pack.styles[thing.style]
        forms: tuple[list[str], ...] = (
            [],
            [style, "style"],
            ["in", style, "style"],
            ["in", "a", style, "style"],
        )
        return list(self.rng.choices(forms, (0.3, 0.5, 0.15, 0.05))[0])

    def _background_words(self, background: Background | None) -> list[str]:
        if background is None:
            return []
        words = _background_phrase(background)
        opening = self.rng.choices((["on", "a"], ["on"], ["with", "a"], []), (0.8, 0.1, 0.06, 0.04))
        plain = background.kind == "plain" and self._coin(0.1)
        return [*opening[0], *words] if not plain else ["on", *words[:1]]

    def _region_words(self, region: str | None) -> list[str]:
        if region is None:
            return []
        corner = " " in region and self._coin(0.25)
        return ["in", "the", *region.split(), *(["corner"] if corner else [])]

    def _color_word(self, thing: Thing) -> str | None:
        color, label = self._sprite(thing).color, self.pack.concepts[thing.concept]
        return color if color and self._coin(0.2) and not set(label.split()) & set(COLORS) else None

    def _noun(self, label: str) -> tuple[list[str], list[str]]:
        return self.tokenizer.normalize(label), self.tokenizer.normalize(plural(label))

    def _coin(self, probability: float) -> bool:
        return self.rng.random() < probability

    def _all_held_pairs(self) -> list[tuple[int, int]]:
        pairs = combinations(range(len(self.pack.concepts)), 2)
        return [(a, b) for a, b in pairs if self.is_held_pair(a, b)]


Layout = tuple[list[Thing], list[Placement], str | None, str | None]


def _one_thing(draw: SceneSampler, things: list[Thing]) -> Layout:
    count = draw.rng.choices((1, 2, 3, 4), (0.76, 0.10, 0.08, 0.06))[0]
    thing = _described(draw, things[0], count)
    if count > 1:
        return [thing], _many(draw, thing), None, None
    size = draw.rng.choice(SIZES[2:])
    word = "small" if size <= 80 else "big" if size >= 136 else None
    thing = _described(draw, things[0], 1, word if draw.rng.random() < 0.6 else None)
    center, region = _region(draw, size)
    return [thing], draw._place(thing, size, [center]), None, region


def _region(draw: SceneSampler, size: int) -> tuple[Point, str | None]:
    """Where a single object stands, and the words for it when the caption says so."""
    room = (CANVAS - size) // GRID
    if draw.rng.random() < 0.35:
        return (96 + draw._jitter(0, 1), 96 + draw._jitter(0, 1)), None
    x, y = (GRID * draw.rng.randint(0, room) + size // 2 for _ in range(2))
    vertical = "top" if y < 84 else "bottom" if y > 108 else ""
    horizontal = "left" if x < 84 else "right" if x > 108 else ""
    said = f"{vertical} {horizontal}".strip() or "center"
    return (x, y), said if draw.rng.random() < 0.7 else None


def _many(draw: SceneSampler, thing: Thing) -> list[Placement]:
    size = draw.rng.choice({2: (72, 80, 88), 3: (56, 64), 4: (72, 80, 88)}[thing.count])
    if thing.count == 4:
        centers = [(48, 48), (144, 48), (48, 144), (144, 144)]
    else:
        line = (48, 144) if thing.count == 2 else (32, 96, 160)
        across = 96 + draw._jitter(0, 1, 2)
        centers = [(m, across) for m in line]
        if draw.rng.random() < 0.2:
            centers = [(y, x) for x, y in centers]
    return draw._place(thing, size, centers)


def _two_things(draw: SceneSampler, things: list[Thing]) -> Layout:
    weights = (0.22, 0.22, 0.2, 0.2, 0.08, 0.08)
    relation = draw.rng.choices(tuple(RELATIONS), weights)[0]
    counts = draw.rng.choices(((1, 1), (2, 1), (1, 2), (3, 1), (1, 3)), (66, 13, 13, 4, 4))[0]
    things = [_described(draw, t, n) for t, n in zip(things, counts, strict=True)]
    side_by_side = relation not in ("above", "below")
    first_low = relation in ("left", "above") or (
        relation in ("next", "and") and draw.rng.random() < 0.7
    )
    placed = []
    for thing, low in zip(things, (first_low, not first_low), strict=True):
        placed += _half(draw, thing, 48 if low else 144, side_by_side)
    return things, placed, relation, None


def _half(draw: SceneSampler, thing: Thing, middle: int, side_by_side: bool) -> list[Placement]:
    """One thing in the left, right, top or bottom half."""
    size = draw.rng.choice({1: (72, 80, 88, 96), 2: (72, 80, 88), 3: (56, 64)}[thing.count])
    along = {1: (96 + draw._jitter(0, 1, 2, 3),), 2: (48, 144), 3: (32, 96, 160)}[thing.count]
    centers = [(middle, a) if side_by_side else (a, middle) for a in along]
    return draw._place(thing, size, centers)


def _three_things(draw: SceneSampler, things: list[Thing]) -> Layout:
    things = [_described(draw, thing, 1) for thing in things]
    relation = draw.rng.choices(("row", "above", "below"), (0.5, 0.25, 0.25))[0]
    if relation == "row":
        spots = [(m, 96 + draw._jitter(0, 1, 2)) for m in (32, 96, 160)]
        sizes = [draw.rng.choice((56, 64)) for _ in things]
    else:
        one, two = (48, 144) if relation == "above" else (144, 48)
        spots = [(96 + draw._jitter(0, 1, 2, 3), one), (48, two), (144, two)]
        sizes = [draw.rng.choice((72, 80, 88)) for _ in things]
    parts = zip(things, sizes, spots, strict=True)
    return things, [p for t, s, at in parts for p in draw._place(t, s, [at])], relation, None


_LAYOUTS: tuple[Callable[[SceneSampler, list[Thing]], Layout], ...] = (
    _one_thing,
    _two_things,
    _three_things,
)


def _described(draw: SceneSampler, thing: Thing, count: int, size: str | None = None) -> Thing:
    return Thing(thing.concept, thing.style, count, draw._color_word(thing), size)


def _join(nouns: list[list[str]], relation: str | None, row: bool) -> list[str]:
    first = nouns[0]
    if len(nouns) == 1 or relation is None:
        return first
    if len(nouns) == 2:
        return [*first, *RELATIONS[relation], *nouns[1]]
    rest = [*nouns[1], "and", *nouns[2]]
    if relation == "row":
        return [*first, *rest] if row else [*first, *rest, "in", "a", "row"]
    return [*first, relation, *rest]


def _background_phrase(background: Background) -> list[str]:
    first, second = background.first, background.second
    if background.kind == "plain":
        return [first, "background"]
    if background.kind == "gradient":
        return [first, "to", second, "gradient", "background"]
    return [background.kind, first, "and", second, "background"]


def _snap(corner: float, size: int) -> int:
    return min(max(round(corner / GRID) * GRID, 0), CANVAS - size)


def _distance(mean: tuple[int, ...], shade: Sequence[float]) -> float:
    return math.dist(mean, [255 * value for value in shade])


def blur_words(words: Sequence[str], rng: random.Random) -> list[str]:
    """What a careless prompt does to a caption: words unknown, added or left out."""
    kept = list(words)
    if rng.random() < 0.10:
        kept = [SPECIAL[UNK] if rng.random() < 0.12 else word for word in kept]
    if rng.random() < 0.12:
        kept = [w for w in kept if w not in _OPTIONAL or rng.random() < 0.5] or kept
    if rng.random() < 0.20:
        for _ in range(rng.randint(1, 3)):
            kept.insert(rng.randint(0, len(kept)), SPECIAL[UNK])
    return kept[:MAX_WORDS]


_OPTIONAL = {"a", "the", "and", "of", "style", "background", "in", "on", "row", "corner", PLURAL}


def to_arrays(
    scenes: Sequence[Scene], tokenizer: WordTokenizer, blur: random.Random | None = None
) -> SceneBatch:
    """Arrays of scenes; with `blur`, captions pass `blur_words`."""
    text = np.zeros((len(scenes), 32), np.int16)
    slots = np.zeros((len(scenes), MAX_SLOTS, 4), np.int16)
    background = np.zeros((len(scenes), 9), np.float32)
    ids = {word: i for i, word in enumerate(tokenizer.words)}
    for i, scene in enumerate(scenes):
        words = blur_words(scene.words, blur) if blur else scene.words[:MAX_WORDS]
        text[i] = tokenizer.pad([ids[word] for word in words])
        for j, p in enumerate(scene.placements):
            slots[i, j] = p.sprite, p.size, p.x, p.y
        b = scene.background
        background[i] = KINDS.index(b.kind), *b.rgb, b.horizontal, b.cell
    return SceneBatch(text, slots, background)


def draw_scenes(pack: SpritePack, count: int, seed: int, split: Split = "train") -> list[Scene]:
    """The first `count` scenes of a seed."""
    sampler = SceneSampler(pack, random.Random(seed), split)
    return [sampler.sample() for _ in range(count)]
