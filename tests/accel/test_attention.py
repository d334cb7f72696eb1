"""CPU attention against the formula in float64: ragged rows, scattered blocks, ratios of heads, dtypes."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import make_checkpoint

from decodestep.accel.attention.base import AttentionMetadata
from decodestep.accel.attention.cpu import CpuAttention
from decodestep.accel.config import ModelConfig
from decodestep.accel.kv_cache import blocks_for

NUM_BLOCKS = 64
LAYERS = 2
# Of outputs that are means of values in [-1, 1]. In 16 bits the scores and weights are rounded too.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


class Cache:
    """An attention backend, and what its cache should hold, in float64."""

    def __init__(
        self, folder: Path, heads: int, kv_heads: int, size: int, block: int, dtype: torch.dtype
    ) -> None:
        shape = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": size}
        config = ModelConfig.from_folder(make_checkpoint(folder, shape))
        self.attention = CpuAttention(config, NUM_BLOCKS, block, dtype)
        self.heads, self.kv_heads, self.size, self.block, self.dtype = heads, kv_heads, size, block, dtype
        self.random = np.random.default_rng(heads * 100 + kv_heads * 10 + block)
        self.free = list(self.random.permutation(np.arange(1, NUM_BLOCKS)))
        self.blocks: dict[int, list[int]] = {}
        self.past: dict[int, list[list[tuple[torch.Tensor, torch.Tensor]]]] = {}

    def hold(self, name: int, blocks: list[int]) -> None:
        """Choose a sequence's blocks."""
        self.blocks[name] = blocks
        self.free = [block for block in self.free if block not in blocks]

    def step(self, rows: dict[int, int]) -> None:
        """Append as many tokens as it says to each sequence, in every layer, and compare."""
        slots, lengths = [], []
        for name, count in rows.items():
            past = self.past.setdefault(name, [[] for _ in range(LAYERS)])
            start = len(past[0])
            held = self.blocks.setdefault(name, [])
            while len(held) < blocks_for(start + count, self.block):
                held.append(self.free.pop())
            slots += [
                held[at // self.block] * self.block + at % self.block for at in range(start, start + count)
            ]
            lengths.append(start + count)
        width = max(len(self.blocks[name]) for name in rows)
        # What is beyond a row's blocks is undefined: here blocks of nobody.
        tables = np.full((len(rows), width + 1), NUM_BLOCKS - 1, dtype=np.int32)
        for row, name in enumerate(rows):
            tables[row, : len(self.blocks[name])] = self.blocks[name]
        self.attention.prepare(
            AttentionMetadata(list(rows.values()), lengths, torch.from_numpy(tables), torch.tensor(slots)),
            graph_mode=False,
        )
        for layer in range(LAYERS):
            query, key, value = (
                torch.from_numpy(self.random.uniform(-1, 1, (len(slots), heads, self.size))).to(self.dtype)
                for heads in (self.heads, self.kv_heads, self.kv_heads)
            )
            have = self.attention.execute(layer, query * 4, key, value)
            want = []
            begin = 0
            for name, count in rows.items():
                past = self.past[name][layer]
                for at in range(begin, begin + count):
                    past.append((key[at].double(), value[at].double()))
                    want.append(self._formula(query[at].double() * 4, past))
                begin += count
            assert have.shape == (len(slots), self.heads * self.size)
            assert have.dtype is self.dtype
            assert (have.double() - torch.stack(want)).abs().max() <= TOLERANCE[self.dtype]

    def _formula(self, query: torch.Tensor, past: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        """softmax(q K^T / sqrt(d)) V of one query, head by head."""
        keys, values = (torch.stack(side) for side in zip(*past, strict=True))
        out = []
        for head in range(self.heads):
            group = head // (self.heads // self.kv_heads)
            weights = (keys[:, group] @ query[head] / math.sqrt(self.size)).softmax(-1)
            out.append(weights @ values[:, group])
        return torch.cat(out)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("block", [1, 8, 32])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 4, 16), (6, 2, 10), (8, 1, 32), (16, 8, 128)])
def test_ragged_rows_in_scattered_blocks(
    tmp_path: Path, heads: int, kv_heads: int, size: int, block: int, dtype: torch.dtype
) -> None:
    cache = Cache(tmp_path, heads, kv_heads, size, block, dtype)
    cache.step({0: 7, 1: 1, 2: 8})  # prompts: one token, up to a block's end
    cache.step({1: 1, 2: 1, 0: 1})  # a decode step: across a block's end, another order
    cache.step({2: 1, 3: 9, 0: 5, 1: 3})  # decode, a prompt and two chunks behind what is there
    cache.step({3: 1, 2: 1})
    cache.step({4: 1})  # one row alone
    cache.step({4: 1})
    cache.step({4: 6})


@pytest.mark.parametrize("counts", [(40, 1), (1, 40), (17, 24), (40, 20)])
def test_consecutive_blocks_and_scattered_ones_are_the_same(tmp_path: Path, counts: tuple[int, int]) -> None:
    cache = Cache(tmp_path, 4, 2, 16, 8, torch.float32)
    cache.hold(0, list(range(8, 16)))  # a run
    cache.hold(1, [20, 21, 23, 22, 40, 41, 3, 2])
    cache.hold(2, [63, 62, 61, 60, 59, 58, 57, 56])
    for count in counts:
        cache.step(dict.fromkeys((1, 0, 2), count))


def test_what_others_hold_is_not_read(tmp_path: Path) -> None:
    """Not even multiplied by a weight of 0: NaN would come through."""
    cache = Cache(tmp_path, 4, 2, 16, 8, torch.float32)
    for tensor in cache.attention._keys + cache.attention._values:
        tensor.fill_(float("nan"))
    cache.hold(0, [8, 9, 10])
    cache.step({0: 13, 1: 5, 2: 8})
    cache.step({0: 1, 1: 1, 2: 1})
    cache.step({0: 4, 2: 1})
