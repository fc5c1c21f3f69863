"""`bishop characterize`: its flags. The work is in `engine.characterize` and `commands.report`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from commands import options as flags
from commands.refusal import Refusal

if TYPE_CHECKING:
    from engine.engine import Engine


def characterize(
    prompts: Annotated[
        Path, typer.Option(help="A file with one prompt a line, or JSON lines with `prompt`.")
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder to write.")] = Path(
        "report"
    ),
    model: flags.Model = "mini",
    seeds: Annotated[int, typer.Option(min=1, help="Pictures of each prompt.")] = 2,
    limit: Annotated[int | None, typer.Option(min=1, help="Prompts used, of the first.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Pictures drawn together.")] = 4,
    backend: flags.BackendFlag = "auto",
    threads: flags.Threads = None,
    cache_mib: flags.CacheMib = None,
    dtype: flags.Dtype = "fp32",
    load_format: flags.LoadFormatFlag = "auto",
) -> int:
    """Watch attention while the model draws: an HTML report and JSON."""
    from commands.bar import TokenBar
    from commands.prompt_file import read
    from commands.report import write
    from engine.characterize import Study, facts
    from engine.characterize import characterize as watch

    lines = read(prompts)[:limit]
    _make(output)
    study = Study(tuple(line.prompt for line in lines), seeds, batch=batch)
    engine = _open(
        flags.EngineFlags(
            model=model, backend=backend, threads=threads, cache_mib=cache_mib, max_images=batch,
            dtype=dtype, kv_format="fp32" if dtype == "fp32" else dtype, load_format=load_format,
        )
    )  # fmt: skip
    try:
        with TokenBar(len(study.pictures), hidden=False) as bar:
            watcher = watch(engine, study, bar.advance)
    except (ValueError, RuntimeError) as error:
        raise Refusal(str(error)) from None
    write(output, facts(watcher, engine, study), watcher.layers)
    print(output / "report.html")
    return 0


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Refusal(f"-o: cannot write {folder}: {error.strerror or error}") from None


def _open(given: flags.EngineFlags) -> "Engine":
    from commands.opening import open_engine

    return open_engine(given)
