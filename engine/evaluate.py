"""What policies cost in finished pictures: the same prompts and seeds under each of them.

Every cell (policy, sparsity, KV format) draws the same pictures as dense attention does, and
differences are taken picture by picture. A folder keeps everything, so a killed run goes on.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from engine.compare import BATCH, Comparison, error
from engine.engine import Engine
from engine.judges.bootstrap import interval, statistic
from engine.judges.features import Extract
from engine.judges.frechet import frechet
from engine.judges.geneval import summary
from engine.judges.suites import Judge
from engine.policy_files import default_options, policy_of
from engine.selfdrawn import Order, draw_pictures
from engine.shares import shares
from engine.teacher import Pictures, PolicyAttention, forced_tokens, token_loss
from scheduler.request import PolicyChoice
from sparse_attn.policies.dense import Dense
from sparse_attn.policy import Heads

OTHER_SEEDS = 1_000_000
"""Added to the seeds of the baseline: what two dense pictures of one prompt differ by."""
FEWEST = 16
"""Pictures below which a Frechet distance says nothing."""
Floats = np.ndarray[Any, np.dtype[np.float64]]
Told = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Cell:
    """One way to draw. options: as users write them."""

    policy: str = "dense"
    sparsity: float = 0.0
    format: str = "bf16"
    options: Mapping[str, Any] = field(default_factory=dict)
    label: str = ""

    @property
    def name(self) -> str:
        """Also the name of its folder."""
        word = re.sub(r"[^A-Za-z0-9.+-]+", "-", self.label or self.policy)
        return "-".join([word, *([f"{self.sparsity:g}"] if self.sparsity else []), self.format])

    def choice(self, model: str) -> PolicyChoice:
        given = default_options(self.policy, model) | dict(self.options)
        return PolicyChoice(self.policy, self.sparsity, tuple(sorted(given.items())))


@dataclass(frozen=True, slots=True)
class Plan:
    """What to evaluate on. facts: what judges know of each prompt. held_out: finished pictures for
    likelihood and KL; the dense cell's own pictures where there are none."""

    prompts: tuple[str, ...]
    count: int
    folder: Path
    facts: tuple[Mapping[str, Any], ...] = ()
    seed: int = 0
    held_out: Pictures | None = None

    @property
    def clusters(self) -> list[int]:
        """The prompt of each picture."""
        return [i % len(self.prompts) for i in range(self.count)]


@dataclass(frozen=True, slots=True)
class Tools:
    """What is installed; None is left out. distance: [b, 3, h, w] pairs in 0..1 -> [b]."""

    distance: Callable[[Tensor, Tensor], Tensor] | None = None
    features: Extract | None = None
    judge: Judge | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Drawn:
    """The pictures of a cell and what is known of each. scores: name -> one value a picture.
    distances: to the dense picture of the same prompt, where a distance is installed."""

    pictures: Pictures
    images: Float[Tensor, "b 3 h w"]
    scores: dict[str, list[float]]
    features: Floats | None
    distances: list[float]


