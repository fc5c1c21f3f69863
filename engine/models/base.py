"""What the engine asks of a model family: embed, run a layer, give logits, decode pixels."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

from jaxtyping import Float, Int64, UInt8
from torch import Tensor

from scheduler.request import Sampling
from sparse_attn.geometry import Grid


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a decoder. `prompt` is the most prompt tokens a sequence may have."""

    layers: int
    dim: int
    q_heads: int
    kv_heads: int
    head_dim: int
    image_vocab: int
    prompt: int


class Attention(Protocol):
    """Stores k and v and attends; what lies behind depends on the phase of the sub-batch."""

    def __call__(
        self,
        layer: int,
        q: Float[Tensor, "M Hq D"],
        k: Float[Tensor, "M H D"],
        v: Float[Tensor, "M H D"],
    ) -> Float[Tensor, "M Hq D"]: ...


@dataclass(slots=True, eq=False)
class SubBatchRun:
    """The tensors of one sub-batch while it passes through the layers.

    hidden: [M, d], rewritten by every layer; M = sequences (decode) or prompt tokens (prefill).
    cos, sin: [M, D/2], rotary angles of the rows.
    """

    hidden: Float[Tensor, "M d"]
    cos: Float[Tensor, "M h"]
    sin: Float[Tensor, "M h"]
    attention: Attention


class VisualModel(ABC):
    """A decoder that draws pictures token by token, with its prompt encoder and pixel decoder."""

    name: str
    shape: ModelShape
    grid: Grid
    pixel_size: tuple[int, int]
    """(width, height) of the picture."""
    sampling: Sampling
    prompt_limit: str

    @abstractmethod
    def encode_prompt(self, prompt: str) -> tuple[int, ...]:
        """Prompt tokens, begin-of-image included. Raises ValueError for a prompt too long."""

    @abstractmethod
    def unconditional_prompt(self, conditional: tuple[int, ...]) -> tuple[int, ...]:
        """Prompt tokens of the unconditional sequence that goes with a conditional one."""

    @abstractmethod
    def embed_prompt(self, tokens: Int64[Tensor, "P"]) -> Float[Tensor, "P d"]:
        """Embeddings of prompt tokens as `encode_prompt` gives them, one row each."""

    @abstractmethod
    def embed_visual(
        self, tokens: Int64[Tensor, "M"], positions: Int64[Tensor, "M"]
    ) -> Float[Tensor, "M d"]:
        """Embeddings of visual tokens at visual positions."""

    @abstractmethod
    def rotary_prompt(self, count: int) -> tuple[Tensor, Tensor]:
        """cos and sin [count, D/2] of the prompt's positions."""

    @abstractmethod
    def rotary_visual(
        self, positions: Int64[Tensor, "M"], prompts: Int64[Tensor, "M"]
    ) -> tuple[Tensor, Tensor]:
        """cos and sin [M, D/2] of visual positions behind prompts of the given lengths."""

    @abstractmethod
    def run_layer(self, layer: int, run: SubBatchRun) -> None:
        """One transformer layer over `run.hidden`, in place."""

    @abstractmethod
    def logits(self, hidden: Float[Tensor, "M d"]) -> Float[Tensor, "M V"]:
        """Logits of the image vocabulary."""

    @abstractmethod
    def decode_pixels(self, tokens: Int64[Tensor, "B N"]) -> UInt8[Tensor, "B height width 3"]:
        """Pictures of finished token sequences."""
