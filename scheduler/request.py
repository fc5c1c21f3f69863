"""What a user asks for, validated at the door: nothing behind it checks again.

A front end builds an `ImageRequest` or reports `RequestError`. The limits of a particular model
(sizes, prompt length, policies) are checked by the engine when the request is submitted, with the
same error type.
"""

import math
import uuid
from dataclasses import dataclass, field
from enum import IntEnum

MAX_IMAGES = 10
MAX_PROMPT_CHARACTERS = 32_000


class RequestError(ValueError):
    """A request that cannot be served as asked. `param` names the field, `code` the reason."""

    def __init__(self, message: str, param: str | None = None, code: str = "invalid_value"):
        super().__init__(message)
        self.param = param
        self.code = code


class Priority(IntEnum):
    """Interactive requests come before batch jobs."""

    INTERACTIVE = 0
    BATCH = 1


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is drawn.

    guidance_scale: g in uncond + g * (cond - uncond); 1 turns guidance off (one sequence).
    temperature: 0 means greedy. top_k: 0 means all. top_p: 1 means all.
    """

    guidance_scale: float
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        _finite("guidance_scale", self.guidance_scale, 1.0, 100.0)
        _finite("temperature", self.temperature, 0.0, 100.0)
        _finite("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise RequestError("top_p must be above 0", "top_p")
        if self.top_k < 0:
            raise RequestError(f"top_k must be 0 (off) or more, got {self.top_k}", "top_k")

    @property
    def guided(self) -> bool:
        return self.guidance_scale != 1.0


@dataclass(frozen=True, slots=True)
class PolicyChoice:
    """An attention policy by name, its sparsity, and its own options (see docs/policies.md)."""

    name: str = "dense"
    sparsity: float = 0.0
    options: tuple[tuple[str, str | int | float | bool], ...] = ()

    def __post_init__(self) -> None:
        if not (math.isfinite(self.sparsity) and 0 <= self.sparsity < 1):
            raise RequestError(f"sparsity must lie in [0, 1), got {self.sparsity}", "sparsity")


@dataclass(frozen=True, slots=True)
class ImageRequest:
    """n pictures of one prompt. Picture k equals a request for one picture with seed + k.

    size: (width, height) in pixels, or None for the model's default.
    partial_images: how many unfinished pictures to send while each image is drawn.
    """

    prompt: str
    seed: int
    sampling: Sampling
    n: int = 1
    negative_prompt: str | None = None
    policy: PolicyChoice = PolicyChoice()
    size: tuple[int, int] | None = None
    partial_images: int = 0
    priority: Priority = Priority.INTERACTIVE
    id: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __post_init__(self) -> None:
        if not self.prompt.strip():
            raise RequestError("the prompt is empty: say what to draw", "prompt")
        for name, text in (("prompt", self.prompt), ("negative_prompt", self.negative_prompt)):
            if text is not None and len(text) > MAX_PROMPT_CHARACTERS:
                raise RequestError(
                    f"{name} has {len(text)} characters; the limit is {MAX_PROMPT_CHARACTERS}",
                    name,
                    "string_above_max_length",
                )
        if not 1 <= self.n <= MAX_IMAGES:
            raise RequestError(f"n must lie in 1..{MAX_IMAGES}, got {self.n}", "n")
        if not 0 <= self.seed < 2**63 - MAX_IMAGES:
            raise RequestError(f"seed must lie in 0..2**63, got {self.seed}", "seed")
        if not 0 <= self.partial_images <= 3:
            raise RequestError(
                f"partial_images must lie in 0..3, got {self.partial_images}", "partial_images"
            )


def _finite(name: str, value: float, low: float, high: float) -> None:
    if not (math.isfinite(value) and low <= value <= high):
        raise RequestError(f"{name} must be a number in {low:g}..{high:g}, got {value}", name)
