"""Dense Qwen3. Modules are named like the checkpoint's; q/k/v and gate/up are fused."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812

from decodestep.accel.config import ModelConfig
from decodestep.accel.forward_context import ForwardContext
from decodestep.accel.layers.linear import Linear, linear_packed, packed
from decodestep.accel.layers.norm import RMSNorm
from decodestep.accel.layers.rotary import RotaryEmbedding, rotate

Factors = tuple[torch.Tensor, torch.Tensor]
_ROWS_TO_NARROW = 1024  # at a time: they stay in the processor's cache


class Qwen3Attention(torch.nn.Module):
    """Self-attention with a norm on each head's query and key."""

    def __init__(self, config: ModelConfig, layer: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer = layer
        self.num_heads = config.num_attention_heads
        self.num_kv_heads = config.num_key_value_heads
        self.head_dim = config.head_dim
        rows = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        bias = config.attention_bias
        self.qkv_proj = Linear(config.hidden_size, rows, bias, dtype)
        self.o_proj = Linear(self.num_heads * self.head_dim, config.hidden_size, bias, dtype)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps, dtype)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps, dtype)

    def forward(self, x: torch.Tensor, factors: Factors, context: ForwardContext) -> torch.Tensor:
        """[T, hidden] to [T, hidden]."""
        qkv = self.qkv_proj(x).view(x.shape[0], -1, self.head_dim)
        query, key, value = qkv.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1)
        query = rotate(self.q_norm(query), *factors)
        key = rotate(self.k_norm(key), *factors)
        out: torch.Tensor = self.o_proj(context.attention.execute(self.layer, query, key, value))
        return out


class Qwen3MLP(torch.nn.Module):
    """SwiGLU."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate_up_proj = Linear(config.hidden_size, 2 * config.intermediate_size, bias=False, dtype=dtype)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=False, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden] to [T, hidden]."""
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        out: torch.Tensor = self.down_proj(F.silu(gate).mul_(up))
        return out


class Qwen3DecoderLayer(torch.nn.Module):
    """One layer."""

    def __init__(self, config: ModelConfig, layer: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.self_attn = Qwen3Attention(config, layer, dtype)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.mlp = Qwen3MLP(config, dtype)

    def forward(self, x: torch.Tensor, factors: Factors, context: ForwardContext) -> torch.Tensor:
        """[T, hidden] to [T, hidden]."""
        x = x + self.self_attn(self.input_layernorm(x), factors, context)
        out: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Embedding(torch.nn.Module):
    """Rows of the vocabulary, and the head that a tied model makes of them."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        shape = (config.vocab_size, config.hidden_size)
        self.weight = torch.nn.Parameter(torch.empty(shape, dtype=dtype), False)
        self._dtype = dtype
        self._is_head = config.tie_word_embeddings
        self._packed: torch.Tensor | None = None

    def pack(self) -> None:
        """Give the head a copy in its kernel's layout, and keep the rows in 16 bits where those hold them."""
        if self._is_head:
            self._packed = packed(self.weight)
        if self._packed is not None or not self._is_head:
            self.weight = torch.nn.Parameter(_narrowed(self.weight), False)

    @property
    def is_packed(self) -> bool:
        """Whether the head has a copy in its kernel's layout."""
        return self._packed is not None

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[T] to [T, hidden]."""
        return F.embedding(token_ids, self.weight).to(self._dtype)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, hidden] to [N, vocab]."""
        if self._packed is None:
            return F.linear(hidden, self.weight)
        return linear_packed(hidden, self._packed, None)


def _narrowed(weight: torch.Tensor) -> torch.Tensor:
    """The same numbers in bfloat16, if it can hold them all: those of a bfloat16 checkpoint in float32."""
    if weight.dtype is not torch.float32:
        return weight
    narrow = torch.empty_like(weight, dtype=torch.bfloat16)
    for row in range(0, len(weight), _ROWS_TO_NARROW):
        rows = slice(row, row + _ROWS_TO_NARROW)
        if not torch.equal(narrow[rows].copy_(weight[rows]).float(), weight[rows]):
            return weight
    return narrow


class Qwen3Model(torch.nn.Module):
    """Embedding, layers and the final norm."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.embed_tokens = Embedding(config, dtype)
        self.layers = torch.nn.ModuleList(
            Qwen3DecoderLayer(config, layer, dtype) for layer in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.rotary = RotaryEmbedding(config.rope, config.head_dim)

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """input_ids and positions [T] to [T, hidden]."""
        factors = self.rotary.factors(positions, self.dtype)
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer(x, factors, context)
        out: torch.Tensor = self.norm(x)
        return out


class Qwen3ForCausalLM(torch.nn.Module):
    """The model with its head. Build it under `torch.device("meta")` and fill it with load_weights."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.dtype = dtype
        self.model = Qwen3Model(config, dtype)
        self.lm_head: Linear | None = None
        if not config.tie_word_embeddings:
            self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False, dtype=dtype)

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """Tokens [T] at positions [T] to hidden states [T, hidden], the final norm included."""
        out: torch.Tensor = self.model(input_ids, positions, context)
        return out

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [N, hidden] to float32 logits [N, vocab]."""
        if self.lm_head is None:
            return self.model.embed_tokens.logits(hidden).float()
        out: torch.Tensor = self.lm_head(hidden)
        return out.float()
