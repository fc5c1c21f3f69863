"""The CPU kernels against what this machine's memory and arithmetic allow.

    python -m benchmarks.kernels_cpu [--threads 2] [--output benchmarks/results/kernels-cpu.json]

`decode` is timed cold, launch by launch: each finds its KV in memory, as in a step whose other
layers have passed through the cache since. Beside it, in turn: a plain read of as many bytes, and
torch SDPA on K and V gathered beforehand. `linear` is timed against torch.mm of the same shape.
"""

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle
from math import ceil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks import results_writer, roofline
from benchmarks.timing import Run, best_seconds
from engine.cache import host_memory
from sparse_attn import ops, policies
from sparse_attn.cache import LayerCache, LayerTable
from sparse_attn.geometry import Grid
from sparse_attn.layout import FORMATS, CacheLayout
from sparse_attn.policy import Batch, Heads, ReadPlan, read_keys
from sparse_attn.reference import visual_entry

NAME = "kernels-cpu.json"
CPU = torch.device("cpu")
COLD_BYTES = 96 << 20
"""Kept KV that passes by before a launch sees its own again; a few times the last-level cache."""

MINI = {"grid": Grid(24, 24), "kv_heads": 6, "q_heads": 6, "dim": 64}
LLAMAGEN = {"grid": Grid(32, 32), "kv_heads": 20, "q_heads": 20, "dim": 64}
LUMINA = {"grid": Grid(64, 64, 1), "kv_heads": 32, "q_heads": 32, "dim": 128}
EMU3 = {"grid": Grid(90, 90, 1), "kv_heads": 8, "q_heads": 32, "dim": 128}
MINI_LINEARS = {"qkv": (384, 1152), "out": (384, 384), "gate_up": (384, 2048), "down": (1024, 384)}
ROWS = (1, 2, 4, 8, 16, 64)


@dataclass(frozen=True)
class Case:
    """One decode launch: a query at the last position of each sequence."""

    model: str
    grid: Grid
    kv_heads: int
    q_heads: int
    dim: int
    format: str
    sequences: int
    policy: str
    sparsity: float
    prompt: int = 32

    def __str__(self) -> str:
        return (
            f"{self.model} {self.format}, {self.sequences} sequences, "
            f"{self.policy} {self.sparsity:g}"
        )


def decode_cases() -> Iterator[Case]:
    for format in ("fp32", "bf16", "int8"):
        for sequences in (2, 16):
            for policy, sparsity in (("dense", 0.0), ("diagonal", 0.9), ("diagonal", 0.95)):
                yield Case("mini", **MINI, format=format, sequences=sequences,
                           policy=policy, sparsity=sparsity)  # fmt: skip
    for name, shape in (("LlamaGen-XL", LLAMAGEN), ("Lumina-7B", LUMINA), ("Emu3", EMU3)):
        for policy, sparsity in (("dense", 0.0), ("diagonal", 0.95)):
            yield Case(name, **shape, format="bf16", sequences=2, policy=policy, sparsity=sparsity)


