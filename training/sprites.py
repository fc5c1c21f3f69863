"""Sprites with names, rendered from npm packages of permissive emoji sets into one pack."""

import io
import json
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
from PIL import Image

from training.lexicon import COLORS, read_concepts

SIZE = 160
"""Side of a stored sprite in pixels, RGBA."""
MIN_STYLES = 5
_NAMES_PACKAGE = "emojibase-data@17.0.0"
_OBJECT_COLORS = {
    **COLORS,
    "yellow": (250, 205, 65),
    "green": (80, 160, 70),
    "pink": (245, 140, 180),
    "purple": (140, 80, 185),
}


@dataclass(frozen=True)
class SpriteSet:
    """One emoji set: the style word of captions, its npm package and its licence."""

    style: str
    package: str
    version: str
    license: str
    attribution: str


SETS = (
    SpriteSet("cartoon", "@iconify-json/noto", "1.2.9", "Apache-2.0", "Noto Emoji, Google"),
    SpriteSet("vector", "@iconify-json/twemoji", "1.2.5", "CC-BY-4.0", "Twemoji, Twitter"),
    SpriteSet("flat", "@iconify-json/fluent-emoji-flat", "1.2.6", "MIT", "Fluent Emoji, Microsoft"),
    SpriteSet("glossy", "@iconify-json/fluent-emoji", "1.2.7", "MIT", "Fluent Emoji, Microsoft"),
    SpriteSet("classic", "@iconify-json/emojione", "1.2.3", "CC-BY-4.0", "EmojiOne 2, EmojiOne"),
    SpriteSet("blob", "@iconify-json/noto-v1", "1.2.5", "Apache-2.0", "Noto Emoji v1, Google"),
    SpriteSet(
        "3d", "@lobehub/fluent-emoji-3d", "1.1.0", "MIT", "Fluent Emoji 3D, Microsoft and LobeHub"
    ),
)


@dataclass(frozen=True)
class Sprite:
    """One picture of a concept: indices into the pack, its look, and where its bytes lie."""

    concept: int
    style: int
    color: str | None
    mean: tuple[int, int, int]
    offset: int
    length: int


@dataclass(frozen=True)
class SpritePack:
    """All sprites; `blob` holds one WebP after the other."""

    styles: tuple[str, ...]
    concepts: tuple[str, ...]
    sprites: tuple[Sprite, ...]
    blob: bytes

    def image(self, index: int) -> Image.Image:
        """RGBA picture of `SIZE` x `SIZE` pixels."""
        sprite = self.sprites[index]
        data = self.blob[sprite.offset : sprite.offset + sprite.length]
        return Image.open(io.BytesIO(data)).convert("RGBA")

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "sprites.bin").write_bytes(self.blob)
        index = {"styles": self.styles, "concepts": self.concepts}
        records = [asdict(sprite) for sprite in self.sprites]
        (folder / "sprites.json").write_text(json.dumps({**index, "sprites": records}))

    @classmethod
    def load(cls, folder: Path, *, images: bool = True) -> Self:
        """Read a saved pack; without `images` only the index."""
        index = json.loads((folder / "sprites.json").read_text())
        sprites = tuple(Sprite(**{**s, "mean": tuple(s["mean"])}) for s in index["sprites"])
        blob = (folder / "sprites.bin").read_bytes() if images else b""
        return cls(tuple(index["styles"]), tuple(index["concepts"]), sprites, blob)


class Source(Protocol):
    """Where the pictures of one set come from."""

    def render(self, label: str, hexcode: str) -> Image.Image | None: ...


class IconifySource:
    """SVG bodies of an `@iconify-json` package, found by the emoji's name."""

    def __init__(self, package: Path) -> None:
        self.data = json.loads((package / "icons.json").read_text(encoding="utf-8"))
        self.names = {_letters(name): name for name in self.data["icons"]}
        for alias, target in self.data.get("aliases", {}).items():
            if target["parent"] in self.data["icons"] and len(target) == 1:
                self.names.setdefault(_letters(alias), target["parent"])

    def render(self, label: str, hexcode: str) -> Image.Image | None:
        name = self.names.get(_letters(label))
        return None if name is None else self._rasterize(self.data["icons"][name])

    def _rasterize(self, icon: dict[str, Any]) -> Image.Image:
        import resvg_py  # only the packer needs it

        width, height = (icon.get(k, self.data.get(k, 16)) for k in ("width", "height"))
        box = f"{icon.get('left', 0)} {icon.get('top', 0)} {width} {height}"
        head = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
        svg = f'<svg {head} viewBox="{box}">{icon["body"]}</svg>'
        png = resvg_py.svg_to_bytes(svg_string=svg, width=2 * SIZE, height=2 * SIZE)
        return Image.open(io.BytesIO(bytes(png)))


