"""Whatever is wrong with a model is said before memory is taken; the hub's cache works offline."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants

from engine import checkpoint
from engine.config import EngineConfig
from engine.engine import Engine
from engine.models import catalog
from engine.models.chameleon import lumina_sizes
from engine.models.janus import Janus
from engine.models.options import LoadOptions
from engine.models.presets import ModelError, load_model, presets
from engine.models.registry import PUBLISHED
from engine.weights import WeightError
from scheduler.request import RequestError
from tests.engine.families import harness, test_chameleon, test_emu3, test_janus


def edit(folder: Path, file: str, **values: object) -> None:
    path = folder / file
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def drop_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def break_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")


def lose_a_token(folder: Path) -> None:
    edit(folder, "tokenizer_config.json", boi_token="<nowhere>")


def truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])


def no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def unknown_architecture(folder: Path) -> None:
    edit(folder, "config.json", architectures=["LlamaForCausalLM"])


def other_width(folder: Path) -> None:
    values = json.loads((folder / "config.json").read_text())
    values["text_config"]["intermediate_size"] = 128
    edit(folder, "config.json", **values)


def uneven_heads(folder: Path) -> None:
    values = json.loads((folder / "config.json").read_text())
    values["text_config"]["num_key_value_heads"] = 3
    edit(folder, "config.json", **values)


def not_a_number(folder: Path) -> None:
    values = json.loads((folder / "config.json").read_text())
    values["text_config"]["num_hidden_layers"] = "many"
    edit(folder, "config.json", **values)


def strange_rope(folder: Path) -> None:
    values = json.loads((folder / "config.json").read_text())
    values["text_config"]["rope_parameters"] = {"rope_type": "yarn", "rope_theta": 1e4}
    edit(folder, "config.json", **values)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (drop_tokenizer, r"no tokenizer \(tokenizer\.json\)"),
        (break_tokenizer, "cannot read the tokenizer"),
        (lose_a_token, "no token '<nowhere>'"),
        (truncate, r"model\.safetensors is no complete"),
        (no_config, r"cannot read .*config\.json"),
        (unknown_architecture, r"LlamaForCausalLM, which is unknown \(known: JanusFor"),
        (other_width, r"expected \(128, 64\)"),
        (uneven_heads, "4 heads cannot share 3 KV heads"),
        (not_a_number, "num_hidden_layers must be a positive number, got 'many'"),
        (strange_rope, "rope_type 'yarn' is not supported"),
    ],
)
def test_damage_is_named_before_memory_is_taken(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    damage: Callable[[Path], None],
    said: str,
) -> None:
    test_janus.save(tmp_path)
    damage(tmp_path)

    def allocate(*_: object) -> None:
        raise AssertionError("memory was taken")

    monkeypatch.setattr(checkpoint, "_allocate", allocate)
    with pytest.raises((WeightError, ValueError), match=said):
        load_model(str(tmp_path), harness.options())


def test_an_unknown_name_says_what_is_known() -> None:
    with pytest.raises(ModelError, match=r"did you mean 'janus-pro-7b'.*hub id"):
        load_model("janus-pro-7", LoadOptions())


def test_requests_a_model_cannot_serve_are_refused(tmp_path: Path) -> None:
    test_emu3.save(tmp_path)
    engine = harness.engine_of(test_emu3.load(tmp_path))
    with pytest.raises(RequestError, match="does not draw 512x512") as refused:
        engine.add(harness.request("a", size=(512, 512)), print)
    assert refused.value.param == "size"
    with pytest.raises(RequestError, match="takes at most 256") as refused:
        engine.add(harness.request("word " * 200), print)
    assert refused.value.param == "prompt"
    with pytest.raises(RequestError, match="takes at most 256") as refused:
        engine.add(harness.request("a", negative_prompt="word " * 200), print)
    assert refused.value.param == "negative_prompt"
    assert not engine.runner.images


@pytest.mark.parametrize(
    ("spelled", "said"),
    [
        ("a <|image start|> b", "boi_token"), ("a<|extra_200|>", "image tokens"),
        ("<|extra_203|>", "bos_token"),
    ],
)  # fmt: skip
def test_prompts_cannot_spell_out_marks(tmp_path: Path, spelled: str, said: str) -> None:
    test_emu3.save(tmp_path)
    model = test_emu3.load(tmp_path)
    with pytest.raises(ValueError, match=f"spells out .*{said}"):
        model.encode_prompt(spelled, model.grid)


def test_prompt_tokens_bound_prompt_and_cache(tmp_path: Path) -> None:
    test_janus.save(tmp_path)
    small = Janus.load("janus", tmp_path, harness.options(prompt_tokens=40))
    large = Janus.load("janus", tmp_path, harness.options(prompt_tokens=80))
    with pytest.raises(ValueError, match="at most 40"):
        small.encode_prompt("x" * 40, small.grid)
    large.encode_prompt("x" * 40, large.grid)
    from scheduler.request import PolicyChoice

    a, b = (harness.engine_of(m).intake.group(PolicyChoice()).layout.bytes for m in (small, large))
    assert b - a == 40 * 2 * 4 * 2 * 16 * 4  # tokens x layers x heads x (K, V) x head dim x fp32


def hub_cache(root: Path, name: str, files: Path) -> None:
    """The hub's cache layout with one repository in it."""
    repo = root / f"models--{name.replace('/', '--')}"
    shutil.copytree(files, repo / "snapshots" / "abc123")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("abc123")


