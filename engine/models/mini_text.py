"""Words of a prompt -> text positions of `mini`. Pure Python: servers validate with it."""

import json
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

PAD, BOS, EOS, UNK = range(4)
SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
PLURAL = "s"
TEXT_LEN = 32
MAX_WORDS = TEXT_LEN - 2
_SYMBOL = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class WordTokenizer:
    """The word vocabulary of `mini`.

    Attributes:
        words: the vocabulary; the position in it is the id. Starts with `SPECIAL`.
        phrases: lower-case phrase of one to several words -> vocabulary words it stands for.
            The longest phrase that matches wins ("christmas tree" before "tree").
        plurals: irregular plural -> singular ("mice" -> "mouse"); regular ones are derived.
    """

    words: Sequence[str]
    phrases: Mapping[str, Sequence[str]] = field(default_factory=dict)
    plurals: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if tuple(self.words[:4]) != SPECIAL:
            raise ValueError(f"vocabulary must start with {SPECIAL}, not {self.words[:4]}")
        ids = {word: i for i, word in enumerate(self.words)}
        object.__setattr__(self, "_ids", ids)
        unknown = {w for target in self.phrases.values() for w in target} - ids.keys()
        if unknown:
            raise ValueError(f"phrases use words that are not in the vocabulary: {sorted(unknown)}")
        longest = max((len(p.split()) for p in self.phrases), default=1)
        object.__setattr__(self, "_longest", longest)

    @classmethod
    def from_file(cls, path: str | Path) -> Self:
        """Load `vocab.json`. Raises ValueError when the file is not a vocabulary."""
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        extra = sorted(set(data) - {"words", "phrases", "plurals"})
        if "words" not in data or extra:
            raise ValueError(f"{path} is not a vocabulary: needs 'words', does not know {extra}")
        return cls(data["words"], data.get("phrases", {}), data.get("plurals", {}))

    def to_file(self, path: str | Path) -> None:
        data = {"words": list(self.words), "phrases": self.phrases, "plurals": self.plurals}
        Path(path).write_text(json.dumps(data, indent=0) + "\n", encoding="utf-8")

    def encode(self, text: str) -> list[int]:
        """Ids of a prompt: `<bos> words <eos>`, padded with `<pad>` to 32.

        Words the model does not know, emoji and other scripts become `<unk>`.

        Raises:
            ValueError: the prompt holds no word, or more than 30 of them.
        """
        ids = [self._id(word) for word in self.normalize(text)]
        if not ids:
            raise ValueError("the prompt is empty; describe a picture, such as 'a red apple'")
        if len(ids) > MAX_WORDS:
            raise ValueError(
                f"the prompt has {len(ids)} words (a plural counts as two); "
                f"`mini` reads at most {MAX_WORDS}: shorten it"
            )
        return self.pad(ids)

    def decode(self, ids: Sequence[int]) -> str:
        """The normalised caption behind `ids`, for logs and contact sheets."""
        shown = [self.words[i] for i in ids if i not in (PAD, BOS, EOS)]
        return " ".join(shown).replace("_", " ").replace(f" {PLURAL} ", f"{PLURAL} ")

    def normalize(self, text: str) -> list[str]:
        """Vocabulary words of `text` in order; `<unk>` for what the model does not know."""
        return list(self._matches(split_words(text)))

    @staticmethod
    def pad(ids: Sequence[int]) -> list[int]:
        """`<bos> ids <eos>` padded to 32 positions."""
        return [BOS, *ids, EOS] + [PAD] * (MAX_WORDS - len(ids))

    def _id(self, word: str) -> int:
        known: dict[str, int] = self._ids  # type: ignore[attr-defined]
        return known.get(word, UNK)

    def _matches(self, words: list[str]) -> Iterator[str]:
        at = 0
        while at < len(words):
            used, found = self._longest_match(words, at)
            yield from found
            at += used

    def _longest_match(self, words: list[str], at: int) -> tuple[int, Sequence[str]]:
        longest: int = self._longest  # type: ignore[attr-defined]
        for size in range(min(longest, len(words) - at), 0, -1):
            found = self._lookup(words[at : at + size])
            if found is not None:
                return size, found
        return 1, (SPECIAL[UNK],)

    def _lookup(self, words: list[str]) -> Sequence[str] | None:
        """A phrase as it stands, or else the plural of one."""
        exact = self._known(" ".join(words))
        if exact is not None:
            return exact
        for singular in self._singulars(words[-1]):
            found = self._known(" ".join([*words[:-1], singular]))
            if found is not None:
                return (*found, PLURAL)
        return None

    def _known(self, phrase: str) -> Sequence[str] | None:
        if phrase in self.phrases:
            return self.phrases[phrase]
        return (phrase,) if self._id(phrase) != UNK else None

    def _singulars(self, word: str) -> Iterator[str]:
        if word in self.plurals:
            yield self.plurals[word]
        for ending, singular in (("ies", "y"), ("es", ""), ("s", "")):
            if word.endswith(ending) and len(word) > len(ending) + 1:
                yield word.removesuffix(ending) + singular


def split_words(text: str) -> list[str]:
    """Lower-case words without accents; each run of emoji or other symbols is one word."""
    plain = unicodedata.normalize("NFKD", re.sub(r"['’]s\b|['’]", "", text.lower()))
    return re.findall(rf"{_SYMBOL}+|[^\s{_SYMBOL}]+", "".join(map(_class_of, plain)))


def _class_of(char: str) -> str:
    kind = unicodedata.category(char)
    if kind.startswith(("L", "N")):
        return char
    if kind.startswith("M") or kind == "Cf":
        return ""
    return " " if kind.startswith(("P", "Z")) or kind in ("Cc", "Sm", "Sc") else _SYMBOL
