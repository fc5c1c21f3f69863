"""`bishop bench`: the measurements in benchmarks/, with their own flags."""

import importlib

import typer

from commands.refusal import Refusal

bench = typer.Typer(no_args_is_help=True, help="Measure this machine; see benchmarks/.")

PASS_ON = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}


@bench.command("throughput", context_settings=PASS_ON, add_help_option=False)
def throughput(context: typer.Context) -> int:
    """Images per second, dense against policies; `bishop bench throughput --help` for its flags."""
    return delegate("throughput", context.args)


@bench.command("serve", context_settings=PASS_ON, add_help_option=False)
def serve(context: typer.Context) -> int:
    """Load any OpenAI-compatible image endpoint; `bishop bench serve --help` for its flags."""
    return delegate("serve", context.args)


def delegate(name: str, arguments: list[str]) -> int:
    """Run benchmarks/NAME.py. It is found by name: nothing may import benchmarks/."""
    try:
        module = importlib.import_module(f"benchmarks.{name}")
    except ModuleNotFoundError as error:
        if error.name not in ("benchmarks", f"benchmarks.{name}"):
            raise
        raise Refusal("benchmarks/ is not installed; run this in a checkout") from None
    code: int = module.main(arguments)
    return code