class FolderSource:
    """Pictures named by code point, as in `@lobehub/fluent-emoji-3d`."""

    def __init__(self, package: Path) -> None:
        self.folder = package / "assets"

    def render(self, label: str, hexcode: str) -> Image.Image | None:
        bare = hexcode.lower().removesuffix("-fe0f")
        paths = (self.folder / f"{name}.webp" for name in (bare, f"{bare}-fe0f"))
        found = next((path for path in paths if path.exists()), None)
        return None if found is None else _read(found)


def fetch(folder: Path) -> None:
    """Install the packages under `folder`/node_modules with npm."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"{s.package}@{s.version}" for s in SETS] + [_NAMES_PACKAGE]
    flags = ["--prefix", str(folder), "--ignore-scripts", "--no-audit", "--no-fund"]
    subprocess.run(["npm", "install", *flags, *names], check=True)


def build(node_modules: Path, workers: int = 2) -> SpritePack:
    """Render every concept of concepts.txt that at least `MIN_STYLES` sets can draw."""
    sources = [_open_source(node_modules / s.package) for s in SETS]
    codes = _hexcodes(node_modules)
    labels = [label for label in read_concepts() if label in codes]
    with ThreadPoolExecutor(workers) as pool:
        drawn = list(pool.map(lambda label: _draw(sources, label, codes[label]), labels))
    kept = [(x, y) for x, y in zip(labels, drawn, strict=True) if len(y) >= MIN_STYLES]
    return _assemble(kept)


def missing(pack: SpritePack) -> list[str]:
    """Concepts of concepts.txt that did not make it into the pack."""
    return [label for label in read_concepts() if label not in pack.concepts]


def styles_used(pack: SpritePack) -> dict[str, int]:
    """Style word -> number of sprites."""
    return dict(Counter(pack.styles[sprite.style] for sprite in pack.sprites))


def normalize_label(label: str) -> str:
    """Emojibase label -> words of a caption."""
    return " ".join(re.findall("[a-z0-9]+", re.sub("[’“”']", "", label.lower())))


def square(image: Image.Image) -> Image.Image | None:
    """Crop to what is opaque, centre in a square, scale to `SIZE`; None when nothing is drawn."""
    image = image.convert("RGBA")
    rows, columns = np.where(np.asarray(image)[..., 3] > 8)
    if len(rows) < 100:
        return None
    box = int(columns.min()), int(rows.min()), int(columns.max()) + 1, int(rows.max()) + 1
    width, height = box[2] - box[0], box[3] - box[1]
    side = max(width, height)
    canvas = Image.new("RGBA", (side, side))
    canvas.paste(image.crop(box), ((side - width) // 2, (side - height) // 2))
    return canvas.resize((SIZE, SIZE), Image.Resampling.LANCZOS)


def look(image: Image.Image) -> tuple[str | None, tuple[int, int, int]]:
    """The colour word that covers at least 45 % of a sprite, if any, and its mean colour."""
    pixels = np.asarray(image.resize((32, 32))).astype(float)
    opaque = pixels[pixels[..., 3] > 128][:, :3]
    if not len(opaque):
        return None, (128, 128, 128)
    palette = np.array(list(_OBJECT_COLORS.values()), float)
    nearest = ((opaque[:, None] - palette) ** 2).sum(-1).argmin(1)
    counts = np.bincount(nearest, minlength=len(palette))
    word = list(_OBJECT_COLORS)[counts.argmax()] if counts.max() > 0.45 * len(opaque) else None
    red, green, blue = opaque.mean(0).round().astype(int).tolist()
    return word, (red, green, blue)


def _draw(sources: list[Source], label: str, hexcode: str) -> list[tuple[int, Image.Image]]:
    rendered = ((i, source.render(label, hexcode)) for i, source in enumerate(sources))
    squares = ((i, square(image)) for i, image in rendered if image is not None)
    return [(i, image) for i, image in squares if image is not None]


def _assemble(drawn: list[tuple[str, list[tuple[int, Image.Image]]]]) -> SpritePack:
    blob, sprites = io.BytesIO(), []
    for concept, (_, images) in enumerate(drawn):
        for style, image in images:
            start = blob.tell()
            image.save(blob, "WEBP", quality=88, method=4)
            sprites.append(Sprite(concept, style, *look(image), start, blob.tell() - start))
    styles, concepts = tuple(s.style for s in SETS), tuple(label for label, _ in drawn)
    return SpritePack(styles, concepts, tuple(sprites), blob.getvalue())


def _read(path: Path) -> Image.Image:
    with Image.open(path) as image:
        return image.convert("RGBA")


def _open_source(package: Path) -> Source:
    return IconifySource(package) if (package / "icons.json").exists() else FolderSource(package)


def _hexcodes(node_modules: Path) -> dict[str, str]:
    path = node_modules / "emojibase-data" / "en" / "data.json"
    entries: Iterator[dict[str, str]] = iter(json.loads(path.read_text(encoding="utf-8")))
    return {normalize_label(entry["label"]): entry["hexcode"] for entry in entries}


def _letters(name: str) -> str:
    return re.sub("[^a-z0-9]", "", name.lower().replace("’", ""))
