"""The HTTP service: `python server.py` (the same as `bishop serve`), and `create_app` for others.

`create_app(service, config)` gives the ASGI application over any `ImageService`.
"""

import sys

from serving.app import create_app
from serving.config import ServerConfig

__all__ = ["ServerConfig", "create_app", "main"]


def main() -> int:
    """`bishop serve` with this process's arguments; returns the exit code."""
    from cli import main as bishop

    return bishop(["serve", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
