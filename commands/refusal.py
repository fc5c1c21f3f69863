"""How a command says no: one line on stderr and exit code 2."""

from scheduler.request import RequestError

USAGE = 2
FAILED = 1
INTERRUPTED = 130


class Refusal(Exception):  # noqa: N818  (not an error of the program)
    """The command cannot do what was asked; the message says what to change."""


def as_refusal(error: RequestError) -> Refusal:
    """The same refusal in the words of the command line: `--top-k: ...`."""
    return Refusal(f"{_flag(error.param)}{error}")


def _flag(param: str | None) -> str:
    if param is None:
        return ""
    if param == "prompt":
        return "PROMPT: "
    name = "policy-option" if param.startswith("policy_options") else param.replace("_", "-")
    return f"--{name}: "
