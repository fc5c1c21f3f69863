"""`bishop batch`: many pictures from a file, on a server or without one."""

import json as jsonlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from commands import options as flags
from commands.refusal import FAILED, Refusal

if TYPE_CHECKING:
    from commands.remote import Remote

batch = typer.Typer(no_args_is_help=True, help="Draw many pictures from a file.")

Url = Annotated[str, typer.Option(help="Address of the server.", envvar="BISHOP_URL")]
Key = Annotated[
    str | None, typer.Option(help="API key; $BISHOP_API_KEY or $OPENAI_API_KEY if not given.")
]
Id = Annotated[str, typer.Argument(help="Id of the batch.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
Folder = Annotated[Path, typer.Option("-o", "--output", help="Folder for results.")]

SERVER = "http://127.0.0.1:8000"


@batch.command()
def submit(
    file: Annotated[Path, typer.Argument(help="prompts.jsonl, prompts.txt or prompts.csv.")],
    url: Url = SERVER,
    api_key: Key = None,
    wait: Annotated[bool, typer.Option("--wait", help="Follow it to its end.")] = False,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="With --wait: folder for results.")
    ] = None,
    window: Annotated[str, typer.Option(help="Time it may take: 1h to 720h.")] = "24h",
    size: Annotated[str | None, typer.Option(help="WIDTHxHEIGHT, where a line says none.")] = None,
    policy: flags.Policy = None,
    sparsity: flags.Sparsity = None,
    json: AsJson = False,
) -> int:
    """Send a file to a server as one batch."""
    from commands.following import follow
    from commands.tasks import read_tasks

    if output is not None and not wait:
        raise Refusal("-o: results are there with --wait; later: bishop batch results")
    said = {"size": size, "policy": policy, "sparsity": sparsity}
    options = {name: value for name, value in said.items() if value is not None}
    with _open(url, api_key) as remote:
        sent = _send(remote, file.name, read_tasks(file, options))
        started = remote.create(sent, window)
        if not wait:
            return _tell(started, json)
        ended = follow(remote, started["id"], json)
        if output is not None:
            _store(remote, ended, output, json)
        return _tell(ended, json) or (0 if ended["status"] == "completed" else FAILED)


@batch.command()
def status(id: Id, url: Url = SERVER, api_key: Key = None, json: AsJson = False) -> int:
    """How far a batch is."""
    with _open(url, api_key) as remote:
        return _tell(remote.batch(id), json)


@batch.command("list")
def list_(
    url: Url = SERVER,
    api_key: Key = None,
    limit: Annotated[int, typer.Option(min=1, help="The newest so many.")] = 20,
    json: AsJson = False,
) -> int:
    """The batches of this key, the newest first."""
    from commands.following import describe

    with _open(url, api_key) as remote:
        found = list(remote.batches(limit))
    print(jsonlib.dumps({"batches": found}) if json else "\n".join(map(describe, found)))
    return 0


@batch.command()
def results(
    id: Id, output: Folder, url: Url = SERVER, api_key: Key = None, json: AsJson = False
) -> int:
    """Store what a batch has drawn: the result files, and every picture as a file."""
    with _open(url, api_key) as remote:
        found = remote.batch(id)
        if not (found["output_file_id"] or found["error_file_id"]):
            raise Refusal(f"the batch has no results: it is {found['status']}")
        _store(remote, found, output, json)
        return _tell(found, json)


@batch.command()
def cancel(id: Id, url: Url = SERVER, api_key: Key = None, json: AsJson = False) -> int:
    """Stop what has not run; results so far are kept."""
    with _open(url, api_key) as remote:
        return _tell(remote.cancel(id), json)


@batch.command()
def run(
    input: Annotated[Path, typer.Option("-i", "--input-file", help=".jsonl, .txt or .csv.")],
    output: Annotated[Path, typer.Option("-o", "--output-file", help="JSON lines of results.")],
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
    json: AsJson = False,
) -> int:
    """Draw a file without a server. Run it again after an interruption: it goes on where it was."""
    from commands.offline import run_batch
    from commands.opening import open_service

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
    return run_batch(input, output, default, lambda: open_service(engine, default), json)


def _open(url: str, key: str | None) -> "Remote":
    from commands.remote import Remote

    return Remote(url, key)


def _send(remote: "Remote", name: str, tasks: Any) -> str:
    """Upload the tasks; they go through a file, since there may be many."""
    import tempfile

    with tempfile.TemporaryFile() as file:
        for task in tasks:
            file.write(jsonlib.dumps(task).encode() + b"\n")
        file.seek(0)
        return remote.upload(f"{name}.jsonl".replace(".jsonl.jsonl", ".jsonl"), file)


def _store(remote: "Remote", found: dict[str, Any], folder: Path, json: bool) -> None:
    from commands.following import store_results

    pictures, errors = store_results(remote, found, folder)
    if not json:
        print(f"{pictures} pictures and {errors} errors in {folder}")


def _tell(found: dict[str, Any], json: bool) -> int:
    from commands.following import describe

    print(jsonlib.dumps(found) if json else describe(found))
    return 0
