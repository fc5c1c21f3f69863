"""Policies fitted on `tiny`: the same files again, within their bounds, checked and resumed."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine import calibrate
from engine.compare import Comparison
from engine.engine import Engine
from engine.fitting import Fit, fit, tensors_of
from engine.policy_files import policy_of
from engine.selfdrawn import Order, draw_pictures
from engine.teacher import Pictures, masked_attention, token_loss, whole_mask
from scheduler.request import PolicyChoice
from tests.engine.conftest import ask, draw, tiny_engine


@pytest.fixture(scope="module")
def engine() -> Engine:
    return tiny_engine("native")


@pytest.fixture(scope="module")
def pictures(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Pictures:
    return draw_pictures(engine, Order(("word1", "word2 word3"), 4), tmp_path_factory.mktemp("p"))


def quiet(*_: Any) -> None:
    pass


def test_pictures_are_drawn_once_and_are_those_of_their_seeds(
    engine: Engine, tmp_path: Path
) -> None:
    order = Order(("word1", "word2"), 3, seed=5)
    first = draw_pictures(engine, order, tmp_path)
    wanted = [draw(engine, ask(order.prompt(i), 5 + i, sampling=engine.model.sampling))[0][0]
              for i in range(3)]  # fmt: skip
    assert first.tokens.tolist() == [list(t) for t in wanted]
    before = engine.counters.finished
    again = draw_pictures(engine, order, tmp_path)
    assert (again.tokens == first.tokens).all() and engine.counters.finished == before
    assert len(draw_pictures(engine, Order(order.prompts, 4, 5), tmp_path)) == 4


@pytest.mark.parametrize("kind", ["stencil", "indexed"])
def test_the_same_pictures_give_the_same_file(
    kind: Any, engine: Engine, pictures: Pictures, tmp_path: Path
) -> None:
    wanted = Fit(kind, (0.8,), held_out=1)
    paths = [tmp_path / "a.yaml", tmp_path / "b.yaml"]
    for path in paths:
        fit(engine.model, pictures, wanted, path, quiet)
    assert paths[0].read_text() == paths[1].read_text().replace("b.safetensors", "a.safetensors")
    if kind == "indexed":
        assert tensors_of(paths[0]).read_bytes() == tensors_of(paths[1]).read_bytes()


def test_a_check_goes_on_where_it_stopped(
    engine: Engine, pictures: Pictures, tmp_path: Path
) -> None:
    class KilledError(Exception):
        pass

    def killed(what: str, done: int, _total: int) -> None:
        if what == "checking" and done == 2:
            raise KilledError

    wanted, path = Fit("stencil", (0.8,), held_out=1), tmp_path / "x.yaml"
    with pytest.raises(KilledError):
        fit(engine.model, pictures, wanted, path, killed)
    done: list[int] = []
    rows = fit(engine.model, pictures, wanted, path,
               lambda what, n, _: done.append(n) if what == "checking" else None)  # fmt: skip
    assert done and min(done) == 2, "the first row is not measured again, the second was not kept"
    assert rows == fit(engine.model, pictures, wanted, tmp_path / "y.yaml", quiet)


def test_bounds_are_kept(engine: Engine, pictures: Pictures, tmp_path: Path) -> None:
    model, path = engine.model, tmp_path / "x.yaml"
    fit(model, pictures, Fit("stencil", (0.7,), rows=2, held_out=1), path, quiet)
    bounded = policy_of(model, "stencil", 0.7, {"file": str(path), "rows": 2})
    assert max(s.rows for layer in bounded.stencils for s in layer) <= 2  # type: ignore[attr-defined]
    for resident in (0.3, 0.5):
        fit(model, pictures, Fit("stencil", (0.7,), resident=resident, held_out=1), path, quiet)
        policy = policy_of(model, "stencil", 0.7, {"file": str(path)})
        stored = [n for layer in policy.resident_entries() for n in layer]
        assert sum(stored) <= resident * policy.grid.tokens * len(stored)


def test_output_error_against_its_definition(engine: Engine, pictures: Pictures) -> None:
    """Removing a key moves the output by a / (1 - a) (o - v): to first order a |v - o|. What a head
    has in all is its attention mass."""
    model, grid = engine.model, engine.model.grid
    part = pictures[:1]
    wanted: list[Tensor] = []

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, prompt: int) -> Tensor:
        n = q.shape[1] - prompt
        out, mass = torch.zeros(q.shape[2], n, n), torch.zeros(q.shape[2])
        for h in range(q.shape[2]):
            for t in range(n):
                at = prompt + t
                a = (k[0, : at + 1, h] @ q[0, at, h] * q.shape[-1] ** -0.5).softmax(-1)
                o = a @ v[0, : at + 1, h]
                for j in range(t + 1):
                    out[h, t, j] = a[prompt + j] * (v[0, prompt + j, h] - o).norm()
                    mass[h] += a[prompt + j]
        wanted.append(out * (mass / out.sum((1, 2)))[:, None, None])
        mask = whole_mask(torch.ones(1, 1, n, n).tril().bool(), prompt)
        return masked_attention(q, k, v, mask)

    token_loss(model, grid, part, attend)
    found = calibrate.observe(model, grid, part, weigh="output")
    for layer, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(layer.mass.float(), expected, rtol=1e-3, atol=1e-5)


def test_comparison_with_dense(engine: Engine, pictures: Pictures) -> None:
    comparison = Comparison(engine.model, pictures)
    same = comparison.of(policy_of(engine.model, "dense"))
    assert same.loss.abs().max() == 0 and same.kl.abs().max() < 1e-6
    window = comparison.of(policy_of(engine.model, "window", 0.9))
    assert (window.kl > 0).all() and window.kl.shape == (4,)


def test_an_indexed_file_draws(engine: Engine, pictures: Pictures, tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    fit(engine.model, pictures, Fit("indexed", (0.8,), resident=0.5, held_out=1), path, quiet)
    policy = policy_of(engine.model, "indexed", 0.8, {"file": str(path)})
    stored = [n for layer in policy.resident_entries() for n in layer]
    assert sum(stored) <= 0.5 * policy.grid.tokens * len(stored)
    assert draw(engine, ask(policy=PolicyChoice("indexed", 0.8, (("file", str(path)),))))
    path.write_text("kind: stencil\n")
    with pytest.raises(ValueError, match="no file of `indexed`"):
        policy_of(engine.model, "indexed", 0.8, {"file": str(path)})


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"rows": 1, "resident": 0.5}, "not both"),
        ({"rows": 0}, "at least 1"),
        ({"resident": 1.5}, r"\(0, 1\]"),
        ({"sparsities": (1.0,)}, "sparsity must"),
        ({"kind": "indexed", "rows": 2}, "no row bound"),
    ],
)
def test_what_cannot_be_fitted(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Fit(**({"kind": "stencil", "sparsities": (0.9,)} | values))
