"""What a front end may tell of attention policies. Plain values: no tensors, no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Runs = tuple[tuple[int, int], ...]
"""Ascending positions as runs (first, last), both included."""

TypeName = Literal["int", "float", "bool", "str"]
Source = Literal["fixed", "fresh", "learned", "picked"]


@dataclass(frozen=True, slots=True)
class PolicyOption:
    """One option of a policy. `types`: what its value may be; `default`: None where there is none
    (the policy then works it out, unless `required`)."""

    name: str
    types: tuple[TypeName, ...]
    default: str | int | float | bool | None
    required: bool
    text: str


@dataclass(frozen=True, slots=True)
class PolicyInfo:
    """A policy by name. `text` is its documentation; `unavailable`: why it cannot run here."""

    name: str
    text: str
    takes_sparsity: bool
    options: tuple[PolicyOption, ...]
    unavailable: str | None


@dataclass(frozen=True, slots=True)
class GridInfo:
    """The tokens of a picture: `height` rows of `width`, and `row_tokens` at the end of each."""

    height: int
    width: int
    row_tokens: int

    @property
    def stride(self) -> int:
        return self.width + self.row_tokens

    @property
    def tokens(self) -> int:
        return self.height * self.stride


@dataclass(frozen=True, slots=True)
class PolicyCatalog:
    """All policies, and the layers, KV heads and grids (by picture size) that they decide for."""

    layers: int
    kv_heads: int
    grids: Mapping[tuple[int, int], GridInfo]
    policies: tuple[PolicyInfo, ...]


@dataclass(frozen=True, slots=True)
class ReadSet:
    """What KV head `head` of `layer` reads and keeps for the query at visual position `position`,
    which draws the token behind it. The prompt is read besides.

    source: "fixed": the reads depend on the position alone. "learned": the head learnt them while
        a picture was drawn; these are its last. "fresh": the same before anything was learnt.
        "picked": chosen anew for each query, so they cannot be told beforehand (`reads` is None).
    resident: None where what is kept depends on a picture that is not at hand.
    """

    grid: GridInfo
    layer: int
    head: int
    position: int
    reads: Runs | None
    resident: Runs | None
    source: Source
