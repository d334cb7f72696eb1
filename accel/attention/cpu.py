"""Attention on a CPU: a row at a time, straight from the paged cache where its blocks are consecutive."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812

from decodestep.accel.attention.base import AttentionMetadata
from decodestep.accel.config import ModelConfig


@dataclass(frozen=True, slots=True)
class _Row:
    """Where one row's queries and its keys are."""

    begin: int
    end: int
    kv_length: int
    first_slot: int | None  # its KV is kv_length consecutive slots from here ...
    slots: torch.Tensor | None  # ... or these slots [kv_length] int64
    mask: torch.Tensor | None  # added to scores [queries, kv_length]


class CpuAttention:
    """Owns the paged KV cache: keys and values [layers, blocks * block_size, kv_heads, head_dim].

    Each row is attended by kernel calls of its own, so its result does not depend on its neighbours.
    """

    def __init__(self, config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype) -> None:
        self._num_kv_heads = config.num_key_value_heads
        self._group = config.num_attention_heads // config.num_key_value_heads
        self._head_dim = config.head_dim
        self._block_size = block_size
        shape = (num_blocks * block_size, self._num_kv_heads, self._head_dim)
        # Zeros are not touched until they are written: unused blocks take no memory.
        self._keys = [torch.zeros(shape, dtype=dtype) for _ in range(config.num_hidden_layers)]
        self._values = [torch.zeros(shape, dtype=dtype) for _ in range(config.num_hidden_layers)]
        self._dtype = dtype
        self._offsets = torch.arange(block_size, dtype=torch.int64)
        self._slot_mapping = torch.empty(0, dtype=torch.int64)
        self._rows: list[_Row] = []

    def prepare(self, metadata: AttentionMetadata, graph_mode: bool) -> None:
        """Find each row's slots and masks, once for all layers. There are no graphs on a CPU."""
        self._slot_mapping = metadata.slot_mapping
        self._rows = []
        tables = metadata.block_tables.numpy()
        begin = 0
        for row, (queries, length) in enumerate(
            zip(metadata.query_lengths, metadata.kv_lengths, strict=True)
        ):
            blocks = tables[row, : -(-length // self._block_size)]
            first_slot: int | None = None
            slots: torch.Tensor | None = None
            if len(blocks) == 1 or (np.diff(blocks) == 1).all():
                first_slot = int(blocks[0]) * self._block_size
            else:
                starts = torch.from_numpy(blocks.astype(np.int64)) * self._block_size
                slots = (starts[:, None] + self._offsets).view(-1)[:length]
            mask = self._mask(queries, length) if queries > 1 and queries < length else None
            self._rows.append(_Row(begin, begin + queries, length, first_slot, slots, mask))
            begin += queries

    def execute(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """As in AttentionBackend."""
        keys, values = self._keys[layer], self._values[layer]
        keys.index_copy_(0, self._slot_mapping, key)
        values.index_copy_(0, self._slot_mapping, value)
        if len(self._rows) == 1:
            return self._attend(self._rows[0], query, keys, values)
        out = query.new_empty(query.shape[0], query.shape[1] * query.shape[2])
        for row in self._rows:
            out[row.begin : row.end] = self._attend(row, query[row.begin : row.end], keys, values)
        return out

    def _attend(
        self, row: _Row, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """Query [T, heads, head_dim] of one row to [T, heads * head_dim]."""
        if row.first_slot is not None:
            keys = keys.narrow(0, row.first_slot, row.kv_length)
            values = values.narrow(0, row.first_slot, row.kv_length)
        else:
            keys, values = keys[row.slots], values[row.slots]
        tokens = row.end - row.begin
        kv_heads, group, size = self._num_kv_heads, self._group, self._head_dim
        if tokens == 1:
            # The heads of a group are queries that share a key: no key is read twice.
            out = F.scaled_dot_product_attention(
                query.view(1, kv_heads, group, size),
                keys.transpose(0, 1).unsqueeze(0),
                values.transpose(0, 1).unsqueeze(0),
            )
            return out.reshape(1, -1)
        # [kv_heads, group, tokens, size]; keys are shared by the group through a stride of 0.
        out = F.scaled_dot_product_attention(
            query.view(tokens, kv_heads, group, size).permute(1, 2, 0, 3),
            keys.transpose(0, 1).unsqueeze(1).expand(-1, group, -1, -1),
            values.transpose(0, 1).unsqueeze(1).expand(-1, group, -1, -1),
            attn_mask=row.mask,
            is_causal=row.mask is None,
        )
        return out.permute(2, 0, 1, 3).reshape(tokens, -1)

    def _mask(self, queries: int, length: int) -> torch.Tensor:
        """0 where a query sees a position, -inf beyond its own."""
        mask = torch.full((queries, length), float("-inf"), dtype=self._dtype)
        return mask.triu_(length - queries + 1)
