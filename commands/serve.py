"""`bishop serve`: its flags, and the server they describe."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from commands import options as flags
from commands.refusal import Refusal, as_refusal
from scheduler.request import ImageRequest, PolicyChoice, RequestError

if TYPE_CHECKING:
    from engine.service_api import ImageService
    from serving.config import ServerConfig

LogFormat = Literal["text", "json"]


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
    weights_placement: flags.WeightsPlacement = flags.IN_MEMORY,
    kv_placement: flags.KVPlacement = flags.IN_MEMORY,
    offload_dir: flags.OffloadDir = None,
    host_memory_limit_gb: flags.HostMemoryLimitGb = None,
    tensor_parallel_size: flags.TensorParallelSize = 1,
    body_limit: Annotated[int, typer.Option(min=1, help="Bytes of a request body.")] = 1 << 20,
    stuck_seconds: Annotated[
        float, typer.Option(help="A step that takes longer makes /health fail.")
    ] = 60.0,
    stop_seconds: Annotated[
        int, typer.Option(min=0, help="How long requests may go on after SIGTERM.")
    ] = 30,
    request_seconds: Annotated[
        float, typer.Option(help="How long one request may wait and draw.")
    ] = 600.0,
    queue_images: Annotated[
        int, typer.Option(min=1, help="Pictures that may wait or be drawn; more are a 429.")
    ] = 256,
    api_keys: Annotated[
        Path | None, typer.Option(help="YAML file of API keys; see docs/operations.md.")
    ] = None,
    log_format: Annotated[LogFormat, typer.Option(help="text or json.")] = "text",
    data: flags.Data = None,
    database: flags.DatabaseUrl = None,
    storage: flags.StorageUrl = None,
    no_jobs: Annotated[
        bool, typer.Option("--no-jobs", help="Neither /v1/files nor /v1/batches.")
    ] = False,
    batch_lines: Annotated[
        int, typer.Option(min=1, help="Lines of batches in an engine at once.")
    ] = 16,
    lease_seconds: Annotated[
        float, typer.Option(help="Silence after which other servers take over batch work.")
    ] = 15.0,
    replicas: Annotated[
        str | None,
        typer.Option(
            help="Engines, each a Ray actor with a GPU or --threads CPUs of its own; auto: as many "
            "as there is room for. One engine in this process if not given.",
            metavar="N|auto",
        ),
    ] = None,
    ray_address: Annotated[
        str | None,
        typer.Option(help="Ray to join (auto, HOST:PORT); one on this machine if not given."),
    ] = None,
    silent_seconds: Annotated[
        float, typer.Option(help="Silence after which a replica counts as lost.")
    ] = 10.0,
) -> int:
    """Serve OpenAI's Images API. Policy flags are the defaults of requests that name none."""
    from commands.jobs import jobs_config
    from commands.opening import ReplicaFlags, open_fleet, open_service
    from serving.config import ServerConfig
    from serving.keys import load
    from serving.run import ListenError, listen, run
    from serving.traces import configured

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
    default = flags.default_policy(policy, sparsity, policy_option)
    if replicas is None and ray_address is not None:
        raise Refusal("--ray-address: say how many --replicas there are to be")
    fleet = (
        ReplicaFlags.of(replicas, ray_address, silent_seconds, stuck_seconds) if replicas else None
    )
    try:
        config = ServerConfig(
            host=host,
            port=port,
            policy=default,
            body_limit=body_limit,
            stuck_seconds=stuck_seconds,
            stop_seconds=stop_seconds,
            request_seconds=request_seconds,
            queue_images=queue_images,
            keys=load(api_keys, os.environ),
            log_format=log_format,
            jobs=None if no_jobs else jobs_config(data, database, storage, lease_seconds),
            batch_lines=batch_lines,
        )
        tracer = configured()
        claimed = listen(config)
    except (ValueError, ListenError) as error:
        raise Refusal(str(error)) from None
    with claimed:
        _check_jobs(config)
        service = open_fleet(engine, fleet, default) if fleet else open_service(engine, default)
        try:
            _check(service, default)
        except Refusal:
            service.stop()
            raise
        run(service, config, claimed, tracer)
    return 0


def _check_jobs(config: "ServerConfig") -> None:
    """A job store that cannot be opened is refused before anything slow is done."""
    from scheduler.jobs.errors import StoreUnavailable
    from scheduler.jobs.store import JobStore

    if config.jobs is None:
        return
    try:
        JobStore(config.jobs).close()
    except (ValueError, StoreUnavailable) as error:
        raise Refusal(f"batch jobs (--data, --database, --storage, --no-jobs): {error}") from None


def _check(service: "ImageService", policy: PolicyChoice) -> None:
    """A default that no request could use is refused at the start."""
    try:
        service.check(ImageRequest("a", 0, service.model.sampling, policy=policy))
    except RequestError as error:
        raise as_refusal(error) from None
