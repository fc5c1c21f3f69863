"""`bishop replicas`: the engines behind a server that was started with --replicas."""

import json as jsonlib
from typing import Annotated, Any

import typer

from commands.batch import SERVER, AsJson, Key, Url
from commands.refusal import Refusal

replicas = typer.Typer(no_args_is_help=True, help="Look at the replicas of a server, change them.")

Name = Annotated[str, typer.Argument(help="A replica, as `list` names it.")]


@replicas.command("list")
def list_(url: Url = SERVER, api_key: Key = None, json: AsJson = False) -> int:
    """Where each replica is, what it draws, and why it was replaced last."""
    return _ask("GET", "", url, api_key, json)


@replicas.command()
def scale(
    count: Annotated[int, typer.Argument(help="How many there are to be.")],
    url: Url = SERVER,
    api_key: Key = None,
    json: AsJson = False,
) -> int:
    """Start more replicas, or let the youngest leave when their pictures have ended."""
    return _ask("POST", "/scale", url, api_key, json, {"replicas": count})


@replicas.command()
def drain(name: Name, url: Url = SERVER, api_key: Key = None, json: AsJson = False) -> int:
    """Let a replica leave when its pictures have ended."""
    return _ask("POST", f"/{name}/drain", url, api_key, json)


@replicas.command()
def restart(
    name: Annotated[str | None, typer.Argument(help="All in turn if not given.")] = None,
    url: Url = SERVER,
    api_key: Key = None,
    json: AsJson = False,
) -> int:
    """Replace a replica, or all one after the other, when their pictures have ended."""
    return _ask("POST", f"/{name}/restart" if name else "/restart", url, api_key, json)


def _ask(method: str, path: str, url: str, key: str | None, json: bool, body: object = None) -> int:
    from commands.remote import Remote

    if any(part in (".", "..") for part in path.split("/")):
        raise Refusal("a replica has no such name; see `bishop replicas list`")
    with Remote(url, key) as remote:
        found = remote.ask(method, f"/bishop/replicas{path}", body)
    _tell(found, json)
    return 0


def _tell(found: dict[str, Any], json: bool) -> None:
    if json:
        print(jsonlib.dumps(found))
        return
    for each in found["data"]:
        print(_line(each))


def _line(replica: dict[str, Any]) -> str:
    where = f"{replica['where']} {replica['pid']}" if replica["pid"] else "-"
    words = (
        f"{replica['name']:<12} {replica['state']:<9}{replica['seconds']:>6.0f} s",
        f"{replica['pictures']:>3} images",
        f"{replica['free_bytes'] >> 20:>7,} MiB free",
        f"{replica['restarts']} restarts",
        where,
    )
    reason = replica["reason"]
    return "  ".join(words) + (f"\n{'':13}replaced: {reason}" if reason else "")
