"""The `bishop` command. A usage error is one line on stderr and exit code 2; Ctrl-C is quiet."""

import sys
from collections.abc import Sequence

import typer

from commands import listing, policies
from commands.batch import batch
from commands.bench import bench
from commands.calibrate import calibrate
from commands.characterize import characterize
from commands.evaluate import evaluate
from commands.generate import generate
from commands.plan import plan
from commands.refusal import INTERRUPTED, USAGE, Refusal
from commands.replicas import replicas
from commands.serve import serve

app = typer.Typer(
    help="Draw pictures with autoregressive image models and sparse attention.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command()(generate)
app.command()(serve)
app.command()(characterize)
app.command()(calibrate)
app.command()(evaluate)
app.command()(plan)
app.command()(listing.models)
app.add_typer(policies.app, name="policies")
app.add_typer(batch, name="batch")
app.add_typer(bench, name="bench")
app.add_typer(replicas, name="replicas")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    try:
        code = app(args=arguments, prog_name="bishop", standalone_mode=False)
    except typer.TyperException as error:
        return _say(error.format_message(), error.exit_code)
    except Refusal as refusal:
        return _say(str(refusal), USAGE)
    except (KeyboardInterrupt, typer.Abort):
        return _say("interrupted", INTERRUPTED)
    if code == INTERRUPTED:
        _say("interrupted", INTERRUPTED)
    return code or 0


def _say(message: str, code: int) -> int:
    if message:
        print(f"bishop: {' '.join(message.split())}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
