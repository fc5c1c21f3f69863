"""The one module that imports flexgen (0.1.8): its placement language, tensors, devices, copies and
compression, with every defect we know corrected here. Nothing of it is copied into Bishop.

Importing it costs a second (flexgen imports transformers), so it is imported where it is used.
Each correction is named at its place and has a test in tests/engine/offload/test_adapter.py that
fails without it. What cannot serve at all is listed in docs/architecture.md.
"""

import os
import shutil
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flexgen import compression, flex_opt, pytorch_backend, utils
from torch import Tensor

from engine.offload.disk import OffloadError, reserve
from engine.offload.placement import Placement, Share, Tier

__all__ = [
    "GROUPWISE_4_BIT", "Compressed", "Copy", "Disk", "Host", "Link", "Mixed", "copy",
    "from_flexgen", "homes", "to_flexgen",
]  # fmt: skip

# Devices look names up in module globals that only this call fills.
pytorch_backend.fix_recursive_import()

# bfloat16 is in none of the three tables of types; numpy has none, so it stands for itself.
utils.np_dtype_to_torch_dtype[torch.bfloat16] = torch.bfloat16
utils.torch_dtype_to_np_dtype[torch.bfloat16] = torch.bfloat16
utils.torch_dtype_to_num_bytes[torch.bfloat16] = 2

# `TorchLink.io_time` reads a global that nobody defines.
pytorch_backend.force_io_time = None

# Copies of compressed tensors index with lists of slices, which torch takes for index tensors.
_list_indices = compression.get_compressed_indices
compression.get_compressed_indices = lambda *a: tuple(map(tuple, _list_indices(*a)))

GROUPWISE_4_BIT = compression.CompressionConfig(
    num_bits=4, group_size=64, group_dim=0, symmetric=False
)
"""FlexGen's setting for weights: groups of 64 rows, a minimum and a scale each."""

PIECE = 32 << 20
"""Bytes that a copy between disk and device holds on the host at a time."""

Link = pytorch_backend.TorchLink
DISK, MIXED = pytorch_backend.DeviceType.DISK, pytorch_backend.DeviceType.MIXED


# The placement language


def to_flexgen(placement: Placement) -> Any:
    """The same as a `flexgen.flex_opt.Policy`."""
    p = placement
    return flex_opt.Policy(
        p.gpu_batch_size, p.num_gpu_batches, p.weights.gpu, p.weights.cpu, p.cache.gpu,
        p.cache.cpu, p.activations.gpu, p.activations.cpu, p.overlap, sep_layer=True,
        pin_weight=torch.cuda.is_available(), cpu_cache_compute=p.cpu_cache_compute,
        attn_sparsity=1.0, compress_weight=p.compress_weights,
        comp_weight_config=GROUPWISE_4_BIT, compress_cache=p.compress_cache,
        comp_cache_config=GROUPWISE_4_BIT,
    )  # fmt: skip


def from_flexgen(policy: Any) -> Placement:
    """A `flexgen.flex_opt.Policy` as ours. Its attention sparsity is not a placement: dropped."""
    p = policy
    return Placement(
        Share(p.w_gpu_percent, p.w_cpu_percent, p.w_disk_percent),
        Share(p.cache_gpu_percent, p.cache_cpu_percent, p.cache_disk_percent),
        Share(p.act_gpu_percent, p.act_cpu_percent, p.act_disk_percent),
        p.gpu_batch_size, p.num_gpu_batches, p.overlap, p.cpu_cache_compute, p.compress_weight,
        p.compress_cache,
    )  # fmt: skip


def homes(sizes: Sequence[int], share: Share) -> list[Tier]:
    """Which tier each tensor of a layer lives on, by FlexGen's rule: in order, disk first, a tensor
    goes where its middle falls."""
    total, percents = sum(sizes), [share.disk, share.cpu, share.gpu]
    ends = np.cumsum(sizes)
    middles = [
        100 * (end - size / 2) / max(1, total) for end, size in zip(ends, sizes, strict=True)
    ]
    return [flex_opt.get_choice(m, percents, ("disk", "cpu", "gpu")) for m in middles]


# Devices


