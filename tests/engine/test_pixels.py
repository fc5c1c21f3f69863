"""Pixel decoding within a memory limit: batches and strips change nothing but memory."""

import os
import subprocess
import sys

import pytest
import torch

from engine.models.emu3_vq import Emu3VQConfig, Emu3VQDecoder
from engine.models.pixels import Pixels
from engine.models.vqgan import VQGANConfig, VQGANDecoder

VQ = VQGANConfig(codes=64, latent_channels=32, base_channels=32, channel_multiplier=(1, 1, 2))
EMU = Emu3VQConfig(
    codebook_size=64, base_channels=32, channel_multiplier=(1, 2, 2), attn_resolutions=(2,)
)


def decoder(kind: str) -> torch.nn.Module:
    torch.manual_seed(0)
    return VQGANDecoder(VQ) if kind == "vqgan" else Emu3VQDecoder(EMU)


@pytest.mark.parametrize("kind", ["vqgan", "emu3"])
def test_strips_and_batches_change_nothing(kind: str) -> None:
    module, tokens = decoder(kind), torch.randint(0, 64, (3, 5, 7))
    whole = Pixels(module, 1 << 30)
    expected = whole.decode(tokens)
    assert whole.fit(3, 5, 7) == (3, 1)
    with torch.inference_mode():
        for strips in (2, 3, 5, 32):
            assert (module(tokens, strips) - expected).abs().max() < 1e-4
    one = Pixels(module, whole.needed(1, 1, 5, 7))
    assert one.fit(3, 5, 7) == (1, 1)
    assert (one.decode(tokens) - expected).abs().max() < 1e-4
    tight = Pixels(module, whole.needed(1, 8, 5, 7))
    assert tight.fit(3, 5, 7) == (1, 8)
    assert (tight.decode(tokens) - expected).abs().max() < 1e-4
    with pytest.raises(MemoryError, match=r"needs \d+ MiB, but pixel_memory is 0 MiB"):
        Pixels(module, 1000).decode(tokens)


MEASURE = """
import sys, threading, time
from pathlib import Path
import torch
from engine.models.emu3_vq import Emu3VQConfig, Emu3VQDecoder
from engine.models.pixels import Pixels
from engine.models.vqgan import VQGANConfig, VQGANDecoder

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

kind, side, strips = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
if kind == "vqgan":
    sizes = {"channel_multiplier": (1, 1, 2, 2), "base_channels": 32, "latent_channels": 32}
    module = VQGANDecoder(VQGANConfig(codes=64, res_blocks=1, **sizes))
else:
    sizes = {"channel_multiplier": (1, 2, 2), "base_channels": 32, "attn_resolutions": (2,)}
    module = Emu3VQDecoder(Emu3VQConfig(codebook_size=64, num_res_blocks=1, **sizes))
pixels = Pixels(module, 1 << 40)
pixels.memory = pixels.needed(1, strips, side, side)
assert pixels.fit(1, side, side) == (1, strips), pixels.fit(1, side, side)
tokens = torch.randint(0, 64, (1, side, side))
pixels.decode(tokens[:1, :2, :2])
before, peak, done = resident(), 0, False
def watch():
    global peak
    while not done:
        peak = max(peak, resident())
        time.sleep(0.0005)
thread = threading.Thread(target=watch)
thread.start()
pixels.decode(tokens)
done = True
thread.join()
print(peak - before, pixels.memory)
"""


@pytest.mark.parametrize("strips", [1, 8])
@pytest.mark.parametrize(("kind", "side"), [("vqgan", 28), ("emu3", 56)])
def test_the_limit_holds(kind: str, side: int, strips: int) -> None:
    """What the process grows by stays below the limit. The allocator is told to give memory back at
    once, so that what is measured is what lives."""
    command = [sys.executable, "-c", MEASURE, kind, str(side), str(strips)]
    lean = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    printed = subprocess.run(
        command, capture_output=True, text=True, check=True, env=lean
    ).stdout.split()
    grown, limit = map(int, printed)
    assert grown <= limit, f"{grown / limit:.2f} of the limit"
    assert grown >= 0.1 * limit, "the estimate is far too careful, or nothing was measured"
