"""Draws with Bishop, records every logit, and compares with a full forward pass of a reference."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor

from engine.config import EngineConfig
from engine.engine import Engine
from engine.events import Event, Failed, Finished
from engine.models.base import VisualModel
from engine.models.options import LoadOptions
from scheduler.request import ImageRequest, PolicyChoice, Sampling
from sparse_attn import ops
from sparse_attn.attention import Backend

GREEDY = Sampling(guidance_scale=3.0, temperature=0.0)
PROMPTS = ("a red cube", "a small blue ball on the wooden table", "two green pears")

Reference = Callable[[tuple[int, ...], list[int]], Tensor]
"""Prompt ids and visual tokens -> logits of the image vocabulary [N, V], teacher-forced."""


def backends() -> list[Backend]:
    return ["reference"] if ops.why_not() else ["reference", "native"]


def fast_backend() -> Backend:
    return backends()[-1]


def options(backend: Backend | None = None, **values: object) -> LoadOptions:
    return LoadOptions(backend=backend or fast_backend(), **values)  # type: ignore[arg-type]


def engine_of(model: VisualModel, backend: Backend | None = None, **settings: object) -> Engine:
    values = {
        "backend": backend or fast_backend(), "cache_bytes": 64 << 20, "kv_format": "fp32",
    } | settings  # fmt: skip
    return Engine(EngineConfig(model="test", **values), model)  # type: ignore[arg-type]


def request(prompt: str, sampling: Sampling = GREEDY, **values: object) -> ImageRequest:
    return ImageRequest(prompt, seed=1, sampling=sampling, **values)  # type: ignore[arg-type]


def draw(engine: Engine, requests: Sequence[ImageRequest]) -> list[Finished]:
    """All images together; a failure is an assertion."""
    events: list[list[Event]] = [[] for _ in requests]
    for r, inbox in zip(requests, events, strict=True):
        engine.add(r, inbox.append)
    while engine.step():
        pass
    failures = [e for inbox in events for e in inbox if isinstance(e, Failed)]
    assert not failures, failures
    return [e for inbox in events for e in inbox if isinstance(e, Finished)]


class Recorder:
    """Keeps what a model's `logits` returns."""

    def __init__(self, model: VisualModel) -> None:
        self.seen: list[Tensor] = []
        inner = model.logits

        def logits(hidden: Tensor) -> Tensor:
            result = inner(hidden)
            self.seen.append(result.clone())
            return result

        model.logits = logits  # type: ignore[method-assign]


def prove(
    model: VisualModel,
    reference: Reference,
    prompts: Sequence[str] = PROMPTS,
    *,
    size: tuple[int, int] | None = None,
    negative: str | None = None,
    tolerance: float = 1e-4,
    backend: Backend | None = None,
) -> list[tuple[int, ...]]:
    """Draw `prompts` in one batch, greedily and guided; compare every logit of every sequence with
    the reference, and every token with the arg-max of the reference's guided logits.

    As the reference is fed the same tokens, equal arg-maxes mean that its own greedy loop draws the
    same picture.
    """
    recorder = Recorder(model)
    engine = engine_of(model, backend)
    asked = [request(p, size=size, negative_prompt=negative) for p in prompts]
    images = draw(engine, asked)
    grid = model.grid_of(size or model.pixel_size)
    free = [t for t in range(grid.tokens) if model.forced_token(grid, t) is None]
    assert len(recorder.seen) == len(free)
    logits = torch.stack(recorder.seen)  # [free, 2 B, V]
    for b, image in enumerate(images):
        assert len(image.tokens) == grid.tokens
        pair = engine.intake._prompts(asked[b], grid)
        want = [reference(p, list(image.tokens))[free].float() for p in pair]
        for i, expected in enumerate(want):
            error = (logits[:, b + i * len(images)] - expected).abs().max()
            assert error <= tolerance, f"image {b}, sequence {i}: logits differ by {error}"
        guided = want[1] + GREEDY.guidance_scale * (want[0] - want[1])
        assert guided.argmax(-1).tolist() == [image.tokens[t] for t in free], f"image {b}"
    return [image.tokens for image in images]


def word_tokenizer(words: dict[str, int], special: Sequence[str]) -> Tokenizer:
    """A byte-level BPE without merges over `words`, whose special tokens are found in text."""
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special))
    return tokenizer


def end_with(tokenizer: Tokenizer, token: str) -> None:
    """Let the tokenizer end every text with a special token, as T5's does."""
    at = tokenizer.token_to_id(token)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {token}", special_tokens=[(token, at)]
    )


def byte_vocabulary(first: int = 0) -> dict[str, int]:
    """The 256 byte letters of a byte-level BPE, from id `first`."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    return {letter: first + i for i, letter in enumerate(letters)}


def save_fast(tokenizer: Tokenizer, folder: Path, **special: str) -> None:
    """tokenizer.json and tokenizer_config.json as transformers writes them."""
    from transformers import PreTrainedTokenizerFast

    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)


def policy_choices() -> list[PolicyChoice]:
    """Every policy that needs no file, at half the reads where it takes a sparsity."""
    import inspect

    from sparse_attn.policies import POLICIES

    found = []
    for name, cls in POLICIES.items():
        parameters = inspect.signature(cls.__init__).parameters
        if "file" in parameters and parameters["file"].default is inspect.Parameter.empty:
            continue
        found.append(PolicyChoice(name, 0.5 if "sparsity" in parameters else 0.0))
    return found