class Evaluation:
    """One run over one folder. `open_engine` gives an engine with a KV format."""

    def __init__(
        self, open_engine: Callable[[str], Engine], plan: Plan, tools: Tools, told: Told
    ) -> None:
        self.plan, self.tools, self.told = plan, tools, told
        self._open, self._engines = open_engine, dict[str, Engine]()
        self.model = self.engine("bf16").model
        self._reference: Tensor | None = None
        self.dense = self.drawn(Cell())
        self.other = self.drawn(Cell(label="dense-other-seeds"), OTHER_SEEDS)
        self._comparison: Comparison | None = None

    def engine(self, format: str) -> Engine:
        if format not in self._engines:
            self._engines = {format: self._open(format)}
        return self._engines[format]

    def row(self, cell: Cell) -> dict[str, Any]:
        """One line of the table."""
        drawn = self.drawn(cell)
        policy = policy_of(self.model, cell.policy, cell.sparsity, cell.options)
        return {
            "cell": cell.name, "policy": cell.label or cell.policy, "sparsity": cell.sparsity,
            "format": cell.format, "images": self.plan.count, "prompts": len(self.plan.prompts),
            **shares(policy, cell.format, self.model.shape.head_dim),
            **self._held_out(cell),
            **self._against_dense(drawn),
        }  # fmt: skip

    def baseline(self) -> dict[str, Any]:
        """Dense pictures from other seeds, as if they were a policy. Frechet distances are taken to
        them, so they have none of their own."""
        row = {"cell": "dense, other seeds", "policy": "dense, other seeds", "sparsity": 0.0}
        size = {"images": self.plan.count, "prompts": len(self.plan.prompts)}
        found = self._against_dense(self.other)
        found = {name: value for name, value in found.items() if not name.startswith("fd")}
        return row | {"format": "bf16"} | size | found

    def _held_out(self, cell: Cell) -> dict[str, float]:
        """Likelihood and KL of held-out pictures, kept beside the cell's pictures."""
        path = self.plan.folder / "cells" / cell.name / "held-out.json"
        count = len(self._held_out_pictures)
        if path.is_file():
            kept: dict[str, float] = json.loads(path.read_text(encoding="utf-8"))
            if kept["held_out"] == count:
                return kept
        self._comparison = self._comparison or Comparison(self.model, self._held_out_pictures)
        policy = policy_of(self.model, cell.policy, cell.sparsity, cell.options)
        found = self._comparison.of(policy, cell.format)
        values = {
            "nll_loss": float(found.loss.mean()), "nll_loss_se": error(found.loss),
            "kl": float(found.kl.mean()), "kl_se": error(found.kl), "held_out": count,
        }  # fmt: skip
        path.write_text(json.dumps(values), encoding="utf-8")
        return values

    @property
    def _held_out_pictures(self) -> Pictures:
        return self.plan.held_out or self.dense.pictures

    def _against_dense(self, drawn: Drawn) -> dict[str, Any]:
        """Means of the scores with intervals, and of their differences to dense."""
        found: dict[str, Any] = {}
        for name, values in drawn.scores.items():
            change = np.subtract(values, self.dense.scores[name])
            found |= self._three(name, values) | self._three(f"{name}_change", change)
        found |= self._three("agreement", self._agreement(drawn))
        if self.tools.distance is not None:
            found |= self._three("lpips", drawn.distances)
        return found | self._tasks(drawn) | self._frechet(drawn)

    def _tasks(self, drawn: Drawn) -> dict[str, float]:
        """GenEval's overall score where prompts have tags: the mean of the tasks."""
        facts, scores = self.plan.facts, drawn.scores.get("geneval")
        if scores is None:
            return {}
        tags = [str(facts[i % len(facts)]["tag"]) for i in range(len(scores))]
        return {"geneval_overall": summary(zip(tags, scores, strict=True))["overall"]}

    def _three(self, name: str, values: Any) -> dict[str, float]:
        """Pictures without the value (nothing was asked) do not count."""
        known = [i for i, v in enumerate(values) if not np.isnan(v)]
        found = interval([values[i] for i in known], [self.plan.clusters[i] for i in known])
        return {name: found.value, f"{name}_low": found.low, f"{name}_high": found.high}

    def _agreement(self, drawn: Drawn) -> list[float]:
        """Share of equal tokens, a picture."""
        free = ~forced_tokens(self.model, self.model.grid)
        same = drawn.pictures.tokens == self.dense.pictures.tokens
        return [float(x) for x in same[:, free].double().mean(1)]

    def _frechet(self, drawn: Drawn) -> dict[str, float]:
        """Distance to dense pictures from other seeds, less the distance dense pictures have."""
        mine, dense, reference = drawn.features, self.dense.features, self.other.features
        few = self.plan.count < FEWEST
        if few or mine is None or dense is None or reference is None:
            return {}
        found = statistic(
            lambda at: frechet(mine[at], reference[at]) - frechet(dense[at], reference[at]),
            self.plan.clusters, rounds=200,
        )  # fmt: skip
        return {
            "fd": frechet(mine, reference), "fd_change": found.value,
            "fd_change_low": found.low, "fd_change_high": found.high,
        }  # fmt: skip

    def drawn(self, cell: Cell, seeds: int = 0) -> Drawn:
        """Draw what is missing of a cell, and score it."""
        engine = self.engine(cell.format)
        folder = self.plan.folder / "cells" / cell.name
        choice = cell.choice(engine.model.name)
        order = Order(self.plan.prompts, self.plan.count, self.plan.seed + seeds, choice)
        done: dict[int, int] = {}

        def told(number: int, tokens: int, total: int) -> None:
            done[number] = tokens
            self.told(cell.name, sum(done.values()), total * self.plan.count)

        _remember(folder, order)
        pictures = draw_pictures(engine, order, folder, told)
        images = _images(engine, pictures)
        scores = self._scores(folder, pictures, images)
        features = self._features(folder, images)
        return Drawn(pictures, images, scores, features, self._distances(folder, images))

    def _features(self, folder: Path, images: Tensor) -> Floats | None:
        if self.tools.features is None:
            return None
        path = folder / "features.npy"
        kept = np.load(path) if path.is_file() else None
        if kept is None or len(kept) != len(images):
            kept = self.tools.features(images)
            np.save(path, kept)
        return np.asarray(kept, dtype=np.float64)

    def _distances(self, folder: Path, images: Tensor) -> list[float]:
        """Dense pictures are the first that are drawn; they have none of their own."""
        if self.tools.distance is None:
            return []
        self._reference = images if self._reference is None else self._reference
        path = folder / "distances.json"
        kept: list[float] = json.loads(path.read_text()) if path.is_file() else []
        if len(kept) != len(images):
            pairs = zip(images.split(4), self._reference.split(4), strict=True)
            kept = [float(x) for a, b in pairs for x in self.tools.distance(a, b)]
            path.write_text(json.dumps(kept))
        return kept

    def _scores(self, folder: Path, pictures: Pictures, images: Tensor) -> dict[str, list[float]]:
        """Kept beside the pictures: dense likelihoods of many pictures take long."""
        path, judge = folder / "scores.json", self.tools.judge is not None
        if path.is_file():
            kept = json.loads(path.read_text(encoding="utf-8"))
            if kept["count"] == len(pictures) and kept["judge"] == judge:
                return dict(kept["scores"])
        scores = {"sample_nll": self._dense_nll(pictures)} | self._judged(images)
        text = json.dumps({"count": len(pictures), "judge": judge, "scores": scores})
        path.write_text(text, encoding="utf-8")
        return scores

    def _dense_nll(self, pictures: Pictures) -> list[float]:
        """What the model, densely, thinks of each picture: nats a visual token."""
        grid, shape = self.model.grid, self.model.shape
        dense = PolicyAttention(Dense(grid, Heads(shape.layers, shape.kv_heads)))
        free = int((~forced_tokens(self.model, grid)).sum())
        losses = [token_loss(self.model, grid, part, dense) for part in pictures.split(BATCH)]
        return [float(x) / free for x in torch.cat(losses).sum(1)]

    def _judged(self, images: Tensor) -> dict[str, list[float]]:
        if self.tools.judge is None:
            return {}
        pixels = (images * 255).round().byte().permute(0, 2, 3, 1).numpy()
        facts = self.plan.facts
        each = [self.tools.judge(facts[i % len(facts)], p) for i, p in enumerate(pixels)]
        names = sorted({name for scores in each for name in scores})
        return {name: [float(s.get(name, np.nan)) for s in each] for name in names}


