"""The interface of an attention backend with a paged KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """The rows of one forward. The tokens of all rows stand one after another: T = sum(query_lengths).

    Row r's queries are its last query_lengths[r] positions; each attends to all positions up to its own.
    """

    query_lengths: list[int]  # [R] new tokens a row, >= 1
    kv_lengths: list[int]  # [R] tokens whose KV exists once this forward has written its own
    block_tables: torch.Tensor  # [R, W] int32 on the host, W * block_size >= max(kv_lengths); tail undefined
    slot_mapping: torch.Tensor  # [T] int64 on the device: block id * block_size + offset of each new token


class AttentionBackend(Protocol):
    """Writes new keys and values into the paged cache and attends over it. Owns no graph life cycle."""

    def prepare(self, metadata: AttentionMetadata, graph_mode: bool) -> None:
        """Take the host arguments of the next forward; `execute` then runs once a layer."""
        ...

    def execute(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Attend in layer `layer`.

        query [T, heads, head_dim], key and value [T, kv_heads, head_dim], already rotated.
        Returns [T, heads * head_dim].
        """
        ...
