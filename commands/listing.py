"""`bishop models` and `bishop policies`: what there is to choose from."""

import inspect
from json import dumps
from types import NoneType
from typing import Annotated, Any, get_args

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


def models(json: AsJson = False) -> int:
    """List the models: what can run, and what the others lack."""
    from engine.models.presets import presets

    found = [
        {"name": preset.name, "description": preset.description, "missing": preset.missing}
        for preset in presets().values()
    ]
    print(dumps({"models": found}) if json else "\n".join(map(_model_line, found)))
    return 0


def _model_line(model: dict[str, Any]) -> str:
    state = "ready" if model["missing"] is None else f"cannot run: {model['missing']}"
    return f"{model['name']:<16} {state:<8} {model['description']}"


def policies(json: AsJson = False) -> int:
    """List the attention policies and their options."""
    from sparse_attn.policies import POLICIES

    found = [_policy(name) for name in POLICIES]
    print(dumps({"policies": found}) if json else "\n\n".join(map(_policy_text, found)))
    return 0


def _policy(name: str) -> dict[str, Any]:
    from sparse_attn.policies import POLICIES, options_of

    options = {
        key: {"type": _type_name(option.annotation), "default": option.default}
        for key, option in options_of(name).items()
    }
    sparse = "sparsity" in inspect.signature(POLICIES[name].__init__).parameters
    text = inspect.getdoc(POLICIES[name])
    return {"name": name, "description": text, "sparsity": sparse, "options": options}


def _type_name(annotation: Any) -> str:
    """`int` of int and of int | None."""
    members = [t for t in get_args(annotation) or (annotation,) if t is not NoneType]
    return " or ".join(t.__name__ for t in members)


def _default(value: object) -> str:
    return "" if value is None else f" (default {value})"


def _policy_text(policy: dict[str, Any]) -> str:
    flags = ["  --sparsity S"] if policy["sparsity"] else []
    flags += [
        f"  --policy-option {key}={option['type'].upper()}{_default(option['default'])}"
        for key, option in policy["options"].items()
    ]
    described = [f"  {line}".rstrip() for line in policy["description"].splitlines()]
    return "\n".join([policy["name"], *described, *flags])
