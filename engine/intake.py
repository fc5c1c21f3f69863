"""From a request to its images: everything a model can refuse is refused here."""

import time
from collections import OrderedDict
from threading import Lock
from weakref import WeakValueDictionary

from engine.config import EngineConfig
from engine.image import Group, Image
from engine.models.base import VisualModel
from engine.policy_files import policy_of
from scheduler.plan import ImageTask
from scheduler.request import ImageRequest, PolicyChoice, RequestError
from sparse_attn import attention
from sparse_attn.geometry import Grid
from sparse_attn.policy import ReadPolicy

KEPT_GROUPS = 64


class Intake:
    """Checks requests against a model and numbers their images. `check` may be called from any
    thread."""

    def __init__(self, model: VisualModel, config: EngineConfig) -> None:
        self.model, self.config = model, config
        self._groups: WeakValueDictionary[tuple[PolicyChoice, Grid], Group] = WeakValueDictionary()
        self._recent: OrderedDict[str, Group] = OrderedDict()
        self._lock = Lock()
        self._next = 0

    def images(self, request: ImageRequest) -> list[Image]:
        """The images of a request. Raises RequestError if the model cannot draw it."""
        grid = self._grid(request)
        group, prompts = self._group(request.policy, grid), self._prompts(request, grid)
        first = self._next
        self._next += request.n
        return [
            Image(first + i, request, i, group, prompts, time.monotonic()) for i in range(request.n)
        ]

    def check(self, request: ImageRequest) -> None:
        """Raise RequestError if the model cannot draw the request; nothing is numbered."""
        grid = self._grid(request)
        self._group(request.policy, grid)
        self._prompts(request, grid)

    def task(self, image: Image) -> ImageTask:
        """What the scheduler is told of an image."""
        return ImageTask(
            image.number,
            image.request.id,
            image.group.name,
            image.grid.tokens,
            (image.group.reserved,) * len(image.prompts),
            image.request.priority,
        )

    def group(self, choice: PolicyChoice) -> Group:
        """Policy and cache layout of a choice on the default grid."""
        return self._group(choice, self.model.grid)

    def policy(self, choice: PolicyChoice, size: tuple[int, int] | None) -> ReadPolicy:
        """The policy of a choice on the grid of a size, made anew: nothing is kept for it."""
        return self._policy(choice, self._grid_of(size))

    def _group(self, choice: PolicyChoice, grid: Grid) -> Group:
        """Policy and cache layout of a choice on a grid, the same for all images that use it."""
        with self._lock:
            group = self._groups.get((choice, grid))
            if group is None:
                group = self._groups[choice, grid] = self._new_group(choice, grid)
            self._keep(group)
            return group

    def _new_group(self, choice: PolicyChoice, grid: Grid) -> Group:
        policy, name = self._policy(choice, grid), f"{choice} on {grid}"
        try:
            return Group.of(name, policy, self.model.shape, self.config.format)
        except ValueError as error:
            raise RequestError(str(error), "policy") from error

    def _keep(self, group: Group) -> None:
        """Users may ask for any sparsity, so groups come without end: those that no image uses
        are forgotten, but for the most recent ones."""
        self._recent[group.name] = group
        self._recent.move_to_end(group.name)
        if len(self._recent) > KEPT_GROUPS:
            self._recent.popitem(last=False)

    def _grid(self, request: ImageRequest) -> Grid:
        return self._grid_of(request.size)

    def _grid_of(self, size: tuple[int, int] | None) -> Grid:
        try:
            return self.model.grid_of(size or self.model.pixel_size)
        except ValueError as error:
            raise RequestError(str(error), "size") from error

    def _policy(self, choice: PolicyChoice, grid: Grid) -> ReadPolicy:
        try:
            policy = policy_of(self.model, choice.name, choice.sparsity, dict(choice.options), grid)
        except (ValueError, TypeError) as error:
            raise RequestError(str(error), "policy") from error
        reason = attention.why_not(policy, self.config.resolved_backend)
        if reason is not None:
            raise RequestError(reason, "policy")
        return policy

    def _prompts(self, request: ImageRequest, grid: Grid) -> tuple[tuple[int, ...], ...]:
        def encode(field: str, text: str) -> tuple[int, ...]:
            try:
                return self.model.encode_prompt(text, grid)
            except ValueError as error:
                raise RequestError(str(error), field) from error

        conditional = encode("prompt", request.prompt)
        if not request.sampling.guided:
            return (conditional,)
        if request.negative_prompt and request.negative_prompt.strip():
            return (conditional, encode("negative_prompt", request.negative_prompt))
        return (conditional, self.model.unconditional_prompt(conditional, grid))
