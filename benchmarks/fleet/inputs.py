"""What a simulation takes as given, each value with where it comes from."""

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import yaml

FILE = Path(__file__).with_name("inputs.yaml")


@dataclass(frozen=True)
class Inputs:
    """Names and units as in `inputs.yaml`; the last four are measured on this machine.

    front_end_ms: CPU time of a front end for one interactive picture, from its request to the
        answer. line_ms: the same for a line of a batch. transaction_ms: CPU time of the database
        for one transaction. line_transactions: transactions of a line that is claimed alone.
    """

    gpus: int
    images_per_second: float
    front_ends: int
    batch_share: float
    tokens: int
    weights_ms: float
    image_ms: float
    kv_ms: float
    efficiency: float
    room: int
    database_cores: int
    storage_puts: float
    storage_seconds: float
    gpu_hours: float
    front_end_hours: float
    restart_seconds: float
    lease_seconds: float
    retry_seconds: float
    lines_per_claim: int
    front_end_ms: float = 15.0
    line_ms: float = 15.0
    transaction_ms: float = 1.0
    line_transactions: float = 3.0

    def step_seconds(self, images: int) -> float:
        """One step of `images` pictures: weights are read or used, whichever is slower, and the
        keys of every picture are read."""
        linears = max(self.weights_ms, images * self.image_ms)
        return (linears + images * self.kv_ms) / self.efficiency / 1000

    @property
    def gpu_images_per_second(self) -> float:
        """The most that a GPU draws."""
        return self.room / (self.tokens * self.step_seconds(self.room))

    def scaled(self, **changes: Any) -> "Inputs":
        return replace(self, **changes)


def load(path: Path = FILE, **measured: float) -> Inputs:
    """Raises ValueError for a name that is not known."""
    values = {name: each["value"] for name, each in entries(path).items()}
    unknown = (values | measured).keys() - {each.name for each in fields(Inputs)}
    if unknown:
        raise ValueError(f"{path}: unknown inputs {', '.join(sorted(unknown))}")
    return Inputs(**(values | measured))


def entries(path: Path = FILE) -> dict[str, dict[str, Any]]:
    """Value, unit and source by name."""
    rooms = yaml.safe_load(path.read_text(encoding="utf-8"))
    return {name: each for room in rooms.values() for name, each in room.items()}
