"""`bishop evaluate`: its flags. The work is in `engine.evaluate`."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from commands import options as flags
from commands.refusal import Refusal

if TYPE_CHECKING:
    from engine.engine import Engine
    from engine.evaluate import Cell, Evaluation, Plan, Tools

Row = dict[str, Any]


def evaluate(
    prompts: Annotated[
        Path, typer.Option(help="Prompts, a line each or JSON lines; with --suite dpg its CSV.")
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder; run again to go on.")],
    policies: Annotated[
        str, typer.Option(help="Comma-separated: indexed:0.95, diagonal+sink4, stencil@FILE, ...")
    ] = "dense,window,streaming,diagonal,diagonal+sink4,stencil,lines,indexed",
    kv: Annotated[str, typer.Option(help="KV formats, comma-separated.")] = "bf16",
    sparsity: Annotated[str, typer.Option(help="Comma-separated.")] = "0.9,0.95",
    images: Annotated[int, typer.Option(min=1, help="Pictures per cell, over all prompts.")] = 64,
    seed: Annotated[int, typer.Option(help="Of the first picture.")] = 0,
    held_out: Annotated[
        Path | None, typer.Option(help="Finished pictures for likelihood and KL (safetensors).")
    ] = None,
    held_out_count: Annotated[int, typer.Option(min=1, help="Of these, the first.")] = 24,
    suite: Annotated[
        str | None, typer.Option(help="geneval, dpg or judge: what --scorer is for.")
    ] = None,
    scorer: Annotated[
        str | None, typer.Option(help="package.module:function that makes the scorer.")
    ] = None,
    model: flags.Model = "mini",
    backend: flags.BackendFlag = "auto",
    threads: flags.Threads = None,
    cache_mib: flags.CacheMib = None,
    max_images: flags.MaxImages = 16,
    load_format: flags.LoadFormatFlag = "auto",
) -> int:
    """Draw the same pictures under several policies and say what each costs in quality."""
    asked = _Asked(policies, kv, sparsity, suite, scorer)
    engine = flags.EngineFlags(
        model=model, backend=backend, threads=threads, cache_mib=cache_mib, max_images=max_images,
        load_format=load_format,
    )  # fmt: skip
    try:
        plan = asked.plan(prompts, images, output, seed, _pictures(held_out, held_out_count))
        rows = list(_rows(engine, plan, asked.tools(), asked.cells()))
    except (ValueError, RuntimeError) as error:
        raise Refusal(str(error)) from None
    except OSError as error:
        raise Refusal(f"-o: {error}") from None
    _write(output, rows, plan)
    return 0


@dataclass(frozen=True, slots=True)
class _Asked:
    """Words of the command line. All raise ValueError."""

    policies: str
    kv: str
    sparsity: str
    suite: str | None
    scorer: str | None

    def cells(self) -> list["Cell"]:
        from engine.evaluate import cells
        from sparse_attn.format import FORMATS

        formats = self.kv.split(",")
        for format in formats:
            if format not in FORMATS:
                raise ValueError(f"--kv: unknown format {format!r}; known: {', '.join(FORMATS)}")
        try:
            shares = [float(word) for word in self.sparsity.split(",")]
        except ValueError:
            raise ValueError(f"--sparsity: expected numbers, got {self.sparsity!r}") from None
        return cells(self.policies.split(","), shares, formats)

    def plan(self, prompts: Path, images: int, output: Path, seed: int, held_out: Any) -> "Plan":
        from commands.prompt_file import read
        from engine.evaluate import Plan
        from engine.judges.suites import dpg_prompts

        if self.suite == "dpg":
            texts, facts = dpg_prompts(prompts)
        else:
            lines = read(prompts)
            texts, facts = tuple(x.prompt for x in lines), tuple(x.facts for x in lines)
        return Plan(texts, images, output, facts, seed, held_out)

    def tools(self) -> "Tools":
        """Whatever is installed; what is not is said and left out."""
        from engine.evaluate import Tools
        from engine.judges.features import efficientnet
        from engine.judges.lpips import Distance
        from engine.judges.suites import judge_of

        if (self.suite is None) != (self.scorer is None):
            raise ValueError("--suite and --scorer go together")
        judge = judge_of(self.suite, self.scorer) if self.suite and self.scorer else None
        return Tools(_installed(Distance.installed), _installed(efficientnet), judge)


def _installed(make: Any) -> Any:
    try:
        return make()
    except RuntimeError as error:
        typer.echo(f"bishop: left out: {error}", err=True)
        return None


def _pictures(path: Path | None, count: int) -> Any:
    from engine.teacher import Pictures

    return None if path is None else Pictures.load(path)[:count]


def _rows(
    given: flags.EngineFlags, plan: "Plan", tools: "Tools", cells: Sequence["Cell"]
) -> Iterator[Row]:
    from dataclasses import replace

    from commands.bar import StepBar
    from commands.opening import open_engine
    from engine.evaluate import Evaluation

    def opened(format: str) -> "Engine":
        return open_engine(replace(given, kv_format=format))

    with StepBar() as bar:
        evaluation = Evaluation(opened, plan, tools, bar.advance)
        yield evaluation.baseline()
        yield from _each(evaluation, cells)


def _each(evaluation: "Evaluation", cells: Sequence["Cell"]) -> Iterator[Row]:
    """A cell that cannot be (a budget the policy refuses) says why and costs no other."""
    from scheduler.request import RequestError

    for cell in cells:
        try:
            yield evaluation.row(cell)
        except (RequestError, ValueError) as error:
            typer.echo(f"bishop: {cell.name} is left out: {error}", err=True)


SHOWN = (
    "sample_nll_change", "scene_change", "agreement", "lpips", "fd_change", "nll_loss", "kl",
)  # fmt: skip


def _write(folder: Path, rows: Sequence[Row], plan: "Plan") -> None:
    """evaluate.json, table.md and plot.png; the table is printed too."""
    from commands import figures

    (folder / "evaluate.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    table = _table(rows)
    (folder / "table.md").write_text(table, encoding="utf-8")
    (folder / "plot.png").write_bytes(figures.cost(rows))
    print(table, end="")
    print(f"\n{plan.count} pictures a cell of {len(plan.prompts)} prompts; {folder}/evaluate.json")


def _table(rows: Sequence[Row]) -> str:
    names = [n for n in SHOWN if any(n in row for row in rows)]
    head = ["cell", "read", "resident", *(n.replace("_", " ") for n in names)]
    lines = [head, ["---"] * len(head)]
    for row in rows:
        sizes = [f"{row[k]:.3f}" if k in row else "" for k in ("read_share", "resident_share")]
        lines.append([row["cell"], *sizes, *(_value(row, name) for name in names)])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _value(row: Mapping[str, Any], name: str) -> str:
    """With its 95 % interval, or its standard error."""
    if name not in row:
        return ""
    if f"{name}_low" in row:
        return f"{row[name]:.3f} ({row[f'{name}_low']:.3f} to {row[f'{name}_high']:.3f})"
    return f"{row[name]:.4f} +- {row[f'{name}_se']:.4f}"
