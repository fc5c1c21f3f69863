"""Every known defect of flexgen 0.1.8, corrected: each test fails with flexgen's own part."""

import errno
import gc
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.offload import flexgen_adapter as flexgen
from engine.offload.disk import OffloadError
from engine.offload.placement import Placement, Share

COMPUTING = torch.cuda.is_available()


@pytest.fixture
def host() -> flexgen.Host:
    return flexgen.Host()


@pytest.fixture
def disk(tmp_path: Path) -> Any:
    disk = flexgen.Disk(tmp_path)
    yield disk
    disk.close_copy_threads()


def filled(host: flexgen.Host, data: torch.Tensor) -> Any:
    tensor = host.allocate(data.shape, flexgen.utils.torch_dtype_to_np_dtype[data.dtype])
    tensor.data.copy_(data)
    return tensor


class TestPlacement:
    @given(
        st.tuples(st.integers(0, 100), st.integers(0, 100)).filter(lambda p: sum(p) <= 100),
        st.booleans(),
        st.integers(1, 64),
    )
    def test_there_and_back(self, percent: tuple[int, int], flag: bool, size: int) -> None:
        share = Share(*percent, 100 - sum(percent))
        ours = Placement(share, share, Share(), size, 3, flag, not flag, flag, not flag)
        assert flexgen.from_flexgen(flexgen.to_flexgen(ours)) == ours

    def test_homes_cut_a_layer_where_flexgen_does(self) -> None:
        assert flexgen.homes([10, 20, 30, 40], Share(0, 100, 0)) == ["cpu"] * 4
        assert flexgen.homes([10, 20, 30, 40], Share(0, 0, 100)) == ["disk"] * 4
        assert flexgen.homes([25, 25, 25, 25], Share(25, 25, 50)) == ["disk", "disk", "cpu", "gpu"]

    @pytest.mark.parametrize("text", ["", "50,50", "a,b,c", "60,60,-20", "50,50,50"])
    def test_shares_that_are_none_are_refused(self, text: str) -> None:
        with pytest.raises(ValueError, match=r"100|percentages|negative"):
            Share.parse(text)


class TestTypes:
    def test_bfloat16_is_a_type(self, host: flexgen.Host, disk: Any) -> None:
        data = torch.randn(7, 5).bfloat16()
        here = filled(host, data)
        there = disk.allocate((7, 5), torch.bfloat16)
        back = host.allocate((7, 5), torch.bfloat16)
        assert here.bytes == there.bytes == 70
        flexgen.copy(there, None, here, None).wait()
        flexgen.copy(back, None, there, None).wait()
        assert torch.equal(back.data, data)

    def test_devices_know_the_compressed_device(self, host: flexgen.Host) -> None:
        """`fix_recursive_import` was called."""
        assert isinstance(host.compressed_device, flexgen.Compressed)


@pytest.mark.skipif(COMPUTING, reason="this is about machines without CUDA")
class TestHostWithoutCuda:
    def test_memory_is_not_pinned_unless_there_is_cuda(self, host: flexgen.Host) -> None:
        assert not host.allocate((4,), np.float32).data.is_pinned()

    def test_waiting_calls_no_cuda(self, host: flexgen.Host) -> None:
        host.synchronize()


