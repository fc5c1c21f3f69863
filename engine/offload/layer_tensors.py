"""The tensors of a layer, whatever objects of ours hold them: found in order, and replaced."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn


def tensors_of(part: object) -> list[Tensor]:
    """Every tensor below `part`, in the order of `mapped`."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    mapped(part, note)
    return found


def mapped(part: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """`part` with `function` applied to every tensor below it: objects are changed in place,
    tuples, lists and frozen dataclasses are made anew."""
    if isinstance(part, Tensor):
        return function(part)
    if isinstance(part, tuple | list):
        return type(part)(mapped(item, function) for item in part)
    if is_dataclass(part) and not isinstance(part, type):
        named = {f.name: mapped(getattr(part, f.name), function) for f in fields(part)}
        return replace(part, **named)
    if type(part).__module__.startswith("engine.") and hasattr(part, "__dict__"):
        for name, value in vars(part).items():
            setattr(part, name, mapped(value, function))
    return part


def memory_of(part: object) -> int:
    """Bytes of all tensors that `part` holds, each storage once; torch modules are looked into."""
    return sum({s.data_ptr(): s.nbytes() for s in _storages(part, set())}.values())


def _storages(part: object, seen: set[int]) -> Iterator[torch.UntypedStorage]:
    if id(part) in seen:
        return
    seen.add(id(part))
    if isinstance(part, Tensor):
        yield part.untyped_storage()
        return
    for inner in _inside(part):
        yield from _storages(inner, seen)


def _inside(part: object) -> Iterable[object]:
    if isinstance(part, tuple | list):
        return part
    if isinstance(part, dict):
        return part.values()
    if isinstance(part, nn.Module):
        return [*part.parameters(), *part.buffers()]
    if is_dataclass(part) and not isinstance(part, type):
        return [getattr(part, f.name) for f in fields(part)]
    if type(part).__module__.startswith("engine."):
        return getattr(part, "__dict__", {}).values()
    return ()
