"""Images per second on this machine: dense attention against policies, in one run.

    bishop bench throughput --model mini --num-prompts 8 --policy diagonal --sparsity 0.9

The ceiling comes first, then every configuration in turn, `--rounds` times over, so that a change
of the machine's mood meets all of them. The last thing printed is one JSON object.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch

from benchmarks import results_writer
from benchmarks.bench_command import PROMPTS, Parser
from benchmarks.roofline import StepCost, measure
from benchmarks.rounds import Measured, draw
from commands.opening import engine_config
from commands.options import IN_MEMORY, EngineFlags, parse_options
from commands.outputs import check_folder
from commands.refusal import Refusal, as_refusal
from commands.units import size
from engine.config import EngineConfig
from engine.models.base import VisualModel
from engine.models.presets import load_model
from engine.service import EngineService
from engine.wanted import Wanted, to_request
from scheduler.request import MAX_IMAGES, ImageRequest, PolicyChoice, RequestError

SETTING = ("model", "dtype", "kv_format", "n", "weights_placement", "kv_placement")


def parser() -> Parser:
    p = Parser(prog="bishop bench throughput", description=(__doc__ or "").splitlines()[0])
    p.add_argument("--model", default="mini", help="preset or folder of weights")
    p.add_argument("--num-prompts", type=int, default=8, help="requests per round")
    p.add_argument("--n", type=int, default=1, help="images per request")
    p.add_argument(
        "--policy",
        action="append",
        metavar="NAME[:KEY=VALUE,...]",
        help="compare this with dense; repeatable; KEY is sparsity or an option of the policy",
    )
    p.add_argument("--sparsity", type=float, default=0.9, help="of policies that name none")
    p.add_argument("--max-images", type=int, default=16, help="images drawn at the same time")
    p.add_argument("--rounds", type=int, default=3, help="how often each configuration runs")
    p.add_argument("--warmup", type=int, default=1, help="requests before anything is timed")
    p.add_argument("--seed", type=int, default=0, help="of every request")
    p.add_argument("--backend", default="auto", choices=("auto", "native", "reference"))
    p.add_argument("--threads", type=int, help="CPU threads")
    p.add_argument("--dtype", default="fp32", help="of weights and activations")
    p.add_argument("--kv-format", default="bf16", help="of stored keys and values")
    p.add_argument("--weights-placement", default=IN_MEMORY, help="percent on GPU,CPU,disk")
    p.add_argument("--kv-placement", default=IN_MEMORY, help="percent on GPU,CPU,disk")
    p.add_argument("--offload-dir", type=Path, help="folder for what is placed on disk")
    p.add_argument("--host-memory-limit-gb", type=float, help="of weights, KV and buffers")
    p.add_argument("--output-json", type=Path, help="also write the JSON object here")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit code. Raises Refusal for what cannot be measured."""
    argv = sys.argv[1:] if argv is None else argv
    args = parser().parse_args(argv)
    choices = checked(args)
    config, model = opened(args)
    service = EngineService(config, model)
    plans = [(choice, requests_of(args, service, choice)) for choice in choices]
    ceiling = measure()
    print(f"{service.model.name} on {service.model.backend}; ceiling: {ceiling}", flush=True)
    measured = measured_in_turn(service, plans, args.warmup, args.rounds)
    ceiling = ceiling.or_better(measure())
    print(f"ceiling, the better of before and after: {ceiling}")
    setting = {name: getattr(args, name) for name in SETTING}
    setting |= {"backend": service.model.backend, "threads": torch.get_num_threads()}
    setting |= {"read_bytes_per_second": ceiling.bandwidth, "matmul_flops": ceiling.flops}
    rows = [
        setting | each.row(measured[0], cost_of(model, config, each), ceiling) for each in measured
    ]
    print("\n".join(map(line, rows)))
    publish(rows, shlex.join(["bishop", "bench", "throughput", *argv]), args.output_json)
    return 0


