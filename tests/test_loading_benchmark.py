"""The loading benchmark on a small geometry: real shards, read, loaded and drawn."""

import argparse
from pathlib import Path

import pytest
import torch

from benchmarks import loading
from engine.models.presets import Preset
from sparse_attn import ops

SMALL = Preset(
    "small", "janus", dummy=True,
    config={
        "text_config": {
            "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96,
            "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 256,
        },
        "vision_config": {"image_size": 16, "patch_size": 4},
        "vq_config": {
            "num_embeddings": 64, "latent_channels": 32, "base_channels": 32,
            "channel_multiplier": [1, 1, 2], "num_res_blocks": 1, "projection_dim": 64,
            "image_token_embed_dim": 64,
        },
    },
)  # fmt: skip


@pytest.mark.parametrize(("dtype", "backend"), [("fp32", "native"), ("bf16", "reference")])
def test_a_small_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, backend: str
) -> None:
    if backend == "native" and ops.why_not():
        pytest.fail(f"the native operators must be built for the tests: {ops.why_not()}")
    monkeypatch.setattr(loading, "presets", lambda: {"small": SMALL})
    settings = argparse.Namespace(
        dtype=dtype, device="cpu", backend=backend, shard_gib=1e-4, draw=True, steps=None,
        policy="window", sparsity=0.5,
    )  # fmt: skip
    row = loading.measure("small", settings, tmp_path)
    assert row["shards"] > 3
    assert row["file_bytes"] == sum(f.stat().st_size for f in tmp_path.iterdir())
    wider = torch.float32.itemsize // torch.bfloat16.itemsize if dtype == "fp32" else 1
    assert row["stays_bytes"] >= 0.8 * wider * row["file_bytes"]
    assert row["finished"]
    assert row["steps"] >= 15
