import random

import numpy as np
import torch

from training.compose import build_atlas, compose, compose_batch, sprites_used
from training.scenes import CANVAS, KINDS, MAX_SLOTS, SceneSampler, draw_scenes, to_arrays
from training.sprites import SpritePack

CPU = torch.device("cpu")


def reference(pack: SpritePack, slots: np.ndarray, color: np.ndarray) -> np.ndarray:
    """One scene on a plain background, pasted by Pillow."""
    from PIL import Image

    pixels = tuple(round(255 * float(v)) for v in color)
    canvas = Image.new("RGBA", (CANVAS, CANVAS), (*pixels, 255))
    for sprite, size, x, y in slots.tolist():
        if size:
            small = pack.image(sprite).resize((size, size), Image.Resampling.BILINEAR)
            canvas.alpha_composite(small, (x, y))
    return np.asarray(canvas)[..., :3] / 255


def test_agrees_with_pillow(pack: SpritePack) -> None:
    scenes = [s for s in draw_scenes(pack, 60, 1) if s.background.kind == "plain"][:12]
    batch = to_arrays(scenes, SceneSampler(pack, random.Random(0)).tokenizer)
    images = compose_batch(build_atlas(pack, CPU, sprites_used(batch)), batch)
    assert images.shape == (12, 3, CANVAS, CANVAS) and images.min() >= 0 and images.max() <= 1
    for i, image in enumerate(images.permute(0, 2, 3, 1).numpy()):
        wanted = reference(pack, batch.slots[i], batch.background[i, 1:4])
        assert np.abs(image - wanted).mean() < 0.004


def test_a_subset_of_the_atlas_draws_the_same(pack: SpritePack) -> None:
    scenes = draw_scenes(pack, 6, 2)
    batch = to_arrays(scenes, SceneSampler(pack, random.Random(0)).tokenizer)
    some = compose_batch(build_atlas(pack, CPU, sprites_used(batch)), batch)
    torch.testing.assert_close(some, compose_batch(build_atlas(pack, CPU), batch))


def test_backgrounds(pack: SpritePack) -> None:
    atlas = build_atlas(pack, CPU, [0])
    spec = torch.tensor([[float(k), 1, 0, 0, 0, 0, 1, 1, 24] for k in range(len(KINDS))])
    images = compose(atlas, torch.zeros(len(KINDS), MAX_SLOTS, 4, dtype=torch.long), spec)
    plain, gradient, checkered, striped = images
    assert (plain[0] == 1).all() and (plain[2] == 0).all()
    assert (gradient[0].diff(dim=1) < 0).all() and (gradient[0].diff(dim=0) == 0).all()
    assert checkered[0, 0, 0] == 1 and checkered[0, 0, 24] == 0 and checkered[0, 24, 24] == 1
    assert striped[0, 0, 0] == 1 and striped[0, 0, 24] == 0 and striped[0, 24, 24] == 0
