"""What a checkpoint's config.json says, and what of it is supported."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decodestep.accel.errors import ModelError

CHECKPOINT_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding. `kind` is `default`, `linear` or `yarn`.

    `factor` is linear's and yarn's; the fields after it are yarn's and say nothing elsewhere.
    """

    kind: str
    theta: float
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of one dense Qwen3 model."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int  # the context length in tokens
    rms_norm_eps: float
    attention_bias: bool
    tie_word_embeddings: bool
    rope: RopeConfig
    dtype: str  # of the checkpoint's weights: float32, bfloat16 or float16
    eos_token_ids: tuple[int, ...]  # generation_config.json first, then config.json

    @classmethod
    def from_folder(cls, folder: Path) -> ModelConfig:
        """Read config.json and generation_config.json, with the defaults of transformers' Qwen3Config.

        Raises ModelError naming every field that is not supported, with its value.
        """
        problems: list[str] = []
        values = _read_object(folder / "config.json", problems)
        if values is None:
            raise ModelError(str(folder), problems)
        generation = _read_object(folder / "generation_config.json", problems, is_optional=True) or {}
        fields = _Fields(values, problems)
        _refuse_unsupported(fields)
        heads = fields.integer("num_attention_heads", 32)
        if values.get("num_key_value_heads", 0) is None:
            kv_heads = heads
        else:
            kv_heads = fields.integer("num_key_value_heads", 32)
        if heads % kv_heads and not fields.refused & {"num_attention_heads", "num_key_value_heads"}:
            fields.refuse("num_attention_heads", f"a multiple of num_key_value_heads {kv_heads}", heads)
        head_dim = fields.integer("head_dim", 128)
        if head_dim % 2:
            fields.refuse("head_dim", "an even number")
        context_length = fields.integer("max_position_embeddings", 32768)
        layers = fields.integer("num_hidden_layers", 32)
        _refuse_sliding_window(fields, layers, context_length)
        config = cls(
            vocab_size=fields.integer("vocab_size", 151936),
            hidden_size=fields.integer("hidden_size", 4096),
            intermediate_size=fields.integer("intermediate_size", 22016),
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            max_position_embeddings=context_length,
            rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
            attention_bias=fields.boolean("attention_bias", False),
            tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
            rope=_rope(fields, context_length),
            dtype=_dtype(fields),
            eos_token_ids=_Fields(generation, problems, "generation_config.json: ").token_ids("eos_token_id")
            or fields.token_ids("eos_token_id"),
        )
        if problems:
            raise ModelError(str(folder), problems)
        return config


class _Fields:
    """Reads fields of one JSON object. A value that cannot be used is noted in `problems`, not raised.

    In its place the default is returned, so that reading goes on and all problems are found at once.
    """

    def __init__(self, values: dict[str, Any], problems: list[str], prefix: str = "") -> None:
        self.values = values
        self.problems = problems
        self.prefix = prefix
        self.refused: set[str] = set()

    def refuse(self, name: str, expected: str, value: object = None) -> None:
        """Note that the field's value (`value` where the file has none) is not what is expected."""
        self.refused.add(name)
        text = json.dumps(self.values.get(name, value))
        if name not in self.values and value is None:
            text = "is missing"
        elif len(text) > 120:
            text = f"{text[:117]}..."
        self.problems.append(f"{self.prefix}{name} {text}: expected {expected}")

    def integer(self, name: str, default: int) -> int:
        value = self.values.get(name, default)
        if type(value) is int and value > 0:
            return value
        self.refuse(name, "a positive integer")
        return default

    def number(self, name: str, default: float, above: float = 0.0) -> float:
        value = self.values.get(name, default)
        if type(value) in (int, float) and above < value < math.inf:
            return float(value)
        self.refuse(name, f"a number above {above:g}")
        return default

    def number_or_none(self, name: str) -> float | None:
        """A number above 0; null and 0 mean none."""
        value = self.values.get(name)
        return None if value is None or value == 0 else self.number(name, 1.0)

    def boolean(self, name: str, default: bool) -> bool:
        value = self.values.get(name, default)
        if isinstance(value, bool):
            return value
        self.refuse(name, "true or false")
        return default

    def token_ids(self, name: str) -> tuple[int, ...]:
        """One token id, a list of them, or null for none."""
        value = self.values.get(name)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if all(type(token) is int and token >= 0 for token in ids):
            return tuple(dict.fromkeys(ids))
        self.refuse(name, "a token id, a list of token ids or null")
        return ()


