"""From logits to the next token: guidance, temperature, top-k, top-p and counter-based noise.

The noise of (seed, position, token) is a hash, not the state of a generator, so an image does not
depend on who shares its batch, on the batch size, or on a restart.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from scheduler.request import Sampling
from sparse_attn import ops
from sparse_attn.attention import Backend

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Draw:
    """How one image draws its next token: its parameters, seed, and the token's position."""

    sampling: Sampling
    seed: int
    position: int


def draw_tokens(
    logits: Float[Tensor, "R V"],
    partners: Sequence[int | None],
    draws: Sequence[Draw],
    backend: Backend,
) -> list[int | None]:
    """One token per image, None where its logits are not finite.

    Row b of `logits` is image b's conditional row; partners[b] its unconditional row, if any.
    Images are independent: a token depends on the image's rows and its `Draw` alone.
    """
    if backend == "native":
        tokens = _native(logits, partners, draws).tolist()
        return [None if token < 0 else token for token in tokens]
    guided = guide(logits, partners, draws)
    finite = guided.isfinite().all(-1).tolist()
    tokens = sample(guided.nan_to_num(), draws).tolist()
    return [token if good else None for token, good in zip(tokens, finite, strict=True)]


def _native(
    logits: Float[Tensor, "R V"], partners: Sequence[int | None], draws: Sequence[Draw]
) -> Int64[Tensor, "B"]:
    settings = [
        (d.sampling.guidance_scale, d.sampling.temperature, d.sampling.top_p) for d in draws
    ]
    return ops.sample(
        logits.contiguous(),
        torch.tensor([-1 if p is None else p for p in partners], device=logits.device),
        torch.tensor(settings, dtype=torch.float32, device=logits.device),
        torch.tensor([d.sampling.top_k for d in draws], device=logits.device),
        torch.tensor([_signed(_key(d.seed, d.position)) for d in draws], device=logits.device),
    )


def guide(
    logits: Float[Tensor, "R V"], partners: Sequence[int | None], draws: Sequence[Draw]
) -> Float[Tensor, "B V"]:
    """Classifier-free guidance, uncond + g * (cond - uncond), where an image has a partner row."""
    guided = logits[: len(draws)].clone()
    for row, (partner, draw) in enumerate(zip(partners, draws, strict=True)):
        if partner is not None:
            other = logits[partner]
            guided[row] = other + draw.sampling.guidance_scale * (guided[row] - other)
    return guided


def sample(logits: Float[Tensor, "B V"], draws: Sequence[Draw]) -> Int64[Tensor, "B"]:
    """Draw one token per row by the Gumbel-max trick; temperature 0 is arg-max."""
    temperature = _column(logits, [d.sampling.temperature or 1.0 for d in draws])
    scaled = filter_logits(logits / temperature, draws)
    greedy = torch.tensor([d.sampling.temperature == 0 for d in draws], device=logits.device)
    noise = gumbel([(d.seed, d.position) for d in draws], logits.shape[1], logits.device)
    return (scaled + torch.where(greedy[:, None], 0.0, noise)).argmax(-1)


def filter_logits(logits: Float[Tensor, "B V"], draws: Sequence[Draw]) -> Float[Tensor, "B V"]:
    """-inf for tokens outside the top k, then outside the nucleus of mass top_p.

    The nucleus is the smallest set of most likely tokens whose mass reaches top_p; ties are broken
    by the lower token id. The most likely token always stays.
    """
    vocabulary = logits.shape[1]
    top_k = [min(d.sampling.top_k or vocabulary, vocabulary) for d in draws]
    top_p = [d.sampling.top_p for d in draws]
    if min(top_k) == vocabulary and min(top_p) >= 1:
        return logits
    ordered, index = logits.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(vocabulary, device=logits.device)
    keep = rank < torch.tensor(top_k, device=logits.device)[:, None]
    mass = ordered.masked_fill(~keep, -torch.inf).softmax(-1)
    before = mass.cumsum(-1) - mass
    keep &= (before < _column(logits, top_p)) | (_column(logits, top_p) >= 1)
    keep[:, 0] = True
    return logits.masked_fill(~torch.zeros_like(keep).scatter(-1, index, keep), -torch.inf)


def gumbel(
    keys: Sequence[tuple[int, int]], vocabulary: int, device: torch.device
) -> Float[Tensor, "B V"]:
    """Standard Gumbel noise of (seed, position) for every token id, fp32."""
    bases = torch.tensor([_signed(_key(*key)) for key in keys], device=device)
    token = torch.arange(vocabulary, device=device) * _signed(_GOLDEN)
    bits = _shift(_mix(bases[:, None] + token), 40)
    uniform = (bits.float() + 0.5) * 2.0**-24
    return -(-uniform.log()).log()


def _key(seed: int, position: int) -> int:
    return _mix_int(_mix_int(seed) + (position + 1) * _GOLDEN)


def _mix_int(x: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea and Flood 2014), on Python integers."""
    x &= _MASK
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & _MASK
    return x ^ x >> 31


def _mix(x: Int64[Tensor, "B V"]) -> Int64[Tensor, "B V"]:
    """`_mix_int` on tensors; int64 arithmetic wraps like uint64."""
    x = (x ^ _shift(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift(x, 31)


def _shift(x: Int64[Tensor, "B V"], bits: int) -> Int64[Tensor, "B V"]:
    """Logical shift right (torch shifts int64 arithmetically)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x


def _column(like: Tensor, values: Sequence[float]) -> Float[Tensor, "B 1"]:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]
