"""Presets: YAML files in configs/models/ that give a model its name, family and weights."""

import difflib
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
import yaml

from engine.models import hub
from engine.models.base import VisualModel
from engine.models.mini import Mini, MiniConfig
from engine.models.options import LoadOptions
from engine.models.registry import FAMILIES, PUBLISHED, family_of
from engine.weights import WeightError, load_json

ROOT = Path(__file__).resolve().parents[2]
"""Top of the checkout; presets name their weights relative to it."""


class ModelError(ValueError):
    """A model that is unknown or cannot be loaded; the message says what to do."""


@dataclass(frozen=True)
class Preset:
    """One YAML file. `weights`: a folder, or None where `dummy` asks for random weights.

    config: what config.json would say, for random weights.
    """

    name: str
    family: str
    description: str = ""
    weights: str | None = None
    dummy: bool = False
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def folder(self) -> Path | None:
        return None if self.weights is None else ROOT / self.weights

    @property
    def missing(self) -> str | None:
        """What keeps this preset from running here, or None."""
        if self.family not in FAMILIES:
            return f"family {self.family!r} is not known (known: {', '.join(FAMILIES)})"
        if self.folder is not None and not self.folder.is_dir():
            return f"the weights folder {self.weights} is not there"
        return None


def presets() -> dict[str, Preset]:
    """All presets by name."""
    found = (_read(path) for path in sorted((ROOT / "configs" / "models").glob("*.yaml")))
    return {preset.name: preset for preset in found}


def load_model(name: str, options: LoadOptions) -> VisualModel:
    """A preset by name, a folder of weights, or a hub id (owner/name).

    Raises ModelError or WeightError before any memory is taken.
    """
    known = presets()
    if name in known:
        return _load_preset(known[name], options)
    folder = find_folder(name)
    return load_folder(folder, name.rstrip("/").rsplit("/", 1)[-1], options)


def find_folder(name: str) -> Path:
    """The folder that a path or hub id names. Raises ModelError or WeightError."""
    if Path(name).is_dir():
        return Path(name)
    if hub.is_hub_id(name):
        return hub.snapshot(name)
    known = presets()
    match = difflib.get_close_matches(name, known, 1)
    hint = f"; did you mean {match[0]!r}?" if match else ""
    raise ModelError(
        f"unknown model {name!r}{hint} (known: {', '.join(sorted(known))}; or a folder, or a hub "
        "id such as owner/name)"
    )


def load_folder(folder: Path, name: str, options: LoadOptions) -> VisualModel:
    """A model from a folder with config.json."""
    family = family_of(load_json(folder / "config.json"))
    if family == "mini":
        return _load_mini(name, folder, options)
    return PUBLISHED[family].load(name, folder, options)


def _load_preset(preset: Preset, options: LoadOptions) -> VisualModel:
    if preset.missing:
        raise ModelError(f"model {preset.name!r} cannot run here: {preset.missing}")
    if preset.folder is not None:
        return load_folder(preset.folder, preset.name, options)
    if preset.family == "mini":
        _check_mini(options)
        config = MiniConfig.from_dict(preset.config)
        return Mini.dummy(preset.name, config, options.backend, options.shard)
    family = PUBLISHED[preset.family]
    return family.dummy(preset.name, family.configure(preset.config, None), options)


def _load_mini(name: str, folder: Path, options: LoadOptions) -> VisualModel:
    _check_mini(options)
    if options.dummy:
        config = MiniConfig.from_dict(load_json(folder / "config.json"))
        return Mini.dummy(name, config, options.backend, options.shard)
    return Mini.load(name, folder, options.backend, options.shard)


def _check_mini(options: LoadOptions) -> None:
    if options.dtype != torch.float32 or options.device.type != "cpu":
        raise WeightError(
            f"family 'mini' runs in fp32 on the CPU, not in {options.dtype} on {options.device}"
        )


def _read(path: Path) -> Preset:
    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(values, dict):
        raise ModelError(f"{path} holds no mapping")
    known = [f.name for f in fields(Preset)]
    for key in values:
        if key not in known:
            match = difflib.get_close_matches(key, known, 1)
            hint = f"; did you mean {match[0]!r}?" if match else ""
            raise ModelError(f"{path.name}: unknown key {key!r}{hint}")
    preset = Preset(**values)
    if preset.dummy == (preset.weights is not None):
        raise ModelError(f"{path.name}: give either `weights` or `dummy: true`")
    return preset