def checked(args: argparse.Namespace) -> list[PolicyChoice]:
    """The policies to run, dense first. Raises Refusal for what makes no sense."""
    for name in ("num_prompts", "n", "max_images", "rounds", "threads"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise Refusal(f"--{name.replace('_', '-')}: must be 1 or more")
    if args.n > MAX_IMAGES or args.warmup < 0:
        raise Refusal(f"--n: at most {MAX_IMAGES}; --warmup: 0 or more")
    if args.output_json is not None:
        check_folder(args.output_json.parent, "--output-json")
    try:
        chosen = [choice_of(text, args.sparsity) for text in args.policy or ["diagonal"]]
    except RequestError as error:
        raise as_refusal(error) from None
    return [PolicyChoice(), *(choice for choice in chosen if choice != PolicyChoice())]


def choice_of(text: str, sparsity: float) -> PolicyChoice:
    """`stencil:rows=8,sparsity=0.8` as a policy; `sparsity` is used where none is given."""
    name, _, pairs = text.partition(":")
    options = parse_options(pairs.split(",") if pairs else [], "--policy")
    share = options.pop("sparsity", 0.0 if name == "dense" else sparsity)
    if not isinstance(share, int | float):
        raise Refusal(f"--policy: sparsity must be a number, got {share!r}")
    return PolicyChoice(name, share, tuple(sorted(options.items())))


def opened(args: argparse.Namespace) -> tuple[EngineConfig, VisualModel]:
    """Raises Refusal with the reason there is no engine."""
    names = (
        "model", "backend", "threads", "max_images", "dtype", "kv_format", "weights_placement",
        "kv_placement", "offload_dir", "host_memory_limit_gb",
    )  # fmt: skip
    flags = EngineFlags(**{name: getattr(args, name) for name in names})
    try:
        config = engine_config(flags)
        return config, load_model(config.model, config.load_options)
    except (ValueError, RuntimeError, OSError) as error:
        raise Refusal(str(error)) from error


def requests_of(
    args: argparse.Namespace, service: EngineService, choice: PolicyChoice
) -> list[ImageRequest]:
    """The same prompts and seeds for every policy. Raises Refusal if the model refuses them."""
    prompts = [PROMPTS[k % len(PROMPTS)] for k in range(args.num_prompts)]
    try:
        requests = [
            to_request(Wanted(prompt=prompt, n=args.n, seed=args.seed + k), service.model, choice)
            for k, prompt in enumerate(prompts)
        ]
        service.check(requests[0])
    except RequestError as error:
        raise as_refusal(error) from None
    return requests


def measured_in_turn(
    service: EngineService,
    plans: Sequence[tuple[PolicyChoice, list[ImageRequest]]],
    warmup: int,
    rounds: int,
) -> list[Measured]:
    measured = [Measured(choice) for choice, _ in plans]
    service.start()
    try:
        for _, requests in plans:
            draw(service, again(requests[:warmup]))
        for _ in range(rounds):
            for each, (_, requests) in zip(measured, plans, strict=True):
                each.rounds.append(draw(service, again(requests)))
    finally:
        service.stop()
    return measured


def again(requests: Sequence[ImageRequest]) -> list[ImageRequest]:
    """The same requests under ids of their own."""
    return [replace(request, id=uuid4().hex) for request in requests]


def cost_of(model: VisualModel, config: EngineConfig, measured: Measured) -> StepCost:
    images = min(config.max_images, measured.images)
    sequences = images * (2 if model.sampling.guided else 1)
    return StepCost.of(model, config.format, measured.stats, images, sequences)


def line(row: dict[str, Any]) -> str:
    name = f"{row['policy']} {row['sparsity']:g}"
    return (
        f"{name:<16} {row['images_per_second']:7.3f} images/s "
        f"{row['tokens_per_second']:8.1f} tokens/s "
        f"({100 * row['share_of_ceiling']:.0f} % of what {row['bound']} allows), "
        f"latency {row['avg_latency']:.2f} s, density {row['density']:.3f}, an image reads "
        f"{size(row['kv_read_bytes_per_image'])} of KV and stores "
        f"{size(row['kv_resident_bytes_per_image'])}: {row['speedup']:.2f}x dense"
    )


def publish(rows: list[dict[str, Any]], command: str, path: Path | None) -> None:
    """Print the results object, and write it where `path` says."""
    name = "throughput.json" if path is None else path.name
    result = results_writer.results(name, rows, command=command)
    print(json.dumps(result, indent=1))
    if path is not None:
        results_writer.write(path, result)


if __name__ == "__main__":
    from cli import main as bishop

    sys.exit(bishop(["bench", "throughput", *sys.argv[1:]]))
