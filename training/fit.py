"""Trains the transformer on an endless stream of fresh scenes, for a given time."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from engine.models.mini_vq import FSQTokenizer
from training.compose import Atlas, compose_batch
from training.optim import Budget, Muon, clip, linear_after, maybe_compile, warm_up
from training.runs import Log, autocast, save
from training.scenes import SceneBatch
from training.transformer import MiniTransformer, token_loss

BATCH = 128
LEARNING_RATE = 2e-3
CAPTION_DROPOUT = 0.1
"""Share of captions replaced by `<pad>`: what guidance steers away from."""
_WARM_UP_STEPS = 5

TokenBatch = tuple[Int64[Tensor, "b 32"], Int64[Tensor, "b 576"]]


class TransformerTrainer:
    """Next-token likelihood of visual tokens behind captions."""

    def __init__(
        self, model: MiniTransformer, budget: Budget, compiled: bool, lr: float = LEARNING_RATE
    ) -> None:
        self.model, self.budget, self.steps, self.scenes = model.train(), budget, 0, 0
        self.optimizer = Muon(model, lr)
        model.compile_layers(compiled)
        self._loss = maybe_compile(token_loss, compiled)

    def step(self, text: Int64[Tensor, "b 32"], image: Int64[Tensor, "b 576"]) -> Tensor:
        """One update; returns the loss."""
        keep = torch.rand(len(text), 1, device=text.device) >= CAPTION_DROPOUT
        loss = self.loss(text * keep, image)
        loss.backward()
        clip(self.model)
        scale = warm_up(self.steps, 200) * linear_after(self.budget.fraction)
        self.optimizer.step(scale)
        self.steps += 1
        self.scenes += len(text)
        return loss.detach()

    def loss(self, text: Int64[Tensor, "b 32"], image: Int64[Tensor, "b 576"]) -> Float[Tensor, ""]:
        with autocast(text.device):
            return self._loss(self.model(text, image), self.model.embed.image.weight, image)

    def validate(self, text: Int64[Tensor, "b 32"], image: Int64[Tensor, "b 576"]) -> float:
        """Mean loss over whole batches. Not under no_grad, which would compile the model again."""
        parts = list(zip(text.split(BATCH), image.split(BATCH), strict=True))
        return float(torch.stack([self.loss(t, i).detach() for t, i in parts]).mean())

    def state_dict(self) -> dict[str, Any]:
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        seen = {"steps": self.steps, "scenes": self.scenes}
        return {**state, **seen, "seconds": self.budget.spent}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.steps, self.scenes = state["steps"], state["scenes"]
        self.budget.used = state["seconds"]


def fit_transformer(
    trainer: TransformerTrainer,
    batches: Iterator[TokenBatch],
    validation: TokenBatch,
    checkpoint: Path,
    log: Log,
    checkpoint_every: float,
) -> None:
    """Train until the budget is spent; the checkpoint on disk is then complete."""
    saved, first = trainer.budget.spent, trainer.steps
    for text, image in batches:
        if trainer.budget.fraction >= 1:
            break
        loss = trainer.step(text, image)
        if trainer.steps - first == _WARM_UP_STEPS:
            log.write("transformer warm", steps=trainer.steps, loss=loss.item())
            trainer.budget.start()
        if trainer.steps % 250 == 0:
            seen = {"steps": trainer.steps, "s": trainer.budget.spent}
            log.write("transformer", loss=loss.item(), **seen)
        if trainer.budget.spent - saved > checkpoint_every:
            saved = trainer.budget.spent
            save(trainer.state_dict(), checkpoint)
            log.write("validation", steps=trainer.steps, nll=trainer.validate(*validation))
    save(trainer.state_dict(), checkpoint)
    seen = {"steps": trainer.steps, "scenes": trainer.scenes, "s": trainer.budget.spent}
    log.write("transformer done", nll=trainer.validate(*validation), **seen)


def token_batches(
    tokenizer: FSQTokenizer, atlas: Atlas, stream: Iterator[SceneBatch], size: int = BATCH
) -> Iterator[TokenBatch]:
    """Draw, encode and cut the stream into batches for the transformer."""
    for scenes in stream:
        for start in range(0, len(scenes.text), 8 * size):
            text, image = encode_scenes(tokenizer, atlas, scenes[start : start + 8 * size])
            yield from zip(text.split(size), image.split(size), strict=True)


@torch.no_grad()
def encode_scenes(tokenizer: FSQTokenizer, atlas: Atlas, scenes: SceneBatch) -> TokenBatch:
    """Word ids and visual tokens of scenes."""
    images = compose_batch(atlas, scenes)
    with autocast(images.device):
        tokens = torch.cat([tokenizer.encode(part) for part in images.split(256)])
    return torch.from_numpy(scenes.text).to(images.device).long(), tokens
