"""From what a user said to an `ImageRequest`: the model's and the server's defaults filled in.

The command line and the HTTP service both pass through here, so that the same words mean the
same picture in both.
"""

import difflib
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from engine.service_api import ModelInfo
from scheduler.request import ImageRequest, PolicyChoice, RequestError, Sampling

Option = str | int | float | bool

RANDOM_SEEDS = 2**31
"""A seed nobody chose is drawn below this, so that it is short enough to type again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The words of a user; None means "not said". Names are those of the HTTP fields."""

    prompt: str
    n: int | None = None
    seed: int | None = None
    size: str | None = None
    negative_prompt: str | None = None
    guidance_scale: float | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    policy: str | None = None
    sparsity: float | None = None
    policy_options: Mapping[str, Option] = field(default_factory=dict)
    partial_images: int | None = None


def to_request(wanted: Wanted, model: ModelInfo, default_policy: PolicyChoice) -> ImageRequest:
    """The request for `model` that `wanted` describes; a seed is drawn if none was chosen.

    Raises RequestError naming the field that cannot be served.
    """
    sampling = _sampling(wanted, model.sampling)
    return ImageRequest(
        prompt=wanted.prompt,
        seed=secrets.randbelow(RANDOM_SEEDS) if wanted.seed is None else wanted.seed,
        sampling=sampling,
        n=1 if wanted.n is None else wanted.n,
        negative_prompt=_negative(wanted.negative_prompt, sampling),
        policy=choose_policy(wanted, model.policies, default_policy),
        size=parse_size(wanted.size, model),
        partial_images=wanted.partial_images or 0,
    )


def _sampling(wanted: Wanted, defaults: Sampling) -> Sampling:
    names = ("guidance_scale", "temperature", "top_k", "top_p")
    said = {name: getattr(wanted, name) for name in names if getattr(wanted, name) is not None}
    return replace(defaults, **said)


def _negative(text: str | None, sampling: Sampling) -> str | None:
    if text is None or not text.strip():
        return None
    if not sampling.guided:
        raise RequestError(
            "negative_prompt has no effect at guidance_scale 1: raise it above 1",
            "negative_prompt",
        )
    return text


def parse_size(text: str | None, model: ModelInfo) -> tuple[int, int] | None:
    """(width, height) of "WxH"; None for "auto" or nothing said, the model's default."""
    if text is None or text == "auto":
        return None
    found = re.fullmatch(r"([0-9]{1,5})x([0-9]{1,5})", text)
    size = (int(found[1]), int(found[2])) if found else None
    if size not in model.sizes:
        known = ", ".join(f"{width}x{height}" for width, height in model.sizes)
        raise RequestError(f"{model.name} draws {known} (or auto)", "size")
    return size


def choose_policy(wanted: Wanted, known: Sequence[str], default: PolicyChoice) -> PolicyChoice:
    """The attention policy asked for: what was said, over `default` where it is the same policy."""
    name = wanted.policy or default.name
    if name not in known:
        raise RequestError(f"unknown policy {shorten(name)!r}{nearest(name, known)}", "policy")
    base = default if name == default.name else PolicyChoice(name)
    if name == "dense" and wanted.sparsity:
        others = ", ".join(other for other in known if other != "dense")
        raise RequestError(
            f"dense reads every key: name a policy ({others}) for that sparsity", "sparsity"
        )
    options = dict(base.options) | dict(wanted.policy_options)
    sparsity = base.sparsity if wanted.sparsity is None else wanted.sparsity
    return PolicyChoice(name, sparsity, tuple(sorted(options.items())))


def nearest(name: str, known: Sequence[str]) -> str:
    """The end of an "unknown ..." message: the nearest known name, and all of them."""
    close = difflib.get_close_matches(name[:64], known, n=1)
    hint = f": did you mean {close[0]!r}?" if close else ";"
    return f"{hint} known: {', '.join(known) or 'none'}"


def shorten(text: str, limit: int = 64) -> str:
    """What a user sent, short enough to be repeated in a message."""
    return text if len(text) <= limit else text[: limit - 3] + "..."
