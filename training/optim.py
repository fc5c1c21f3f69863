"""Muon for the matrices of the transformer, AdamW for everything else, and wall-clock schedules."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

Function = TypeVar("Function", bound=Callable[..., Any])
Module = TypeVar("Module", bound=nn.Module)


@dataclass
class Budget:
    """Seconds a phase may train; what earlier calls used up counts."""

    total: float
    used: float = 0.0
    _start: float | None = field(default=None, repr=False)

    def start(self) -> None:
        """Begin counting; called once warm-up and compilation are over."""
        self._start = time.monotonic()

    @property
    def spent(self) -> float:
        return self.used + (0.0 if self._start is None else time.monotonic() - self._start)

    @property
    def fraction(self) -> float:
        return self.spent / self.total


def cosine_after(fraction: float, start: float = 0.5, floor: float = 0.02) -> float:
    """1 until `start`, then a half cosine down to `floor` at 1."""
    done = min(max((fraction - start) / (1 - start), 0), 1)
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done))


def linear_after(fraction: float, start: float = 0.45, floor: float = 0.01) -> float:
    """1 until `start`, then linearly down to `floor` at 1."""
    done = min(max((fraction - start) / (1 - start), 0), 1)
    return 1 - (1 - floor) * done


def channels_last(module: Module) -> Module:
    """Lay out convolution weights as the GPU likes them; changes `module` and returns it."""
    for p in (*module.parameters(), *module.buffers()):
        if p.ndim == 4:
            p.data = p.data.contiguous(memory_format=torch.channels_last)
    return module


def warm_up(step: int, steps: int) -> float:
    return min(1.0, (step + 1) / steps)


class Muon:
    """Momentum whose update is made orthogonal by five Newton-Schulz steps.

    Jordan et al., "Muon" (2024); update size as in Liu et al., "Muon is Scalable" (2025), so that
    one learning rate serves both optimisers. Stacked projections (q, k, v; gate, up) count as
    separate matrices; matrices of one shape are processed as a batch.
    """

    def __init__(self, model: nn.Module, lr: float, weight_decay: float = 0.05) -> None:
        self.lr, self.weight_decay = lr, weight_decay
        named = list(model.named_parameters())
        self.matrices = [p for n, p in named if n.startswith("layers.") and p.ndim == 2]
        rest = [p for n, p in named if not (n.startswith("layers.") and p.ndim == 2)]
        self.groups: dict[torch.Size, list[nn.Parameter]] = {}
        for p in self.matrices:
            self.groups.setdefault(p.shape, []).append(p)
        self.momentum = {shape: _stack(ps).zero_() for shape, ps in self.groups.items()}
        self.adam = torch.optim.AdamW(
            rest, lr=lr, betas=(0.9, 0.95), eps=1e-9, weight_decay=0.0, fused=rest[0].is_cuda
        )

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """One update with the learning rate times `scale`; clears the gradients."""
        for group in self.adam.param_groups:
            group["lr"] = self.lr * scale
        self.adam.step()
        for shape, params in self.groups.items():
            self._update(shape, params, self.lr * scale)
        for p in self.matrices:
            p.grad = None
        self.adam.zero_grad(set_to_none=True)

    def _update(self, shape: torch.Size, params: list[nn.Parameter], lr: float) -> None:
        momentum = self.momentum[shape]
        gradient = _stack([_grad(p) for p in params]).float()
        momentum.lerp_(gradient, 0.05)
        update = orthogonalize(momentum.lerp(gradient, 0.05))
        update = update * (0.2 * math.sqrt(max(update.shape[1:])))
        deltas = update.reshape(len(params), *shape).unbind(0)
        targets: list[Tensor] = list(params)
        torch._foreach_mul_(targets, 1 - lr * self.weight_decay)
        torch._foreach_add_(targets, list(deltas), alpha=-lr)

    def state_dict(self) -> dict[str, Any]:
        momentum = {_key(shape): buffer for shape, buffer in self.momentum.items()}
        return {"momentum": momentum, "adam": self.adam.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for shape, buffer in self.momentum.items():
            buffer.copy_(state["momentum"][_key(shape)])
        self.adam.load_state_dict(state["adam"])


def orthogonalize(matrices: Tensor) -> Tensor:
    """Nearest semi-orthogonal matrices, roughly, of a batch [n, rows, columns]."""
    x = matrices.bfloat16() if matrices.is_cuda else matrices
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / (x.float().norm(dim=(1, 2), keepdim=True).to(x.dtype) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * (gram @ gram)) @ x
    result: Tensor = (x.mT if tall else x).float()
    return result


def clip(model: nn.Module, limit: float = 1.0) -> Tensor:
    """Clip the gradient's norm; returns the norm before."""
    return torch.nn.utils.clip_grad_norm_(model.parameters(), limit)


def maybe_compile(function: Function, enabled: bool) -> Function:
    return cast(Function, torch.compile(function)) if enabled else function


def _stack(params: list[Any]) -> Tensor:
    """[n * parts, rows / parts, columns] of equal matrices [rows, columns]."""
    rows, columns = params[0].shape
    parts = 3 if rows == 3 * columns else 2 if rows > 3 * columns else 1
    stacked = torch.stack([p.detach() for p in params])
    return stacked.view(len(params) * parts, rows // parts, columns)


def _grad(p: nn.Parameter) -> Tensor:
    if p.grad is None:
        raise RuntimeError("a matrix has no gradient: every layer must take part in the loss")
    return p.grad


def _key(shape: torch.Size) -> str:
    return "x".join(map(str, shape))
