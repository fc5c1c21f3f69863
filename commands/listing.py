"""`bishop models` and `bishop policies`: what there is to choose from."""

import inspect
from collections.abc import Iterator
from dataclasses import asdict
from json import dumps
from typing import Annotated, Any, get_args

import typer

from commands.refusal import FAILED, Refusal
from commands.units import size

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


def models(
    path: Annotated[
        str | None, typer.Argument(help="Folder or hub id: say what it is and what it needs.")
    ] = None,
    json: AsJson = False,
) -> int:
    """List the models: what can run, and what the others lack. With a PATH, check that one."""
    return _list(json) if path is None else _check(path, json)


def _list(json: bool) -> int:
    from engine.models import catalog

    found = [asdict(model) for model in catalog.models()]
    families = [asdict(family) for family in catalog.families()]
    if json:
        print(dumps({"models": found, "families": families}))
        return 0
    width = max(len(model["name"]) for model in found)
    print("\n".join(_model_line(model, width) for model in found))
    titles = "; ".join(family["title"] for family in families)
    print(f"Families whose weights load from a folder or hub id: {titles}")
    return 0


def _model_line(model: dict[str, Any], width: int) -> str:
    state = "ready" if model["missing"] is None else f"cannot run: {model['missing']}"
    return f"{model['name']:<{width}}  {model['description']} ({state})"


def _check(path: str, json: bool) -> int:
    """Exit code 0 if it can run, 1 if not."""
    from engine.models import catalog

    try:
        found = catalog.check(path)
    except ValueError as error:
        raise Refusal(str(error)) from None
    values = asdict(found) | {"path": str(found.path), "can_run": found.can_run}
    if json:
        print(dumps(values))
    else:
        print("\n".join(_facts(values)))
    return 0 if found.can_run else FAILED


def _facts(check: dict[str, Any]) -> Iterator[str]:
    yield f"{check['path']}: {check['architecture']}, family {check['family']}"
    sizes = ", ".join(f"{width}x{height}" for width, height in check["sizes"])
    yield f"draws {sizes} in {check['visual_tokens']} visual tokens, {check['layers']} layers"
    needs = {"weights": "weight_bytes", "KV of an image": "kv_bytes", "free": "available_bytes"}
    yield ", ".join(f"{name} {size(check[key])}" for name, key in needs.items())
    yield "it can run" if check["can_run"] else "it cannot run:"
    yield from (f"  {problem}" for problem in check["problems"])


def policies(json: AsJson = False) -> int:
    """List the attention policies and their options."""
    from sparse_attn.policies import POLICIES

    found = [_policy(name) for name in POLICIES]
    print(dumps({"policies": found}) if json else "\n\n".join(map(_policy_text, found)))
    return 0


def _policy(name: str) -> dict[str, Any]:
    from sparse_attn.policies import POLICIES, options_of

    options = {
        key: {
            "type": _type_name(option.annotation),
            "required": option.default is inspect.Parameter.empty,
            "default": None if option.default is inspect.Parameter.empty else option.default,
        }
        for key, option in options_of(name).items()
    }
    sparse = "sparsity" in inspect.signature(POLICIES[name].__init__).parameters
    text = inspect.getdoc(POLICIES[name])
    return {"name": name, "description": text, "sparsity": sparse, "options": options}


def _type_name(annotation: Any) -> str:
    """`int` of int and of int | None; types that cannot be typed in are left out."""
    members = get_args(annotation) or (annotation,)
    return " or ".join(t.__name__ for t in members if t in (str, int, float, bool))


def _default(option: dict[str, Any]) -> str:
    if option["required"]:
        return " (required)"
    return "" if option["default"] is None else f" (default {option['default']})"


def _policy_text(policy: dict[str, Any]) -> str:
    flags = ["  --sparsity S"] if policy["sparsity"] else []
    flags += [
        f"  --policy-option {key}={option['type'].upper()}{_default(option)}"
        for key, option in policy["options"].items()
    ]
    described = [f"  {line}".rstrip() for line in policy["description"].splitlines()]
    return "\n".join([policy["name"], *described, *flags])
