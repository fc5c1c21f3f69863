"""`bishop plan`: which placement and block, what to expect of it, and why."""

import sys
from dataclasses import dataclass
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from commands import options as flags
from commands.refusal import Refusal

if TYPE_CHECKING:
    from rich.table import Table

    from engine.offload.cost import Limits
    from engine.offload.hardware import Hardware
    from engine.offload.planner import Capacity, Plan


@dataclass(frozen=True, slots=True)
class Bounds:
    """What the flags say of memory, in GB; None takes what the machine has."""

    gpu: float | None
    host: float | None
    disk: float


def plan(
    model: flags.Model = "mini",
    hardware: Annotated[
        str | None,
        typer.Option(help="Preset of configs/hardware; several with commas, `all` for every one; "
                     "this machine, measured once, if not given.", metavar="NAME"),
    ] = None,
    gpu_memory_limit_gb: Annotated[
        float | None, typer.Option(min=0, help="All of the GPU's if not given.")
    ] = None,
    host_memory_limit_gb: Annotated[
        float | None, typer.Option(min=0, help="All of the host's if not given.")
    ] = None,
    disk_limit_gb: Annotated[
        float, typer.Option(min=0, help="For weights and KV; 0 leaves the disk out.")
    ] = 0,
    offload_dir: flags.OffloadDir = None,
    policy: flags.Policy = None,
    sparsity: flags.Sparsity = None,
    policy_option: flags.PolicyOptions = None,
    dtype: Annotated[str, typer.Option(help="Of weights: fp32, bf16, fp16.")] = "bf16",
    kv_format: flags.KVFormat = "bf16",
    images: Annotated[
        int | None, typer.Option(min=1, help="Images at once; chosen if not given.")
    ] = None,
    images_per_day: Annotated[
        int | None, typer.Option(min=1, help="How many machines serve so many?")
    ] = None,
    p95: Annotated[
        float, typer.Option(min=0.001, help="Seconds that 95 % of images may take at most.")
    ] = 600.0,
    measure_again: Annotated[
        bool, typer.Option("--measure-again", help="Forget what was measured here before.")
    ] = False,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object and nothing else.")
    ] = False,
) -> int:  # fmt: skip
    """Plan the placement of a model by a cost model, or how many machines a day's images need."""
    from engine.offload.disk import OffloadError
    from engine.offload.planner import Capacity

    choice = flags.default_policy(policy, sparsity, policy_option)
    bounds = Bounds(gpu_memory_limit_gb, host_memory_limit_gb, disk_limit_gb)
    most = p95 if images_per_day is not None else None
    try:
        machines = _machines(hardware, bounds, offload_dir, measure_again)
        found, refused = _plans(model, machines, bounds, choice, dtype, kv_format, images, most)
    except (ValueError, OffloadError) as error:
        raise Refusal(str(error)) from error
    if not found:
        raise Refusal("; ".join(f"{name}: {why}" for name, why in refused.items()))
    if images_per_day is None:
        _print_plans(found, refused, json)
    else:
        _print_capacity([Capacity(p, images_per_day, p95) for p in found], refused, json)
    return 0


def _machines(
    names: str | None, bounds: Bounds, folder: Path | None, again: bool
) -> list["Hardware"]:
    from engine.offload import hardware
    from engine.offload.measure import this_machine

    if names == "all":
        return list(hardware.presets().values())
    if names is not None:
        return [hardware.preset(name) for name in names.split(",")]
    if bounds.disk and folder is None:
        raise ValueError("--disk-limit-gb: the disk of this machine is that of --offload-dir")
    print("measuring this machine, once", file=sys.stderr) if again else None
    return [this_machine(folder, again)]


def _limits(bounds: Bounds, machine: "Hardware") -> "Limits":
    """Raises ValueError for more memory than there is."""
    from engine.offload.cost import Limits

    gpu = machine.gpu.memory_bytes if machine.gpu else 0
    limits = []
    for flag, asked, there in (
        ("--gpu-memory-limit-gb", bounds.gpu, gpu),
        ("--host-memory-limit-gb", bounds.host, machine.host_memory_bytes),
    ):
        wanted = there if asked is None else int(asked * 1e9)
        if wanted > there:
            raise ValueError(
                f"{flag} {asked:g}: {machine.name} has {there / 1e9:.4g} GB"
                + (" (no GPU)" if not there else "")
            )
        limits.append(wanted)
    return Limits(limits[1], limits[0], int(bounds.disk * 1e9))


