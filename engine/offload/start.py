"""Opening an engine's offload: whatever cannot work is refused here, with numbers."""

import os
from dataclasses import replace
from pathlib import Path

from engine.config import EngineConfig
from engine.models.base import VisualModel
from engine.models.options import LoadOptions
from engine.models.presets import load_model
from engine.offload.disk import OffloadError
from engine.offload.kv_tier import BUFFERS, KVTier
from engine.offload.layer_tensors import memory_of
from engine.offload.placement import Share
from engine.offload.regions import StagedLayer
from engine.offload.run import Offload
from engine.offload.weights import LayerKeeper, WeightStream
from sparse_attn.geometry import Grid
from sparse_attn.layout import CacheLayout
from sparse_attn.policies import build
from sparse_attn.policy import Heads

STAGING = 64 << 20
INDEX_BYTES = 32
"""More than any index keeps beside a key."""


def check_start(config: EngineConfig) -> None:
    """What can be said before the model is loaded. Raises ValueError or OffloadError."""
    offload, placement = config.offload, config.offload.placement
    for flag, share in (("weights", placement.weights), ("kv", placement.cache)):
        if share.gpu and config.device.type == "cpu":
            raise ValueError(
                f"--{flag}-placement {share}: this engine computes on the CPU and has no GPU; give "
                "the GPU's share to the CPU"
            )
    if placement.activations != Share():
        raise ValueError("hidden states stay where they are computed: a step has few of them")
    if placement.compress_weights or placement.compress_cache:
        raise ValueError("compressed placements can be planned but not run: leave compression out")
    if placement.uses_disk:
        if offload.directory is None:
            raise ValueError(f"a placement with {_disk(placement.cache, placement.weights)} on "
                             "disk needs --offload-dir")  # fmt: skip
        _check_folder(offload.directory)
    limit, memory = offload.host_memory_limit, host_memory_bytes()
    if limit is not None and limit > memory:
        raise ValueError(
            f"a host memory limit of {gb(limit)} is more than the {gb(memory)} this machine has"
        )


def load(config: EngineConfig, options: LoadOptions) -> tuple[VisualModel, WeightStream | None]:
    """The model, and where its layers went if they were moved away while it was loaded.

    Raises what `load_model` raises, and OffloadError."""
    placement, folder = config.offload.placement, config.offload.directory
    if not placement.weights.disk or folder is None:
        return load_model(config.model, options), None
    keeper = LayerKeeper(placement.weights, folder, placement.overlap)
    try:
        return load_model(config.model, replace(options, keep=keeper)), keeper.stream
    except BaseException:
        keeper.close()
        raise


def open_offload(
    config: EngineConfig, model: VisualModel, weights: WeightStream | None = None
) -> Offload:
    """Move to disk what belongs there, as far as `load` has not. Raises OffloadError with the
    numbers if it does not fit."""
    placement, folder = config.offload.placement, config.offload.directory
    tier = None
    try:
        if placement.weights.disk and weights is None:
            assert folder is not None, "check_start was called"
            weights = _stream(model, placement.weights, folder, placement.overlap)
        staging = staging_bytes(config, model) if config.cache_on_disk else 0
        _check_memory(config, model, weights, staging)
        if config.cache_on_disk:
            assert folder is not None, "check_start was called"
            memory = config.resolved_cache_bytes - config.cache_on_disk
            reserve = _dense(config, model).bytes
            tier = KVTier(folder, memory, config.cache_on_disk, staging, reserve, placement.overlap)
    except BaseException:
        if weights is not None:
            weights.close()
        raise
    return Offload(weights, tier)


def staging_bytes(config: EngineConfig, model: VisualModel) -> int:
    """Size of each staging buffer. Raises OffloadError if the one asked for is too small."""
    layout = _dense(config, model)
    index = layout.rings[0][0] * len(layout.rings[0]) * INDEX_BYTES
    least = max(StagedLayer.of(layout, i).bytes for i in range(len(layout.rings))) + index
    asked = config.offload.staging_bytes
    if asked is None:
        return max(least, min(STAGING, least * 2 * config.sub_batch_images))
    if asked < least:
        raise OffloadError(f"a staging buffer of {gb(asked)} is too small: a layer of one sequence "
                           f"takes up to {gb(least)}")  # fmt: skip
    return asked


def host_memory_bytes() -> int:
    """Memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def gb(count: float) -> str:
    return f"{count / 1e9:.3g} GB"


def _stream(model: VisualModel, share: Share, folder: Path, overlap: bool) -> WeightStream:
    stream = WeightStream(model.shape.layers, share, folder, overlap)
    try:
        for layer in range(model.shape.layers):
            stream.add(model.layer_weights(layer))
    except BaseException:
        stream.close()
        raise
    return stream


def _check_memory(
    config: EngineConfig, model: VisualModel, weights: WeightStream | None, staging: int
) -> None:
    limit = config.offload.host_memory_limit
    if limit is None:
        return
    parts = {
        "weights": memory_of(model) - (0 if weights is None else weights.buffer_bytes),
        "buffers of weights": 0 if weights is None else weights.buffer_bytes,
        "KV cache": config.resolved_cache_bytes - config.cache_on_disk,
        "buffers of KV": BUFFERS * staging,
    }
    total = sum(parts.values())
    if total > limit:
        listed = ", ".join(f"{name} {gb(size)}" for name, size in parts.items() if size)
        raise OffloadError(
            f"{gb(total)} of host memory are needed ({listed}), the limit is {gb(limit)}: place "
            "more on disk, or choose a smaller --cache-mib"
        )


def _dense(config: EngineConfig, model: VisualModel) -> CacheLayout:
    """The cache of the largest picture the model draws."""
    grids = [model.grid_of(size) for size in model.sizes]
    grid: Grid = max(grids, key=lambda g: g.tokens)
    heads = Heads(model.shape.layers, model.shape.kv_heads)
    policy = build("dense", grid, heads, 0.0, {}, model.name)
    return CacheLayout.of(policy, model.shape.prompt, model.shape.head_dim, config.format)


def _check_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError("it is not writable")
    except OSError as error:
        raise OffloadError(f"cannot write into the offload folder {folder}: {error}") from error


def _disk(cache: Share, weights: Share) -> str:
    parts = [("weights", weights), ("KV", cache)]
    return " and ".join(f"{share.disk:g} % of {name}" for name, share in parts if share.disk)
