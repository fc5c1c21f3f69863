"""Attention in the two phases of a sub-batch: reading prompts, and drawing one token."""

from collections.abc import Sequence
from typing import Protocol

from jaxtyping import Float
from torch import Tensor

from engine.cache import KVArena
from engine.image import Group
from sparse_attn import attention, prefill, reference
from sparse_attn.attention import Backend
from sparse_attn.cache import LayerCache
from sparse_attn.policy import Batch


class Watch(Protocol):
    """Looks on while attention runs, and changes nothing."""

    def prompts(self, layer: int, q: Tensor, k: Tensor, lengths: list[int]) -> None:
        """Queries and keys [M, heads, D] of whole prompts, one behind the other."""

    def step(self, layer: int, q: Tensor, cache: LayerCache, batch: Batch) -> None:
        """One query per sequence [B, Hq, D]; its key and value are stored already."""


class DecodeAttention:
    """Stores the new key and value of every sequence and reads what the group's policy keeps."""

    def __init__(
        self,
        arena: KVArena,
        group: Group,
        batch: Batch,
        state: Tensor | None,
        backend: Backend,
        watch: Watch | None = None,
    ) -> None:
        self.arena, self.group, self.batch = arena, group, batch
        self.state, self.backend, self.watch = state, backend, watch

    def __call__(
        self,
        layer: int,
        q: Float[Tensor, "M Hq D"],
        k: Float[Tensor, "M H D"],
        v: Float[Tensor, "M H D"],
    ) -> Float[Tensor, "M Hq D"]:
        cache = self.arena.layer(self.group.layout, layer)
        plan = self.group.policy.plan(layer, self.state, q.device)
        attention.append(k, v, cache, self.batch, self.backend, plan=plan)
        if self.watch is not None:
            self.watch.step(layer, q, cache, self.batch)
        return attention.decode(
            q, cache, self.group.policy, plan, self.batch, q.shape[-1] ** -0.5,
            layer=layer, state=self.state, backend=self.backend,
        )  # fmt: skip


class PrefillAttention:
    """Causal attention within each prompt; its keys and values go to the prompt regions.

    slots: first entry of each sequence in the arena; None where they are stored elsewhere."""

    def __init__(
        self,
        arena: KVArena,
        group: Group,
        slots: Sequence[int | None],
        lengths: list[int],
        watch: Watch | None = None,
    ) -> None:
        self.arena, self.group, self.slots, self.lengths = arena, group, slots, lengths
        self.watch = watch

    def __call__(
        self,
        layer: int,
        q: Float[Tensor, "M Hq D"],
        k: Float[Tensor, "M H D"],
        v: Float[Tensor, "M H D"],
    ) -> Float[Tensor, "M Hq D"]:
        cache = self.arena.layer(self.group.layout, layer)
        parts = zip(self.slots, k.split(self.lengths), v.split(self.lengths), strict=True)
        for slot, keys, values in parts:
            if slot is None:
                continue
            reference.append_prompt(keys, values, cache, slot)
        if self.watch is not None:
            self.watch.prompts(layer, q, k, self.lengths)
        return prefill.causal(q, k, v, self.lengths)