def test_a_hub_id_loads_from_the_cache_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    test_janus.save(tmp_path / "files")
    hub_cache(tmp_path / "hub", "somebody/Janus-Tiny", tmp_path / "files")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    model = load_model("somebody/Janus-Tiny", harness.options())
    assert model.name == "Janus-Tiny"
    entries = {e.name: e for e in catalog.models()}
    assert entries["somebody/Janus-Tiny"].family == "janus"
    with pytest.raises(WeightError, match=r"cannot fetch 'no/body' from the hub \(HF_HUB_OFFLINE"):
        load_model("no/body", harness.options())


def test_the_catalog_lists_families_and_presets() -> None:
    assert [f.name for f in catalog.families()] == ["mini", *PUBLISHED]
    entries = {e.name: e for e in catalog.models()}
    assert set(presets()) <= set(entries)
    assert entries["tiny"].missing is None


def test_a_check_says_what_a_folder_is(tmp_path: Path) -> None:
    theirs = test_emu3.save(tmp_path, shard="100KB")
    found = catalog.check(str(tmp_path))
    assert (found.family, found.architecture) == ("emu3", "Emu3ForConditionalGeneration")
    assert found.can_run, found.problems
    shared = sum(p.numel() for p in theirs.model.text_model.parameters())
    head = 64 * 64  # rows of the image tokens alone
    decoder = sum(p.numel() for p in theirs.model.vqmodel.decoder.parameters())
    assert shared + head < found.parameters < shared + head + 2 * decoder
    assert found.file_bytes == sum(f.stat().st_size for f in tmp_path.glob("*.safetensors"))
    assert found.weight_bytes == 4 * found.parameters
    half = catalog.check(str(tmp_path), torch.bfloat16)
    assert half.weight_bytes < found.weight_bytes
    assert half.kv_bytes * 2 == found.kv_bytes
    drop_tokenizer(tmp_path)
    next(tmp_path.glob("*-00002-*.safetensors")).unlink()
    broken = catalog.check(str(tmp_path))
    assert not broken.can_run
    assert "tokenizer" in broken.problems[0]
    assert "00002" in broken.problems[1]


def test_a_check_without_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    test_janus.save(tmp_path)
    monkeypatch.setattr(catalog, "available_bytes", lambda: 1000)
    found = catalog.check(str(tmp_path))
    assert not found.can_run
    assert "GiB are free" in found.problems[0]


@pytest.mark.parametrize(
    ("name", "tokens", "layers", "dim"),
    [
        ("janus-pro-1b", 576, 24, 2048), ("janus-pro-7b", 576, 30, 4096),
        ("lumina-mgpt-7b-512", 32 * 33, 32, 4096), ("lumina-mgpt-7b-1024", 64 * 65, 32, 4096),
        ("emu3-gen", 90 * 91, 32, 4096), ("llamagen-xl", 576, 36, 1280),
    ],
)  # fmt: skip
def test_presets_have_the_published_geometry(name: str, tokens: int, layers: int, dim: int) -> None:
    preset = presets()[name]
    family = PUBLISHED[preset.family]
    config = family.configure(preset.config, None)
    assert catalog.default_grid(config).tokens == tokens
    assert (config.decoder.layers, config.decoder.dim) == (layers, dim)
    numbers = sum(torch.Size(p.shape).numel() for p in family.parameters(config))
    least = 12 * layers * dim**2 * 0.75
    assert least < numbers < 2.5 * least


def test_load_format_dummy(tmp_path: Path) -> None:
    """Random weights in the geometry of a folder that has no weights at all."""
    test_chameleon.save(tmp_path)
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    settings = {"cache_bytes": 16 << 20, "backend": harness.fast_backend()}
    config = EngineConfig(model=str(tmp_path), load_format="dummy", **settings)  # type: ignore[arg-type]
    engine = Engine(config)
    assert engine.model.grid.tokens == 16
    [image] = harness.draw(engine, [harness.request("a red cube")])
    assert len(image.tokens) == 16
    assert image.pixels.shape == (16, 16, 3)


def test_lumina_takes_its_sizes_from_config_or_path() -> None:
    from engine.models.chameleon import LuminaMGPT

    for path, target in (
        ("x/Lumina-mGPT-7B-512", 512),
        ("Lumina-mGPT-7B-1024/abc", 1024),
        ("y", 768),
    ):
        assert LuminaMGPT.picture_sizes({}, 512, Path(path)) == lumina_sizes(target)
    assert LuminaMGPT.picture_sizes({"target_size": 512}, 512, Path("y")) == lumina_sizes(512)
