import pytest

from engine.models.mini_text import MAX_WORDS, SPECIAL, UNK
from training.lexicon import build_tokenizer, plural, read_concepts
from training.prompts import FIXED, NATURAL, UNKNOWN
from training.sprites import SETS

STYLES = [s.style for s in SETS]


@pytest.mark.parametrize(
    ("noun", "expected"),
    [
        ("apple", "apples"),
        ("strawberry", "strawberries"),
        ("fox", "foxes"),
        ("cat face", "cat faces"),
        ("french fries", "french fries"),
        ("bus", "buses"),
        ("octopus", "octopuses"),
        ("mouse", "mice"),
        ("kitchen knife", "kitchen knives"),
        ("toy", "toys"),
        ("peach", "peaches"),
    ],
)
def test_plural(noun: str, expected: str) -> None:
    assert plural(noun) == expected


def test_every_concept_and_synonym_names_itself_in_both_numbers() -> None:
    concepts = read_concepts()
    words = build_tokenizer(concepts, STYLES)
    for concept, synonyms in concepts.items():
        token = concept.replace(" ", "_")
        assert words.normalize(concept) == [token]
        assert words.normalize(plural(concept)) in ([token], [token, "s"])
        for name in synonyms:
            assert words.normalize(name) == [token]


def test_a_synonym_cannot_name_two_concepts(monkeypatch: pytest.MonkeyPatch) -> None:
    doubled = {"cat": ["kitty"], "dog": ["kitty"]}
    monkeypatch.setattr("training.lexicon.read_concepts", lambda: doubled)
    with pytest.raises(ValueError, match="kitty"):
        build_tokenizer(["cat", "dog"], STYLES)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("an apple to the left of the cats", "a red_apple left of the cat s"),
        ("Two pumpkins under a tree", "two jack_o_lantern s below a deciduous_tree"),
        ("a christmas tree beside a car", "a christmas_tree next to a automobile"),
        ("2 grey mice, 3D style", "two gray mouse s 3d style"),
    ],
)
def test_natural_phrases(text: str, expected: str) -> None:
    assert " ".join(build_tokenizer(read_concepts(), STYLES).normalize(text)) == expected


def test_fixed_prompts_are_known_words_but_for_noise() -> None:
    words = build_tokenizer(read_concepts(), STYLES)
    unknown = [p for p in FIXED if SPECIAL[UNK] in words.normalize(p)]
    assert unknown == ["a teddy bear blob style on a noisy blue background"]
    assert all(len(words.normalize(p)) <= MAX_WORDS for p in (*FIXED, *NATURAL, *UNKNOWN))
    assert all(SPECIAL[UNK] in words.normalize(p) for p in UNKNOWN)
