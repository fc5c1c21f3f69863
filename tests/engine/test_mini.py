"""`mini` against an independent full-attention forward pass, and eviction against masking."""

import torch
from torch.nn import functional as F

from engine.engine import Engine
from engine.models.mini import Mini, MiniConfig, random_weights
from scheduler.request import Sampling
from sparse_attn.policy import Batch
from tests.engine.conftest import ask, diagonal, draw


def rope(x: torch.Tensor, row: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
    """[..., T, D]: the first D/4 pairs turn with the row, the others with the column."""
    quarter = x.shape[-1] // 4
    frequency = 100.0 ** (-torch.arange(quarter) / quarter)
    angle = torch.cat([row[:, None] * frequency, column[:, None] * frequency], -1)
    turned = torch.view_as_complex(torch.stack(x.chunk(2, -1), -1).contiguous())
    turned = turned * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([turned.real, turned.imag], -1)


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, weight.shape, weight, 1e-6)


def full_logits(
    c: MiniConfig, prompt: list[int], image: list[int], mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Logits of every visual token [N, V], teacher-forced, with an optional mask
    [layers, heads, N - 1, N - 1] of the visual keys that visual queries may read."""
    w = {name: weight.float() for name, weight in random_weights(c).items()}
    width, count = c.grid[1], c.text_len + 1 + len(image) - 1
    t = torch.arange(len(image))
    target = w["embed.row"][t // width] + w["embed.column"][t % width]
    words = w["embed.text.weight"][prompt] + w["embed.text_position"]
    inner = torch.cat([w["embed.begin_image"][None], w["embed.image.weight"][image[:-1]]])
    x = torch.cat([words, inner + target])
    seen = torch.arange(len(image) - 1)
    row = torch.cat([torch.full((c.text_len,), -2), torch.tensor([-1]), seen // width])
    column = torch.cat([torch.arange(c.text_len), torch.tensor([-1]), seen % width])
    for i in range(c.layers):
        p = f"layers.{i}."
        h = norm(x, w[p + "attn_norm.weight"])
        q, k, v = (
            y.view(count, c.heads, c.head_dim).transpose(0, 1)
            for y in (h @ w[p + "qkv.weight"].T).chunk(3, -1)
        )
        q = rope(norm(q, w[p + "q_norm.weight"]), row, column)
        k = rope(norm(k, w[p + "k_norm.weight"]), row, column)
        allowed = torch.ones(count, count).tril().bool().expand(c.heads, -1, -1).clone()
        if mask is not None:
            first = c.text_len + 1
            allowed[:, first:, first:] &= mask[i]
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        x = x + attended.transpose(0, 1).reshape(count, -1) @ w[p + "out.weight"].T
        gate, up = (norm(x, w[p + "mlp_norm.weight"]) @ w[p + "gate_up.weight"].T).chunk(2, -1)
        x = x + (F.silu(gate) * up) @ w[p + "down.weight"].T
    return norm(x[c.text_len :], w["norm.weight"]) @ w["embed.image.weight"].T


def check_greedy(engine: Engine, tokens: tuple[int, ...], mask: torch.Tensor | None = None) -> None:
    """Each token drawn is the arg-max of the independent logits, up to rounding."""
    model = engine.model
    assert isinstance(model, Mini)
    prompt = list(model.encode_prompt("word1 word2", model.grid)[:-1])
    logits = full_logits(model.config, prompt, list(tokens), mask)
    chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    assert (logits.max(-1).values - chosen).max() < 1e-3


GREEDY = Sampling(1.0, temperature=0.0)


def test_dense_tokens_are_those_of_full_attention(engine: Engine) -> None:
    [[tokens]] = draw(engine, ask(sampling=GREEDY))
    check_greedy(engine, tokens)


def test_diagonal_tokens_are_those_of_its_own_mask(engine: Engine) -> None:
    """Eviction and indirect reads give what a mask over the whole sequence gives."""
    choice = diagonal(0.75, recent=30, sink=2)
    masks: list[torch.Tensor] = []
    group = engine.intake.group(choice)
    events: list[object] = []
    engine.add(ask(sampling=GREEDY, policy=choice), events.append)
    engine.step()
    for t in range(engine.model.grid.tokens - 1):
        masks.append(read_masks(engine, group, t))
        engine.step()
    mask = torch.stack(masks, 2)[..., :-1]
    assert mask[:, :, -1].sum(-1).unique().tolist() == [16]
    check_greedy(engine, events[-1].tokens, mask)  # type: ignore[attr-defined]


def read_masks(engine: Engine, group: object, t: int) -> torch.Tensor:
    """[layers, heads, N]: what the only image in flight reads at position t."""
    [image] = engine.runner.images.values()
    state = engine.runner._pool(image.group).state
    assert state is not None
    int32 = torch.tensor([t], dtype=torch.int32)
    batch = Batch(torch.tensor([0]), int32, int32, torch.tensor([image.rows[0]]))
    policy = image.group.policy
    return torch.stack([policy.reads(i, state, batch)[0] for i in range(policy.heads.layers)])