def _plans(
    model: str, machines: list["Hardware"], bounds: Bounds, choice: Any, dtype: str,
    kv_format: str, images: int | None, most_seconds: float | None,
) -> tuple[list["Plan"], dict[str, str]]:  # fmt: skip
    """A plan for each machine that has one, and why the others have none."""
    from engine.offload.geometry import geometry_of
    from engine.offload.planner import PlanError
    from engine.offload.planner import plan as best
    from engine.policy_files import default_options
    from sparse_attn.format import FORMATS
    from sparse_attn.policies import build
    from sparse_attn.policy import Heads

    if kv_format not in FORMATS:
        raise ValueError(f"unknown KV format {kv_format!r} (known: {', '.join(FORMATS)})")
    geometry = geometry_of(model, dtype)
    heads = Heads(geometry.layers, geometry.kv_heads)
    options = default_options(choice.name, model) | dict(choice.options)
    policy = build(choice.name, geometry.grid, heads, choice.sparsity, options, model)
    found, refused = [], {}
    for machine in machines:
        try:
            limits = _limits(bounds, machine)
            format = FORMATS[kv_format]
            found.append(best(geometry, policy, format, limits, machine, images, most_seconds))
        except PlanError as error:
            refused[machine.name] = str(error)
        except ValueError as error:
            if len(machines) == 1:
                raise
            refused[machine.name] = str(error)
    return found, refused


def _print_plans(found: list["Plan"], refused: dict[str, str], json: bool) -> None:
    if json:
        print(dumps({"plans": [p.as_dict() for p in found], "refused": refused}))
        return
    from rich.console import Console

    console = Console()
    for each in found:
        console.print(_title(each), style="bold")
        console.print(_placement_table(each))
        console.print(_time_table(each))
        for reason in each.reasons:
            console.print(f"- {reason}", highlight=False)
        console.print(_run_line(each), highlight=False, soft_wrap=True)
        console.print("Assumptions: " + "; ".join(each.assumptions), style="dim", highlight=False)
    _print_refused(console, refused)


def _title(p: "Plan") -> str:
    return (
        f"{p.model} on {p.hardware}, {p.policy} at sparsity {p.sparsity:g}: {p.images} images at "
        f"once, {p.step_seconds * 1e3:.4g} ms a step, {p.image_seconds:.4g} s an image, "
        f"{p.images_per_second:.4g} images/s (predicted)"
    )


def _placement_table(p: "Plan") -> "Table":
    from rich.table import Table

    table = Table("", "GPU %", "CPU %", "disk %")
    for name, share in (("weights of layers", p.placement.weights), ("KV", p.placement.cache)):
        table.add_row(name, *(f"{value:.4g}" for value in (share.gpu, share.cpu, share.disk)))
    memory = p.step.memory
    table.add_row("GB", *(f"{memory[t] / 1e9:.3g}" if t in memory else "-"
                          for t in ("gpu", "cpu", "disk")))  # fmt: skip
    return table


def _time_table(p: "Plan") -> "Table":
    from rich.table import Table

    from engine.offload.cost import vars_of
    from engine.offload.planner import WORDS

    table = Table("a layer keeps busy", "ms")
    for name, seconds in vars_of(p.step.costs).items():
        if seconds:
            mark = " <- bound" if name == p.step.costs.bound else ""
            table.add_row(WORDS[name] + mark, f"{seconds * 1e3:.4g}")
    return table


def _run_line(p: "Plan") -> str:
    """How to run it, or that it cannot be run yet."""
    place = p.placement
    if p.step.memory.get("gpu"):
        return "The engine of this version computes on the CPU: this plan cannot be run yet."
    cache = -(-p.kv_bytes // (1 << 20))
    disk = " --offload-dir DIR" if place.uses_disk else ""
    return (
        f"Run it: bishop serve --model {p.model} --weights-placement {place.weights} "
        f"--kv-placement {place.cache} --cache-mib {cache} --max-images {p.images}{disk}"
    )


def _print_capacity(found: list["Capacity"], refused: dict[str, str], json: bool) -> None:
    if json:
        print(dumps({"capacity": [c.as_dict() for c in found], "refused": refused}))
        return
    from rich.console import Console
    from rich.table import Table

    console, first = Console(), found[0]
    console.print(
        f"{first.images_per_day:,} images a day of {first.plan.model}, 95 % of them within "
        f"{first.p95_seconds:g} s", style="bold", highlight=False,
    )  # fmt: skip
    table = Table("hardware", "machines", "images at once", "s an image", "images/s", "bound by")
    for c in sorted(found, key=lambda c: c.machines):
        p = c.plan
        table.add_row(
            p.hardware, str(c.machines), str(p.images), f"{p.image_seconds:.4g}",
            f"{p.images_per_second:.4g}", p.step.costs.bound,
        )  # fmt: skip
    console.print(table)
    for c in found:
        each = "; ".join(c.plan.assumptions)
        console.print(f"{c.plan.hardware}: {each}", style="dim", highlight=False)
    console.print("All: " + "; ".join(first.as_dict()["assumptions"]), style="dim", highlight=False)
    _print_refused(console, refused)


def _print_refused(console: Any, refused: dict[str, str]) -> None:
    for name, why in refused.items():
        console.print(f"{name}: {why}", highlight=False)
