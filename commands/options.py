"""Flags that several commands share, and how their text is read."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from commands.refusal import Refusal
from scheduler.request import PolicyChoice, RequestError

Option = str | int | float | bool

Backend = Literal["auto", "native", "reference"]
LoadFormat = Literal["auto", "dummy"]

Model = Annotated[
    str,
    typer.Option(help="Preset (see `bishop models`), folder or hub id.", metavar="NAME"),
]
Policy = Annotated[
    str | None, typer.Option(help="Attention policy (see `bishop policies`).", metavar="NAME")
]
Sparsity = Annotated[
    float | None,
    typer.Option(help="Share of the visual keys that each head leaves unread, in [0, 1)."),
]
PolicyOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--policy-option", help="An option of the policy; repeatable.", metavar="KEY=VALUE"
    ),
]
BackendFlag = Annotated[
    Backend, typer.Option("--backend", help="reference is slow and needs no compiled kernels.")
]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads; all cores if not given.")]
CacheMib = Annotated[int | None, typer.Option(min=1, help="KV cache in MiB.")]
Data = Annotated[
    Path | None,
    typer.Option(help="Folder of batch jobs; $BISHOP_DATA or ~/.local/state/bishop if not given."),
]
DatabaseUrl = Annotated[
    str | None,
    typer.Option(help="Job database: sqlite:///PATH or postgresql://...; in --data if not given."),
]
StorageUrl = Annotated[
    str | None,
    typer.Option(help="Job files: a folder or s3://BUCKET/PREFIX; in --data if not given."),
]
MaxImages = Annotated[int, typer.Option(min=1, help="Images drawn at the same time, at most.")]
Dtype = Annotated[str, typer.Option(help="Of weights and activations: fp32, bf16, fp16.")]
KVFormat = Annotated[str, typer.Option(help="Of stored keys and values: fp32, bf16, fp16, int8.")]
LoadFormatFlag = Annotated[
    LoadFormat, typer.Option("--load-format", help="dummy draws from random weights.")
]
WeightsPlacement = Annotated[
    str, typer.Option(help="Percent of the layers' weights on GPU,CPU,disk.", metavar="G,C,D")
]
KVPlacement = Annotated[
    str, typer.Option(help="Percent of the KV cache on GPU,CPU,disk.", metavar="G,C,D")
]
OffloadDir = Annotated[
    Path | None, typer.Option(help="Folder for what is placed on disk; nothing stays there.")
]
TensorParallelSize = Annotated[
    int,
    typer.Option(min=1, help="Processes of this machine that share the model, head by head."),
]
HostMemoryLimitGb = Annotated[
    float | None, typer.Option(help="Host memory that weights, KV and buffers may take, in GB.")
]
IN_MEMORY = "0,100,0"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFlags:
    """What the flags above say of an engine; the fields are those of `engine.config`."""

    model: str = "mini"
    backend: Backend = "auto"
    threads: int | None = None
    cache_mib: int | None = None
    max_images: int = 16
    dtype: str = "fp32"
    kv_format: str = "bf16"
    load_format: LoadFormat = "auto"
    weights_placement: str = IN_MEMORY
    kv_placement: str = IN_MEMORY
    offload_dir: Path | None = None
    host_memory_limit_gb: float | None = None
    tensor_parallel_size: int = 1


def parse_options(pairs: Sequence[str] | None, flag: str = "--policy-option") -> dict[str, Option]:
    """{"sink": 4} of ["sink=4"]; true, false and numbers are read as such. Raises Refusal."""
    options: dict[str, Option] = {}
    for pair in pairs or []:
        key, equals, value = pair.partition("=")
        if not (key and equals):
            raise Refusal(f"{flag}: expected KEY=VALUE, got {pair!r}")
        options[key] = _value(value)
    return options


def _value(text: str) -> Option:
    if text in ("true", "false"):
        return text == "true"
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text


def default_policy(
    name: str | None, sparsity: float | None, options: list[str] | None
) -> PolicyChoice:
    """The policy of requests that name none. Raises Refusal."""
    pairs = tuple(sorted(parse_options(options).items()))
    try:
        return PolicyChoice(name or "dense", sparsity or 0.0, pairs)
    except RequestError as error:
        raise Refusal(f"--sparsity: {error}") from None
