"""How the HTTP service behaves; what the engine does is `engine.config`'s business."""

import ipaddress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from scheduler.jobs.store import JobsConfig
from scheduler.request import PolicyChoice
from serving.keys import ApiKey

MIB = 1 << 20

_POSITIVE = (
    "body_limit", "stuck_seconds", "file_seconds", "file_bytes", "ping_seconds", "request_seconds",
    "body_seconds", "queue_images", "batch_lines", "poll_seconds",
)  # fmt: skip

OFFERED = Path(__file__).resolve().parents[1] / "configs" / "policies"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Settings of one server.

    policy: the attention policy of requests that name none.
    policy_folder: where the files lie that a client may name in the option `file` of a policy.
    body_limit: bytes of a request body. stuck_seconds: a step that takes longer makes /health fail.
    file_seconds, file_bytes: how long, and how much of it in all, pictures behind URLs are kept.
    ping_seconds: silence after which a stream sends a comment, so that proxies keep it open.
    stop_seconds: how long running requests may go on after SIGTERM.
    request_seconds: how long one request may wait and draw. body_seconds: the longest silence while
    a body arrives. queue_images: interactive pictures that may wait or be drawn at once.
    keys: who may ask; everybody if there are none.
    jobs: where batch jobs are kept; None turns them off. batch_lines: lines of batches in an
    engine at once; it draws them where interactive requests leave room.
    poll_seconds: how often the job store is asked for work that another server left.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    policy: PolicyChoice = field(default_factory=PolicyChoice)
    policy_folder: Path = OFFERED
    body_limit: int = 1 * MIB
    stuck_seconds: float = 60.0
    file_seconds: float = 3600.0
    file_bytes: int = 256 * MIB
    ping_seconds: float = 15.0
    stop_seconds: int = 30
    request_seconds: float = 600.0
    body_seconds: float = 30.0
    queue_images: int = 256
    keys: tuple[ApiKey, ...] = ()
    jobs: JobsConfig | None = None
    batch_lines: int = 16
    poll_seconds: float = 1.0
    log_format: Literal["text", "json"] = "text"

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port must lie in 0..65535, got {self.port}")
        for name in _POSITIVE:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")
        if self.stop_seconds < 0:
            raise ValueError(f"stop_seconds must be 0 or more, got {self.stop_seconds}")

    @property
    def local(self) -> bool:
        """Whether only this machine can reach the service."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"
