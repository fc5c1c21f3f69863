"""The playground: static files of the folder web/, with the page at /."""

from pathlib import Path

from fastapi import FastAPI
from starlette.responses import FileResponse
from starlette.staticfiles import StaticFiles
from starlette.types import Message, Receive, Scope, Send

WEB = Path(__file__).resolve().parents[1] / "web"

_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data: blob:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
HEADERS = {
    "content-security-policy": _POLICY,
    "cross-origin-opener-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",
}
"""The page loads nothing from elsewhere and runs nothing but its own files; a browser asks each
time whether a file has changed, so that a new server is never met by an old page."""


class Pages(StaticFiles):
    """Static files with the headers of this page."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                told = [(k.encode(), v.encode()) for k, v in HEADERS.items()]
                message["headers"] = [*message["headers"], *told]
            await send(message)

        await super().__call__(scope, receive, with_headers)


async def index() -> FileResponse:
    return FileResponse(WEB / "index.html", headers=HEADERS)


def install(app: FastAPI) -> None:
    """Serve the page at / and its parts under /web."""
    app.add_api_route("/", index, methods=["GET", "HEAD"], include_in_schema=False)
    app.mount("/web", Pages(directory=WEB), name="web")
