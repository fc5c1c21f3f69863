"""Policy options of clients: a file is named, never pointed at.

On the command line `file=...` is a path. Over HTTP it is the name of a file that the server offers,
so that no client makes the server open anything else.
"""

from collections.abc import Mapping
from pathlib import Path

from engine.wanted import Option, nearest, shorten
from serving.errors import ApiError

SUFFIXES = (".yaml", ".safetensors")


def safe_options(options: Mapping[str, Option], folder: Path) -> dict[str, Option]:
    """The options with the name of a file replaced by its path in `folder`.

    Raises ApiError (400) for a file that is not offered, and for any other text that is a path.
    """
    return {key: _safe(key, value, folder) for key, value in options.items()}


def _safe(key: str, value: Option, folder: Path) -> Option:
    if key == "file":
        return _offered(str(value), folder)
    if isinstance(value, str) and ("/" in value or "\\" in value):
        raise _refused(key, "paths are not taken over HTTP")
    return value


def offered(folder: Path) -> dict[str, Path]:
    """The policy files that clients may name."""
    return {path.name: path for path in sorted(folder.glob("*")) if path.suffix in SUFFIXES}


def _offered(name: str, folder: Path) -> str:
    known = offered(folder)
    if name not in known:
        raise _refused("file", f"unknown policy file {shorten(name)!r}{nearest(name, list(known))}")
    return str(known[name])


def _refused(key: str, message: str) -> ApiError:
    param = f"policy_options.{shorten(key)}"
    return ApiError(400, message, param=param, code="invalid_value")
