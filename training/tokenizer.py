"""Trains the image tokenizer on whole scenes, for a given time."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from engine.models.mini_vq import FSQTokenizer
from training.compose import Atlas, compose_batch
from training.optim import Budget, channels_last, clip, cosine_after, maybe_compile, warm_up
from training.perceptual import PerceptualDistance
from training.runs import Log, autocast, save
from training.scenes import SceneBatch

LEARNING_RATE = 8e-4
_WARM_UP_STEPS = 5


class TokenizerTrainer:
    """Reconstruction by L1, log-MSE (so that the mean PSNR counts) and a perceptual distance."""

    def __init__(
        self, model: FSQTokenizer, perceptual: PerceptualDistance, budget: Budget, compiled: bool
    ) -> None:
        self.model = channels_last(model.train())
        self.perceptual = perceptual.requires_grad_(False)
        self.budget, self.steps = budget, 0
        device = next(model.parameters()).device
        self.optimizer = torch.optim.AdamW(
            model.parameters(), LEARNING_RATE, (0.9, 0.98), weight_decay=1e-4,
            fused=device.type == "cuda",
        )  # fmt: skip
        self._losses = maybe_compile(self._losses_of, compiled)

    def step(self, images: Float[Tensor, "b 3 h w"]) -> Tensor:
        """One update; returns the three losses."""
        fraction = self.budget.fraction
        for group in self.optimizer.param_groups:
            group["lr"] = LEARNING_RATE * warm_up(self.steps, 100) * cosine_after(fraction)
        losses = self._losses(images)
        weights = losses.new_tensor([1.0, 0.005, 0.2 if fraction < 0.7 else 0.06])
        (losses * weights).sum().backward()
        clip(self.model)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.steps += 1
        return losses.detach()

    def _losses_of(self, images: Float[Tensor, "b 3 h w"]) -> Float[Tensor, "3"]:
        with autocast(images.device):
            seen = self.model.reconstruct(self.model.quantize(images)).float()
        error = (seen - images).square().mean((1, 2, 3))
        half = max(len(images) // 2, 1)
        far = self.perceptual(images[:half], seen[:half])
        return torch.stack([(seen - images).abs().mean(), (error + 1e-5).log().mean(), far])

    def state_dict(self) -> dict[str, Any]:
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        return {**state, "seconds": self.budget.spent, "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.budget.used, self.steps = state["seconds"], state["steps"]


def fit_tokenizer(
    trainer: TokenizerTrainer,
    atlas: Atlas,
    stream: Iterator[SceneBatch],
    checkpoint: Path,
    log: Log,
    checkpoint_every: float,
    batch: int = 32,
) -> None:
    """Train until the budget is spent; the checkpoint on disk is then complete."""
    saved, first = trainer.budget.spent, trainer.steps
    for images in _batches(atlas, stream, batch):
        if trainer.budget.fraction >= 1:
            break
        losses = trainer.step(images)
        if trainer.steps - first == _WARM_UP_STEPS:
            log.write("tokenizer warm", steps=trainer.steps, loss=losses.tolist())
            trainer.budget.start()
        if trainer.steps % 500 == 0:
            log.write(
                "tokenizer", steps=trainer.steps, loss=losses.tolist(), s=trainer.budget.spent
            )
        if trainer.budget.spent - saved > checkpoint_every:
            saved = trainer.budget.spent
            save(trainer.state_dict(), checkpoint)
    save(trainer.state_dict(), checkpoint)
    log.write("tokenizer done", steps=trainer.steps, s=trainer.budget.spent)


def _batches(
    atlas: Atlas, stream: Iterator[SceneBatch], size: int
) -> Iterator[Float[Tensor, "b 3 h w"]]:
    for scenes in stream:
        for start in range(0, len(scenes.text), 16 * size):
            yield from compose_batch(atlas, scenes[start : start + 16 * size]).split(size)


@torch.no_grad()
def reconstruct(
    model: FSQTokenizer, images: Float[Tensor, "b 3 h w"]
) -> tuple[Tensor, Float[Tensor, "b 3 h w"]]:
    """Tokens and decoded pixels, in batches, in full precision."""
    height, width = (side // model.config.factor for side in images.shape[2:])
    tokens = torch.cat([model.encode(part) for part in images.split(32)])
    pixels = [model.decode(part, height, width) for part in tokens.split(32)]
    return tokens, torch.cat(pixels)


def psnr(truth: Float[Tensor, "b 3 h w"], image: Float[Tensor, "b 3 h w"]) -> Float[Tensor, " b"]:
    """Peak signal-to-noise ratio of each picture in dB, for values in 0..1."""
    error = (truth.float() - image.float()).square().mean((1, 2, 3))
    return -10 * error.clamp_min(1e-10).log10()
