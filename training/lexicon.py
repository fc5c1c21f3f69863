"""The words of captions: which ones there are, what they stand for, how a noun takes its plural."""

from collections.abc import Iterable
from pathlib import Path

from engine.models.mini_text import PLURAL, SPECIAL, WordTokenizer

CONCEPTS_FILE = Path(__file__).with_name("concepts.txt")
COUNTS = ("a", "two", "three", "four")
COLORS = {
    "red": (225, 65, 65),
    "orange": (245, 150, 60),
    "yellow": (255, 232, 125),
    "green": (105, 190, 105),
    "blue": (80, 145, 230),
    "purple": (155, 105, 210),
    "pink": (255, 175, 205),
    "brown": (150, 105, 75),
    "black": (34, 34, 40),
    "gray": (160, 165, 172),
    "white": (250, 250, 250),
    "teal": (70, 190, 190),
}
"""Colour words and their background colours (RGB, 0..255)."""

_FUNCTION_WORDS = [
    "of",
    "left",
    "right",
    "above",
    "below",
    "next",
    "to",
    "in",
    "on",
    "with",
    "and",
    "the",
    "row",
    "background",
    "gradient",
    "checkered",
    "striped",
    "small",
    "big",
    "top",
    "bottom",
    "center",
    "corner",
    "style",
]

_PHRASES = {
    "an": "a", "one": "a", "1": "a", "2": "two", "3": "three", "4": "four", "grey": "gray",
    "violet": "purple", "turquoise": "teal", "cyan": "teal", "crimson": "red", "golden": "yellow",
    "large": "big", "huge": "big", "giant": "big", "great": "big", "tiny": "small",
    "little": "small", "under": "below", "beneath": "below", "underneath": "below",
    "over": "above", "atop": "above", "on top of": "above", "beside": "next to", "by": "next to",
    "near": "next to", "alongside": "next to", "to the left of": "left of",
    "on the left of": "left of", "to the right of": "right of", "on the right of": "right of",
    "upper": "top", "lower": "bottom", "middle": "center", "centre": "center",
    "checked": "checkered", "checkerboard": "checkered", "chequered": "checkered",
    "stripy": "striped", "stripes": "striped", "styled": "style", "backdrop": "background",
    "three d": "3d", "3 d": "3d", "side by side": "in the row", "at": "in",
}  # fmt: skip

_IRREGULAR = {
    "mouse": "mice", "wolf": "wolves", "leaf": "leaves", "knife": "knives", "goose": "geese",
    "sheep": "sheep", "fish": "fish", "deer": "deer", "scarf": "scarves", "foot": "feet",
    "calf": "calves", "loaf": "loaves", "cactus": "cacti", "puppy": "puppies",
    "man": "men", "die": "dice",
}  # fmt: skip


def read_concepts(path: Path = CONCEPTS_FILE) -> dict[str, list[str]]:
    """Concept label -> synonyms, in the file's order."""
    lines = (line.partition("#")[0].strip() for line in path.read_text("utf-8").splitlines())
    pairs = (line.partition(":") for line in lines if line)
    return {label.strip(): _comma_list(rest) for label, _, rest in pairs}


def build_tokenizer(concepts: Iterable[str], styles: Iterable[str]) -> WordTokenizer:
    """The vocabulary: one word for each concept ("cat_face"), and the words around them.

    Raises:
        ValueError: a synonym names two concepts.
    """
    concepts = list(concepts)
    words = [*COUNTS, PLURAL, *_FUNCTION_WORDS, *COLORS, *styles]
    names = _names(concepts)
    phrases = {alias: target.split() for alias, target in _PHRASES.items()}
    phrases |= {name: [concept.replace(" ", "_")] for name, concept in names.items()}
    tokens = sorted({token for target in phrases.values() for token in target} - set(words))
    plurals = {plural: noun for noun, plural in _IRREGULAR.items() if plural != noun}
    return WordTokenizer([*SPECIAL, *words, *tokens], phrases, plurals)


def plural(noun: str) -> str:
    """Plural of a noun phrase in English ("cherry" -> "cherries"); plurals stay as they are."""
    head, _, last = noun.rpartition(" ")
    return f"{head} {_plural_word(last)}".strip()


def article(phrase: str) -> str:
    """The phrase behind "a" or "an"."""
    return ("an " if phrase[0] in "aeiou" else "a ") + phrase


def _plural_word(word: str) -> str:
    if word in _IRREGULAR:
        return _IRREGULAR[word]
    if word.endswith("s") and not word.endswith(("ss", "us")):
        return word
    if word.endswith("y") and word[-2:-1] not in "aeiou":
        return word[:-1] + "ies"
    return word + ("es" if word.endswith(("ss", "us", "x", "z", "ch", "sh", "to", "go")) else "s")


def _names(concepts: list[str]) -> dict[str, str]:
    names = {concept: concept for concept in concepts}
    synonyms = read_concepts()
    for concept in concepts:
        for name in synonyms.get(concept, []):
            if names.setdefault(name, concept) != concept:
                raise ValueError(f"{name!r} names both {names[name]!r} and {concept!r}")
    return names


def _comma_list(text: str) -> list[str]:
    return [item.strip() for item in text.split(",") if item.strip()]
