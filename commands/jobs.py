"""Where batch jobs lie on this machine, for those who say nothing about it."""

import os
from pathlib import Path

from scheduler.jobs.store import JobsConfig

ENVIRONMENT = "BISHOP_DATA"


def jobs_config(
    data: Path | None, database: str | None, storage: str | None, lease_seconds: float
) -> JobsConfig:
    """Raises ValueError for a lease that is none."""
    return JobsConfig(
        folder=data or default_folder(),
        database=database,
        storage=storage,
        lease_seconds=lease_seconds,
    )


def default_folder() -> Path:
    """$BISHOP_DATA, else bishop/ in the folder for the state of programs (XDG)."""
    if named := os.environ.get(ENVIRONMENT):
        return Path(named)
    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "bishop"
