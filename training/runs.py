"""What both phases of training share: the log, checkpoints and mixed precision."""

import json
import time
from pathlib import Path
from typing import Any

import torch


class Log:
    """One JSON object a line, on the terminal and in the run's folder."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path, self.start = folder / "log.jsonl", time.monotonic()

    def write(self, event: str, **values: Any) -> None:
        rounded = {k: _rounded(v) for k, v in values.items()}
        line = json.dumps(
            {"at": round(time.monotonic() - self.start, 1), "event": event, **rounded}
        )
        print(line, flush=True)
        with self.path.open("a") as file:
            file.write(line + "\n")


def save(state: dict[str, Any], path: Path) -> None:
    """Write a checkpoint so that a reader never sees half of it."""
    part = path.with_suffix(".part")
    torch.save(state, part)
    part.replace(path)


def load(path: Path, device: torch.device) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
    return state


def autocast(device: torch.device) -> torch.autocast:
    """bf16 on the GPU, fp32 on the CPU."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def pick_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 5)
    return [_rounded(v) for v in value] if isinstance(value, list) else value
