"""The text encoder of models that read captions through T5 (Raffel et al. 2020)."""

import zlib
from pathlib import Path
from typing import Any, Protocol

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from engine.models.options import LoadOptions
from engine.weights import WeightError, load_json


class Caption(Protocol):
    """A caption becomes ids, and ids become vectors."""

    size: int
    """Ids lie below it."""

    def encode(self, text: str) -> list[int]: ...

    def read(self, tokens: Int64[Tensor, "P"]) -> Float[Tensor, "P e"]: ...


class T5Caption:
    """A T5 encoder from a folder of transformers' layout, tokenizer included."""

    def __init__(self, folder: Path, options: LoadOptions) -> None:
        from transformers import AutoTokenizer, T5EncoderModel

        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        model: Any = T5EncoderModel.from_pretrained(
            folder, local_files_only=True, dtype=options.dtype
        )
        self._model = model.to(options.device).eval()
        self.size = int(self._model.config.vocab_size)

    @staticmethod
    def check(folder: Path, width: int) -> None:
        """Raise WeightError if the folder holds no T5 of this width."""
        if not (folder / "config.json").is_file():
            raise WeightError(
                f"{folder} holds no T5 encoder, which reads the captions: put the model's T5 "
                "(google/flan-t5-xl for the published checkpoints) and its tokenizer there"
            )
        found = load_json(folder / "config.json").get("d_model")
        if found != width:
            raise WeightError(f"the T5 in {folder} has width {found}, the model reads {width}")

    def encode(self, text: str) -> list[int]:
        """Ids of a caption, lower-case and with single spaces, end-of-sentence included."""
        ids: list[int] = self._tokenizer(" ".join(text.lower().split())).input_ids
        return ids

    def read(self, tokens: Int64[Tensor, "P"]) -> Float[Tensor, "P e"]:
        states: Tensor = self._model(input_ids=tokens[None]).last_hidden_state
        return states[0]


class DummyCaption:
    """Stands in for T5 where weights are random: a vector per word."""

    def __init__(self, width: int, size: int = 4096) -> None:
        self.size = size
        self._table = torch.randn(size, width, generator=torch.Generator().manual_seed(0))

    def encode(self, text: str) -> list[int]:
        return [zlib.crc32(word.encode()) % self.size for word in text.split()]

    def read(self, tokens: Int64[Tensor, "P"]) -> Float[Tensor, "P e"]:
        return self._table.to(tokens.device)[tokens]
