"""Sampling: the filters by their definition, the noise by its distribution."""

import pytest
import torch

from engine.sampling import Draw, draw_tokens, filter_logits, guide, gumbel, sample
from scheduler.request import RequestError, Sampling


def draws(count: int, **options: float) -> list[Draw]:
    return [Draw(Sampling(1.0, **options), seed, 0) for seed in range(count)]  # type: ignore[arg-type]


def test_greedy_takes_the_maximum() -> None:
    logits = torch.randn(5, 40)
    assert sample(logits, draws(5, temperature=0.0)).equal(logits.argmax(-1))


def test_frequencies_follow_the_softmax() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    counts = sample(logits.expand(20_000, 4), draws(20_000)).bincount(minlength=4)
    assert torch.allclose(counts / 20_000, logits.softmax(-1), atol=0.015)


def test_temperature_flattens() -> None:
    logits = torch.tensor([2.0, 0.0])
    counts = sample(logits.expand(20_000, 2), draws(20_000, temperature=4.0)).bincount()
    assert torch.allclose(counts / 20_000, (logits / 4).softmax(-1), atol=0.015)


@pytest.mark.parametrize("k", [1, 3, 40, 100])
def test_top_k_keeps_the_k_best(k: int) -> None:
    logits = torch.randn(6, 40)
    kept = filter_logits(logits, draws(6, top_k=k)).isfinite()
    assert (kept.sum(-1) == min(k, 40)).all()
    assert (
        logits.masked_fill(kept, -99).max(-1).values <= logits.masked_fill(~kept, 99).min(-1).values
    ).all()


@pytest.mark.parametrize("p", [1e-6, 0.3, 0.9, 0.999])
def test_top_p_keeps_the_smallest_set_that_reaches_p(p: float) -> None:
    logits = torch.randn(6, 40, dtype=torch.float64)
    kept = filter_logits(logits, draws(6, top_p=p)).isfinite()
    mass = logits.softmax(-1)
    for row in range(6):
        inside = mass[row][kept[row]]
        assert inside.sum() >= p
        assert inside.sum() - inside.min() < p
        assert inside.min() >= mass[row].masked_fill(kept[row], 0).max()


def test_rows_with_different_settings_do_not_mix() -> None:
    logits = torch.randn(4, 40)
    mixed = [
        Draw(Sampling(1.0, temperature=0.0), 1, 5),
        Draw(Sampling(1.0, top_k=3), 2, 6),
        Draw(Sampling(1.0, top_p=0.5), 3, 7),
        Draw(Sampling(1.0, temperature=2.0), 4, 8),
    ]
    together = sample(logits, mixed).tolist()
    alone = [int(sample(logits[i : i + 1], [d])) for i, d in enumerate(mixed)]
    assert together == alone


def test_noise_is_gumbel_and_independent() -> None:
    noise = gumbel([(seed, position) for seed in range(40) for position in range(5)], 2000,
                   torch.device("cpu"))  # fmt: skip
    assert noise.isfinite().all()
    assert abs(noise.mean() - 0.5772) < 0.01
    assert abs(noise.var() - torch.pi**2 / 6) < 0.02
    assert torch.corrcoef(noise).fill_diagonal_(0).abs().max() < 0.12


def test_noise_depends_on_seed_and_position_alone() -> None:
    cpu = torch.device("cpu")
    one, two = gumbel([(3, 9)], 100, cpu), gumbel([(1, 1), (3, 9)], 100, cpu)[1:]
    assert one.equal(two)
    assert not one.equal(gumbel([(3, 10)], 100, cpu))
    assert not one.equal(gumbel([(4, 9)], 100, cpu))


def test_guidance_follows_its_definition() -> None:
    logits = torch.randn(3, 8)
    draws = [Draw(Sampling(2.5), 0, 0), Draw(Sampling(1.0), 0, 0)]
    guided = guide(logits, [2, None], draws)
    assert torch.allclose(guided[0], logits[2] + 2.5 * (logits[0] - logits[2]))
    assert guided[1].equal(logits[1])


SETTINGS = [
    Sampling(1.0), Sampling(3.0, top_p=0.9), Sampling(5.0, 0.7, top_k=7), Sampling(2.0, 0.0),
    Sampling(4.0, 1.3, 50, 0.5), Sampling(1.0, top_k=1), Sampling(1.0, top_p=1e-6),
]  # fmt: skip


@pytest.mark.parametrize("vocabulary", [5, 256, 1000, 4096])
def test_native_draws_what_the_reference_draws(vocabulary: int) -> None:
    """Equal but for draws on the edge of rounding, and bit by bit independent of the batch."""
    draws = [Draw(SETTINGS[i % len(SETTINGS)], 7 * i, i) for i in range(210)]
    pairs = [i for i, d in enumerate(draws) if d.sampling.guided]
    partners = [210 + pairs.index(i) if i in pairs else None for i in range(210)]
    logits = 3 * torch.randn(210 + len(pairs), vocabulary)
    native = draw_tokens(logits, partners, draws, "native")
    reference = draw_tokens(logits, partners, draws, "reference")
    assert sum(a != b for a, b in zip(native, reference, strict=True)) <= 1
    for i in range(0, 210, 13):
        rows = [i] if partners[i] is None else [i, partners[i]]
        alone = [None if partners[i] is None else 1]
        assert draw_tokens(logits[rows], alone, [draws[i]], "native") == [native[i]]


def test_logits_that_are_not_finite_give_no_token(backend: str) -> None:
    logits = torch.randn(4, 10)
    logits[1, 3], logits[3, 0] = float("nan"), float("inf")
    draws = [Draw(Sampling(2.0), i, 0) for i in range(3)]
    tokens = draw_tokens(logits, [None, None, 3], draws, backend)
    assert [t is None for t in tokens] == [False, True, True]


@pytest.mark.parametrize("bad", [
    {"temperature": float("nan")}, {"temperature": -1}, {"top_p": 0.0}, {"top_p": 1.1},
    {"top_k": -1}, {"guidance_scale": float("inf")}, {"guidance_scale": 0.5},
])  # fmt: skip
def test_settings_out_of_range_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(RequestError) as caught:
        Sampling(**({"guidance_scale": 1.0} | bad))  # type: ignore[arg-type]
    assert caught.value.param in bad