class Host(pytorch_backend.TorchDevice):  # type: ignore[misc]
    """Memory of the CPU. FlexGen's pins by default, which fails without CUDA, and its CPU's
    synchronise calls CUDA; this one pins only where there is CUDA."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.compressed_device = Compressed(self)

    def allocate(
        self, shape: Sequence[int], dtype: Any, pin_memory: bool | None = None,
        name: str | None = None,
    ) -> Any:  # fmt: skip
        pinned = torch.cuda.is_available() if pin_memory is None else pin_memory
        return super().allocate(tuple(shape), dtype, pin_memory=pinned, name=name)

    def synchronize(self) -> None:
        if torch.cuda.is_available():
            super().synchronize()


class Disk(pytorch_backend.TorchDisk):  # type: ignore[misc]
    """Tensors in files of a folder of their own below `path`.

    FlexGen's starts four threads that pin 2 GiB each and die without CUDA; an error in one of them
    hangs `synchronize` for ever; two processes in one folder overwrite each other's `t_0`; files
    are sparse, so that a full disk is a bus error in the middle of a run; and one that cannot be
    made complains again when it is collected. Here one pool copies in pieces of `PIECE` bytes,
    errors come out of `Copy.wait`, and space is reserved when a tensor is made.

    Raises OffloadError if the folder cannot be made or written.
    """

    copy_queue = None

    def __init__(self, path: Path, threads: int = 1) -> None:
        self._pool: ThreadPoolExecutor | None = None
        try:
            path.mkdir(parents=True, exist_ok=True)
            own = tempfile.mkdtemp(prefix="bishop-", dir=path)
        except OSError as error:
            raise OffloadError(f"cannot write into the offload folder {path}: {error}") from error
        super().__init__(own, num_copy_threads=0)
        self.copy_queue = None
        self.compressed_device = Compressed(self)
        self._pool = ThreadPoolExecutor(threads, "bishop-disk")
        self._pending: list[Future[int]] = []

    def allocate(
        self, shape: Sequence[int], dtype: Any, pin_memory: bool | None = None,
        name: str | None = None,
    ) -> Any:  # fmt: skip
        """Raises OffloadError with numbers if the disk is too full."""
        stored = np.float16 if dtype is torch.bfloat16 else dtype
        tensor = super().allocate(tuple(shape), stored, name=name)
        tensor.dtype = utils.np_dtype_to_torch_dtype[dtype]
        with open(tensor.data, "rb+") as file:  # noqa: PTH123 - a file name of FlexGen's
            reserve(file.fileno(), os.fstat(file.fileno()).st_size, Path(self.path))
        return tensor

    def submit_copy(self, dst: Any, dst_indices: Any, src: Any, src_indices: Any) -> None:
        assert self._pool is not None, "this disk is closed"
        future = self._pool.submit(_copy_piecewise, dst, dst_indices, src, src_indices)
        self._pending = [f for f in self._pending if not f.done()] + [future]
        _SUBMITTED.append(future)

    def synchronize(self) -> None:
        """Wait for every copy submitted; raises what one of them raised."""
        for future in self._pending:
            future.result()
        self._pending.clear()

    def close_copy_threads(self) -> None:
        """End the threads and remove the files."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
            shutil.rmtree(self.path, ignore_errors=True)

    def __del__(self) -> None:
        if getattr(self, "_pool", None) is not None:
            self.close_copy_threads()


class Mixed(pytorch_backend.TorchMixedDevice):  # type: ignore[misc]
    """A tensor cut over several devices. FlexGen's `delete` names an attribute that is not there,
    and a tensor that is deleted does not ask it to."""

    def allocate(
        self, shape: Sequence[int], dtype: Any, seg_lengths: Sequence[int],
        pin_memory: bool | None = None, name: str | None = None,
    ) -> Any:  # fmt: skip
        tensor = super().allocate(tuple(shape), dtype, seg_lengths, pin_memory, name)
        tensor.delete = lambda: self.delete(tensor)
        return tensor

    def delete(self, tensor: Any) -> None:
        parts, _ = tensor.data
        for part in parts:
            if part is not None:
                part.delete()
        tensor.device = tensor.data = None


