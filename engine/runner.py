"""The runner executes a `StepPlan`: embed, run the layers, give logits, draw tokens."""

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float
from torch import Tensor

from engine.cache import KVArena, RowPool
from engine.image import Group, Image
from engine.models.base import SubBatchRun, VisualModel
from engine.offload.disk import OffloadError
from engine.offload.kv_tier import Row
from engine.offload.run import Offload
from engine.phases import DecodeAttention, PrefillAttention, Watch
from engine.sampling import Draw, draw_tokens
from scheduler.plan import ImageStep, StepPlan, StepResult, SubBatch
from sparse_attn.attention import Backend
from sparse_attn.policy import Batch


@dataclass(frozen=True, slots=True)
class Sequence:
    """One row of a sub-batch: sequence `index` (0 conditional, 1 unconditional) of an image."""

    image: Image
    step: ImageStep
    index: int

    @property
    def prompt(self) -> tuple[int, ...]:
        return self.image.prompts[self.index]

    @property
    def prompt_length(self) -> int:
        return len(self.prompt)


class Runner:
    """Owns the tensors of a run. `images` maps numbers to images; the caller fills it."""

    def __init__(
        self,
        model: VisualModel,
        arena: KVArena,
        backend: Backend,
        offload: Offload | None = None,
    ) -> None:
        self.model, self.arena, self.backend = model, arena, backend
        self.offload = offload or Offload()
        self.images: dict[int, Image] = {}
        self.watch: Watch | None = None
        self._rows: WeakKeyDictionary[Group, RowPool] = WeakKeyDictionary()

    def run(self, plan: StepPlan) -> StepResult:
        """Run one step: every image named in the plan draws one token.

        What cannot be read from or written to the offload folder fails the images it belongs to."""
        self._release(plan.released)
        with torch.inference_mode():
            try:
                failed = self._step(plan)
            except OffloadError as error:
                images = (step.image for sub in plan.sub_batches for step in sub.images)
                failed = dict.fromkeys(images, str(error))
        return StepResult(plan.step, failed | self.offload.finish())

    def _step(self, plan: StepPlan) -> dict[int, str]:
        batches = [self._sequences(sub) for sub in plan.sub_batches]
        self._start_new(plan, batches)
        runs = [self._prepare(s, b) for s, b in zip(plan.sub_batches, batches, strict=True)]
        self.offload.begin([run.attention for run in runs], self.model.shape.layers)
        run_layers(self.model, runs, self.offload)
        failed: dict[int, str] = {}
        for sub, sequences, run in zip(plan.sub_batches, batches, runs, strict=True):
            failed |= self._next_tokens(self._last_rows(sub, sequences, run), sequences)
        return failed

    def forget(self, number: int) -> None:
        """Give back the state rows of an image; the image itself stays with the caller."""
        image = self.images[number]
        for row in image.rows:
            self._pool(image.group).give_back(row)
        image.rows = ()

    def state_of(self, image: Image) -> Tensor | None:
        """A copy of what the policy has learnt for the conditional sequence, [1, layers, ...] on
        the CPU; None if nothing is learnt."""
        if not image.group.policy.learns:
            return None
        state = self._pool(image.group).state
        return None if state is None else state[[image.rows[0]]].cpu()

    def _release(self, numbers: tuple[int, ...]) -> None:
        for number in numbers:
            if number in self.images:
                self.forget(number)
                self.images[number].restart()

    def _sequences(self, sub: SubBatch) -> list[Sequence]:
        """Rows of a sub-batch: all conditional sequences first, then the unconditional ones."""
        pairs = [(self.images[step.image], step) for step in sub.images]
        most = max(len(step.slots) for _, step in pairs)
        return [
            Sequence(image, step, i) for i in range(most) for image, step in pairs
            if i < len(step.slots)
        ]  # fmt: skip

    def _prepare(self, sub: SubBatch, sequences: list[Sequence]) -> SubBatchRun:
        if sub.phase == "prefill":
            return self._prepare_prefill(sequences)
        return self._prepare_decode(sequences)

    def _prepare_prefill(self, sequences: list[Sequence]) -> SubBatchRun:
        group, lengths = sequences[0].image.group, [s.prompt_length for s in sequences]
        hidden = [self.model.embed_prompt(self._ids(s.prompt)) for s in sequences]
        angles = [self.model.rotary_prompt(n) for n in lengths]
        slots = [self._slot(s) for s in sequences]
        prefill = PrefillAttention(self.arena, group, slots, lengths, self.watch)
        attend = self.offload.prefill(prefill, self._rows_of(sequences))
        cos, sin = (torch.cat(x) for x in zip(*angles, strict=True))
        return SubBatchRun(torch.cat(hidden), cos, sin, attend)

    def _prepare_decode(self, sequences: list[Sequence]) -> SubBatchRun:
        group = sequences[0].image.group
        grid = group.policy.grid
        positions = self._ids([s.step.position for s in sequences])
        prompts = self._ids([s.prompt_length for s in sequences])
        tokens = self._ids([s.image.tokens[-1] for s in sequences])
        batch = Batch(
            self._ids([self._slot(s) for s in sequences]),
            positions.int(), prompts.int(),
            self._ids([s.image.rows[s.index] for s in sequences]),
        )  # fmt: skip
        state = self._pool(group).state
        decode = DecodeAttention(self.arena, group, batch, state, self.backend, self.watch)
        attend = self.offload.decode(decode, self._rows_of(sequences))
        cos, sin = self.model.rotary_visual(positions, prompts, grid)
        return SubBatchRun(self.model.embed_visual(tokens, positions, grid), cos, sin, attend)

    def _last_rows(self, sub: SubBatch, sequences: list[Sequence], run: SubBatchRun) -> Tensor:
        if sub.phase == "decode":
            return run.hidden
        lengths = torch.tensor([s.prompt_length for s in sequences])
        return run.hidden[(lengths.cumsum(0) - 1).to(run.hidden.device)]

    def _next_tokens(
        self, hidden: Float[Tensor, "M d"], sequences: list[Sequence]
    ) -> dict[int, str]:
        """Append a token to every image, forced or drawn; returns the images that failed."""
        forced = [self.model.forced_token(s.image.grid, s.step.position + 1) for s in sequences]
        for s, token in zip(sequences, forced, strict=True):
            if token is not None and s.index == 0:
                s.image.tokens.append(token)
        free = [i for i, token in enumerate(forced) if token is None]
        if not free:
            return {}
        if len(free) < len(sequences):
            hidden = hidden[self._ids(free)]
        return self._draw(hidden, [sequences[i] for i in free])

    def _draw(self, hidden: Float[Tensor, "M d"], sequences: list[Sequence]) -> dict[int, str]:
        """Append a drawn token to every image; returns those whose logits are not finite."""
        firsts = [s for s in sequences if s.index == 0]
        partner = {s.image.number: i for i, s in enumerate(sequences) if s.index == 1}
        draws = [Draw(s.image.request.sampling, s.image.seed, s.step.position + 1) for s in firsts]
        partners = [partner.get(s.image.number) for s in firsts]
        tokens = draw_tokens(self.model.logits(hidden), partners, draws, self.backend)
        failed = {}
        for s, token in zip(firsts, tokens, strict=True):
            if token is None:
                failed[s.image.number] = (
                    f"the model gave NaN or infinite logits at visual token {s.step.position + 1}"
                )
            else:
                s.image.tokens.append(token)
        return failed

    def _start_new(self, plan: StepPlan, batches: list[list[Sequence]]) -> None:
        """Give new images their rows of state, before any sub-batch takes hold of a state: a pool
        that grows makes a new one, and what is learnt in the old one would be lost."""
        for sub, sequences in zip(plan.sub_batches, batches, strict=True):
            if sub.phase == "prefill":
                for s in sequences:
                    if s.index == 0:
                        self._start(s.image, len(s.step.slots))

    def _start(self, image: Image, sequences: int) -> None:
        pool = self._pool(image.group)
        image.rows = tuple(pool.take() for _ in range(sequences))
        image.tokens.clear()

    def _pool(self, group: Group) -> RowPool:
        if group not in self._rows:
            policy, device = group.policy, self.arena.device
            self._rows[group] = RowPool(lambda rows: policy.new_state(rows, device))
        return self._rows[group]

    def _slot(self, s: Sequence) -> int:
        return self.arena.entry_of(s.image.group.layout, s.step.slots[s.index])

    def _rows_of(self, sequences: list[Sequence]) -> list[Row]:
        return [
            Row(
                s.image.number, s.step.slots[s.index], s.prompt_length, max(0, s.step.position),
                s.image.rows[s.index],
            )
            for s in sequences
        ]  # fmt: skip

    def _ids(self, values: tuple[int, ...] | list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.arena.device)


def run_layers(model: VisualModel, runs: list[SubBatchRun], offload: Offload) -> None:
    """Layer outer, sub-batches inner (FlexGen's block schedule): a layer's weights are visited once
    per step. Offloading puts its copies between these calls; a CUDA graph captures the loop."""
    for layer in range(model.shape.layers):
        offload.before(layer)
        for run in runs:
            model.run_layer(layer, run)
