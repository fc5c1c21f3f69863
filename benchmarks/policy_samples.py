"""The same pictures under several policies, side by side: docs/policies/samples.png.

    python -m benchmarks.policy_samples

One column per policy, one row per prompt, the same seed along a row; none is chosen among several.
"""

from collections.abc import Iterator

import numpy as np
import torch
from PIL import Image

from benchmarks.policies import LARGEST
from benchmarks.results_writer import ROOT
from engine.config import EngineConfig
from engine.engine import Engine
from engine.events import Event, Failed, Finished
from engine.policy_files import stencil_path
from scheduler.request import ImageRequest, PolicyChoice

PATH = ROOT / "docs" / "policies" / "samples.png"
PROMPTS = (
    "a red apple left of a banana on a white background",
    "a dog face above a pizza on a blue background",
    "three strawberries on a pink background",
)
HALF = (("resident", 0.5), ("anchors", "first_row"))
COLUMNS: tuple[tuple[PolicyChoice, str], ...] = (
    (PolicyChoice(), "bf16"),
    (PolicyChoice("indexed", 0.9), "bf16"),
    (PolicyChoice("indexed", 0.9, HALF), "int8"),
    (PolicyChoice("stencil", 0.9, (("file", str(stencil_path("mini"))),)), "bf16"),
    (PolicyChoice("diagonal", 0.9), "bf16"),
    (PolicyChoice("window", 0.9), "bf16"),
)
COLORS, SIDE = 48, 128


def column(policy: PolicyChoice, format: str) -> np.ndarray:
    """The pictures of all prompts under one policy, uint8 [height, width, 3]."""
    engine = Engine(EngineConfig(model="mini", kv_format=format, cache_bytes=1 << 29))
    pictures: dict[int, np.ndarray] = {}

    def listen(event: Event) -> None:
        if isinstance(event, Failed):
            raise RuntimeError(event.reason)
        if isinstance(event, Finished):
            pictures[event.seed] = event.pixels

    for seed, prompt in enumerate(PROMPTS):
        sampling = engine.model.sampling
        engine.add(ImageRequest(prompt, seed=seed, sampling=sampling, policy=policy), listen)
    while engine.step():
        pass
    return np.concatenate([_small(pictures[seed]) for seed in range(len(PROMPTS))])


def _small(pixels: np.ndarray) -> np.ndarray:
    return np.asarray(Image.fromarray(pixels).resize((SIDE, SIDE), Image.Resampling.LANCZOS))


def columns() -> Iterator[np.ndarray]:
    for policy, format in COLUMNS:
        yield column(policy, format)


def main() -> None:
    torch.set_num_threads(2)
    sheet = Image.fromarray(np.concatenate(list(columns()), 1))
    sheet.quantize(COLORS, dither=Image.Dither.NONE).save(PATH, optimize=True)
    if PATH.stat().st_size > LARGEST:
        raise SystemExit(f"{PATH} has {PATH.stat().st_size} bytes, more than {LARGEST}")


if __name__ == "__main__":
    main()