class DecodeBench:
    """Enough layers of one case that the caches never hold what is read next."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.format = FORMATS[case.format]
        one = self._policy(1)
        keys = case.prompt + one.read_total(case.grid.tokens - 1) / case.kv_heads
        entries = case.sequences * case.kv_heads * keys
        self.bytes = round(entries * self.format.entry_bytes(case.dim))
        self.keys = round(keys)
        self.layers = max(2, ceil(COLD_BYTES / self.bytes))
        self._make()

    def _policy(self, layers: int) -> Any:
        c = self.case
        return policies.build(c.policy, c.grid, Heads(layers, c.kv_heads), c.sparsity)

    def _make(self) -> None:
        c, policy = self.case, self._policy(self.layers)
        layout = CacheLayout.of(policy, c.prompt, c.dim, self.format)
        size = c.sequences * layout.entries * self.format.entry_bytes(c.dim)
        self.memory = host_memory(size)  # as the engine's
        self.arena = random_arena(self.format.view(self.memory, c.dim))
        rows = torch.arange(c.sequences)
        full = torch.ones(c.sequences, dtype=torch.int32)
        last = c.grid.tokens - 1
        self.batch = Batch(rows * layout.entries, full * last, full * c.prompt, rows)
        state = policy.new_state(c.sequences, CPU)
        if state is not None:
            scatter(state, policy.recent)
        self.launches = [
            (LayerCache(self.arena, LayerTable.of(layout, i, CPU)), policy.plan(i, state, CPU))
            for i in range(self.layers)
        ]
        self.q = torch.randn(c.sequences, c.q_heads, c.dim)

    def decode(self) -> Run:
        """One launch, each time of the next layer; so below."""
        scale, launches = self.case.dim**-0.5, cycle(self.launches)
        return lambda: ops.decode(self.q, *next(launches), self.batch, scale)

    def plain_read(self) -> Run:
        """Reads as many bytes side by side."""
        flat = self.memory[: len(self.memory) // 4 * 4].view(torch.float32)
        step, size = len(flat) // self.layers, self.bytes // 4
        places = cycle([flat[i * step : i * step + size] for i in range(self.layers)])
        return lambda: next(places).amax()

    def sdpa(self) -> Run:
        """SDPA on K and V gathered beforehand, in bf16 where torch has not the format."""
        dtype = torch.float32 if self.case.format == "fp32" else torch.bfloat16
        q = self.q[:, :, None].to(dtype)
        gathered = cycle([self._gather(cache, plan, dtype) for cache, plan in self.launches])
        grouped = self.case.q_heads != self.case.kv_heads
        return lambda: scaled_dot_product_attention(q, *next(gathered), enable_gqa=grouped)

    def _gather(self, cache: LayerCache, plan: ReadPlan, dtype: torch.dtype) -> list[Tensor]:
        """K and V [B, H, keys, D] of what one launch reads."""
        c, t = self.case, self.case.grid.tokens - 1
        at = [
            int(self.batch.slots[b]) + int(cache.table.offsets[h]) + entry
            for b in range(c.sequences)
            for h in range(c.kv_heads)
            for entry in (
                *range(c.prompt),
                *(visual_entry(cache, h, key) for key in read_keys(plan, b, h, t)),
            )
        ]
        shape = (c.sequences, c.kv_heads, -1, c.dim)
        kv = self.format.read(self.arena, torch.tensor(at), c.dim)
        return [x.to(dtype).reshape(shape).contiguous() for x in kv]

    def row(self, seconds: float) -> dict[str, Any]:
        runs = {"decode": self.decode(), "read": self.plain_read(), "sdpa": self.sdpa()}
        time = best_seconds(runs, seconds, 2 * self.layers)
        return {
            "kernel": "decode", **asdict(self.case), "grid": str(self.case.grid),
            "keys_read": self.keys, "kept_bytes": self.bytes,
            "decode_us": time["decode"] * 1e6, "decode_gb_s": self.bytes / time["decode"] / 1e9,
            "plain_read_gb_s": self.bytes / time["read"] / 1e9, "sdpa_us": time["sdpa"] * 1e6,
            "share_of_plain_read": time["read"] / time["decode"],
            "times_sdpa": time["sdpa"] / time["decode"],
        }  # fmt: skip


def random_arena(arena: Tensor) -> Tensor:
    """Any numbers will do, but not zeros, which some memories treat better."""
    if arena.dtype == torch.uint8:  # codes and scales of 8 bits: small scales, no NaN
        return arena.fill_(0x3C)
    return arena.copy_(torch.randn(1, *arena.shape[1:]).to(arena.dtype))


def scatter(state: Tensor, recent: int) -> None:
    """A learnt state: other offsets for every sequence, layer and head."""
    order = torch.rand(*state.shape[:3], recent).argsort(-1)
    state[..., 0] = order[..., : state.shape[3]].to(state.dtype)


def linear_rows(seconds: float) -> Iterator[dict[str, Any]]:
    """`linear` against torch.mm, both warm: weights of this size stay in the cache."""
    for name, (inputs, outputs) in MINI_LINEARS.items():
        weight = torch.randn(outputs, inputs)
        codes = (weight * 30).round().clamp(-127, 127).to(torch.int8)
        packed = {"fp32": ops.pack_weight(weight),
                  "int8": ops.pack_weight(codes, torch.full((outputs,), 1 / 30))}  # fmt: skip
        for rows in ROWS:
            yield linear_row(name, rows, weight, packed, seconds)


def linear_row(
    name: str, rows: int, weight: Tensor, packed: dict[str, ops.PackedWeight], seconds: float
) -> dict[str, Any]:
    x = torch.randn(rows, weight.shape[1])
    time = best_seconds(
        {
            "fp32": lambda: ops.linear(x, packed["fp32"]),
            "int8": lambda: ops.linear(x, packed["int8"]),
            "mm": lambda: torch.mm(x, weight.T),
        },
        seconds,
    )
    flops = 2 * rows * weight.numel()
    return {"kernel": "linear", "layer": name, "rows": rows, "inputs": weight.shape[1],
            "outputs": weight.shape[0]} | {
        f"{key}_{unit}": value
        for key, t in time.items()
        for unit, value in (("us", t * 1e6), ("gflop_s", flops / t / 1e9))
    }  # fmt: skip


def all_linears_row(rows: int, seconds: float) -> dict[str, Any]:
    """Every INT8 linear of one step of mini: 12 layers and the head over 4096 tokens."""
    sizes = [*MINI_LINEARS.values()] * 12 + [(384, 4096)]
    weights = [
        ops.pack_weight(torch.randint(-127, 128, (n, k), dtype=torch.int8), torch.ones(n))
        for k, n in sizes
    ]
    x = {k: torch.randn(rows, k) for k, _ in sizes}
    run = {"step": lambda: [ops.linear(x[w.panels.shape[1]], w) for w in weights]}
    return {"kernel": "all_int8_linears_of_a_step", "rows": rows,
            "int8_us": best_seconds(run, seconds)["step"] * 1e6,
            "weight_bytes": sum(k * n for k, n in sizes)}  # fmt: skip


def measure(seconds: float) -> list[dict[str, Any]]:
    rows = []
    for case in decode_cases():
        rows.append(row := DecodeBench(case).row(seconds))
        print(
            f"{case!s:45} {row['decode_us']:8.0f} us {row['decode_gb_s']:6.1f} GB/s, "
            f"plain read {row['plain_read_gb_s']:6.1f} ({row['share_of_plain_read']:.2f}), "
            f"SDPA {row['sdpa_us']:8.0f} us ({row['times_sdpa']:.2f}x)",
            flush=True,
        )
    for row in linear_rows(seconds / 4):
        rows.append(row)
        print(
            f"linear {row['layer']:8} {row['rows']:3} rows: fp32 {row['fp32_gflop_s']:5.0f}, "
            f"int8 {row['int8_gflop_s']:5.0f}, torch.mm {row['mm_gflop_s']:5.0f} GFLOP/s",
            flush=True,
        )
    for count in ROWS:
        rows.append(row := all_linears_row(count, seconds))
        print(f"all int8 linears of a step, {count} rows: {row['int8_us']:.0f} us", flush=True)
    return rows


def measured(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The targets' figures: the worst row of each."""
    decode = [row for row in rows if row["kernel"] == "decode"]
    return {
        "CPU decode over a plain read of the same bytes": min(
            row["share_of_plain_read"] for row in decode
        ),
        "CPU decode over torch SDPA on gathered tensors": min(row["times_sdpa"] for row in decode),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=2.0, help="for each row")
    parser.add_argument("--output", type=Path, default=results_writer.RESULTS / NAME)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    ceiling = roofline.measure()
    print(f"ceiling: {ceiling}; kernels: {ops.built()}", flush=True)
    load = os.getloadavg()[0]  # above 0, other programs take part of cores and memory
    rows = [{"kernel": "ceiling", "threads": args.threads, "load": load, **asdict(ceiling)}]
    rows += measure(args.seconds)
    result = results_writer.results(NAME, rows, measured(rows))
    results_writer.write(args.output, result)
    print(json.dumps(result["targets"], indent=1))


if __name__ == "__main__":
    main()
