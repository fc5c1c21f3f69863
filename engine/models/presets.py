"""Presets: YAML files in configs/models/ that give a model its name, family and weights."""

import difflib
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from engine.models.base import VisualModel
from engine.models.mini import Mini, MiniConfig
from sparse_attn.attention import Backend

ROOT = Path(__file__).resolve().parents[2]
"""Top of the checkout; presets name their weights relative to it."""


class ModelError(ValueError):
    """A model that is unknown or cannot be loaded; the message says what to do."""


@dataclass(frozen=True)
class Preset:
    """One YAML file. `weights`: a folder, or None where `dummy` asks for random weights."""

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


FAMILIES = ("mini",)


def presets() -> dict[str, Preset]:
    """All presets by name."""
    found = (_read(path) for path in sorted((ROOT / "configs" / "models").glob("*.yaml")))
    return {preset.name: preset for preset in found}


def load_model(name: str, backend: Backend) -> VisualModel:
    """A preset by name, or a folder of weights. Raises ModelError or WeightError."""
    if Path(name).is_dir():
        return Mini.load(Path(name).name, Path(name), backend)
    known = presets()
    if name not in known:
        match = difflib.get_close_matches(name, known, 1)
        hint = f"; did you mean {match[0]!r}?" if match else ""
        raise ModelError(f"unknown model {name!r}{hint} (known: {', '.join(sorted(known))})")
    preset = known[name]
    if preset.missing:
        raise ModelError(f"model {name!r} cannot run here: {preset.missing}")
    if preset.folder is None:
        return Mini.dummy(name, MiniConfig.from_dict(preset.config), backend)
    return Mini.load(name, preset.folder, backend)


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
