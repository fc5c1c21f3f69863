"""The configuration of an engine, composed of what each room needs."""

import os
from dataclasses import dataclass
from typing import Literal

import torch

from engine.models.options import DTYPES, LoadOptions
from engine.offload.config import OffloadConfig
from scheduler.request import PolicyChoice
from sparse_attn import ops
from sparse_attn.attention import Backend
from sparse_attn.layout import FORMATS, KVFormat


@dataclass(frozen=True)
class EngineConfig:
    """How one engine runs.

    model: preset name, folder of weights, or hub id (owner/name).
    load_format: "dummy" draws random weights in the model's geometry instead of loading its own.
    dtype: of weights and activations ("fp32", "bf16", "fp16"); the native CPU operators take fp32.
    max_prompt_tokens: most prompt tokens of a sequence, template included; every sequence's cache
        has room for so many. None takes the family's default.
    pixel_memory: bytes the pixel decoder may use for its activations.
    backend: "auto" is native where the compiled operators are there, else an error that says how to
        build them; "reference" is slow and needs none.
    kv_format: how keys and values are stored; arithmetic is fp32 on the CPU whatever it is.
    cache_bytes: size of the KV arena; None takes an eighth of the memory, at most 4 GiB.
    max_images: images in flight.
    policy: attention policy of requests that name none.
    offload: what lives beyond the memory that the engine computes in.
    tensor_parallel_size: processes of this machine that share every layer, each with its part of
        the heads; `threads` and `cache_bytes` are those of one process.
    """

    model: str = "mini"
    load_format: Literal["auto", "dummy"] = "auto"
    dtype: str = "fp32"
    max_prompt_tokens: int | None = None
    pixel_memory: int = 2 << 30
    backend: Literal["auto", "native", "reference"] = "auto"
    kv_format: str = "bf16"
    cache_bytes: int | None = None
    max_images: int = 16
    max_prefill_images: int = 8
    sub_batch_images: int = 16
    threads: int | None = None
    policy: PolicyChoice = PolicyChoice()
    offload: OffloadConfig = OffloadConfig()
    tensor_parallel_size: int = 1

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"unknown dtype {self.dtype!r} (known: {', '.join(DTYPES)})")
        if self.kv_format not in FORMATS:
            raise ValueError(f"unknown kv_format {self.kv_format!r} (known: {', '.join(FORMATS)})")
        counts = ("max_images", "max_prefill_images", "sub_batch_images", "tensor_parallel_size")
        for name in counts:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.tensor_parallel_size > 1 and self.offload != OffloadConfig():
            raise ValueError("tensor_parallel_size above 1 does not go with offloading: choose one")
        if self.cache_bytes is not None and self.cache_bytes < 1:
            raise ValueError(f"cache_bytes must be positive, got {self.cache_bytes}")

    @property
    def format(self) -> KVFormat:
        return FORMATS[self.kv_format]

    @property
    def load_options(self) -> LoadOptions:
        """How the model is to be loaded. Raises RuntimeError as `resolved_backend` does."""
        return LoadOptions(
            backend=self.resolved_backend,
            dtype=DTYPES[self.dtype],
            device=self.device,
            prompt_tokens=self.max_prompt_tokens,
            pixel_memory=self.pixel_memory,
            dummy=self.load_format == "dummy",
            progress=True,
        )

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def resolved_backend(self) -> Backend:
        """Raises RuntimeError with the reason if the native operators are asked for and absent."""
        if self.backend == "reference":
            return "reference"
        reason = ops.why_not()
        if reason is not None:
            raise RuntimeError(f'{reason}; or choose backend="reference", which is slow')
        return "native"

    @property
    def resolved_cache_bytes(self) -> int:
        if self.cache_bytes is not None:
            return self.cache_bytes
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return min(memory // 8, 4 << 30)

    @property
    def cache_on_disk(self) -> int:
        """Bytes of the KV arena that are on disk; the others are memory."""
        return int(self.resolved_cache_bytes * self.offload.placement.cache.disk / 100)
