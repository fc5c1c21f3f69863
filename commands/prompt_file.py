"""Files of prompts: one a line as text, or JSON objects with `prompt` and what else is known of it
(the `caption` of COCO-like files will do for `prompt`)."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from commands.outputs import read_prompts
from commands.refusal import Refusal

NAMES = ("prompt", "caption", "text")


@dataclass(frozen=True, slots=True)
class PromptLine:
    """`facts`: the other keys of its JSON object."""

    prompt: str
    facts: dict[str, Any] = field(default_factory=dict)


def read(file: Path) -> list[PromptLine]:
    """Raises Refusal naming the line that cannot be read."""
    lines = read_prompts([], file)
    return [_line(text, f"--prompts: {file}, line {n}") for n, text in enumerate(lines, 1)]


def _line(text: str, where: str) -> PromptLine:
    if not text.startswith("{"):
        return PromptLine(text)
    try:
        values = json.loads(text)
    except ValueError as error:
        raise Refusal(f"{where}: not JSON: {error}") from None
    name = next((n for n in NAMES if isinstance(values.get(n), str) and values[n].strip()), None)
    if name is None:
        raise Refusal(f"{where}: it needs a `prompt`")
    return PromptLine(values.pop(name), values)
