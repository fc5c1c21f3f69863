"""Policies explained to people: their options, and what they read at a position."""

import inspect
import re
from bisect import bisect_right
from collections.abc import Iterable
from typing import get_args

import torch
from torch import Tensor

from engine.models.base import VisualModel
from engine.policy_files import heads_of
from engine.policy_info import (
    GridInfo,
    PolicyCatalog,
    PolicyInfo,
    PolicyOption,
    ReadSet,
    Runs,
    Source,
    TypeName,
)
from sparse_attn import attention
from sparse_attn.attention import Backend
from sparse_attn.geometry import Grid
from sparse_attn.policies import POLICIES, build, options_of
from sparse_attn.policy import Heads, ReadPolicy, read_keys

_CPU = torch.device("cpu")
_TYPES: dict[type, TypeName] = {int: "int", float: "float", bool: "bool", str: "str"}
_TRIAL_SPARSITY = 0.5


def catalog(model: VisualModel, backend: Backend) -> PolicyCatalog:
    """Every policy there is, as it stands for `model` on `backend`."""
    heads = heads_of(model)
    infos = tuple(_info(name, model.grid, heads, backend) for name in POLICIES)
    grids = {size: _grid_info(model.grid_of(size)) for size in model.sizes}
    return PolicyCatalog(heads.layers, heads.kv_heads, grids, infos)


def _info(name: str, grid: Grid, heads: Heads, backend: Backend) -> PolicyInfo:
    text = inspect.getdoc(POLICIES[name]) or ""
    sparse = "sparsity" in inspect.signature(POLICIES[name].__init__).parameters
    options = tuple(_option(p, text) for p in options_of(name).values())
    sparsity = _TRIAL_SPARSITY if sparse else 0.0
    return PolicyInfo(name, text, sparse, options, _why_not(name, grid, heads, sparsity, backend))


def _why_not(name: str, grid: Grid, heads: Heads, sparsity: float, backend: Backend) -> str | None:
    """Why the backend cannot run the policy; one that needs options is tried when they come."""
    try:
        return attention.why_not(build(name, grid, heads, sparsity), backend)
    except (ValueError, TypeError):
        return None


def _option(parameter: inspect.Parameter, text: str) -> PolicyOption:
    required = parameter.default is inspect.Parameter.empty
    members = get_args(parameter.annotation) or (parameter.annotation,)
    return PolicyOption(
        name=parameter.name,
        types=tuple(_TYPES[t] for t in members if t in _TYPES),
        default=None if required else parameter.default,
        required=required,
        text=_described(parameter.name, text),
    )


def _described(option: str, text: str) -> str:
    """What a docstring says of an option: "name: ..." and the indented lines behind it."""
    found = re.search(rf"^{option}: (.*(?:\n +\S.*)*)", text, re.MULTILINE)
    return " ".join(found[1].split()) if found else ""


def read_set(
    policy: ReadPolicy, layer: int, head: int, t: int, state: Tensor | None = None
) -> ReadSet:
    """What a head reads and keeps for the query at visual position t.

    state: the policy's state of one sequence, [1, layers, ...], if a picture left one.
    Raises ValueError naming what does not exist.
    """
    _check("layer", layer, policy.heads.layers)
    _check("head", head, policy.heads.kv_heads)
    _check("position", t, max(1, policy.grid.tokens - 1))
    source, reads = _reads(policy, layer, head, t, state)
    resident = _resident(policy, layer, head, t, state)
    grid = _grid_info(policy.grid)
    return ReadSet(grid, layer, head, t, reads, resident, source)


def _check(name: str, value: int, count: int) -> None:
    if not 0 <= value < count:
        raise ValueError(f"{name} must lie in 0..{count - 1}, got {value}")


def _reads(
    policy: ReadPolicy, layer: int, head: int, t: int, state: Tensor | None
) -> tuple[Source, Runs | None]:
    fresh = policy.new_state(1, _CPU)
    plan = policy.plan(layer, fresh if state is None else state, _CPU)
    if fresh is not None and plan.select is None and plan.held is None:
        return "picked", None
    source: Source = "fixed" if not policy.learns else "fresh" if state is None else "learned"
    if plan.held is not None and state is None:
        return source, None
    return source, runs(read_keys(plan, 0, head, t))


def _resident(
    policy: ReadPolicy, layer: int, head: int, t: int, state: Tensor | None
) -> Runs | None:
    """Keys behind the anchors die in the order they came, unless the picture decides."""
    try:
        first = bisect_right(
            range(policy.anchors, t + 1), t, key=lambda j: policy.dies_at(layer, head, j)
        )
    except ValueError:
        return None if state is None else runs(policy.resident(layer, head, t, state))
    anchors = range(min(policy.anchors, t + 1))
    return runs([*anchors, *range(policy.anchors + first, t + 1)])


def runs(positions: Iterable[int]) -> Runs:
    """Ascending positions as runs (first, last)."""
    result: list[tuple[int, int]] = []
    for position in positions:
        if result and position == result[-1][1] + 1:
            result[-1] = (result[-1][0], position)
        else:
            result.append((position, position))
    return tuple(result)


def _grid_info(grid: Grid) -> GridInfo:
    return GridInfo(grid.height, grid.width, grid.row_tokens)
