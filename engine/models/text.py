"""Tokenizers of the published families: text to ids, and special tokens by name."""

import json
import zlib
from collections.abc import Collection, Mapping
from itertools import islice
from pathlib import Path
from typing import Protocol

from tokenizers import Tokenizer

from engine.weights import WeightError


class TextTokenizer(Protocol):
    """What a family needs of a tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Ids of a text as it stands: special tokens in it are found, none is added."""

    def id_of(self, token: str) -> int:
        """Id of a token. Raises WeightError if the vocabulary lacks it."""

    def __len__(self) -> int: ...


class FileTokenizer:
    """A tokenizer.json, or what transformers converts to one."""

    def __init__(self, tokenizer: Tokenizer, where: Path) -> None:
        self._tokenizer, self._where = tokenizer, where

    @classmethod
    def of_folder(cls, folder: Path) -> "FileTokenizer":
        """Raises WeightError if the folder holds no tokenizer or none that can be read."""
        file = folder / "tokenizer.json"
        try:
            if file.is_file():
                return cls(Tokenizer.from_file(str(file)), file)
            if any((folder / name).is_file() for name in ("tokenizer.model", "spiece.model")):
                return cls(_converted(folder), folder)
        except Exception as error:  # the tokenizers library raises bare Exception
            raise WeightError(f"cannot read the tokenizer in {folder}: {error}") from error
        raise WeightError(
            f"{folder} holds no tokenizer (tokenizer.json): copy the model's tokenizer files there"
        )

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def id_of(self, token: str) -> int:
        found: int | None = self._tokenizer.token_to_id(token)
        if found is None:
            raise WeightError(f"the tokenizer in {self._where} has no token {token!r}")
        return found

    def __len__(self) -> int:
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))


class WordHash:
    """Stands in for a tokenizer where weights are random: one id per word, `special` as given.

    taken: ids that are no words (image tokens).
    """

    def __init__(
        self, size: int, special: Mapping[str, int], taken: Collection[int | None] = ()
    ) -> None:
        self._special, self._size = dict(special), size
        no_words = {*special.values(), *taken}
        self._free = list(islice((i for i in range(size) if i not in no_words), 4096))

    def encode(self, text: str) -> list[int]:
        return [i for word in text.split() for i in self._ids(word)]

    def _ids(self, word: str) -> list[int]:
        for token, i in self._special.items():
            if token in word:
                before, _, after = word.partition(token)
                return [*self.encode(before), i, *self.encode(after)]
        return [self._free[zlib.crc32(word.encode()) % len(self._free)]]

    def id_of(self, token: str) -> int:
        if token not in self._special:
            raise WeightError(f"a model with random weights has no token {token!r}")
        return self._special[token]

    def __len__(self) -> int:
        return self._size


def special_token(folder: Path | None, key: str, default: str) -> str:
    """A special token's text as tokenizer_config.json says (`boi_token`, say)."""
    file = None if folder is None else folder / "tokenizer_config.json"
    if file is None or not file.is_file():
        return default
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise WeightError(f"cannot read {file}: {error}") from error
    value = values.get(key, default)
    return str(value["content"] if isinstance(value, dict) else value)


def _converted(folder: Path) -> Tokenizer:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return tokenizer.backend_tokenizer
