"""The model families by name, and which one a config.json means."""

import difflib
from collections.abc import Mapping
from typing import Any

from engine.models.chameleon import Chameleon, LuminaMGPT
from engine.models.emu3 import Emu3
from engine.models.family import DecoderModel
from engine.models.glm_image import GlmImage
from engine.models.janus import Janus
from engine.models.liquid import Liquid
from engine.models.llamagen import LlamaGen
from engine.models.simplear import SimpleAR
from engine.weights import WeightError

PUBLISHED: dict[str, type[DecoderModel]] = {
    cls.family: cls
    for cls in (Janus, Chameleon, LuminaMGPT, Emu3, LlamaGen, SimpleAR, Liquid, GlmImage)
}
"""Families whose checkpoints come from elsewhere."""
FAMILIES = ("mini", *PUBLISHED)


def family_of(values: Mapping[str, Any]) -> str:
    """The family a config.json belongs to. Raises WeightError naming the known architectures."""
    if "family" in values:
        return known_family(str(values["family"]))
    architectures = values.get("architectures") or []
    for name, cls in PUBLISHED.items():
        if any(a in cls.architectures for a in architectures):
            return name
    if not architectures and "model_type" not in values:
        return "mini"
    given = ", ".join(map(str, architectures)) or f"of model_type {values.get('model_type')!r}"
    known = ", ".join(a for cls in PUBLISHED.values() for a in cls.architectures)
    raise WeightError(
        f"config.json names the architecture {given}, which is unknown (known: {known})"
    )


def known_family(name: str) -> str:
    """The name, if it is one. Raises WeightError naming the nearest."""
    if name not in FAMILIES:
        match = difflib.get_close_matches(name, FAMILIES, 1)
        hint = f"; did you mean {match[0]!r}?" if match else ""
        raise WeightError(f"family {name!r} is not known{hint} (known: {', '.join(FAMILIES)})")
    return name
