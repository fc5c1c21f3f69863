"""One small checkpoint of every family, for the tests that hold for all of them."""

from collections.abc import Callable
from pathlib import Path

from engine.models.chameleon import Chameleon, LuminaMGPT
from engine.models.family import DecoderModel
from engine.models.janus import Janus
from engine.models.llamagen import LlamaGen
from sparse_attn.attention import Backend
from tests.engine.families import (
    harness,
    test_chameleon,
    test_emu3,
    test_glm_image,
    test_janus,
    test_llamagen,
    test_simplear,
)

Loader = Callable[[Path, Backend], DecoderModel]


def _janus(folder: Path, backend: Backend) -> DecoderModel:
    test_janus.save(folder, num_key_value_heads=2)
    return Janus.load("janus", folder, harness.options(backend))


def _chameleon(folder: Path, backend: Backend) -> DecoderModel:
    test_chameleon.save(folder)
    return Chameleon.load("chameleon", folder, harness.options(backend))


def _lumina(folder: Path, backend: Backend) -> DecoderModel:
    test_chameleon.save(folder, num_key_value_heads=2)
    return test_chameleon.small(LuminaMGPT.load("lumina", folder, harness.options(backend)))


def _emu3(folder: Path, backend: Backend) -> DecoderModel:
    test_emu3.save(folder)
    return test_emu3.load(folder, backend)


def _llamagen(folder: Path, backend: Backend) -> DecoderModel:
    test_llamagen.save(folder, "t2i")
    return LlamaGen.load("llamagen", folder, harness.options(backend))


def _simplear(folder: Path, backend: Backend) -> DecoderModel:
    test_simplear.save_simplear(folder)
    return test_simplear.load_simplear(folder, backend)


def _liquid(folder: Path, backend: Backend) -> DecoderModel:
    test_simplear.save_liquid(folder, head_dim=16)
    return test_simplear.load_liquid(folder, backend)


def _glm_image(folder: Path, backend: Backend) -> DecoderModel:
    test_glm_image.save(folder)
    return test_glm_image.load(folder, backend)


ZOO: dict[str, Loader] = {
    "janus": _janus,
    "chameleon": _chameleon,
    "lumina-mgpt": _lumina,
    "emu3": _emu3,
    "llamagen": _llamagen,
    "simplear": _simplear,
    "liquid": _liquid,
    "glm-image": _glm_image,
}