def _images(engine: Engine, pictures: Pictures) -> Float[Tensor, "b 3 h w"]:
    """Pixels in 0..1."""
    model = engine.model
    parts = [model.decode_pixels(t, model.grid) for t in pictures.tokens.split(8)]
    return torch.cat(parts).cpu().permute(0, 3, 1, 2).float() / 255


def _remember(folder: Path, order: Order) -> None:
    """Raises ValueError if the folder holds pictures of something else."""
    values = {"prompts": list(order.prompts), "seed": order.seed, "policy": str(order.policy)}
    path = folder / "order.json"
    if path.is_file():
        if json.loads(path.read_text(encoding="utf-8")) != values:
            raise ValueError(
                f"{folder} holds pictures of other prompts or options; name another -o"
            )
        return
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values), encoding="utf-8")


def cells(
    policies: Sequence[str], sparsities: Sequence[float], formats: Sequence[str]
) -> list[Cell]:
    """Of words such as "window", "diagonal+sink4", "stencil@FILE"; "window:0.8" has a sparsity of
    its own. Dense once per format.

    Raises ValueError for a word that cannot be read.
    """
    return [
        cell for format in formats for word in policies for cell in _of(word, sparsities, format)
    ]


def _of(word: str, sparsities: Sequence[float], format: str) -> list[Cell]:
    word, colon, own = word.partition(":")
    name, options = parse_policy(word)
    if colon:
        sparsities = [float(own)]
    chosen = [0.0] if name == "dense" else sparsities
    return [Cell(name, sparsity, format, options, _label(word)) for sparsity in chosen]


def _label(word: str) -> str:
    name, at, file = word.partition("@")
    return f"{name} {Path(file).stem}" if at else name


def parse_policy(word: str) -> tuple[str, dict[str, Any]]:
    """("diagonal", {"sink": 4}) of "diagonal+sink4"; "@FILE" is the option `file`."""
    rest, at, file = word.partition("@")
    name, *parts = rest.split("+")
    options: dict[str, Any] = {"file": file} if at else {}
    for part in parts:
        match = re.fullmatch(r"([a-z_]+?)(\d+(?:\.\d+)?)", part)
        if match is None:
            raise ValueError(f"cannot read the policy {word!r}; write it as diagonal+sink4")
        options[match[1]] = float(match[2]) if "." in match[2] else int(match[2])
    return name, options
