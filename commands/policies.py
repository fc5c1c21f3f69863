"""`bishop policies`: the attention policies, and pictures of what they read."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from commands import listing
from commands import options as flags
from commands.refusal import Refusal

if TYPE_CHECKING:
    from sparse_attn.policy import ReadPolicy

app = typer.Typer(invoke_without_command=True)


@app.callback()
def policies(context: typer.Context, json: listing.AsJson = False) -> int:
    """List the attention policies and their options; `show` draws one."""
    return 0 if context.invoked_subcommand else listing.policies(json)


@app.command()
def show(
    output: Annotated[Path, typer.Option("-o", "--output", help="PNG file to write.")] = Path(
        "policy.png"
    ),
    model: flags.Model = "mini",
    policy: flags.Policy = "diagonal",
    sparsity: flags.Sparsity = None,
    policy_option: flags.PolicyOptions = None,
    size: Annotated[
        str | None, typer.Option(help="WIDTHxHEIGHT; the model's default else.")
    ] = None,
    position: Annotated[
        list[int] | None, typer.Option(help="Visual position of a query; repeatable.")
    ] = None,
    head: Annotated[
        list[str] | None, typer.Option(help="LAYER:HEAD to draw; repeatable.", metavar="L:H")
    ] = None,
    load_format: flags.LoadFormatFlag = "auto",
) -> int:
    """Draw what a policy reads and keeps over the grid, for some queries and heads."""
    from sparse_attn.show import ShowError, policy_picture

    built = _policy(model, policy or "diagonal", sparsity, policy_option, size, load_format)
    try:
        policy_picture(built, output, position or None, _heads(head))
    except (ValueError, ShowError) as error:
        raise Refusal(str(error)) from None
    except OSError as error:
        raise Refusal(f"-o: cannot write {output}: {error.strerror or error}") from None
    print(output)
    return 0


def _policy(
    model: str,
    name: str,
    sparsity: float | None,
    options: list[str] | None,
    size: str | None,
    load_format: flags.LoadFormat,
) -> "ReadPolicy":
    """Raises Refusal for what does not exist."""
    from commands.loading import load
    from engine.policy_files import policy_of

    loaded = load(model, load_format)
    try:
        grid = None if size in (None, "auto") else loaded.grid_of(_pixels(size))
        given = flags.parse_options(options)
        return policy_of(loaded, name, sparsity or 0.0, given, grid)
    except (ValueError, TypeError) as error:
        raise Refusal(str(error)) from None


def _pixels(size: str | None) -> tuple[int, int]:
    width, cross, height = (size or "").partition("x")
    if not (cross and width.isdecimal() and height.isdecimal()):
        raise Refusal(f"--size: expected WIDTHxHEIGHT, got {size!r}")
    return int(width), int(height)


def _heads(words: list[str] | None) -> list[tuple[int, int]] | None:
    pairs = []
    for word in words or []:
        layer, colon, head = word.partition(":")
        if not (colon and layer.isdecimal() and head.isdecimal()):
            raise Refusal(f"--head: expected LAYER:HEAD, got {word!r}")
        pairs.append((int(layer), int(head)))
    return pairs or None
