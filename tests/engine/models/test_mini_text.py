import pytest

from engine.models.mini_text import BOS, EOS, MAX_WORDS, PAD, SPECIAL, TEXT_LEN, UNK, WordTokenizer


@pytest.fixture
def words() -> WordTokenizer:
    known = [
        "a",
        "two",
        "s",
        "left",
        "of",
        "red_apple",
        "tree",
        "christmas_tree",
        "cherry",
        "mouse",
    ]
    phrases = {
        "an": ["a"],
        "2": ["two"],
        "apple": ["red_apple"],
        "red apple": ["red_apple"],
        "christmas tree": ["christmas_tree"],
        "to the left of": ["left", "of"],
    }
    return WordTokenizer([*SPECIAL, *known], phrases, {"mice": "mouse"})


def test_encode_has_fixed_length(words: WordTokenizer) -> None:
    ids = words.encode("a red apple")
    assert ids == [BOS, words.words.index("a"), words.words.index("red_apple"), EOS] + [PAD] * 28
    assert len(ids) == TEXT_LEN


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("An apple, to the left of 2 Trees!", "a red_apple left of two tree s"),
        ("two red apples", "two red_apple s"),
        ("cherries and mice", "cherry s <unk> mouse s"),
        ("a Christmas tree", "a christmas_tree"),
        ("a glorious trée", "a <unk> tree"),
        ("\N{GRINNING FACE}\N{GRINNING FACE} apple", "<unk> red_apple"),
        ("красное яблоко 苹果", "<unk> <unk> <unk>"),
        ("the s", "<unk> s"),
        ("\ud800", "<unk>"),
    ],
)
def test_normalize(words: WordTokenizer, text: str, expected: str) -> None:
    assert " ".join(words.normalize(text)) == expected


@pytest.mark.parametrize("text", ["", "  \n\t", "!?., -"])
def test_a_prompt_without_words_is_refused(words: WordTokenizer, text: str) -> None:
    with pytest.raises(ValueError, match="empty"):
        words.encode(text)


def test_thirty_words_fit_and_one_more_is_refused(words: WordTokenizer) -> None:
    ids = words.encode("apple " * MAX_WORDS)
    assert ids[-1] == EOS and PAD not in ids
    with pytest.raises(ValueError, match="31 words.*at most 30"):
        words.encode("apple " * 31)


def test_one_endless_word_is_unknown(words: WordTokenizer) -> None:
    assert words.encode("x" * 40_000)[1] == UNK


def test_phrases_must_lead_to_known_words() -> None:
    with pytest.raises(ValueError, match="oak"):
        WordTokenizer([*SPECIAL, "a"], {"tree": ["oak"]})


def test_file_round_trip(words: WordTokenizer, tmp_path) -> None:  # type: ignore[no-untyped-def]
    words.to_file(tmp_path / "vocab.json")
    again = WordTokenizer.from_file(tmp_path / "vocab.json")
    assert again.encode("2 mice") == words.encode("two mice")
    (tmp_path / "other.json").write_text('{"colours": []}')
    with pytest.raises(ValueError, match="not a vocabulary"):
        WordTokenizer.from_file(tmp_path / "other.json")
