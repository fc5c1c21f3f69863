"""Model folders from the Hugging Face hub: HF_HOME and HF_HUB_OFFLINE are honoured."""

import re
from pathlib import Path

from engine.weights import WeightError

ALWAYS = ("*.json", "*.model", "tokenizer*", "*.txt", "vqgan.*", "decoder.jit")
SAFE, TORCH = "*.safetensors", "*.bin"


def is_hub_id(name: str) -> bool:
    """Whether a name has the form owner/name."""
    return re.fullmatch(r"[\w.-]+/[\w.-]+", name) is not None


def snapshot(name: str) -> Path:
    """The folder of a hub id, downloaded unless it is in the cache. Raises WeightError.

    Files of torch's own format are fetched only where a repository has no safetensors.
    """
    from huggingface_hub import constants, snapshot_download

    try:
        if constants.HF_HUB_OFFLINE:
            return Path(snapshot_download(name, local_files_only=True))
        return Path(snapshot_download(name, allow_patterns=[*ALWAYS, _weights(name)]))
    except Exception as error:
        offline = " (HF_HUB_OFFLINE is set)" if constants.HF_HUB_OFFLINE else ""
        raise WeightError(
            f"cannot fetch {name!r} from the hub{offline}: {type(error).__name__}: "
            f"{str(error).splitlines()[0]}; give a local folder, or put the repository into "
            f"{constants.HF_HUB_CACHE}"
        ) from error


def _weights(name: str) -> str:
    from huggingface_hub import HfApi

    files = HfApi().list_repo_files(name)
    return SAFE if any(file.endswith(".safetensors") for file in files) else TORCH


def cached() -> dict[str, Path]:
    """Repositories in the hub's cache that have a config.json: id -> newest snapshot."""
    from huggingface_hub import constants, scan_cache_dir

    if not Path(constants.HF_HUB_CACHE).is_dir():
        return {}
    found = {}
    for repo in scan_cache_dir().repos:
        newest = max(repo.revisions, key=lambda r: r.last_modified, default=None)
        if newest is not None and (newest.snapshot_path / "config.json").is_file():
            found[repo.repo_id] = newest.snapshot_path
    return found
