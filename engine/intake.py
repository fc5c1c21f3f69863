"""From a request to its images: everything a model can refuse is refused here."""

import time
from collections.abc import Callable

from engine.config import EngineConfig
from engine.image import Group, Image
from engine.models.base import VisualModel
from scheduler.plan import ImageTask
from scheduler.request import ImageRequest, PolicyChoice, RequestError
from sparse_attn import policies
from sparse_attn.layout import CacheLayout
from sparse_attn.policy import Heads


class Intake:
    """Checks requests against a model and numbers their images."""

    def __init__(self, model: VisualModel, config: EngineConfig) -> None:
        self.model, self.config = model, config
        self._groups: dict[PolicyChoice, Group] = {}
        self._next = 0

    def images(self, request: ImageRequest) -> list[Image]:
        """The images of a request. Raises RequestError if the model cannot draw it."""
        self._check_size(request)
        group, prompts = self.group(request.policy), self._prompts(request)
        first = self._next
        self._next += request.n
        return [
            Image(first + i, request, i, group, prompts, time.monotonic()) for i in range(request.n)
        ]

    def check(self, request: ImageRequest) -> None:
        """Raise RequestError if the model cannot draw the request; nothing is numbered."""
        self._check_size(request)
        self.group(request.policy)
        self._prompts(request)

    def task(self, image: Image) -> ImageTask:
        """What the scheduler is told of an image."""
        return ImageTask(
            image.number,
            image.request.id,
            image.group.name,
            self.model.grid.tokens,
            (image.group.layout.bytes,) * len(image.prompts),
            image.request.priority,
        )

    def group(self, choice: PolicyChoice) -> Group:
        """Policy and cache layout of a choice, made once."""
        if choice not in self._groups:
            policy = self._policy(choice)
            shape = self.model.shape
            layout = CacheLayout.of(policy, shape.prompt, shape.head_dim, self.config.format)
            self._groups[choice] = Group(str(choice), policy, layout)
        return self._groups[choice]

    def _check_size(self, request: ImageRequest) -> None:
        if request.size not in (None, self.model.pixel_size):
            width, height = self.model.pixel_size
            raise RequestError(
                f"model {self.model.name!r} draws {width}x{height} pictures only", "size"
            )

    def _policy(self, choice: PolicyChoice) -> policies.ReadPolicy:
        heads = Heads(self.model.shape.layers, self.model.shape.kv_heads)
        try:
            return policies.build(
                choice.name, self.model.grid, heads, choice.sparsity, dict(choice.options)
            )
        except (ValueError, TypeError) as error:
            raise RequestError(str(error), "policy") from error

    def _prompts(self, request: ImageRequest) -> tuple[tuple[int, ...], ...]:
        conditional = _encode("prompt", self.model.encode_prompt, request.prompt)
        if not request.sampling.guided:
            return (conditional,)
        if request.negative_prompt and request.negative_prompt.strip():
            negative = _encode("negative_prompt", self.model.encode_prompt, request.negative_prompt)
            return (conditional, negative)
        return (conditional, self.model.unconditional_prompt(conditional))


def _encode(field: str, encode: Callable[[str], tuple[int, ...]], text: str) -> tuple[int, ...]:
    try:
        return encode(text)
    except ValueError as error:
        raise RequestError(str(error), field) from error
