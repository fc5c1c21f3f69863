"""`bishop calibrate`: its flags. The work is in `engine.fitting`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from commands import options as flags
from commands.refusal import Refusal

if TYPE_CHECKING:
    from engine.engine import Engine
    from engine.fitting import Fit
    from engine.teacher import Pictures


def calibrate(
    output: Annotated[Path, typer.Option("-o", "--output", help="Policy file (YAML) to write.")],
    sparsity: Annotated[
        list[float], typer.Option(help="Share of the visual keys left unread; repeatable.")
    ],
    prompts: Annotated[
        Path | None, typer.Option(help="Prompts whose pictures the model draws to learn from.")
    ] = None,
    pictures: Annotated[
        Path | None, typer.Option(help="Finished pictures (safetensors) instead of prompts.")
    ] = None,
    kind: Annotated[
        Literal["stencil", "indexed"], typer.Option(help="Fixed offsets, or picks by an index.")
    ] = "stencil",
    row_bound: Annotated[
        int | None, typer.Option(help="R: no head reads more than R rows back.")
    ] = None,
    resident_fraction: Annotated[
        float | None, typer.Option(help="Share of the image that stays, shared out over heads.")
    ] = None,
    weigh: Annotated[
        Literal["mass", "value", "output"],
        typer.Option(help="What a key is worth: attention, times |v|, or times |v - o|."),
    ] = "value",
    dims: Annotated[int, typer.Option(help="Directions of an index: 8 (4 bytes) or 16.")] = 8,
    count: Annotated[int, typer.Option(min=2, help="Pictures drawn.")] = 32,
    held_out: Annotated[int, typer.Option(min=1, help="Of these, pictures that only check.")] = 8,
    seed: Annotated[int, typer.Option(help="Of the first picture.")] = 0,
    model: flags.Model = "mini",
    backend: flags.BackendFlag = "auto",
    threads: flags.Threads = None,
    cache_mib: flags.CacheMib = None,
    load_format: flags.LoadFormatFlag = "auto",
) -> int:
    """Fit a policy to a model's attention and say its price; run again to go on after a kill."""
    from engine.fitting import Fit

    if (prompts is None) == (pictures is None):
        raise Refusal("--prompts: name a file of prompts, or finished --pictures")
    try:
        wanted = Fit(kind, tuple(sparsity), row_bound, resident_fraction, weigh, dims, held_out)
    except ValueError as error:
        raise Refusal(str(error)) from None
    engine = _open(model, backend, threads, cache_mib, load_format)
    folder = output.with_suffix(".pictures")
    shown = _finished(pictures) if pictures else _drawn(engine, prompts, count, seed, folder)
    _told(_fit(engine, shown, wanted, output), output)
    return 0


def _open(
    model: str,
    backend: flags.Backend,
    threads: int | None,
    cache_mib: int | None,
    load_format: flags.LoadFormat,
) -> "Engine":
    from commands.opening import open_engine

    given = flags.EngineFlags(
        model=model, backend=backend, threads=threads, cache_mib=cache_mib, load_format=load_format
    )
    return open_engine(given)


def _finished(path: Path) -> "Pictures":
    from engine.teacher import Pictures

    try:
        return Pictures.load(path)
    except ValueError as error:
        raise Refusal(f"--pictures: {error}") from None


def _drawn(
    engine: "Engine", prompts: Path | None, count: int, seed: int, folder: Path
) -> "Pictures":
    from commands.bar import TokenBar
    from commands.prompt_file import read
    from engine.selfdrawn import Order, draw_pictures

    lines = read(prompts or Path("-"))
    order = Order(tuple(line.prompt for line in lines), count, seed)
    try:
        with TokenBar(count, hidden=False) as bar:
            return draw_pictures(engine, order, folder, bar.advance)
    except (ValueError, RuntimeError, OSError) as error:
        raise Refusal(str(error)) from None


def _fit(engine: "Engine", pictures: "Pictures", wanted: "Fit", output: Path) -> list[Any]:
    from commands.bar import StepBar
    from engine.fitting import fit

    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with StepBar() as bar:
            return fit(engine.model, pictures, wanted, output, bar.advance)
    except OSError as error:
        raise Refusal(f"-o: cannot write {output}: {error.strerror or error}") from None
    except ValueError as error:
        raise Refusal(str(error)) from None


def _told(rows: list[dict[str, Any]], output: Path) -> None:
    """A table, and the Pareto plot beside the file."""
    from commands import figures

    measured = [row for row in rows if "loss" in row]
    for row in measured:
        loss = f"loss {row['loss']:.4f} +- {row['loss_se']:.4f} nats/token"
        bytes = f"reads {row['read_share']:.3f}, keeps {row['resident_share']:.3f}"
        print(f"{row['name']:<22} {row['sparsity']:<5g} {loss}, {bytes}")
    path = output.with_suffix(".png")
    path.write_bytes(figures.pareto(measured))
    print(f"{output}\n{path}")
