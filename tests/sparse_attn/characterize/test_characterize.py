"""Streaming statistics against plain loops over whole maps of random attention."""

import math

import pytest
import torch
from torch import Tensor

from sparse_attn.characterize.heads import classify, overlap
from sparse_attn.characterize.layer import Labels, LayerCharacter
from sparse_attn.characterize.rows import Rows, density_for, entropy
from sparse_attn.characterize.similarity import shuffled_order
from sparse_attn.geometry import Grid

GRID = Grid(4, 5, 1)
BATCHES, PICTURES, HEADS, PROMPT = 2, 3, 2, 3
STEPS = GRID.tokens - 1


@pytest.fixture(scope="module")
def maps() -> Tensor:
    """[batches, B, H, steps, P + steps]: causal, rows sum to 1."""
    generator = torch.Generator().manual_seed(3)
    shape = (BATCHES, PICTURES, HEADS, STEPS, PROMPT + STEPS)
    score = 2 * torch.randn(shape, generator=generator)
    hidden = torch.ones(STEPS, STEPS).triu(1).bool()
    score[..., PROMPT:][hidden.expand(*shape[:-1], STEPS)] = -torch.inf
    return score.softmax(-1)


@pytest.fixture(scope="module")
def layer(maps: Tensor) -> LayerCharacter:
    layer = LayerCharacter(HEADS, GRID)
    for batch in maps:
        for t in range(STEPS):
            rows = Rows(t, batch[:, :, t, :PROMPT], batch[:, :, t, PROMPT : PROMPT + t + 1])
            layer.add(rows, Labels([0, 1, 0], [0, 0, 1]))
    return layer


def pictures(maps: Tensor) -> Tensor:
    return maps.flatten(0, 1)


def test_regions(maps: Tensor, layer: LayerCharacter) -> None:
    wanted = torch.zeros(3, HEADS)
    for picture in pictures(maps):
        for h in range(HEADS):
            for t in range(STEPS):
                row = picture[h, t].tolist()
                first = t + 1 - math.ceil(0.1 * (t + 1))
                wanted[0, h] += sum(row[:PROMPT])
                wanted[1, h] += sum(row[PROMPT + first : PROMPT + t + 1])
                wanted[2, h] += sum(row[PROMPT : PROMPT + first])
    wanted /= BATCHES * PICTURES * STEPS
    means = layer.regions.means()
    found = torch.stack([means[n] for n in ("prompt", "local", "middle")]).float()
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(found.sum(0), torch.ones(HEADS))


def test_offsets_and_bins(maps: Tensor, layer: LayerCharacter) -> None:
    offsets = torch.zeros(HEADS, GRID.height, 2 * GRID.stride - 1)
    binned = torch.zeros(HEADS, layer.binned.bins, 1 + layer.binned.bins)
    for picture in pictures(maps):
        for t in range(STEPS):
            q = t * layer.binned.bins // GRID.tokens
            binned[:, q, 0] += picture[:, t, :PROMPT].sum(-1)
            for j in range(t + 1):
                dr, dc = GRID.row(t) - GRID.row(j), GRID.column(t) - GRID.column(j)
                offsets[:, dr, dc + GRID.stride - 1] += picture[:, t, PROMPT + j]
                k = j * layer.binned.bins // GRID.tokens
                binned[:, q, 1 + k] += picture[:, t, PROMPT + j]
    count = BATCHES * PICTURES * STEPS
    torch.testing.assert_close(layer.offsets.means().float(), offsets / count)
    torch.testing.assert_close(layer.binned.sums.float(), binned)
    sums = layer.binned.means().sum(-1)[:, layer.binned.queries > 0].float()
    torch.testing.assert_close(sums, torch.ones_like(sums))


def test_similarity(maps: Tensor, layer: LayerCharacter) -> None:
    d = GRID.stride
    order = shuffled_order(GRID).tolist()
    wanted = {kind: [] for kind in ("vertical", "diagonal", "diagonal_shuffled")}  # type: ignore[var-annotated]
    for picture in pictures(maps):
        for h in range(HEADS):
            for t in range(d, STEPS):
                a = [*picture[h, t, PROMPT:].tolist(), 0.0]
                b = [*picture[h, t - d, PROMPT:].tolist(), 0.0]
                a_mixed, b_mixed = [a[j] for j in order], [b[j] for j in order]
                wanted["vertical"].append(cosine(a, b))
                wanted["diagonal"].append(cosine(a[d:], b[:-d]))
                wanted["diagonal_shuffled"].append(cosine(a_mixed[d:], b_mixed[:-d]))
    [found] = [row for row in layer.similarities() if row["distance"] == d]
    for kind, values in wanted.items():
        assert found[kind] == pytest.approx(sum(values) / len(values), abs=1e-5)
    assert found["vertical_shuffled"] == pytest.approx(found["vertical"], abs=1e-6)


def cosine(a: list[float], b: list[float]) -> float:
    """0 where one side holds nothing."""
    product = sum(x * y for x, y in zip(a, b, strict=True))
    return product and product / (math.hypot(*a) * math.hypot(*b))


def test_halves_add_up(layer: LayerCharacter) -> None:
    for one, other in layer.halves.values():
        torch.testing.assert_close(one.sums + other.sums, layer.offsets.sums)
        assert one.count + other.count == layer.offsets.count


@pytest.mark.parametrize("seed", range(5))
def test_density_and_entropy(seed: int) -> None:
    weights = torch.rand(1, 1, 17, generator=torch.Generator().manual_seed(seed)).softmax(-1)[0, 0]
    values = sorted(weights.tolist(), reverse=True)
    for mass in (0.5, 0.9, 0.99):
        count = next(n for n in range(1, 18) if sum(values[:n]) >= mass)
        assert float(density_for(weights, mass)) == pytest.approx(count / 17)
    assert float(entropy(weights)) == pytest.approx(-sum(w * math.log(w) for w in values), rel=1e-4)


def test_edges_of_density_and_entropy() -> None:
    one = torch.tensor([0.0, 1.0, 0.0, 0.0])
    assert float(entropy(one)) == 0
    assert float(density_for(one, 0.99)) == 0.25
    flat = torch.full((100,), 0.01)
    assert float(density_for(flat, 0.9)) == pytest.approx(0.9)


def test_kinds_of_made_up_heads() -> None:
    mass = torch.zeros(5, 6, 2 * 6 - 1)
    mass[0, 0, 5] = 1
    mass[1, 1, 6] = 1  # local: one up, one aside
    mass[2, 4, 5] = 1  # column: four rows up
    mass[3, 0, 10] = 1  # row: five to the left
    mass[4, 3, 1] = 1  # elsewhere
    prompt = torch.tensor([0.6, 0.1, 0.1, 0.1, 0.1])
    found = classify(prompt, torch.zeros(5), mass)
    assert found == ["prompt/sink", "local", "column", "row", "global"]
    assert overlap(mass, mass, top=1).tolist() == [1.0] * 5
    assert overlap(mass[:1], mass[2:3], top=1).tolist() == [0.0]
