"""`bishop generate`: its flags. The work is in `commands.drawing`, imported when it is needed."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from commands import options as flags
from scheduler.request import MAX_IMAGES

if TYPE_CHECKING:
    from engine.service_api import ImageService


def generate(
    prompt: Annotated[
        list[str] | None, typer.Argument(help="What to draw; several are drawn together.")
    ] = None,
    output: Annotated[
        Path, typer.Option("-o", "--output", help="File; several pictures are numbered after it.")
    ] = Path("out.png"),
    seed: Annotated[
        int | None, typer.Option(help="Picture k of a prompt is drawn from seed + k.")
    ] = None,
    n: Annotated[
        int, typer.Option("-n", "--n", min=1, max=MAX_IMAGES, help="Pictures per prompt.")
    ] = 1,
    prompts: Annotated[
        Path | None, typer.Option(help="A file with one prompt a line; - reads stdin.")
    ] = None,
    model: flags.Model = "mini",
    policy: flags.Policy = None,
    sparsity: flags.Sparsity = None,
    policy_option: flags.PolicyOptions = None,
    size: Annotated[str | None, typer.Option(help="WIDTHxHEIGHT or auto.")] = None,
    negative_prompt: Annotated[str | None, typer.Option(help="What to keep away from.")] = None,
    guidance_scale: Annotated[float | None, typer.Option(help="1 is off.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    top_k: Annotated[int | None, typer.Option(help="0 is off.")] = None,
    top_p: Annotated[float | None, typer.Option(help="1 is off.")] = None,
    grid: Annotated[
        bool, typer.Option("--grid", help="Also write a contact sheet, under the name of -o.")
    ] = False,
    format: Annotated[
        str | None, typer.Option(help="png, jpeg or webp; the name of -o tells it too.")
    ] = None,
    quality: Annotated[int, typer.Option(min=0, max=100, help="Of JPEG and WebP.")] = 95,
    metadata: Annotated[
        bool, typer.Option("--metadata", help="Write seed and model into PNG files.")
    ] = False,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object and nothing else.")
    ] = False,
    backend: flags.BackendFlag = "auto",
    threads: flags.Threads = None,
    cache_mib: flags.CacheMib = None,
    max_images: flags.MaxImages = 16,
    dtype: flags.Dtype = "fp32",
    kv_format: flags.KVFormat = "bf16",
    load_format: flags.LoadFormatFlag = "auto",
    weights_placement: flags.WeightsPlacement = flags.IN_MEMORY,
    kv_placement: flags.KVPlacement = flags.IN_MEMORY,
    offload_dir: flags.OffloadDir = None,
    host_memory_limit_gb: flags.HostMemoryLimitGb = None,
    tensor_parallel_size: flags.TensorParallelSize = 1,
) -> int:
    """Draw pictures of prompts into files."""
    from commands.drawing import Look, draw
    from commands.outputs import Outputs, read_prompts
    from engine.wanted import Wanted

    options = flags.parse_options(policy_option)
    texts = read_prompts(prompt or [], prompts)
    outputs = Outputs.of(output, format, len(texts) * n, grid)
    wanted = [
        Wanted(
            prompt=text,
            n=n,
            seed=seed,
            size=size,
            negative_prompt=negative_prompt,
            guidance_scale=guidance_scale,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            policy=policy,
            sparsity=sparsity,
            policy_options=options,
        )
        for text in texts
    ]
    engine = flags.EngineFlags(
        model=model,
        backend=backend,
        threads=threads,
        cache_mib=cache_mib,
        max_images=max_images,
        dtype=dtype,
        kv_format=kv_format,
        load_format=load_format,
        weights_placement=weights_placement,
        kv_placement=kv_placement,
        offload_dir=offload_dir,
        host_memory_limit_gb=host_memory_limit_gb,
        tensor_parallel_size=tensor_parallel_size,
    )
    look = Look(quality, metadata, json)

    def open_engine() -> "ImageService":
        from commands.opening import open_service

        return open_service(engine)

    return draw(wanted, outputs, look, open_engine)