class TestDisk:
    def test_copies_without_cuda_in_little_memory(self, host: flexgen.Host, disk: Any) -> None:
        data = torch.randn(1000, 64)
        file, back = disk.allocate((1000, 64), np.float32), host.allocate((1000, 64), np.float32)
        assert flexgen.copy(file, None, filled(host, data), None).wait() == data.nbytes
        assert flexgen.copy(back, None, file, None).wait() == data.nbytes
        assert torch.equal(back.data, data)

    def test_parts_of_tensors(self, host: flexgen.Host, disk: Any) -> None:
        file, back = disk.allocate((6, 4), np.int32), host.allocate((3, 4), np.int32)
        data = torch.arange(24, dtype=torch.int32).view(6, 4)
        flexgen.copy(file, None, filled(host, data), None).wait()
        rows = (slice(2, 5), slice(0, 4))
        assert flexgen.copy(back, None, file, rows).wait() == 48
        assert torch.equal(back.data, data[2:5])

    def test_pieces_make_the_whole(
        self, host: flexgen.Host, disk: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(flexgen, "PIECE", 100)
        data = torch.randn(97, 3)
        file, back = disk.allocate((97, 3), np.float32), host.allocate((97, 3), np.float32)
        flexgen.copy(file, None, filled(host, data), None).wait()
        flexgen.copy(back, None, file, None).wait()
        assert torch.equal(back.data, data)

    def test_an_error_in_a_thread_is_told_and_does_not_hang(
        self, host: flexgen.Host, disk: Any
    ) -> None:
        file, back = disk.allocate((8,), np.uint8), host.allocate((8,), np.uint8)
        Path(file.data).unlink()
        with pytest.raises(OffloadError, match="cannot be read"):
            flexgen.copy(back, None, file, None).wait()
        with pytest.raises(FileNotFoundError):
            disk.synchronize()

    def test_two_disks_in_one_folder_do_not_meet(self, host: flexgen.Host, tmp_path: Path) -> None:
        first, second = flexgen.Disk(tmp_path), flexgen.Disk(tmp_path)
        one, two = (d.allocate((4,), np.uint8, name="same") for d in (first, second))
        flexgen.copy(one, None, filled(host, torch.ones(4, dtype=torch.uint8)), None).wait()
        flexgen.copy(two, None, filled(host, torch.zeros(4, dtype=torch.uint8)), None).wait()
        back = host.allocate((4,), np.uint8)
        flexgen.copy(back, None, one, None).wait()
        assert back.data.tolist() == [1, 1, 1, 1]
        first.close_copy_threads(), second.close_copy_threads()
        assert not list(tmp_path.iterdir())

    def test_space_is_taken_when_a_tensor_is_made(self, disk: Any) -> None:
        file = disk.allocate((1 << 20,), np.uint8)
        assert Path(file.data).stat().st_blocks * 512 >= 1 << 20

    def test_a_full_disk_is_refused_with_numbers(
        self, disk: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(*_: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr("os.posix_fallocate", full)
        with pytest.raises(OffloadError, match=r"no room for 0.001 GB \(.* GB are free"):
            disk.allocate((1_000_000,), np.uint8)

    def test_a_folder_that_cannot_be_made_is_refused_once(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "file").touch()
        unraisable: list[object] = []
        monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
        with pytest.raises(OffloadError, match="cannot write into the offload folder"):
            flexgen.Disk(tmp_path / "file" / "below")
        gc.collect()
        assert not unraisable


class TestMixed:
    def test_deleting_a_tensor_deletes_its_parts(self, host: flexgen.Host, disk: Any) -> None:
        mixed = flexgen.Mixed([host, disk])
        tensor = mixed.allocate((4, 10), np.float32, [6, 4])
        flexgen.copy(tensor, None, filled(host, torch.randn(4, 10)), None).wait()
        files = list(Path(disk.path).iterdir())
        assert len(files) == 1
        tensor.delete()
        assert not files[0].exists()

    def test_a_link_tells_its_time(self, host: flexgen.Host, disk: Any) -> None:
        link = flexgen.Link(host, disk, 2e9, 1e9)
        assert link.io_time(host, disk, 1e9) == pytest.approx(0.5)
        assert link.io_time(disk, host, 1e9) == pytest.approx(1.0)


class TestCompression:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
    @pytest.mark.parametrize("rows", [64, 100, 3])
    def test_numbers_come_back_within_half_a_step(
        self, host: flexgen.Host, dtype: torch.dtype, rows: int
    ) -> None:
        data = torch.randn(rows, 9).to(dtype)
        packed = host.compressed_device.compress(data, flexgen.GROUPWISE_4_BIT)
        back = host.compressed_device.decompress(packed)
        assert back.dtype == packed.dtype == dtype and back.shape == data.shape
        numbers = data.float()
        step = (numbers.amax(0) - numbers.amin(0)) / 15
        rounding = 0.01 * numbers.abs()  # of bf16
        assert ((back.float() - numbers).abs() <= step / 2 + rounding + 1e-5).all()

    def test_a_group_of_equal_numbers_is_exact(self, host: flexgen.Host) -> None:
        data = torch.randn(128, 4)
        data[:64] = torch.tensor([0.0, 3.0, -2.0, 1e-3])
        packed = host.compressed_device.compress(data, flexgen.GROUPWISE_4_BIT)
        assert packed.data[1].data.isfinite().all()
        assert torch.equal(host.compressed_device.decompress(packed)[:64], data[:64])

    def test_compressed_tensors_move_to_disk_and_back(self, host: flexgen.Host, disk: Any) -> None:
        config, data = flexgen.GROUPWISE_4_BIT, torch.randn(100, 6)
        packed = host.compressed_device.compress(data, config)
        there = disk.compressed_device.allocate((100, 6), np.float32, config)
        back = host.compressed_device.allocate((100, 6), np.float32, config)
        flexgen.copy(there, None, packed, None).wait()
        flexgen.copy(back, None, there, None).wait()
        expected = host.compressed_device.decompress(packed)
        assert torch.equal(host.compressed_device.decompress(back), expected)

    def test_results_are_kept_apart(self, host: flexgen.Host) -> None:
        """A second decompression must not change what the first gave."""
        one, two = torch.randn(64, 3), torch.randn(64, 3)
        device = host.compressed_device
        packed = [device.compress(x, flexgen.GROUPWISE_4_BIT) for x in (one, two)]
        first = device.decompress(packed[0])
        kept = first.clone()
        device.decompress(packed[1])
        assert torch.equal(first, kept)


def test_nobody_else_imports_flexgen() -> None:
    root = Path(__file__).resolve().parents[3]
    rooms = ("engine", "scheduler", "sparse_attn", "serving", "commands")
    users = [
        path for room in rooms for path in (root / room).rglob("*.py")
        if any(line.split()[:2] in (["import", "flexgen"], ["from", "flexgen"])
               or line.startswith(("from flexgen.", "import flexgen."))
               for line in map(str.strip, path.read_text().splitlines()))
    ]  # fmt: skip
    assert users == [root / "engine" / "offload" / "flexgen_adapter.py"]
