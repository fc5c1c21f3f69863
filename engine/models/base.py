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
    """Sizes of a decoder, or of one rank's part of it.

    prompt: most prompt tokens a sequence may have. ranks, rank: of how many parts this is which;
        heads are those of the part.
    """

    layers: int
    dim: int
    q_heads: int
    kv_heads: int
    head_dim: int
    image_vocab: int
    prompt: int
    ranks: int = 1
    rank: int = 0


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
    """A decoder that draws pictures token by token, with its prompt encoder and pixel decoder.

    Visual token ids are 0..image_vocab - 1, whatever a checkpoint calls them; `image_vocab` itself
    is the end-of-row token of grids that have one. A sequence's prompt ends with the token whose
    logits give visual token 0; its sequences may have prompts of different lengths.
    """

    name: str
    shape: ModelShape
    sizes: tuple[tuple[int, int], ...]
    """(width, height) of the pictures it draws, the default first."""
    sampling: Sampling
    prompt_limit: str

    @property
    def pixel_size(self) -> tuple[int, int]:
        """(width, height) of a picture nobody asked a size for."""
        return self.sizes[0]

    @property
    def grid(self) -> Grid:
        """Grid of the default size."""
        return self.grid_of(self.pixel_size)

    @abstractmethod
    def grid_of(self, size: tuple[int, int]) -> Grid:
        """Grid of a picture of (width, height) pixels. Raises ValueError naming known sizes."""

    def forced_token(self, grid: Grid, position: int) -> int | None:
        """The token that stands at a position whatever the logits say (an end-of-row token), or
        None. It is not sampled and no logits are computed for it, but its K and V are stored."""
        return self.shape.image_vocab if grid.column(position) >= grid.width else None

    @abstractmethod
    def encode_prompt(self, prompt: str, grid: Grid) -> tuple[int, ...]:
        """Prompt tokens, begin-of-image included, of a picture on `grid`.

        Raises ValueError for a prompt too long."""

    @abstractmethod
    def unconditional_prompt(self, conditional: tuple[int, ...], grid: Grid) -> tuple[int, ...]:
        """Prompt tokens of the unconditional sequence that goes with a conditional one."""

    @abstractmethod
    def embed_prompt(self, tokens: Int64[Tensor, "P"]) -> Float[Tensor, "P d"]:
        """Embeddings of the whole prompt of one sequence, one row each."""

    @abstractmethod
    def embed_visual(
        self, tokens: Int64[Tensor, "M"], positions: Int64[Tensor, "M"], grid: Grid
    ) -> Float[Tensor, "M d"]:
        """Embeddings of visual tokens (end-of-row tokens included) at visual positions."""

    @abstractmethod
    def rotary_prompt(self, count: int) -> tuple[Tensor, Tensor]:
        """cos and sin [count, D/2] of the prompt's positions."""

    @abstractmethod
    def rotary_visual(
        self, positions: Int64[Tensor, "M"], prompts: Int64[Tensor, "M"], grid: Grid
    ) -> tuple[Tensor, Tensor]:
        """cos and sin [M, D/2] of visual positions behind prompts of the given lengths."""

    @abstractmethod
    def run_layer(self, layer: int, run: SubBatchRun) -> None:
        """One transformer layer over `run.hidden`, in place."""

    def layer_weights(self, layer: int) -> object:
        """What holds the weights of one layer; offloading puts other tensors into it.

        Raises NotImplementedError where a family cannot be offloaded."""
        raise NotImplementedError(f"the weights of {self.name!r} cannot be offloaded")

    @abstractmethod
    def logits(self, hidden: Float[Tensor, "M d"]) -> Float[Tensor, "M V"]:
        """Logits of the image vocabulary, fp32; end-of-row tokens have none."""

    @abstractmethod
    def decode_pixels(
        self, tokens: Int64[Tensor, "B N"], grid: Grid
    ) -> UInt8[Tensor, "B height width 3"]:
        """Pictures of whole token sequences on `grid`; end-of-row tokens are passed over."""

    def _refuse_size(self, size: tuple[int, int]) -> ValueError:
        width, height = size
        near = sorted(self.sizes, key=lambda s: abs(s[0] - width) + abs(s[1] - height))[:8]
        known = ", ".join(f"{w}x{h}" for w, h in near) + (", ..." if len(self.sizes) > 8 else "")
        return ValueError(f"model {self.name!r} does not draw {width}x{height}; it draws {known}")
