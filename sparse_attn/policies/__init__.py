"""The attention policies by name."""

import difflib
import inspect
from collections.abc import Mapping
from types import NoneType
from typing import Any, get_args

from sparse_attn.geometry import Grid
from sparse_attn.policies.alisa import Alisa
from sparse_attn.policies.dense import Dense
from sparse_attn.policies.diagonal import Diagonal
from sparse_attn.policies.h2o import H2O
from sparse_attn.policies.indexed import Indexed
from sparse_attn.policies.lines import Lines
from sparse_attn.policies.stencil import Stencil
from sparse_attn.policies.tova import Tova
from sparse_attn.policies.window import Streaming, Window
from sparse_attn.policy import Heads, ReadPolicy

__all__ = ["POLICIES", "ReadPolicy", "build", "options_of"]

POLICIES: dict[str, type[ReadPolicy]] = {
    cls.name: cls
    for cls in (Dense, Window, Streaming, Diagonal, Stencil, Lines, Indexed, H2O, Tova, Alisa)
}
_GIVEN = ("self", "grid", "heads", "sparsity", "model")
"""Parameters that are no options: the caller knows them."""


def build(
    name: str,
    grid: Grid,
    heads: Heads,
    sparsity: float = 0.0,
    options: Mapping[str, Any] = {},
    model: str | None = None,
) -> ReadPolicy:
    """The policy `name` on `grid`; `model` is the name that calibration files are checked against.

    Raises ValueError naming what is wrong and what is known.
    """
    cls = POLICIES.get(name)
    if cls is None:
        raise ValueError(f"unknown policy {name!r}{_nearest(name, POLICIES)}")
    known = options_of(name)
    for key, value in options.items():
        if key not in known:
            raise ValueError(f"policy {name!r} has no option {key!r}{_nearest(key, known)}")
        _check_type(key, value, known[key])
    for key, parameter in known.items():
        if parameter.default is parameter.empty and key not in options:
            raise ValueError(f"policy {name!r} needs the option {key!r}")
    arguments = dict(options)
    parameters = inspect.signature(cls.__init__).parameters
    if "model" in parameters:
        arguments["model"] = model
    if "sparsity" in parameters:
        arguments["sparsity"] = sparsity
    elif sparsity:
        raise ValueError(f"policy {name!r} has no sparsity; choose another policy or sparsity 0")
    return cls(grid, heads, **arguments)


def options_of(name: str) -> dict[str, inspect.Parameter]:
    """The options a policy takes besides its sparsity, as signature parameters."""
    parameters = inspect.signature(POLICIES[name].__init__).parameters
    return {k: p for k, p in parameters.items() if k not in _GIVEN}


def _check_type(key: str, value: object, option: inspect.Parameter) -> None:
    """Options come from outside: a float where a count is meant must not reach a policy."""
    allowed = get_args(option.annotation) or (option.annotation,)
    if type(value) not in allowed and not (type(value) is int and float in allowed):
        names = " or ".join(t.__name__ for t in allowed if t is not NoneType)
        raise ValueError(f"option {key!r} must be of type {names}, got {str(value)[:32]!r}")


def _nearest(name: str, known: Mapping[str, object]) -> str:
    match = difflib.get_close_matches(name, known, 1)
    hint = f"; did you mean {match[0]!r}?" if match else ""
    return f"{hint} (known: {', '.join(sorted(known)) or 'none'})"
