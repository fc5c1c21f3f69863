"""Reading Hugging Face's config.json: values it leaves out are those of the model's class."""

from collections.abc import Mapping
from typing import Any

from engine.models.decoder import DecoderConfig
from engine.weights import WeightError

LLAMA: dict[str, Any] = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": None, "rms_norm_eps": 1e-6,
    "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "rope_theta": 10000.0,
}  # fmt: skip
"""Defaults of LlamaConfig."""


class Values:
    """A JSON object with defaults; a missing or wrongly typed value is an error that names it."""

    def __init__(self, values: Any, defaults: Mapping[str, Any], where: str) -> None:
        if not isinstance(values, Mapping):
            raise WeightError(f"{where} must be an object, got {type(values).__name__}")
        self._values, self._defaults, self._where = values, defaults, where

    def get(self, key: str, default: Any = None) -> Any:
        value = self._values.get(key)
        return self._defaults.get(key, default) if value is None else value

    def count(self, key: str) -> int:
        """A positive whole number."""
        value = self.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise WeightError(f"{self._where}: {key} must be a positive number, got {value!r}")
        return value

    def number(self, key: str) -> float:
        value = self.get(key)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise WeightError(f"{self._where}: {key} must be a number, got {value!r}")
        return float(value)

    def flag(self, key: str) -> bool:
        return bool(self.get(key, False))

    def numbers(self, key: str) -> tuple[int, ...]:
        value = self.get(key)
        if not isinstance(value, list | tuple):
            raise WeightError(f"{self._where}: {key} must be a list, got {value!r}")
        return tuple(int(v) for v in value)

    def rope(self) -> tuple[float, float]:
        """Base and position divisor of the rotary positions, in the new and the old spelling."""
        values = self.get("rope_parameters") or {}
        scaling = self.get("rope_scaling") or {}
        kind = values.get("rope_type") or scaling.get("rope_type") or scaling.get("type")
        if kind not in (None, "default", "linear"):
            raise WeightError(
                f"{self._where}: rope_type {kind!r} is not supported (default, linear)"
            )
        factor = values.get("factor") or scaling.get("factor") or 1.0
        theta = values.get("rope_theta") or self.number("rope_theta")
        return float(theta), float(factor) if kind == "linear" else 1.0

    def decoder(self, **options: Any) -> DecoderConfig:
        """The decoder of a Llama-like config; `options` are what its class fixes."""
        heads, dim = self.count("num_attention_heads"), self.count("hidden_size")
        act = self.get("hidden_activation") or self.get("hidden_act")
        known = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu_tanh"}
        if act not in known or (act == "gelu" and "unit_offset" not in options):
            raise WeightError(f"{self._where}: hidden_act {act!r} is not supported")
        bias = self.flag("attention_bias")
        values: dict[str, Any] = {
            "dim": dim,
            "layers": self.count("num_hidden_layers"),
            "q_heads": heads,
            "kv_heads": self.get("num_key_value_heads") or heads,
            "head_dim": self.get("head_dim") or dim // heads,
            "ffn": self.count("intermediate_size"),
            "norm_eps": self.number("rms_norm_eps"),
            "activation": known[act],
            "qkv_bias": bias,
            "out_bias": bias,
            "mlp_bias": self.flag("mlp_bias"),
        }
        return DecoderConfig(**(values | options))
