"""What `bishop models` says: families, presets, what is installed, and what a folder is."""

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.checkpoint import Checkpoint, Param
from engine.models import hub
from engine.models.family import DecoderModel, FamilyConfig
from engine.models.mini import MiniConfig, transformer_shapes
from engine.models.presets import ModelError, find_folder, presets
from engine.models.registry import PUBLISHED, family_of
from engine.weights import WeightError, load_json
from sparse_attn.geometry import Grid


@dataclass(frozen=True, slots=True)
class FamilyInfo:
    """A family: the `architectures` of config.json that mean it, and what it draws."""

    name: str
    title: str
    architectures: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A model one can name. `missing`: why it cannot run here, or None."""

    name: str
    family: str
    description: str
    missing: str | None = None


@dataclass(frozen=True, slots=True)
class ModelCheck:
    """What a folder is and whether it can run here; nothing was loaded to find out.

    parameters: numbers that stay, pixel decoder included. weight_bytes: what they take in `dtype`.
    file_bytes: what the checkpoint takes on disk. kv_bytes: keys and values of one guided image of
    the default size, dense, in `dtype`. step_bytes: weights a decode step reads; with the memory's
    bandwidth it bounds the time of a step.
    problems: everything that keeps it from running, each with its reason; empty if it can.
    """

    path: Path
    family: str
    architecture: str
    dtype: str
    sizes: tuple[tuple[int, int], ...]
    visual_tokens: int
    layers: int
    parameters: int
    weight_bytes: int
    file_bytes: int
    kv_bytes: int
    step_bytes: int
    available_bytes: int
    problems: tuple[str, ...]

    @property
    def can_run(self) -> bool:
        return not self.problems


def families() -> list[FamilyInfo]:
    """All families."""
    mini = FamilyInfo("mini", "mini, the bundled model", ())
    return [
        mini,
        *(FamilyInfo(name, cls.title, cls.architectures) for name, cls in PUBLISHED.items()),
    ]


def models() -> list[ModelEntry]:
    """Presets, then the repositories in the hub's cache that belong to a known family."""
    found = [ModelEntry(p.name, p.family, p.description, p.missing) for p in presets().values()]
    for name, folder in hub.cached().items():
        try:
            family = family_of(load_json(folder / "config.json"))
        except WeightError:
            continue
        found.append(ModelEntry(name, family, "in the hub's cache"))
    return found


def check(path: str, dtype: torch.dtype = torch.float32) -> ModelCheck:
    """What a folder (or hub id) is. Raises ModelError or WeightError if it is no model at all."""
    folder = find_folder(path)
    values = load_json(folder / "config.json")
    name = family_of(values)
    architecture = ", ".join(map(str, values.get("architectures") or ())) or name  # type: ignore[call-overload]
    if name == "mini":
        return _check_mini(folder, architecture)
    cls = PUBLISHED[name]
    config = cls.configure(values, folder)
    params = cls.parameters(config)
    problems, checkpoint = _problems(cls, folder, config, params)
    grid, size = default_grid(config), config.sizes[0]
    c = config.decoder
    kv = 2 * 2 * c.layers * c.kv_heads * c.head_dim * (grid.tokens + config.prompt_tokens)
    weights = sum(p.bytes(dtype) for p in params)
    available = available_bytes()
    if weights + kv * dtype.itemsize > available:
        problems.append(
            f"needs {_gib(weights)} for weights and {_gib(kv * dtype.itemsize)} for one image in "
            f"{dtype}, but {_gib(available)} are free: choose a smaller dtype or model"
        )
    step = sum(p.bytes(dtype) for p in params if p.name.startswith(("layers.", "head")))
    return ModelCheck(
        path=folder,
        family=name,
        architecture=architecture,
        dtype=str(dtype).removeprefix("torch."),
        sizes=(size, *config.sizes[1:]),
        visual_tokens=grid.tokens,
        layers=c.layers,
        parameters=sum(torch.Size(p.shape).numel() for p in params),
        weight_bytes=weights,
        file_bytes=0 if checkpoint is None else checkpoint.bytes,
        kv_bytes=kv * dtype.itemsize,
        step_bytes=step,
        available_bytes=available,
        problems=tuple(problems),
    )


def available_bytes() -> int:
    """Host memory that is free."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def _problems(
    cls: type[DecoderModel], folder: Path, config: FamilyConfig, params: list[Param]
) -> tuple[list[str], Checkpoint | None]:
    """What is wrong with the files of a folder, and its checkpoint if it can be read."""
    found: list[str] = []
    checkpoint = None
    try:
        cls.tokens(folder, config)
    except WeightError as error:
        found.append(str(error))
    try:
        checkpoint = cls.checkpoint(folder, config)
        checkpoint.check(params, cls.unused)
    except WeightError as error:
        found.append(str(error))
    return found, checkpoint


def default_grid(config: FamilyConfig) -> Grid:
    width, height = config.sizes[0]
    rows = int(config.row_id is not None)
    return Grid(height // config.factor, width // config.factor, rows)


def _check_mini(folder: Path, architecture: str) -> ModelCheck:
    config = MiniConfig.from_dict(load_json(folder / "config.json"))
    numbers = sum(torch.Size(s).numel() for s in transformer_shapes(config).values())
    height, width = config.grid
    tokens, side = height * width, config.tokenizer.factor
    kv = 2 * 2 * config.layers * config.heads * config.head_dim * (tokens + config.prompt) * 4
    return ModelCheck(
        folder, "mini", architecture, "float32", ((width * side, height * side),), tokens,
        config.layers, numbers, numbers * 4,
        sum(f.stat().st_size for f in folder.glob("*.safetensors")), kv, numbers * 4,
        available_bytes(), (),
    )  # fmt: skip


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"


__all__ = ["FamilyInfo", "ModelCheck", "ModelEntry", "ModelError", "check", "families", "models"]
