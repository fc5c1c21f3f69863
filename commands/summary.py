"""What `bishop generate` says at the end, to people and to machines."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from commands.units import size
from engine.events import ImageStats
from engine.service_api import ModelInfo
from scheduler.request import PolicyChoice


@dataclass(frozen=True, slots=True)
class Drawn:
    """A picture in its file."""

    path: Path
    prompt: str
    seed: int
    stats: ImageStats


@dataclass(frozen=True, slots=True)
class Summary:
    """seconds: from submission to the last file."""

    model: ModelInfo
    policy: PolicyChoice
    pictures: Sequence[Drawn]
    seconds: float
    sheet: Path | None

    @property
    def tokens(self) -> int:
        return sum(picture.stats.tokens for picture in self.pictures)

    @property
    def read_bytes(self) -> int:
        return sum(picture.stats.kv_read_bytes for picture in self.pictures)

    @property
    def resident_bytes(self) -> int:
        return sum(picture.stats.kv_resident_bytes for picture in self.pictures)

    @property
    def density(self) -> float:
        """Mean over the pictures; 0 if there are none."""
        return sum(p.stats.density for p in self.pictures) / max(1, len(self.pictures))

    def text(self) -> str:
        lines = [f"{p.path}  seed {p.seed}  {p.stats.seconds:.2f} s" for p in self.pictures]
        if self.sheet is not None:
            lines.append(f"{self.sheet}  all of them")
        return "\n".join([*lines, self._total()] if self.pictures else lines)

    def _total(self) -> str:
        count = len(self.pictures)
        return (
            f"{count} picture{'s' * (count > 1)} in {self.seconds:.2f} s, "
            f"{self.tokens / self.seconds:.0f} tokens/s; policy {self.policy.name} at sparsity "
            f"{self.policy.sparsity:g}: density {self.density:.3f}, KV read "
            f"{size(self.read_bytes)}, resident {size(self.resident_bytes)}"
        )

    def json(self, failures: Mapping[int, str]) -> str:
        return json.dumps(
            {
                "model": self.model.name,
                "backend": self.model.backend,
                "device": self.model.device,
                "policy": self.policy.name,
                "sparsity": self.policy.sparsity,
                "policy_options": dict(self.policy.options),
                "seconds": self.seconds,
                "tokens": self.tokens,
                "tokens_per_second": self.tokens / self.seconds,
                "kv_read_bytes": self.read_bytes,
                "kv_resident_bytes": self.resident_bytes,
                "density": self.density,
                "images": [_picture(picture) for picture in self.pictures],
                "grid": None if self.sheet is None else str(self.sheet),
                "failures": {str(number): reason for number, reason in failures.items()},
            }
        )


def _picture(picture: Drawn) -> dict[str, Any]:
    told = {"path": str(picture.path), "prompt": picture.prompt, "seed": picture.seed}
    return told | asdict(picture.stats)