class Compressed(compression.TorchCompressedDevice):  # type: ignore[misc]
    """Group-wise 4 bit on a device.

    FlexGen's takes fp16 alone; divides by zero in a group whose numbers are all equal; fills the
    last group up with zeros, which widen its range; says that what it made of fp16 is fp32; on a
    CPU needs a workspace that only its own attention makes; and cuts the last group with an index
    that torch no longer takes.
    """

    def allocate(
        self, shape: Sequence[int], dtype: Any, comp_config: Any, pin_memory: bool | None = None,
        name: str | None = None,
    ) -> Any:  # fmt: skip
        kind = utils.np_dtype_to_torch_dtype[dtype]
        tensor = super().allocate(tuple(shape), np.float16, comp_config, pin_memory, name)
        tensor.dtype = kind
        data, scale, config = tensor.data
        scale = self.base_device.allocate(scale.shape, np.float32, pin_memory=pin_memory)
        tensor.data = (data, scale, config)
        return tensor

    def compress(self, tensor: Tensor, comp_config: Any) -> Any:
        whole = _padded(tensor.float(), comp_config.group_dim, comp_config.group_size)
        packed = super().compress(whole, comp_config)
        packed.shape, packed.dtype = tensor.shape, tensor.dtype
        data, scale, config = packed.data
        dim = config.group_dim
        bounds = scale.data
        flat = bounds.select(dim + 1, 0).isinf().unsqueeze(dim + 1)
        codes = data.data.unflatten(dim, (-1, config.group_size // 2))
        codes.masked_fill_(flat, 0)
        bounds.narrow(dim + 1, 0, 1).masked_fill_(flat, 1.0)
        return packed

    def decompress(self, tensor: Any) -> Tensor:
        """The numbers of a compressed tensor, in its dtype."""
        dim, size = tensor.data[2].group_dim, tensor.data[2].group_size
        whole = list(tensor.shape)
        groups = -(-whole[dim] // size)
        whole[dim] = groups * size
        padded = pytorch_backend.TorchTensor(tuple(whole), tensor.dtype, tensor.data, self)
        self.data_decompress_workspace = [
            torch.empty(*whole[:dim], groups, size, *whole[dim + 1 :])
        ]
        numbers: Tensor = super().decompress(padded)
        self.data_decompress_workspace = None  # type: ignore[assignment]
        return numbers.narrow(dim, 0, tensor.shape[dim]).to(tensor.dtype, copy=True).contiguous()


def _padded(tensor: Tensor, dim: int, size: int) -> Tensor:
    """`tensor` with its last slice repeated up to a whole number of groups."""
    missing = -tensor.shape[dim] % size
    last = tensor.narrow(dim, tensor.shape[dim] - 1, 1)
    return torch.cat([tensor, last.repeat_interleave(missing, dim)], dim) if missing else tensor


# Copies

_SUBMITTED: list[Future[int]] = []
_COPYING = threading.Lock()


class Copy:
    """A copy under way."""

    def __init__(self, futures: list[Future[int]]) -> None:
        self._futures = futures

    def wait(self) -> int:
        """Bytes that crossed to or from a disk. Raises OffloadError if it failed."""
        try:
            return sum(future.result() for future in self._futures)
        except OSError as error:
            raise OffloadError(f"the offload folder cannot be read or written: {error}") from error


def copy(dst: Any, dst_indices: Any, src: Any, src_indices: Any) -> Copy:
    """FlexGen's `general_copy`, dst[dst_indices] = src[src_indices], and a way to wait for this
    copy alone (its own wait is for everything)."""
    with _COPYING:
        _SUBMITTED.clear()
        pytorch_backend.general_copy(dst, dst_indices, src, src_indices)
        return Copy(list(_SUBMITTED))


def _copy_piecewise(dst: Any, dst_indices: Any, src: Any, src_indices: Any) -> int:
    """One copy with a disk at an end, in a thread of the pool; returns its bytes."""
    target = _view(dst, dst_indices)
    if src.device.device_type == DISK and not src_indices and _is_plain(target):
        return _read_file(src, target)
    source = _view(src, src_indices)
    rows = max(1, PIECE // max(1, source[0].nbytes)) if source.ndim and len(source) else 1
    for start in range(0, len(source), rows):
        target[start : start + rows].copy_(source[start : start + rows])
    return source.nbytes


def _is_plain(target: Tensor) -> bool:
    return target.device.type == "cpu" and target.is_contiguous()


def _read_file(src: Any, target: Tensor) -> int:
    """A whole file into host memory by plain reads, which are half again as fast as its mapping."""
    size, at = target.nbytes, 0
    into = target.view(torch.uint8).view(-1).numpy().data
    with open(src.data, "rb", buffering=0) as file:  # noqa: PTH123
        start = os.fstat(file.fileno()).st_size - size
        while at < size:
            done = os.preadv(file.fileno(), [into[at : at + PIECE]], start + at)
            if not done:
                raise OSError(f"{src.data} ends {size - at} bytes early")
            at += done
    return size


def _view(tensor: Any, indices: Any) -> Tensor:
    data = tensor.data
    if tensor.device.device_type == DISK:
        data = torch.from_numpy(np.lib.format.open_memmap(data, mode="r+"))
        data = data.view(tensor.dtype) if tensor.dtype == torch.bfloat16 else data
    picked: Tensor = data[tuple(indices)] if indices else data
    return picked
