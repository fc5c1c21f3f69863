"""A model for commands that need no engine: whatever keeps it from loading is one clear line."""

from typing import TYPE_CHECKING

from commands.options import LoadFormat
from commands.refusal import Refusal

if TYPE_CHECKING:
    from engine.models.base import VisualModel
    from sparse_attn.attention import Backend


def load(
    model: str, load_format: LoadFormat = "auto", backend: "Backend" = "reference"
) -> "VisualModel":
    """Raises Refusal with the reason it cannot be loaded."""
    from engine.models.options import LoadOptions
    from engine.models.presets import load_model

    try:
        return load_model(model, LoadOptions(backend, dummy=load_format == "dummy"))
    except (ValueError, RuntimeError, MemoryError, OSError) as error:
        raise Refusal(str(error)) from None
