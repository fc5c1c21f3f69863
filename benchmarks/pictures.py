"""Finished pictures for calibration and evaluation of `mini`: scenes that training never showed.

    python -m benchmarks.pictures --pack training/cache --seed 501 -o data/calibration.safetensors

Scenes are drawn as for training, with another seed, and encoded by the model's own tokenizer; each
keeps its caption as prompt.
"""

import argparse
import random
from pathlib import Path

import torch

from engine.models.mini import Mini
from engine.models.options import LoadOptions
from engine.models.presets import load_model
from engine.teacher import Pictures, encode_prompts
from training.compose import build_atlas, compose_batch, sprites_used
from training.scenes import Scene, SceneSampler, draw_scenes, to_arrays
from training.sprites import SpritePack

BATCH = 16


def draw(model: Mini, pack: SpritePack, count: int, seed: int) -> Pictures:
    """`count` scenes as prompt and visual tokens."""
    scenes = draw_scenes(pack, count, seed)
    tokenizer = SceneSampler(pack, random.Random(seed)).tokenizer
    arrays = to_arrays(scenes, tokenizer)
    atlas = build_atlas(pack, torch.device("cpu"), sprites_used(arrays))
    tokens = []
    with torch.inference_mode():
        for first in range(0, count, BATCH):
            images = compose_batch(atlas, arrays[first : first + BATCH])
            tokens.append(model.pixels.encode(images))
    prompts = encode_prompts(model, [caption(scene) for scene in scenes], model.grid)
    return Pictures(prompts, torch.cat(tokens))


def caption(scene: Scene) -> str:
    """Words of a scene as a user types them."""
    return " ".join(scene.words).replace("_", " ")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="mini", help="preset or folder of weights")
    parser.add_argument("--pack", type=Path, required=True, help="folder of sprites")
    parser.add_argument("--count", type=int, default=48)
    parser.add_argument("--seed", type=int, required=True, help="not one of training's")
    parser.add_argument("-o", "--output", type=Path, required=True)
    args = parser.parse_args()
    model = load_model(args.model, LoadOptions())
    if not isinstance(model, Mini):
        raise SystemExit(f"pictures are drawn for the family of `mini`, not {args.model}")
    draw(model, SpritePack.load(args.pack), args.count, args.seed).save(args.output)


if __name__ == "__main__":
    main()
