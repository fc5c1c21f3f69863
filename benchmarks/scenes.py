"""Prompts of `mini` with the truth of their scenes, for `bishop evaluate --prompts`.

    python -m benchmarks.scenes --pack training/cache --count 64 --seed 8801 -o scenes.jsonl

One JSON object a line: {"prompt", "truth": {"objects": [{"concept", "count", "style"}], "relation",
"region", "background": {"kind", "colors"}}}. Captions are drawn as for training, with another seed.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.pictures import caption
from training.scenes import Scene, draw_scenes
from training.sprites import SpritePack


def truth(scene: Scene, pack: SpritePack) -> dict[str, Any]:
    """What a picture of the scene must show."""
    back = scene.background
    colors = [back.first] if back.kind == "plain" else [back.first, back.second]
    things = [
        {"concept": pack.concepts[t.concept], "count": t.count, "style": pack.styles[t.style]}
        for t in scene.things
    ]
    return {
        "objects": things,
        "relation": scene.relation,
        "region": scene.region,
        "background": {"kind": back.kind, "colors": colors},
    }


def told(scene: Scene, pack: SpritePack) -> bool:
    """Whether the caption says all that the truth is scored by: style and background."""
    styles = {pack.styles[thing.style] for thing in scene.things}
    return styles <= set(scene.words) and "background" in scene.words


def lines(pack: SpritePack, count: int, seed: int) -> Iterator[dict[str, Any]]:
    """The first `count` scenes of a seed whose captions tell everything."""
    found = [s for s in draw_scenes(pack, 4 * count, seed) if told(s, pack)]
    for scene in found[:count]:
        yield {"prompt": caption(scene), "truth": truth(scene, pack)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pack", type=Path, required=True, help="folder of sprites")
    parser.add_argument("--count", type=int, default=64)
    parser.add_argument("--seed", type=int, required=True, help="not one of training's")
    parser.add_argument("-o", "--output", type=Path, required=True)
    args = parser.parse_args()
    pack = SpritePack.load(args.pack, images=False)
    text = "".join(json.dumps(line) + "\n" for line in lines(pack, args.count, args.seed))
    args.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
