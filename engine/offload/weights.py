"""Weights on disk: while one layer computes, the next is read into the other buffer.

FlexGen's rule says which tensors of a layer live on disk, its tensors and devices hold them, and
its `general_copy` moves them. A layer always uses the same buffer, so its tensors are views that
never change and a step makes no objects.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from engine.offload.disk import OffloadError
from engine.offload.layer_tensors import mapped, tensors_of
from engine.offload.placement import Share

if TYPE_CHECKING:
    from engine.offload.flexgen_adapter import Copy

ALIGNMENT = 64


def buffer_of(layer: int, layers: int) -> int:
    """Which buffer a layer uses: two take turns; of an odd number of layers the last has a third,
    so that no neighbour in the circle of layers shares one."""
    return 2 if layers % 2 and layers > 1 and layer == layers - 1 else layer % 2


def buffer_count(layers: int) -> int:
    return len({buffer_of(i, layers) for i in range(layers)})


class WeightStream:
    """Moves `share.disk` percent of each layer's weights to `folder` and brings them back in time.

    `add` takes the layers in order, and `need(layer)` is called before a layer computes.
    """

    def __init__(self, layers: int, share: Share, folder: Path, overlap: bool = True) -> None:
        from engine.offload import flexgen_adapter

        self._flexgen = flexgen_adapter
        self.layers, self.share, self.overlap = layers, share, overlap
        self._host, self._disk = flexgen_adapter.Host(), flexgen_adapter.Disk(folder)
        self._buffers: list[Any] = [None] * buffer_count(layers)
        self._files: list[Any] = []
        self._loads: dict[int, Copy] = {}
        self.read_bytes = 0

    @property
    def disk_bytes(self) -> int:
        """Bytes of weights on disk: what one step reads."""
        return sum(int(file.bytes) for file in self._files)

    @property
    def buffer_bytes(self) -> int:
        return sum(int(buffer.bytes) for buffer in self._buffers if buffer is not None)

    def add(self, part: object) -> None:
        """The next layer. Raises OffloadError if the disk is too full."""
        held = tensors_of(part)
        homes = self._flexgen.homes([t.nbytes for t in held], self.share)
        away = [t for t, home in zip(held, homes, strict=True) if home == "disk"]
        places = list(_places(away))
        size = max(1, places[-1] + away[-1].nbytes) if away else 1
        buffer = self._buffer(size)
        image = buffer.data[:size]
        for tensor, at in zip(away, places, strict=True):
            image[at : at + tensor.nbytes].copy_(_bytes(tensor))
        self._files.append(self._write(size, image))
        views = {id(t): _like(t, buffer.data, at) for t, at in zip(away, places, strict=True)}
        mapped(part, lambda t: views.get(id(t), t))

    def need(self, layer: int) -> None:
        """Wait for a layer's weights, and start on the next layer's. Raises OffloadError."""
        if layer not in self._loads:
            self._load(layer)
        try:
            self.read_bytes += self._loads.pop(layer).wait()
        except OffloadError:
            self.cancel()
            raise
        if self.overlap and self.layers > 1:
            self._load((layer + 1) % self.layers)

    def cancel(self) -> None:
        """Forget what is being read; returns when nothing is."""
        for load in self._loads.values():
            try:
                load.wait()
            except OffloadError:
                continue
        self._loads.clear()

    def close(self) -> None:
        self.cancel()
        self._disk.close_copy_threads()

    def _load(self, layer: int) -> None:
        if layer in self._loads:
            return
        file = self._files[layer]
        part = slice(0, file.shape[0])
        buffer = self._buffers[buffer_of(layer, self.layers)]
        whole = None if part.stop == buffer.shape[0] else (part,)
        self._loads[layer] = self._flexgen.copy(buffer, whole, file, None)

    def _write(self, size: int, image: Tensor) -> Any:
        file = self._disk.allocate((size,), np.uint8)
        source = self._host.allocate((size,), np.uint8)
        source.data.copy_(image)
        self._flexgen.copy(file, None, source, None).wait()
        return file

    def _buffer(self, size: int) -> Any:
        """The buffer of the layer being added. Layers of one model are alike."""
        index = buffer_of(len(self._files), self.layers)
        if self._buffers[index] is None:
            self._buffers[index] = self._host.allocate((size,), np.uint8)
        if self._buffers[index].shape[0] < size:
            raise ValueError("layers of different sizes cannot share a buffer")
        return self._buffers[index]


class LayerKeeper:
    """Moves the layers of a model away while it is loaded: `LoadOptions.keep`. stream: what it made
    of them; None if the model did not call it."""

    def __init__(self, share: Share, folder: Path, overlap: bool) -> None:
        self._how = share, folder, overlap
        self.stream: WeightStream | None = None

    def __call__(self, part: object, layer: int, layers: int) -> None:
        if self.stream is None:
            self.stream = WeightStream(layers, *self._how)
        self.stream.add(part)

    def close(self) -> None:
        if self.stream is not None:
            self.stream.close()


def _places(tensors: Sequence[Tensor]) -> Iterator[int]:
    """First byte of each tensor, aligned."""
    at = 0
    for tensor in tensors:
        yield at
        at += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _like(tensor: Tensor, memory: Tensor, at: int) -> Tensor:
    """A tensor like `tensor` over bytes of `memory`."""
    view: Tensor = memory[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
    return view
