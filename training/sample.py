"""A plain batched sampler with a KV cache, to look at what was trained; the engine serves."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn import functional as F

from training.transformer import MiniTransformer, finish_layer, project_qkv, rms_norm


@dataclass(frozen=True)
class Sampling:
    guidance_scale: float = 3.0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 0.75


@torch.no_grad()
def generate(
    model: MiniTransformer, text: Int64[Tensor, "b 32"], sampling: Sampling, seed: int = 0
) -> Int64[Tensor, "b 576"]:
    """Visual tokens for captions, guided away from the empty caption (all `<pad>`)."""
    generator = torch.Generator(text.device).manual_seed(seed)
    decoder = CachedDecoder(model, 2 * len(text))
    hidden = decoder.advance(model.embed_prefix(torch.cat([text, torch.zeros_like(text)])))
    tokens: list[Tensor] = []
    for k in range(model.config.tokens):
        with decoder.autocast():
            logits = model.logits(hidden[:, -1:])[:, 0].float()
        tokens.append(pick(logits, sampling, generator))
        if k + 1 < model.config.tokens:
            hidden = decoder.advance(model.embed_image(tokens[-1].repeat(2)[:, None], k))
    return torch.stack(tokens, 1)


def pick(
    logits: Float[Tensor, "b2 vocab"], sampling: Sampling, generator: torch.Generator
) -> Int64[Tensor, " b"]:
    """Sample from guided logits; the first half is conditional, the second is not."""
    conditional, free = logits.chunk(2)
    guided = (free + sampling.guidance_scale * (conditional - free)) / sampling.temperature
    values, order = guided.sort(1, descending=True)
    if sampling.top_k:
        values[:, sampling.top_k :] = -torch.inf
    probability = values.softmax(1)
    before = probability.cumsum(1) - probability
    probability = probability.masked_fill(before > sampling.top_p, 0)
    return order.gather(1, torch.multinomial(probability, 1, generator=generator))[:, 0]


class CachedDecoder:
    """Runs new positions of all sequences against keys and values kept from the earlier ones."""

    def __init__(self, model: MiniTransformer, sequences: int) -> None:
        self.model, self.length = model, 0
        config, device = model.config, model.cos.device
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        positions = config.prefix + config.tokens
        shape = (config.layers, 2, sequences, config.heads, positions, config.head_dim)
        self.cache = torch.empty(shape, dtype=dtype, device=device)

    def autocast(self) -> torch.autocast:
        device = self.cache.device.type
        return torch.autocast(device, torch.bfloat16, enabled=device == "cuda")

    def advance(self, x: Float[Tensor, "b n dim"]) -> Float[Tensor, "b n dim"]:
        """Normed hidden states of the next n positions: the whole prefix, or one token."""
        new = slice(self.length, self.length + x.shape[1])
        self.length = new.stop
        config = self.model.config
        with self.autocast():
            for i in range(config.layers):
                x = self._layer(i, x, new)
            return rms_norm(x, self.model.norm.weight, config.norm_eps)

    def _layer(self, index: int, x: Tensor, new: slice) -> Tensor:
        config, layer = self.model.config, self.model.layers[index]
        weights = layer.weights()  # type: ignore[operator]
        rope = self.model.cos[new], self.model.sin[new]
        q, k, v = project_qkv(x, rope, weights, config.heads, config.norm_eps)
        keys, values = self.cache[index]
        keys[:, :, new], values[:, :, new] = k, v
        seen = keys[:, :, : new.stop], values[:, :, : new.stop]
        causal = x.shape[1] > 1
        mixed = F.scaled_dot_product_attention(q.to(keys.dtype), *seen, is_causal=causal)
        return finish_layer(x, mixed.to(x.dtype), weights, config.norm_eps)
