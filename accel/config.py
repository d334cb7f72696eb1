"""What a checkpoint's config.json says, and what of it is supported."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding. `kind` is `default`, `linear` or `yarn`; yarn's fields are None elsewhere."""

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
    def from_folder(cls, folder: Path) -> "ModelConfig":
        """Read config.json and generation_config.json.

        Raises ModelError naming every field that is not supported, with its value.
        """
        raise NotImplementedError
