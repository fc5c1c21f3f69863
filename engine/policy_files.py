"""Calibration files that come with a model: what `file` is where a request names none."""

from pathlib import Path

from engine.models.presets import ROOT

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