def _read_object(path: Path, problems: list[str], is_optional: bool = False) -> dict[str, Any] | None:
    """The JSON object in a file; None where there is none, which is noted unless the file is optional."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if not is_optional:
            problems.append(
                f"{path.name} is not there: expected a folder with {path.name}, the tokenizer's files and "
                "*.safetensors, as transformers' save_pretrained writes them"
            )
    except OSError as error:
        problems.append(f"{path.name} cannot be read ({error.strerror}): check that it is a readable file")
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError
        problems.append(f"{path.name} is not JSON ({error}): repair it, or fetch the file again")
    else:
        if isinstance(values, dict):
            return values
        problems.append(f"{path.name} holds no JSON object: repair it, or fetch the file again")
    return None


def _refuse_unsupported(fields: _Fields) -> None:
    values = fields.values
    if values.get("model_type") != "qwen3":
        fields.refuse("model_type", '"qwen3"')
    if values.get("architectures") not in (None, ["Qwen3ForCausalLM"]):
        fields.refuse("architectures", '["Qwen3ForCausalLM"]')
    if values.get("hidden_act", "silu") != "silu":
        fields.refuse("hidden_act", '"silu"')
    if values.get("partial_rotary_factor") not in (None, 1):
        fields.refuse("partial_rotary_factor", "1")
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        if values.get(name):
            fields.refuse(name, "none: mixtures of experts are not supported")
    for name in ("quantization_config", "compression_config"):
        if values.get(name) is not None:
            fields.refuse(name, "none: weights have to be float32, bfloat16 or float16")


def _refuse_sliding_window(fields: _Fields, layers: int, context_length: int) -> None:
    """Refuse any layer that transformers would give a window shorter than the context."""
    layer_types = fields.values.get("layer_types")
    if layer_types is not None:
        if not isinstance(layer_types, list) or any(kind != "full_attention" for kind in layer_types):
            fields.refuse("layer_types", '"full_attention" in every layer')
    elif fields.boolean("use_sliding_window", False) and fields.values.get("sliding_window", 0) is not None:
        window = fields.integer("sliding_window", 4096)
        first = fields.values.get("max_window_layers", 28)  # the layers before it have no window
        if window < context_length and not (type(first) is int and first >= layers):
            fields.refuse("use_sliding_window", f"false, or a sliding_window of at least {context_length}")


def _rope(fields: _Fields, context_length: int) -> RopeConfig:
    """Rope parameters in either spelling: `rope_scaling` beside `rope_theta`, or both in `rope_parameters`.

    Where both are there transformers takes `rope_scaling`. Defaults are those of its modeling_rope_utils.
    """
    name = "rope_scaling" if fields.values.get("rope_scaling") else "rope_parameters"
    values = fields.values.get(name) or {}
    if not isinstance(values, dict) or any(isinstance(value, dict) for value in values.values()):
        fields.refuse(name, "one object of rope parameters for all layers")
        return RopeConfig("default", 10000.0)
    rope = _Fields(values, fields.problems, f"{name}.")
    source = rope if "rope_theta" in values else fields
    theta = source.number("rope_theta", 10000.0, above=1.0)
    if values.get("partial_rotary_factor") not in (None, 1):
        rope.refuse("partial_rotary_factor", "1")
    kind_name = "rope_type" if "rope_type" in values else "type"
    kind = values.get(kind_name, "default")
    if kind == "default":
        return RopeConfig("default", theta)
    if kind == "linear":
        return RopeConfig("linear", theta, factor=rope.number("factor", 0.0))
    if kind == "yarn":
        return _yarn(rope, fields, theta, context_length)
    rope.refuse(kind_name, '"default", "linear" or "yarn"')
    return RopeConfig("default", theta)


def _yarn(rope: _Fields, fields: _Fields, theta: float, context_length: int) -> RopeConfig:
    original = context_length
    for source in (rope, fields):  # transformers lets the one beside the rope parameters win
        if "original_max_position_embeddings" in source.values:
            original = source.integer("original_max_position_embeddings", context_length)
    has_factor = rope.values.get("factor", 0) is not None
    has_attention_factor = rope.values.get("attention_factor") is not None
    return RopeConfig(
        "yarn",
        theta,
        factor=rope.number("factor", 0.0) if has_factor else context_length / original,
        original_max_position_embeddings=original,
        attention_factor=rope.number("attention_factor", 1.0) if has_attention_factor else None,
        beta_fast=rope.number_or_none("beta_fast") or 32.0,
        beta_slow=rope.number_or_none("beta_slow") or 1.0,
        mscale=rope.number_or_none("mscale"),
        mscale_all_dim=rope.number_or_none("mscale_all_dim"),
        truncate=rope.boolean("truncate", True),
    )


def _dtype(fields: _Fields) -> str:
    name = "dtype" if fields.values.get("dtype") is not None else "torch_dtype"
    value = fields.values.get(name)
    if value in CHECKPOINT_DTYPES:
        return str(value)
    if value is not None:
        fields.refuse(name, " or ".join(f'"{dtype}"' for dtype in CHECKPOINT_DTYPES))
    return "float32"
