"""Policies for a model, with the calibration files that come with it where a user names none."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from engine.models.base import VisualModel
from engine.models.presets import ROOT
from sparse_attn import policies
from sparse_attn.geometry import Grid
from sparse_attn.policy import Heads, ReadPolicy

FOLDER = ROOT / "configs" / "policies"


def index_path(model: str) -> Path:
    """Where the index of a model lies."""
    return FOLDER / f"{model}-index.safetensors"


def stencil_path(model: str) -> Path:
    """Where the calibrated stencils of a model lie."""
    return FOLDER / f"{model}-stencil.yaml"


def default_options(policy: str, model: str) -> dict[str, str]:
    """Options of a policy that follow from the model. `stencil` has none: its default is built in,
    and a calibrated file is asked for by name."""
    return {"file": str(index_path(model))} if policy == "indexed" else {}


def heads_of(model: VisualModel) -> Heads:
    """All heads of a model, those of other ranks included."""
    return Heads(model.shape.layers, model.shape.kv_heads * model.shape.ranks)


def policy_of(
    model: VisualModel,
    name: str,
    sparsity: float = 0.0,
    options: Mapping[str, Any] = {},
    grid: Grid | None = None,
) -> ReadPolicy:
    """The policy `name` for all heads of a model, on `grid` or on that of its default size.

    Raises ValueError naming what is wrong and what is known.
    """
    heads = heads_of(model)
    given = default_options(name, model.name) | dict(options)
    if name == "indexed" and str(given["file"]).endswith((".yaml", ".yml")):
        given = _from_yaml(Path(given.pop("file"))) | given
    return policies.build(name, grid or model.grid, heads, sparsity, given, model.name)


def _from_yaml(path: Path) -> dict[str, Any]:
    """Options of a policy file that `bishop calibrate --kind indexed` wrote. Raises ValueError."""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"cannot read the policy file {path}: {error}") from error
    keys = {"kind", "model", "file", "sparsities", "options"}
    if not isinstance(values, dict) or values.get("kind") != "indexed" or set(values) != keys:
        raise ValueError(
            f"{path} is no file of `indexed`: it needs kind: indexed and {sorted(keys)}"
        )
    return dict(values["options"]) | {"file": str(path.parent / values["file"])}
