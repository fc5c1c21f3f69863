"""From visual tokens to bytes of a picture, within a memory limit."""

from itertools import chain
from typing import Protocol, cast

import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor, nn

LIBRARY_BYTES = 16 << 20
"""What the convolution library keeps for itself: compiled kernels and scratch."""


class PixelDecoder(Protocol):
    """What `VQGANDecoder` and `Emu3VQDecoder` have in common."""

    def __call__(
        self, tokens: Int64[Tensor, "B H W"], strips: int = 1
    ) -> Float[Tensor, "B 3 height width"]: ...

    def activation_bytes(self, height: int, width: int) -> int: ...


class Pixels:
    """A pixel decoder, how its output maps to colours, and the memory it may use.

    mean, std: colour = output * std + mean, in 0..1.
    """

    def __init__(
        self,
        decoder: nn.Module,
        memory: int,
        mean: tuple[float, ...] = (0.5, 0.5, 0.5),
        std: tuple[float, ...] = (0.5, 0.5, 0.5),
    ) -> None:
        self.decoder = decoder.eval()
        self.memory, self.mean, self.std = memory, mean, std

    @property
    def _call(self) -> PixelDecoder:
        return cast(PixelDecoder, self.decoder)

    def decode(self, tokens: Int64[Tensor, "B H W"]) -> Float[Tensor, "B 3 height width"]:
        """What the decoder gives, fp32, as many pictures at a time as the limit allows.

        Raises MemoryError with the least that is needed if not even one picture fits.
        """
        batch, strips = self.fit(len(tokens), *tokens.shape[1:])
        held = next(chain(self.decoder.parameters(), self.decoder.buffers()), tokens)
        at = tokens.to(held.device)
        with torch.inference_mode():
            return torch.cat([self._call(part, strips) for part in at.split(batch)])

    def pictures(self, tokens: Int64[Tensor, "B H W"]) -> UInt8[Tensor, "B height width 3"]:
        """Bytes of the pictures."""
        raw = self.decode(tokens)
        mean, std = (raw.new_tensor(x)[:, None, None] for x in (self.mean, self.std))
        colours = (raw * std + mean).clamp_(0, 1)
        return (colours * 255).round_().to(torch.uint8).permute(0, 2, 3, 1)

    def fit(self, pictures: int, height: int, width: int) -> tuple[int, int]:
        """How many pictures at a time, and into how many strips, keep below the memory limit."""
        for strips in (1, 2, 4, 8, 16, 32):
            for batch in range(pictures, 0, -1):
                if self.needed(batch, strips, height, width) <= self.memory:
                    return batch, strips
        least = self.needed(1, 32, height, width)
        raise MemoryError(
            f"decoding {height}x{width} tokens to pixels needs {least / 2**20:.0f} MiB, but "
            f"pixel_memory is {self.memory / 2**20:.0f} MiB: raise it or draw smaller pictures"
        )

    def needed(self, batch: int, strips: int, height: int, width: int) -> int:
        """Bytes that activations and the copies of weights made for convolutions take at most.

        Three activations of the finest level live at a time, and parts of three more in strips; a
        fifth of one is for what is small.
        """
        weights = sum(p.numel() * p.itemsize for p in self.decoder.parameters())
        activation = self._call.activation_bytes(height, width)
        return weights + LIBRARY_BYTES + int(batch * activation * (3.2 + 3 / strips))


class TokenColours(nn.Module):
    """A map of tokens, a colour each, where a model has no pixel decoder. No picture."""

    def __init__(self, codes: int, factor: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        colours = torch.rand(codes, 3, generator=generator) * 2 - 1
        self.colours, self.factor = nn.Parameter(colours, requires_grad=False), factor

    def forward(
        self, tokens: Int64[Tensor, "B H W"], strips: int = 1
    ) -> Float[Tensor, "B 3 height width"]:
        small = self.colours[tokens].permute(0, 3, 1, 2)
        return small.repeat_interleave(self.factor, 2).repeat_interleave(self.factor, 3)

    def activation_bytes(self, height: int, width: int) -> int:
        return height * width * self.factor**2 * 3 * 4
