"""How a model is to be loaded; the same for every family."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.parallel.shard import WHOLE, Shard
from sparse_attn.attention import Backend

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

CPU = torch.device("cpu")


@dataclass(frozen=True)
class LoadOptions:
    """backend: of linears, norms and attention.
    dtype: of weights and activations; pixel decoders and rotary angles stay fp32.
    prompt_tokens: most prompt tokens of a sequence; every sequence's cache has room for so many.
    pixel_memory: bytes the pixel decoder may use for its activations.
    dummy: random weights instead of the checkpoint's.
    progress: show a progress bar while loading.
    shard: the part of every layer that this process holds.
    keep: called with each layer as soon as it is made, its index and the number of layers; what it
        leaves of the layer stays in memory (offloading).
    """

    backend: Backend = "reference"
    dtype: torch.dtype = torch.float32
    device: torch.device = CPU
    prompt_tokens: int | None = None
    pixel_memory: int = 2 << 30
    dummy: bool = False
    progress: bool = False
    shard: Shard = WHOLE
    keep: Callable[[object, int, int], None] | None = None

    def __post_init__(self) -> None:
        if self.prompt_tokens is not None and self.prompt_tokens < 2:
            raise ValueError(f"prompt_tokens must be at least 2, got {self.prompt_tokens}")
        if self.pixel_memory < 1:
            raise ValueError(f"pixel_memory must be positive, got {self.pixel_memory}")
