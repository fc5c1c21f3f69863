"""`bishop serve`: its flags, and the server they describe."""

from typing import TYPE_CHECKING, Annotated

import typer

from commands import options as flags
from commands.refusal import Refusal, as_refusal
from scheduler.request import ImageRequest, PolicyChoice, RequestError

if TYPE_CHECKING:
    from engine.service_api import ImageService


def serve(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    model: flags.Model = "mini",
    policy: flags.Policy = None,
    sparsity: flags.Sparsity = None,
    policy_option: flags.PolicyOptions = None,
    backend: flags.BackendFlag = "auto",
    threads: flags.Threads = None,
    cache_mib: flags.CacheMib = None,
    max_images: flags.MaxImages = 16,
    dtype: flags.Dtype = "fp32",
    kv_format: flags.KVFormat = "bf16",
    load_format: flags.LoadFormatFlag = "auto",
    body_limit: Annotated[int, typer.Option(min=1, help="Bytes of a request body.")] = 1 << 20,
    stuck_seconds: Annotated[
        float, typer.Option(help="A step that takes longer makes /health fail.")
    ] = 60.0,
    stop_seconds: Annotated[
        int, typer.Option(min=0, help="How long requests may go on after SIGTERM.")
    ] = 30,
) -> int:
    """Serve OpenAI's Images API. Policy flags are the defaults of requests that name none."""
    from commands.opening import open_service
    from serving.config import ServerConfig
    from serving.run import ListenError, listen, run

    engine = flags.EngineFlags(
        model=model,
        backend=backend,
        threads=threads,
        cache_mib=cache_mib,
        max_images=max_images,
        dtype=dtype,
        kv_format=kv_format,
        load_format=load_format,
    )
    default = flags.default_policy(policy, sparsity, policy_option)
    try:
        config = ServerConfig(
            host=host,
            port=port,
            policy=default,
            body_limit=body_limit,
            stuck_seconds=stuck_seconds,
            stop_seconds=stop_seconds,
        )
        claimed = listen(config)
    except (ValueError, ListenError) as error:
        raise Refusal(str(error)) from None
    with claimed:
        service = open_service(engine, default)
        _check(service, default)
        run(service, config, claimed)
    return 0


def _check(service: "ImageService", policy: PolicyChoice) -> None:
    """A default that no request could use is refused at the start."""
    try:
        service.check(ImageRequest("a", 0, service.model.sampling, policy=policy))
    except RequestError as error:
        raise as_refusal(error) from None
